"""Chunks as tensors: which are meant, what the source may answer, what types come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from ray.exceptions import GetTimeoutError

pytest.importorskip("torch")

import torch

from raykv import inspect
from raykv.base.errors import ClusterError
from raykv.base.ids import ALL_BLOCKS, Blocks, Key, Namespace, Refusal
from raykv.client import chunks as inspection
from raykv.client.cluster import Cluster
from raykv.inspect import tensors
from raykv.node.peers import Bytes
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import Read, ReadReply
from raykv.protocol.events import BlockStored, NodeJoined
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.listing import ListedRow, ListedRows, Reason, Where
from raykv.protocol.reader import Chunk
from raykv.protocol.status import ClusterStatus, NamespaceStatus
from raykv.protocol.worker import ElementOrder, GroupForm, KVForm
from raykv.stream.replay import Replay
from tests.fixtures import statuses
from tests.fixtures.listed import listed
from tests.fixtures.played_cluster import play, status

SLOT_BYTES = 4096

# Two heads of two dimensions, three tokens; K whole before V.
GROUP = GroupForm(
    layers=["first", "second"],
    dtype="float32",
    page_bytes=96,
    keys=ElementOrder([0, 2], [0, 4, 8], [0, 1]),
    values=ElementOrder([12, 14], [0, 4, 8], [0, 1]),
)
FORM = KVForm(slot_bytes={0: SLOT_BYTES}, groups={0: GROUP, 1: GroupForm(refusal="has no K")})


def key(name: str, group: int = 0) -> bytes:
    return name.encode().ljust(8, b".") + group.to_bytes(4, "big")


class PlayedPools:
    """Nodes that hold chunks, the scheduler actor's snapshot of them, and reads out of them."""

    def __init__(self) -> None:
        self.directory = Replay()
        self.form = FORM
        self.kv_groups = ""
        # What each chunk has for its content.
        self.numbers: dict[tuple[str, bytes], int] = {}
        for node in ("near", "far"):
            self.directory.apply(NodeJoined(life=1, seq=1, node_id=node, node_life=5, number=0))

    def hold(self, node: str, name: bytes, number: int, namespace: str = "space") -> None:
        self.numbers[node, name] = number
        place: dict[str, Any] = {"node_id": node, "namespace": namespace, "key": name}
        self.directory.apply(BlockStored(life=1, seq=2, node_life=5, number=number, **place))

    @property
    def cluster(self) -> Cluster:
        return cast("Cluster", self)

    def chunks(self, *, namespace: str | None, node: str | None, tier: str) -> Iterator[Chunk]:
        assert tier == "ram"
        return listed(self.directory, namespace, node)

    def tokens_of(self, keys: Sequence[bytes], namespace: str) -> dict[bytes, Any]:
        return {}

    def status(self) -> ClusterStatus:
        traits = {"chunks": self.kv_groups} if self.kv_groups else {}
        return status(
            nodes=[statuses.node(0, life=5, node_id=each) for each in self.directory.nodes],
            namespaces={"space": 1},
            spaces=[NamespaceStatus("space", traits=traits)],
        )

    def read_chunks(
        self, node_id: str, namespace: str, keys: Sequence[Key], slot_bytes: int, num_blocks: int
    ) -> list[Bytes]:
        assert (namespace, slot_bytes) == ("space", SLOT_BYTES)
        assert num_blocks == self.form.blocks_per_chunk
        return [content(self.numbers[node_id, key], node_id) for key in keys]


