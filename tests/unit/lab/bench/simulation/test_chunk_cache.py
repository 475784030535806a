"""A cache that gives up what was not used for longest, from the end of a prompt on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raykv.lab.bench.simulation.chunk_cache import ChunkCache, Chunks


def prompt(first: int, number: int) -> Chunks:
    return np.arange(first, first + number)


def test_prompt_that_was_used_longest_ago_loses_its_end_first() -> None:
    cache = ChunkCache(100, 32)
    for first in (0, 20, 40):
        cache.put(prompt(first, 10))
    cache.put(prompt(60, 6))
    assert [cache.prefix(prompt(first, 10)) for first in (0, 20, 40)] == [6, 10, 10]
    assert cache.prefix(prompt(60, 6)) == 6


def test_pinned_chunk_stays_and_reserved_room_is_not_given_away() -> None:
    cache = ChunkCache(100, 32)
    cache.put(prompt(0, 16))
    cache.pin(prompt(0, 16))
    cache.reserved = 10
    cache.put(prompt(50, 6))
    assert not cache.make_room(20)
    assert (cache.prefix(prompt(0, 16)), cache.held) == (16, 16)
    cache.unpin(prompt(0, 16))
    assert cache.make_room(20)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=30))
def test_what_is_held_is_counted_and_fits_and_prompts_are_held_as_prefixes(
    used: list[tuple[int, int]],
) -> None:
    cache = ChunkCache(1000, 40)
    for first, number in used:
        # Each prompt has chunks of its own, so that equal ones have equal prefixes.
        chunks = prompt(first * 12, number)
        cache.put(chunks)
        assert cache.prefix(chunks) == number
    there = cache.has(np.arange(1000))
    assert cache.held == np.count_nonzero(there) <= cache.capacity
    for row in there[:996].reshape(-1, 12):
        assert cache.prefix(np.arange(0)) == 0
        assert np.count_nonzero(row) == (len(row) if row.all() else row.argmin())
