"""An engine has its NodeActor fetch chunks of other nodes: orders out, results into its inbox.

One background thread makes the calls, another one looks for what is overdue; the engine's thread
only appends to a queue. Every order ends with a `FetchEnded`, whatever happens to the NodeActor and
to the calls: at the latest when its deadline and a grace have passed since `submit`, and at once
while the NodeActor's breaker is open.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from raykv.base import deadlines, threads
from raykv.base.ids import Refusal
from raykv.cluster import breaker, names
from raykv.engine.remote import FetchOrder
from raykv.node.peers import what_failed
from raykv.protocol import columns, framing, measures, worker
from raykv.protocol.copies import CopyResult, Fetch

logger = logging.getLogger("raykv.fetch")

# Between two looks for requests that are overdue.
FETCH_LOOK_S = 0.2

# How long an engine's own NodeActor that did not answer is left alone, first and longest: Ray
# starts another one within seconds.
FETCHER_PAUSES_S = (0.1, 2.0)


MAX_QUEUED = 1024
"""Requests that wait for the thread; beyond it they fail at once."""

MAX_CHUNKS = 512
"""Chunks of a request: with two sources each it stays under Ray's 100 KiB inline limit."""

MAX_BYTES = 64 << 20
"""Bytes of a request: a long prefix's first chunks are READY before its last ones have come."""


@dataclass(frozen=True)
class FetchEnded:
    """Orders that have ended; `result` None: the outcome is unknown."""

    orders: list[FetchOrder]
    result: CopyResult | None


@dataclass(frozen=True)
class _Flying:
    orders: list[FetchOrder]
    overdue_at: float
    call: int


@contextmanager
def one_connection() -> Iterator[int]:
    """The context of calls of a process that has one connection to Ray for all its life."""
    yield 1


