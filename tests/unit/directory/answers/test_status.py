"""From what nodes, engines and workers report to what `raykv status` shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from raykv.base.ids import Epoch
from raykv.cli.status import print_status
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.engine import AttachEngine, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.measures import BreakerReport
from raykv.protocol.node import NodeReport, NodeStats
from raykv.protocol.status import ClusterStatus

SOURCE = BreakerReport(["node:b"], ["open"], [2], [1.5], ["no [bold] answer"], 1, 2, 3)
OWN = BreakerReport(["own node"], ["half-open"], [4], [7.0], ["it is gone"], 2, 5, 6)


def manager() -> BlockManager:
    made = BlockManager(Epoch(1), ManagerSettings(settle_s=0))
    report = NodeReport(
        PROTOCOL_VERSION, "a", 1, 1, 1 << 20, 1 << 16, 0, 0, stats=NodeStats(breakers=SOURCE)
    )
    made.node_report(report, 10.0)
    made.attach_engine(AttachEngine(PROTOCOL_VERSION, "e", "a", "ns", "model", 1, {0: 4096}), 10.0)
    made.sync(SyncRequest("e", 1, 1, breakers=OWN, counters={"hits": 5}), 11.0)
    return made


def status() -> ClusterStatus:
    return manager().status("address", "1.0", 12.0)


def test_status_has_the_breakers_of_nodes_and_engines_as_old_as_they_are() -> None:
    known = status()
    [node], [engine] = known.nodes, known.engines
    assert (node.breakers.peers, node.breakers.seconds) == (["node:b"], [3.5])
    assert (engine.breakers.peers, engine.breakers.seconds) == (["own node"], [8.0])
    assert (engine.breakers.opened, engine.breakers.failed, engine.breakers.refused) == (2, 5, 6)


@pytest.mark.parametrize(
    ("ranks", "later_s", "is_shown"),
    [(1, 1.0, False), (0, 1.0, True), (1, 4.0, True)],
    ids=["attached", "not attached", "the node is silent"],
)
def test_line_that_the_node_knows_to_be_there_again_is_not_shown_as_open(
    ranks: int, later_s: float, *, is_shown: bool
) -> None:
    known = manager()
    stats = NodeStats(breakers=SOURCE, ranks={"e": ranks, "other": 1})
    known.node_report(
        NodeReport(PROTOCOL_VERSION, "a", 1, 2, 1 << 20, 1 << 16, 0, 0, stats=stats), 12.0
    )
    [engine] = known.status("address", "1.0", 12.0 + later_s).engines
    assert ("own node" in engine.breakers.peers) is is_shown
    assert engine.breakers.opened == 2


def test_breaker_that_has_closed_is_gone_and_counters_stay() -> None:
    known = manager()
    known.sync(SyncRequest("e", 1, 2, breakers=BreakerReport(opened=2)), 12.0)
    [engine] = known.status("address", "1.0", 12.0).engines
    assert engine.breakers == BreakerReport(opened=2)
    assert engine.counters == {"hits": 5}


def test_status_is_printed_with_who_does_not_answer_whom_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_status(status(), Console())
    printed = capsys.readouterr().out
    assert (
        "breaker of node a: node:b is open for 4 s, 2 failures in a row: no [bold] answer"
        in printed
    )
    assert (
        "breaker of engine e: own node is half-open for 8 s, 4 failures in a row: it is gone"
        in printed
    )
    assert "breakers of engine e: opened 2 times, 5 calls failed, 6 not made" in printed


def test_closed_breakers_that_never_opened_are_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_status(ClusterStatus("address", 1, "1.0", False), Console())
    assert "breaker" not in capsys.readouterr().out


def test_workers_tell_when_a_breaker_opens_and_closes_and_only_then() -> None:
    pytest.importorskip("vllm")
    from raykv.vllm.transfers import RayKVWorkerMetadata
    from raykv.vllm.worker import RayKVConnectorWorker

    reports = [
        BreakerReport(),
        OWN,
        BreakerReport(["own node"], ["open"], [5], [9.0], ["gone"], 2, 9, 9),
        BreakerReport(opened=2, failed=9),
        BreakerReport(opened=2, failed=9),
    ]
    told: list[dict[int, BreakerReport]] = []
    line = SimpleNamespace(breaker_report=lambda: reports[len(told)])
    config = SimpleNamespace(parallel=SimpleNamespace(rank=1))
    worker: Any = SimpleNamespace(
        _raykv=line, _reported_line=BreakerReport(), spec=SimpleNamespace(config=config)
    )
    while len(told) < len(reports):
        meta = RayKVWorkerMetadata()
        RayKVConnectorWorker._report_line(worker, meta)
        told.append(meta.lines)
    assert told == [{}, {1: OWN}, {}, {1: reports[3]}, {}]


def test_lines_of_all_ranks_are_put_together() -> None:
    pytest.importorskip("vllm")
    from raykv.vllm.transfers import RayKVWorkerMetadata

    first = RayKVWorkerMetadata(lines={0: OWN})
    whole = first.aggregate(RayKVWorkerMetadata(lines={1: SOURCE}))
    assert whole.lines == {0: OWN, 1: SOURCE}


POOL_BYTES = 1 << 20


def pinned_status(*pinned: int) -> ClusterStatus:
    made = BlockManager(Epoch(1), ManagerSettings(settle_s=0))
    for number, pinned_bytes in enumerate(pinned):
        stats = NodeStats(pool_bytes=POOL_BYTES, locked_bytes=pinned_bytes)
        name = f"node-{number}"
        made.node_report(
            NodeReport(PROTOCOL_VERSION, name, 1, 1, POOL_BYTES, 1 << 16, 0, 0, stats=stats), 10.0
        )
    return made.status("address", "1.0", 12.0)


def printed(known: ClusterStatus, capsys: pytest.CaptureFixture[str]) -> str:
    print_status(known, Console())
    return capsys.readouterr().out


def test_status_has_what_nodes_have_pinned() -> None:
    assert [node.locked_bytes for node in pinned_status(0, POOL_BYTES // 4).nodes] == [
        0,
        POOL_BYTES // 4,
    ]


def test_column_is_there_as_soon_as_one_pool_is_pinned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(pinned_status(0, POOL_BYTES // 4), capsys)
    assert "locked" in text
    (row,) = [line for line in text.splitlines() if "node-1" in line]
    assert "25 %" in row


def test_column_is_left_out_where_nothing_is_pinned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "locked" not in printed(pinned_status(0, 0), capsys)
