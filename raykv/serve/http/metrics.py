"""One page of metrics out of those of all replicas.

A scraper that asked replicas in turn through an ingress would see counters jump to and fro. So each
page's samples get two labels, `deployment` and `replica`, and all of them go into one page.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

# How long an ingress shows its replicas' metrics before it asks again: each question costs
# replicas no more.
METRICS_FRESH_S = 1.0


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ReplicaMetrics:
    """A replica's own page in Prometheus' text format.

    `keys` are digests (SHA-256) of the API keys that its vLLM takes; none: it needs no key.
    """

    deployment: str
    replica: str
    text: str
    keys: Sequence[bytes] = ()

    def may_be_seen(self, digest: bytes) -> bool:
        """Whether a client may have the page whose key has that digest."""
        known = [secrets.compare_digest(digest, each) for each in self.keys]
        return any(known) or not known


class SharedMetrics:
    """The pages of all replicas, collected once for all who ask within `METRICS_FRESH_S`.

    Args:
        collect: asks the replicas.
    """

    def __init__(
        self, collect: Callable[[], Coroutine[Any, Any, Sequence[ReplicaMetrics]]]
    ) -> None:
        self._collect = collect
        self._since = float("-inf")
        self._pages: asyncio.Future[Sequence[ReplicaMetrics]] | None = None
        # By which of the pages are in it.
        self._merged: dict[tuple[bool, ...], asyncio.Future[bytes]] = {}

    async def page(self, authorization: bytes) -> bytes:
        """One page of all that a client may see with that header.

        Raises:
            HTTPException: there is nothing for it.
        """
        now = asyncio.get_running_loop().time()
        if self._pages is None or (self._pages.done() and now - self._since >= METRICS_FRESH_S):
            self._since, self._merged = now, {}
            # watched: awaited by every request that it is for
            self._pages = asyncio.create_task(self._collect())
        merged = self._merged
        # Others may wait for it too.
        pages = await asyncio.shield(self._pages)
        if not pages:
            raise HTTPException(503, "no replica has reported its metrics in time: try later")
        digest = _digest_of(authorization)
        allowed = tuple(each.may_be_seen(digest) for each in pages)
        if not any(allowed):
            raise HTTPException(
                401, "metrics need an API key of vLLM here, as Bearer authorization"
            )
        if allowed not in merged:
            seen = [page for page, is_seen in zip(pages, allowed, strict=True) if is_seen]
            # watched: awaited by every request that it is for
            merged[allowed] = asyncio.create_task(asyncio.to_thread(merge, seen))
        return await asyncio.shield(merged[allowed])


def _digest_of(authorization: bytes) -> bytes:
    """Of the key in an Authorization header, as vLLM reads it; of no key where it has none."""
    scheme, _, key = authorization.partition(b" ")
    return hashlib.sha256(key if scheme.lower() == b"bearer" else b"").digest()


def merge(pages: Iterable[ReplicaMetrics]) -> bytes:
    """All pages in one: each family once, as Prometheus wants it, with the samples of all."""
    families: dict[str, list[str]] = {}
    for page in pages:
        labels = f'deployment="{_escaped(page.deployment)}",replica="{_escaped(page.replica)}"'
        known = set(families)
        for name, line in _lines(page.text):
            family = families.setdefault(name, [])
            if not line.startswith("#"):
                family.append(_labelled(line, labels))
            elif name not in known:
                # The comments of a family are those of the first page that has it.
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family).encode()


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the family that it belongs to: the last one that was announced."""
    family = ""
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
        if line.strip():
            yield family, line


def _labelled(sample: str, labels: str) -> str:
    """`sample` with `labels` before its own."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        return f"{sample[:brace]}{{{labels}{'' if rest.startswith('}') else ','}{rest}"
    return f"{sample[:space]}{{{labels}}}{sample[space:]}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
