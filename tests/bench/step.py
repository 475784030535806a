"""`step`: RayKV's time on vLLM's own threads.

Two parts. The hooks of the connector, measured inside an engine that serves a mixed load (long
prompts of 512 chunks that are stored, loaded, and asked again while others decode). And the two
managers, RayKV's and vLLM's in-process one, driven with the same calls in batches of 512 chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, alternate
from tests.bench.serving import Bed
from tests.bench.viewed import ViewedNode
from tests.fixtures.place import QuietSession

BATCH = 512
SMALL_BLOCK = 32
"""Tokens: 512 chunks are a prompt of 16384."""

MOST_RATIO = 1.5
MOST_P99_US = 200.0
MANAGER, THEIRS = "RayKV", "vLLM's in-process manager"


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("step")
    _compare_managers(result, options)
    _watch_engine(result, options)
    return result


# Managers


def _compare_managers(result: Result, options: Options) -> None:
    ours, theirs = _Ours(), _Theirs()
    repeats = options.repeats_or(15)
    for case in ("look up", "prepare store", "complete store", "prepare load", "complete load"):
        subjects: dict[str, Callable[[], float]] = {
            MANAGER: lambda case=case: ours.measure(case),  # type: ignore[misc]
            THEIRS: lambda case=case: theirs.measure(case),  # type: ignore[misc]
        }
        result.rows += alternate(f"{case}, a chunk", "µs", subjects, repeats, warm_ups=2)
    for case in ("look up", "prepare store", "complete store"):
        name = f"{case}, a chunk"
        budget = f"{case}: at most 1.5 x vLLM's in-process manager"
        result.at_most(MOST_RATIO, result.ratio(name, MANAGER, THEIRS), budget)


class _Driver:
    """A manager of vLLM's interface, and fresh keys for each call."""

    def __init__(self, manager: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        self._manager = manager
        self._number = 0
        manager.on_new_request(ReqContext(req_id="request"))

    def _stored(self, keys: list[Any]) -> None:
        """The copies of a store have ended."""

    def _fresh(self) -> list[Any]:
        self._number += BATCH
        return [n.to_bytes(32, "big") + bytes(4) for n in range(self._number, self._number + BATCH)]

    def measure(self, case: str) -> float:
        """One batch of calls of a kind, in µs for each chunk; the calls before it don't count."""
        from vllm.v1.kv_offload.base import ReqContext

        keys, context, manager = self._fresh(), ReqContext(req_id="request"), self._manager
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * at)
        steps: dict[str, Callable[[], Any]] = {
            "prepare store": lambda: manager.prepare_store(keys, context),
            "complete store": lambda: manager.complete_store(keys, context),
            "look up": lambda: self._look_up(keys, context),
            "prepare load": lambda: manager.prepare_load(keys, context),
            "complete load": lambda: manager.complete_load(keys, context),
        }
        took_s = 0.0
        for name, call in steps.items():
            if name == "complete store":
                self._stored(keys)
            began = time.perf_counter()
            call()
            if name == case:
                took_s = time.perf_counter() - began
        return took_s / BATCH * 1e6

    def _look_up(self, keys: list[Any], context: Any) -> None:
        from vllm.v1.kv_offload.base import LookupResult

        lookup, hit = self._manager.lookup, LookupResult.HIT
        for key in keys:
            if lookup(key, context) is not hit:
                raise AssertionError(key)


class _Ours(_Driver):
    """RayKV's manager; its node lists the stored chunks, as a thread of the engine reads them."""

    def __init__(self) -> None:
        from raykv.vllm.manager import RayOffloadingManager

        self._node = ViewedNode()
        manager: Any = RayOffloadingManager(self._node.view)
        manager.start(QuietSession())
        super().__init__(manager)

    def _stored(self, keys: list[Any]) -> None:
        self._node.store(keys)


class _Theirs(_Driver):
    """vLLM's, with room for all."""

    def __init__(self) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        super().__init__(CPUOffloadingManager(num_chunks=1 << 20))


# An engine


def _watch_engine(result: Result, options: Options) -> None:
    chunks = 64 if options.quick else BATCH
    length = chunks * SMALL_BLOCK
    with Bed(quick=True, max_tokens=length + 256, pool_bytes=512 << 20) as bed:
        engine = bed.raykv(block_size=SMALL_BLOCK, watch_hooks=True)
        bed.wait_for_pools()
        engine.call("hook_times")
        for number in range(options.repeats_or(6)):
            tokens = prompt(50 + number, length)
            short = [prompt(500 + 10 * number + i, 3 * SMALL_BLOCK) for i in range(3)]
            engine.call("generate", prompts=[tokens, *short], max_tokens=24)
            bed.settle()
            engine.reset()
            engine.call("generate", prompts=[*short, tokens], max_tokens=24)
            engine.reset()
        measured = engine.call("hook_times")
    _tell_hooks(result, measured, chunks)


def _tell_hooks(result: Result, measured: dict[str, Any], chunks: int) -> None:
    worst = 0.0
    for name, seconds in sorted(measured["seconds"].items()):
        on_cpu = measured["on_cpu"][name]
        calls = sorted(
            zip(seconds, on_cpu, measured["in_queue"][name], measured["in_gc"][name], strict=True)
        )
        at_p99 = min(len(calls) - 1, int(0.99 * len(calls)))
        p99, busy, queued, in_gc = calls[at_p99]
        worst = max(worst, p99 * 1e6)
        values = {
            "p50": median(seconds),
            "p99": p99,
            "p99, of it on a processor": busy,
            "p99, of it waiting for one": queued,
            "p99, of it in garbage collection": in_gc,
            "p99 of the time on a processor": sorted(on_cpu)[at_p99],
            "longest": calls[-1][0],
        }
        for case, value in values.items():
            result.add(f"{chunks} chunks, {case}", name, "µs", value * 1e6)
    result.at_most(MOST_P99_US, worst, "p99 of any hook under 200 µs")
    num_calls = float(len(measured["ray_calls"]))
    result.at_most(0.0, num_calls, "no Ray call on either thread")
    for call in sorted(set(measured["ray_calls"])):
        result.notes.append(f"Ray call: {call}")
