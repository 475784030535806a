"""Orders of eviction for replays: each has exactly what was added and not given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.inspect.orders import POLICIES

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "evicted", "first"]), st.integers(0, 9))
)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS)
def test_order_has_what_was_added_and_not_given_up(name: str, steps: list[tuple[str, int]]) -> None:
    order = POLICIES[name]()
    held: set[int] = set()
    for step, number in steps:
        match step:
            case "add" if number not in held:
                order.add(number)
                held.add(number)
            case "touch" if number in held:
                order.touch(number)
            case "evicted" if number in held:
                order.evicted(number)
                held.remove(number)
            case "first":
                for first in list(order.candidates())[:1]:
                    order.evicted(first)
                    held.discard(first)
        found = list(order.candidates())
        assert len(found) == len(held)
        assert set(found) == held


@pytest.mark.parametrize("name", POLICIES)
def test_tail_of_the_oldest_prompt_goes_first(name: str) -> None:
    order = POLICIES[name]()
    for prompt in ([1, 2, 3], [4, 5]):
        for chunk in reversed(prompt):
            order.add(chunk)
    assert list(order.candidates()) == [3, 2, 1, 5, 4]


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_touched_last_goes_last(name: str) -> None:
    """As long as nothing has shown that chunks which were stored and not found are worth less."""
    order = POLICIES[name]()
    for chunk in (1, 2, 3):
        order.add(chunk)
    order.touch(1)
    assert list(order.candidates()) == [2, 3, 1]
