"""An engine has its NodeActor fetch chunks of other nodes: orders out, results into its inbox.

One background thread makes the calls, another one looks for what is overdue; the engine's thread
only appends to a queue. Every order ends with a `FetchEnded`, whatever happens to the NodeActor and
to the calls: at the latest when its deadline and a grace have passed since `submit`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from raykv.core.remote import FetchOrder
from raykv.messages import (
    PROTOCOL_VERSION,
    FetchRequest,
    FetchResult,
    Handles,
    Replicas,
    decode,
    encode,
)

logger = logging.getLogger("raykv.fetch")

MAX_QUEUED = 1024
"""Requests that wait for the thread; beyond it they fail at once."""

MAX_CHUNKS = 512
"""Per request: with two sources each it stays under Ray's 100 KiB inline limit."""

MAX_BYTES = 64 << 20
"""Per request: the first chunks of a long prefix are READY before the last ones have come."""

GRACE_S = 2.0
"""Above the deadline that the NodeActor keeps, before it counts as lost."""

POLL_S = 0.2
"""Between two looks for requests that are overdue."""


@dataclass(frozen=True)
class FetchEnded:
    """Orders that are over; `result` None: nobody knows how."""

    orders: list[FetchOrder]
    result: FetchResult | None


@dataclass(frozen=True)
class _Flying:
    orders: list[FetchOrder]
    overdue_at: float


class FetchClient:
    """See the module's docstring.

    Args:
        namespace: of the engine's chunks.
        find: returns the node's NodeActor.
        deadline_s: for each request.
        with_checksums: whether the NodeActor checks what arrives.
    """

    def __init__(
        self, namespace: str, find: Callable[[], Any], deadline_s: float, *, with_checksums: bool
    ) -> None:
        self._with_checksums = with_checksums
        self._namespace = namespace
        self._find = find
        self._deadline_s = deadline_s
        self._queue: queue.Queue[tuple[int, int]] = queue.Queue(MAX_QUEUED)
        self._flying: dict[int, _Flying] = {}
        self._lock = threading.Lock()
        self._counter = 0
        self._actor: Any = None
        self._stopped = threading.Event()
        self._deliver: Callable[[FetchEnded], None] = lambda _: None

    def start(self, deliver: Callable[[FetchEnded], None]) -> None:
        """Begin; `deliver` is called from other threads."""
        self._deliver = deliver
        for target, name in ((self._run, "raykv-fetch"), (self._watch, "raykv-fetch-watch")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the threads; nobody waits for what is under way."""
        self._stopped.set()

    def submit(self, orders: list[FetchOrder], node_epoch: int) -> None:
        """Have chunks fetched; on the engine's thread, returns at once."""
        overdue_at = time.monotonic() + self._deadline_s + GRACE_S
        for part in split(orders):
            self._counter += 1
            number = self._counter
            with self._lock:
                self._flying[number] = _Flying(part, overdue_at)
            try:
                self._queue.put_nowait((number, node_epoch))
            except queue.Full:
                self._answer(number, None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                number, node_epoch = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            with self._lock:
                flying = self._flying.get(number)
            if flying is not None:
                self._begin(number, flying.orders, node_epoch)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._give_up_overdue()

    def _begin(self, number: int, orders: list[FetchOrder], node_epoch: int) -> None:
        request = msgspec.structs.replace(
            fetch_request(self._namespace, orders, node_epoch, self._deadline_s),
            with_checksums=self._with_checksums,
        )
        try:
            if self._actor is None:
                self._actor = self._find()
            future = self._actor.fetch.remote(encode(request)).future()
        except Exception as error:
            self._fail(number, error)
            return
        future.add_done_callback(lambda done: self._end(number, done))

    def _end(self, number: int, done: Any) -> None:
        """In a thread of Ray."""
        try:
            result = decode(done.result(), FetchResult)
        except Exception as error:
            self._fail(number, error)
            return
        self._answer(number, result)

    def _fail(self, number: int, error: BaseException) -> None:
        logger.warning("the NodeActor does not fetch: %s", type(error).__name__)
        self._actor = None
        self._answer(number, None)

    def _answer(self, number: int, result: FetchResult | None) -> None:
        with self._lock:
            flying = self._flying.pop(number, None)
        if flying is not None:
            self._deliver(FetchEnded(flying.orders, result))

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [number for number, one in self._flying.items() if now >= one.overdue_at]
        for number in overdue:
            self._answer(number, None)


def split(orders: list[FetchOrder]) -> Iterator[list[FetchOrder]]:
    """Orders in parts of at most `MAX_CHUNKS` and, except for single ones, `MAX_BYTES`."""
    part: list[FetchOrder] = []
    num_bytes = 0
    for order in orders:
        if part and (len(part) == MAX_CHUNKS or num_bytes + order.num_bytes > MAX_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(order)
        num_bytes += order.num_bytes
    if part:
        yield part


def fetch_request(
    namespace: str, orders: list[FetchOrder], node_epoch: int, deadline_s: float
) -> FetchRequest:
    """Orders as columns."""
    sources = Replicas([], [], [], [], [], [])
    numbers: dict[tuple[str, int], int] = {}
    for position, order in enumerate(orders):
        for replica in order.replicas:
            place = (str(replica.node_id), int(replica.node_epoch))
            if place not in numbers:
                numbers[place] = len(numbers)
                sources.nodes.append(place[0])
                sources.node_epochs.append(place[1])
            sources.key_index.append(position)
            sources.node_index.append(numbers[place])
            sources.slots.append(replica.handle.slot)
            sources.generations.append(replica.handle.generation)
    return FetchRequest(
        version=PROTOCOL_VERSION,
        namespace=namespace,
        node_epoch=node_epoch,
        handles=Handles(
            [order.key for order in orders],
            [order.handle.slot for order in orders],
            [order.handle.generation for order in orders],
        ),
        slot_bytes=[order.num_bytes for order in orders],
        sources=sources,
        deadline_s=deadline_s,
    )
