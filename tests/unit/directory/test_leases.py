"""What each engine of a node, and each KV group, may lease."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from raykv.base.ids import EngineId, Namespace, NodeId
from raykv.directory.leases import RECENT, count_stored, lease_shares, split
from raykv.directory.members import Engine
from raykv.engine.stock import LeaseStock
from raykv.protocol.columns import Leases
from raykv.protocol.engine import LEASE_SHARE, STEP_SHARE

NO_MIRROR: Any = None


def engine(name: str, stored: int = 0) -> Engine:
    space = Namespace("model")
    made = Engine(EngineId(name), NodeId("n"), space, "tiny", 1, {0: 4096}, 0.0, 0.0, NO_MIRROR)
    made.stored_lately = stored
    return made


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        ({}, 8, {}),
        ({0: 3, 1: 5}, 8, {0: 3, 1: 5}),
        ({0: 30, 1: 50}, 8, {0: 3, 1: 5}),
        ({0: 100, 1: 100, 2: 100}, 8, {0: 3, 1: 3, 2: 2}),
        ({0: 1000, 1: 1}, 8, {0: 7, 1: 1}),
        ({0: 5}, 0, {0: 0}),
    ],
)
def test_split_gives_each_the_same_part_of_what_it_wants(
    wanted: dict[int, int], most: int, expected: dict[int, int]
) -> None:
    assert split(wanted, most) == expected


def test_only_engine_of_a_node_has_the_whole_share() -> None:
    only = engine("a", 5)
    assert lease_shares(only, [only]) == (LEASE_SHARE, STEP_SHARE)


def test_engines_that_have_stored_nothing_have_equal_parts() -> None:
    both = [engine("a"), engine("b")]
    shares = (LEASE_SHARE / 2, STEP_SHARE / 2)
    assert [lease_shares(each, both) for each in both] == [shares, shares]


def test_engine_that_stores_has_the_larger_part_and_all_together_no_more_than_the_share() -> None:
    every = [engine("a", 300), engine("b", 100), engine("c")]
    parts = [lease_shares(each, every)[0] for each in every]
    assert parts == sorted(parts, reverse=True)
    assert parts[2] == pytest.approx(LEASE_SHARE / 6)
    assert sum(parts) == pytest.approx(LEASE_SHARE)
    assert [lease_shares(each, every)[1] for each in every] == [STEP_SHARE / 3] * 3


def test_what_was_stored_long_ago_counts_for_less() -> None:
    was, now = engine("was"), engine("now")
    count_stored(was, {"chunks_offered": RECENT}, [was, now])
    was.counters = {"chunks_offered": RECENT}
    for total in range(1000, 20_000, 1000):
        count_stored(now, {"chunks_offered": total}, [was, now])
        now.counters = {"chunks_offered": total}
    assert was.stored_lately < now.stored_lately / 4
    assert was.stored_lately + now.stored_lately <= RECENT + 1000


def test_engine_that_begins_anew_has_stored_nothing() -> None:
    one = engine("a")
    one.counters = {"chunks_offered": 500}
    count_stored(one, {"chunks_offered": 3}, [one])
    assert one.stored_lately == 0


def stock(count: int, capacity: int = 400) -> LeaseStock:
    made = LeaseStock([0], 1000)
    made.capacity[0] = capacity
    made.add(Leases([0] * count, list(range(count)), list(range(1, count + 1))), {})
    return made


def test_leases_beyond_the_target_are_given_back_when_the_share_falls() -> None:
    held = stock(100)
    assert held.take_surplus() == []
    held.set_shares(LEASE_SHARE / 2, 0.0)
    assert len(held.take_surplus()) == 50
    assert len(held.rows()) == 50
    assert held.take_surplus() == []


def test_few_leases_beyond_the_target_are_kept() -> None:
    assert stock(125).take_surplus() == []
    assert len(stock(126).take_surplus()) == 26


def test_leases_that_were_wanted_on_top_are_kept_until_they_are_taken() -> None:
    held = stock(100)
    assert held.wanted(Counter({0: 60})) == {0: 60}
    held.add(Leases([0] * 60, list(range(100, 160)), list(range(101, 161))), {0: 60})
    assert held.take_surplus() == []
    for _ in range(60):
        held.take(0)
    assert held.take_surplus() == []
    held.add(Leases([0] * 60, list(range(60)), list(range(201, 261))), {})
    assert len(held.take_surplus()) == 60
