"""A worker that is attached to a NodeActor, and the jobs that it has queued there."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass, field

import msgspec

from raykv.actors import wire
from raykv.copy.cpu import CPUBackend
from raykv.copy.engine import CopyBackend
from raykv.copy.plan import Planner
from raykv.core.slots import ChunkName
from raykv.memory.handles import OpenedKV
from raykv.memory.words import CancelWords
from raykv.messages import AttachWorker, CopyJob, WorkerMessage
from raykv.types import Direction, Generation, Key, Namespace, Refusal, Slot


class AttachedWorker:
    """An attached worker: its KV cache, mapped here, and its connection."""

    def __init__(
        self, sock: socket.socket, hello: AttachWorker, kv: OpenedKV, words: CancelWords
    ) -> None:
        self.hello = hello
        self.words = words
        self.planner = Planner(hello.layout, hello.rank)
        self.running = 0
        self.is_open = True
        self._sock = sock
        self._kv = kv
        self._send_lock = threading.Lock()

    def backend(self, pool_address: int) -> CopyBackend:
        return CPUBackend(self._kv.address, pool_address)

    def send(self, message: msgspec.Struct) -> None:
        """Send or close: a worker that does not read must not hold up the others."""
        with self._send_lock:
            try:
                self._sock.sendall(wire.frame(message))
            except OSError:
                self.close_connection()

    def close_connection(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def unmap(self) -> None:
        self._kv.close()
        self.words.close()


@dataclass(slots=True)
class QueuedJob:
    """A job on its way through the queue; `refusals` has what failed, by chunk index."""

    worker: AttachedWorker
    job: CopyJob
    submitted_at: float
    refusals: dict[int, Refusal] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        return Direction(self.job.direction)

    @property
    def is_cancelled(self) -> bool:
        return self.worker.words.is_cancelled(self.job.job_id) or not self.worker.is_open

    def name(self, chunk: int) -> ChunkName:
        handles = self.job.handles
        return ChunkName(
            Namespace(self.worker.hello.namespace),
            Key(handles.keys[chunk]),
            Slot(handles.slots[chunk]),
            Generation(handles.generations[chunk]),
            self.worker.hello.slot_bytes.get(self.job.groups[chunk], 0),
        )

    def refuse_rest(self, refusal: Refusal) -> None:
        for chunk in range(len(self.job.handles.keys)):
            self.refusals.setdefault(chunk, refusal)


def receive_hello(sock: socket.socket, reader: wire.FrameReader) -> tuple[WorkerMessage, list[int]]:
    """The first message of a connection, and the descriptors that came with it."""
    fds: list[int] = []
    try:
        frames: list[bytes] = []
        while not frames:
            data, more = wire.receive_with_fds(sock, 8)
            fds += more
            if not data[0]:
                raise ValueError("it closed before it had attached")
            frames = reader.feed(data[0])
        return msgspec.msgpack.decode(frames[0], type=WorkerMessage), fds
    except BaseException:
        close_all(fds)
        raise


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody has taken over."""
    for fd in fds:
        os.close(fd)
