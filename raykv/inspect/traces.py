"""Traces: which chunks were asked for, request by request, as the simulations replay them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raykv.base.errors import SettingError
from raykv.inspect import trace_files
from raykv.inspect.trace_files import Request

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Trace:
    """Requests in their order.

    A request is the numbers of its chunks, from the head of its prompt; equal numbers mean equal
    prefixes. `num_asked[r]` of them are looked up, those of the prompt; the rest are of generated
    tokens, and only stored. `chunk_tokens` is the number of tokens of a chunk.
    """

    requests: list[Request]
    num_asked: list[int]
    chunk_tokens: int

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_lookups(self) -> int:
        """Chunks that are looked up, those of all requests together."""
        return sum(self.num_asked)

    @property
    def num_distinct(self) -> int:
        """Chunks that differ: what a pool in which all have room would hold."""
        return len({chunk for request in self.requests for chunk in request})

    def save(self, path: str) -> None:
        """Write it as JSON lines with `hash_ids`, for `read_trace` and `raykv bench policy`."""
        rows = zip(self.requests, self.num_asked, strict=True)
        lines = [json.dumps({"hash_ids": request, "num_asked": asked}) for request, asked in rows]
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_trace(path: str, chunk_tokens: int) -> Trace:
    """A trace out of a file of JSON lines: `hash_ids`, and `num_asked` if not all are looked up.

    Args:
        path: of the file.
        chunk_tokens: tokens that each of the `hash_ids` stands for.

    Raises:
        SettingError: the file can't be read, has no requests, or a line is not a request.
    """
    requests = trace_files.read_trace(path)
    rows = zip(trace_files.read_prompts(path), requests, strict=True)
    asked = [_asked(row.get("num_asked"), len(request)) for (_, row), request in rows]
    return Trace(requests, asked, chunk_tokens)


def _asked(number: object, most: int) -> int:
    return min(number, most) if isinstance(number, int) and number >= 0 else most


def trace(
    requests: pd.DataFrame, *, namespace: str | None = None, node: str | None = None
) -> Trace:
    """The trace of a frame of requests.

    An engine names at most 4,096 chunks, and 2,048 of one request, between two things that it tells
    its node, at most a second: a request beyond that has its first chunks only, or none.

    Args:
        requests: from `requests` or a `Recorder`; those without names of chunks are left out.
        namespace: the beginning of one; needed if the requests are of several.
        node: the beginning of a node's id; None: as if all nodes shared one pool.

    Raises:
        SettingError: no request is left, or they are of several namespaces.
    """
    rows = requests[requests["chunks"].map(len) > 0]
    if namespace is not None:
        rows = rows[rows["namespace"].str.startswith(namespace)]
    if node is not None:
        rows = rows[rows["node_id"].str.startswith(node)]
    spaces = sorted(rows["namespace"].unique())
    if len(spaces) != 1:
        raise SettingError(
            f"the requests are of {len(spaces)} namespaces ({', '.join(spaces) or 'none'}): a "
            "trace needs those of one, so ask the engines something, or name one with namespace="
        )
    tokens = int(rows["chunk_tokens"].iloc[0])
    numbers: dict[str, int] = {}
    replayed: list[Request] = []
    asked: list[int] = []
    for names, prompt in zip(rows["chunks"], rows["prompt_tokens"], strict=True):
        chunks = list(dict.fromkeys(numbers.setdefault(name, len(numbers)) for name in names))
        replayed.append(chunks)
        asked.append(min(len(chunks), int(prompt) // max(1, tokens)))
    return Trace(replayed, asked, tokens)


def prompts_of(trace: Trace) -> list[Sequence[int]]:
    """The chunks that each request looks up."""
    return [chunks[:asked] for chunks, asked in zip(trace.requests, trace.num_asked, strict=True)]
