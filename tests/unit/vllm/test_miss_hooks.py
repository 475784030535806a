"""The connector's hooks with vLLM's own offloading scheduler between them and the view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, make_offload_key
from vllm.v1.outputs import KVConnectorOutput

from raykv.base.ids import EngineId, Epoch, Generation, Key
from raykv.engine.requests import FailedLoad
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handles
from raykv.protocol.engine import EngineAttached, MissRecord, SyncReply
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.identity import media
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.transfers import RayKVWorkerMetadata

CHUNK = 16
NODE_EPOCH = 7
NUM_PROMPT = 5 * CHUNK + 3


@dataclass
class PlayedRequest:
    """What the hooks and vLLM's scheduler read of a `Request`."""

    request_id: str = "r"
    num_prompt_tokens: int = NUM_PROMPT
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = [b"hash %d" % i for i in range(self.num_tokens // CHUNK)]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens

    def is_finished(self) -> bool:
        return False


def key(chunk: int) -> Key:
    return Key(bytes(make_offload_key(b"hash %d" % chunk, 0)))


FULL = FullAttentionSpec(block_size=CHUNK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def vllm_scheduler(
    manager: RayOffloadingManager, kinds: Sequence[KVCacheSpec] = (FULL,)
) -> OffloadingConnectorScheduler:
    """Of KV groups of these kinds, a block to a chunk."""
    numbers = range(len(kinds))
    offloaded: Any = [SimpleNamespace(group_id=at, tokens_per_block=CHUNK) for at in numbers]
    spec: Any = SimpleNamespace(
        config=SimpleNamespace(groups=offloaded),
        blocks_per_chunk=1,
        tokens_per_hash=CHUNK,
        tokens_per_block=[CHUNK] * len(kinds),
        offload_prompt_only=False,
        kv_events_config=OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
        get_manager=lambda: manager,
    )
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    groups: Any = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=kind, is_eagle_group=False, layer_names=[f"l{at}"])
            for at, kind in enumerate(kinds)
        ]
    )
    return OffloadingConnectorScheduler(spec, config, groups)


class Engine:
    """A connector's scheduler side without Ray, and the calls that vLLM makes."""

    def __init__(self) -> None:
        self.view = EngineView(EngineId("engine"), [0], 1.0, 4)
        self.view.attached(EngineAttached(1, NODE_EPOCH, {0: 40}))
        manager = RayOffloadingManager(self.view)
        connector: Any = RayKVConnector.__new__(RayKVConnector)
        connector.connector_scheduler = vllm_scheduler(manager)
        connector.connector_worker = None
        connector._manager = manager
        connector._runtime = None
        connector._node_epochs = {}
        connector._step = (0, 0.0)
        connector._stranded = []
        connector._stranded_blocks = []
        connector.__dict__["_bounding_group_ids"] = ()
        self.connector = connector
        self.view.accounts.tokens_per_chunk = max(connector._tokens_per_chunk())

    def hold(self, *chunks: int) -> None:
        """Chunks of the prompt that this node has."""
        names: list[bytes] = [key(chunk) for chunk in chunks]
        numbers = list(range(1, len(chunks) + 1))
        stored = Handles(names, numbers, numbers)
        self.view.apply(SyncReply(1, 1, node_epoch=NODE_EPOCH, stored=stored))

    def begin(self, request: PlayedRequest) -> None:
        self.connector.on_new_request(request)

    def schedule(self, request: PlayedRequest, own: int = 0) -> int:
        """Give the request blocks; tokens that are loaded now."""
        loads = 0
        if not request.num_computed_tokens:
            loads, _ = self.connector.get_num_new_matched_tokens(request, own)
        blocks = [
            SimpleNamespace(
                block_id=1 + at, is_null=False, block_hash=b"own" if at * CHUNK < own else None
            )
            for at in range(-(-request.num_tokens // CHUNK))
        ]
        self.connector.update_state_after_alloc(request, SimpleNamespace(blocks=[blocks]), loads)
        request.num_computed_tokens = own + loads
        return loads

    def end_load(self, request: PlayedRequest, *failed: FailedLoad) -> None:
        """Its load job goes out with a step, and the worker tells with the step that it is over."""
        step = self.connector.build_connector_meta(SchedulerOutput.make_empty())
        (job_id,) = step.load_jobs
        assert step.load_jobs[job_id].req_id == request.request_id
        told = RayKVWorkerMetadata(failed_loads=list(failed))
        told.mark_completed(job_id)
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))

    def finish(self, request: PlayedRequest) -> MissRecord:
        self.connector.request_finished_all_groups(request, ([],))
        (record,) = self.view.accounts.take_records()
        return record


