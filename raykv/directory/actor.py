"""SchedulerActor: the cluster's one directory of chunks, a thin shell around `BlockManager`.

Guarantees of its calls: each is idempotent (callers repeat what got no answer), none blocks, none
calls another actor. Times come from this host's monotonic clock; the state itself knows no clock.
A message of another version, or an invalid one, raises and changes nothing.

Pins, quotas, the operator's wish for pools, what was cleared and how far generations have come
outlive this process: a thread that nobody waits for keeps them in Ray's internal store, so what was
ordered within the last moment may be lost. A caller that clears asks whether the clearing is kept
(`has_kept_clearings`); the NodeActors and their disks remember it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray

from raykv.base.deadlines import METRICS_COLLECT_S
from raykv.base.errors import MessageError, VersionError
from raykv.base.ids import EVERY_NAMESPACE, MAX_EPOCH, EngineId, Epoch, Namespace
from raykv.base.settings import MetricsPlace
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.base.version import __version__
from raykv.cluster.logs import read_log, set_up_logging
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.pins import SHARE
from raykv.directory.steward import Steward
from raykv.directory.table.choose import fast_table
from raykv.directory.table.protocol import ChunkTable
from raykv.metrics.discovery import Discovery, TargetsFile, default_path
from raykv.metrics.server import MetricsServer
from raykv.metrics.table import numbers
from raykv.protocol.columns import MAX_KEYS, MAX_NUMBER, check_names, require
from raykv.protocol.engine import (
    AttachEngine,
    EngineAttached,
    Naming,
    SyncRequest,
    check_attach,
    checked_sync,
)
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode, receive
from raykv.protocol.measures import ClusterMetrics, MetricFamily
from raykv.protocol.node import NodeReport, check_report
from raykv.protocol.operator import (
    KeptLife,
    PinOrder,
    PoolWish,
    Quota,
    ReleaseOrder,
    TenantPage,
    TransferEnd,
    TransferOrder,
    check_end,
    check_pin,
    check_quota,
    check_release,
    check_transfer,
    check_wish,
)
from raykv.protocol.reader import (
    ChunkQuery,
    PrefixQuery,
    WhereQuery,
    check_chunk_query,
    check_prefix_query,
    check_where_query,
)
from raykv.protocol.sessions import (
    SessionOrder,
    SessionQuery,
    check_session_order,
    check_session_query,
)
from raykv.stream.descriptions import DescriptionBook

logger = logging.getLogger("raykv.scheduler")

_EPOCH_ZERO = 1_735_689_600
"""2025-01-01 in Unix time: epochs are seconds since then, which fit into 31 bits until 2093."""

HERE, OPERATOR = "the scheduler actor", "the operator"

EXPIRY_PAUSE_S = 0.25
"""Looking for what has been silent too long takes a while in a large cluster."""


def first_epoch(wall_time: float, last: int) -> Epoch:
    """The epoch with which a life begins: above the last one that is remembered, and by the clock
    above all earlier ones, unless that is wrong: before 2025 or after 2093 it says nothing.
    """
    by_clock = int(wall_time) - _EPOCH_ZERO
    return Epoch(max(by_clock if by_clock <= MAX_EPOCH else 0, last + 1))


class SchedulerActor:
    """Runs as the detached Ray actor `scheduler` in the namespace `raykv`."""

    def __init__(
        self,
        address: str,
        eviction_policy: str,
        pin_share: float = SHARE,
        metrics: MetricsPlace | None = None,
    ) -> None:
        set_up_logging()
        self._address = address
        settings = ManagerSettings(eviction_policy=eviction_policy, pin_share=pin_share)
        self._steward = Steward(address)
        pins, last = self._steward.start(), self._steward.life
        # Above every earlier life's epoch, also if the host's clock has gone back. Should Ray have
        # lost what that one has left, the NodeActors' reports raise it.
        epoch = first_epoch(time.time(), last.epoch)
        self._manager = BlockManager(epoch, settings, cleared=last.cleared)
        # Nobody waits for a compiler: what answers until then takes ten times as long for a chunk.
        self._fast: ChunkTable | None = None
        self._compiler = SupervisedThread("raykv-compiler", self._compile, OnFailure.GIVE_UP)
        self._compiler.revive()
        self._keep_life()
        self._descriptions = DescriptionBook()
        self._expires_at = 0.0
        for order in pins:
            self._manager.pins.pin(order, time.monotonic())
        for quota in self._steward.quotas:
            self._manager.tenants.set(quota, time.monotonic())
        self._metrics: MetricsServer | None = None
        if metrics is not None:
            try:
                self._show_metrics(metrics)
            except Exception:
                # A constructor that raised would be run again by Ray for ever.
                logger.exception("the scheduler actor lives without metrics")

    def _compile(self) -> None:
        self._fast = fast_table(self._manager.settings.eviction_policy)

    def _show_metrics(self, place: MetricsPlace) -> None:
        """Serve them from threads, which collect what they show with a call that waits its turn."""
        here = ray.get_runtime_context().current_actor
        self._metrics = server = MetricsServer(
            place, ray.util.get_node_ip_address(), lambda: _collected(here)
        )
        path = Path(place.sd_path) if place.sd_path else default_path()
        if place.port != "off" and path is not None:
            own = [server.address] if server.address else []
            file = TargetsFile(path, self._address)
            Discovery(file, lambda: own + _targets(here)).start()

    def log(self, start: int | None) -> tuple[int, bytes]:
        """A piece of this actor's log; see `read_log`."""
        require(start is None or isinstance(start, int), f"the place {start!r}")
        return read_log(start)

    def attach(self, raw: bytes) -> bytes:
        """`AttachEngine` → `EngineAttached`, which says so if the message is refused."""
        with self._measured("attach") as now:
            try:
                message = receive(raw, AttachEngine, "the engine", HERE)
                check_attach(message)
            except (VersionError, MessageError) as error:
                return encode(EngineAttached(self._manager.epoch, error=str(error)))
            return encode(self._manager.attach_engine(message, now))

    def sync(self, raw: bytes) -> bytes:
        """`SyncRequest` → `SyncReply`."""
        with self._measured("sync") as now:
            request = checked_sync(receive(raw, SyncRequest, "the engine", HERE))
            self._descriptions.take(request.described)
            reply = self._manager.sync(request, now)
            if request.clear:
                self._keep_life()
            self._manager.meter.synced(request, reply)
            return encode(reply)

    def report(self, raw: bytes) -> bytes:
        """`NodeReport` → `NodeReportReply`."""
        with self._measured("report") as now:
            report = receive(raw, NodeReport, "the NodeActor", HERE)
            check_report(report)
            return encode(self._manager.node_report(report, now))

    def events(self, epoch: int, after: int) -> bytes:
        """→ `EventPage`: what follows a place of the event log."""
        with self._measured("events") as now:
            _require_numbers(epoch, after)
            page = self._manager.events(Epoch(epoch), after)
            self._manager.meter.read_events(after, page, now)
            return encode(page)

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

    def clear(self, namespace: str | None) -> dict[str, int]:
        """Empty a namespace, or all; up to which generation each was ever cleared."""
        is_text = namespace is None or isinstance(namespace, str)
        require(is_text and namespace != EVERY_NAMESPACE, f"the namespace {namespace!r}")
        cleared = self._manager.clear(None if namespace is None else Namespace(namespace))
        self._keep_life()
        self._descriptions.forget(namespace)
        return cleared

    def has_kept_clearings(self) -> bool:
        """Whether this actor's next life will know of all clearings so far."""
        return self._steward.has_kept_life

    def describe_chunks(self, keys: list[bytes], namespace: str | None = None) -> bytes:
        """→ `Descriptions` of the chunks that are described, in order, as many as fit."""
        require(isinstance(keys, list), "keys that are no list")
        require(all(isinstance(key, bytes) for key in keys), "keys that are no bytes")
        require(len(keys) <= MAX_KEYS, f"{len(keys)} keys: at most {MAX_KEYS} are described")
        require(namespace is None or isinstance(namespace, str), f"the namespace {namespace!r}")
        return encode(self._descriptions.page(keys, namespace))

    # Operators

    def name_weights(self, beginning: str, order_id: str, version: str) -> list[str]:
        """Tell engines whose ids begin so what their weights are called; their ids."""
        check_names("a text", (beginning, order_id, version))
        return [*map(str, self._manager.name_weights(beginning, Naming(order_id, version)))]

    def has_heard(self, order_id: str) -> bool:
        """Whether all engines that live have heard what `name_weights` tells them."""
        self._tick()
        require(isinstance(order_id, str), f"the order {order_id!r}")
        return self._manager.has_heard(order_id)

    def pin(self, raw: bytes) -> bytes:
        """`PinOrder` → `PinAnswer`."""
        now = self._tick()
        order = receive(raw, PinOrder, OPERATOR, HERE)
        check_pin(order)
        answer = self._manager.pins.pin(order, now)
        if not answer.error:
            self._steward.keep_pin(order)
        return encode(answer)

    def unpin(self, pin_id: str) -> bool:
        """End a pin; False if there is none of that id."""
        now = self._tick()
        require(isinstance(pin_id, str), f"the id {pin_id!r}")
        self._steward.forget_pin(pin_id)
        return self._manager.pins.unpin(pin_id, now)

    def pin_order(self, pin_id: str) -> bytes:
        """→ `PinOrder`; empty if there is no such pin."""
        self._tick()
        require(isinstance(pin_id, str), f"the id {pin_id!r}")
        order = self._manager.pins.order_of(pin_id)
        return b"" if order is None else encode(order)

    def pins(self) -> bytes:
        """→ `Pinned`."""
        return encode(self._manager.pins.pinned(self._tick()))

    def set_quota(self, raw: bytes) -> bytes:
        """`Quota` → `QuotaAnswer`."""
        now = self._tick()
        quota = receive(raw, Quota, OPERATOR, HERE)
        check_quota(quota)
        answer = self._manager.tenants.set(quota, now)
        if not answer.error:
            self._steward.keep_quota(quota)
        return encode(answer)

    def remove_quota(self, name: str) -> bool:
        """End a quota; False if there is none of that name."""
        self._tick()
        require(isinstance(name, str), f"the name {name!r}")
        self._steward.forget_quota(name)
        return self._manager.tenants.remove(name)

    def tenants(self) -> bytes:
        """→ `TenantPage`."""
        self._tick()
        return encode(TenantPage(PROTOCOL_VERSION, self._manager.tenant_status()))

    def lend(self, raw: bytes) -> bytes:
        """`TransferOrder` → `TransferGrant`."""
        now = self._tick()
        order = receive(raw, TransferOrder, OPERATOR, HERE)
        check_transfer(order)
        manager = self._manager
        return encode(manager.transfers.lend(order, now, paused=manager.paused))

    def end_transfer(self, raw: bytes) -> None:
        """`TransferEnd`."""
        message = receive(raw, TransferEnd, OPERATOR, HERE)
        check_end(message)
        self._manager.transfers.end(message)

    def release(self, raw: bytes) -> bytes:
        """`ReleaseOrder` → `Released`."""
        self._tick()
        order = receive(raw, ReleaseOrder, OPERATOR, HERE)
        check_release(order)
        return encode(self._manager.transfers.release(order))

    def order_session(self, raw: bytes) -> bytes:
        """`SessionOrder` → `SessionAnswer`."""
        now = self._tick()
        order = receive(raw, SessionOrder, OPERATOR, HERE)
        check_session_order(order)
        return encode(self._manager.sessions.order(order, now))

    def sessions(self, raw: bytes) -> bytes:
        """`SessionQuery` → `SessionPage`."""
        now = self._tick()
        query = receive(raw, SessionQuery, OPERATOR, HERE)
        check_session_query(query)
        return encode(self._manager.sessions.page(query, now))

    def wish(self, raw: bytes) -> None:
        """`PoolWish`: nodes that match it get a NodeActor from now on, when they join too."""
        wish = receive(raw, PoolWish, OPERATOR, HERE)
        check_wish(wish)
        self._steward.set_wish(wish)

    def status(self) -> bytes:
        """→ `ClusterStatus`."""
        now = self._tick()
        status = self._manager.status(self._address, __version__, now)
        server = self._metrics
        metrics = "" if server is None else server.address or server.problem
        return encode(msgspec.structs.replace(status, metrics=metrics))

    def metrics(self) -> bytes:
        """→ `ClusterMetrics`."""
        now = self._tick()
        meter = self._manager.meter
        meter.follow()
        build = numbers("raykv_build_info", {(__version__, "scheduler"): 1})
        families = meter.families(now, is_paused=self._manager.paused)
        families += self._manager.sessions.families()
        return encode(ClusterMetrics([build, *families]))

    def targets(self) -> list[str]:
        """Where the NodeActors show their metrics."""
        self._tick()
        return self._manager.meter.targets()

    def why_miss(self, beginning: str) -> bytes:
        """→ `Explanations` of the requests whose ids begin so."""
        now = self._tick()
        return encode(self._manager.why_miss(beginning, now))

    def more_room(self) -> bytes:
        """→ `MoreRoom`: what larger pools would have saved."""
        now = self._tick()
        return encode(self._manager.more_room(now))

    def chunks(self, raw: bytes) -> bytes:
        """`ChunkQuery` → `ChunkPage`: a page of a listing; nothing is kept for the next one."""
        now = self._tick()
        query = receive(raw, ChunkQuery, "the reader", HERE)
        check_chunk_query(query)
        return encode(self._manager.catalog.page(query, now))

    def where(self, raw: bytes) -> bytes:
        """`WhereQuery` → `WherePage`: which nodes have chunks; none is pinned for that."""
        self._tick()
        query = receive(raw, WhereQuery, "the reader", HERE)
        check_where_query(query)
        return encode(self._manager.catalog.where(query))

    def prefixes(self, raw: bytes) -> bytes:
        """`PrefixQuery` → `PrefixPage`: how much of prompts each node has, for routers."""
        self._tick()
        query = receive(raw, PrefixQuery, "the router", HERE)
        check_prefix_query(query)
        return encode(self._manager.catalog.prefixes(query))

    def spaces(self) -> bytes:
        """→ `SpacePage`."""
        self._tick()
        return encode(self._manager.catalog.space_page())

    def requests(self, after: int) -> bytes:
        """→ `RequestPage`: what became of the requests after the one of that number."""
        now = self._tick()
        _require_numbers(after)
        return encode(self._manager.misses.page(self._manager.epoch, after, now))

    def ping(self) -> str:
        """RayKV's version here; answers once the actor is up."""
        return __version__

    @contextmanager
    def _measured(self, call: str) -> Iterator[float]:
        """The time at which a call begins; its duration is counted."""
        began = self._tick()
        try:
            yield began
        finally:
            self._manager.meter.called(call, time.monotonic() - began)

    def _keep_life(self) -> None:
        self._steward.keep_life(KeptLife(self._manager.granting, self._manager.cleared))

    def _tick(self) -> float:
        now = time.monotonic()
        if self._fast is not None:
            self._manager.change_table(self._fast, now)
            self._fast = None
        if now >= self._expires_at:
            self._expires_at = now + EXPIRY_PAUSE_S
            self._keep_life()
            self._manager.expire(now)
            for pin_id in self._manager.pins.expire(now):
                self._steward.forget_pin(pin_id)
        return now


def _collected(here: Any) -> list[MetricFamily]:
    """Runs in threads of this actor: what it shows, collected when its turn comes."""
    raw: bytes = ray.get(here.metrics.remote(), timeout=METRICS_COLLECT_S)
    return decode(raw, ClusterMetrics).families


def _targets(here: Any) -> list[str]:
    """Called in a thread of this actor, like `_collected`."""
    found: list[str] = ray.get(here.targets.remote(), timeout=METRICS_COLLECT_S)
    return found


def _require_numbers(*places: object) -> None:
    for number in places:
        is_number = isinstance(number, int) and abs(number) <= MAX_NUMBER
        require(is_number, "a position in the event log, or in a snapshot, that is not a number")
