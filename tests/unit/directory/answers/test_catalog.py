"""Listings of chunks, and where those of a prompt are, out of a block manager of either table."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv.directory.answers.catalog
from raykv.base.errors import ClusterError, MessageError, RayKVError, VersionError
from raykv.base.ids import SLOT_ALIGNMENT, Epoch
from raykv.client import listing
from raykv.client.listing import Reader
from raykv.directory.actor import SchedulerActor
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.columns import Keys, Source, SourceKind
from raykv.protocol.engine import AttachEngine, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import DiskChunks, DiskNews, Inventory, NodeReport
from raykv.protocol.reader import (
    MAX_PAGE,
    ORDERS,
    Chunk,
    ChunkPage,
    ChunkQuery,
    PrefixQuery,
    WherePage,
    WhereQuery,
    check_chunk_page,
    check_where_page,
    chunks_of,
)

PAGE = SLOT_ALIGNMENT
NODES = ("aa01", "ab02", "cc03")
MODEL, OTHER = "5f0c-model", "77ab-other"
SLAB = 16 * PAGE


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(4, "big") + bytes(28) + group.to_bytes(4, "big")


class Directory:
    """A block manager with three nodes, asked as a reader in another process would ask."""

    def __init__(self) -> None:
        self.manager = BlockManager(
            Epoch(1),
            ManagerSettings(settle_s=0.0, node_expiry_s=1e9, engine_expiry_s=1e9),
        )
        self.now = 1000.0
        self.seqs = itertools.count(1)
        self.pages = 0
        # Of each node's disk.
        self.heard: dict[str, int] = {}
        for node in NODES:
            self.report(node)

    def report(
        self, node: str, stored: Inventory | None = None, disk: DiskNews | None = None
    ) -> None:
        self.manager.expire(self.now)
        report = NodeReport(
            PROTOCOL_VERSION,
            node,
            1,
            next(self.seqs),
            8 * SLAB,
            SLAB,
            0,
            0,
            stored=stored or Inventory(),
            disk=disk or DiskNews(),
        )
        self.manager.node_report(report, self.now)

    def put_on_disk(
        self, node: str, numbers: list[int], space: str = MODEL, size: int = PAGE
    ) -> None:
        """Have chunks written to a node's disk."""
        heard = self.heard.get(node, 0)
        places = list(range(heard + 1, heard + 1 + len(numbers)))
        self.heard[node] = heard + len(numbers)
        came = DiskChunks(
            [space],
            [0] * len(numbers),
            [key(number) for number in numbers],
            places,
            [5] * len(numbers),
            [size] * len(numbers),
        )
        self.report(node, disk=DiskNews(1, heard, self.heard[node], came))

    def hold(self, node: str, numbers: list[int], space: str = MODEL, size: int = PAGE) -> None:
        """Have an engine of the node store chunks."""
        engine = f"{node} {space}"
        self.manager.attach_engine(
            AttachEngine(
                PROTOCOL_VERSION, engine, node, space, f"{space}'s", 1, {0: size}, traits={"a": "b"}
            ),
            self.now,
        )
        request = SyncRequest(engine, 1, next(self.seqs), wanted={0: len(numbers)})
        granted = self.manager.sync(request, self.now).granted
        assert len(granted.slots) == len(numbers)
        self.report(
            node,
            Inventory(
                [space],
                [0] * len(numbers),
                Keys.of([key(number) for number in numbers]),
                granted.slots,
                granted.generations,
                [size] * len(numbers),
            ),
        )

    def touch(self, node: str, numbers: list[int], space: str = MODEL) -> None:
        self.manager.expire(self.now)
        request = SyncRequest(
            f"{node} {space}",
            1,
            next(self.seqs),
            touched=Keys.of([key(number) for number in numbers]),
        )
        self.manager.sync(request, self.now)

    @property
    def reader(self) -> Reader:
        return Reader(lambda: self, lambda: self.manager.status("address", "1.0", self.now))

    def ask(self, method: str, query: Any) -> bytes:
        """What the scheduler actor's shell does, without its clock."""
        self.pages += 1
        if method == "chunks":
            return encode(self.manager.catalog.page(decode(encode(query), ChunkQuery), self.now))
        return encode(self.manager.catalog.where(decode(encode(query), WhereQuery)))


@pytest.fixture
def directory(table: None, monkeypatch: pytest.MonkeyPatch) -> Directory:
    made = Directory()

    def ask(_: Any, method: str, query: Any, kind: Any) -> Any:
        return decode(made.ask(method, query), kind)

    monkeypatch.setattr(listing, "_ask", ask)
    return made


