"""Transfers without an engine: what is lent to a node, and what is given up elsewhere."""

from __future__ import annotations

import pytest

import raykv.directory.transfers
from raykv.base.ids import NodeId
from raykv.directory.transfers import OWNER
from raykv.protocol.columns import Keys, LostReplicas, Source, SourceKind
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import DiskChunks, DiskNews, Inventory
from raykv.protocol.operator import (
    Released,
    ReleaseOrder,
    TransferEnd,
    TransferGrant,
    TransferOrder,
)
from tests.fixtures.directory.pinned import PAGE, SPACE, Cluster, key

pytestmark = pytest.mark.usefixtures("table")


@pytest.fixture
def two() -> Cluster:
    """Node "a" has chunks 0 to 5, node "b" nothing."""
    made = Cluster()
    made.add("a")
    made.add("b")
    made.store("a", *range(6))
    return made


def lend(
    cluster: Cluster, *numbers: int, node: str = "b", name: str = "t", paused: bool = False
) -> TransferGrant:
    order = TransferOrder(PROTOCOL_VERSION, name, SPACE, node, [key(n) for n in numbers])
    grant = cluster.manager.transfers.lend(order, cluster.now, paused=paused)
    cluster.manager.check()
    return grant


def put_on_disk(cluster: Cluster, node: str, *numbers: int, size: int = PAGE) -> None:
    """At the first places of a disk that was not known before."""
    count = len(numbers)
    places = list(range(1, count + 1))
    came = DiskChunks(
        [SPACE], [0] * count, [key(n) for n in numbers], places, [5] * count, [size] * count
    )
    cluster.report(node, disk=DiskNews(1, 0, count, came))


def end(cluster: Cluster, *came: int, name: str = "t", lost: LostReplicas | None = None) -> None:
    message = TransferEnd(PROTOCOL_VERSION, name, SPACE, list(came), lost or LostReplicas())
    cluster.manager.transfers.end(message)
    cluster.manager.check()


def arrive(cluster: Cluster, grant: TransferGrant, *positions: int) -> None:
    """The NodeActor reports some of what was lent."""
    handles = grant.handles
    count = len(positions)
    rows = Inventory(
        [SPACE],
        [0] * count,
        Keys.of([handles.keys[at] for at in positions]),
        [handles.slots[at] for at in positions],
        [handles.generations[at] for at in positions],
        [PAGE] * count,
    )
    cluster.report("b", rows)


def num_leased(cluster: Cluster, node: str = "b") -> int:
    leases = cluster.manager._nodes[NodeId(node)].book.leases().values()
    return sum(lease.engine_id == OWNER for lease in leases)


def release(cluster: Cluster, *numbers: int) -> Released:
    order = ReleaseOrder(PROTOCOL_VERSION, SPACE, "b", [key(n) for n in numbers])
    released = cluster.manager.transfers.release(order)
    cluster.manager.check()
    return released


def test_chunks_that_others_have_get_slots_and_sources(two: Cluster) -> None:
    grant = lend(two, 0, 1, 9)
    assert not grant.error
    assert grant.handles.keys == [key(0), key(1)]
    assert grant.slot_bytes == [PAGE, PAGE]
    assert (grant.there, grant.nowhere, grant.no_room) == (0, 1, 0)
    assert grant.sources.sources == [Source("a")]
    assert grant.sources.key_index == [0, 1]
    assert num_leased(two) == 2


