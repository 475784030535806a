"""Events on the wire are read by vLLM's own structs, of today and of before June 2026."""

from __future__ import annotations

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


def test_arrays_are_as_vllm_wrote_them_before_june_2026(hashes: str) -> None:
    form = WireFormat("array", hashes)
    first, second, parent = (hashed(form, each) for each in (FIRST, SECOND, PARENT))
    tokens = [7, 8, 9, 100_000]
    stored = ["BlockStored", [first, second], parent, tokens, 2, None, "CPU", "poems", None, 3]
    # Defaults at the end are left out.
    bare = ["BlockStored", [parent], None, [], 0, None, "CPU", None, None, 0]
    removed = ["BlockRemoved", [first, second], "CPU", 3]
    assert msgspec.msgpack.decode(encoded(form)) == [
        12.5,
        [[*stored, "full_attention"], bare, removed, ["AllBlocksCleared"]],
        0,
    ]
