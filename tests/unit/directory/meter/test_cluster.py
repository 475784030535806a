"""What the scheduler actor shows of its nodes, engines, directory and event log."""

from __future__ import annotations

import msgspec
import pytest

from raykv.base.ids import SLOT_ALIGNMENT, Epoch, MissReason
from raykv.directory.manager import BlockManager
from raykv.directory.meter.cluster import LAG_WINDOW_S, MAX_MODELS
from raykv.metrics.table import METRICS, MOST, OTHER, NamespaceLabels
from raykv.protocol.columns import Keys
from raykv.protocol.engine import AttachEngine, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.measures import BreakerReport, HistogramData
from raykv.protocol.node import Inventory, NodeReport, NodeStats

PAGE = SLOT_ALIGNMENT


class Desk:
    """A manager with a node of eight slots and an engine."""

    def __init__(self) -> None:
        self.manager = BlockManager(Epoch(1))
        self.seq = 0
        self.report(now=0.0)
        self.attach("engine", "namespace-of-a-model", "a/model")

    @property
    def meter(self):  # type: ignore[no-untyped-def]
        return self.manager.meter

    def report(self, now: float, stored: Inventory = Inventory(), **stats: object) -> None:  # noqa: B008
        self.seq += 1
        message = NodeReport(PROTOCOL_VERSION, "node", 7, self.seq, 8 * PAGE, 8 * PAGE, 0, 0)
        told = NodeStats(**stats)  # type: ignore[arg-type]
        self.manager.node_report(msgspec.structs.replace(message, stored=stored, stats=told), now)
        self.meter.called("report", 0.001)

    def attach(self, engine: str, namespace: str, model: str) -> None:
        hello = AttachEngine(PROTOCOL_VERSION, engine, "node", namespace, model, 1, {0: PAGE})
        assert not self.manager.attach_engine(hello, 0.0).error

    def sync(self, now: float, **fields: object) -> SyncReply:
        self.seq += 1
        request = SyncRequest("engine", 1, self.seq, **fields)  # type: ignore[arg-type]
        reply = self.manager.sync(request, now)
        self.meter.synced(request, reply)
        self.meter.called("sync", 0.001)
        return reply

    def store(self, now: float, *keys: bytes) -> None:
        """Have chunks stored by the engine."""
        granted = self.sync(now, wanted={0: len(keys)}).granted
        assert len(granted.slots) == len(keys)
        columns = ([0] * len(keys), Keys.of(keys), granted.slots, granted.generations)
        sizes = [PAGE] * len(keys)
        self.report(now, Inventory(["namespace-of-a-model"], *columns, sizes))

    def series(self, name: str, now: float = 0.0) -> dict[tuple[str, ...], float]:
        return {
            tuple(row.labels): row.value
            for family in self.meter.families(now, is_paused=self.manager.paused)
            if family.name == name
            for row in family.rows
        }

    def histogram(self, name: str) -> dict[tuple[str, ...], HistogramData]:
        return {
            tuple(row.labels): row.histogram
            for family in self.meter.families(0.0, is_paused=False)
            if family.name == name
            for row in family.rows
        }


@pytest.fixture
def desk() -> Desk:
    return Desk()


LABEL = "namespace-of"


def test_evicted_chunks_are_counted_with_their_ages(desk: Desk) -> None:
    desk.manager.expire(4.0)
    desk.store(4.0, *[b"k%d" % number for number in range(8)])
    assert desk.series("raykv_directory_chunks") == {(LABEL,): 8}
    assert desk.histogram("raykv_removed_chunk_age_seconds")[()].total == 0
    desk.sync(104.0, wanted={0: 3})
    ages = desk.histogram("raykv_removed_chunk_age_seconds")[()]
    assert (sum(ages.counts), ages.total) == (3, 300.0)
    bounds = METRICS["raykv_removed_chunk_age_seconds"].bounds
    assert ages.counts[bounds.index(300.0)] == 3
    events = desk.series("raykv_events_total")
    assert (events["block_stored",], events["block_removed",], events["node_joined",]) == (8, 3, 1)
    slots = desk.series("raykv_directory_slots")
    assert slots == {("held",): 5, ("leased",): 3, ("free",): 0}
    assert desk.series("raykv_granted_leases_total") == {(): 11}


def test_repeated_exchange_grants_once(desk: Desk) -> None:
    desk.sync(1.0, wanted={0: 2})
    desk.seq -= 1
    desk.sync(1.0, wanted={0: 2})
    assert desk.series("raykv_granted_leases_total") == {(): 2}


