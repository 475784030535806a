"""`windows`: what models with sliding windows or states store of prompts, and find of them again.

It replays requests through a pool in which everything has room, as an engine does whose own cache
is empty each time: after it was started again, on another node, or with little memory. A request
finds the longest prefix that every KV group can load. "full" counts chunks of full attention
alone; every other row's chunks are beside those.

Subjects: vLLM's default, which keeps the window at a prompt's end; RayKV at several values of
`window_share`; and every window. A chunk has 512 tokens, as in the published traces, so that
windows are rounded up to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raykv.base.settings import Settings
from raykv.engine.windows import WindowPlan, checkpoint, parting, plan_windows
from raykv.inspect.trace_files import Request, read_trace
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.lab.bench.synthetic import synthetic
from raykv.prompts.prefixes import loadable_tokens
from raykv.protocol.descriptions import ChunkGroup

CHUNK = 512

STEP = 8192
"""Tokens that an engine computes in a step, at most."""


@dataclass(frozen=True)
class ModelKind:
    """KV groups of a model; `has_states`: those beside full attention are recurrent states."""

    groups: tuple[ChunkGroup, ...]
    has_states: bool = False

    @property
    def windows(self) -> list[ChunkGroup]:
        return [each for each in self.groups if each.window is not None]


FULL = ChunkGroup(0, CHUNK)
STATES = tuple(ChunkGroup(1 + at, CHUNK, 1) for at in range(3))
KINDS = {
    "Gemma 3, 27B": ModelKind((FULL, *(ChunkGroup(1 + at, CHUNK, 2) for at in range(6)))),
    "GPT-OSS": ModelKind((FULL, ChunkGroup(1, CHUNK, 1))),
    "Mistral 7B": ModelKind((ChunkGroup(0, CHUNK, 8),)),
    "Qwen3-Next": ModelKind(
        (FULL, *(ChunkGroup(1 + at, CHUNK, 1) for at in range(3))), has_states=True
    ),
}

DEFAULT_SHARE = Settings().window_share
SHARES = (DEFAULT_SHARE, 0.5, 1.0)


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("windows", BENCHMARKS["windows"].summary)
    if options.trace is not None:
        traces = {"": read_trace(options.trace)}
    else:
        traces = synthetic(200 if options.quick else 2000)
    for name, requests in traces.items():
        for kind_name, kind in KINDS.items():
            _measure(result, f"{name}, {kind_name}" if name else kind_name, kind, requests)
    return result


def _measure(result: Result, case: str, kind: ModelKind, requests: Sequence[Request]) -> None:
    tokens = sum(map(len, requests)) * CHUNK
    subjects = {"vLLM's default": UnlimitedPool(kind, 0.0)}
    subjects |= {f"window_share={share}": UnlimitedPool(kind, share) for share in SHARES}
    if not kind.has_states:
        subjects["every window"] = UnlimitedPool(kind, 0.0, keeps_all=True)
    found: dict[str, float] = {}
    for subject, pool in subjects.items():
        found[subject] = sum(map(pool.serve, requests)) / tokens
        result.rows += [
            Row(case, subject, "share of prompt tokens found", (found[subject],)),
            Row(case, subject, "chunks of windows per chunk of full", (pool.ratio,)),
        ]
    ours = found[f"window_share={DEFAULT_SHARE}"]
    budget = f"{case}: window_share={DEFAULT_SHARE} finds no less than vLLM's default"
    result.verdicts.append(Verdict(budget, ours, found["vLLM's default"], is_most=False))


class UnlimitedPool:
    """All that one engine has stored; see the module's docstring."""

    def __init__(self, kind: ModelKind, share: float, *, keeps_all: bool = False) -> None:
        self._kind = kind
        self._share = share
        self._keeps_all = keeps_all
        sliding = [] if kind.has_states else [each.group for each in kind.windows]
        self._plans = plan_windows(kind.groups, sliding, share)
        self._stored: dict[int, set[int]] = {each.group: set() for each in kind.groups}
        self._num_chunks = 0

    @property
    def ratio(self) -> float:
        """Chunks of windows and states by those of full attention; alone, by chunks of prompts."""
        windows = [len(self._stored[each.group]) for each in self._kind.windows]
        has_full = len(windows) < len(self._kind.groups)
        return sum(windows) / (len(self._stored[FULL.group]) if has_full else self._num_chunks)

    def serve(self, request: Request) -> int:
        """Tokens of a prompt that are found; then it is stored."""
        there = {
            each.group: [chunk in self._stored[each.group] for chunk in request]
            for each in self._kind.groups
        }
        found = loadable_tokens(self._kind.groups, there)
        reach = {
            each.group: (there[each.group] + [False]).index(False)
            for each in self._kind.groups
            if each.window is None
        }
        ends = self._ends(len(request), found, reach)
        for each in self._kind.groups:
            kept = self._kept(each, request, ends)
            self._stored[each.group].update(kept)
        self._num_chunks += len(request) - found // CHUNK
        return found

    def _ends(self, length: int, found: int, reach: dict[int, int]) -> set[int]:
        """Chunks behind which a window or a state is kept in any case."""
        if not self._share:
            return {length}
        # One token more than the chunks have: the trace counts whole ones.
        parts = parting(self._kind.groups, reach, length * CHUNK + 1)
        ends = {length, parts // CHUNK}
        if self._kind.has_states:
            step = STEP // CHUNK
            ends.update(range(found // CHUNK + step, length, step))
            if parts <= found:
                ends.add(checkpoint(self._kind.groups, length * CHUNK) // CHUNK)
        return ends

    def _kept(self, group: ChunkGroup, request: Request, ends: set[int]) -> Request:
        if group.window is None or self._keeps_all:
            return request
        plan, length = self._plans.get(group.group, WindowPlan()), len(request)
        needed = {at for end in ends for at in range(max(0, end - group.window), end)}
        return [chunk for at, chunk in enumerate(request) if at in needed or plan.keeps(at, length)]
