"""Eviction order of the benchmark's own policies, by example."""

from __future__ import annotations

from raykv.inspect.orders import EvictionPolicy
from raykv.lab.bench.arc import ARC
from raykv.lab.bench.s3fifo import S3FIFO


def order(policy: EvictionPolicy[str]) -> str:
    """The names of the candidates in one word, the first to give up first."""
    return "".join(policy.candidates())


def give_up(policy: EvictionPolicy[str], count: int) -> str:
    """Evict so many as the policy says; their names in one word."""
    gone = ""
    for _ in range(count):
        name = next(policy.candidates())
        policy.evicted(name)
        gone += name
    return gone


def add_all(policy: EvictionPolicy[str], letters: str) -> None:
    for letter in letters:
        policy.add(letter)


def touch_all(policy: EvictionPolicy[str], letters: str) -> None:
    for letter in letters:
        policy.touch(letter)


def test_arc_gives_up_what_was_used_once_before_what_was_used_twice() -> None:
    made: ARC[str] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert order(made) == "cdab"


def test_arc_wants_more_recent_names_when_one_comes_back() -> None:
    made: ARC[str] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert give_up(made, 1) == "c"
    made.add("c")
    # One recent name may stay: the oldest of the frequent ones goes first.
    assert order(made) == "abcd"


def test_arc_wants_fewer_recent_names_when_a_frequent_one_comes_back() -> None:
    made: ARC[str] = ARC()
    add_all(made, "abcd")
    touch_all(made, "ab")
    assert give_up(made, 1) == "c"
    made.add("c")
    assert give_up(made, 1) == "a"
    made.add("a")
    assert order(made) == "dbca"


def test_s3fifo_moves_on_what_was_used_twice() -> None:
    made: S3FIFO[str] = S3FIFO()
    add_all(made, "abcd")
    touch_all(made, "aabbc")
    assert order(made) == "cdab"
    assert give_up(made, 4) == "cdab"


def test_s3fifo_takes_a_ghost_back_among_the_proven_ones() -> None:
    made: S3FIFO[str] = S3FIFO()
    add_all(made, "abcd")
    assert give_up(made, 1) == "a"
    add_all(made, "aef")
    assert order(made) == "bcdefa"


def test_s3fifo_gives_another_round_to_what_was_used_since() -> None:
    made: S3FIFO[str] = S3FIFO()
    add_all(made, "abcdef")
    assert give_up(made, 3) == "abc"
    add_all(made, "abc")
    touch_all(made, "a")
    assert order(made) == "defbca"
    assert give_up(made, 6) == "defbca"