def test_namespaces_engines_and_models_are_named(desk: Desk) -> None:
    assert desk.series("raykv_engines") == {(LABEL,): 1}
    assert desk.series("raykv_namespace_info") == {(LABEL, "a/model"): 1}
    assert desk.series("raykv_nodes") == {(): 1}
    assert desk.series("raykv_paused") == {(): 0}
    desk.manager.set_paused(True)
    assert desk.series("raykv_paused") == {(): 1}


def test_labels_are_bounded_however_many_namespaces_and_models_there_are(desk: Desk) -> None:
    for number in range(3 * MOST):
        desk.attach(f"e{number}", f"{number}-namespace", f"model\n{number}" + "x" * 500)
    families = desk.meter.families(0.0, is_paused=False)
    for family in families:
        assert len(family.rows) <= 30 * (MOST + 1), family.name
        assert all(len(text) <= 100 for row in family.rows for text in row.labels)
        assert all(text.isprintable() for row in family.rows for text in row.labels)
    engines = desk.series("raykv_engines")
    assert sum(engines.values()) == 3 * MOST + 1
    assert engines[OTHER,] == 2 * MOST + 1
    assert len(desk.series("raykv_namespace_info")) <= MAX_MODELS


def test_namespace_keeps_its_label_and_late_ones_share_one() -> None:
    labels = NamespaceLabels(most=2)
    assert [labels[name] for name in ("a" * 40, "b", "c", "a" * 40, "b")] == [
        "a" * 12,
        "b",
        OTHER,
        "a" * 12,
        "b",
    ]


def test_slow_reader_of_events_is_seen_for_a_minute(desk: Desk) -> None:
    desk.store(1.0, b"one", b"two")
    manager = desk.manager
    desk.meter.read_events(manager.last_event, manager.events(Epoch(1), manager.last_event), 10.0)
    assert desk.series("raykv_event_reader_lag_events", 10.0) == {(): 0}
    desk.meter.read_events(1, manager.events(Epoch(1), 1), 11.0)
    behind = manager.last_event - 1
    assert behind > 0
    for later, expected in ((0.0, behind), (LAG_WINDOW_S, behind), (3 * LAG_WINDOW_S, 0)):
        assert desk.series("raykv_event_reader_lag_events", 11.0 + later) == {(): expected}
    assert desk.series("raykv_event_gaps_total") == {(): 0}
    desk.meter.read_events(0, msgspec.structs.replace(manager.events(Epoch(1), 0), is_gap=True), 0)
    assert desk.series("raykv_event_gaps_total") == {(): 1}


def test_targets_are_the_nodes_that_show_metrics(desk: Desk) -> None:
    assert desk.meter.targets() == []
    desk.report(1.0, metrics_address="10.0.0.1:9095")
    assert desk.meter.targets() == ["10.0.0.1:9095"]
    assert desk.manager.status("here", "1", 1.0).nodes[0].metrics == "10.0.0.1:9095"
    desk.report(2.0, metrics_problem="no metrics: all ports are taken")
    assert desk.meter.targets() == []
    assert "all ports" in desk.manager.status("here", "1", 1.0).nodes[0].metrics
    desk.manager.expire(100.0)
    assert desk.series("raykv_nodes") == {(): 0}


def test_open_breakers_of_engines_are_counted_by_kind_of_peer(desk: Desk) -> None:
    report = BreakerReport(
        ["scheduler", "own node (copies)", "node:abc", "node:def"],
        ["open", "half-open", "open", "open"],
        [1, 1, 1, 1],
        [0.0] * 4,
        [""] * 4,
    )
    desk.sync(1.0, breakers=report)
    found = desk.series("raykv_open_breakers")
    assert {labels: count for labels, count in found.items() if count} == {
        ("engine", "scheduler", "open"): 1,
        ("engine", "own_node", "half_open"): 1,
        ("engine", "other_node", "open"): 2,
    }


def test_missed_tokens_have_a_series_for_every_reason(desk: Desk) -> None:
    desk.sync(1.0, counters={})
    desk.sync(2.0, counters={"missed_tokens_evicted": 7})
    found = desk.series("raykv_cluster_missed_tokens_total")
    assert found == {
        (LABEL, str(reason)): 7 * (reason is MissReason.EVICTED) for reason in MissReason
    }
