"""Hidden states out of a worker's KV blocks, over the real socket: bytes, files, failures."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raykv.base.errors import HiddenStatesError
from raykv.base.ids import Direction, Refusal
from raykv.node.states.capturing import delete_expired
from raykv.node.states.file import HiddenStates, load_hidden_states, promise, write_states
from raykv.protocol import wire
from raykv.protocol.copies import Capture, CopyResult
from raykv.protocol.node import CaptureStats
from raykv.worker.job import JobRequest
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.links import NUM_BLOCKS, PATIENT, Node, Worker, changed, failures
from tests.fixtures.node.local import LocalNode
from tests.fixtures.node.states_reader import DisappointedReader
from tests.fixtures.waiting import wait_until

SLOT_BYTES = 4096
BLOCK, STATES, HIDDEN = 4, 3, 8
PAGE = BLOCK * STATES * HIDDEN * 2
MOST, TTL_S = 1 << 20, 60.0

_job_ids = itertools.count(1 << 48)


class Here(LocalNode):
    def states(self, name: str, deadline_s: float = 10.0) -> HiddenStates:
        return self.service.capturing.states(name, deadline_s)


@pytest.fixture
def here() -> Iterator[Here]:
    node = Here(8)
    node.start()
    yield node
    node.service.stop()


@pytest.fixture
def worker(here: Here) -> Iterator[Worker]:
    attached = Worker(here, [PAGE], 1)
    yield attached
    attached.end()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a.safetensors")


def request(
    worker: Worker, name: str, blocks: list[int], num_tokens: int, **changes: object
) -> JobRequest:
    """A capture of float16 states that lie token by token."""
    lock_fd = changes.pop("lock_fd", -1)
    values: dict[str, object] = {
        "request_id": name,
        "token_ids": np.arange(num_tokens, dtype="<i8").tobytes(),
        "num_states": STATES,
        "hidden_size": HIDDEN,
        "dtype": "float16",
        "block_tokens": BLOCK,
        "strides": [STATES * HIDDEN, HIDDEN, 1],
        "most_bytes": MOST,
        "ttl_s": TTL_S,
        "has_lock": lock_fd != -1,
        **changes,
    }
    job = named_job(
        Direction.STORE,
        [numbered_key(0)],
        [blocks],
        job_id=next(_job_ids),
        namespace=worker.namespace,
    )
    capture = Capture(**values)  # type: ignore[arg-type]
    return changed(JobRequest(job, lock_fd), capture=capture)  # type: ignore[arg-type]


def capture(
    worker: Worker, name: str, blocks: list[int], num_tokens: int, path: str = "", **changes: object
) -> list[Refusal]:
    """Capture, to a file if it has a path; why that was refused."""
    if path:
        changes |= {"path": path, "lock_fd": promise(path)}
    job = request(worker, name, blocks, num_tokens, **changes)
    refused = failures(worker.run(job))
    if path:
        os.close(job.lock_fd)
    return refused


def numbers(worker: Worker, blocks: list[int]) -> np.ndarray:
    """What the blocks hold, token by token, [tokens, states, hidden]."""
    pages = b"".join(worker.block(number)[0] for number in blocks)
    return np.frombuffer(pages, np.uint16).reshape(-1, STATES, HIDDEN)


def bits(states: HiddenStates) -> np.ndarray:
    return states["hidden_states"].view(__import__("torch").int16).numpy().view(np.uint16)


def test_states_are_those_of_the_blocks_in_memory_and_in_the_file(
    here: Here, worker: Worker, path: str
) -> None:
    blocks, num_tokens = [5, 2, 9], 2 * BLOCK + 3
    assert capture(worker, "cmpl-1-0-0123abcd", blocks, num_tokens, path) == []
    assert here.service.stats().states.bytes_captured == len(blocks) * PAGE
    expected = numbers(worker, blocks)[:num_tokens]
    states = here.states("cmpl-1-0")
    assert states.shape == (num_tokens, STATES, HIDDEN)
    assert np.array_equal(bits(states), expected)
    assert states["token_ids"].tolist() == list(range(num_tokens))
    loaded = load_hidden_states(path, 10.0)
    assert np.array_equal(loaded["hidden_states"].numpy().view(np.uint16), expected)
    assert loaded["token_ids"].tolist() == list(range(num_tokens))


def test_states_that_lie_state_by_state_come_token_by_token(here: Here, worker: Worker) -> None:
    strides = [HIDDEN, BLOCK * HIDDEN, 1]
    assert capture(worker, "a", [3, 4], 2 * BLOCK, strides=strides) == []
    pages = np.frombuffer(b"".join(worker.block(n)[0] for n in (3, 4)), np.uint16)
    expected = pages.reshape(2, STATES, BLOCK, HIDDEN).swapaxes(1, 2).reshape(-1, STATES, HIDDEN)
    assert np.array_equal(bits(here.states("a")), expected)


def test_blocks_may_change_as_soon_as_the_capture_is_answered(here: Here, worker: Worker) -> None:
    expected = numbers(worker, [7]).copy()
    assert capture(worker, "a", [7], BLOCK) == []
    start = worker.offsets[0] + 7 * worker.strides[0]
    ctypes.memset(worker.kv.address + start, 0, PAGE)
    assert np.array_equal(bits(here.states("a")), expected)


@pytest.mark.parametrize(
    ("changes", "blocks", "num_tokens"),
    [
        ({}, [NUM_BLOCKS], BLOCK),
        ({}, [0], BLOCK + 1),
        ({"hidden_size": HIDDEN + 1}, [0], BLOCK),
        ({"dtype": "int4"}, [0], BLOCK),
    ],
)
def test_capture_that_cannot_be_meant_is_refused_and_the_reader_told(
    here: Here,
    worker: Worker,
    path: str,
    changes: dict[str, object],
    blocks: list[int],
    num_tokens: int,
) -> None:
    assert capture(worker, "a", blocks, num_tokens, path, **changes) == [Refusal.BAD_HANDLE]
    with pytest.raises(HiddenStatesError, match="invalid"):
        here.states("a")
    with pytest.raises(HiddenStatesError, match="invalid"):
        load_hidden_states(path, 10.0)
    assert capture(worker, "b", [0], BLOCK) == []


def test_second_capture_of_a_name_is_refused_and_the_first_one_stays(
    here: Here, worker: Worker
) -> None:
    assert capture(worker, "a", [1], BLOCK) == []
    assert capture(worker, "a", [2], BLOCK) == [Refusal.BAD_HANDLE]
    assert np.array_equal(bits(here.states("a")), numbers(worker, [1]))


def test_oldest_states_make_room(here: Here, worker: Worker) -> None:
    for name in "abc":
        assert capture(worker, name, [1], BLOCK, most_bytes=2 * PAGE) == []
        here.states(name)
    with pytest.raises(HiddenStatesError, match="made room"):
        here.states("a", 0.0)
    stats = here.service.stats().states
    assert stats == CaptureStats(2 * PAGE, captured=3, bytes_captured=3 * PAGE)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are written when the event is set."""
    is_ready = threading.Event()

    def write(path: str, states: HiddenStates) -> None:
        assert is_ready.wait(30.0)
        write_states(path, states)

    monkeypatch.setattr("raykv.node.states.file.write_states", write)
    yield is_ready
    is_ready.set()


