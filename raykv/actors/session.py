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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from raykv.actors.fetch_client import FetchClient, FetchEnded
from raykv.core.view import EngineView
from raykv.errors import ClusterError
from raykv.messages import (
    PROTOCOL_VERSION,
    AttachEngine,
    EngineAttached,
    SyncReply,
    SyncRequest,
    decode,
    encode,
)
from raykv.types import Epoch

logger = logging.getLogger("raykv.session")

MAX_INBOX = 4
"""Answers that the engine has not taken in; while there are so many, exchanges are heartbeats."""

REPEAT_PAUSE_S = 0.02
"""Between two questions about chunks that are being stored elsewhere."""

MIN_PAUSE_S = 0.002
"""Between two exchanges under load: news of some steps travel together."""

IDLE_WANT_PAUSE_S = 0.05
"""Between two requests for leases when the last one was not granted."""

BREAKER_PAUSE_S = (0.1, 2.0)
"""First and longest pause after a failed call; each further failure doubles it."""


@dataclass(frozen=True)
class SessionSettings:
    """Who the engine is, and times in seconds."""

    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    versions: str = ""
    heartbeat_s: float = 1.0
    rpc_deadline_s: float = 5.0


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

    def attach(self, raw: bytes) -> bytes:
        """See `SchedulerCalls.attach`."""
        self._actor = self._find()
        return self._get(self._actor.attach.remote(raw))

    def sync(self, raw: bytes) -> bytes:
        """See `SchedulerCalls.sync`."""
        if self._actor is None:
            self._actor = self._find()
        return self._get(self._actor.sync.remote(raw))

    def detach(self, engine_id: str) -> None:
        """See `SchedulerCalls.detach`."""
        if self._actor is not None:
            self._actor.detach.remote(engine_id)

    def _get(self, ref: Any) -> bytes:
        answer: bytes = ray.get(ref, timeout=self._deadline_s)
        return answer


@dataclass(frozen=True)
class Exchanged:
    """A message and its answer."""

    request: SyncRequest
    reply: SyncReply


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
    ) -> None:
        self._view = view
        self._calls = calls
        self._settings = settings
        self._inbox: deque[EngineAttached | Exchanged | FetchEnded] = deque()
        self._fetches = fetches
        self._repeat_at = 0.0
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._epoch = Epoch(0)
        self._failures = 0
        self._said: str = ""
        self._unanswered: SyncRequest | None = None
        self._refused_until = 0.0
        self._thread: threading.Thread | None = None

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
                    raise ClusterError(f"cannot attach: {_first_line(error)}") from error
                time.sleep(0.05)
        self._fill(give_up_at)

    def _fill(self, give_up_at: float) -> None:
        """Take in the whole mirror, so that the first request finds what is there."""
        while True:
            is_complete = self._exchange_quietly()
            self.drain()
            if is_complete or time.monotonic() > give_up_at:
                return

    def start(self) -> None:
        """Begin the background exchange."""
        if self._fetches is not None:
            self._fetches.start(self._inbox.append)
        self._thread = threading.Thread(target=self._run, name="raykv-session", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Apply the answers that have come. Only between engine steps."""
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case EngineAttached():
                    self._view.attached(message)
                case Exchanged():
                    self._view.apply(message.reply, message.request)
                case FetchEnded():
                    self._view.finish_fetch(message.orders, message.result)

    def nudge(self) -> None:
        """Something is in the outbox, or was taken out of the inbox."""
        if self._view.has_news or self._view.wants_leases:
            self._wake.set()
        if self._fetches is not None:
            self._fetches.submit(self._view.remote.take_orders(), self._view.node_epoch)

    def stop(self, timeout_s: float) -> None:
        """End the thread and the session; the leases return to the pool."""
        self._stopped.set()
        self._wake.set()
        if self._fetches is not None:
            self._fetches.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)
        try:
            self._calls.detach(self._settings.engine_id)
        except Exception as error:
            logger.debug("no farewell to the scheduler actor: %s", error)

    # The exchange thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause())
            self._wake.clear()
            if self._stopped.is_set():
                return
            started = time.monotonic()
            self._exchange_quietly()
            rest = MIN_PAUSE_S - (time.monotonic() - started)
            if rest > 0:
                time.sleep(rest)

    def _pause(self) -> float:
        """How long to wait for news before the next heartbeat."""
        if self._failures:
            first, longest = BREAKER_PAUSE_S
            pause = min(longest, first * 2 ** min(self._failures - 1, 10))
            self._stopped.wait(pause)
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

    def _exchange_quietly(self) -> bool:
        """One exchange; a failure opens the breaker and is logged once. True: nothing is left."""
        try:
            if not self._epoch:
                self._attach()
            is_complete = self._exchange()
        except Exception as error:
            self._failures += 1
            self._say(f"no exchange with the scheduler actor: {_first_line(error)}")
            if self._failures > 1:
                self._epoch = Epoch(0)
            return False
        if self._failures:
            logger.warning("the exchange with the scheduler actor works again")
        self._failures = 0
        self._said = ""
        return is_complete

    def _attach(self) -> None:
        settings = self._settings
        message = AttachEngine(
            version=PROTOCOL_VERSION,
            engine_id=settings.engine_id,
            node_id=settings.node_id,
            namespace=settings.namespace,
            model=settings.model,
            num_ranks=settings.num_ranks,
            slot_bytes=settings.slot_bytes,
            leases=self._view.declared_leases(),
            versions=settings.versions,
        )
        answer = decode(self._calls.attach(encode(message)), EngineAttached)
        if answer.error:
            raise ClusterError(answer.error)
        self._epoch = Epoch(answer.epoch)
        self._unanswered = None
        self._inbox.append(answer)

    def _exchange(self) -> bool:
        """Send the outbox, or again what got no answer; fetch what is left. True: all of it."""
        while True:
            request = self._unanswered
            if request is None:
                request = self._next_request()
            self._unanswered = request
            reply = decode(self._calls.sync(encode(request)), SyncReply)
            self._unanswered = None
            if reply.attach:
                self._epoch = Epoch(0)
                self._attach()
                continue
            if not request.idle or reply.cleared:
                self._inbox.append(Exchanged(request, reply))
            if request.wanted and not reply.granted.slots:
                self._refused_until = time.monotonic() + IDLE_WANT_PAUSE_S
            has_more = reply.more or self._view.remote.has_questions
            if not has_more or self._num_unread >= MAX_INBOX or self._stopped.is_set():
                return not reply.more

    def _next_request(self) -> SyncRequest:
        now = time.monotonic()
        may_repeat = now >= self._repeat_at
        if may_repeat:
            self._repeat_at = now + REPEAT_PAUSE_S
        return self._view.take_request(
            self._epoch,
            may_grow=self._num_unread < MAX_INBOX,
            may_want=not self._num_unread,
            may_repeat=may_repeat,
        )

    def _say(self, what: str) -> None:
        if what != self._said:
            logger.warning(what)
            self._said = what


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
