"""Cancel words, as the worker writes and its NodeActor reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from raykv.base.errors import HandleError
from raykv.memory.words import NUM_WORDS, CancelWords


@pytest.fixture
def ends() -> Iterator[tuple[CancelWords, CancelWords]]:
    """The worker's words, and the NodeActor's mapping of the same memory."""
    worker = CancelWords.create()
    node = CancelWords.received(os.dup(worker.region.fd))
    yield worker, node
    worker.close()
    node.close()


def test_no_job_is_cancelled_at_first(ends: tuple[CancelWords, CancelWords]) -> None:
    worker, node = ends
    for job_id in (0, 1, NUM_WORDS - 1, NUM_WORDS, 10**12):
        assert not worker.word(job_id).is_set
        assert not node.word(job_id).is_set


@pytest.mark.parametrize("job_id", [0, 1, NUM_WORDS - 1, NUM_WORDS, 10**12])
def test_cancelled_job_is_seen_through_the_other_mapping(
    ends: tuple[CancelWords, CancelWords], job_id: int
) -> None:
    worker, node = ends
    worker.cancel(job_id)
    assert node.word(job_id).is_set


def test_cancelling_one_job_cancels_no_other(ends: tuple[CancelWords, CancelWords]) -> None:
    worker, node = ends
    worker.cancel(7)
    others = (6, 8, 7 + NUM_WORDS, 7 + 2 * NUM_WORDS)
    assert not any(node.word(other).is_set for other in others)


def test_job_at_the_same_word_takes_it_over(ends: tuple[CancelWords, CancelWords]) -> None:
    worker, node = ends
    worker.cancel(7)
    worker.cancel(7 + NUM_WORDS)
    assert node.word(7 + NUM_WORDS).is_set
    assert not node.word(7).is_set


def test_received_words_are_refused_when_the_memory_is_too_short() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, NUM_WORDS * 8 - 1)
    with pytest.raises(HandleError):
        CancelWords.received(fd)
