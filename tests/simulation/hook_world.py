"""vLLM's own scheduler with both sides of RayKV's connector, and exceptions inside of its hooks.

The line to the NodeActor is a model: jobs are carried out some steps after they were handed over,
so that whoever does not wait for them reads, or is overwritten by, what it should not be.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

import raykv
from raykv.base import guard
from raykv.base.ids import Direction, Refusal
from raykv.base.settings import Settings
from raykv.engine.view import EngineView
from raykv.protocol.copies import CopyResult
from raykv.protocol.measures import BreakerReport
from raykv.protocol.worker import not_done
from raykv.vllm import mending
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.internals import engine as engine_internals
from raykv.vllm.internals import offloading as offloading_internals
from raykv.vllm.layered import LoadScheduling
from raykv.vllm.transfers import RayOffloadingWorker
from raykv.vllm.worker import RayKVConnectorWorker
from raykv.worker.job import JobRequest
from tests.fixtures.place import NOTHING_FAILS, CopyingPlace
from tests.fixtures.vllm import CHUNK, FULL, kv_cache_config
from tests.simulation.layered_world import (
    RUBBISH,
    AheadWorld,
    World,
    one_block_layout,
    prefix_names,
)

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
    "reset_cache",
    "get_kv_connector_stats",
)

WORKER_HOOKS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
)

Point = tuple[str, int]
"""A line of code: the file's name, and its number."""


class PlantedError(Exception):
    """Comes out of nowhere."""


