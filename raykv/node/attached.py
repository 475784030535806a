"""Who is connected to a NodeActor: the first message, and a worker with its queued jobs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from raykv.base import deadlines, errors
from raykv.base.ids import Direction
from raykv.base.threads import OnFailure, SupervisedThread, start_thread
from raykv.copy import engine, plan
from raykv.copy.rows import CPUBackend, RowCopier
from raykv.memory import handles, limits, region, room
from raykv.memory.cuda.kv import DeviceKV
from raykv.memory.words import CancelWords, Word
from raykv.node.devices import Devices
from raykv.node.pool.jobs import AdmittedJob
from raykv.protocol import framing, wire
from raykv.protocol.engine import EngineHello
from raykv.protocol.worker import AttachWorker

logger = logging.getLogger("raykv.node")


class AttachedWorker:
    """An attached worker: its KV cache, mapped here, and its connection."""

    def __init__(
        self,
        sock: socket.socket,
        hello: AttachWorker,
        kv: handles.OpenedKV,
        words: CancelWords,
        devices: Devices,
    ) -> None:
        self.hello = hello
        self.words = words
        self.planner = plan.Planner(kv.layout, hello.rank)
        self.running = 0
        # A word, for copies that run without the GIL; 1 when the connection is closed.
        self._closed = ctypes.c_uint64(0)
        self._sock = sock
        self._kv = kv
        self._devices = devices
        self._device_backend: engine.CopyBackend | None = None
        self._send_lock = threading.Lock()
        self._populating: SupervisedThread | None = None

    @property
    def is_open(self) -> bool:
        return not self._closed.value

    @property
    def device(self) -> str:
        """UUID of the GPU that the KV cache is on; `HOST` for CPU memory."""
        return self._kv.layout.device

    def backend(self, pool_address: int, rows: RowCopier) -> engine.CopyBackend:
        """The copier for this worker. One for a GPU is made by the first call, before the worker is
        served; from then on any thread may call.
        """
        if not isinstance(self._kv, DeviceKV):
            return CPUBackend(self._kv.address, pool_address, rows)
        if self._device_backend is None:
            self._device_backend = self._devices.backend(self._kv, pool_address)
        return self._device_backend

    def stop_sign(self, job_id: int) -> engine.StopSign:
        """Set when the job is taken back or the connection is closed; valid until `unmap`."""
        closed = Word(ctypes.addressof(self._closed), 1)
        return engine.StopSign([self.words.word(job_id), closed])

    def send(self, message: msgspec.Struct) -> None:
        """Send or close: a worker that does not read must not hold up the others."""
        with self._send_lock:
            if not self.is_open:
                return
            try:
                # bounded: SO_SNDTIMEO, set when the worker has attached
                self._sock.sendall(wire.frame(message))
            except OSError:
                self.close_connection()

    def populate(self) -> None:
        """Fill the page table of its KV cache in the background, which makes the first copy to and
        from each block several times as fast; unless memory is short. Begun at most once.
        """

        def may_go_on(done: int) -> bool:
            return self.is_open and (
                done % region.ROOM_CHECK_BYTES > 0 or limits.has_room(room.NEAR_BYTES)
            )

        def run() -> None:
            region.yield_to_others()
            self._kv.populate(may_go_on)

        # Without a thread pages come one by one, when they are touched.
        with contextlib.suppress(errors.ThreadError):
            self._populating = start_thread("raykv-populate", run, OnFailure.GIVE_UP)

    def close_connection(self) -> None:
        self._closed.value = 1
        wire.hang_up(self._sock)

    def unmap(self) -> None:
        if self._populating is not None:
            self._populating.join(deadlines.STOP_S)
        if self._populating is not None and self._populating.is_alive():
            # It may be about to touch the next page. The memory goes with this process.
            logger.warning(
                "the KV memory of engine %s, which has left, stays mapped: its pages are still "
                "being touched after %.0f s",
                self.hello.engine_id,
                deadlines.STOP_S,
            )
        else:
            self._kv.close()
        self.words.close()


@dataclass(slots=True, eq=False)
class QueuedJob:
    """A job on its way through the queue.

    `lock_fd`: of the file that a capture becomes; -1 for none.
    """

    worker: AttachedWorker
    admitted: AdmittedJob
    submitted_at: float
    lock_fd: int = -1
    direction: Direction = field(init=False)
    stop: engine.StopSign = field(init=False)

    def __post_init__(self) -> None:
        self.direction = Direction(self.admitted.job.direction)
        self.stop = self.worker.stop_sign(self.admitted.job.job_id)

    @property
    def lane(self) -> engine.LaneName:
        return engine.LaneName(self.worker.device, self.direction)


MAX_FDS = 2
"""Descriptors with the first message: the cancel words, and a KV cache in CPU memory."""


@dataclass
class Opening:
    """How a connection has begun: who it is, descriptors that came along, and what came behind."""

    hello: AttachWorker | EngineHello
    fds: list[int]
    behind: list[bytes]


def receive_hello(sock: socket.socket, reader: wire.FrameReader, deadline_s: float) -> Opening:
    """The first message of a connection, with its descriptors.

    Raises:
        RayKVError: it is no introduction of our version.
        TimeoutError: it was not complete in time.
        ValueError: the connection ended before.
    """
    give_up_at = time.monotonic() + deadline_s
    fds: list[int] = []
    try:
        frames: list[bytes] = []
        while not frames:
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"it did not attach within {deadline_s:.0f} s")
            sock.settimeout(left)
            data, more = wire.receive_with_fds(sock, MAX_FDS)
            fds += more
            if not data:
                raise ValueError("it closed before it had attached")
            if len(fds) > MAX_FDS:
                raise errors.AttachError("too many descriptors came with the first message")
            frames = reader.feed(data)
        is_engine = framing.introduction(frames[0]).type == "engine"
        kind: type[AttachWorker | EngineHello] = EngineHello if is_engine else AttachWorker
        hello = framing.receive(frames[0], kind, "the engine", "this NodeActor")
        return Opening(hello, fds, frames[1:])
    except BaseException:
        region.close_all(fds)
        raise


def check_parts(worker: AttachedWorker) -> None:
    """Refuse a worker whose parts do not fit into their slots.

    Raises:
        AttachError: with the sizes.
        PlanError: its layout has no such KV group.
    """
    hello = worker.hello
    for group_id, slot_bytes in hello.slot_bytes.items():
        needed = worker.planner.chunk_bytes(group_id, hello.num_ranks)
        if needed > slot_bytes:
            raise errors.AttachError(
                f"a chunk of KV group {group_id} has {needed} bytes with the parts of all "
                f"{hello.num_ranks} ranks, which don't fit into a slot of {slot_bytes} bytes"
            )
