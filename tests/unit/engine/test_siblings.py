"""What other connectors load within a step: when it counts, and what is lost with it."""

from __future__ import annotations

from raykv.engine.siblings import Lost, SiblingLoads

NONE: dict[str, list[int]] = {}


def test_request_stores_nothing_until_the_steps_have_ended_that_it_began_with() -> None:
    loads = SiblingLoads()
    first, _ = loads.begin({"a": [1, 2]}, NONE, has_loads=True)
    second, _ = loads.begin({"b": [1, 3]}, NONE, has_loads=True)
    assert loads.held == {"a", "b"}
    assert loads.end(first, set(), {"a", "b"}) == Lost()
    assert loads.held == {"b"}
    loads.end(second, set(), {"a", "b"})
    assert not loads.is_busy


def test_blocks_behind_one_that_did_not_come_are_lost_of_all_who_have_it() -> None:
    loads = SiblingLoads()
    step, _ = loads.begin({"a": [1, 2, 3], "b": [1, 2, 4], "c": [5]}, NONE, has_loads=True)
    loads.begin(NONE, {"a": [6]}, has_loads=False)
    assert loads.end(step, {2}, {"a", "b", "c"}) == Lost({"a", "b"}, {2, 3, 4, 6})


def test_who_begins_with_blocks_of_a_lost_request_is_lost_until_that_has_ended() -> None:
    loads = SiblingLoads()
    step, _ = loads.begin({"a": [1, 2]}, NONE, has_loads=True)
    loads.end(step, {2}, {"a"})
    loads.begin(NONE, {"a": [3]}, has_loads=False)
    _, lost = loads.begin({"b": [3, 4], "c": [4, 5], "d": [6]}, NONE, ["a"], has_loads=False)
    assert lost == Lost({"b", "c"}, {2, 3})
    _, lost = loads.begin({"e": [2]}, NONE, ["b", "c"], has_loads=False)
    assert lost == Lost(set(), {3, 4, 5})
    assert not loads.is_busy


def test_request_that_has_ended_before_its_load_leaves_nothing_behind() -> None:
    loads = SiblingLoads()
    step, _ = loads.begin({"a": [1, 2]}, NONE, has_loads=True)
    assert loads.end(step, {1}, set()) == Lost({"a"}, {1, 2})
    assert not loads.is_busy