@dataclass
class Faults:
    """Exceptions at a line of what runs inside of hooks.

    `point`: where; None: nowhere, and what is passed is noted in `seen`. `keeps_on`: each time, not
    only the first. `num_planted`: how often it came to that.
    """

    point: Point | None = None
    keeps_on: bool = False
    num_planted: int = 0
    seen: dict[Point, str] = field(default_factory=dict)
    hook: str = ""

    def within(self, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of this hook, as it is called from now on."""

        @functools.wraps(method)
        def call(*args: Any, **more: Any) -> Any:
            if self.point and self.num_planted and not self.keeps_on:
                return method(*args, **more)
            before, self.hook = sys.gettrace(), hook
            sys.settrace(self._begin)
            try:
                return method(*args, **more)
            finally:
                sys.settrace(before)

        return call

    def _begin(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code = frame.f_code
        # Files are compared first: to look at every line of every function takes most of a seed.
        is_near = self.point is None or code.co_filename == self.point[0]
        return self._at if is_near and is_within(code) else None

    def _at(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event != "line":
            return self._at
        point = (frame.f_code.co_filename, frame.f_lineno)
        if self.point is None:
            self.seen.setdefault(point, self.hook)
        elif point == self.point and (self.keeps_on or not self.num_planted):
            self.num_planted += 1
            raise PlantedError(f"in {self.hook}, {point}")
        return self._at


OURS = Path(raykv.__file__).parent
THEIRS = Path(offloading.__file__).parent


@functools.cache
def is_within(code: CodeType) -> bool:
    """Whether a line of this function is a place for an exception.

    Not in what makes up for one: guards, the mender, and the safe answers of hooks.
    """
    path = Path(code.co_filename)
    if not (path.is_relative_to(OURS) or path.is_relative_to(THEIRS)):
        return False
    return path not in _TRUSTED_FILES and code not in _safe_answers()


_TRUSTED_FILES = {
    Path(inspect.getfile(each)) for each in (guard, mending, engine_internals, offloading_internals)
}

_SAFE = {
    RayKVConnector: (
        "_adopt",
        "_nothing_matched",
        "_admit_without_load",
        "_bare_meta",
        "_meta_of",
        "_end_jobs",
        "_fenced",
        "_not_reset",
        "_distrust_loads",
        "_refuse_submissions",
        "_refuse_stores",
        "_nothing_finished",
        # One assertion each; vLLM's own makes the same.
        "_worker",
        "handle_preemptions",
    ),
    RayKVConnectorWorker: (
        "_refuse_step",
        "_flush_bare",
        "_refuse_unsubmitted",
        "refuse_submissions",
        "refuse_stores",
        "distrust_loads",
        "_take_end_badly",
        "_end_load_badly",
        "end_badly",
        "_receive_stranded",
        "_take_received",
        "take_meta",
    ),
    LoadScheduling: ("is_busy", "strand", "strand_step", "take_stranded", "close_step"),
    EngineView: ("look", "_why_off", "is_clearing", "orders", "keep_stores"),
    RayOffloadingWorker: (
        "_take_badly",
        "_end",
        "give_up",
        "_give_up_line",
        "_take_ended",
        "has",
        "is_flying",
        "refuse",
    ),
}


@functools.cache
def _safe_answers() -> frozenset[CodeType]:
    found = set()
    for owner, names in _SAFE.items():
        for name in names:
            method: Any = inspect.getattr_static(owner, name)
            method = method.fget if isinstance(method, property) else method
            found.add(inspect.unwrap(method).__code__)
    return frozenset(found)


class Line:
    """A line to a NodeActor that is slow, and carries out each job when it ends.

    `node_life` 0: that one is dead, and every job fails.
    """

    def __init__(
        self, place: CopyingPlace, life: int, blocks: dict[int, list[int]], rng: random.Random
    ) -> None:
        # How often a chunk does not come.
        self.failing = 0.0
        self.place = place
        self.life = life
        self.blocks = blocks
        self.rng = rng
        self.waiting: dict[int, JobRequest] = {}
        self.ended: list[CopyResult] = []
        self.is_closed = False
        self.node_life = place.life
        self.node_id = ""

    @property
    def num_loaded(self) -> int:
        return self.place.num_loaded

    def submit(self, *requests: JobRequest) -> None:
        for request in requests:
            assert request.job_id not in self.waiting
            self.waiting[request.job_id] = request

    def drain(self) -> list[CopyResult]:
        if not self.is_closed:
            self.wait([job_id for job_id in self.waiting if self.rng.random() < 0.5])
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        # A NodeActor is a process of its own: what fails there comes out of no hook.
        before = sys.gettrace()
        sys.settrace(None)
        try:
            for job_id in list(job_ids):
                request = self.waiting.pop(job_id, None)
                if request is not None:
                    self.ended.append(self._carry_out(request))
        finally:
            sys.settrace(before)

    def finish(self, job_ids: Collection[int]) -> None:
        self.wait(job_ids)

    def _carry_out(self, request: JobRequest) -> CopyResult:
        job = request.job
        if not self.node_life:
            return not_done(job.job_id, len(job.keys), Refusal.NODE_LOST)
        fail = self._fail if request.direction is Direction.LOAD else NOTHING_FAILS
        return self.place.copy(self.life, job, self.blocks, [RUBBISH] * CHUNK, fail)

    def _fail(self) -> Refusal:
        fails = self.failing and self.rng.random() < self.failing
        return Refusal.COPY_FAILED if fails else Refusal.NONE

    def breaker_report(self) -> BreakerReport:
        return BreakerReport()

    def following(self) -> Any:
        return self

    def set_target(self, target: Any) -> None:
        pass

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        self.wait(job_ids)
        return True

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self.waiting.clear()


class HookWorld(World):
    """An engine whose scheduler and both sides of the connector are real."""

    now: ClassVar[float] = 0.0
    """Seconds of all worlds' steps, for tests that put it in the place of the clock."""

    def __init__(
        self,
        model: Path,
        seed: int,
        faults: Faults | None = None,
        num_blocks: int = 40,
        kinds: Sequence[KVCacheSpec] = (FULL,),
        **more: Any,
    ) -> None:
        """`more` as `World` takes it."""
        super().__init__(model, seed, 0.0, num_blocks=num_blocks, kinds=kinds, **more)
        faults = faults or Faults(("nowhere", 0))
        self.faults = faults
        self.connector._loading = LoadScheduling()
        self.connector._kv_cache_config = self.scheduler.kv_cache_config
        self.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        self.line = Line(self.place, self.view.life, self.blocks, self.rng)
        self.worker_side = worker_side(self.line, kinds)
        # How often a chunk is evicted from the pool.
        self.evicting = 0.0
        self.num_steps = 0
        # What each step has told of its loads.
        self.told: list[KVConnectorOutput] = []
        for hooks, connector in (
            (SCHEDULER_HOOKS, self.connector),
            (WORKER_HOOKS, self.worker_side),
        ):
            for name in hooks:
                setattr(connector, name, faults.within(name, getattr(connector, name)))

    def step(self, *aborted: str) -> None:
        self.num_steps += 1
        HookWorld.now += 1 / 32
        super().step(*aborted)
        self._exchange()

    def _exchange(self) -> None:
        """What the node does: it evicts chunks, and says so; a dead one says nothing."""
        for key in list(self.place.keys()):
            if self.rng.random() < self.evicting:
                self.place.evict(key)
        self.view.set_line(0, self.line.node_life or None, time.monotonic())
        if self.line.node_life:
            self.place.exchange(self.view)

    def is_at_rest(self) -> bool:
        """Whether nothing is left to do, and nothing waits for what won't come."""
        return not self.scheduler.has_requests() and not self.line.waiting

    def run(self, most: int = 400) -> None:
        for _ in range(most):
            if self.is_at_rest():
                return
            self.step()
        waiting = [name for name, each in self.asked.items() if not each.request.is_finished()]
        raise AssertionError(f"the engine does not come to rest: {waiting}")

    def check_all(self) -> None:
        """What an engine at rest is to be like."""
        self.check()
        self.check_rest()
        self.check_pool()

    def check_rest(self) -> None:
        """No table of vLLM's has anything left that waits for an end."""
        vllm = self.connector.scheduler
        assert not vllm._jobs
        assert not vllm._req_status
        assert not vllm._block_id_to_pending_jobs
        assert not vllm._chunks_being_loaded
        assert not vllm._current_batch_load_jobs
        assert not self.view._pending
        assert not self.manager.barred
        self.view.check()

    def check_pool(self) -> None:
        """Each chunk that can be loaded is what its key says, of the requests that were asked."""
        named: dict[bytes, list[int]] = {}
        for asked in self.asked.values():
            names = prefix_names(asked.request.all_token_ids)
            hashes = asked.request.block_hashes
            for group, kind in enumerate(self.kinds):
                size = kind.block_size
                for at, name in enumerate(hashes[size // CHUNK - 1 :: size // CHUNK]):
                    chunk = names[at * size : (at + 1) * size]
                    has_state = isinstance(kind, MambaSpec)
                    key = make_offload_key(name, group)
                    named[key] = chunk[-1:] * size if has_state else chunk
        for key in self.view.loadable:
            right = named[key]
            names = self.place.content(key)
            assert names[: len(right)] == right, f"{key.hex()} has other bytes"

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """A step as vLLM's model runner does it."""
        side, meta = self.worker_side, output.kv_connector_metadata
        side.handle_preemptions(meta)
        side.bind_connector_metadata(meta)
        self._take_blocks(output)
        sampled = [self._compute(i, n) for i, n in output.num_scheduled_tokens.items()]
        side.start_load_kv(SimpleNamespace())
        side.wait_for_save()
        results = side.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=side.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=side.build_connector_worker_meta(),
        )
        self.told.append(told)
        side.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        numbers = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(names, numbers, sampled, kv_connector_output=told)


class AheadHookWorld(HookWorld, AheadWorld):
    """The same, which steps as vLLM's EngineCore does."""

    def _has_work(self) -> bool:
        return not HookWorld.is_at_rest(self)

    def is_at_rest(self) -> bool:
        return super().is_at_rest() and not self._under_way


def worker_side(line: Line, kinds: Sequence[KVCacheSpec]) -> RayKVConnector:
    """The worker's side, without vLLM's configuration and with this line."""
    parallel = SimpleNamespace(rank=0)
    config = SimpleNamespace(canonical_layout=False, parallel=parallel, extra_config={})
    spec: Any = SimpleNamespace(replicated_layout=False, config=config, settings=Settings())
    vllm_config: Any = None
    worker = RayKVConnectorWorker(spec, vllm_config, kv_cache_config(kinds))
    link: Any = line
    worker.worker = RayOffloadingWorker(link, one_block_layout(len(kinds)))
    connector: Any = RayKVConnector.__new__(RayKVConnector)
    connector.connector_worker = worker
    connector._connector_metadata = None
    made: RayKVConnector = connector
    return made
