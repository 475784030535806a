"""Eviction order, by example; the suite runs for every policy that a setting can name."""

from __future__ import annotations

import pytest

from raykv.core.policy import LRU, POLICIES, EvictionPolicy

A, B, C, D = (("model", name) for name in (b"a", b"b", b"c", b"d"))


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy[tuple[str, bytes]]:
    return POLICIES[request.param]()


def order(policy: EvictionPolicy[tuple[str, bytes]]) -> str:
    """The names of the candidates in one word, the first to give up first."""
    return b"".join(name for _, name in policy.candidates()).decode()


def lru(*names: tuple[str, bytes]) -> LRU[tuple[str, bytes]]:
    made: LRU[tuple[str, bytes]] = LRU()
    for name in names:
        made.add(name)
    return made


def test_lru_gives_up_the_oldest_first() -> None:
    assert order(lru(A, B, C, D)) == "abcd"


def test_lru_gives_up_a_touched_name_last() -> None:
    made = lru(A, B, C, D)
    made.touch(B)
    made.touch(A)
    assert order(made) == "cdba"


def test_lru_counts_a_second_add_as_a_touch() -> None:
    made = lru(A, B, C)
    made.add(A)
    assert order(made) == "bca"


def test_lru_keeps_the_order_of_the_others_when_one_is_removed() -> None:
    made = lru(A, B, C, D)
    made.remove(B)
    assert order(made) == "acd"


def test_lru_treats_a_name_that_came_back_as_new() -> None:
    made = lru(A, B, C)
    made.remove(A)
    made.add(A)
    assert order(made) == "bca"


def test_lru_gives_up_the_tail_of_a_prefix_first_when_it_is_touched_from_its_tail() -> None:
    made = lru(A, B, C, D)
    for name in (C, B, A):
        made.touch(name)
    assert order(made) == "dcba"


def test_policy_holds_what_was_added_and_not_removed(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    for name in (A, B, C):
        policy.add(name)
    policy.add(B)
    policy.remove(C)
    assert set(policy.candidates()) == {A, B}
    assert len(policy) == 2


def test_policy_ignores_names_that_it_does_not_hold(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    policy.add(A)
    policy.touch(B)
    policy.remove(C)
    assert list(policy.candidates()) == [A]
    assert len(policy) == 1


def test_policy_is_unchanged_by_looking_at_its_candidates(
    policy: EvictionPolicy[tuple[str, bytes]],
) -> None:
    for name in (A, B, C):
        policy.add(name)
    assert list(policy.candidates()) == list(policy.candidates())
    assert len(policy) == 3
