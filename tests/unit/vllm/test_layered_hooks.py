"""The scheduler's hooks of `layerwise_loads`, with vLLM's own offloading scheduler behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.kv_offload.base import ReqContext

from raykv.engine.layered import LayeredLoads
from raykv.vllm.layered import LayeredScheduling
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest, key


class Pool:
    """What is evicted from vLLM's prefix cache."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        self.failing = False

    def evict_blocks(self, block_ids: set[int]) -> None:
        if self.failing:
            raise RuntimeError("planted")
        self.evicted |= block_ids


class LayeredEngine(Engine):
    """It has five chunks of each prompt in its node's pool."""

    def __init__(self) -> None:
        super().__init__()
        connector: Any = self.connector
        connector._layered = LayeredScheduling(connector._manager.layered, connector._tables)
        connector._kv_cache_manager = self.pool = Pool()
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
        output = SimpleNamespace(
            total_num_scheduled_tokens=1, num_scheduled_tokens={}, finished_req_ids=set()
        )
        return self.connector.build_connector_meta(output)

    def end_step(self, *invalid: int) -> None:
        self.connector.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=set(invalid))
        )


def begun(num_prompt_tokens: int, request_id: str = "r") -> tuple[LayeredEngine, PlayedRequest]:
    engine = LayeredEngine()
    request = PlayedRequest(request_id, num_prompt_tokens)
    engine.begin(request)
    return engine, request


def test_load_leaves_a_token_to_compute_and_vllm_does_not_wait() -> None:
    engine, request = begun(5 * CHUNK)
    assert engine.ask(request, CHUNK) == (4 * CHUNK - 1, False)
    engine, request = begun(5 * CHUNK + 1)
    assert engine.ask(request, CHUNK) == (4 * CHUNK, False)


def test_load_is_of_all_blocks_though_vllm_has_them_in_its_cache_already() -> None:
    engine, request = begun(5 * CHUNK)
    loads, _ = engine.ask(request, CHUNK)
    engine.give(request, loads or 0)
    (job,) = engine.connector.scheduler._current_batch_load_jobs.values()
    assert job.dst_spec.block_ids.tolist() == [2, 3, 4, 5]
    assert job.src_spec.keys == [key(at) for at in range(1, 5)]


def test_other_request_waits_while_vllm_has_it_share_what_is_coming() -> None:
    engine, request = begun(7 * CHUNK)
    other, late = PlayedRequest("other", 7 * CHUNK), PlayedRequest("late", 7 * CHUNK)
    for each in (other, late):
        engine.begin(each)
    engine.give(request, engine.ask(request, 2 * CHUNK)[0] or 0)
    assert engine.ask(other, 3 * CHUNK) == (None, False)
    assert engine.ask(other, 7 * CHUNK - 1) == (None, False)
    assert engine.ask(late, 2 * CHUNK) != (None, True)
    engine.end_step()
    assert engine.ask(other, 5 * CHUNK) == (0, False)
    assert engine.pool.evicted == set()


def test_blocks_behind_what_did_not_come_are_evicted_too() -> None:
    engine, request = begun(7 * CHUNK)
    engine.give(request, engine.ask(request, CHUNK)[0] or 0)
    engine.end_step(4)
    assert engine.pool.evicted == {4, 5, 6, 7}
    assert not engine.loads.is_busy


@pytest.mark.expects_failures
def test_who_shares_waits_on_when_the_eviction_fails() -> None:
    engine, request = begun(7 * CHUNK)
    other = PlayedRequest("other", 7 * CHUNK)
    engine.begin(other)
    engine.give(request, engine.ask(request, 0)[0] or 0)
    engine.pool.failing = True
    engine.end_step(2)
    assert engine.ask(other, 3 * CHUNK) == (None, False)
    engine.pool.failing = False
    engine.end_step()
    assert engine.pool.evicted == {2, 3, 4, 5, 6, 7}
    assert engine.ask(other, 5 * CHUNK) == (0, False)


def test_request_stores_nothing_while_it_loads_and_nothing_more_once_that_failed() -> None:
    engine, request = begun(7 * CHUNK)
    engine.give(request, engine.ask(request, 0)[0] or 0)
    manager, context = engine.connector._manager, ReqContext(req_id="r")
    status = engine.connector.scheduler._req_status["r"]
    assert manager.prepare_store([key(5)], context) is None
    assert status.max_offload_tokens == 0
    engine.end_step(3)
    assert status.max_offload_tokens is None
    assert manager.prepare_store([key(5)], context).keys_to_store == []
    manager.on_request_finished(context)
    assert not engine.loads.is_spoiled("r")


def test_own_limit_of_a_request_is_kept_over_its_load() -> None:
    engine = LayeredEngine()
    request = PlayedRequest("r", 7 * CHUNK, kv_transfer_params={"max_offload_tokens": 50})
    engine.begin(request)
    status = engine.connector.scheduler._req_status["r"]
    before = status.max_offload_tokens
    engine.give(request, engine.ask(request, 0)[0] or 0)
    engine.end_step()
    assert status.max_offload_tokens == before


@pytest.mark.expects_failures
def test_lookup_that_fails_lets_nobody_have_what_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = begun(7 * CHUNK)
    other, unlucky = PlayedRequest("other", 7 * CHUNK), PlayedRequest("unlucky", 7 * CHUNK)
    engine.begin(other)
    engine.begin(unlucky)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(LayeredScheduling, "must_wait", fail)
    assert engine.ask(unlucky, 0) == (0, False)
    monkeypatch.undo()
    assert engine.ask(unlucky, 0) == (0, False)
    engine.give(request, engine.ask(request, 0)[0] or 0)
    monkeypatch.setattr(LayeredScheduling, "must_wait", fail)
    assert engine.ask(other, 3 * CHUNK) == (None, False)


@pytest.mark.expects_failures
def test_load_that_was_never_made_up_is_told_by_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, request = begun(5 * CHUNK)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("planted")

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
    engine, request = begun(5 * CHUNK)
    engine.give(request, engine.ask(request, CHUNK)[0] or 0)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("planted")

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
