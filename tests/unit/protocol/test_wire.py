"""Framing on the node's socket, and what travels beside the frames."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.protocol import wire
from raykv.protocol.engine import Welcome
from raykv.protocol.worker import JobBatch


def batch(*cancelled: int) -> JobBatch:
    return JobBatch([], list(cancelled))


def decoded(frames: list[bytes]) -> list[JobBatch]:
    return [msgspec.msgpack.decode(raw, type=JobBatch) for raw in frames]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=6), data=st.data())
def test_reader_gives_the_same_frames_however_the_stream_is_cut(
    sizes: list[int], data: st.DataObject
) -> None:
    messages = [batch(*range(size)) for size in sizes]
    stream = b"".join(wire.frame(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    reader = wire.FrameReader()
    frames = []
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        frames += reader.feed(stream[start:end])
    assert decoded(frames) == messages


def test_reader_gives_a_frame_with_its_last_byte_and_not_before() -> None:
    reader = wire.FrameReader()
    raw = wire.frame(batch(1, 2, 3))
    assert [len(reader.feed(raw[i : i + 1])) for i in range(len(raw))] == [0] * (len(raw) - 1) + [1]


def test_reader_gives_frames_of_no_bytes() -> None:
    assert wire.FrameReader().feed(bytes(8)) == [b"", b""]


def test_reader_takes_the_largest_frame_that_is_allowed() -> None:
    reader = wire.FrameReader()
    assert reader.feed(wire.MAX_FRAME_BYTES.to_bytes(4, "little")) == []
    assert len(reader.feed(bytes(wire.MAX_FRAME_BYTES))[0]) == wire.MAX_FRAME_BYTES


@pytest.mark.parametrize("size", [wire.MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_reader_refuses_a_larger_frame_before_its_bytes_come(size: int) -> None:
    with pytest.raises(ValueError, match=f"a frame of {size} bytes"):
        wire.FrameReader().feed(size.to_bytes(4, "little"))


def test_frame_is_refused_when_it_is_too_large() -> None:
    with pytest.raises(AssertionError):
        wire.frame(Welcome(1, "e" * wire.MAX_FRAME_BYTES))


def test_descriptors_travel_with_a_message(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    files = [os.memfd_create(name) for name in ("one", "two")]
    for number, fd in enumerate(files):
        os.write(fd, bytes([number]) * 3)
    wire.send_with_fds(ours, batch(5), files)
    data, fds = wire.receive_with_fds(theirs, 8)
    assert decoded(wire.FrameReader().feed(data)) == [batch(5)]
    assert [os.pread(fd, 10, 0) for fd in fds] == [bytes(3), b"\1\1\1"]
    for fd in files + fds:
        os.close(fd)


def test_descriptors_come_once_when_their_message_is_longer_than_one_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    message = batch(*range(30_000))
    fd = os.memfd_create("test")
    wire.send_with_fds(ours, message, [fd])
    ours.shutdown(socket.SHUT_WR)
    reader = wire.FrameReader()
    frames: list[bytes] = []
    received: list[int] = []
    while True:
        data, fds = wire.receive_with_fds(theirs, 8)
        received += fds
        if not data:
            break
        frames += reader.feed(data)
    assert decoded(frames) == [message]
    assert len(received) == 1
    for each in (fd, *received):
        os.close(each)


def test_connect_reaches_who_listens_under_the_name_and_raises_where_nobody_does() -> None:
    name = f"raykv-test-{os.getpid()}"
    with pytest.raises(ConnectionRefusedError):
        wire.connect(name, 5.0)
    with wire.listen(name) as listener, wire.connect(name, 5.0) as client:
        with pytest.raises(OSError, match="in use"):
            wire.listen(name)
        server, _ = listener.accept()
        with server:
            assert wire.peer_of(server) == os.getpid()
            client.sendall(b"x")
            assert server.recv(1) == b"x"


def test_send_fails_when_the_peer_does_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    wire.limit_sends(ours, 0.05)
    with pytest.raises(BlockingIOError):
        ours.sendall(bytes(64 << 20))
