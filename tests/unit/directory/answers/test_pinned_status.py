"""How much of each pool is pinned for GPUs, from the NodeActor's report to `raykv status`."""

from __future__ import annotations

import pytest
from rich.console import Console

from raykv.base.ids import Epoch
from raykv.cli.status import print_status
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import NodeReport, NodeStats
from raykv.protocol.status import ClusterStatus

POOL_BYTES = 1 << 20


def status(*pinned: int) -> ClusterStatus:
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
    assert [node.locked_bytes for node in status(0, POOL_BYTES // 4).nodes] == [0, POOL_BYTES // 4]


def test_column_is_there_as_soon_as_one_pool_is_pinned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(status(0, POOL_BYTES // 4), capsys)
    assert "locked" in text
    (row,) = [line for line in text.splitlines() if "node-1" in line]
    assert "25 %" in row


def test_column_is_left_out_where_nothing_is_pinned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "locked" not in printed(status(0, 0), capsys)
