"""Which copies are void, by the orders under which they were stored."""

from __future__ import annotations

from raykv.base.clearings import MAX_NAMESPACES
from raykv.base.ids import EVERY_NAMESPACE, Namespace, Stamp
from raykv.node.pool.floors import MAX_HISTORIES, Floors

A, B = Namespace("a"), Namespace("b")
NOTHING = Stamp(0, 0)


def floors_of(history: int, known: dict[int, dict[str, int]]) -> Floors:
    """In a history, after others with these floors."""
    floors = Floors(next(iter(known)))
    for each, cleared in known.items():
        floors.begin(each)
        floors.take(cleared)
    floors.begin(history)
    return floors


def test_copy_that_was_offered_before_a_clear_is_void() -> None:
    floors = Floors(1)
    floors.take({A: 8})
    assert floors.is_void(A, Stamp(1, 7))
    assert not floors.is_void(A, Stamp(1, 8))
    assert not floors.is_void(B, Stamp(1, 7))
    floors.take({EVERY_NAMESPACE: 9})
    assert floors.is_void(A, Stamp(1, 8))
    assert floors.is_void(B, Stamp(1, 8))
    assert floors.told == {1: {EVERY_NAMESPACE: 9}}


def test_floor_never_falls_whatever_is_said_or_learned() -> None:
    floors = Floors(1)
    assert floors.take({A: 8}) == {A}
    assert floors.take({A: 5, B: 0}) == set()
    assert floors.learn({1: {A: 5}}) == set()
    assert floors.told == {1: {A: 8}}
    assert floors.is_void(A, Stamp(1, 7))
    # Nor is the present history forgotten.
    floors.learn({history: {} for history in range(1, 30)})
    assert len(floors.told) == MAX_HISTORIES
    assert floors.take({A: 9}) == {A}


def test_copy_of_another_history_is_older_than_every_clear_of_the_present_one() -> None:
    floors = floors_of(2, {1: {A: 57}})
    # Ray was started anew: numbers begin again, and nothing was cleared since.
    assert not floors.is_void(A, Stamp(2, 0))
    assert not floors.is_void(A, Stamp(1, 57))
    assert floors.is_void(A, Stamp(1, 56))
    assert not floors.is_void(B, Stamp(1, 900))
    floors.take({B: 4})
    assert floors.is_void(B, Stamp(1, 900))
    assert not floors.is_void(B, Stamp(2, 4))
    assert not floors.is_void(A, Stamp(1, 57))


def test_many_namespaces_become_one_floor() -> None:
    floors = Floors(1)
    floors.take({Namespace(str(number)): 10 + number for number in range(MAX_NAMESPACES + 3)})
    (told,) = floors.told.values()
    assert len(told) <= MAX_NAMESPACES + 1
    assert told[EVERY_NAMESPACE] == 12
    assert floors.is_void(Namespace("never named"), Stamp(1, 11))
    assert all(
        floors.is_void(Namespace(str(number)), Stamp(1, 9 + number))
        for number in range(MAX_NAMESPACES + 3)
    )


def test_histories_are_bounded() -> None:
    floors = Floors(0)
    for history in range(20):
        floors.begin(history)
        floors.take({A: 5})
    assert list(floors.told) == list(range(20 - MAX_HISTORIES, 20))
    # What is of a history that is forgotten can't be judged.
    assert floors.is_void(A, Stamp(3, 900))
    assert floors.is_void(Namespace("b"), Stamp(3, 900))


def test_clear_of_a_history_outlives_it() -> None:
    floors = floors_of(2, {1: {}})
    floors.take({A: 5})
    floors.begin(3)
    assert floors.is_void(A, Stamp(1, 60))
    assert floors.is_void(A, Stamp(2, 4))
    assert not floors.is_void(A, Stamp(2, 5))
    assert not floors.is_void(B, Stamp(1, 60))


def test_one_of_two_copies_is_the_older_one_whatever_their_histories() -> None:
    floors = floors_of(3, {1: {}, 2: {}})
    stamps = [Stamp(9, 5), Stamp(1, 7), Stamp(1, 8), Stamp(2, 1), Stamp(3, 0)]
    for at, stamp in enumerate(stamps):
        assert [floors.is_older(stamp, other) for other in stamps] == [
            at < number for number in range(len(stamps))
        ]


def test_what_a_disk_has_kept_is_of_histories_before_the_present_one() -> None:
    floors = Floors(0)
    floors.begin(7)
    floors.take({B: 3})
    assert floors.learn({5: {A: 40}, 6: {}}) == {A}
    assert list(floors.told) == [5, 6, 7]
    assert floors.history == 7
    assert floors.is_void(A, Stamp(5, 39))
    assert not floors.is_void(A, Stamp(5, 40))
    assert not floors.is_void(A, Stamp(6, 0))
    assert floors.is_void(B, Stamp(6, 900))
    assert floors.learn({5: {A: 40}, 6: {}}) == set()


def test_what_came_before_the_first_orders_is_later_than_all_that_a_disk_knows() -> None:
    floors = Floors()
    # An earlier version has kept the floors of no history, too.
    floors.learn({0: {}, 7: {A: 3}})
    floors.begin(9)
    assert list(floors.told) == [7, 9]
    assert not floors.is_void(A, NOTHING)
    assert floors.is_older(Stamp(7, 900), NOTHING)
    assert floors.is_older(NOTHING, Stamp(9, 0))
    floors.take({B: 1})
    assert floors.is_void(B, NOTHING)
    # Of an earlier life, nobody knows which clears it came after.
    assert floors.is_void_of_earlier(A, NOTHING)
    assert not floors.is_void_of_earlier(Namespace("c"), NOTHING)
    assert not floors.is_void_of_earlier(A, Stamp(9, 0))


def test_clear_of_this_life_is_later_than_what_came_before_its_first_orders() -> None:
    floors = Floors()
    floors.begin(7)
    floors.take({A: 3})
    floors.begin(8)
    # The disk is late, and its last owner has heard of more.
    floors.learn({5: {B: 9}, 7: {}, 6: {A: 4}})
    assert list(floors.told) == [5, 7, 6, 8]
    assert floors.is_void(A, NOTHING)
    assert not floors.is_void(B, NOTHING)
