"""What is remembered of keys that are not there."""

from __future__ import annotations

from raykv.base.departures import Departures
from raykv.base.ids import MissReason

EVICTED, CLEARED = MissReason.EVICTED, MissReason.CLEARED


def key(number: int) -> bytes:
    return b"%d" % number


def test_what_happened_last_to_a_key_counts() -> None:
    memory: Departures[MissReason] = Departures(most=4)
    memory.note([key(1)], EVICTED)
    memory.note([key(1)], CLEARED)
    assert memory.get(key(1)) is CLEARED
    assert memory.get(key(2)) is None


def test_half_of_the_bound_is_remembered_at_least_and_never_more_than_it() -> None:
    memory: Departures[MissReason] = Departures(most=100)
    for number in range(1000):
        memory.note([key(number)], EVICTED)
        assert len(memory) <= 100
        assert all(memory.get(key(last)) for last in range(max(0, number - 49), number + 1))
    assert memory.get(key(0)) is None


def test_of_very_many_keys_only_the_first_are_remembered() -> None:
    memory: Departures[MissReason] = Departures(most=100)
    memory.note(map(key, range(10_000)), EVICTED)
    assert memory.get(key(49)) is EVICTED
    assert len(memory) == 50
    memory.note(map(key, range(50, 200)), CLEARED)
    assert len(memory) == 100