def test_chunks_that_are_only_on_disks_get_slots_and_sources(two: Cluster) -> None:
    put_on_disk(two, "b", 1, 7, 8)
    put_on_disk(two, "a", 7)
    # In the order of the prompt, wherever they are.
    grant = lend(two, 7, 0, 8, 1, 9)
    assert grant.handles.keys == [key(7), key(0), key(8), key(1)]
    assert grant.slot_bytes == [PAGE] * 4
    assert (grant.there, grant.nowhere, grant.no_room) == (0, 1, 0)
    sources = grant.sources
    columns = zip(sources.key_index, sources.source_index, sources.slots, strict=True)
    assert sorted((at, sources.sources[node], slot) for at, node, slot in columns if at != 1) == [
        (0, Source("a", SourceKind.DISK), 1),
        (0, Source("b", SourceKind.DISK), 2),
        (2, Source("b", SourceKind.DISK), 3),
        # It is in a pool: no disk is asked.
        (3, Source("a"), 1),
    ]
    assert (
        dict(zip(sources.sources, sources.node_epochs, strict=True))[Source("b", SourceKind.DISK)]
        == 1
    )
    # The own disk goes first.
    assert next(
        sources.sources[node]
        for at, node in zip(sources.key_index, sources.source_index, strict=True)
        if at == 0
    ) == Source("b", SourceKind.DISK)
    arrive(two, grant, 0, 2)
    assert two.held("b", 7, 8) == [7, 8]
    end(two, *grant.handles.slots[:1], grant.handles.slots[2])
    again = lend(two, 7, 0, 8, name="next")
    assert (again.there, again.handles.keys) == (2, Keys.of([key(0)]))


@pytest.mark.parametrize("size", [0, -PAGE, 1, PAGE + 1, 1 << 62])
def test_chunk_on_a_disk_that_fits_no_slot_is_not_lent_for(two: Cluster, size: int) -> None:
    put_on_disk(two, "a", 7, size=size)
    grant = lend(two, 7, 0)
    assert grant.handles.keys == [key(0)]
    assert grant.nowhere + grant.no_room == 1
    # Another disk may say something that can be.
    put_on_disk(two, "b", 7)
    if size % PAGE or size <= 0:
        assert lend(two, 7, name="next").handles.keys == [key(7)]


def test_what_is_evicted_for_a_transfer_goes_to_the_disk_with_the_grant(two: Cluster) -> None:
    put_on_disk(two, "b", 20)
    two.store("b", *range(10, 18))
    grant = lend(two, 0, 20)
    assert len(grant.handles) == 2
    gone = [number for number in range(10, 18) if not two.held("b", number)]
    # The tail of what was stored goes first.
    assert grant.demoted.keys == [key(number) for number in reversed(gone)]
    assert grant.demoted.slots == grant.handles.slots
    # Nobody is told twice, but by the same answer.
    assert lend(two, 0, 20).demoted == grant.demoted
    assert lend(two, 1, name="next").demoted.keys not in ([], grant.demoted.keys)


def test_grant_carries_what_was_evicted_for_it_and_nothing_older(two: Cluster) -> None:
    put_on_disk(two, "b", 20)
    # Two more than there is room for: the first two wait for the disk's next report.
    two.store("b", *range(10, 18))
    two.sync("b", {0: 2})
    grant = lend(two, 0, 1)
    assert grant.demoted.slots == grant.handles.slots
    assert len(grant.demoted) == 2
    waiting = two.manager._disks.take_demoted(NodeId("b"), 0)
    assert len(waiting) == 2
    assert not {*waiting.keys} & {*grant.demoted.keys}


def test_what_a_disk_does_not_have_any_more_is_forgotten(two: Cluster) -> None:
    put_on_disk(two, "b", 7)
    lend(two, 7)
    end(two, lost=LostReplicas([Source("b", SourceKind.DISK)], Keys.of([key(7)]), [5]))
    again = lend(two, 7, name="next")
    assert (len(again.handles), again.nowhere) == (0, 1)


def test_chunk_on_a_disk_is_not_taken_from_there_when_it_comes_from_outside(two: Cluster) -> None:
    put_on_disk(two, "b", 7)
    order = TransferOrder(PROTOCOL_VERSION, "t", SPACE, "b", [key(7), key(8)], [PAGE, PAGE])
    grant = two.manager.transfers.lend(order, two.now, paused=False)
    assert (grant.there, grant.nowhere, len(grant.handles)) == (0, 0, 2)
    assert grant.sources.key_index == []