def content(number: int, node: str) -> Bytes:
    """A chunk whose elements are numbers that say which they are."""
    numbers = np.zeros(SLOT_BYTES // 4, np.float32)
    numbers[:48] = np.arange(48) + 100 * number + (0.5 if node == "far" else 0)
    return numbers.view(np.uint8)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> PlayedPools:
    played = PlayedPools()
    monkeypatch.setattr(
        tensors,
        "kv_form",
        lambda namespace, nodes: played.form if {*nodes} & {"near"} else KVForm(),
    )
    monkeypatch.setattr(tensors, "read_chunks", played.read_chunks)
    return played


# What comes out


def test_layers_of_several_chunks_are_joined_in_the_order_of_the_keys(pools: PlayedPools) -> None:
    pools.hold("near", key("b"), 2)
    pools.hold("near", key("a"), 1)
    found = inspect.kv(pools.cluster, [key("b"), key("a")])
    assert list(found.layers) == ["first", "second"]
    assert (found.num_tokens, found.tokens_per_chunk, found.dtype) == (6, 3, "float32")
    first = found.layers["first"]
    assert first.k.shape == first.v.shape == (6, 2, 2)
    assert first.k[:, 0, 0].tolist() == [200, 204, 208, 100, 104, 108]
    assert first.k[0].tolist() == [[200, 201], [202, 203]]
    assert first.v[0].tolist() == [[212, 213], [214, 215]]
    assert found.layers["second"].k[0, 0, 0] == 224
    assert found.tokens is None


def test_bfloat16_keeps_its_bits(pools: PlayedPools) -> None:
    pools.hold("near", key("a"), 1)
    half = GroupForm(["only"], "bfloat16", 96, GROUP.keys, GROUP.values)
    pools.form = KVForm(slot_bytes={0: SLOT_BYTES}, groups={0: half})
    known = inspect.kv(pools.cluster, key("a")).layers["only"].k
    assert known.dtype == torch.bfloat16
    bits = content(1, "near").view(np.uint16)
    assert known.view(torch.uint16)[1, 0].tolist() == bits[4:6].tolist()


def test_key_may_be_bytes_digits_or_their_beginning(pools: PlayedPools) -> None:
    pools.hold("near", key("abc"), 1)
    pools.hold("near", key("xyz"), 2)
    for name in (key("abc"), key("abc").hex(), key("abc").hex()[:6].upper()):
        assert inspect.kv(pools.cluster, name).keys == (key("abc").hex(),)


def test_chunks_are_read_where_the_first_one_is_or_on_the_named_node(pools: PlayedPools) -> None:
    for node in ("far", "near"):
        pools.hold(node, key("a"), 1)
    pools.hold("far", key("b"), 2)
    assert inspect.kv(pools.cluster, key("a"), node="ne").nodes == ("near",)
    assert inspect.kv(pools.cluster, key("a"), node="fa").nodes == ("far",)
    # The second one is not on the first one's node.
    found = inspect.kv(pools.cluster, [key("a"), key("b")])
    assert found.nodes == ("near", "far")
    assert found.layers["first"].k[[0, 3], 0, 0].tolist() == [100, 200.5]


# What is refused


@pytest.mark.parametrize(
    ("keys", "arguments", "what"),
    [
        ([], {}, "no keys were given"),
        ("", {}, "invalid key"),
        ("abc", {}, "invalid key"),
        ("not hexadecimal", {}, "invalid key"),
        (key("gone"), {}, "on no node: never stored, or evicted"),
        (key("a"), {"node": "far"}, "not on a node 'far'"),
        (key("a"), {"namespace": "other"}, "on no node"),
        (key("two").hex()[:6], {}, "2 chunks have keys that begin with"),
        (key("same"), {}, "2 chunks"),
        (key("one", 1), {}, "can't be read as K and V: has no K"),
        ([key("a"), key("one", 1)], {}, "another namespace or KV group than the first"),
        (key("third", 2), {}, "no engine has reported how KV lies"),
    ],
)
def test_what_can_not_be_read_is_said(
    pools: PlayedPools, keys: Any, arguments: dict[str, str], what: str
) -> None:
    pools.hold("near", key("a"), 1)
    pools.hold("near", key("two1"), 2)
    pools.hold("near", key("two2"), 3)
    pools.hold("near", key("one", 1), 4)
    pools.hold("near", key("third", 2), 5)
    pools.hold("near", key("same"), 6)
    pools.hold("far", key("same"), 7, namespace="twin")
    with pytest.raises(ClusterError, match=what):
        inspect.kv(pools.cluster, keys, **arguments)


def test_bytes_per_chunk_are_those_of_all_groups(pools: PlayedPools) -> None:
    pools.form = KVForm(slot_bytes={0: 4096, 1: 8192}, groups=FORM.groups)
    assert inspect.bytes_per_chunk(pools.cluster) == 12288
    assert inspect.bytes_per_chunk(pools.cluster, "sp") == 12288
    with pytest.raises(ClusterError, match=r"no namespaces .* begin .* there are space"):
        inspect.bytes_per_chunk(pools.cluster, "other")
    pools.form = KVForm()
    with pytest.raises(ClusterError, match="no engine has reported"):
        inspect.bytes_per_chunk(pools.cluster)


def test_bytes_per_chunk_have_the_windows_that_are_stored(pools: PlayedPools) -> None:
    pools.form = KVForm(slot_bytes={0: 4096, 1: 4096, 2: 4096}, groups=FORM.groups)
    pools.kv_groups = "0:32/3 1:32 2:32/3"
    assert inspect.bytes_per_chunk(pools.cluster) == 3 * 4096
    for number in range(8):
        pools.hold("near", key(f"{number}", 1), number)
    for number in range(3):
        pools.hold("far", key(f"{number}", 0), number)
        pools.hold("far", key(f"{number}", 2), 10 + number)
    assert inspect.bytes_per_chunk(pools.cluster) == 4096 * 14 // 8
    # Of all groups where none needs whole prefixes.
    pools.kv_groups = "0:32/3 1:32/3 2:32/3"
    assert inspect.bytes_per_chunk(pools.cluster) == 3 * 4096


# What the source may answer

KEYS = [Key(key(name)) for name in ("a", "b", "c")]


class PlayedSource:
    """A NodeActor that answers reads as the test wants."""

    def __init__(self) -> None:
        self.asked: list[Read] = []
        self.refusals: dict[bytes, Refusal] = {}
        self.flips = False
        self.cuts = False
        self.is_gone = False
        self.partial: dict[bytes, Blocks] = {}

    def read(self, raw: bytes) -> tuple[bytes, Bytes]:
        request = decode(raw, Read)
        self.asked.append(request)
        if self.is_gone:
            raise GetTimeoutError("too late")
        refusals = [self.refusals.get(name, Refusal.NONE) for name in request.keys]
        sent = [
            content(KEYS.index(Key(name)), "near")
            for name, refusal in zip(request.keys, refusals, strict=True)
            if not refusal
        ]
        rows = ListedRows.of(
            ListedRow(
                Namespace("space"),
                Key(name),
                Where.RAM,
                self.partial.get(name, ALL_BLOCKS),
                Reason.STORED,
            )
            for name in request.keys
        )
        sums = [xxhash.xxh3_64_intdigest(row.data) for row in sent]
        ones = Numbers.of([1] * len(sent))
        reply = ReadReply(5, 1, bytes(refusals), rows, sums, ones, ones)
        data = np.concatenate([*sent, np.zeros(0, np.uint8)])
        if self.flips:
            data[17] ^= 1
        return encode(reply), data[:-1] if self.cuts else data


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> PlayedSource:
    played = PlayedSource()
    play(monkeypatch, {}, {"near": {"read": played.read}})
    return played


@pytest.mark.parametrize(("max_bytes", "pieces"), [(2 * SLOT_BYTES, [2, 1]), (1, [1, 1, 1])])
def test_reads_are_cut_into_pieces_and_come_in_order(
    source: PlayedSource, monkeypatch: pytest.MonkeyPatch, max_bytes: int, pieces: list[int]
) -> None:
    monkeypatch.setattr(inspection, "MAX_READ_BYTES", max_bytes)
    found = list(inspection.read_chunks("near", "space", KEYS, SLOT_BYTES))
    assert [each.view(np.float32)[0] for each in found] == [0, 100, 200]
    assert [len(request.keys) for request in source.asked] == pieces
    first = source.asked[0]
    assert (first.version, first.namespace) == (PROTOCOL_VERSION, "space")


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (
            {"refusals": {key("b"): Refusal.NOT_HERE}},
            "not_here; it may have been evicted meanwhile",
        ),
        ({"refusals": {key("a"): Refusal.CORRUPT}}, "corrupt"),
        ({"flips": True}, "was damaged on its way"),
        ({"cuts": True}, "12287 bytes of chunks that have 12288"),
        (
            {"partial": {key("b"): Blocks(2, 3)}},
            "was stored in part: only 3 of its blocks, from number 2",
        ),
        ({"is_gone": True}, "the NodeActor does not answer in time"),
    ],
)
def test_wrong_answers_are_no_chunks(
    source: PlayedSource, fault: dict[str, Any], what: str
) -> None:
    for name, value in fault.items():
        setattr(source, name, value)
    with pytest.raises(ClusterError, match=what):
        list(inspection.read_chunks("near", "space", KEYS, SLOT_BYTES))
