"""Framing on the node's Unix socket: a length, then MessagePack; descriptors with the first.

Sockets live in Linux's abstract name space: nothing in the file system, gone with their owner.
Both ends check that the other runs under the same user.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from array import array

import msgspec

from raykv.base.errors import AttachError

MAX_FRAME_BYTES = 16 << 20
"""Far above any honest message (a job batch has some 10 bytes a block)."""

MAX_LOCKS = 64
"""Descriptors with one message after the first: locks of files. Linux allows 253."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


def peer_of(sock: socket.socket) -> int:
    """The id of the process at the other end, as the kernel knows it.

    Raises:
        AttachError: it runs under another user, or in a process name space that hides it.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise AttachError(
            f"the process at the other end runs as user {uid}, this one as {os.getuid()}: "
            "engines and the Ray node must run under one user"
        )
    if pid <= 0:
        raise AttachError(
            "the process at the other end is in another process name space: run engine and Ray "
            "node in the same container, or let them share process ids"
        )
    return int(pid)


def listen(name: str) -> socket.socket:
    """A listening socket with an abstract name.

    Raises:
        OSError: the name is taken.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(b"\0" + name.encode())
        sock.listen(64)
    except OSError:
        sock.close()
        raise
    return sock


def connect(name: str, timeout_s: float) -> socket.socket:
    """A connection to `listen(name)`.

    Raises:
        OSError: no process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(b"\0" + name.encode())
    except OSError:
        sock.close()
        raise
    return sock


def hang_up(sock: socket.socket) -> None:
    """End a connection, or a listener, for both ends and for threads that wait for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def limit_sends(sock: socket.socket, deadline_s: float) -> None:
    """Make a send fail with an OSError if it makes no progress for this long.

    A socket option and not `settimeout`, which would limit another thread's receiving as well.
    """
    seconds = int(deadline_s)
    microseconds = int((deadline_s - seconds) * 1e6)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds))


def frame(message: msgspec.Struct) -> bytes:
    """`message` as it goes over the socket."""
    payload = msgspec.msgpack.encode(message)
    assert len(payload) <= MAX_FRAME_BYTES, len(payload)
    return _LENGTH.pack(len(payload)) + payload


def send_with_fds(sock: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send a whole message; the descriptors travel with its first byte."""
    raw = frame(message)
    sent = socket.send_fds(sock, [raw], fds)  # bounded: its time-out, or SO_SNDTIMEO
    if sent < len(raw):
        # This also fails when the peer has answered and hung up by now.
        sock.sendall(raw[sent:])  # bounded: its time-out, or SO_SNDTIMEO


class FrameReader:
    """Cuts a stream of bytes into messages; feed it whatever arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now.

        Raises:
            ValueError: the peer announces a frame above `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
            if len(self._buffer) < _LENGTH.size + size:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + size]))
            del self._buffer[: _LENGTH.size + size]
        return frames


def receive_with_fds(sock: socket.socket, most_fds: int) -> tuple[bytes, list[int]]:
    """Some bytes of a stream and the descriptors that came with them; no bytes at its end.

    The descriptors are closed in programs that this process starts.
    """
    # Not `socket.recv_fds`, which drops its flags.
    room = socket.CMSG_SPACE(most_fds * array("i").itemsize)
    # bounded: its time-out, or SO_SNDTIMEO
    data, messages, _, _ = sock.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, raw in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return data, fds.tolist()


def wait_readable(fds: list[int], timeout_s: float) -> set[int]:
    """Wait until a descriptor can be read or has ended; returns all that can or have.

    Not `select.select`, which fails for descriptors above 1023: vLLM may have so many.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}
