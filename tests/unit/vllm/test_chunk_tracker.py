"""What the engine says of the chunks that vLLM stores and finds: as vLLM hashes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.ids import Key, Namespace
from raykv.base.settings import Settings, load_settings
from raykv.engine.announcements import Announcements
from raykv.engine.view import EngineView
from raykv.stream.descriptions import DescriptionOutbox

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, make_offload_key
from vllm.v1.request import Request

from raykv.vllm.internals.offloading import SchedulerTables, silent
from raykv.vllm.manager import ChunkTracker, RayOffloadingManager, offloading_events
from raykv.vllm.spec import RayKVOffloadingSpec

BLOCK = 16
CHUNK = 2 * BLOCK
TOKENS = list(range(1, 3 * CHUNK + 1))


def request(**fields: Any) -> Any:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **fields,
    )


def group(window: int | None = None) -> Any:
    return SimpleNamespace(
        group_idx=0,
        tokens_per_block=BLOCK,
        tokens_per_chunk=CHUNK,
        hashes_per_chunk=2,
        kv_event_group_spec=SimpleNamespace(
            kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=None
        ),
        sliding_window_size_in_chunks=window,
    )


def tracker(outbox: DescriptionOutbox | None, announcements: Announcements | None = None) -> Any:
    config = OffloadingKVEventsConfig(
        enable_kv_cache_events=announcements is not None, self_describing_kv_events=True
    )
    view = EngineView(Settings(), announcements=announcements)
    view.namespace = Namespace("namespace")
    return ChunkTracker(config, view, "tiny", outbox)


def key_of(req: Any, chunk: int) -> Any:
    return make_offload_key(req.block_hashes[2 * chunk + 1], 0)


def described(outbox: DescriptionOutbox, req: Any, of: Any = None, chunk: int = 0) -> bool:
    """Whether a chunk is described when it is stored."""
    tracker(outbox).record_store(req, of or group(), chunk, key_of(req, 0))
    return outbox.has_news


def test_stored_chunk_is_described_with_tokens_hashes_and_the_one_before_it() -> None:
    outbox, req = DescriptionOutbox(), request()
    tracks = tracker(outbox)
    for chunk in (0, 1):
        tracks.record_store(req, group(), chunk, key_of(req, chunk))
    first, second = outbox.take()
    hashes = [bytes(each) for each in req.block_hashes]
    assert (first.parent, first.block_hashes) == (None, hashes[:2])
    assert (second.parent, second.block_hashes) == (hashes[1], hashes[2:4])
    assert second.token_ids == TOKENS[CHUNK : 2 * CHUNK]
    assert (second.block_size, second.model, second.kind) == (BLOCK, "tiny", "full_attention")
    assert second.namespace == "namespace"


def test_chunk_is_described_once_whether_it_is_stored_or_found() -> None:
    outbox, req = DescriptionOutbox(), request()
    tracks = tracker(outbox)
    tracks.record_lookup(req, group(), 0, key_of(req, 0))
    tracks.record_store(req, group(), 0, key_of(req, 0))
    assert len(outbox.take()) == 1
    tracks.record_lookup(req, group(), 0, key_of(req, 0))
    assert not outbox.has_news


ADAPTER = LoRARequest("poems", 1, "/nowhere")


def test_adapter_is_named() -> None:
    outbox = DescriptionOutbox()
    assert described(outbox, request(lora_request=ADAPTER))
    assert [row.lora for row in outbox.take()] == ["poems"]


@pytest.mark.parametrize("name", ["x" * 5000, "poems\ud800"])
def test_chunk_of_an_adapter_whose_name_no_message_takes_is_not_described(name: str) -> None:
    req = request(lora_request=ADAPTER)
    assert req.block_hashes
    req.lora_request = LoRARequest(name, 1, "/nowhere")
    assert not described(DescriptionOutbox(), req)


def test_chunk_of_a_salted_prompt_is_a_secret() -> None:
    assert not described(DescriptionOutbox(), request(cache_salt="mine"))


def test_chunk_of_a_sliding_window_is_not_described() -> None:
    assert not described(DescriptionOutbox(), request(), group(window=1))


@pytest.mark.expects_failures
def test_request_that_vllm_cant_describe_breaks_nothing() -> None:
    assert not described(DescriptionOutbox(), request(), chunk=99)


def test_vllms_own_events_come_and_go_with_the_chunk() -> None:
    """The tracker keeps what it knows of a chunk until that is gone, and no longer."""
    announcements, req = Announcements(), request()
    tracks = tracker(None, announcements)

    def events() -> list[Any]:
        return list(tracks.take_events(offloading_events(announcements.take())))

    name = key_of(req, 1)
    tracks.record_store(req, group(), 1, name)
    announcements.expect([Key(name)])
    assert events() == []
    announcements.changed(Key(name), is_there=True)
    (stored,) = events()
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.medium) == (TOKENS[CHUNK : 2 * CHUNK], "CPU")
    assert stored.locality == "LOCAL"
    announcements.changed(Key(name), is_there=False)
    (removed,) = events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
    assert not tracks._pending_event_metadata


def test_chunk_that_never_came_leaves_nothing_behind_and_is_not_said_to_have_gone() -> None:
    announcements, req = Announcements(), request()
    tracks = tracker(None, announcements)
    tracks.record_store(req, group(), 1, key_of(req, 1))
    announcements.expect([Key(key_of(req, 1))])
    announcements.changed(Key(key_of(req, 1)), is_there=False)
    events = list(tracks.take_events(offloading_events(announcements.take())))
    # vLLM 0.32 has no way to forget a chunk without telling its subscribers.
    assert len(events) == (0 if silent() else 1)
    assert not tracks._pending_event_metadata


def test_tracker_keeps_what_vllm_knows_of_the_kv_groups() -> None:
    first, second = tracker(None, Announcements()), tracker(None, Announcements())
    first._group_specs = {0: "specification"}
    owner = SimpleNamespace(_events_tracker=first)
    SchedulerTables(owner).replace_tracker(second)
    assert owner._events_tracker is second
    assert second._group_specs == {0: "specification"}


def test_settings_are_labels_of_vllms_metric() -> None:
    extra = {"pool_bytes": "1GiB", "layerwise_loads": True}
    manager = RayOffloadingManager(EngineView(Settings()), load_settings(extra))
    (labels,) = manager.config_info()
    assert tuple(labels) == RayKVOffloadingSpec.config_info_keys(extra)
    assert (labels["pool_bytes"], labels["layerwise_loads"], labels["disk_path"]) == (
        str(1 << 30),
        "True",
        "",
    )
