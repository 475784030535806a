"""`lookup`: what one local lookup costs on the engine's scheduler thread.

A prefix of 4096 chunks that are all on the own node; beside it the same loop over a bare dict,
which is what a lookup can't be faster than in Python, and vLLM's in-process manager if vLLM is
installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raykv.bench.registry import BENCHMARKS
from raykv.bench.report import Options, Result, Verdict, alternate
from raykv.core.requests import RequestOptions
from raykv.core.view import EngineView
from raykv.messages import EngineAttached, Handles, SyncReply
from raykv.types import EngineId, Key, Lookup

MOST_RATIO = 1.5
"""Of a bare dict loop."""

NUM_CHUNKS = 4096
ROUNDS = 20
"""Prefixes per measurement."""

REQUEST = "request"


def keys(count: int) -> list[Key]:
    """36 bytes each: a block hash and the KV group."""
    return [Key(number.to_bytes(32, "big") + bytes(4)) for number in range(count)]


def full_view(names: list[Key]) -> EngineView:
    """A view that has all keys READY."""
    view = EngineView(EngineId("bench"), [0], lookup_deadline_s=1.0, lease_slots=1)
    view.attached(EngineAttached(epoch=1, node_epoch=1, capacity={0: len(names)}))
    handles = Handles(list(names), list(range(len(names))), [1] * len(names))
    view.apply(SyncReply(epoch=1, seq=1, node_epoch=1, stored=handles))
    view.start_request(REQUEST, RequestOptions())
    return view


def run(options: Options) -> Result:
    """See the module's docstring."""
    names = keys(256 if options.quick else NUM_CHUNKS)
    view = full_view(names)
    table = dict.fromkeys(names, 1)
    subjects: dict[str, Callable[[], float]] = {
        "RayKV": lambda: _per_lookup(lambda: _look(view, names), names),
        "bare dict": lambda: _per_lookup(lambda: _look_in_dict(table, names), names),
    }
    result = Result("lookup", BENCHMARKS["lookup"].summary)
    case = f"{len(names)} chunks"
    result.rows = alternate(case, "µs", subjects, options.repeats_or(9))
    ratio = result.row(case, "RayKV").ratio_to(result.row(case, "bare dict"))
    result.verdicts.append(
        Verdict(f"at most {MOST_RATIO} times a bare dict loop", ratio, MOST_RATIO)
    )
    return result


def _per_lookup(look: Callable[[], None], names: list[Key]) -> float:
    started = time.perf_counter()
    for _ in range(ROUNDS):
        look()
    return (time.perf_counter() - started) / ROUNDS / len(names) * 1e6


def _look(view: EngineView, names: list[Key]) -> None:
    """As vLLM does: one call for each chunk, until one misses."""
    lookup = view.lookup
    for name in names:
        if lookup(REQUEST, name, 0.0) is not Lookup.HIT:
            raise AssertionError(name)


def _look_in_dict(table: dict[Key, int], names: list[Key]) -> None:
    lookup = table.get
    for name in names:
        if lookup(name) is None:
            raise AssertionError(name)