def test_what_has_come_is_held_and_what_has_not_is_free_again(two: Cluster) -> None:
    grant = lend(two, 0, 1, 2)
    arrive(two, grant, 0, 1)
    assert two.held("b", *range(3)) == [0, 1]
    end(two, *grant.handles.slots[:2])
    assert num_leased(two) == 0
    assert two.manager.transfers.num_lent == 0
    again = lend(two, 0, 1, 2, name="next")
    assert (again.there, again.handles.keys) == (2, Keys.of([key(2)]))


def test_lease_of_a_chunk_that_came_stays_until_it_is_reported(two: Cluster) -> None:
    grant = lend(two, 0, 1)
    end(two, grant.handles.slots[0])
    assert num_leased(two) == 1
    arrive(two, grant, 0)
    assert two.held("b", 0, 1) == [0]
    assert num_leased(two) == 0


def test_order_that_comes_again_gets_the_same_answer(two: Cluster) -> None:
    assert lend(two, 0, 1) == lend(two, 0, 1)
    assert num_leased(two) == 2
    end(two)
    end(two)
    assert num_leased(two) == 0


def test_transfer_that_nobody_ends_is_over_after_a_while(two: Cluster) -> None:
    lend(two, 0, 1)
    two.now += two.manager.settings.transfer_s
    two.manager.transfers.expire(two.now)
    two.manager.check()
    assert num_leased(two) == 0


def test_first_chunks_of_a_prefix_get_the_slots_that_there_are(two: Cluster) -> None:
    two.sync("b", {0: 6})
    grant = lend(two, *range(6))
    assert grant.handles.keys == [key(0), key(1)]
    assert grant.no_room == 4


def test_what_is_there_is_not_evicted_for_what_is_to_come(two: Cluster) -> None:
    two.store("b", 20, 21, 22, 23, 24, 25, 0, 1)
    grant = lend(two, *range(6))
    assert (grant.there, len(grant.handles)) == (2, 4)
    assert two.held("b", 0, 1) == [0, 1]


def test_nothing_is_lent_by_a_node_without_a_pool_or_while_paused(two: Cluster) -> None:
    assert "node nobody has no pool" in lend(two, 0, node="nobody").error
    assert "paused" in lend(two, 0, paused=True).error
    assert num_leased(two) == 0


def test_transfers_are_bounded(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.transfers, "MAX_TRANSFERS", 1)
    lend(two, 0)
    assert "1 transfers are under way" in lend(two, 1, name="other").error
    end(two)
    assert not lend(two, 1, name="other").error


def test_leases_of_a_node_that_is_gone_end_with_it(two: Cluster) -> None:
    lend(two, 0, 1)
    two.manager._lose(two.manager._nodes[NodeId("b")])
    end(two)
    two.manager.transfers.expire(two.now + 1e6)
    two.manager.check()
    assert two.manager.transfers.num_lent == 0


def test_replica_that_a_source_has_lost_leaves_the_directory(two: Cluster) -> None:
    grant = lend(two, 0)
    end(two, lost=LostReplicas([Source("a")], Keys.of([key(0)]), [grant.sources.generations[0]]))
    assert two.held("a", 0) == []


def test_replicas_elsewhere_are_given_up_once_the_node_has_the_chunk(two: Cluster) -> None:
    grant = lend(two, 0, 1)
    assert release(two, 0, 1) == Released(PROTOCOL_VERSION, 0, 0, absent=2)
    assert two.held("a", 0, 1) == [0, 1]
    arrive(two, grant, 0, 1)
    assert release(two, 0, 1) == Released(PROTOCOL_VERSION, 2, 0, 0)
    assert two.held("a", *range(6)) == [2, 3, 4, 5]
    assert two.held("b", 0, 1) == [0, 1]


