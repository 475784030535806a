"""What the directory knows of disks: told in order, it answers and offers what pools give up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from raykv.base.clearings import Clearings
from raykv.base.ids import SLOT_ALIGNMENT, Epoch, Key, Namespace, NodeId
from raykv.directory.disks import MAX_DEMOTED, MAX_STALE, MAX_SWEPT, Disks
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.table.protocol import Changes
from raykv.protocol.columns import Keys, LostReplicas, Source, SourceKind
from raykv.protocol.engine import AttachEngine, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import (
    DiskChunks,
    DiskNews,
    DiskOrder,
    DiskStats,
    Inventory,
    NodeReport,
    NodeReportReply,
    NodeStats,
)
from raykv.protocol.operator import TransferOrder
from tests.fixtures.directory.tables import TABLES, use_table

PAGE = SLOT_ALIGNMENT
MODEL = Namespace("model")
OPEN = DiskStats(path="/disk", room=100)


def report(
    *,
    node: str = "node",
    epoch: int = 7,
    seq: int = 1,
    listing: int = 1,
    after: int = 0,
    came: Sequence[tuple[int, str]] = (),
    gone: Sequence[int] = (),
    stats: DiskStats = OPEN,
    generation: int = 5,
    stored: Inventory = Inventory(),  # noqa: B008
) -> NodeReport:
    """With chunks that came to places of the node's disk."""
    news = DiskNews(
        listing=listing,
        after=after,
        upto=max([after, *gone, *(place for place, _ in came)]),
        came=DiskChunks(
            [str(MODEL)] if came else [],
            [0] * len(came),
            [name.encode() for _, name in came],
            [place for place, _ in came],
            [generation] * len(came),
            [PAGE] * len(came),
        ),
        gone=list(gone),
    )
    return NodeReport(
        version=PROTOCOL_VERSION,
        node_id=node,
        epoch=epoch,
        seq=seq,
        pool_bytes=8 * PAGE,
        slab_bytes=4 * PAGE,
        highest_generation=0,
        scheduler_epoch=0,
        stored=stored,
        stats=NodeStats(pool_bytes=8 * PAGE, disk=stats),
        disk=news,
    )


def known(disks: Disks, *names: str) -> list[list[tuple[str, int]]]:
    """Node and place of each."""
    disks.check()
    return [
        [(each.node_id, each.place) for each in disks.find(MODEL, Key(name.encode()))]
        for name in names
    ]


def evicted(names: str, hits: int = 0) -> Changes:
    count = len(names)
    slots, generations = list(range(count)), [3] * count
    keys = [name.encode() for name in names]
    return Changes(False, MODEL, keys, slots, generations, hits=[hits] * count)


# News


def test_chunks_come_and_go_as_they_are_told() -> None:
    disks = Disks()
    assert disks.take(report(came=[(1, "a"), (2, "b")]), Clearings()).heard == 2
    disks.take(report(node="other", came=[(1, "a")]), Clearings())
    assert known(disks, "a", "b") == [[("node", 1), ("other", 1)], [("node", 2)]]
    # "a" went, and came again in another file.
    assert disks.take(report(after=2, came=[(4, "a")], gone=[3, 1]), Clearings()).heard == 4
    assert known(disks, "a", "b") == [[("other", 1), ("node", 4)], [("node", 2)]]


def test_news_with_a_gap_are_not_taken_in() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a")]), Clearings())
    order = disks.take(report(after=3, came=[(4, "b")]), Clearings())
    assert (order.listing, order.heard) == (1, 1)
    assert known(disks, "a", "b") == [[("node", 1)], []]


def test_repeated_news_change_nothing() -> None:
    disks = Disks()
    for _ in range(2):
        assert disks.take(report(came=[(1, "a")]), Clearings()).heard == 1
    assert known(disks, "a") == [[("node", 1)]]


