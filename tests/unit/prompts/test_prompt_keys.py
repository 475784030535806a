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
from raykv.prompts.prompt_keys import BLOCKS_OF_A_STRETCH, PromptHasher, PromptTokens
from raykv.protocol.groups import ChunkGroup

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
    hasher = PromptHasher(SCHEME, most_stretches)
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


def test_long_prompt_has_the_keys_of_its_beginning_only() -> None:
    tokens = list(range(10 * STRETCH))
    found = PromptHasher(SCHEME).keys(PromptTokens(tokens, PromptTraits()), 30)
    whole = SCHEME.chunks(tokens)
    assert found.num_tokens == len(tokens)
    assert sum(map(len, found.keys.values())) == 30
    for group, keys in found.keys.items():
        assert keys == whole[group][: len(keys)]
