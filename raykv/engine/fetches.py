"""An engine has its NodeActor fetch chunks of other nodes: its orders, until they end.

             take (sent over the place's line)
  submit ──► QUEUED ──────────────────────────► SENT ──► came: its result
               │                                 │
               └─── lose_all, give_up_overdue ───┴──► ended, without a result

Invariants:
1. Each part of what was submitted ends once: with its result, when the line breaks, or when its
   deadline and a grace have passed.
2. What has ended is not sent any more, and a later result of it counts for nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from raykv.base import deadlines
from raykv.base.ids import group_of
from raykv.engine.remote import FetchOrder
from raykv.engine.requests import ViewSettings
from raykv.protocol import columns
from raykv.protocol.copies import CopyResult, Fetch

MAX_CHUNKS = 512
"""Chunks of a request, which has some 50 KiB then: the place's line goes on with other messages."""

MAX_BYTES = 64 << 20
"""Bytes of a request: a long prefix's first chunks are READY before its last ones have come."""


@dataclass(frozen=True)
class _Part:
    """Orders that go as one request, which the line's thread makes."""

    request: Callable[[], Fetch]
    end: Callable[[CopyResult | None], None]
    overdue_at: float


class Fetches:
    """See the module's docstring. The engine's thread submits and gives up, the place's line does
    the rest.

    Args:
        settings: with the deadline of each request.
        place: number of the NodeActor's place.
        slot_bytes: of chunks there, by KV group index, where they are not those of the orders.
    """

    def __init__(
        self, settings: ViewSettings, place: int = 0, slot_bytes: Mapping[int, int] | None = None
    ) -> None:
        self._settings = settings
        self._place = place
        self._slot_bytes = slot_bytes or {}
        self._numbers = itertools.count(1)
        # By number, what has not ended. Who takes one out, which is atomic, ends it.
        self._parts: dict[int, _Part] = {}
        self._queued: deque[int] = deque()

    # The engine's thread

    def submit(
        self,
        part: list[FetchOrder],
        life: int,
        namespace: str,
        now: float,
        end: Callable[[CopyResult | None], None],
    ) -> None:
        """Have chunks fetched for an engine of that life, as many as `split` puts together. `end`
        is called once, in either thread; no result: the outcome is unknown.
        """
        overdue_at = now + self._settings.request_deadline_s + deadlines.GRACE_S
        number = next(self._numbers)
        request = partial(self._request, number, part, life, namespace)
        self._parts[number] = _Part(request, end, overdue_at)
        self._queued.append(number)

    def give_up_overdue(self, now: float) -> None:
        """End what has no result in time."""
        for number, part in list(self._parts.items()):
            if now >= part.overdue_at:
                self._end(number, None)

    # The line's thread

    def take(self) -> Fetch | None:
        """The next request to be sent; None: there is none."""
        while self._queued:
            number = self._queued.popleft()
            part = self._parts.get(number)
            if part is not None:
                return part.request()
        return None

    def _request(self, number: int, orders: list[FetchOrder], life: int, namespace: str) -> Fetch:
        return Fetch(
            number=number,
            life=life,
            namespace=namespace,
            keys=columns.Keys.of(order.key for order in orders),
            slot_bytes=columns.Numbers.of(
                self._slot_bytes.get(group_of(order.key), order.num_bytes) for order in orders
            ),
            sources=columns.SourceRows.of(order.sources[self._place] for order in orders),
            tenant=orders[0].tenant,
            deadline_s=self._settings.request_deadline_s,
        )

    def came(self, result: CopyResult) -> None:
        """The NodeActor's answer to one of the requests."""
        self._end(result.job_id, result)

    def lose_all(self) -> None:
        """The line is broken: nothing that was sent over it has an answer any more."""
        for number in list(self._parts):
            self._end(number, None)

    def _end(self, number: int, result: CopyResult | None) -> None:
        part = self._parts.pop(number, None)
        if part is not None:
            part.end(result)


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
