"""Eviction order of the benchmark's own policies, by example."""

from __future__ import annotations

from raykv.lab.bench.arc import ARC
from raykv.lab.bench.s3fifo import S3FIFO
from tests.fixtures.directory.eviction import add_all, give_up, order, touch_all

C, A = ("model", b"c"), ("model", b"a")


def test_arc_gives_up_what_was_used_once_before_what_was_used_twice() -> None:
    made: ARC[tuple[str, bytes]] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert order(made) == "cdab"


def test_arc_wants_more_recent_names_when_one_comes_back() -> None:
    made: ARC[tuple[str, bytes]] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert give_up(made, 1) == "c"
    made.add(C)
    # One recent name may stay: the oldest of the frequent ones goes first.
    assert order(made) == "abcd"


def test_arc_wants_fewer_recent_names_when_a_frequent_one_comes_back() -> None:
    made: ARC[tuple[str, bytes]] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert give_up(made, 1) == "c"
    made.add(C)
    assert give_up(made, 1) == "a"
    made.add(A)
    assert order(made) == "dbca"


def test_s3fifo_moves_on_what_was_used_twice() -> None:
    made: S3FIFO[tuple[str, bytes]] = S3FIFO()
    add_all(made, "abcd")
    touch_all(made, "aabbc")
    assert order(made) == "cdab"
    assert give_up(made, 4) == "cdab"


def test_s3fifo_takes_a_ghost_back_among_the_proven_ones() -> None:
    made: S3FIFO[tuple[str, bytes]] = S3FIFO()
    add_all(made, "abcd")
    assert give_up(made, 1) == "a"
    add_all(made, "aef")
    assert order(made) == "bcdefa"


def test_s3fifo_gives_another_round_to_what_was_used_since() -> None:
    made: S3FIFO[tuple[str, bytes]] = S3FIFO()
    add_all(made, "abcdef")
    assert give_up(made, 3) == "abc"
    add_all(made, "abc")
    touch_all(made, "a")
    assert order(made) == "defbca"
    assert give_up(made, 6) == "defbca"
