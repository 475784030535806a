"""An engine's session with the scheduler actor: one background thread, one message at a time.

While a message is out the next one fills up in the view's outbox. The engine's thread never waits:
answers land in an inbox that it drains between steps. Every Ray call has a deadline; a breaker
keeps a dead actor from being asked more often than its pause allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import ray

from raykv.base.deadlines import (
    ATTACH_PAUSE_S,
    ENTER_S,
    EXCHANGE_PAUSE_S,
    REPEAT_PAUSE_S,
    SCHEDULER_PAUSES_S,
    WANT_PAUSE_S,
)
from raykv.base.errors import ClusterError, cause_of, first_line
from raykv.base.ids import Epoch, NodeId
from raykv.base.settings import Settings
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.cluster import names
from raykv.cluster.breaker import Breakers, Pauses, aged, joined
from raykv.directory.meter.engines import WANTED
from raykv.engine.fetches import FetchClient, FetchEnded
from raykv.engine.hints import HintBox
from raykv.engine.view import EngineView
from raykv.metrics.histogram import Histogram
from raykv.metrics.reach import WantedKeys
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS
from raykv.protocol.columns import Leases
from raykv.protocol.engine import (
    AttachEngine,
    EngineAttached,
    Naming,
    Space,
    SyncReply,
    SyncRequest,
    check_attached,
    check_reply,
)
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive
from raykv.protocol.measures import BreakerReport
from raykv.stream.descriptions import DescriptionOutbox

logger = logging.getLogger("raykv.session")

SENDER = "the scheduler actor"

MAX_INBOX = 4
"""Answers that the engine has not taken in; while there are so many, exchanges are heartbeats."""


@dataclass(frozen=True)
class SessionSettings:
    """What the engine tells of itself, and times in seconds; `traits` as in `AttachEngine`.

    Namespace and traits are those of its start.
    """

    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    versions: str = ""
    traits: dict[str, str] = field(default_factory=dict)
    heartbeat_s: float = Settings.heartbeat_s
    rpc_deadline_s: float = Settings.rpc_deadline_s


class SchedulerCalls(Protocol):
    """How a session reaches the scheduler actor; Ray is one way, tests have another."""

    def attach(self, raw: bytes) -> bytes:
        """`AttachEngine` → `EngineAttached`."""

    def sync(self, raw: bytes) -> bytes:
        """`SyncRequest` → `SyncReply`."""

    def detach(self, engine_id: str) -> None:
        """End the session; no answer is waited for."""


class RayCalls:
    """Calls through Ray.

    Args:
        find: returns the actor, creating both it and the NodeActor when they are gone.
        deadline_s: for each call.
    """

    def __init__(self, find: Callable[[], Any], deadline_s: float) -> None:
        self._find = find
        self._deadline_s = deadline_s
        self._actor: Any = None

    def let_go(self) -> None:
        """Keep no handle: the connection to Ray may be another one soon."""
        self._actor = None

    def attach(self, raw: bytes) -> bytes:
        self._actor = self._find()
        return self._get(self._actor.attach.remote(raw))

    def sync(self, raw: bytes) -> bytes:
        if self._actor is None:
            self._actor = self._find()
        return self._get(self._actor.sync.remote(raw))

    def detach(self, engine_id: str) -> None:
        if self._actor is not None:
            self._actor.detach.remote(engine_id)

    def _get(self, ref: Any) -> bytes:
        answer: bytes = ray.get(ref, timeout=self._deadline_s)
        return answer


@dataclass(frozen=True)
class EngineMoved:
    """The engine is at another node; what comes behind it in the inbox is about that one."""

    node_id: NodeId


@dataclass(frozen=True)
class Attached:
    """The scheduler actor has taken the engine in, as one of that namespace."""

    namespace: str
    answer: EngineAttached


@dataclass(frozen=True)
class Exchanged:
    """A message and its answer."""

    request: SyncRequest
    reply: SyncReply


_News = EngineMoved | Attached | Exchanged | FetchEnded
"""What the engine's thread is told between steps, in order."""


