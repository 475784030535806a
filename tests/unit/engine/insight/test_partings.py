"""Where prompts leave those that were there before them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile

import pytest

from raykv.engine.insight import partings as module
from raykv.engine.insight.partings import ROW_BYTES, Partings, PassingPrompt
from raykv.protocol.engine import Parting

CHUNK = 4


def keys_of(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """As vLLM names chunks: by all tokens up to their end."""
    ends = range(CHUNK, len(tokens) + 1, CHUNK)
    return [sha256(salt + bytes(tokens[:end])).digest()[:8] for end in ends]


def passes(
    partings: Partings, tokens: Sequence[int], *, answer: int = 0, found: int = 0, salt: bytes = b""
) -> Parting | None:
    """A prompt comes by, whose last tokens are the answer to it."""
    where = partings.pass_by(
        PassingPrompt(
            keys=keys_of(tokens, salt),
            tokens=list(tokens),
            chunk_tokens=CHUNK,
            num_whole=(len(tokens) - answer) // CHUNK,
            num_found=found,
        )
    )
    partings.check()
    return where


FIRST = list(range(14))


@pytest.fixture
def partings() -> Partings:
    """Which have seen a prompt of three chunks and a half."""
    made = Partings()
    assert passes(made, FIRST) is None
    return made


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 11])
def test_prompt_leaves_the_other_at_the_first_token_that_differs(
    partings: Partings, at: int
) -> None:
    other = [*FIRST]
    other[at] = 99
    where = passes(partings, other)
    assert where is not None
    assert (where.at, where.is_same) == (at, False)
    assert where.nearest == keys_of(FIRST)[at // CHUNK]
    assert where.before == FIRST[:at]
    assert where.own[0] == 99
    assert where.other == FIRST[at : (at // CHUNK + 1) * CHUNK]


@pytest.mark.parametrize(
    "tokens",
    [FIRST, FIRST[:8], [*FIRST[:12], 99], [*FIRST[:5], 99], [*FIRST[:12], *range(50, 60)]],
)
def test_prompt_whose_whole_chunks_are_known_leaves_none(
    partings: Partings, tokens: list[int]
) -> None:
    # Of the last one the second chunk is not whole.
    assert passes(partings, tokens) is None


def test_prompt_leaves_the_one_with_which_it_shares_most(partings: Partings) -> None:
    passes(partings, [0, 1, 50, 51, 52])
    passes(partings, [60, 61, 62, 63])
    where = passes(partings, [0, 1, 50, 70, 71])
    assert where is not None
    assert (where.at, where.other) == (3, [51])


def test_answer_that_differs_is_no_parting(partings: Partings) -> None:
    assert passes(partings, [*range(20, 28), 1, 2, 3, 4], answer=4) is not None
    assert passes(partings, [*range(20, 28), 1, 2, 3, 5], answer=4) is None


def test_next_turn_leaves_the_answer_where_its_template_changes_it(partings: Partings) -> None:
    passes(partings, [*range(20, 26), *range(70, 76)], answer=6)
    where = passes(partings, [*range(20, 26), *range(70, 73), 5, 6, 7, 8])
    assert where is not None
    assert where.at == 9


def test_prompt_with_another_salt_has_the_same_tokens(partings: Partings) -> None:
    where = passes(partings, FIRST, salt=b"mine")
    assert where is not None
    assert (where.at, where.is_same) == (CHUNK, True)


def test_chunks_that_were_found_are_not_where_it_leaves(partings: Partings) -> None:
    """Another engine's prompt, of which this one has seen nothing."""
    tokens = [*range(30, 38), 1, 2, 3, 4]
    assert passes(partings, tokens, found=2) is None
    where = passes(partings, [*range(30, 38), 1, 9, 3, 4], found=2)
    assert where is not None
    assert where.at == 9


def test_long_prompt_is_remembered_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NEW", 2)
    monkeypatch.setattr(module, "MAX_CHUNKS", 5)
    partings = Partings()
    tokens = list(range(40))
    for expected in (2, 4, 5, 5):
        passes(partings, tokens)
        assert len(partings) == expected


def test_memory_is_bounded_and_forgets_what_was_not_used_for_longest() -> None:
    chunk_bytes = ROW_BYTES + 4 * CHUNK
    partings = Partings(most_bytes=6 * chunk_bytes)
    for start in (0, 40, 80):
        passes(partings, range(start, start + 8))
    assert len(partings) == 6
    passes(partings, range(8))
    passes(partings, range(120, 128))
    assert len(partings) == 6
    assert passes(partings, [0, 1, 2, 200]) is not None
    assert partings.num_bytes <= 6 * chunk_bytes


def test_many_ways_on_from_one_chunk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAYS", 3)
    partings = Partings()
    used = [1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11, 12]
    passes(partings, used)
    for number in range(20):
        passes(partings, [1, 2, 3, 4, number, 6, 7, 8, 9, 10, 11, 12])
        passes(partings, used)
    assert len(partings) == 1 + 3 * 2
    assert passes(partings, used) is None


def longest_shared(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> int:
    """Of whole chunks of the prompts, token by token."""
    best = 0
    for other in prompts:
        pairs = zip(tokens, other[: len(other) // CHUNK * CHUNK], strict=False)
        best = max(best, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_parting_is_where_the_longest_shared_beginning_ends(seed: int) -> None:
    rng = random.Random(seed)
    partings, seen = Partings(), list[list[int]]()
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(4, 24))]
        where = passes(partings, tokens)
        shared = longest_shared(seen, tokens)
        if where is not None:
            assert where.at == shared
            assert not where.is_same
        elif seen and shared < len(tokens) // CHUNK * CHUNK:
            # Nothing that was there goes on behind the chunks that both have.
            assert shared % CHUNK == 0
        seen.append(tokens)
