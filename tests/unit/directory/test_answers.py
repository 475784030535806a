"""What people, routers and readers of events get to know of the directory."""

from __future__ import annotations

import msgspec
import pytest

from raykv.base.ids import Namespace, Stamp
from raykv.directory import answers
from raykv.directory.known.directory import Directory
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.engine import EngineHello
from raykv.protocol.events import BlockStored, EventPage, LifeBegan, NodeJoined, events_of
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import Where
from raykv.protocol.measures import OWN_NODE, BreakerReport, OpenBreaker
from raykv.protocol.node import DiskStats, NodeStats, ReportedEngine
from raykv.protocol.operator import OrderedShare, OrdersDocument
from raykv.protocol.reader import WhereQuery
from raykv.protocol.status import ClusterStatus
from tests.fixtures.directory.reporting import (
    LIFE,
    SPACE,
    TwoNodes,
    engine_of,
    key_of,
    row_of,
    two_nodes,
)

BASE = ClusterStatus("here", LIFE, "1.0", paused=False)


@pytest.fixture
def cluster() -> TwoNodes:
    return two_nodes()


# Events


def page_of(directory: Directory, life: int, after: int, now: float = 0.0) -> EventPage:
    return decode(encode(answers.event_page(directory, life, after, now)), EventPage)


def test_events_follow_on_the_place_that_a_reader_knows(cluster: TwoNodes) -> None:
    directory, _, one, _ = cluster
    one.report(2.0, row_of(1))
    page = page_of(directory, LIFE, 0, now=5.0)
    began, joined, *rest = events_of(page, 100.0)
    assert (began, joined) == (
        LifeBegan(life=LIFE, seq=1, time=97.0),
        NodeJoined(life=LIFE, seq=2, time=97.0, node_id="one", node_life=1, number=0),
    )
    (stored,) = (each for each in rest if isinstance(each, BlockStored))
    assert (stored.node_id, stored.node_life, stored.number) == ("one", 1, 1)
    assert (stored.namespace, stored.key) == (SPACE, key_of(1))
    assert not page.is_gap
    later = page_of(directory, LIFE, page.last_seq)
    assert (len(later), later.first_seq, later.is_gap) == (0, page.last_seq + 1, False)


def test_reader_of_another_life_begins_anew(cluster: TwoNodes) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, row_of(1))
    for life, after in ((LIFE - 1, 2), (LIFE + 1, 0), (LIFE, 1 << 40)):
        page = page_of(directory, life, after)
        assert page.life == LIFE
        assert isinstance(next(events_of(page)), LifeBegan)
        assert not page.is_gap


def test_reader_that_fell_behind_learns_it() -> None:
    directory, _, one, _ = two_nodes(most_events=4)
    one.report(0.0, *map(row_of, range(9)))
    page = page_of(directory, LIFE, 1)
    assert page.is_gap
    assert (page.first_seq, len(page)) == (page.last_seq - 3, 4)


# Chunks


