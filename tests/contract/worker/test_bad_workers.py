"""What strangers and broken workers can do to a NodeActor: lose their own line, and no more."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.ids import MAX_GENERATION, Direction, Refusal
from raykv.memory.region import Region
from raykv.memory.words import CancelWords
from raykv.node.service import NodeService
from raykv.protocol import wire
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.worker import (
    AttachWorker,
    CopyJob,
    JobBatch,
    JobResult,
    JobResults,
    NodeMessage,
    WorkerAttached,
    believable,
)
from tests.fixtures.node.honest_worker import (
    LAYOUT,
    PAGE,
    Worker,
    make_service,
)
from tests.fixtures.waiting import wait_until

HELLO = AttachWorker(PROTOCOL_VERSION, "engine", "ns", 0, 1, {0: PAGE}, LAYOUT)
BIG = (1 << 64) - 1


@pytest.fixture(scope="module")
def service() -> Iterator[NodeService]:
    made = make_service()
    yield made
    made.stop()
    made.keeper.table.check()


def assert_serves(service: NodeService) -> None:
    """An honest worker can store and load."""
    worker = Worker(service)
    try:
        generation = service.keeper.highest_generation + 1
        assert worker.run(Direction.STORE, [1, 2], generation) == [Refusal.NONE] * 2
        assert worker.run(Direction.LOAD, [1, 2], generation) == [Refusal.NONE] * 2
    finally:
        worker.close()
    service.keeper.table.check()


# A bit that flips


def flip(service: NodeService, slot: int) -> None:
    place = service.keeper.pool.address + slot * PAGE + 77
    ctypes.c_ubyte.from_address(place).value ^= 4


def sealed(service: NodeService) -> bool:
    with service.keeper.lock:
        chunks = list(service.keeper.table.inventory())
        return all(service.keeper.table.seal_of(name) is not None for name in chunks)


def test_checksums_are_made_in_idle_time_and_a_damaged_chunk_fails_its_load_alone() -> None:
    service = make_service()
    worker = Worker(service)
    try:
        assert worker.run(Direction.STORE, [0, 1, 2], 5) == [Refusal.NONE] * 3
        wait_until(lambda: sealed(service), 10.0, "the checksums are made")
        flip(service, 1)
        loaded = worker.run(Direction.LOAD, [0, 1, 2], 5)
        assert loaded == [Refusal.NONE, Refusal.CORRUPT, Refusal.NONE]
        assert service.stats().quarantined == 1
        assert worker.run(Direction.LOAD, [1], 5) == [Refusal.STALE]
        assert worker.run(Direction.STORE, [1], 6) == [Refusal.NONE]
        assert worker.run(Direction.LOAD, [1], 6) == [Refusal.NONE]
    finally:
        worker.close()
        service.stop()


def test_bit_flipped_in_a_pool_file_between_two_lives_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    first = make_service(str(path), loads_per_check=1 << 30)
    worker = Worker(first)
    assert worker.run(Direction.STORE, [0, 1, 2], 5) == [Refusal.NONE] * 3
    wait_until(lambda: sealed(first), 10.0, "the checksums are made")
    worker.close()
    first.stop()
    raw = bytearray(path.read_bytes())
    raw[PAGE + 9] ^= 128
    path.write_bytes(raw)
    second = make_service(str(path), loads_per_check=1 << 30, epoch=8)
    worker = Worker(second)
    try:
        loaded = worker.run(Direction.LOAD, [0, 1, 2], 5)
        assert loaded[::2] == [Refusal.NONE] * 2
        # Idle time may have come first.
        assert loaded[1] in (Refusal.CORRUPT, Refusal.STALE)
        assert second.stats().quarantined == 1
    finally:
        worker.close()
        second.stop()


# First messages


def talk(service: NodeService, raw: bytes, fds: list[int]) -> list[NodeMessage]:
    """Send bytes as the first ones of a connection, then its end; all that is answered."""
    answers: list[NodeMessage] = []
    reader = wire.FrameReader()
    with wire.connect(service.settings.socket_name, 5.0) as sock:
        try:
            if fds:
                socket.send_fds(sock, [raw], fds)
            else:
                sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(1 << 16):
                answers += [msgspec.msgpack.decode(f, type=NodeMessage) for f in reader.feed(data)]
        except OSError:
            pass
    return answers


def attach(service: NodeService, hello: msgspec.Struct, *more: msgspec.Struct) -> list[NodeMessage]:
    """With memory and words as the layout says."""
    kv, words = Region.anonymous(LAYOUT.num_bytes, "test-kv"), CancelWords.create()
    try:
        raw = b"".join(wire.frame(message) for message in (hello, *more))
        return talk(service, raw, [words.region.fd, kv.fd])
    finally:
        kv.close()
        words.close()


def error_of(answers: list[NodeMessage]) -> str:
    (answer,) = answers
    assert isinstance(answer, WorkerAttached)
    return answer.error


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_worker_of_another_version_hears_both_versions(service: NodeService) -> None:
    for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        error = error_of(attach(service, msgspec.structs.replace(HELLO, version=version)))
        assert f"protocol {version} of RayKV" in error
        assert f"NodeActor {PROTOCOL_VERSION}" in error


class LaterHello(msgspec.Struct, frozen=True, tag="attach"):
    """A first message of which only the version can be read."""

    version: int
    layout: str = "in another form"


def test_worker_whose_message_has_another_form_hears_both_versions(service: NodeService) -> None:
    error = error_of(attach(service, LaterHello(PROTOCOL_VERSION + 5)))
    assert f"protocol {PROTOCOL_VERSION + 5} of RayKV" in error
    assert f"NodeActor {PROTOCOL_VERSION}" in error
    assert "no AttachWorker" in error_of(attach(service, LaterHello(PROTOCOL_VERSION)))


replace = msgspec.structs.replace


def layout(**fields: Any) -> AttachWorker:
    return replace(HELLO, layout=replace(LAYOUT, **fields))


TENSOR = LAYOUT.tensors[0]
ABSURD: dict[str, AttachWorker] = {
    "negative rank": replace(HELLO, rank=-1),
    "rank above": replace(HELLO, rank=1),
    "no ranks": replace(HELLO, num_ranks=0),
    "many ranks": replace(HELLO, num_ranks=BIG),
    "no slot size": replace(HELLO, slot_bytes={}),
    "slot size of another group": replace(HELLO, slot_bytes={0: PAGE, 1: PAGE}),
    "slot too small": replace(HELLO, slot_bytes={0: PAGE - 1}),
    "long name": replace(HELLO, namespace="x" * 100_000),
    "no bytes": layout(num_bytes=0),
    "negative bytes": layout(num_bytes=-1),
    "many bytes": layout(num_bytes=BIG),
    "no tensor in the group": layout(groups=[[]]),
    "tensor that is not there": layout(groups=[[1]]),
    "negative tensor": layout(groups=[[-1]]),
    "group twice": layout(group_ids=[0, 0], groups=[[0], [0]]),
    "no blocks in a chunk": layout(blocks_per_chunk=0),
    "many blocks in a chunk": layout(blocks_per_chunk=1 << 62),
    "tensor behind the end": layout(tensors=[replace(TENSOR, offset=1)]),
    "tensor before the beginning": layout(tensors=[replace(TENSOR, offset=-1)]),
    "huge stride": layout(tensors=[replace(TENSOR, num_blocks=1, block_stride=BIG)]),
    "huge page": layout(tensors=[replace(TENSOR, page_bytes=BIG)]),
    "unknown kind": layout(kind="/etc/passwd"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_worker_is_refused_with_a_reason(service: NodeService, case: str) -> None:
    before = open_files()
    assert error_of(attach(service, ABSURD[case]))
    wait_until(lambda: open_files() <= before, 5.0, "nothing stays open")
    assert service.stats().num_workers == 0


@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=200), framed=st.booleans())
def test_stranger_who_sends_anything_loses_his_line_only(
    service: NodeService, raw: bytes, framed: bool
) -> None:
    data = len(raw).to_bytes(4, "little") + raw if framed else raw
    for answer in talk(service, data, []):
        assert isinstance(answer, WorkerAttached)
        assert answer.error
    assert service.stats().num_workers == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_hello_with_damaged_bytes_does_no_harm(service: NodeService, data: st.DataObject) -> None:
    raw = bytearray(wire.frame(HELLO))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    kv, words = Region.anonymous(LAYOUT.num_bytes, "test-kv"), CancelWords.create()
    talk(service, bytes(raw), [words.region.fd, kv.fd])
    kv.close()
    words.close()


def test_node_serves_after_all_that(service: NodeService) -> None:
    wait_until(lambda: service.stats().num_workers == 0, 5.0, "they are gone")
    assert_serves(service)


# Jobs

NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 8, 15, 16, 1 << 20, 1 << 40, 1 << 62, BIG, -(1 << 63)])
SMALL = st.integers(0, 3)
NUMBER = st.one_of(SMALL, NUMBERS)
COLUMN = st.lists(NUMBER, max_size=3)
KEYS = st.lists(st.sampled_from([b"k", b"k0", b"x" * 36, b"y" * 255]), max_size=3)


@st.composite
def any_job(draw: st.DrawFn) -> CopyJob:
    """Columns of one length most of the time, numbers that are right most of the time."""
    count = draw(st.integers(0, 3))
    column = st.one_of(st.lists(NUMBER, min_size=count, max_size=count), COLUMN)
    keys = st.one_of(st.just([b"k%d" % i for i in range(count)]), KEYS)
    ones = st.one_of(st.just([1] * count), column)
    zeros = st.one_of(st.just([0] * count), column)
    handles = Handles(Keys.of(draw(keys)), draw(column), draw(column))
    return CopyJob(
        draw(st.one_of(st.integers(1, 9), NUMBERS)),
        draw(st.sampled_from([0, 0, 0, 1, 1, 7, -1])),
        draw(st.sampled_from([7, 7, 7, 6, BIG])),
        handles,
        draw(zeros),
        draw(ones),
        draw(zeros),
        draw(column),
        namespace=draw(st.sampled_from(["", "", "ns", "other", "n" * 5000])),
    )


@settings(max_examples=120, deadline=None)
@given(jobs=st.lists(any_job(), min_size=1, max_size=3), cancelled=st.lists(NUMBERS, max_size=2))
def test_absurd_jobs_are_refused_and_leave_no_slot_behind(
    service: NodeService, jobs: list[CopyJob], cancelled: list[int]
) -> None:
    answers = attach(service, HELLO, JobBatch(jobs, cancelled))
    assert isinstance(answers[0], WorkerAttached)
    assert not answers[0].error
    known = {int(refusal) for refusal in Refusal}
    for answer in answers[1:]:
        assert isinstance(answer, JobResults)
        for result in answer.results:
            assert known.issuperset(result.refusals)
            assert len(result.failed_chunks) == len(result.refusals)
    wait_until(lambda: service.stats().num_workers == 0, 5.0, "it is gone")
    with service.keeper.lock:
        table = service.keeper.table
        table.check()
        assert not table._writing, table._writing
        assert all(len(name.key) <= 128 for name in table.inventory())
    assert service.keeper.highest_generation <= MAX_GENERATION


def test_node_serves_after_absurd_jobs(service: NodeService) -> None:
    with service.keeper.lock:
        # Nothing above can have been stored at the highest generation of all.
        assert service.keeper.highest_generation < MAX_GENERATION
    assert_serves(service)


# Answers to a worker


@settings(max_examples=100, deadline=None)
@given(failed=COLUMN, refusals=COLUMN, num_chunks=st.integers(0, 4))
def test_result_that_can_not_be_meant_counts_as_failed(
    failed: list[int], refusals: list[int], num_chunks: int
) -> None:
    result = believable(JobResult(9, 100, 1.0, failed, refusals), num_chunks)
    assert result.job_id == 9
    assert len(result.failed_chunks) == len(result.refusals)
    assert all(0 <= chunk < num_chunks for chunk in result.failed_chunks)
    assert all(isinstance(Refusal(number), Refusal) for number in result.refusals)
    if len(failed) != len(refusals):
        assert result.failed_chunks == list(range(num_chunks))


def test_chunks_that_were_admitted_are_given_up_when_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make_service()
    worker = Worker(service)
    begin = service.keeper.begin_store

    def fail_at_two(name: Any, *others: Any) -> Refusal:
        assert name.slot != 2
        return begin(name, *others)

    try:
        monkeypatch.setattr(service.keeper, "begin_store", fail_at_two)
        assert worker.run(Direction.STORE, [1, 2], 5) == [Refusal.COPY_FAILED] * 2
        monkeypatch.undo()
        assert worker.run(Direction.STORE, [1, 2], 6) == [Refusal.NONE] * 2
    finally:
        worker.close()
        service.stop()
