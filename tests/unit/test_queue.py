"""The queue of copy jobs: who comes first, and when it is full."""

from __future__ import annotations

from raykv.copy.engine import JobQueue
from raykv.types import Direction

LOAD, STORE = Direction.LOAD, Direction.STORE


def queue(jobs: str, most: int = 100) -> JobQueue[str]:
    """Pushes one job for each word: loads begin with an l, stores with an s."""
    made: JobQueue[str] = JobQueue(most)
    for job in jobs.split():
        assert made.push(LOAD if job[0] == "l" else STORE, job)
    return made


def drained(jobs: JobQueue[str]) -> list[str]:
    popped = []
    while (job := jobs.pop()) is not None:
        popped.append(job)
    return popped


def test_queue_lets_loads_pass_stores_and_keeps_their_order() -> None:
    assert drained(queue("s1 l1 s2 l2 s3")) == ["l1", "l2", "s1", "s2", "s3"]


def test_queue_lets_a_late_load_pass_waiting_stores() -> None:
    jobs = queue("s1 s2")
    assert jobs.pop() == "s1"
    jobs.push(LOAD, "l1")
    assert drained(jobs) == ["l1", "s2"]


def test_queue_gives_none_when_it_is_empty() -> None:
    assert queue("").pop() is None


def test_queue_is_full_at_its_bound_and_unchanged_by_what_it_refuses() -> None:
    jobs = queue("s1 l1 s2", most=3)
    assert not jobs.push(LOAD, "l2")
    assert not jobs.push(STORE, "s3")
    assert list(jobs) == ["l1", "s1", "s2"]
    jobs.pop()
    assert jobs.push(STORE, "s3")
    assert len(jobs) == 3


def test_queue_lists_jobs_in_the_order_in_which_they_would_be_popped() -> None:
    jobs = queue("s1 l1 s2 l2")
    assert list(jobs) == drained(jobs)


def test_take_removes_the_wanted_jobs_and_leaves_the_others_in_order() -> None:
    jobs = queue("s1 l1 s2 l2 s1x l1x")
    assert jobs.take(lambda job: "1" in job) == ["l1", "l1x", "s1", "s1x"]
    assert len(jobs) == 2
    assert drained(jobs) == ["l2", "s2"]


def test_take_makes_room() -> None:
    jobs = queue("s1 s2", most=2)
    assert jobs.take(lambda job: job == "s1") == ["s1"]
    assert jobs.push(LOAD, "l1")
    assert not jobs.push(LOAD, "l2")


def test_take_of_nothing_changes_nothing() -> None:
    jobs = queue("s1 l1")
    assert jobs.take(lambda _: False) == []
    assert drained(jobs) == ["l1", "s1"]