def test_chunk_is_where_nodes_have_it_in_pools_and_on_disks(
    cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _, one, two = cluster
    one.report(0.0, row_of(1), row_of(2, Where.RAM | Where.DISK))
    two.report(0.0, row_of(2, Where.DISK), row_of(3, Where.COMING))
    query = WhereQuery(SPACE, [key_of(number) for number in range(4)])
    page = answers.where_page(directory, query)
    rows = {(at, each) for at, some in enumerate(page.sources(query)) for each in some}
    assert rows == {
        (1, Source("one")),
        (2, Source("one")),
        (2, Source("one", SourceKind.DISK)),
        (2, Source("two", SourceKind.DISK)),
    }
    assert page.answered == 4
    monkeypatch.setattr(answers, "MOST_COPIES", 8)
    assert answers.where_page(directory, query).answered == 2


def test_namespaces_have_models_and_sizes_once_an_engine_was_there(cluster: TwoNodes) -> None:
    directory, _, one, two = cluster
    hello = EngineHello("e", 1, SPACE, "tiny", slot_bytes={0: 10, 1: 20})
    other = Namespace("other")
    one.report(0.0, row_of(1), row_of(1, space=other), engines=[ReportedEngine(hello)])
    two.report(0.0, row_of(1), row_of(2), engines=[ReportedEngine(hello)])
    page = answers.space_page(directory)
    known, unknown = page.spaces
    assert (known.namespace, known.model, known.chunks, known.num_bytes) == (SPACE, "tiny", 3, 60)
    assert (unknown.namespace, unknown.chunks, unknown.num_bytes) == (other, 1, None)
    assert page.engine_nodes == [["one", "two"], []]
    one.report(1.0, engines=[])
    two.report(1.0, engines=[])
    assert answers.space_page(directory).spaces[0].model == "tiny"
    assert answers.space_page(directory).engine_nodes == [[], []]


# Status


def test_status_has_what_nodes_have_reported_last(cluster: TwoNodes) -> None:
    directory, orders, one, two = cluster
    one.report(
        0.0,
        row_of(1),
        row_of(2, Where.DISK),
        engines=[engine_of("e")],
        stats=NodeStats(pool_bytes=100),
        hostname="host",
        orders=Stamp(7, 9),
        is_leaving=True,
    )
    two.report(1.0)
    status = answers.cluster_status(directory, orders.told(3.0), BASE, 3.0)
    assert decode(encode(status), ClusterStatus) == status
    first, second = status.nodes
    assert (first.node_id, first.hostname, first.chunks, first.age_s) == ("one", "host", 1, 3.0)
    assert (first.pool_bytes, first.orders, first.is_leaving) == (100, Stamp(7, 9), True)
    assert (second.node_id, second.chunks) == ("two", 0)
    assert [(each.engine_id, each.node_id) for each in status.engines] == [("e", "one")]
    assert (status.namespaces, status.disk_chunks) == ({SPACE: 1}, {SPACE: 1})
    assert (status.orders, status.paused) == (Stamp(7, 10), False)
    paused = msgspec.structs.replace(OrdersDocument(Stamp(7, 11)), is_paused=True)
    assert answers.cluster_status(directory, paused, BASE, 3.0).paused


@pytest.mark.parametrize(
    ("ranks", "age_s", "is_open"), [(1, 0.0, False), (0, 0.0, True), (1, answers.NEWS_S + 1, True)]
)
def test_engine_is_said_to_be_cut_off_until_its_node_has_all_its_ranks(
    cluster: TwoNodes, ranks: int, age_s: float, is_open: bool
) -> None:
    directory, orders, one, _ = cluster
    told = BreakerReport([OpenBreaker(OWN_NODE, "open", 3, 1.0, "why")])
    engine = msgspec.structs.replace(engine_of("e"), breakers=told)
    one.report(0.0, engines=[engine], stats=NodeStats(ranks={"e": ranks}))
    (found,) = answers.cluster_status(directory, orders.told(age_s), BASE, age_s).engines
    assert any(row.peer == OWN_NODE for row in found.breakers.rows) == is_open


def test_tenants_are_those_with_quotas_or_chunks(cluster: TwoNodes) -> None:
    directory, _, one, two = cluster
    one.report(0.0, tenant_bytes={"": 5})
    assert answers.tenants(directory.members.values(), OrdersDocument(Stamp(7, 10))) == []
    one.report(0.0, tenant_bytes={"": 5, "acme": 10})
    two.report(
        0.0, tenant_bytes={"acme": 1}, stats=NodeStats(disk=DiskStats(tenant_bytes={"acme": 7}))
    )
    shares = {"idle": OrderedShare("people's name", 0.2, 0.5)}
    document = OrdersDocument(Stamp(7, 10), shares=shares)
    others, acme, idle = answers.tenants(directory.members.values(), document)
    assert (others.name, others.tenant, others.pool_bytes) == ("others", "", 5)
    assert (acme.name, acme.pool_bytes, acme.disk_bytes, acme.has_quota) == ("acme", 11, 7, False)
    assert (idle.name, idle.tenant, idle.has_quota, idle.most) == (
        "people's name",
        "idle",
        True,
        0.5,
    )