@pytest.mark.parametrize("changed", [{"listing": 2}, {"epoch": 8}])
def test_new_listing_or_life_begins_with_nothing(changed: dict[str, Any]) -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a")]), Clearings())
    order = disks.take(report(after=1, came=[(2, "b")], **changed), Clearings())
    assert order.heard == 0
    assert known(disks, "a", "b") == [[], []]


def test_node_without_a_disk_has_nothing_and_is_offered_nothing() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a")]), Clearings())
    assert disks.take(report(listing=0), Clearings()) == DiskOrder()
    assert known(disks, "a") == [[]]
    assert not disks.is_open(NodeId("node"))


def test_cleared_chunks_are_not_believed_again() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a")]), Clearings())
    disks.demote(NodeId("node"), evicted("b"), [0])
    disks.clear(MODEL)
    assert known(disks, "a") == [[]]
    assert not disks.holds_any(MODEL)
    order = disks.take(report(after=1, came=[(2, "a")]), Clearings({MODEL: 5}))
    assert known(disks, "a") == [[]]
    assert len(order.demoted) == 0


def test_disk_that_is_gone_leaves_no_trace_and_is_taken_away_bit_by_bit() -> None:
    disks = Disks()
    places = [(place, f"chunk {place}") for place in range(1, 2 * MAX_SWEPT + 2)]
    disks.take(report(came=places), Clearings())
    disks.take(report(node="other", came=[(1, "chunk 1")]), Clearings())
    disks.lost(NodeId("node"))
    assert known(disks, "chunk 1", "chunk 2") == [[("other", 1)], []]
    # Back with a new listing, in which the same place has another chunk.
    disks.take(report(listing=2, came=[(2, "chunk 3")]), Clearings())
    assert known(disks, "chunk 1", "chunk 2", "chunk 3") == [[("other", 1)], [], [("node", 2)]]
    for _ in range(3):
        disks.take(report(listing=2, after=2), Clearings())
        disks.check()
    disks.lost(NodeId("node"))
    disks.lost(NodeId("other"))
    disks.take(report(node="third", stats=DiskStats(), listing=0), Clearings())
    assert not disks.holds_any(MODEL)


