"""A worker that is attached to a NodeActor, and the jobs that it has queued there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from dataclasses import dataclass, field

import msgspec

from raykv.actors import wire
from raykv.copy.cpu import CPUBackend
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import Planner
from raykv.copy.rows import RowCopier
from raykv.core.slots import ChunkName
from raykv.memory.handles import OpenedKV
from raykv.memory.words import CancelWords, Word
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
        # A word, for copies that run without the GIL; 1 when the connection is closed.
        self._closed = ctypes.c_uint64(0)
        self._sock = sock
        self._kv = kv
        self._send_lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return not self._closed.value

    def backend(self, pool_address: int, rows: RowCopier) -> CopyBackend:
        return CPUBackend(self._kv.address, pool_address, rows)

    def stop_sign(self, job_id: int) -> StopSign:
        """Set when the job is taken back or the connection is closed; valid until `unmap`."""
        closed = Word(ctypes.addressof(self._closed), 1)
        return StopSign([self.words.word(job_id), closed])

    def send(self, message: msgspec.Struct) -> None:
        """Send or close: a worker that does not read must not hold up the others."""
        with self._send_lock:
            try:
                self._sock.sendall(wire.frame(message))
            except OSError:
                self.close_connection()

    def close_connection(self) -> None:
        self._closed.value = 1
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
    stop: StopSign = field(init=False)

    def __post_init__(self) -> None:
        self.stop = self.worker.stop_sign(self.job.job_id)

    @property
    def direction(self) -> Direction:
        return Direction(self.job.direction)

    @property
    def is_cancelled(self) -> bool:
        return self.stop()

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
