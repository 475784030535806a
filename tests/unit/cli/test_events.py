"""How `raykv events` prints events, and from where on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.protocol.events import BlockStored, NodeLost
from tests.fixtures.commands import AnsweringCluster, run

AT_NODE: dict[str, Any] = {"life": 4, "node_id": "n", "node_life": 3}
EVENTS = [
    BlockStored(seq=7, number=9, namespace="5f", key=b"\xab" * 36, **AT_NODE),
    NodeLost(seq=8, time=1.7e9, number=0, **AT_NODE),
]


def test_events_are_printed_as_they_come(cluster: AnsweringCluster) -> None:
    cluster.answers["events"] = EVENTS
    first, second = run("events").splitlines()
    assert first.startswith("4:7 BlockStored node_id=n node_life=3 number=9 namespace=5f key=abab")
    moment = f"{datetime.fromtimestamp(1.7e9):%Y-%m-%d %H:%M:%S}"
    assert second == f"{moment} 4:8 NodeLost node_id=n node_life=3 number=0"
    rows = [json.loads(line) for line in run("events", "--json").splitlines()]
    assert [row["event"] for row in rows] == ["BlockStored", "NodeLost"]
    assert rows[0]["key"] == "ab" * 36


@pytest.mark.parametrize(
    ("options", "since", "follow"),
    [
        ([], 0, False),
        (["-f"], None, True),
        (["--since", "4:7"], (4, 7), False),
        (["--since", "7"], 7, False),
    ],
)
def test_events_begin_where_they_are_asked_for(
    cluster: AnsweringCluster, options: list[str], since: object, follow: bool
) -> None:
    cluster.answers["events"] = []
    run("events", *options)
    assert cluster.asked == [("events", (since,), {"follow": follow})]


def test_place_that_is_none_is_refused(cluster: AnsweringCluster) -> None:
    with pytest.raises(SettingError, match="LIFE:NUMBER"):
        run("events", "--since", "yesterday")
    assert cluster.asked == []


def test_interrupted_follower_ends_well(cluster: AnsweringCluster) -> None:
    cluster.answers["events"] = KeyboardInterrupt()
    assert run("events", "--follow") == ""
