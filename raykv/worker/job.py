"""A copy job as an engine's thread hands it over to the line, and what has become of it there."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raykv.base.ids import Direction
from raykv.protocol.columns import NUMBER_BYTES
from raykv.protocol.copies import CopyJob


@dataclass(frozen=True)
class JobRequest:
    """A copy job that the engine's thread hands over.

    `lock_fd`: of the file that a capture becomes, -1 for none; the caller closes it when the job
    has ended.
    """

    job: CopyJob
    lock_fd: int = -1

    @property
    def job_id(self) -> int:
        return self.job.job_id

    @property
    def direction(self) -> Direction:
        return Direction(self.job.direction)

    @property
    def num_chunks(self) -> int:
        return len(self.job.keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of its message, at most."""
        job = self.job
        tokens = 0 if job.capture is None else len(job.capture.token_ids)
        chunks = len(job.keys.raw) + len(job.keys) * (1 + 2 * NUMBER_BYTES)
        return tokens + chunks + len(job.block_ids.raw) + (64 << 10)


def batches(requests: Iterable[JobRequest], most_bytes: int) -> Iterator[list[CopyJob]]:
    """Jobs in messages of at most `most_bytes`, in order; no job is larger."""
    batch: list[CopyJob] = []
    left = most_bytes
    for request in requests:
        if batch and request.num_bytes > left:
            yield batch
            batch, left = [], most_bytes
        batch.append(request.job)
        left -= request.num_bytes
    if batch:
        yield batch


class Stage(enum.Enum):
    """See `raykv.worker.link`."""

    QUEUED = "queued"
    FLYING = "flying"
    CANCELLING = "cancelling"


@dataclass(slots=True)
class PendingJob:
    """A job that has not ended; `layers` of its layers are there."""

    request: JobRequest
    deadline: float
    stage: Stage = Stage.QUEUED
    layers: int = 0