def numbers(chunks: Any) -> list[int]:
    return [int.from_bytes(chunk.key[:4], "big") for chunk in chunks]


def test_listing_has_all_chunks_of_all_nodes(directory: Directory) -> None:
    directory.hold("aa01", [1, 2, 3])
    directory.hold("ab02", [3, 4])
    directory.hold("ab02", [9], OTHER, 2 * PAGE)
    found = list(directory.reader.chunks())
    assert sorted(numbers(found)) == [1, 2, 3, 3, 4, 9]
    assert [chunk.node_id for chunk in found] == ["aa01"] * 3 + ["ab02"] * 3
    assert {chunk.model for chunk in found if chunk.namespace == MODEL} == {f"{MODEL}'s"}
    replicated = [chunk for chunk in found if chunk.is_replicated]
    assert numbers(replicated) == [3, 3]
    assert [c.num_bytes for c in found if c.namespace == OTHER] == [2 * PAGE]


def test_listing_goes_on_over_pages_of_any_size(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, first in zip(NODES, (0, 50, 100), strict=True):
        directory.hold(node, list(range(first, first + 30)))
    everything = numbers(directory.reader.chunks())
    assert sorted(everything) == [*range(30), *range(50, 80), *range(100, 130)]
    for looked_at, stretches in ((1, 16), (7, 16), (2048, 1), (64, 3)):
        monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_LOOKED_AT", looked_at)
        monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_STRETCHES", stretches)
        directory.pages = 0
        assert numbers(directory.reader.chunks()) == everything
        assert directory.pages > 2
        for order in ORDERS:
            assert sorted(numbers(directory.reader.chunks(order=order, limit=200))) == sorted(
                everything
            )


def test_listing_of_nothing_is_empty(directory: Directory) -> None:
    assert list(directory.reader.chunks()) == []
    assert list(directory.reader.chunks(order="hits", limit=3)) == []
    directory.manager = BlockManager(Epoch(1))
    assert list(directory.reader.chunks()) == []


def test_listing_in_an_order_has_the_first_ones_of_the_whole_cluster(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_LOOKED_AT", 5)
    for round_, node in enumerate(NODES):
        directory.now += 10
        directory.hold(node, list(range(20 * round_, 20 * round_ + 12)))
    for number in (3, 25, 44):
        directory.now += 1
        for _ in range(number):
            directory.touch(NODES[number // 20], [number])
    directory.now += 5
    reader = directory.reader
    assert numbers(reader.chunks(order="hits", limit=3)) == [44, 25, 3]
    assert [c.hits for c in reader.chunks(order="hits", limit=4)] == [44, 25, 3, 0]
    oldest = list(reader.chunks(order="age", limit=12))
    assert {chunk.node_id for chunk in oldest} == {"aa01"}
    assert oldest[0].age_s == pytest.approx(28.0, abs=0.1)
    assert 3 in numbers(oldest)
    idle = list(reader.chunks(order="idle", limit=11))
    assert 3 not in numbers(idle)
    assert all(before.idle_s >= after.idle_s for before, after in itertools.pairwise(idle))
    everything = list(reader.chunks(order="hits"))
    assert len(everything) == 36
    assert numbers(everything)[:3] == [44, 25, 3]


def test_filters_leave_out_all_else(directory: Directory) -> None:
    directory.hold("aa01", [1, 2])
    directory.hold("aa01", [1, 6], OTHER)
    directory.hold("ab02", [2])
    reader = directory.reader
    assert numbers(reader.chunks(namespace="77")) == [1, 6]
    assert numbers(reader.chunks(node="ab")) == [2]
    assert numbers(reader.chunks(namespace=MODEL, node="aa01")) == [1, 2]
    assert numbers(reader.chunks(node="cc03")) == []
    assert numbers(reader.chunks(group=0)) == [1, 2, 1, 6, 2]
    assert list(reader.chunks(group=1)) == []
    assert numbers(reader.chunks(key=key(6))) == [6]
    assert numbers(reader.chunks(key="0000000")) == [1, 2, 1, 6, 2]
    assert numbers(reader.chunks(limit=2)) == [1, 2]
    assert numbers(reader.chunks(limit=1, order="hits", key="0000000")) == [1]
    directory.hold("cc03", [0x10, 0x20])
    directory.touch("cc03", [0x20])
    assert numbers(reader.chunks(limit=1, order="hits", key="0000001", node="cc")) == [0x10]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"namespace": "nobody"}, "no namespace of the cache begins with 'nobody'"),
        ({"node": "a"}, "2 nodes of the cache begins with 'a'; there are aa01, ab02, cc03"),
        ({"key": "xyz"}, "'xyz' is not in hexadecimal digits"),
        ({"key": "ab" * 200}, "has 400 digits, too many"),
        ({"order": "beauty"}, "order='beauty': chunks can be listed by age, idle, hits, size"),
        ({"limit": 0}, "limit=0: a listing has at least one chunk"),
        ({"tier": "tape"}, "tier='tape': chunks are in ram or disk"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    directory: Directory, arguments: dict[str, Any], expected: str
) -> None:
    directory.hold("aa01", [1])
    with pytest.raises(ClusterError, match=expected):
        directory.reader.chunks(**arguments)


def test_chunk_is_found_by_its_first_digits_on_all_nodes(directory: Directory) -> None:
    directory.hold("aa01", [0x1234, 0x1299])
    directory.hold("cc03", [0x1234])
    reader = directory.reader
    for wanted in (key(0x1234), key(0x1234).hex().upper(), "00001234", "0000123"):
        assert [chunk.node_id for chunk in reader.chunk(wanted)] == ["aa01", "cc03"]
    assert reader.chunk("ffff") == []
    assert reader.chunk(key(7)) == []
    with pytest.raises(ClusterError, match="2 chunks have keys that begin with '000012'"):
        reader.chunk("000012")


def test_whole_key_is_looked_for_on_the_nodes_that_have_it_only(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_STRETCHES", 1)
    for node in NODES:
        directory.hold(node, list(range(60)))
    directory.hold("cc03", [77])
    directory.pages = 0
    assert len(directory.reader.chunk(key(77))) == 1
    assert directory.pages < 10


def test_where_answers_for_as_many_keys_as_there_is_room_for(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.hold("aa01", [1, 2, 3])
    directory.hold("cc03", [3, 4])
    monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_REPLICAS", 7)
    keys = [key(number) for number in (1, 3, 4, 5, 2)]
    found = listing.sources_of(lambda: directory, MODEL, keys)
    assert [sorted(each.node_id for each in some) for some in found] == [
        ["aa01"],
        ["aa01", "cc03"],
        ["cc03"],
        [],
        ["aa01"],
    ]
    assert directory.pages == 3
    assert listing.sources_of(lambda: directory, OTHER, keys) == [[]] * 5
    directory.manager = BlockManager(Epoch(1))
    assert listing.sources_of(lambda: directory, MODEL, keys) == [[]] * 5


# Chunks on disks


def on_disk(chunks: Any) -> list[tuple[str, int]]:
    return [(c.node_id, int.from_bytes(c.key[:4], "big")) for c in chunks if c.tier == "disk"]


def test_listing_has_each_disk_behind_the_pool_of_its_node(directory: Directory) -> None:
    directory.hold("aa01", [1, 2])
    directory.hold("ab02", [3])
    directory.put_on_disk("aa01", [7, 2], size=2 * PAGE)
    directory.put_on_disk("cc03", [2], OTHER)
    directory.now += 10
    found = list(directory.reader.chunks())
    assert numbers(found) == [1, 2, 7, 2, 3, 2]
    assert on_disk(found) == [("aa01", 7), ("aa01", 2), ("cc03", 2)]
    seven, two, other = (chunk for chunk in found if chunk.tier == "disk")
    assert (seven.num_bytes, seven.slot, seven.generation) == (2 * PAGE, 1, 5)
    assert seven.age_s == seven.idle_s == pytest.approx(10.0)
    # Its own node's pool counts; another namespace's chunk of that key does not.
    assert [each.is_replicated for each in (seven, two, other)] == [False, True, False]
    directory.put_on_disk("cc03", [7])
    assert [each.is_replicated for each in directory.reader.chunks(key=key(7))] == [True, True]


def test_listing_of_disks_goes_on_over_pages_of_any_size(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, first in zip(NODES, (0, 50, 100), strict=True):
        directory.hold(node, list(range(first, first + 10)))
        directory.put_on_disk(node, list(range(first + 5, first + 25)))
    everything = list(directory.reader.chunks())
    assert len(everything) == 90
    assert len(on_disk(everything)) == 60
    for looked_at, stretches in ((1, 16), (7, 16), (2048, 1), (64, 3)):
        monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_LOOKED_AT", looked_at)
        monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_STRETCHES", stretches)
        directory.pages = 0
        assert list(directory.reader.chunks()) == everything
        assert directory.pages > 2
        for order in ORDERS:
            ordered = list(directory.reader.chunks(order=order, limit=200))
            assert len(on_disk(ordered)) == 60
            assert len(ordered) == 90


def test_filters_and_orders_hold_on_disks_too(directory: Directory) -> None:
    directory.hold("aa01", [1, 2])
    directory.put_on_disk("aa01", [3, 4])
    directory.now += 5
    directory.put_on_disk("ab02", [5], OTHER, 3 * PAGE)
    reader = directory.reader
    assert numbers(reader.chunks(tier="ram")) == [1, 2]
    assert numbers(reader.chunks(tier="disk")) == [3, 4, 5]
    assert numbers(reader.chunks(tier="disk", node="ab")) == [5]
    assert numbers(reader.chunks(tier="disk", node="aa", limit=1)) == [3]
    assert numbers(reader.chunks(namespace="77")) == [5]
    assert numbers(reader.chunks(key=key(4))) == [4]
    assert numbers(reader.chunks(key="0000000", tier="disk")) == [3, 4, 5]
    assert list(reader.chunks(group=1)) == []
    assert numbers(reader.chunks(order="size", limit=1)) == [5]
    assert numbers(reader.chunks(order="age", limit=4, tier="disk")) == [3, 4, 5]


def test_chunk_is_shown_in_all_places(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.hold("ab02", [0x1234])
    directory.put_on_disk("ab02", [*range(50), 0x1234])
    directory.put_on_disk("aa01", [0x1234])
    for wanted in (key(0x1234), "0000123"):
        found = directory.reader.chunk(wanted)
        assert [(chunk.node_id, chunk.tier) for chunk in found] == [
            ("aa01", "disk"),
            ("ab02", "ram"),
            ("ab02", "disk"),
        ]
    # A whole key is not looked for at each place of a disk.
    monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_LOOKED_AT", 4)
    directory.pages = 0
    assert len(directory.reader.chunk(key(49))) == 1
    assert directory.pages < 5


def test_where_names_disks_too_and_its_answers_stay_bounded(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in NODES:
        directory.hold(node, [1])
        directory.put_on_disk(node, [1, 2])
    keys = [key(number) for number in (1, 2, 3)]
    disks = [Source(node, SourceKind.DISK) for node in sorted(NODES)]
    everywhere = [sorted([*map(Source, NODES), *disks]), disks, []]
    for most in (6, 12, 100):
        monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_REPLICAS", most)
        page = directory.manager.catalog.where(WhereQuery(PROTOCOL_VERSION, MODEL, keys))
        check_where_page(page, WhereQuery(PROTOCOL_VERSION, MODEL, keys))
        assert len(page.key_index) <= most
        found = listing.sources_of(lambda: directory, MODEL, keys)
        assert [sorted(some) for some in found] == everywhere
    directory.manager.clear()
    assert listing.sources_of(lambda: directory, MODEL, keys) == [[]] * 3
    assert list(directory.reader.chunks()) == []


def test_looking_changes_nothing_that_engines_see(directory: Directory) -> None:
    directory.hold("aa01", list(range(20)))
    before = list(directory.reader.chunks())
    list(directory.reader.chunks(order="hits", limit=5))
    directory.reader.chunk(key(3))
    listing.sources_of(lambda: directory, MODEL, [key(3)])
    assert list(directory.reader.chunks()) == before
    node = directory.manager._nodes["aa01"]  # type: ignore[index]
    assert node.book.table.pinned_slabs(directory.now) == set()
    directory.manager.check()


def test_status_tells_model_and_bytes_of_a_namespace_whose_engines_have_ended(
    directory: Directory,
) -> None:
    directory.hold("aa01", [1, 2], MODEL, 2 * PAGE)
    directory.hold("ab02", [1], OTHER)
    for engine in ("aa01 " + MODEL, "ab02 " + OTHER):
        directory.manager.detach_engine(engine)  # type: ignore[arg-type]
    status = directory.manager.status("address", "1.0", directory.now)
    (model, other) = status.spaces
    assert (model.namespace, model.model, model.chunks) == (MODEL, f"{MODEL}'s", 2)
    assert (model.num_bytes, model.engines, model.traits) == (4 * PAGE, 0, {"a": "b"})
    assert other.num_bytes == PAGE
    assert status.namespaces == {MODEL: 2, OTHER: 1}


def test_namespace_without_any_introduction_has_no_bytes(directory: Directory) -> None:
    stored = Inventory(["stray"], [0], Keys.of([key(1)]), [0], [1 << 20], [PAGE])
    directory.report("aa01", stored)
    (space,) = directory.manager.status("address", "1.0", directory.now).spaces
    assert (space.namespace, space.chunks, space.num_bytes, space.model) == ("stray", 1, None, "")
    assert [chunk.model for chunk in directory.reader.chunks()] == [""]


def test_namespace_that_only_a_disk_has_is_told(directory: Directory) -> None:
    directory.hold("aa01", [1])
    directory.put_on_disk("ab02", [1, 2], OTHER)
    assert [(each.namespace, each.chunks) for each in directory.manager.catalog.namespaces()] == [
        (MODEL, 1),
        (OTHER, 0),
    ]
    told = [each.namespace for each in directory.manager.catalog.space_page().spaces]
    assert told == [MODEL, OTHER]


def test_introductions_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.answers.catalog, "MAX_NAMESPACES", 2)
    for number in range(5):
        directory.hold("aa01", [number], f"space {number}")
    spaces = directory.manager.status("address", "1.0", directory.now).spaces
    assert [bool(space.model) for space in spaces] == [False, False, False, True, True]


# What is no message


@pytest.fixture
def actor(table: None) -> SchedulerActor:
    return SchedulerActor("address", "lru")


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": MAX_PAGE + 1},
        {"order": "beauty"},
        {"from_slot": -1},
        {"from_slot": 1 << 40},
        {"group": -1},
        {"key": bytes(1000)},
        {"namespace": "n" * 5000},
        {"from_node": "n" * 5000},
    ],
)
def test_query_that_can_not_be_meant_is_refused(
    actor: SchedulerActor, wrong: dict[str, Any]
) -> None:
    with pytest.raises(MessageError):
        actor.chunks(encode(ChunkQuery(PROTOCOL_VERSION, **wrong)))


def test_questions_of_another_version_or_too_long_are_refused(actor: SchedulerActor) -> None:
    for call, kind in ((actor.chunks, ChunkQuery(3)), (actor.where, WhereQuery(3, "n", []))):
        with pytest.raises(VersionError):
            call(encode(kind))
        with pytest.raises(MessageError):
            call(b"nonsense")
    with pytest.raises(MessageError):
        actor.where(encode(WhereQuery(PROTOCOL_VERSION, "n", [b"k"] * 2049)))
    with pytest.raises(MessageError):
        actor.where(encode(WhereQuery(PROTOCOL_VERSION, "n", [b""])))
    with pytest.raises(VersionError):
        actor.prefixes(encode(PrefixQuery(3, "n", "0:16", [], [])))
    with pytest.raises(MessageError):
        actor.prefixes(encode(PrefixQuery(PROTOCOL_VERSION, "n", "0:16", [b"k"], [2])))


def test_router_is_told_how_much_of_prompts_each_node_has(directory: Directory) -> None:
    first, second = NODES[:2]
    directory.hold(first, [1, 2, 3])
    directory.hold(second, [1, 2, 5])
    keys = [key(number) for number in (1, 2, 3, 4, 5, 6)]
    query = PrefixQuery(PROTOCOL_VERSION, MODEL, "0:16", [*keys, keys[4]], [6, 1])
    page = directory.manager.catalog.prefixes(query)
    rows = [page.tokens[: len(page.nodes)], page.tokens[len(page.nodes) :]]
    found = [dict(zip(page.nodes, row, strict=True)) for row in rows]
    assert (found[0][first], found[0][second]) == (48, 32)
    assert (found[1].get(first, 0), found[1][second]) == (0, 16)
    assert page.anywhere == [48, 16]
    other = directory.manager.catalog.prefixes(msgspec.structs.replace(query, namespace="other"))
    assert other.anywhere == [0, 0]


def test_router_is_told_of_disks_as_of_pools(directory: Directory) -> None:
    first, second, third = NODES[:3]
    directory.hold(first, [1])
    directory.put_on_disk(first, [2])
    directory.put_on_disk(second, [1, 2, 3])
    directory.hold(third, [7])
    keys = [key(number) for number in (1, 2, 3, 4)]
    page = directory.manager.catalog.prefixes(
        PrefixQuery(PROTOCOL_VERSION, MODEL, "0:16", keys, [4])
    )
    found = dict(zip(page.nodes, page.tokens, strict=True))
    assert (found[first], found[second], found.get(third, 0)) == (32, 48, 0)
    assert page.anywhere == [48]


def test_router_is_told_where_a_namespaces_engines_are(directory: Directory) -> None:
    for node in NODES[:2]:
        directory.hold(node, [1])
    page = directory.manager.catalog.space_page()
    (at,) = [n for n, space in enumerate(page.spaces) if space.namespace == MODEL]
    assert page.engine_nodes[at] == sorted(NODES[:2])
    assert page.spaces[at].model == f"{MODEL}'s"


NUMBER = st.integers(-2, 1 << 65)
NAME = st.text(max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    query=st.builds(
        dict,
        namespace=NAME,
        node_id=NAME,
        key=st.binary(max_size=40),
        group=st.none() | NUMBER,
        order=st.sampled_from(["", *ORDERS, "x"]),
        limit=NUMBER | st.integers(1, 5),
        from_node=NAME | st.sampled_from(["n", "n\0"]),
        from_slot=NUMBER | st.integers(0, 100),
    )
)
def test_absurd_queries_are_refused_or_answered(query: dict[str, Any]) -> None:
    manager = BlockManager(Epoch(1))
    report = NodeReport(PROTOCOL_VERSION, "n", 1, 1, 1 << 20, 1 << 16, 0, 0)
    manager.node_report(report, 0.0)
    actor = SchedulerActor("address", "lru")
    actor._manager = manager
    try:
        raw = encode(msgspec.convert({"version": PROTOCOL_VERSION, **query}, ChunkQuery))
    except (OverflowError, msgspec.ValidationError):
        return
    try:
        page = decode(actor.chunks(raw), ChunkPage)
    except RayKVError:
        return
    check_chunk_page(page, decode(raw, ChunkQuery))


def a_page(**changes: Any) -> ChunkPage:
    row: dict[str, Any] = {
        "nodes": ["n"],
        "namespaces": ["s"],
        "models": ["m"],
        "node_index": [0],
        "namespace_index": [0],
        "keys": [key(1)],
        "slots": [1],
        "generations": [1],
        "slot_bytes": [PAGE],
        "ages": [1.0],
        "idles": [1.0],
        "hits": [1],
        "is_replicated": [False],
        "is_on_disk": [False],
        "tenants": ["acme"],
        "tenant_index": [0],
    }
    return ChunkPage(PROTOCOL_VERSION, **{**row, **changes})


QUERY = ChunkQuery(PROTOCOL_VERSION, from_node="n", from_slot=5)


def test_page_that_can_be_meant_passes() -> None:
    check_chunk_page(a_page(), QUERY)
    (chunk,) = chunks_of(a_page())
    assert chunk == Chunk(
        key=key(1),
        node_id="n",
        namespace="s",
        model="m",
        group=0,
        num_bytes=PAGE,
        age_s=1.0,
        idle_s=1.0,
        hits=1,
        is_replicated=False,
        slot=1,
        generation=1,
        tenant="acme",
    )
    assert chunk.block_hash == key(1)[:-4]
    check_chunk_page(a_page(is_last=False, from_node="n", from_disk=True), QUERY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": []},
        {"keys": [b""]},
        {"node_index": [1]},
        {"node_index": [-1]},
        {"namespace_index": [1]},
        {"models": []},
        {"ages": []},
        {"is_replicated": []},
        {"is_on_disk": []},
        {"tenants": []},
        {"tenant_index": []},
        {"slots": [-1]},
        {"is_last": False, "from_node": "n", "from_slot": 5},
        {"is_last": False, "from_node": "m", "from_slot": 9},
        {"is_last": False, "from_node": "m", "from_slot": 9, "from_disk": True},
    ],
)
def test_page_that_can_not_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        check_chunk_page(a_page(**wrong), QUERY)


@pytest.mark.parametrize(
    "page",
    [
        WherePage(PROTOCOL_VERSION, 0),
        WherePage(PROTOCOL_VERSION, 3),
        WherePage(PROTOCOL_VERSION, 1, [Source("n")], [1], [0]),
        WherePage(PROTOCOL_VERSION, 2, [Source("n")], [0], [1]),
        WherePage(PROTOCOL_VERSION, 2, [Source("n")], [0], []),
    ],
)
def test_answer_to_where_that_can_not_be_meant_is_refused(page: WherePage) -> None:
    with pytest.raises(MessageError):
        check_where_page(page, WhereQuery(PROTOCOL_VERSION, "n", [b"a", b"b"]))
