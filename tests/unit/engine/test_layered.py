"""Loads that nobody waits for: who must not have what before it is there, and what is forgotten."""

from __future__ import annotations

from raykv.engine.layered import (
    MOST_STEPS,
    LayeredLoad,
    LayeredLoads,
    Lost,
    SiblingLoads,
    Steps,
)

NONE: dict[str, list[int]] = {}
HASHES = [b"%d" % at for at in range(6)]


def loads(*blocks: int, first: int = 2) -> LayeredLoads:
    """Request "a" has two blocks of vLLM's own, and loads and computes the others in this step."""
    made = LayeredLoads()
    made.begin(LayeredLoad("a", frozenset(HASHES[first:]), blocks))
    return made


def ended(known: LayeredLoads, *invalid: int) -> set[int]:
    """The step that is being scheduled goes out and ends."""
    return known.end_step(known.close_step(), set(invalid))


def test_request_waits_that_found_a_block_which_is_loaded_or_computed() -> None:
    known = loads(12, 13, 14, 15)
    assert known.is_busy
    assert not known.must_wait([])
    assert not known.must_wait(HASHES[:2])
    assert known.must_wait(HASHES[:3])
    assert known.must_wait(HASHES)
    assert not known.must_wait([*HASHES[:2], b"other"])


def test_block_that_did_not_come_is_evicted_with_all_behind_it_of_its_request_only() -> None:
    known = loads(12, 13, 14, 15)
    known.begin(LayeredLoad("b", frozenset([b"x"]), (21, 22)))
    assert ended(known, 13) == {13, 14, 15}
    assert [name in known.spoiled for name in "ab"] == [True, False]


def test_load_is_under_way_until_its_own_step_has_ended() -> None:
    known = loads(12, 13)
    first = known.close_step()
    assert not known.beginning
    known.begin(LayeredLoad("b", frozenset([b"x"]), (21, 22)))
    assert [*known.beginning] == ["b"]
    second = known.close_step()
    assert known.end_step(first, set()) == set()
    known.evicted()
    assert known.held == {"b"}
    assert not known.must_wait(HASHES)
    assert known.must_wait([b"x"])
    # A step without loads, or one that nobody knows, ends none.
    assert known.end_step(first, {21}) == {21}
    assert "b" not in known.spoiled
    assert known.end_step(second, {22}) == {22}
    assert known.lost() == {"b": (21, 22)}


def test_blocks_of_a_step_ahead_go_with_what_did_not_come() -> None:
    known = loads(12, 13)
    known.grow("a", [99])
    first = known.close_step()
    known.begin(LayeredLoad("b", frozenset([b"x"]), (21,)))
    known.grow("a", [14, 15])
    known.grow("b", [22])
    known.grow("c", [31])
    second = known.close_step()
    assert known.end_step(first, {13}) == {13, 14, 15}
    assert known.end_step(second, {21}) >= {21}
    assert known.lost() == {"a": (12, 13, 14, 15), "b": (21,)}


def test_step_is_known_until_it_has_ended_or_too_many_have_not() -> None:
    steps: Steps[int] = Steps()
    scheduled = [object() for _ in range(MOST_STEPS + 2)]
    for number, each in enumerate(scheduled[:-1]):
        assert steps.begin(each, number) == (0 if number == MOST_STEPS else None)
    assert steps.end(scheduled[0], -1) == -1
    assert steps.end(scheduled[3], -1) == 3
    assert steps.end(scheduled[3], -1) == -1
    assert steps.begin(scheduled[-1], 7) is None


# Other connectors' loads


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