def test_captures_wait_while_what_is_written_fills_the_memory(
    here: Here, worker: Worker, path: str, slow_disk: threading.Event
) -> None:
    assert capture(worker, "a", [1], BLOCK, path, most_bytes=PAGE) == []
    assert np.array_equal(bits(here.states("a")), numbers(worker, [1]))
    # The link gives up after 0.3 s.
    assert capture(worker, "b", [1], BLOCK, most_bytes=PAGE) == [Refusal.CANCELLED]
    with pytest.raises(HiddenStatesError, match="hidden_states_bytes"):
        here.states("b")
    slow_disk.set()
    load_hidden_states(path, 10.0)
    assert capture(worker, "c", [1], BLOCK, most_bytes=PAGE) == []
    assert not here.service.capturing.has("a")


def test_write_that_fails_is_told_and_the_states_are_in_memory(
    here: Here, worker: Worker, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    lock_fd = promise(str(path))
    (path / "in the way").mkdir(parents=True)
    job = request(worker, "a", [1], BLOCK, path=str(path), lock_fd=lock_fd)
    assert failures(worker.run(job)) == []
    os.close(lock_fd)
    assert np.array_equal(bits(here.states("a")), numbers(worker, [1]))
    with pytest.raises(HiddenStatesError, match="irectory"):
        load_hidden_states(str(path), 10.0)


def test_reader_hears_of_the_death_of_the_node(path: str) -> None:
    node = Node(SLOT_BYTES, "endless")
    worker = Worker(node, [PAGE], 1)
    lock_fd = promise(path)
    worker.link.submit(request(worker, "a", [1], BLOCK, path=path, lock_fd=lock_fd))
    assert node.process.stdout is not None
    assert node.process.stdout.readline() == "copying\n"
    reader = DisappointedReader(path)
    node.end()
    os.close(lock_fd)
    assert not reader.waits_for(10.0)
    worker.end()
    assert "died" in reader.errors[0]


def test_end_of_the_engine_ends_its_captures(
    here: Here, tmp_path: Path, slow_disk: threading.Event
) -> None:
    worker = Worker(here, [PAGE], 1)
    paths = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    locks = [promise(path) for path in paths]
    jobs = [
        request(worker, name, [1], BLOCK, most_bytes=PAGE, path=path, lock_fd=lock_fd)
        for name, path, lock_fd in zip("ab", paths, locks, strict=True)
    ]
    assert failures(worker.run(jobs[0])) == []
    worker.link.submit(jobs[1])
    worker.end()
    for lock_fd in locks:
        os.close(lock_fd)
    # What was copied is written; what waited for room is not.
    with pytest.raises(HiddenStatesError):
        load_hidden_states(paths[1], 10.0)
    slow_disk.set()
    assert load_hidden_states(paths[0], 10.0)["token_ids"].tolist() == list(range(BLOCK))


def test_states_expire_with_their_files_unless_somebody_has_taken_these(
    here: Here, worker: Worker, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in paths:
        assert capture(worker, path.name, [1], BLOCK, str(path), ttl_s=0.2) == []
        load_hidden_states(str(path), 10.0)
    Path(f"{paths[1]}.lock").unlink()
    delete_expired(tmp_path, 60.0, time.time())
    assert paths[0].exists()
    delete_expired(tmp_path, 60.0, time.time() + 61.0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.safetensors"]
    is_known = here.service.capturing.has
    wait_until(lambda: not is_known("a.safetensors"), 20.0, "the states in memory expire")


def test_capture_that_fits_into_no_message_is_refused_and_the_node_lives(
    here: Here, worker: Worker
) -> None:
    num_tokens = wire.MAX_FRAME_BYTES // 8
    assert capture(worker, "a", [1], num_tokens) == [Refusal.BAD_HANDLE]
    assert capture(worker, "b", [1], BLOCK) == []
    assert here.states("b").shape == (BLOCK, STATES, HIDDEN)


def test_many_captures_at_once_come_through_with_their_locks(here: Here, tmp_path: Path) -> None:
    worker = Worker(here, [PAGE], 1, settings=PATIENT)
    jobs, locks = [], []
    for number in range(200):
        path = str(tmp_path / f"{number}.safetensors")
        locks.append(promise(path))
        blocks = [number % NUM_BLOCKS]
        jobs.append(request(worker, path, blocks, BLOCK, path=path, lock_fd=locks[-1]))
    for job in jobs:
        worker.link.submit(job)
    found: dict[int, CopyResult] = {}

    def have_ended() -> bool:
        found.update({each.job_id: each for each in worker.link.drain()})
        return len(found) == len(jobs)

    wait_until(have_ended, 20.0, "all captures end")
    assert {(tuple(failures(each)), each.num_bytes) for each in found.values()} == {((), PAGE)}
    for number, (job, lock_fd) in enumerate(zip(jobs, locks, strict=True)):
        os.close(lock_fd)
        assert job.job.capture is not None
        loaded = load_hidden_states(job.job.capture.path, 10.0)["hidden_states"]
        expected = numbers(worker, [number % NUM_BLOCKS])
        assert np.array_equal(loaded.numpy().view(np.uint16), expected)
    worker.end()
