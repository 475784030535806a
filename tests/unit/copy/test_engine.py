"""Copy jobs: what each lane does next, when the queue is full, and what stops a copy that runs."""

from __future__ import annotations

import ctypes

import pytest

from raykv.base.ids import Direction
from raykv.copy.engine import HOST, JobQueue, LaneName, StopSign
from raykv.memory.words import Word

LOAD, STORE = LaneName(HOST, Direction.LOAD), LaneName(HOST, Direction.STORE)
GPU_LOAD, GPU_STORE = LaneName("gpu", Direction.LOAD), LaneName("gpu", Direction.STORE)
LANES = {"l": LOAD, "s": STORE, "gl": GPU_LOAD, "gs": GPU_STORE}


def queue(jobs: str, most: int = 100) -> JobQueue[str]:
    """Pushes one job for each word, which ends in a number and begins with its lane's letters."""
    made: JobQueue[str] = JobQueue(most)
    for job in jobs.split():
        assert made.push(LANES[job.rstrip("0123456789x")], job)
    return made


def drained(jobs: JobQueue[str], lane: LaneName) -> list[str]:
    begun = []
    while (job := jobs.begin(lane)) is not None:
        begun.append(job)
        jobs.end(lane)
    return begun


def test_each_lane_has_its_jobs_in_the_order_of_submission() -> None:
    jobs = queue("s1 l1 gs1 s2 gl1 l2 gs2")
    assert drained(jobs, LOAD) == ["l1", "l2"]
    assert drained(jobs, GPU_STORE) == ["gs1", "gs2"]
    assert drained(jobs, STORE) == ["s1", "s2"]
    assert drained(jobs, GPU_LOAD) == ["gl1"]
    assert jobs.is_idle


def test_job_that_runs_holds_up_its_own_lane_only() -> None:
    jobs = queue("s1 s2")
    assert jobs.begin(LOAD) is None
    jobs.push(LOAD, "l1")
    assert jobs.begin(STORE) == "s1"
    with pytest.raises(AssertionError):
        jobs.begin(STORE)
    assert jobs.begin(LOAD) == "l1"
    jobs.end(STORE)
    assert jobs.begin(STORE) == "s2"
    assert (len(jobs), jobs.is_idle) == (0, False)


def test_full_lane_refuses_and_leaves_room_in_the_others() -> None:
    jobs = queue("s1 s2", most=2)
    assert not jobs.push(STORE, "s3")
    assert list(jobs) == ["s1", "s2"]
    assert jobs.push(LOAD, "l1")
    assert jobs.begin(STORE) == "s1"
    assert jobs.push(STORE, "s3")
    assert jobs.take(lambda job: job == "s2") == ["s2"]
    assert jobs.push(STORE, "s4")
    assert not jobs.push(STORE, "s5")
    assert len(jobs) == 3


def test_take_removes_the_wanted_jobs_and_leaves_the_others_in_order() -> None:
    jobs = queue("s1 l1 s2 l2 s1x l1x")
    assert sorted(jobs.take(lambda job: "1" in job)) == ["l1", "l1x", "s1", "s1x"]
    assert len(jobs) == 2
    assert jobs.take(lambda _: False) == []
    assert [drained(jobs, LOAD), drained(jobs, STORE)] == [["l2"], ["s2"]]


def test_store_of_host_memory_gives_way_to_loads_that_wait_or_run() -> None:
    jobs = queue("s1")
    assert not jobs.must_give_way(STORE)
    jobs.push(LOAD, "l1")
    assert jobs.must_give_way(STORE)
    jobs.begin(LOAD)
    assert jobs.must_give_way(STORE)
    jobs.end(LOAD)
    assert not jobs.must_give_way(STORE)


def test_nobody_else_gives_way() -> None:
    jobs = queue("s1 l1 gs1 gl1")
    assert [lane for lane in LANES.values() if jobs.must_give_way(lane)] == [STORE]
    only_gpu = queue("s1 gl1")
    assert not only_gpu.must_give_way(STORE)


def test_sign_without_words_is_never_set() -> None:
    sign = StopSign()
    assert not sign()
    assert sign.rows.shape == (0, 2)


def test_sign_is_set_while_any_of_its_words_has_its_value() -> None:
    words = (ctypes.c_uint64 * 2)(0, 2**64 - 1)
    first = ctypes.addressof(words)
    sign = StopSign([Word(first, 3), Word(first + 8, 4)])
    assert sign.rows.tolist() == [[first, 3], [first + 8, 4]]
    for number, value, expected in [(0, 3, True), (0, 2, False), (1, 4, True), (1, 3, False)]:
        words[number] = value
        assert sign() is expected
