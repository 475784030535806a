"""What strangers and broken workers can do to a NodeActor: lose their own line, and no more."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv.node.integrity
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Namespace, Refusal, Stamp
from raykv.memory.region import Region
from raykv.memory.words import CancelWords
from raykv.node.service import NodeService
from raykv.protocol import wire
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import ChangesQuery, Welcome
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.worker import (
    AttachWorker,
    JobResults,
    KVLayout,
    NodeMessage,
    TensorLayout,
    believable,
)
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine, RawLine, hello_of
from tests.fixtures.node.links import PATIENT, Worker, failures
from tests.fixtures.node.local import LocalNode
from tests.fixtures.node.raw_hello import RawHello
from tests.fixtures.waiting import wait_until

PAGE = SLOT_ALIGNMENT
NUM_BLOCKS = 8
LAYOUT = KVLayout(
    "memfd", NUM_BLOCKS * PAGE, 1, [TensorLayout(0, NUM_BLOCKS, PAGE, PAGE)], [0], [[0]]
)
LIFE = 5
"""Of an engine that is not here."""

HELLO = AttachWorker("engine", LIFE, "ns", 0, 1, {0: PAGE}, LAYOUT)
BIG = (1 << 63) - 1


@contextmanager
def serving(**options: Any) -> Iterator[LocalNode]:
    """A node, for a while."""
    made = LocalNode(**options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def service(node: LocalNode) -> NodeService:
    return node.service


@contextmanager
def honest_worker(node: LocalNode) -> Iterator[Worker]:
    made = Worker(node, [PAGE], 1, settings=PATIENT)
    try:
        yield made
    finally:
        made.end()


def assert_serves(node: LocalNode) -> None:
    """An honest worker can store and load."""
    with honest_worker(node) as worker:
        assert worker.store([1, 2], [0, 1]) == []
        assert worker.load([1, 2], [0, 1]) == []
    node.keeper.owner.check()


# A bit that flips


def flip(node: LocalNode, chunk: int) -> None:
    record = node.keeper.owner.index.find(Namespace("ns"), numbered_key(chunk))
    assert record is not None
    ctypes.c_ubyte.from_address(node.keeper.address_of(record) + 77).value ^= 4


def test_checksums_are_made_in_idle_time_and_a_damaged_chunk_fails_its_load_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.node.integrity, "LOADS_PER_CHECK", 1)
    with serving() as node, honest_worker(node) as worker:
        assert worker.store([0, 1, 2], [0, 1, 2]) == []
        assert node.keeper.wait_for_seals(10.0) == 0
        flip(node, 1)
        loaded = worker.run(worker.job(Direction.LOAD, [0, 1, 2], [0, 1, 2]))
        assert (list(loaded.failed_chunks), failures(loaded)) == ([1], [Refusal.CORRUPT])
        assert node.service.stats().quarantined == 1
        assert worker.load([1], [1]) == [Refusal.NOT_HERE]
        assert worker.store([1], [1]) == []
        assert worker.load([1], [1]) == []


def test_bit_flipped_in_a_pool_file_between_two_lives_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.integrity, "LOADS_PER_CHECK", 1 << 30)
    path = tmp_path / "pool"
    with serving(pool_path=str(path)) as node, honest_worker(node) as worker:
        assert worker.store([0, 1, 2], [0, 1, 2]) == []
        assert node.keeper.wait_for_seals(10.0) == 0
    raw = bytearray(path.read_bytes())
    raw[PAGE + 9] ^= 128
    path.write_bytes(raw)
    with serving(pool_path=str(path)) as node:
        assert node.keeper.take_orders(OrdersDocument(Stamp(0, 1)), 1.0)
        with honest_worker(node) as worker:
            loaded = worker.run(worker.job(Direction.LOAD, [0, 1, 2], [0, 1, 2]))
            assert list(loaded.failed_chunks) == [1]
            # Idle time may have come first.
            assert set(failures(loaded)) <= {Refusal.CORRUPT, Refusal.NOT_HERE}
            assert node.service.stats().quarantined == 1


# First messages


def talk(service: NodeService, raw: bytes, fds: list[int]) -> list[NodeMessage]:
    """Send bytes as the first ones of a connection, then its end; all that is answered."""
    answers: list[NodeMessage] = []
    reader = wire.FrameReader()
    with wire.connect(service.socket_name, 5.0) as sock:
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
    assert isinstance(answer, Welcome)
    return answer.error


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class LaterHello(msgspec.Struct, frozen=True, tag="attach"):
    """A first message of which only the version can be read."""

    version: int
    layout: str = "in another form"


@pytest.mark.parametrize(
    "hello",
    [
        msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION - 1),
        msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION + 1),
        LaterHello(PROTOCOL_VERSION + 5),
    ],
    ids=["earlier", "later", "in another form"],
)
def test_worker_of_another_version_hears_both_versions(
    service: NodeService, hello: AttachWorker | LaterHello
) -> None:
    error = error_of(attach(service, hello))
    assert f"protocol {hello.version} of RayKV" in error
    assert f"NodeActor {PROTOCOL_VERSION}" in error


def test_worker_whose_message_has_another_form_in_this_version_hears_what_it_lacks(
    service: NodeService,
) -> None:
    assert "no AttachWorker" in error_of(attach(service, LaterHello(PROTOCOL_VERSION)))


replace = msgspec.structs.replace
RAW = RawHello(*(getattr(HELLO, name) for name in RawHello.__struct_fields__))


def layout(**fields: Any) -> RawHello:
    return replace(RAW, layout=replace(LAYOUT, **fields))


TENSOR = LAYOUT.tensors[0]
ABSURD: dict[str, RawHello] = {
    "negative rank": replace(RAW, rank=-1),
    "no life": replace(RAW, life=0),
    "rank above": replace(RAW, rank=1),
    "no ranks": replace(RAW, num_ranks=0),
    "many ranks": replace(RAW, num_ranks=BIG),
    "no slot size": replace(RAW, slot_bytes={}),
    "slot size of another group": replace(RAW, slot_bytes={0: PAGE, 1: PAGE}),
    "slot too small": replace(RAW, slot_bytes={0: PAGE - 1}),
    "long name": replace(RAW, namespace="x" * 100_000),
    "no bytes": layout(num_bytes=0),
    "no tensor in the group": layout(groups=[[]]),
    "tensor behind the end": layout(tensors=[replace(TENSOR, offset=1)]),
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
        assert isinstance(answer, Welcome)
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


def test_node_serves_after_all_that(node: LocalNode) -> None:
    wait_until(lambda: node.service.stats().num_workers == 0, 5.0, "they are gone")
    assert_serves(node)


# Jobs

NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 8, 15, 16, 1 << 20, 1 << 40, 1 << 62, BIG, -(1 << 63)])
SMALL = st.integers(0, 3)
NUMBER = st.one_of(SMALL, NUMBERS)
COLUMN = st.lists(NUMBER, max_size=3)
KEYS = st.lists(st.sampled_from([b"k", b"k0", b"x" * 36, b"y" * 255]), max_size=3)


class RawJob(msgspec.Struct, frozen=True, array_like=True):
    """A job that need not be valid."""

    job_id: int
    direction: int
    namespace: str
    keys: Keys
    num_blocks: Numbers
    first_block: Numbers
    block_ids: Numbers


class RawBatch(msgspec.Struct, frozen=True, tag="jobs"):
    """Such jobs."""

    jobs: list[RawJob] = []
    cancelled: list[int] = []


@st.composite
def any_job(draw: st.DrawFn) -> RawJob:
    """Columns of one length most of the time, numbers that are right most of the time."""
    count = draw(st.integers(0, 3))
    column = st.one_of(st.lists(NUMBER, min_size=count, max_size=count), COLUMN)
    keys = st.one_of(st.just([numbered_key(i) for i in range(count)]), KEYS)
    ones = st.one_of(st.just([1] * count), column)
    zeros = st.one_of(st.just([0] * count), column)
    return RawJob(
        draw(st.one_of(st.integers(1, 9), NUMBERS)),
        draw(st.sampled_from([0, 0, 0, 1, 1, 7, -1])),
        draw(st.sampled_from(["ns", "ns", "other", "", "n" * 5000])),
        Keys.of(draw(keys)),
        Numbers.of(draw(ones)),
        Numbers.of(draw(zeros)),
        Numbers.of(draw(column)),
    )


@settings(max_examples=120, deadline=None)
@given(jobs=st.lists(any_job(), min_size=1, max_size=3), cancelled=st.lists(NUMBERS, max_size=2))
def test_absurd_jobs_are_refused_and_leave_no_slot_behind(
    service: NodeService, jobs: list[RawJob], cancelled: list[int]
) -> None:
    core = CoreLine(service.socket_name, LIFE, {0: PAGE})
    core.wait()
    answers = attach(service, HELLO, RawBatch(jobs, cancelled))
    assert isinstance(answers[0], Welcome)
    assert not answers[0].error
    known = {int(refusal) for refusal in Refusal}
    for answer in answers[1:]:
        assert isinstance(answer, JobResults)
        for result in answer.results:
            assert known.issuperset(result.refusals)
            assert len(result.failed_chunks) == len(result.refusals)
    wait_until(lambda: service.stats().num_workers == 0, 5.0, "it is gone")
    core.end()
    with service.keeper.lock:
        owner = service.keeper.owner
        owner.check()
        assert not owner.index.contents()[1]
        assert not any(record.is_busy for record in owner.index.places)


def test_node_serves_after_absurd_jobs(node: LocalNode) -> None:
    assert_serves(node)


# Answers to a worker


@settings(max_examples=100, deadline=None)
@given(
    failed=COLUMN,
    refusals=st.lists(st.integers(0, 255), max_size=3),
    num_chunks=st.integers(0, 4),
)
def test_result_that_can_not_be_meant_counts_as_failed(
    failed: list[int], refusals: list[int], num_chunks: int
) -> None:
    count = min(len(failed), len(refusals))
    told = CopyResult(
        *(9, 7, 3), failed_chunks=Numbers.of(failed[:count]), refusals=bytes(refusals[:count])
    )
    result = believable(told, num_chunks)
    assert result.job_id == 9
    assert len(result.failed_chunks) == len(result.refusals)
    assert all(0 <= chunk < num_chunks for chunk in result.failed_chunks)
    assert all(isinstance(Refusal(number), Refusal) for number in result.refusals)
    if result is not told:
        assert result.failed_chunks == list(range(num_chunks))
        assert result.life == 0


def test_chunks_that_were_admitted_are_given_up_when_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def fail_at_two(slot: Any, _slot_bytes: int) -> bool:
        seen.append(slot)
        assert len(seen) != 2
        return True

    with serving() as node, honest_worker(node) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(node.keeper.pool, "is_short", True)
            patch.setattr(node.keeper.pool, "may_touch", fail_at_two)
            assert worker.store([1, 2], [0, 1]) == [Refusal.COPY_FAILED] * 2
        assert worker.store([1, 2], [0, 1]) == []


def test_engine_of_another_version_hears_both_versions(service: NodeService) -> None:
    line = RawLine(service.socket_name)
    line.send(replace(hello_of(9, {0: PAGE}), version=PROTOCOL_VERSION + 1))
    welcome = line.receive()
    assert isinstance(welcome, Welcome)
    assert f"protocol {PROTOCOL_VERSION + 1} of RayKV" in welcome.error
    assert line.receive() is None
    line.close()


@settings(max_examples=40, deadline=None)
@given(raw=st.binary(max_size=200))
def test_engine_that_says_anything_loses_its_line_only(service: NodeService, raw: bytes) -> None:
    line = RawLine(service.socket_name)
    line.send(hello_of(9, {0: PAGE}))
    welcome = line.receive()
    assert welcome == Welcome(service.keeper.life)
    line.sock.sendall(len(raw).to_bytes(4, "little") + raw)
    assert line.receive() is None
    line.close()
    wait_until(lambda: not list(service.keeper.owner.engines), 5.0, "it is gone")


def test_line_of_an_engine_is_for_one_life(service: NodeService) -> None:
    line = RawLine(service.socket_name)
    line.send(hello_of(9, {0: PAGE}))
    line.receive()
    line.send(ChangesQuery(10, "ns"))
    assert line.receive() is None
    line.close()
