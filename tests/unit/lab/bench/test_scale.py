"""What the load on the directory is made of: reports and questions that it takes as they are."""

from __future__ import annotations

from raykv.base.ids import NodeId
from raykv.lab.bench.directory_load import (
    BATCH,
    ELSEWHERE,
    NODE,
    SPACE,
    DirectoryLoad,
    Stopwatch,
    key,
)
from raykv.lab.bench.report import Options
from raykv.lab.bench.scale import ASKED, ENGINES_PER_NODE, POOL_CHUNKS, STORED, _Cluster, run
from raykv.protocol.node import PAUSE_MS
from tests.fixtures.directory.reporting import sizes


def test_directory_knows_what_has_come_and_not_what_has_gone() -> None:
    load = DirectoryLoad(2 * BATCH)
    load.fill()
    assert sizes(load.directory._holdings) == {SPACE: 2 * BATCH}
    load.report(Stopwatch(), came=3, went=5)
    assert sizes(load.directory._holdings) == {SPACE: 2 * BATCH - 2}
    assert not load.directory.where(SPACE, [key(4)])[0]
    assert [each.node_id for each in load.directory.where(SPACE, [key(5)])[0]] == [NodeId(NODE)]
    assert set(load.directory.members) == {NODE, ELSEWHERE}
    load.directory.check()


def test_second_of_a_cluster_stores_asks_and_reports() -> None:
    cluster = _Cluster(3)
    per_second = ENGINES_PER_NODE * STORED
    for second in range(1, 12):
        traffic = cluster.second()
        held = sizes(cluster._directory._holdings)[SPACE]
        assert held == 3 * min(POOL_CHUNKS, second * per_second)
        assert traffic.calls <= 3 * (ENGINES_PER_NODE + 1000 / PAUSE_MS[0])
    cluster._directory.check()


def test_more_to_do_makes_reports_rarer() -> None:
    few, many = _Cluster(2), _Cluster(2)
    many._directory.cost_s = 0.1
    few.second()
    many.second()
    assert many._nodes[0].pause_s > few._nodes[0].pause_s


def test_quick_run_says_how_many_nodes_one_actor_takes() -> None:
    result = run(Options(quick=True, repeats=1))
    assert {row.unit for row in result.rows} == {"calls/s", "MB/s", "% busy", "% busy in the core"}
    assert any("By Ray's calls at 1,000" in note for note in result.notes)
    assert any(f"{ASKED} chunks asked" in note for note in result.notes)
