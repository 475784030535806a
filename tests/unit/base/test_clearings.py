"""Floors of namespaces: they only rise, and hold for those too that nobody knows."""

from __future__ import annotations

from raykv.base.clearings import MAX_NAMESPACES, Clearings
from raykv.base.ids import EVERY_NAMESPACE, Namespace, part_of

A, B = Namespace("a"), Namespace("b")


def test_floor_of_all_is_that_of_every_namespace() -> None:
    clearings = Clearings()
    assert (clearings.of(A), clearings.told) == (0, {})
    assert clearings.take({"a": 7}) == {A}
    assert (clearings.of(A), clearings.of(B)) == (7, 0)
    clearings.take({"": 5})
    assert (clearings.of(A), clearings.of(B)) == (7, 5)


def test_floor_of_a_namespace_is_that_of_its_parts() -> None:
    floors = Clearings({"a": 3})
    assert [floors.of(part_of(name, "0.1")) for name in ("a", "b")] == [3, 0]
    assert floors.take({"b/1": 4}) == {"b"}
    assert floors.of(part_of("b", "0.1")) == 4


def test_floors_only_rise_in_whatever_order_they_are_told() -> None:
    told = [{"a": 5}, {"": 4}, {"a": 3, "b": 6}, {"": 6}]
    one, other = Clearings(), Clearings()
    for each in told:
        before = {name: one.of(name) for name in (A, B)}
        one.take(each)
        assert all(one.of(name) >= before[name] for name in before)
    for each in reversed(told):
        other.take(each)
    assert one.told == other.told == {"": 6}


def test_nothing_has_risen_when_a_floor_is_told_again() -> None:
    clearings = Clearings({"": 5, "a": 7})
    assert clearings.take({"": 5, "a": 7, "b": 5}) == set()


def test_lowest_floor_becomes_that_of_all_when_there_are_too_many() -> None:
    clearings = Clearings({str(number): 10 + number for number in range(MAX_NAMESPACES)})
    assert clearings.of(A) == 0
    assert clearings.take({"a": 500}) == {A, EVERY_NAMESPACE}
    assert (clearings.of(B), clearings.of(A)) == (10, 500)
    assert len(clearings.told) <= MAX_NAMESPACES + 1
