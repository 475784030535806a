"""Threads in which something fails: whoever they work for is served all the same, or told."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raykv.base.errors import ThreadError
from raykv.base.ids import Direction, Refusal
from raykv.cluster.deaths import DeathWatch
from raykv.node.integrity import Integrity
from raykv.protocol import wire
from tests.fixtures.node.links import NUM_SLOTS, Line, Node, Worker, ended, failures
from tests.fixtures.node.links import SETTINGS as LINK_SETTINGS
from tests.fixtures.node.local import LocalNode
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
REFUSED_S = 3.0
SLOT_BYTES = 4096


BUG = ValueError("a bug")
NO_DESCRIPTORS = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Fault:
    """Raises the first few times that it is asked."""

    def __init__(self, num_failures: int = 2, error: Exception = BUG) -> None:
        self.left, self.error = num_failures, error

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise self.error

    @property
    def is_over(self) -> bool:
        return not self.left


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of threads that the system does not give."""
    refused: set[str] = set()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


@pytest.fixture
def made() -> Iterator[LocalNode]:
    node = LocalNode(NUM_SLOTS)
    yield node
    node.service.stop()


def works(worker: Worker) -> None:
    """It stores and loads."""
    assert failures(worker.run(worker.job(Direction.STORE, [0], [0]))) == []
    assert failures(worker.run(worker.job(Direction.LOAD, [0], [3]))) == []
    assert worker.block(3) == worker.block(0)


# The NodeActor's


@pytest.mark.parametrize("error", [BUG, NO_DESCRIPTORS], ids=str)
def test_workers_are_served_after_the_thread_that_accepts_them_has_failed(
    made: LocalNode, workers: list[Worker], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.01)
    fault = Fault(error=error)

    class Listener:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def accept(self) -> tuple[socket.socket, Any]:
            fault()
            return self._sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

    listen = wire.listen
    monkeypatch.setattr(wire, "listen", lambda name: Listener(listen(name)))
    made.service.start()
    workers.append(Worker(made, [256], 1))
    assert fault.is_over
    works(workers[0])


def test_stores_expire_after_the_thread_that_looks_for_them_has_failed(made: LocalNode) -> None:
    fault = Fault()

    class Faulty(Integrity):
        def work(self, is_wanted: Callable[[], bool]) -> bool:
            fault()
            return super().work(is_wanted)

    made.service.integrity = Faulty(made.service.keeper)
    made.service.start()
    wait_until(lambda: fault.is_over, LONG_S, "it is called again")


def test_lane_goes_on_after_a_job_that_it_failed_with(
    made: LocalNode, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What became of that job nobody knows: its worker finds out by the deadline that it has."""
    made.service.start()
    workers.append(Worker(made, [256], 1))
    fault = Fault(1)
    run = made.service._run

    def fail(queued: Any) -> None:
        fault()
        run(queued)

    monkeypatch.setattr(made.service._lanes, "_run", fail)
    lost = workers[0].job(Direction.STORE, [1], [1])
    workers[0].link.submit(lost)
    wait_until(lambda: fault.is_over, LONG_S, "the lane fails")
    works(workers[0])
    # In this process nobody must be killed for the one that is lost.
    workers[0].end()


def test_deaths_are_noticed_after_the_thread_that_watches_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, fault = DeathWatch(), Fault()
    poll = watch._epoll.poll

    class Poll:
        def poll(self, timeout_s: float) -> Any:
            fault()
            return poll(timeout_s)

    monkeypatch.setattr(watch, "_epoll", Poll())
    thread = watch.start()
    wait_until(lambda: fault.is_over, LONG_S, "it is called again")
    assert thread.is_alive()
    watch.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_worker_is_turned_away_at_once_while_there_is_no_thread_for_it_and_served_later(
    made: LocalNode, no_threads: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    made.service.start()
    no_threads.add("raykv-line")
    line = Line(made, LINK_SETTINGS)
    began = time.monotonic()
    said = "the NodeActor: the thread raykv-line can't be started"
    wait_until(lambda: said in caplog.text, LONG_S, "it is told so")
    assert time.monotonic() - began < REFUSED_S
    line.submit()
    assert ended(line, REFUSED_S) == [Refusal.NODE_LOST]
    no_threads.clear()
    wait_until(lambda: line.link.node_life != 0, LONG_S, "it is served")
    line.end_in_time()
    assert caplog.text.count("are turned away") == 1


def test_worker_of_a_process_at_its_limit_of_threads_is_turned_away(
    lines: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    """A real limit, in a NodeActor of its own."""
    limited = Node(SLOT_BYTES, "limited")
    try:
        lines.append(Line(limited, LINK_SETTINGS))
        link = lines[0].link
        wait_until(lambda: link.breaker_report().failed > 1, REFUSED_S, "it is told so")
        assert "can't start new thread" in caplog.text
        lines[0].submit()
        assert ended(lines[0], REFUSED_S) == [Refusal.NODE_LOST]
        assert limited.process.poll() is None
    finally:
        limited.end()


def test_lane_without_a_thread_is_none(made: LocalNode, no_threads: set[str]) -> None:
    made.service.start()
    no_threads.add("raykv-store")
    with pytest.raises(ThreadError, match="raykv-store"):
        made.service._lanes.open("GPU-1")
    no_threads.clear()
    made.service._lanes.open("GPU-1")
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("raykv-store") >= 2


# The worker's


def test_jobs_fail_at_once_while_there_is_no_thread_for_the_line_and_are_done_later(
    node: Node, lines: list[Line], no_threads: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.AGAIN_S", 0.0)
    no_threads.add("raykv-link")
    lines.append(Line(node, LINK_SETTINGS))
    link = lines[0].link
    job_id = lines[0].submit()
    link.wait([job_id])
    assert [result.job_id for result in link.drain()] == [job_id]
    no_threads.clear()
    lines[0].submit()
    wait_until(lambda: link.node_life != 0, LONG_S, "there is a line")


def test_line_begins_anew_after_its_thread_has_failed(
    node: Node, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(node, [256], 1)
    workers.append(worker)
    fault, decode = Fault(1), wire.FrameReader.feed

    def feed(reader: wire.FrameReader, data: bytes) -> Any:
        if threading.current_thread().name == "raykv-link":
            fault()
        return decode(reader, data)

    monkeypatch.setattr(wire.FrameReader, "feed", feed)
    job = worker.job(Direction.STORE, [0], [0])
    assert failures(worker.run(job)) == [Refusal.NODE_LOST]
    assert node.process.wait(LONG_S) != 0
    node.end()
    node.start()
    wait_until(lambda: worker.link.node_life != 0, LONG_S, "the worker attaches again")
    worker.core.wait()
    works(worker)
