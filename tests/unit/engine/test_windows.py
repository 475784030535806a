"""Which windows are stored, against a count of what every kept end needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.engine.windows import (
    TAIL_TOKENS,
    WindowPlan,
    checkpoint,
    parting,
    plan_windows,
    state_ends,
)
from raykv.protocol.descriptions import ChunkGroup

FULL = ChunkGroup(0, 16)
WINDOWS = [ChunkGroup(number, 16, 64) for number in range(1, 7)]
"""Six groups of local layers beside one of full attention, as in Gemma 3; windows of 1,024."""

small = st.integers(1, 12)


@given(window=small, interval=small, tail=st.integers(0, 12), prompt=st.integers(0, 60))
def test_chunk_is_kept_if_an_end_that_is_kept_needs_it(
    window: int, interval: int, tail: int, prompt: int
) -> None:
    plan = WindowPlan(window, interval, tail)
    ends = {end for end in range(1, 100) if end % interval == 0 or abs(end - prompt) <= tail}
    needed = {chunk for end in ends for chunk in range(max(0, end - window), end)}
    kept = {chunk for chunk in range(80) if plan.keeps(chunk, prompt)}
    assert kept == {chunk for chunk in needed if chunk < 80}


def test_nothing_is_kept_without_an_interval() -> None:
    assert not any(WindowPlan().keeps(chunk, 5) for chunk in range(20))


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_windows_between_take_the_share_of_full_attention(share: float) -> None:
    plans = plan_windows([FULL, *WINDOWS], [each.group for each in WINDOWS], share)
    chunks = 100_000
    between = sum(
        sum(plan.keeps(chunk, 2 * chunks) for chunk in range(chunks)) for plan in plans.values()
    )
    assert between == pytest.approx(share * chunks, rel=0.02)


def test_every_end_in_the_tail_can_be_loaded() -> None:
    (plan, *_) = plan_windows([FULL, *WINDOWS], [1], 0.5).values()
    prompt = 10_000
    for tokens in (0, 100, TAIL_TOKENS):
        end = prompt - tokens // 16
        assert all(plan.keeps(chunk, prompt) for chunk in range(end - 64, end))


def test_share_is_of_all_chunks_where_there_is_no_full_attention() -> None:
    (plan,) = plan_windows([WINDOWS[0]], [1], 0.25).values()
    assert plan.interval == 4 * 64


def test_ends_fall_where_chunks_of_all_groups_end() -> None:
    coarse = ChunkGroup(1, 48, 3)
    plans = plan_windows([FULL, coarse], [1], 0.5)
    assert plans[1].interval * coarse.tokens % 16 == 0
    assert plans[1].tail * coarse.tokens % 16 == 0


def test_nothing_is_planned_for_a_share_of_zero() -> None:
    assert plan_windows([FULL, *WINDOWS], [1, 2], 0.0) == {1: WindowPlan(), 2: WindowPlan()}


@pytest.mark.parametrize(
    ("groups", "known", "prompt", "expected"),
    [
        ([FULL, ChunkGroup(1, 48), ChunkGroup(2, 16, 4)], {0: 10, 1: 3}, 1000, 144),
        ([FULL, ChunkGroup(1, 48), ChunkGroup(2, 16, 4)], {0: 8, 1: 3}, 1000, 96),
        ([FULL, *WINDOWS], {0: 10}, 160, 144),
        (WINDOWS, {}, 1000, 0),
    ],
    ids=["by the first", "by the other", "before its last token", "without full attention"],
)
def test_prompt_parts_where_the_group_that_is_known_least_ends(
    groups: list[ChunkGroup], known: dict[int, int], prompt: int, expected: int
) -> None:
    assert parting(groups, known, prompt=prompt) == expected


def test_checkpoint_is_a_tail_before_the_end_and_a_quarter_of_short_prompts() -> None:
    groups = [ChunkGroup(0, 96), ChunkGroup(1, 96, 1)]
    assert checkpoint(groups, 20_000) == (20_000 - TAIL_TOKENS) // 96 * 96
    assert checkpoint(groups, 710) == 480


HYBRID = [ChunkGroup(0, 96), ChunkGroup(1, 96, 1)]


@pytest.mark.parametrize(
    ("prompt", "step", "ends"),
    [
        (20_000, 8192, [8160, 16_320, 18_912, 19_968]),
        # A chunk that is longer than a step takes several.
        (300, 64, [96, 192, 288]),
        (1_000, 8192, [672, 960]),
        (96, 8192, []),
    ],
)
def test_states_are_where_steps_end_before_the_tail_and_at_the_end(
    prompt: int, step: int, ends: list[int]
) -> None:
    assert state_ends(HYBRID, prompt, step, 0.25) == ends


@given(prompt=st.integers(1, 30_000), step=st.integers(1, 9_000))
def test_states_are_where_chunks_end_and_no_step_is_too_long(prompt: int, step: int) -> None:
    ends = state_ends(HYBRID, prompt, step, 0.25)
    steps = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert all(0 < each <= max(96, step) and each % 96 == 0 for each in steps)
    assert ends[-1:] == state_ends(HYBRID, prompt, step, 0.0)
