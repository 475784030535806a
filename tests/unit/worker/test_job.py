"""Copy jobs on their way: what goes with one message."""

from __future__ import annotations

import msgspec
import pytest

from raykv.base.ids import Direction
from raykv.protocol import wire
from raykv.protocol.worker import JobBatch
from raykv.worker.job import JobRequest, batches
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key


def job_of(job_id: int, num_chunks: int) -> JobRequest:
    keys = [numbered_key(number) for number in range(num_chunks)]
    blocks = [[number] * 8 for number in range(num_chunks)]
    return JobRequest(named_job(Direction.STORE, keys, blocks, job_id=job_id))


def test_jobs_of_a_message_fit_into_its_frame_and_keep_their_order() -> None:
    requests = [job_of(number, 20_000) for number in range(12)]
    made = list(batches(requests, wire.MAX_FRAME_BYTES))
    assert 1 < len(made) < len(requests)
    assert [each.job_id for batch in made for each in batch] == list(range(12))
    for batch in made:
        assert len(wire.frame(JobBatch(batch))) <= wire.MAX_FRAME_BYTES


@pytest.mark.parametrize("num_chunks", [0, 1, 5000])
def test_job_is_not_larger_than_it_says(num_chunks: int) -> None:
    request = job_of(1 << 40, num_chunks)
    assert len(msgspec.msgpack.encode(JobBatch([request.job]))) <= request.num_bytes
