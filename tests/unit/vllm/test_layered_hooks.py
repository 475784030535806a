"""The scheduler's hooks of `layerwise_loads`, with vLLM's own offloading scheduler behind them."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.core.sched.output import SchedulerOutput

from raykv.engine.layered import MOST_STEPS, LayeredLoad, LayeredLoads
from raykv.vllm.internals.offloading import evict_blocks
from raykv.vllm.layered import LayeredScheduling
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest


class Pool:
    """What is evicted from vLLM's prefix cache."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        self.failing = False

    def evict_blocks(self, block_ids: set[int]) -> None:
        if self.failing:
            raise RuntimeError("planted")
        self.evicted |= block_ids


class Scheduler:
    """What is used of vLLM's."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.blocks: dict[str, list[int]] = {}
        self.kv_cache_manager = self
        self.preempted: list[str] = []

    def runs(self, name: str, *blocks: int, stale: int = 0, is_waiting: bool = False) -> Any:
        """It has a request with these blocks."""
        request = SimpleNamespace(
            request_id=name, num_stale_output_tokens=stale, drop_stale_output=False
        )
        self.requests[name], self.blocks[name] = request, [*blocks]
        self.prev_step_scheduled_req_ids.add(name)
        if not is_waiting:
            self.running.append(request)
        return request

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.blocks[request_id],)

    def _preempt_request(self, request: Any, _now: float, *, drop_stale_output: bool) -> None:
        assert request not in self.running
        request.drop_stale_output = drop_stale_output
        self.preempted.append(request.request_id)


class LayeredEngine(Engine):
    """It has five chunks of each prompt in its node's pool."""

    def __init__(self) -> None:
        super().__init__()
        connector: Any = self.connector
        connector._loading = LayeredScheduling(
            connector._manager.layered, connector._tables, partial(evict_blocks, connector)
        )
        connector._kv_cache_manager = self.pool = Pool()
        self.scheduler = Scheduler()
        self.steps: list[Any] = []
        self.loads: LayeredLoads = connector._manager.layered
        self.hold(0, 1, 2, 3, 4)

    def ask(self, request: PlayedRequest, own: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(request, own)
        return answer

    def give(self, request: PlayedRequest, loads: int) -> None:
        """Blocks, all of them in vLLM's prefix cache already."""
        blocks = [
            SimpleNamespace(block_id=1 + at, is_null=False, block_hash=b"there")
            for at in range(-(-request.num_tokens // CHUNK))
        ]
        self.connector.update_state_after_alloc(request, SimpleNamespace(blocks=[blocks]), loads)
        assert all(block.block_hash == b"there" for block in blocks)

    def metadata(self) -> Any:
        """A step goes out."""
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = 1
        self.steps.append(output)
        before = deepcopy(output)
        meta = self.connector.build_connector_meta(output)
        assert output == before, "a step is vLLM's own"
        return meta

    def most_stored(self, request_id: str) -> int | None:
        """What vLLM may offer of the request with the step that goes out."""
        scheduler = self.connector.scheduler
        seen: list[int | None] = []
        build = scheduler.build_connector_meta

        def built(output: Any) -> Any:
            seen.append(scheduler._req_status[request_id].max_offload_tokens)
            return build(output)

        scheduler.build_connector_meta = built
        self.metadata()
        scheduler.build_connector_meta = build
        (most,) = seen
        return most

    def end_step(self, *invalid: int) -> set[int]:
        """The oldest step ends; what of its invalid blocks is left to vLLM."""
        if not self.steps:
            self.steps.append(object())
            self.connector._loading.close_step(self.steps[0])
        told = SimpleNamespace(invalid_block_ids=set(invalid))
        result = SimpleNamespace(kv_connector_output=told)
        self.connector.end_step(self.scheduler, self.steps.pop(0), result)
        return told.invalid_block_ids


def begun(num_prompt_tokens: int) -> tuple[LayeredEngine, PlayedRequest]:
    engine, request = LayeredEngine(), PlayedRequest("r", num_prompt_tokens)
    engine.begin(request)
    return engine, request


def loading(num_chunks: int = 7, own: int = 1) -> tuple[LayeredEngine, PlayedRequest]:
    """A request "r" is given what the node has of its prompt behind vLLM's own first chunks, and
    "other" has come.
    """
    engine, request = begun(num_chunks * CHUNK)
    engine.begin(other(num_chunks))
    engine.give(request, engine.ask(request, own * CHUNK)[0] or 0)
    return engine, request


def other(num_chunks: int = 7) -> PlayedRequest:
    return PlayedRequest("other", num_chunks * CHUNK)


def fail(*_arguments: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize(("more", "left_out"), [(0, 2), (1, 1), (2, 0), (9, 0)])
def test_load_leaves_two_tokens_to_compute_and_vllm_does_not_wait(more: int, left_out: int) -> None:
    engine, request = begun(5 * CHUNK + more)
    assert engine.ask(request, CHUNK) == (4 * CHUNK - left_out, False)


def test_what_steps_leave_of_whose_ends_nobody_tells_is_evicted_and_forgotten() -> None:
    engine = LayeredEngine()
    num_steps = 3 * MOST_STEPS
    for number in range(num_steps):
        engine.loads.begin(LayeredLoad(f"r{number}", frozenset([b"%d" % number]), (number,)))
        engine.metadata()
        assert len(engine.loads.lost()) <= 1
    engine.metadata()
    assert not engine.loads.lost()
    assert engine.pool.evicted == {*range(num_steps - MOST_STEPS)}
    assert not engine.loads.must_wait([b"0"])
    assert engine.loads.must_wait([b"%d" % (num_steps - 1)])
    assert not engine.loads.spoiled


def test_request_whose_blocks_did_not_come_is_taken_back_and_vllm_does_not_hear_of_them() -> None:
    engine, _ = loading()
    for name, blocks in {"a": (10, 11), "r": (1, 2, 3, 4), "b": (12,), "c": (20, 21)}.items():
        engine.scheduler.runs(name, *blocks)
    engine.metadata()
    # One of another connector's, whose request waits for it.
    assert engine.end_step(4, 20, 77) == {77}
    assert engine.scheduler.preempted == ["c", "r"]
    dropped = {name for name, each in engine.scheduler.requests.items() if each.drop_stale_output}
    assert dropped == {"c", "r"}
    assert [each.request_id for each in engine.scheduler.running] == ["a", "b"]
    assert engine.scheduler.prev_step_scheduled_req_ids == {"a", "b"}
    # The other one has computed from a block that did not come, too.
    assert engine.pool.evicted == {4, 5, 6, 7, 20, 21, 77}


def test_request_that_was_preempted_meanwhile_says_nothing_of_what_did_not_come() -> None:
    engine, _ = loading()
    waiting = engine.scheduler.runs("r", stale=5, is_waiting=True)
    other = engine.scheduler.runs("other", 1, stale=5)
    engine.metadata()
    assert engine.end_step(4) == set()
    assert (waiting.drop_stale_output, other.drop_stale_output) == (True, False)
    assert engine.scheduler.preempted == []


@pytest.mark.expects_failures
def test_vllms_own_recovery_has_what_can_not_be_taken_back() -> None:
    engine, _ = loading()
    engine.scheduler.runs("r", 1, 2, 3, 4)
    engine.scheduler.prev_step_scheduled_req_ids = None  # type: ignore[assignment]
    engine.metadata()
    assert engine.end_step(4) == {4}
    assert [each.request_id for each in engine.scheduler.running] == ["r"]
    assert engine.pool.evicted == {4, 5, 6, 7}


@pytest.mark.expects_failures
def test_who_shares_waits_on_when_the_eviction_fails() -> None:
    engine, _ = loading(own=0)
    engine.pool.failing = True
    engine.end_step(2)
    assert engine.ask(other(), 3 * CHUNK) == (None, False)
    engine.pool.failing = False
    engine.end_step()
    assert engine.pool.evicted == {2, 3, 4, 5, 6, 7}
    assert engine.ask(other(), 5 * CHUNK) == (0, False)


def test_own_limit_of_a_request_is_kept_over_its_load() -> None:
    engine = LayeredEngine()
    request = PlayedRequest("r", 7 * CHUNK, kv_transfer_params={"max_offload_tokens": 50})
    engine.begin(request)
    status = engine.connector.scheduler._req_status["r"]
    before = status.max_offload_tokens
    engine.give(request, engine.ask(request, 0)[0] or 0)
    assert engine.most_stored("r") == 0
    assert status.max_offload_tokens == before
    engine.end_step()
    assert engine.most_stored("r") == before


@pytest.mark.expects_failures
def test_lookup_that_fails_lets_nobody_have_what_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = begun(7 * CHUNK)
    unlucky = PlayedRequest("unlucky", 7 * CHUNK)
    for each in (other(), unlucky):
        engine.begin(each)
    with monkeypatch.context() as patch:
        patch.setattr(LayeredScheduling, "must_wait", fail)
        assert engine.ask(unlucky, 0) == (0, False)
    assert engine.ask(unlucky, 0) == (0, False)
    engine.give(request, engine.ask(request, 0)[0] or 0)
    monkeypatch.setattr(LayeredScheduling, "must_wait", fail)
    assert engine.ask(other(), 3 * CHUNK) == (None, False)


@pytest.mark.expects_failures
def test_load_that_was_never_made_up_is_told_by_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, request = begun(5 * CHUNK)
    scheduler = engine.connector.connector_scheduler
    monkeypatch.setattr(scheduler, "update_state_after_alloc", fail)
    engine.give(request, engine.ask(request, CHUNK)[0] or 0)
    monkeypatch.setattr(scheduler, "build_connector_meta", fail)
    metadata = engine.metadata()
    assert (metadata.stranded, sorted(metadata.stranded_blocks)[:4]) == ([], [2, 2, 3, 3])
    assert set(metadata.stranded_blocks) == {2, 3, 4, 5}
    assert engine.loads.is_busy


@pytest.mark.expects_failures
def test_loads_go_out_though_the_step_failed_and_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = loading(5)
    scheduler = engine.connector.connector_scheduler
    monkeypatch.setattr(scheduler, "build_connector_meta", fail)
    # A store of another step, and one of a cache that was reset meanwhile.
    store = TransferJobStatus(req_id="other", pending_count=1, keys=set(), is_store=True)
    scheduler._jobs[700] = store
    scheduler._current_batch_jobs_to_flush.add(701)
    metadata = engine.metadata()
    assert metadata.jobs_to_flush == {700, 701}
    (job,) = metadata.load_jobs.values()
    assert job.dst_spec.block_ids.tolist() == [2, 3, 4, 5]
    assert set(metadata.stranded_blocks) == {2, 3, 4, 5}
    assert engine.metadata().load_jobs == {}
