"""What became of a job that a worker's link was given."""

from __future__ import annotations

from typing import Any

from raykv.base.ids import Refusal
from raykv.protocol.messages import JobResult
from tests.waiting import wait_until


def result_of(link: Any, job_id: int, limit_s: float = 10.0) -> JobResult:
    """The job's result; those of other jobs that come before it are dropped."""
    found: list[JobResult] = []

    def is_there() -> bool:
        found.extend(link.drain())
        return any(result.job_id == job_id for result in found)

    wait_until(is_there, limit_s, f"job {job_id} ends")
    return next(result for result in found if result.job_id == job_id)


def refusals(link: Any, job_id: int, limit_s: float = 10.0) -> list[Refusal]:
    """Of the job's chunks that failed."""
    return [Refusal(number) for number in result_of(link, job_id, limit_s).refusals]