def test_prompt_that_is_cached_loaded_and_computed_in_parts() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(1, 2, 4)
    engine.begin(request)
    assert engine.schedule(request, own=CHUNK) == 2 * CHUNK
    engine.end_load(request)
    engine.schedule(request)
    assert engine.finish(request) == MissRecord(
        "r",
        NUM_PROMPT,
        CHUNK,
        2 * CHUNK,
        {"incomplete_chunk": 3, "never_stored": 2 * CHUNK},
        key(3),
        b"".join(key(at)[:8] for at in range(5)),
        CHUNK,
    )


def test_part_of_a_load_that_failed_is_computed_for_that_reason() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(0, 1, 2)
    engine.begin(request)
    assert engine.schedule(request) == 3 * CHUNK
    failed = FailedLoad("r", key(1), Generation(2), Epoch(NODE_EPOCH), is_gone=False)
    engine.end_load(request, failed)
    request.num_computed_tokens = CHUNK
    engine.schedule(request)
    record = engine.finish(request)
    assert (record.own, record.loaded) == (0, CHUNK)
    assert record.missed == {
        "incomplete_chunk": 3,
        "load_failed": 2 * CHUNK,
        "never_stored": 2 * CHUNK,
    }


def test_load_that_failed_from_its_first_chunk_is_computed_for_that_reason() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(0, 1, 2)
    engine.begin(request)
    assert engine.schedule(request) == 3 * CHUNK
    failed = FailedLoad("r", key(0), Generation(1), Epoch(NODE_EPOCH), is_gone=True)
    engine.end_load(request, failed)
    request.num_computed_tokens = 0
    assert engine.schedule(request) == 0
    record = engine.finish(request)
    assert record.missed == {"incomplete_chunk": 3, "load_failed": 5 * CHUNK}
    assert record.missing == key(0)


@pytest.mark.expects_failures
def test_hook_that_fails_while_it_loads_is_named_as_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(0, 1)
    engine.begin(request)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.connector.connector_scheduler, "update_state_after_alloc", fail)
    assert engine.schedule(request) == 2 * CHUNK
    assert engine.connector._stranded == ["r"]
    # vLLM hears of it as of a load that has failed as a whole.
    request.num_computed_tokens = 0
    assert engine.schedule(request) == 0
    record = engine.finish(request)
    assert record.missed == {"incomplete_chunk": 3, "other": 2 * CHUNK, "never_stored": 3 * CHUNK}


def test_request_that_is_preempted_keeps_its_first_account() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.begin(request)
    assert engine.schedule(request, own=CHUNK) == 0
    engine.hold(1, 2, 3, 4)
    request.num_computed_tokens = 0
    assert engine.schedule(request, own=CHUNK) == 4 * CHUNK
    record = engine.finish(request)
    assert (record.own, record.loaded) == (CHUNK, 0)
    assert record.missed == {"incomplete_chunk": 3, "never_stored": 4 * CHUNK}


@pytest.mark.parametrize("salt", [None, "mine"])
def test_request_with_media_that_its_client_named_neither_loads_nor_stores(
    monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    monkeypatch.setattr(media, "_is_watching", True)
    engine = Engine()
    request = PlayedRequest(mm_features=[SimpleNamespace(mm_hash="cat")], cache_salt=salt)
    engine.hold(0, 1, 2, 3, 4)
    engine.begin(request)
    assert engine.schedule(request) == 0
    plan = engine.view.prepare_store("r", [key(9)])
    assert plan is not None
    assert not plan.keys
    assert engine.finish(request).missed == {"incomplete_chunk": 3, "media_unknown": 5 * CHUNK}


def test_request_with_media_by_their_content_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_is_watching", True)
    engine = Engine()
    request = PlayedRequest(mm_features=[SimpleNamespace(mm_hash="0123456789abcdef" * 4)])
    engine.hold(0, 1, 2, 3, 4)
    engine.begin(request)
    assert engine.schedule(request) == 5 * CHUNK
