"""Keys of prompts for routing: the same as without the memory of what was hashed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.prompts import prompt_keys
from raykv.prompts.block_hashes import HashScheme, PromptTraits, block_hashes
from raykv.prompts.lookup import PromptScheme
from raykv.prompts.prefixes import loadable_tokens
from raykv.prompts.prompt_keys import BLOCKS_OF_A_STRETCH, PromptHasher, PromptTokens
from raykv.protocol.descriptions import ChunkGroup

SCHEME = PromptScheme(HashScheme("sha256", "seed", 4), (ChunkGroup(0, 4), ChunkGroup(1, 8, 2)))
STRETCH = 4 * BLOCKS_OF_A_STRETCH
SALTED = PromptTraits("salt", "adapter", "/path")
MANY = 100_000


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * STRETCH + 5),
            st.integers(0, 2),
            st.sampled_from([PromptTraits(), SALTED]),
        ),
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_keys_are_those_of_an_engine_whatever_was_hashed_before(
    prompts: list[tuple[int, int, PromptTraits]], most_stretches: int
) -> None:
    hasher = PromptHasher(SCHEME)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(prompt_keys, "MOST_STRETCHES", most_stretches)
        check_keys(hasher, prompts, most_stretches)


def check_keys(
    hasher: PromptHasher, prompts: list[tuple[int, int, PromptTraits]], most_stretches: int
) -> None:
    for length, seed, traits in prompts:
        # Prompts of one seed begin alike.
        tokens = [random.Random(seed).randrange(9) for _ in range(length)]
        found = hasher.keys(PromptTokens(tokens, traits), MANY)
        assert found.keys == SCHEME.chunks(tokens, traits)
        assert found.num_tokens == length
        assert len(hasher) <= most_stretches


def test_next_turn_of_a_conversation_hashes_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []

    def counting(tokens: Sequence[int], *rest: Any) -> list[bytes]:
        hashed.append(len(tokens))
        return block_hashes(tokens, *rest)

    monkeypatch.setattr(prompt_keys, "block_hashes", counting)
    hasher = PromptHasher(SCHEME)
    hasher.keys(PromptTokens(list(range(2 * STRETCH)), PromptTraits()), MANY)
    hasher.keys(PromptTokens(list(range(2 * STRETCH + 8)), PromptTraits()), MANY)
    assert hashed == [STRETCH, STRETCH, 8]


PLAIN_SCHEME = PromptScheme(SCHEME.hashing, (ChunkGroup(0, 4),))


def test_long_prompt_has_the_keys_of_its_beginning_only() -> None:
    tokens = list(range(10 * STRETCH))
    found = PromptHasher(PLAIN_SCHEME).keys(PromptTokens(tokens, PromptTraits()), 30)
    (whole,) = PLAIN_SCHEME.chunks(tokens).values()
    assert found.num_tokens == len(tokens)
    assert found.keys == {ChunkGroup(0, 4): whole[:30]}


def test_long_prompt_with_windows_has_keys_up_to_its_end() -> None:
    """What it needs of windows is there: with its beginning alone nothing could be loaded."""
    scheme = PromptScheme(SCHEME.hashing, (ChunkGroup(0, 4), ChunkGroup(1, 4, 6)))
    tokens = list(range(4 * 101))
    found = PromptHasher(scheme).keys(PromptTokens(tokens, PromptTraits()), 60)
    full, window = scheme.chunks(tokens).values()
    assert found.keys == {ChunkGroup(0, 16): full[3::4], ChunkGroup(1, 16, 1): window[3::4]}
    # A window of 6 chunks that ends with the 98th of 101, in chunks of four: up to the 96th.
    held = {*full, *window[92:98]}
    there = {group.group: [key in held for key in keys] for group, keys in found.keys.items()}
    assert loadable_tokens(list(found.keys), there) == 4 * 96


def test_groups_that_are_alike_are_asked_for_once() -> None:
    groups = tuple(ChunkGroup(number, 4, None if number == 3 else 2) for number in range(6))
    tokens = list(range(50))
    found = PromptHasher(PromptScheme(SCHEME.hashing, groups)).keys(
        PromptTokens(tokens, PromptTraits()), MANY
    )
    assert [each.group for each in found.keys] == [0, 3]


def test_states_are_asked_for_where_they_are_but_not_behind_the_last_token() -> None:
    """In larger chunks most of them would not be seen."""
    groups = (ChunkGroup(0, 4, 1), ChunkGroup(1, 4))
    scheme = PromptScheme(SCHEME.hashing, groups, frozenset({0}))
    for length, most, chunks in ((40, MANY, 9), (41, MANY, 10), (4 * 101, 60, 30)):
        tokens = list(range(length))
        found = PromptHasher(scheme).keys(PromptTokens(tokens, PromptTraits()), most)
        whole = scheme.chunks(tokens)
        assert found.keys == {group: keys[:chunks] for group, keys in whole.items()}