class Session:
    """See the module's docstring.

    `start` and `drain` are for the engine's thread; the view belongs to that thread, except for
    what `EngineView` allows the exchange thread to call.
    """

    def __init__(
        self,
        view: EngineView,
        calls: SchedulerCalls,
        settings: SessionSettings,
        fetches: FetchClient | None = None,
        *,
        hints: HintBox | None = None,
        described: DescriptionOutbox | None = None,
        follow: Callable[[], str] | None = None,
    ) -> None:
        """`hints`: the wishes of requests. `described`: descriptions of chunks' tokens. `follow`:
        asked before each attach at which node the engine is.
        """
        self._view = view
        self._calls = calls
        self._settings = settings
        self._inbox: deque[_News] = deque()
        self._node_id = NodeId(settings.node_id)
        # Where the engine's thread has gone, where it is about to go, and as what the engine is
        # attached; of which all that is known has come.
        self._space = Space(settings.namespace, settings.traits)
        view.namespace = settings.namespace
        self._next: Space | None = None
        self._attached_as: Space | None = None
        self._complete: Space | None = None
        self._follow = follow
        # The latest answer to a heartbeat after the last of the inbox: an engine that has nothing
        # to do reads neither, but with its next request it is to know what is so now.
        self._standing: SyncReply | None = None
        # What the user calls the weights, until the engine's thread takes it; and the last order.
        self._naming: Naming | None = None
        self._heard = ""
        self._stood: SyncReply | None = None
        self._fetches = fetches
        self.hints = hints or HintBox()
        self.described = described
        self._repeat_at = 0.0
        # How long the scheduler actor takes to say where requested chunks are.
        self._wanted = WantedKeys()
        self._lookups = Histogram(LATENCY_BOUNDS)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._arrived = threading.Event()
        self._epoch = Epoch(0)
        # Only the exchange thread touches it, save for the attach before that begins.
        self._breakers = Breakers(Pauses(*SCHEDULER_PAUSES_S))
        # By rank, what the workers report of their connections to the NodeActor, and when.
        self._lines: dict[int, tuple[float, BreakerReport]] = {}
        self._unanswered: SyncRequest | None = None
        self._refused_until = 0.0
        # Whether an answer was rejected.
        self._has_lost = False
        self._is_started = False
        self._thread = SupervisedThread("raykv-session", self._run, OnFailure.RUN_AGAIN)

    # The engine's thread

    def attach(self, deadline_s: float) -> None:
        """Attach now, waiting at most `deadline_s`.

        Raises:
            ClusterError: there was no answer in time, or the actor refuses this engine.
        """
        give_up_at = time.monotonic() + deadline_s
        while True:
            try:
                self._attach()
                break
            except Exception as error:
                if time.monotonic() > give_up_at:
                    raise ClusterError(f"cannot attach: {first_line(cause_of(error))}") from error
                time.sleep(ATTACH_PAUSE_S)
        self._fill(give_up_at)

    def _fill(self, give_up_at: float) -> None:
        """Take in the whole mirror, so that the first request finds what is there."""
        while True:
            is_complete = self._exchange_quietly()
            self.drain()
            is_hopeless = not self._breakers.is_closed(names.SCHEDULER)
            if is_complete or is_hopeless or time.monotonic() > give_up_at:
                return

    def start(self) -> None:
        """Begin the background exchange; `nudge` tries again if there is no thread for it now."""
        if self._fetches is not None:
            self._fetches.start(self._inbox.append)
        self._is_started = True
        self._thread.revive()

    def drain(self) -> None:
        """Apply the answers that have come. Only between engine steps."""
        standing = self._standing
        self._read_inbox()
        # Otherwise the inbox had something newer, and another one will come.
        if standing is not None and standing is self._standing and standing is not self._stood:
            self._stood = standing
            self._view.apply(standing)
        self._go_on()

    def _read_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            try:
                self._take(message)
            except Exception:
                # What it said is lost: an engine that attaches gets everything anew.
                self._has_lost = True
                self._wake.set()
                raise

    def _take(self, message: _News) -> None:
        match message:
            case EngineMoved():
                self._view.move(message.node_id)
            case Attached():
                # Else the engine's thread has gone on meanwhile, and it attaches again.
                if message.namespace == self._view.namespace:
                    self._view.attached(message.answer)
            case Exchanged():
                had_repeats = self._view.remote.has_repeats
                self._view.apply(message.reply, message.request)
                if self._view.remote.has_repeats and not had_repeats:
                    # The exchange thread may be waiting for the next heartbeat already.
                    self._wake.set()
            case FetchEnded():
                self._view.finish_fetch(message.orders, message.result)

    def enter(self, space: Space) -> None:
        """Go on in a namespace, between steps; waits a moment until what is there is known."""
        self._next = space
        give_up_at = time.monotonic() + ENTER_S
        while True:
            self.drain()
            is_there = self._view.namespace == space.namespace and self._complete is self._space
            is_hopeless = not self._is_started or not self._breakers.is_closed(names.SCHEDULER)
            if (is_there and not self._inbox) or is_hopeless or time.monotonic() > give_up_at:
                return
            self._wake.set()
            self._arrived.wait(EXCHANGE_PAUSE_S)
            self._arrived.clear()

    def take_naming(self) -> Naming | None:
        """What the user has called the weights since this was asked the last time."""
        naming, self._naming = self._naming, None
        return naming

    def _go_on(self) -> None:
        """A clearing is the last namespace's: first that has to be confirmed."""
        if self._next is None or self._view.is_clearing:
            return
        space, self._next = self._next, None
        if space.namespace == self._view.namespace:
            space = self._space
        self._view.enter(space.namespace)
        self._space = space
        self._wake.set()

    def note_wanted(self, keys: Sequence[bytes]) -> None:
        """A new request's prompt consists of these chunks; the caller must not change `keys` any
        more.
        """
        self._wanted.note(keys)

    def take_lines(self, reports: dict[int, BreakerReport]) -> None:
        """Take what the workers report of their connections to the NodeActor, by rank."""
        now = time.monotonic()
        self._lines |= {rank: (now, report) for rank, report in reports.items()}

    def nudge(self) -> None:
        """Something is in the outbox, or was taken out of the inbox."""
        if self._view.has_news or self._view.wants_leases or self.hints.has_news:
            self._wake.set()
        if self._is_started:
            self._thread.revive()
        if self._fetches is not None:
            orders = self._view.remote.take_orders()
            self._fetches.submit(orders, self._view.node_epoch, self._view.namespace)

    def stop(self, timeout_s: float) -> None:
        """End the thread and the session; the leases return to the pool."""
        self._stopped.set()
        self._wake.set()
        if self._fetches is not None:
            self._fetches.stop()
        self._thread.join(timeout_s)
        try:
            self._calls.detach(self._settings.engine_id)
        except Exception as error:
            logger.debug("could not detach from the scheduler actor: %s", error)

    # The exchange thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause())
            self._wake.clear()
            if self._stopped.is_set():
                return
            started = time.monotonic()
            self._exchange_quietly()
            self._stopped.wait(max(0.0, EXCHANGE_PAUSE_S - (time.monotonic() - started)))

    def _pause(self) -> float:
        """How long to wait before the next heartbeat if there is no news."""
        if not self._breakers.is_closed(names.SCHEDULER):
            self._stopped.wait(self._breakers.wait_s(names.SCHEDULER, time.monotonic()))
            return 0.0
        if self._unanswered is not None:
            return 0.0
        pause = self._settings.heartbeat_s
        if self._view.wants_leases and not self._num_unread:
            pause = self._refused_until - time.monotonic()
        if self._view.remote.has_repeats:
            pause = min(pause, self._repeat_at - time.monotonic())
        return max(0.0, pause)

    @property
    def _num_unread(self) -> int:
        """Answers that the engine has not taken in."""
        return len(self._inbox)

    @property
    def _may_grow(self) -> bool:
        """Whether the engine keeps up, so that a message is more than a heartbeat."""
        return self._has_arrived and self._num_unread < MAX_INBOX

    def _exchange_quietly(self) -> bool:
        """One exchange; a failure opens the breaker and is logged once. True: nothing is left."""
        call = self._breakers.begin(names.SCHEDULER, time.monotonic())
        if call is None:
            return False
        if self._has_lost:
            self._has_lost = False
            self._epoch = Epoch(0)
        if self._space is not self._attached_as:
            self._epoch = Epoch(0)
        try:
            if not self._epoch:
                self._attach()
            space = self._attached_as
            is_complete = self._exchange()
            if is_complete and space is self._attached_as:
                self._complete = space
        except Exception as error:
            self._view.remote.is_cut_off = True
            reason = first_line(cause_of(error))
            if self._breakers.failed(names.SCHEDULER, call, time.monotonic(), reason):
                logger.warning("no exchange with the scheduler actor: %s", reason)
            if self._breakers.failures_of(names.SCHEDULER) > 1:
                self._epoch = Epoch(0)
            return False
        if self._breakers.worked(names.SCHEDULER):
            logger.warning("the exchange with the scheduler actor works again")
        self._view.remote.is_cut_off = False
        self._arrived.set()
        return is_complete

    def _attach(self) -> None:
        self._follow_node()
        settings, space = self._settings, self._space
        node_epoch, leases = Epoch(0), Leases()
        if self._has_arrived:
            node_epoch, leases = self._view.declared_leases()
        message = AttachEngine(
            version=PROTOCOL_VERSION,
            engine_id=settings.engine_id,
            node_id=self._node_id,
            namespace=space.namespace,
            model=settings.model,
            num_ranks=settings.num_ranks,
            slot_bytes=settings.slot_bytes,
            leases=leases,
            versions=settings.versions,
            traits=space.traits,
            node_epoch=node_epoch,
        )
        raw = self._calls.attach(encode(message))
        answer = receive(raw, EngineAttached, SENDER, "the engine")
        if answer.error:
            raise ClusterError(answer.error)
        check_attached(answer)
        if self.described is not None:
            self.described.tell_again()
        self._epoch = Epoch(answer.epoch)
        self._unanswered = None
        self._wanted.tell_all_again()
        if space is not self._attached_as:
            self._attached_as, self._standing = space, None
        self._inbox.append(Attached(space.namespace, answer))
        self.hints.tell_again()

    def _follow_node(self) -> None:
        if self._follow is None:
            return
        node_id = NodeId(self._follow())
        if node_id != self._node_id:
            self._node_id = node_id
            self._standing = None
            self._inbox.append(EngineMoved(node_id))

    @property
    def _has_arrived(self) -> bool:
        """Whether the engine's thread knows at which node it is: until then, what the view has is
        of another one's pool.
        """
        return self._follow is None or self._view.node_id == self._node_id

    def _exchange(self) -> bool:
        """Send the outbox, or again what got no answer; fetch what is left. True: all of it."""
        while True:
            request = self._unanswered
            if request is None:
                request = self._next_request()
            self._unanswered = request
            began = time.monotonic()
            reply = receive(self._calls.sync(encode(request)), SyncReply, SENDER, "the engine")
            if request.asked:
                self._lookups.observe(time.monotonic() - began)
            check_reply(reply, request, self._settings.slot_bytes)
            self._unanswered = None
            self._hear(reply)
            if reply.attach:
                self._epoch = Epoch(0)
                self._attach()
                continue
            self._keep(request, reply)
            if request.wanted and not reply.granted.slots:
                self._refused_until = time.monotonic() + WANT_PAUSE_S
            if self.described is not None and reply.void:
                self.described.clear()
            has_more = reply.more or self._view.remote.has_questions or self.hints.has_news
            if not (has_more and self._may_grow) and not self._has_descriptions:
                return not reply.more
            if self._stopped.is_set():
                return not reply.more

    def _hear(self, reply: SyncReply) -> None:
        if reply.naming is not None and reply.naming.order_id != self._heard:
            self._naming, self._heard = reply.naming, reply.naming.order_id
            # The user waits for it.
            self._wake.set()

    def _keep(self, request: SyncRequest, reply: SyncReply) -> None:
        """Keep an answer for the engine's thread: of those without changes, the last one only."""
        if request.idle:
            self._standing = reply
        else:
            # Comes first, so that nothing older is applied after something newer.
            self._standing = None
            self._inbox.append(Exchanged(request, reply))

    @property
    def _has_descriptions(self) -> bool:
        """Heartbeats carry them too: their answers are not for the engine's thread."""
        return self.described is not None and self.described.has_news

    def _next_request(self) -> SyncRequest:
        now = time.monotonic()
        may_repeat = now >= self._repeat_at
        if may_repeat:
            self._repeat_at = now + REPEAT_PAUSE_S
        request = self._view.take_request(
            self._epoch,
            may_grow=self._may_grow,
            may_want=not self._num_unread,
            may_repeat=may_repeat,
        )
        breakers = self._breaker_report(now)
        request = msgspec.structs.replace(request, breakers=breakers, heard=self._heard)
        if self.described is not None:
            request = msgspec.structs.replace(request, described=self.described.take())
        if request.idle:
            return request
        counters = {**request.counters, **self.hints.counter_values()}
        counters[WANTED] = self._wanted.num_wanted
        if self.described is not None:
            counters |= self.described.counter_values()
        return msgspec.structs.replace(
            request,
            hints=self.hints.take(),
            # What is told of a session's end comes after all touches of its chunks.
            sessions=[] if self._view.has_touches else self.hints.take_sessions(),
            counters=counters,
            latencies={LOOKUPS: self._lookups.data()},
            wanted_keys=self._wanted.take(self._epoch),
        )

    def _breaker_report(self, now: float) -> BreakerReport:
        """All breakers of the engine's processes."""
        reports = [self._breakers.report(now)]
        if self._fetches is not None:
            reports.append(self._fetches.breaker_report(now))
        reports += [aged(report, now - said_at) for said_at, report in list(self._lines.values())]
        return joined(reports)
