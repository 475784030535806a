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


@pytest.mark.parametrize("job_id", [0, 1, NUM_WORDS - 1, NUM_WORDS, 10**12])
def test_cancelled_job_is_seen_through_the_other_mapping_and_no_other_is(
    ends: tuple[CancelWords, CancelWords], job_id: int
) -> None:
    worker, node = ends
    assert not node.word(job_id).is_set
    worker.cancel(job_id)
    assert node.word(job_id).is_set
    others = (job_id + 1, job_id + 2, job_id + NUM_WORDS, job_id + 2 * NUM_WORDS)
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
