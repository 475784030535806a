"""`lookup`: what one local lookup costs on the engine's scheduler thread.

A prefix of 4096 chunks that are all on the own node, looked up as vLLM does it: one call of the
manager for each chunk. Beside it a loop over a bare dict, a manager that is nothing but a dict (no
manager can be faster than that), and vLLM's in-process manager. Keys are fresh objects each time,
as those of a new request are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raykv.base.ids import Key
from raykv.engine.requests import RequestOptions
from raykv.lab.bench.report import Options, Result, Verdict, alternate
from tests.bench.viewed import ViewedNode

MOST_RATIO = 1.5
"""Of a bare dict."""

NUM_CHUNKS = 4096
NUM_HELD = 100_000
ROUNDS = 10
"""Prefixes per measurement."""

REQUEST = "request"
OURS, LOOP, DICT, THEIRS = "RayKV", "bare dict loop", "dict as a manager", "vLLM's manager"


def keys(first: int, count: int) -> list[Key]:
    """36 bytes each: a block hash and the KV group."""
    return [Key(n.to_bytes(32, "big") + bytes(4)) for n in range(first, first + count)]


def run(options: Options) -> Result:
    """See the module's docstring."""
    count, held = (256, 1000) if options.quick else (NUM_CHUNKS, NUM_HELD)
    names = keys(0, held)
    managers = {OURS: _ours(names), DICT: _DictManager(names), THEIRS: _theirs(names)}
    table = dict.fromkeys(names, 1)
    subjects: dict[str, Callable[[], float]] = {
        name: lambda manager=manager: _per_lookup(  # type: ignore[misc]
            lambda some: _look(manager, some), held, count
        )
        for name, manager in managers.items()
    }
    subjects[LOOP] = lambda: _per_lookup(lambda some: _look_in_dict(table, some), held, count)
    result = Result("lookup")
    case = f"{count} chunks of {held}"
    result.rows = alternate(case, "µs", subjects, options.repeats_or(9))
    ours = result.row(case, OURS)
    for subject in (LOOP, DICT):
        budget = f"at most {MOST_RATIO} times a {subject}"
        result.verdicts.append(
            Verdict(budget, ours.ratio_to(result.row(case, subject)), MOST_RATIO)
        )
    result.notes.append(f"The {LOOP} makes no call; vLLM calls its manager for each chunk.")
    return result


class _DictManager:
    """What a manager does at the very least."""

    def __init__(self, names: list[Key]) -> None:
        from vllm.v1.kv_offload.base import LookupResult

        self._table = dict.fromkeys(names, 1)
        self._hit, self._miss = LookupResult.HIT, LookupResult.MISS

    def lookup(self, key: Key, _context: Any) -> Any:
        return self._hit if key in self._table else self._miss


def _ours(names: list[Key]) -> Any:
    """RayKV's manager over a view that has all keys READY."""
    from raykv.vllm.manager import RayOffloadingManager

    node = ViewedNode()
    node.store(names)
    node.view.start_request(REQUEST, RequestOptions())
    return RayOffloadingManager(node.view)


def _theirs(names: list[Key]) -> Any:
    """vLLM's, with all keys stored."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_chunks=len(names))
    context = ReqContext(req_id=REQUEST)
    manager.on_new_request(context)
    manager.prepare_store(list(names), context)
    manager.complete_store(list(names), context)
    return manager


def _per_lookup(look: Callable[[list[Key]], None], held: int, count: int) -> float:
    """µs; the keys of each round are made before it."""
    took_s = 0.0
    for number in range(ROUNDS):
        some = keys(number * count % (held - count), count)
        began = time.perf_counter()
        look(some)
        took_s += time.perf_counter() - began
    return took_s / ROUNDS / count * 1e6


def _look(manager: Any, names: list[Key]) -> None:
    """As vLLM does: one call for each chunk, until one misses."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    lookup, context, hit = manager.lookup, ReqContext(req_id=REQUEST), LookupResult.HIT
    for name in names:
        if lookup(name, context) is not hit:
            raise AssertionError(name)


def _look_in_dict(table: dict[Key, int], names: list[Key]) -> None:
    lookup = table.get
    for name in names:
        if lookup(name) is None:
            raise AssertionError(name)
