"""Tails of prompts that end within a block: vLLM stores them for models with a recurrent state.

A block of each KV group is stored under the hash of its tokens up to a boundary within it. vLLM's
offloading scheduler is real, and so is what RayKV makes of its jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from raykv.base.ids import Direction, Key, Refusal, group_of
from raykv.engine.announcements import Announcements
from raykv.engine.remote import ChunkSize
from raykv.protocol.copies import CopyJob
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.vllm.manager import track_chunks
from raykv.vllm.transfers import RayKVWorkerMetadata, flying_job, transfer_result
from tests.fixtures.vllm import CHUNK, FULL, STATE, Engine, new_request

COPY_FAILED, NONE = Refusal.COPY_FAILED, Refusal.NONE

HASH = 4
"""Tokens of a hash: four to a block."""

KINDS = (FULL, STATE)
LAYOUT = KVLayout("memfd", 1, 1, [TensorLayout(0, 99, 64, 64)] * 2, [0, 1], [[0], [1]])
PROMPT = list(range(2, 32))
"""A whole block and 14 tokens, of which 12 have hashes."""
BOUNDARY = 28


class TailEngine(Engine):
    """Its model has a recurrent state beside attention."""

    def __init__(self) -> None:
        sizes = {group: ChunkSize(4096, CHUNK) for group in (0, 1)}
        self.announced = Announcements()
        super().__init__(KINDS, sizes, self.announced, tokens_per_hash=HASH)
        scheduler = self.connector.scheduler
        assert scheduler.config.supports_partial_tail
        before = scheduler._events_tracker
        track_chunks(self.connector._tables, before.config, "tiny", None, self.view)
        self.tracker = scheduler._events_tracker
        assert self.tracker is not before

    def compute(self, request: Request, handoffs: list[tuple[int, int, int]]) -> dict[int, Any]:
        """A step computes the whole prompt in blocks 11, 12 and 21, 22; its stores."""
        assert self.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        output = SchedulerOutput.make_empty()
        blocks = ([11, 12], [21, 22])
        output.scheduled_new_reqs = [new_request(request, blocks)]
        output.num_scheduled_tokens = {request.request_id: request.num_tokens}
        output.kv_connector_block_state = KVConnectorBlockState(
            {request.request_id},
            {request.request_id: blocks}.__getitem__,
            {request.request_id: handoffs},
        )
        stores: dict[int, Any] = self.connector.build_connector_meta(output).store_jobs
        return stores

    def end_jobs(self, stores: dict[int, Any], failing: Sequence[Key] = ()) -> None:
        """Stores have ended; these chunks did not come."""
        told = RayKVWorkerMetadata()
        for job_id, job in stores.items():
            flying = flying_job(job_id, Direction.STORE, job.src_spec, job.dst_spec, LAYOUT)
            blocks: dict[int, list[int]] = {block: [] for block in flying.job.block_ids}
            keys = iter(flying.job.keys)
            result = self.place.copy(
                self.view.life,
                flying.job,
                blocks,
                [],
                lambda keys=keys: COPY_FAILED if next(keys) in failing else NONE,  # type: ignore[misc]
            )
            end = transfer_result(flying, result).end
            assert end is not None
            told.ends.append(end)
            told.mark_completed(job_id)
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
        self.place.exchange(self.view)

    def evict(self, *keys: Key) -> None:
        for key in keys:
            self.place.evict(key)
        self.place.exchange(self.view)

    def compute_all(self, request: Request) -> None:
        """Nothing is found, and the request gets blocks."""
        assert self.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        self.connector.update_state_after_alloc(request, KVCacheBlocks(([], [])), 0)

    def events(self) -> list[Any]:
        return list(self.connector.take_events())


def asked(name: str, tokens: list[int]) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASH, sha256),
    )


def keys_at(request: Request, boundary: int) -> list[Key]:
    """Of both groups' blocks, up to that token."""
    name = request.block_hashes[boundary // HASH - 1]
    return [Key(bytes(make_offload_key(name, group))) for group in (0, 1)]


def groups(job: CopyJob) -> list[int]:
    return [group_of(Key(key)) for key in job.keys]


def job_of(stores: dict[int, Any]) -> CopyJob:
    """The one of the tail, as it goes to the NodeActor."""
    found = [
        flying_job(job_id, Direction.STORE, job.src_spec, job.dst_spec, LAYOUT)
        for job_id, job in stores.items()
    ]
    (flying,) = [each for each in found if 99 in each.job.block_ids]
    assert not flying.torn
    return flying.job


def stored_tail() -> tuple[TailEngine, Request, dict[int, Any]]:
    engine, request = TailEngine(), asked("first", PROMPT)
    engine.begin(request)
    stores = engine.compute(request, [(1, 98, CHUNK), (1, 99, BOUNDARY)])
    return engine, request, stores


def test_tail_is_stored_as_a_chunk_of_one_block_for_each_group() -> None:
    engine, request, stores = stored_tail()
    job = job_of(stores)
    assert job.keys == keys_at(request, BOUNDARY)
    assert (groups(job), list(job.block_ids)) == ([0, 1], [12, 99])
    # The whole block counts, whatever it holds behind the boundary.
    assert (list(job.first_block), list(job.num_blocks)) == ([0, 0], [1, 1])
    # Its block before: of attention with the ordinary stores, of the state from where it was.
    others = {key for job in stores.values() for key in job.dst_spec.keys} - {*job.keys}
    assert others == {*keys_at(request, CHUNK)}
    assert 98 in {block for job in stores.values() for block in job.src_spec.block_ids.tolist()}
    engine.view.check()


def all_stored() -> TailEngine:
    """The prompt and its tail are in the pool."""
    engine, _, stores = stored_tail()
    engine.end_jobs(stores)
    return engine


def give_blocks(engine: TailEngine, request: Request, loads: int) -> CopyJob:
    """Blocks 31 and 32, of the state only 41 for the tail; the load, as it goes out."""
    attention = [KVCacheBlock(31), KVCacheBlock(32), KVCacheBlock(33)]
    state = [KVCacheBlock(0), KVCacheBlock(41), KVCacheBlock(42)]
    state[0].is_null = True
    blocks = KVCacheBlocks((attention, state))
    engine.connector.update_state_after_alloc(request, blocks, loads)
    (job,) = engine.connector.scheduler._current_batch_load_jobs.values()
    return flying_job(7, Direction.LOAD, job.dst_spec, job.src_spec, LAYOUT).job


def test_next_request_with_that_beginning_loads_the_tail_too() -> None:
    engine, request = all_stored(), asked("second", PROMPT[:BOUNDARY] + [60] * 12)
    engine.begin(request)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (BOUNDARY, True)
    job = give_blocks(engine, request, BOUNDARY)
    attention, state = keys_at(request, BOUNDARY)
    assert job.keys == [keys_at(request, CHUNK)[0], attention, state]
    assert (groups(job), list(job.block_ids)) == ([0, 0, 1], [31, 32, 41])
    assert (list(job.first_block), list(job.num_blocks)) == ([0, 0, 0], [1, 1, 1])


def found(engine: TailEngine, request: Request) -> tuple[int | None, bool]:
    """What a request that comes may load, and whether vLLM waits for it."""
    engine.begin(request)
    answer: tuple[int | None, bool] = engine.connector.get_num_new_matched_tokens(request, 0)
    return answer


def test_request_that_differs_before_the_boundary_loads_whole_blocks_only() -> None:
    request = asked("second", PROMPT[: BOUNDARY - 1] + [60] * 12)
    assert found(all_stored(), request) == (CHUNK, True)


def test_tail_of_which_one_group_was_not_stored_is_no_hit() -> None:
    engine, request, stores = stored_tail()
    engine.end_jobs(stores, keys_at(request, BOUNDARY)[1:])
    assert found(engine, asked("second", [*PROMPT, 60])) == (CHUNK, True)


def test_tail_comes_and_goes_in_vllms_own_events() -> None:
    engine, _, stores = stored_tail()
    assert engine.events() == []
    engine.end_jobs(stores)
    stored = engine.events()
    assert sorted((each.group_idx, len(each.token_ids)) for each in stored) == [
        (0, BOUNDARY - CHUNK),
        (0, CHUNK),
        (1, 0),
        (1, 0),
    ]
    engine.evict(*engine.view.loadable)
    removed = engine.events()
    assert sum(len(each.block_hashes) for each in removed) == (BOUNDARY - CHUNK) // HASH + 1 + 2
    assert not engine.tracker._pending_event_metadata
    assert not len(engine.announced)


def test_description_of_a_tail_that_never_comes_is_forgotten() -> None:
    engine, _, stores = stored_tail()
    assert len(engine.tracker._pending_event_metadata) == 2
    engine.end_jobs(stores, [Key(key) for job in stores.values() for key in job.dst_spec.keys])
    engine.events()
    assert not engine.tracker._pending_event_metadata


def test_description_of_a_tail_that_was_found_goes_with_it() -> None:
    engine = all_stored()
    engine.announced.clear()
    engine.tracker.reset()
    assert found(engine, asked("second", [*PROMPT, 60])) == (BOUNDARY, True)
    assert {each.group_idx for each in engine.events()} == {0, 1}
    engine.evict(*engine.view.loadable)
    engine.events()
    assert not engine.tracker._pending_event_metadata


def test_miss_of_a_chunk_keeps_its_reason_though_tails_are_looked_up_behind_it() -> None:
    engine, request = all_stored(), asked("second", [*PROMPT, 60])
    gone = keys_at(request, CHUNK)[0]
    engine.evict(gone, *keys_at(request, BOUNDARY))
    engine.begin(request)
    engine.compute_all(request)
    record = engine.finish(request)
    assert record.missed == {"incomplete_chunk": 15, "evicted": CHUNK}
    assert record.missing == gone