class RayActor:
    """An actor that is found when it is called.

    Args:
        find: returns it.
        calling: the context of calls to Ray; gets the number of the connection, each of which has
            its own handles.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        calling: Callable[[], AbstractContextManager[int]] = one_connection,
    ) -> None:
        self._find, self._calling = find, calling
        self._actor: Any = None
        self._connection = 0

    def begin(self, method: str, argument: bytes | str) -> Any:
        """The future of a call. One thread calls this."""
        with self._calling() as connection:
            if self._actor is None or connection != self._connection:
                self._actor, self._connection = self._find(), connection
            return getattr(self._actor, method).remote(argument).future()

    def call(self, method: str, argument: bytes | str, *, deadline_s: float) -> bytes:
        """The answer of a method; raises if there is none by then. One thread calls this."""
        try:
            answer: bytes = self.begin(method, argument).result(timeout=deadline_s)
        except Exception:
            self.forget()
            raise
        return answer

    def forget(self) -> None:
        """It is looked for again."""
        self._actor = None


class FetchClient:
    """See the module's docstring.

    Args:
        actor: the node's NodeActor.
        deadline_s: for each request.
        with_checksums: whether the NodeActor checks what arrives.
    """

    def __init__(self, actor: RayActor, deadline_s: float, *, with_checksums: bool) -> None:
        self._actor = actor
        self._with_checksums = with_checksums
        self._deadline_s = deadline_s
        self._queue: queue.Queue[tuple[int, int, str]] = queue.Queue(MAX_QUEUED)
        self._flying: dict[int, _Flying] = {}
        # Guards the breaker too.
        self._lock = threading.Lock()
        self.breakers = breaker.Breakers(breaker.Pauses(*FETCHER_PAUSES_S))
        self._counter = 0
        self._stopped = threading.Event()
        self._is_started = False
        self._threads = [
            threads.SupervisedThread("raykv-fetch", self._run, threads.OnFailure.RUN_AGAIN),
            threads.SupervisedThread("raykv-fetch-watch", self._watch, threads.OnFailure.RUN_AGAIN),
        ]
        self._deliver: Callable[[FetchEnded], None] = lambda _: None

    def start(self, deliver: Callable[[FetchEnded], None]) -> None:
        """Begin; `deliver` is called from other threads."""
        self._deliver = deliver
        self._is_started = True
        self._revive()

    def _revive(self) -> bool:
        """Whether orders are carried out; starts the threads again if they could not be started."""
        is_running = self._is_started and not self._stopped.is_set()
        return not is_running or all(thread.revive() for thread in self._threads)

    def stop(self) -> None:
        """End the threads; nobody waits for what is under way."""
        self._stopped.set()

    def submit(self, orders: list[FetchOrder], life: int, namespace: str) -> None:
        """Have chunks fetched for an engine of that life; on its thread, returns at once."""
        now = time.monotonic()
        if orders and not self._revive():
            self._deliver(FetchEnded(orders, worker.not_done(0, len(orders), Refusal.BREAKER_OPEN)))
            return
        for part in split(orders):
            self._counter += 1
            number = self._counter
            with self._lock:
                call = self.breakers.begin(names.OWN_NODE_FETCHES, now)
                if call is not None:
                    overdue_at = now + self._deadline_s + deadlines.FETCH_GRACE_S
                    self._flying[number] = _Flying(part, overdue_at, call)
            if call is None:
                self._deliver(FetchEnded(part, worker.not_done(0, len(part), Refusal.BREAKER_OPEN)))
                continue
            try:
                self._queue.put_nowait((number, life, namespace))
            except queue.Full:
                self._answer(number, None)

    def breaker_report(self, now: float) -> measures.BreakerReport:
        """Whether the NodeActor is left alone for now; any thread may ask."""
        with self._lock:
            return self.breakers.report(now)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                number, life, namespace = self._queue.get(timeout=FETCH_LOOK_S)
            except queue.Empty:
                continue
            with self._lock:
                flying = self._flying.get(number)
            if flying is not None:
                order = fetch_order(namespace, flying.orders, life, self._deadline_s)
                self._begin(msgspec.structs.replace(order, number=number))

    def _watch(self) -> None:
        while not self._stopped.wait(FETCH_LOOK_S):
            self._give_up_overdue()

    def _begin(self, order: Fetch) -> None:
        order = msgspec.structs.replace(order, with_checksums=self._with_checksums)
        number = order.number
        try:
            future = self._actor.begin("fetch", framing.encode(order))
        except Exception as error:
            self._fail(number, error)
            return
        future.add_done_callback(lambda done: self._end(number, done))

    def _end(self, number: int, done: Any) -> None:
        """Take the NodeActor's answer; called in a thread of Ray."""
        try:
            result = framing.receive(done.result(), CopyResult, "the NodeActor", "the engine")
        except Exception as error:
            self._fail(number, error)
            return
        with self._lock:
            is_back = self.breakers.worked(names.OWN_NODE_FETCHES)
        if is_back:
            logger.warning("the NodeActor fetches again")
        self._answer(number, result)

    def _fail(self, number: int, error: BaseException) -> None:
        self._actor.forget()
        self._count_failure(number, what_failed(error))
        self._answer(number, None)

    def _count_failure(self, number: int, reason: str) -> None:
        with self._lock:
            flying = self._flying.get(number)
            is_new = flying is not None and self.breakers.failed(
                names.OWN_NODE_FETCHES, flying.call, time.monotonic(), reason
            )
        if is_new:
            logger.warning("the NodeActor does not fetch: %s", reason)

    def _answer(self, number: int, result: CopyResult | None) -> None:
        with self._lock:
            flying = self._flying.pop(number, None)
            if flying is not None:
                self.breakers.forget(names.OWN_NODE_FETCHES, flying.call, time.monotonic())
        if flying is not None:
            self._deliver(FetchEnded(flying.orders, result))

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [number for number, one in self._flying.items() if now >= one.overdue_at]
        for number in overdue:
            self._count_failure(number, "no answer in time")
            self._answer(number, None)


def split(orders: list[FetchOrder]) -> Iterator[list[FetchOrder]]:
    """Orders in parts of one tenant each, of at most `MAX_CHUNKS` and, except for single ones,
    `MAX_BYTES`.
    """
    part: list[FetchOrder] = []
    num_bytes = 0
    for order in orders:
        is_full = len(part) == MAX_CHUNKS or num_bytes + order.num_bytes > MAX_BYTES
        if part and (is_full or order.tenant != part[0].tenant):
            yield part
            part, num_bytes = [], 0
        part.append(order)
        num_bytes += order.num_bytes
    if part:
        yield part


def fetch_order(namespace: str, orders: list[FetchOrder], life: int, deadline_s: float) -> Fetch:
    """Orders of one tenant as columns, without a number."""
    return Fetch(
        version=framing.PROTOCOL_VERSION,
        number=0,
        life=life,
        namespace=namespace,
        keys=columns.Keys.of(order.key for order in orders),
        slot_bytes=columns.Numbers.of(order.num_bytes for order in orders),
        tenant=orders[0].tenant,
        deadline_s=deadline_s,
    ).reading(order.sources for order in orders)