def test_large_disk_that_is_gone_is_taken_away_in_linear_time() -> None:
    disks = Disks()
    count = 250_000
    disks.take(report(came=[(place, f"{place}") for place in range(1, count + 1)]), Clearings())
    disks.lost(NodeId("node"))
    third = report(node="third", stats=DiskStats(), listing=0)
    began = time.process_time()
    for _ in range(count // MAX_SWEPT + 1):
        disks.take(third, Clearings())
    assert not disks.holds_any(MODEL)
    # It takes 0.3 s; to pass by all that have gone took more than 20 s.
    assert time.process_time() - began < 5


def test_cleared_namespace_is_found_no_more_and_its_new_chunks_stay() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a"), (2, "b")]), Clearings())
    disks.clear(MODEL)
    assert known(disks, "a", "b") == [[], []]
    assert not disks.holds_any(MODEL)
    disks.take(report(after=2, came=[(3, "a")], gone=[1], generation=9), Clearings({MODEL: 5}))
    assert known(disks, "a", "b") == [[("node", 3)], []]
    disks.take(report(after=3, gone=[2, 3], generation=9), Clearings())
    assert known(disks, "a", "b") == [[], []]


def test_lost_chunks_are_forgotten_at_that_generation_only() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a"), (2, "b")]), Clearings())
    lost = LostReplicas(
        [Source("node", SourceKind.DISK), Source("node", SourceKind.DISK), Source("node")],
        Keys.of([b"a", b"b", b"b"]),
        [5, 4, 5],
    )
    disks.drop_lost(MODEL, lost)
    assert known(disks, "a", "b") == [[], [("node", 2)]]


# What is given up


def places_on(disks: Disks, most: int) -> list[int]:
    """Of a whole listing, stretch by stretch."""
    found: list[int] = []
    first: int | None = 0
    while first is not None:
        stretch = disks.stretch(NodeId("node"), first, most, None)
        assert stretch.length <= most
        found += [each.place for _, each in stretch.chunks]
        first = stretch.following
    return found


@pytest.mark.parametrize("most", [1, 3, 100])
def test_stretches_list_what_is_there_in_order(most: int) -> None:
    disks = Disks()
    disks.take(report(came=[(number, f"k{number}") for number in range(1, 9)]), Clearings(), 50.0)
    disks.take(report(node="other", came=[(1, "k1")]), Clearings())
    disks.take(report(after=8, came=[(12, "k1")], gone=[9, 2, 3, 8]), Clearings())
    disks.check()
    assert places_on(disks, most) == [1, 4, 5, 6, 7, 12]
    (first,) = disks.stretch(NodeId("node"), 0, 1, MODEL).chunks
    assert (first[0], first[1].since, first[1].num_bytes) == ((MODEL, b"k1"), 50.0, PAGE)
    assert disks.stretch(NodeId("node"), 0, 9, Namespace("other")).chunks == []
    assert disks.stretch(NodeId("nobody"), 0, 9, None).following is None
    disks.clear(MODEL)
    assert places_on(disks, most) == []


def test_places_that_are_gone_are_forgotten() -> None:
    disks = Disks()
    count = 3 * MAX_STALE
    disks.take(report(came=[(number, f"k{number}") for number in range(1, count + 1)]), Clearings())
    disks.take(report(after=count, gone=list(range(1, count))), Clearings())
    disks.check()
    assert disks._disks[NodeId("node")].places == [count]


def test_places_out_of_order_are_listed_in_order() -> None:
    """No honest node tells them so."""
    disks = Disks()
    disks.take(report(came=[(5, "a"), (2, "b"), (9, "c")]), Clearings())
    disks.check()
    assert places_on(disks, 2) == [2, 5, 9]


def test_evicted_chunks_are_offered_once() -> None:
    disks = Disks()
    disks.take(report(came=[(1, "a")]), Clearings())
    disks.demote(NodeId("node"), evicted("abc"), [0, 1])
    demoted = disks.take(report(after=1), Clearings()).demoted
    assert (demoted.keys, demoted.slots, demoted.generations) == ([b"b"], [1], [3])
    assert demoted.namespaces == [MODEL]
    assert len(disks.take(report(after=1), Clearings()).demoted) == 0


def test_full_disk_is_offered_what_was_used_only() -> None:
    disks = Disks()
    disks.take(report(stats=DiskStats(path="/disk", room=100, is_full=True)), Clearings())
    disks.demote(NodeId("node"), evicted("ab"), [0, 1])
    disks.demote(NodeId("node"), evicted("c", hits=1), [0])
    assert disks.take(report(), Clearings()).demoted.keys == [b"c"]


def test_disk_is_offered_no_more_than_it_has_room_for() -> None:
    disks = Disks()
    few = DiskStats(path="/disk", room=2)
    disks.take(report(stats=few), Clearings())
    disks.demote(NodeId("node"), evicted("abc"), [0, 1, 2])
    assert disks.take(report(stats=few), Clearings()).demoted.keys == [b"a", b"b"]
    assert disks.take(report(stats=few), Clearings()).demoted.keys == [b"c"]


def test_offers_are_bounded() -> None:
    disks = Disks()
    disks.take(report(), Clearings())
    for _ in range(3):
        disks.demote(NodeId("node"), evicted("x" * MAX_DEMOTED), range(MAX_DEMOTED))
    offered = 0
    while count := len(
        disks.take(report(stats=DiskStats(path="/d", room=10_000)), Clearings()).demoted
    ):
        offered += count
    assert offered == MAX_DEMOTED


def test_what_was_just_evicted_is_taken_whole_and_in_order() -> None:
    """However little room was told: all of it is overwritten otherwise."""
    disks = Disks()
    disks.take(report(stats=DiskStats(path="/disk", room=1)), Clearings())
    count = MAX_DEMOTED - 1
    disks.demote(NodeId("node"), evicted("ab"), [0, 1])
    mark = disks.num_demoted(NodeId("node"))
    changes = Changes(
        False,
        MODEL,
        [f"{number}".encode() for number in range(count)],
        list(range(count)),
        [3] * count,
        hits=[0] * count,
    )
    disks.demote(NodeId("node"), changes, range(count))
    # Of the oldest one is lost, the other waits.
    assert disks.take_demoted(NodeId("node"), mark).keys == changes.keys
    assert disks.take_demoted(NodeId("node"), 0).keys == [b"b"]
    assert len(disks.take_demoted(NodeId("nobody"), 0)) == 0


def test_disk_that_can_not_be_written_is_not_open() -> None:
    disks = Disks()
    disks.take(report(stats=DiskStats(path="/disk", problem="it is full")), Clearings())
    assert not disks.is_open(NodeId("node"))
    assert not disks.is_open(NodeId("other"))


# In the block manager


class Desk:
    """A manager with two nodes, of which the first has an engine, and a clock."""

    def __init__(self) -> None:
        self.manager = BlockManager(Epoch(1), ManagerSettings())
        self.now = 1000.0
        self.seq = 0
        self.heard = {"node": 0, "other": 0}
        for node in ("node", "other"):
            self.report(node=node)
        self.manager.attach_engine(
            AttachEngine(PROTOCOL_VERSION, "engine", "node", MODEL, "m", 1, {0: PAGE}), self.now
        )

    def report(self, node: str = "node", **more: Any) -> NodeReportReply:
        self.seq += 1
        message = report(node=node, seq=self.seq, after=self.heard[node], **more)
        reply = self.manager.node_report(message, self.now)
        self.heard[node] = reply.disk.heard
        self.manager.check()
        return reply

    def sync(self, asked: Sequence[bytes] = (), wanted: int = 0) -> SyncReply:
        self.seq += 1
        request = SyncRequest(
            "engine",
            self.manager.epoch,
            self.seq,
            asked=Keys.of(list(asked)),
            wanted={0: wanted} if wanted else {},
        )
        reply = self.manager.sync(request, self.now)
        self.manager.check()
        return reply

    def store(self, names: str) -> None:
        """The engine stores chunks at new leases; the first is the first to be given up."""
        granted = self.sync(wanted=len(names)).granted
        stored = Inventory(
            [str(MODEL)],
            [0] * len(names),
            Keys.of([name.encode() for name in reversed(names)]),
            granted.slots[::-1],
            granted.generations[::-1],
            [PAGE] * len(names),
        )
        self.report(stored=stored)


@pytest.fixture(params=TABLES)
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    use_table(monkeypatch, request.param)
    return Desk()


def test_what_the_pool_evicts_is_offered_to_the_disk_of_its_node(desk: Desk) -> None:
    desk.store("abcdefgh")
    assert len(desk.report().disk.demoted) == 0
    desk.sync(wanted=2)
    demoted = desk.report().disk.demoted
    assert demoted.keys == [b"a", b"b"]
    assert desk.manager.holds(NodeId("node"), MODEL, Key(b"a")) is None


def test_slab_that_gets_another_slot_size_is_offered_before_it_is_used(desk: Desk) -> None:
    desk.store("abcdefgh")
    for each in ("a", "x"):
        order = TransferOrder(
            PROTOCOL_VERSION, f"t{each}", MODEL, "node", [each.encode() + b"2"], [2 * PAGE]
        )
        grant = desk.manager.transfers.lend(order, desk.now, paused=False)
        desk.manager.check()
        assert (len(grant.handles), grant.no_room) == (1, 0)
        if each == "a":
            assert sorted(grant.demoted.keys) == [b"a", b"b", b"c", b"d"]
            assert sorted(grant.demoted.slots) == [0, 1, 2, 3]
        else:
            assert len(grant.demoted) == 0
    assert desk.manager.holds(NodeId("node"), MODEL, Key(b"a")) is None
    assert desk.manager.holds(NodeId("node"), MODEL, Key(b"h")) is not None
    # The engine's mirror has heard of it in any case.
    assert sorted(desk.sync().removed.keys) == [b"a", b"b", b"c", b"d"]


def test_import_beside_another_slot_size_stops_at_its_share(desk: Desk) -> None:
    desk.store("abcdefgh")
    lent = []
    for number in range(3):
        order = TransferOrder(
            PROTOCOL_VERSION,
            f"t{number}",
            MODEL,
            "node",
            [b"%d" % number],
            [2 * PAGE],
            series_id="import",
        )
        grant = desk.manager.transfers.lend(order, desk.now, paused=False)
        lent.append(len(grant.handles))
        columns = (grant.handles.keys, grant.handles.slots, grant.handles.generations)
        count = len(grant.handles)
        rows = Inventory([str(MODEL)], [0] * count, *columns, grant.slot_bytes)
        desk.report(stored=rows)
    # One of two slabs, with two of them; what it has brought stays.
    assert lent == [1, 1, 0]
    for number in range(2):
        assert desk.manager.holds(NodeId("node"), MODEL, Key(b"%d" % number)) is not None


def test_what_another_pool_has_is_not_offered(desk: Desk) -> None:
    desk.store("abcdefgh")
    copy = Inventory([str(MODEL)], [0], Keys.of([b"a"]), [0], [1 << 40], [PAGE])
    desk.report(node="other", stored=copy)
    desk.sync(wanted=2)
    assert b"a" not in desk.report().disk.demoted.keys


def test_question_is_answered_with_disks_where_no_pool_has_the_chunk(desk: Desk) -> None:
    desk.store("a")
    desk.report(came=[(1, "a"), (2, "b")])
    desk.report(node="other", came=[(1, "b"), (2, "c")])
    replicas = desk.sync(asked=Keys.of([b"a", b"b", b"c", b"d"])).replicas
    rows = [
        (key, replicas.sources[node], replicas.node_epochs[node], slot)
        for key, node, slot in zip(
            replicas.key_index, replicas.source_index, replicas.slots, strict=True
        )
    ]
    assert [row for row in rows if row[0] == 0] == [(0, Source("node"), 7, rows[0][3])]
    own, other = Source("node", SourceKind.DISK), Source("other", SourceKind.DISK)
    assert rows[1:] == [(1, own, 7, 2), (1, other, 7, 1), (2, other, 7, 2)]
    assert replicas.pending == []


def test_chunks_on_its_own_disk_are_a_reason_to_ask(desk: Desk) -> None:
    assert not desk.sync().has_peers
    desk.report(came=[(1, "a")])
    assert desk.sync().has_peers


def test_clearing_empties_the_disks_too(desk: Desk) -> None:
    desk.report(came=[(1, "a")])
    desk.manager.clear()
    assert desk.sync(asked=Keys.of([b"a"])).replicas.key_index == []
    # The node tells of it again, since it had not heard of the clearing.
    desk.heard["node"] = 0
    desk.report(listing=2, came=[(1, "a")], generation=int(desk.manager._generations.last))
    assert desk.sync(asked=Keys.of([b"a"])).replicas.key_index == []


def test_disk_of_a_lost_node_is_lost(desk: Desk) -> None:
    desk.report(node="other", came=[(1, "c")])
    desk.now += 4.0
    desk.report()
    desk.sync()
    desk.now += 4.0
    desk.manager.expire(desk.now)
    desk.manager.check()
    assert desk.sync(asked=Keys.of([b"c"])).replicas.key_index == []
