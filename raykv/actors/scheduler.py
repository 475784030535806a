"""SchedulerActor: the cluster's one directory of chunks, a thin shell around `BlockManager`.

Guarantees of its calls: each is idempotent (callers repeat what got no answer), none blocks, none
calls another actor. Times come from this host's monotonic clock; the state itself knows no clock.
A message of another version, or one that can't be meant, raises and changes nothing.
"""

from __future__ import annotations

import time

import raykv
from raykv.core.manager import BlockManager, ManagerSettings
from raykv.core.sanity import MAX_NUMBER, check_attach, check_report, check_sync, require
from raykv.directory import open_table
from raykv.errors import MessageError, VersionError
from raykv.handshake import receive
from raykv.messages import (
    AttachEngine,
    EngineAttached,
    NodeReport,
    SyncRequest,
    encode,
)
from raykv.types import EngineId, Epoch, Namespace

_EPOCH_ZERO = 1_735_689_600
"""2025-01-01 in Unix time: epochs are seconds since then, which fit into 31 bits until 2093."""

HERE = "the scheduler actor"

EXPIRY_PAUSE_S = 0.25
"""Looking for who has been silent too long takes a while in a large cluster."""


class SchedulerActor:
    """Runs as the detached Ray actor `scheduler` in the namespace `raykv`."""

    def __init__(self, address: str, eviction_policy: str) -> None:
        self._address = address
        settings = ManagerSettings(eviction_policy=eviction_policy)
        # Above every earlier life's epoch; should the host's clock have gone back, the NodeActors'
        # reports raise it.
        epoch = Epoch(int(time.time()) - _EPOCH_ZERO)
        self._manager = BlockManager(epoch, settings, open_table(eviction_policy))
        self._expires_at = 0.0

    def attach(self, raw: bytes) -> bytes:
        """`AttachEngine` → `EngineAttached`, which says so if the message is refused."""
        now = self._tick()
        try:
            message = receive(raw, AttachEngine, "the engine", HERE)
            check_attach(message)
        except (VersionError, MessageError) as error:
            return encode(EngineAttached(self._manager.epoch, error=str(error)))
        return encode(self._manager.attach_engine(message, now))

    def sync(self, raw: bytes) -> bytes:
        """`SyncRequest` → `SyncReply`."""
        now = self._tick()
        request = receive(raw, SyncRequest, "the engine", HERE)
        check_sync(request)
        return encode(self._manager.sync(request, now))

    def report(self, raw: bytes) -> bytes:
        """`NodeReport` → `NodeReportReply`."""
        now = self._tick()
        report = receive(raw, NodeReport, "the NodeActor", HERE)
        check_report(report)
        return encode(self._manager.node_report(report, now))

    def events(self, epoch: int, after: int) -> bytes:
        """→ `EventPage`: what follows a place of the event log."""
        self._tick()
        _require_numbers(epoch, after)
        return encode(self._manager.events(Epoch(epoch), after))

    def snapshot(self, cursor: int) -> bytes:
        """→ `SnapshotPage`; 0 begins a new snapshot, a page's cursor asks for the next one."""
        self._tick()
        _require_numbers(cursor)
        return encode(self._manager.snapshot(cursor))

    def detach(self, engine_id: str) -> None:
        """End an engine's session; its chunks stay."""
        require(isinstance(engine_id, str), f"the id {engine_id!r}")
        self._manager.detach_engine(EngineId(engine_id))

    def set_paused(self, paused: bool) -> None:
        """Switch the cache off or on for all engines."""
        require(isinstance(paused, bool), f"paused={paused!r}")
        self._manager.set_paused(paused)

    def clear(self, namespace: str | None) -> None:
        """Empty a namespace, or all."""
        require(namespace is None or isinstance(namespace, str), f"the namespace {namespace!r}")
        self._manager.clear(None if namespace is None else Namespace(namespace))

    def status(self) -> bytes:
        """→ `ClusterStatus`."""
        now = self._tick()
        return encode(self._manager.status(self._address, raykv.__version__, now))

    def why_miss(self, beginning: str) -> bytes:
        """→ `Explanations` of the requests whose ids begin so."""
        now = self._tick()
        return encode(self._manager.why_miss(beginning, now))

    def requests(self, after: int) -> bytes:
        """→ `RequestPage`: what became of the requests after the one of that number."""
        now = self._tick()
        _require_numbers(after)
        return encode(self._manager.misses.page(self._manager.epoch, after, now))

    def ping(self) -> str:
        """RayKV's version here; answers once the actor is up."""
        return raykv.__version__

    def _tick(self) -> float:
        now = time.monotonic()
        if now >= self._expires_at:
            self._expires_at = now + EXPIRY_PAUSE_S
            self._manager.expire(now)
        return now


def _require_numbers(*numbers: object) -> None:
    for number in numbers:
        is_number = isinstance(number, int) and abs(number) <= MAX_NUMBER
        require(is_number, "a place of the event log, or of a snapshot, that is no number")