def test_replica_that_is_pinned_is_given_up_only_for_one_that_is_pinned_too(two: Cluster) -> None:
    assert not two.pin(0).error
    assert not two.pin(*range(10, 14), pin_id="full").error
    two.store("b", *range(10, 14))
    grant = lend(two, 0)
    arrive(two, grant, 0)
    assert release(two, 0) == Released(PROTOCOL_VERSION, 0, 1, 0), "pins of node b are full"
    two.manager.pins.unpin("full", two.now)
    assert release(two, 0) == Released(PROTOCOL_VERSION, 1, 0, 0)
    assert two.held("b", 0) == [0]


def test_replicas_of_many_nodes_are_looked_for_piece_by_piece(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.transfers, "_MAX_FOUND", 2)
    grant = lend(two, *range(5))
    arrive(two, grant, *range(5))
    assert release(two, *range(5)).dropped == 5


def test_node_whose_leases_are_not_known_yet_lends_later_and_says_so(two: Cluster) -> None:
    node = two.manager._nodes[NodeId("b")]
    node.settled_at = two.now + 2.0
    early = lend(two, 0)
    assert "just begun to report" in early.error
    assert early.is_early
    # Waiting does not help against a pause.
    assert not lend(two, 0, paused=True).is_early
    two.now += 2.0
    grant = lend(two, 0)
    assert not grant.error
    assert len(grant.handles) == 1


def test_chunks_from_outside_get_slots_where_nobody_has_them(two: Cluster) -> None:
    keys: list[bytes] = [key(0), key(90), key(91)]
    order = TransferOrder(PROTOCOL_VERSION, "t", SPACE, "a", keys, [PAGE] * 3)
    grant = two.manager.transfers.lend(order, two.now, paused=False)
    assert (grant.there, grant.nowhere) == (1, 0)
    assert grant.handles.keys == keys[1:]
    assert grant.slot_bytes == [PAGE] * 2


def bring(cluster: Cluster, *numbers: int) -> TransferGrant:
    """One page of an import to node "b"; all of it comes."""
    count = len(numbers)
    order = TransferOrder(
        PROTOCOL_VERSION,
        f"import-{numbers[0]}",
        SPACE,
        "b",
        [key(number) for number in numbers],
        [PAGE] * count,
        series_id="import",
    )
    grant = cluster.manager.transfers.lend(order, cluster.now, paused=False)
    arrive(cluster, grant, *range(len(grant.handles)))
    end(cluster, *grant.handles.slots, name=order.transfer_id)
    return grant


def test_prefetch_of_several_pages_does_not_evict_what_it_has_brought(two: Cluster) -> None:
    two.store("a", *range(20, 28))
    two.store("b", *range(10, 16))
    two.pin(10, 11, ttl_s=500.0)
    rooms = []
    for first in (20, 24):
        wanted: list[bytes] = [key(number) for number in range(first, first + 4)]
        order = TransferOrder(
            PROTOCOL_VERSION, f"page-{first}", SPACE, "b", wanted, series_id="prefetch"
        )
        grant = two.manager.transfers.lend(order, two.now, paused=False)
        rooms.append(grant.no_room)
        arrive(two, grant, *range(len(grant.handles)))
        end(two, *grant.handles.slots, name=order.transfer_id)
        two.now += 40
    assert rooms == [0, 2]
    assert two.held("b", *range(10, 30)) == [10, 11, *range(20, 26)]


def test_import_does_not_evict_what_it_has_brought(two: Cluster) -> None:
    two.store("b", *range(10, 16))
    two.pin(10, 11, ttl_s=500.0)
    # There is room for six beside what is pinned.
    assert bring(two, 20, 21, 22).no_room == 0
    two.now += 40
    assert bring(two, 23, 24, 25, 26).no_room == 1
    two.now += 40
    assert bring(two, 27, 28, 29).no_room == 3
    assert two.held("b", *range(10, 30)) == [10, 11, *range(20, 26)]
    # It is over, or was given up.
    two.now += 61
    two.manager.transfers.expire(two.now)
    assert len(lend(two, 0, 1).handles) == 2
    assert not two.manager.transfers._series
