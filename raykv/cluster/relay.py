"""A NodeActor's socket as another host reaches it: the bytes of a line go through Ray.

    EngineCore's host                                          the NodeActor's host
    line ◄─► `Relay`, a socket ── relay_up, one at a time ──► `RelayEnds` ◄─► the node's socket
                               ◄── relay_down, which waits ──

Invariants:
1. Bytes arrive in order and once, or the line ends at both sides.
2. A line that nobody asks for bytes any more ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from raykv.base import deadlines
from raykv.base.errors import AttachError, ThreadError
from raykv.base.threads import OnFailure, start_thread
from raykv.protocol import wire

logger = logging.getLogger("raykv.session")

PIECE_BYTES = 1 << 18
"""Of one call."""

MAX_WAITING_BYTES = 4 << 20
"""That have come from the node's socket and were not asked for; then it is read no more."""

RELAY_SILENT_S = 5.0
"""Without a question the other side counts as gone: it asks each second."""


class _RelayedLine:
    """One line, at the NodeActor's side."""

    def __init__(self, socket_name: str) -> None:
        self.sock = wire.connect(socket_name, deadlines.ANSWER_S)
        try:
            wire.peer_of(self.sock)
        except AttachError:
            self.sock.close()
            raise
        self.num_up = 0
        self.asked_at = time.monotonic()
        self.changed = threading.Condition()
        self.is_open = True
        # Bytes to go down, and how many have gone before.
        self.waiting = bytearray()
        self.num_down = 0

    def close(self) -> None:
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        wire.hang_up(self.sock)

    def read(self) -> None:
        """Read until the line ends, or the other side stops asking."""
        with contextlib.closing(self.sock), contextlib.suppress(OSError):
            while self.is_open and time.monotonic() - self.asked_at < RELAY_SILENT_S:
                with self.changed:
                    if len(self.waiting) >= MAX_WAITING_BYTES:
                        self.changed.wait(deadlines.WAKE_S)
                        continue
                if not wire.wait_readable([self.sock.fileno()], deadlines.WAKE_S):
                    continue
                data = self.sock.recv(PIECE_BYTES)  # bounded: it is readable
                if not data:
                    break
                with self.changed:
                    self.waiting += data
                    self.changed.notify_all()
        self.close()


class RelayEnds:
    """Lines of other hosts to the socket of that name; any thread may call."""

    def __init__(self, socket_name: str) -> None:
        self._socket_name = socket_name
        self._lock = threading.Lock()
        self._lines: dict[str, _RelayedLine] = {}

    def up(self, name: str, at: int, data: bytes) -> None:
        """The next bytes of a line, which begin at that place; the first ones open it.

        Raises:
            AttachError: the line has ended, or some bytes are missing.
        """
        line = self._open(name) if not at else self._find(name)
        if line.num_up != at:
            line.close()
            raise AttachError(f"bytes of a line are missing: {line.num_up} of {at} have come")
        line.num_up += len(data)
        try:
            line.sock.sendall(data)  # bounded: the time-out that it was connected with
        except OSError as error:
            line.close()
            raise AttachError(f"the NodeActor does not read: {error}") from error

    def down(self, name: str, at: int) -> bytes:
        """The bytes of a line from that place on; none if none come within a moment.

        Raises:
            AttachError: the line has ended.
        """
        line = self._find(name)
        line.asked_at = time.monotonic()
        with line.changed:
            del line.waiting[: at - line.num_down]
            line.num_down = at
            line.changed.notify_all()
            if not line.waiting and line.is_open:
                line.changed.wait(deadlines.WAKE_S)
            data = bytes(line.waiting[:PIECE_BYTES])
        line.asked_at = time.monotonic()
        if not data and not line.is_open:
            raise AttachError("the NodeActor has hung up")
        return data

    def _open(self, name: str) -> _RelayedLine:
        line = _RelayedLine(self._socket_name)
        with self._lock:
            self._lines = {key: each for key, each in self._lines.items() if each.is_open}
            self._lines[name] = line
        try:
            start_thread("raykv-relayed", line.read, OnFailure.GIVE_UP)
        except ThreadError:
            line.close()
            raise
        return line

    def _find(self, name: str) -> _RelayedLine:
        with self._lock:
            line = self._lines.get(name)
        if line is None:
            raise AttachError("the line has ended, or its first bytes have not come")
        return line


Call = Callable[..., bytes]
"""Calls a method of the NodeActor within a deadline: `call(deadline_s, method, *arguments)`."""


class Relay:
    """A socket on this host that leads to a NodeActor on another one; see the module's docstring.

    Args:
        call: to the NodeActor; raises if there is no answer in time.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.socket_name = f"raykv-relay/{os.getpid()}/{secrets.token_hex(8)}"
        self._listener = wire.listen(self.socket_name)
        self._is_closed = False
        start_thread("raykv-relay", self._accept, OnFailure.GIVE_UP)

    def close(self) -> None:
        """Take no more lines; those that are there end with the sockets of their owners."""
        self._is_closed = True
        wire.hang_up(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                # bounded: nobody may come; `close` wakes it
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.warning("a line to another host can't be begun: %s", error)
                    time.sleep(deadlines.LOOK_S)
                continue
            try:
                self._begin(sock)
            except (AttachError, ThreadError, OSError) as error:
                logger.warning("a line to another host can't be begun: %s", error)
                sock.close()

    def _begin(self, sock: socket.socket) -> None:
        """Serve a line of this user's."""
        wire.peer_of(sock)
        name = secrets.token_hex(8)
        begun = threading.Event()
        down = partial(self._down, sock, name, begun)
        start_thread("raykv-down", down, OnFailure.GIVE_UP)
        start_thread("raykv-up", partial(self._up, sock, name, begun), OnFailure.GIVE_UP)

    def _up(self, sock: socket.socket, name: str, begun: threading.Event) -> None:
        """What the line's owner says."""
        num_bytes = 0
        with contextlib.closing(sock):
            with contextlib.suppress(Exception):
                # bounded: silence is fine; the line's owner ends it, or `_down`
                while data := sock.recv(PIECE_BYTES):
                    self._call(deadlines.ANSWER_S, "relay_up", name, num_bytes, data)
                    num_bytes += len(data)
                    begun.set()
            wire.hang_up(sock)
            begun.set()

    def _down(self, sock: socket.socket, name: str, begun: threading.Event) -> None:
        """What the NodeActor says."""
        num_bytes = 0
        begun.wait(deadlines.ANSWER_S)
        with contextlib.suppress(Exception):
            while not self._is_closed:
                data = self._call(deadlines.ANSWER_S, "relay_down", name, num_bytes)
                num_bytes += len(data)
                sock.sendall(data)  # bounded: its owner reads, or has closed it
        wire.hang_up(sock)
