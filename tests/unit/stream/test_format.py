"""Events on the wire are read by vLLM's own structs, of today and of before June 2026."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raykv.base.ids import Key
from raykv.protocol.descriptions import Description, pack_tokens
from raykv.stream.format import WireFormat, bare, batch

FIRST, SECOND, PARENT = (bytes(range(n, n + 32)) for n in (0, 50, 100))

ROW = Description(
    namespace="n",
    key=SECOND + (3).to_bytes(4, "big"),
    parent=PARENT,
    inner=FIRST,
    tokens=pack_tokens([7, 8, 9, 100_000]),
    block_size=2,
    model="m",
    kind="full_attention",
    lora="poems",
)


def hashed(form: WireFormat, each: bytes) -> int | bytes:
    return each if form.hashes == "bytes" else int.from_bytes(each[-8:], "big")


@pytest.fixture(params=["int", "bytes"])
def hashes(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def encoded(form: WireFormat) -> bytes:
    key = Key(PARENT + bytes(4))
    events = [
        form.stored(ROW),
        form.stored(bare(key)),
        form.removed(3, [FIRST, SECOND]),
        form.cleared(),
    ]
    return msgspec.msgpack.encode(batch(12.5, events))


def test_vllms_own_decoder_reads_maps(hashes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(hashes == "int")))
    form = WireFormat("map", hashes)
    read = msgspec.msgpack.decode(encoded(form), type=KVEventBatch)
    assert (read.ts, read.data_parallel_rank) == (12.5, 0)
    stored, bare, removed, cleared = read.events
    first, second, parent = (
        maybe_convert_block_hash(BlockHash(each)) for each in (FIRST, SECOND, PARENT)
    )
    assert stored == BlockStored(
        block_hashes=[first, second],
        parent_block_hash=parent,
        token_ids=[7, 8, 9, 100_000],
        block_size=2,
        lora_id=None,
        medium="CPU",
        lora_name="poems",
        group_idx=3,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
    )
    # As vLLM's own tracker writes what it knows nothing of.
    assert bare == BlockStored(
        block_hashes=[parent],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
    )
    assert removed == BlockRemoved(block_hashes=[first, second], medium="CPU", group_idx=3)
    assert cleared == AllBlocksCleared()


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """vLLM's base of events before June 2026."""


class BlockStored(ArrayEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(ArrayEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(ArrayEvent):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_decoder_of_before_reads_arrays(hashes: str) -> None:
    form = WireFormat("array", hashes)
    read = msgspec.msgpack.decode(encoded(form), type=ArrayBatch)
    first, second, parent = (hashed(form, each) for each in (FIRST, SECOND, PARENT))
    stored, bare, removed, cleared = read.events
    tokens = [7, 8, 9, 100_000]
    assert stored == BlockStored(
        [first, second], parent, tokens, 2, None, "CPU", "poems", None, 3, "full_attention"
    )
    assert bare == BlockStored([parent], None, [], 0, None, "CPU", None, None, 0)
    assert removed == BlockRemoved([first, second], "CPU", 3)
    assert cleared == AllBlocksCleared()


def test_defaults_at_the_end_of_an_array_are_left_out() -> None:
    row = msgspec.structs.replace(ROW, kind="", parent=None, lora=None)
    event = WireFormat("array").stored(row)
    assert event[0] == "BlockStored"
    # Up to the KV group.
    assert len(event) == 10
    assert WireFormat("array").cleared() == ["AllBlocksCleared"]
