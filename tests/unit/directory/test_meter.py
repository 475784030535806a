"""What the scheduler actor shows to Prometheus."""

from __future__ import annotations

import pytest

from raykv.base.ids import EventKind, Stamp
from raykv.directory.answers import event_page
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.directory.meter import LAG_WINDOW_S, ClusterMeter
from raykv.metrics.table import CLUSTER
from raykv.protocol.engine import EngineHello
from raykv.protocol.listing import Where
from raykv.protocol.node import PAUSE_MS, NodeStats, ReportedEngine
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.directory.reporting import SPACE, ReportingNode, row_of

HELLO = EngineHello("e", 1, SPACE, "tiny\nmodel")


class World:
    """A directory with a node, and its meter."""

    def __init__(self, most_events: int = 1000) -> None:
        self.orders = Orders(OrdersDocument(Stamp(7, 10), is_paused=True), 8, -MEMBERS_S)
        self.directory = Directory(1000, self.orders, most_events=most_events)
        self.node = ReportingNode(self.directory, "one")
        self.meter = ClusterMeter(self.directory)

    def rows(self, name: str, now: float = 0.0) -> dict[tuple[str, ...], float]:
        families = self.meter.families(self.orders.told(now), now)
        (family,) = (each for each in families if each.name == name)
        return {tuple(row.labels): row.value for row in family.rows}


def test_every_metric_of_the_cluster_is_shown_once() -> None:
    world = World()
    names = [each.name for each in world.meter.families(None, 0.0)]
    assert sorted(names) == sorted(metric.name for metric in CLUSTER)


def test_what_is_shown_is_what_nodes_report() -> None:
    world = World()
    both = Where.RAM | Where.DISK
    engines = [ReportedEngine(HELLO)]
    world.node.report(0.0, row_of(1), row_of(2, both), engines=engines)
    assert world.rows("raykv_nodes") == {(): 1}
    assert world.rows("raykv_engines") == {(SPACE,): 1}
    assert world.rows("raykv_namespace_info") == {(SPACE, "tiny?model"): 1}
    assert world.rows("raykv_directory_chunks") == {(SPACE, "ram"): 2, (SPACE, "disk"): 1}
    assert world.rows("raykv_paused") == {(): 1}
    assert world.rows("raykv_orders_number") == {(): 10}
    assert world.rows("raykv_oldest_node_report_age_seconds", 3.0) == {(): 3.0}
    kinds = world.rows("raykv_events_total")
    assert kinds["block_stored",] == 2
    assert kinds.keys() == {(kind.name.lower(),) for kind in EventKind}


def test_engine_with_several_places_is_one_engine() -> None:
    world = World()
    places = [
        ReportedEngine(EngineHello("e", life, f"{SPACE}/{life}", place=life, num_places=2))
        for life in (1, 2)
    ]
    world.node.report(0.0, engines=places)
    assert sum(world.rows("raykv_engines").values()) == 1


def test_targets_are_where_nodes_show_their_metrics() -> None:
    world = World()
    world.node.report(0.0, stats=NodeStats(metrics_address="b:1"))
    ReportingNode(world.directory, "two").report(0.0, stats=NodeStats(metrics_address="a:1"))
    ReportingNode(world.directory, "three").report(0.0)
    assert world.meter.targets() == ["a:1", "b:1"]


def test_slow_reader_is_remembered_for_a_minute_or_two() -> None:
    world = World(most_events=4)
    world.node.report(0.0, *map(row_of, range(20)))
    last = world.directory.events.last_seq
    for after in (last, 5, last - 1):
        page = event_page(world.directory, 1000, after, 0.0)
        world.meter.read_events(after, page, 0.0)
    assert world.rows("raykv_event_gaps_total") == {(): 1}
    lag = "raykv_event_reader_lag_events"
    assert world.rows(lag) == {(): last - 5}
    assert world.rows(lag, LAG_WINDOW_S * 1.5) == {(): last - 5}
    assert world.rows(lag, LAG_WINDOW_S * 3.5) == {(): 0}


@pytest.mark.parametrize(("cost_s", "pause_ms"), [(0.0, PAUSE_MS[0]), (10.0, PAUSE_MS[1])])
def test_nodes_report_as_often_as_the_actor_can_bear(cost_s: float, pause_ms: int) -> None:
    world = World()
    for _ in range(200):
        world.meter.called("report", cost_s)
    assert world.node.report(0.0).pause_ms == pause_ms
    assert world.rows("raykv_report_pause_seconds") == {(): pause_ms / 1000}
    world.meter.called("ask", 99.0)
    assert world.node.report(0.0).pause_ms == pause_ms
