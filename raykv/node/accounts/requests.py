"""What became of the latest requests of a node's engines, for `raykv explain`.

Invariants:
1. Requests are numbered from 1 without gaps in a NodeActor's life; the latest are remembered.
2. They and the names of their chunks take a bounded room.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from raykv.base.ids import MAX_REQUEST_ID, Namespace, shown_id
from raykv.protocol.engine import EngineHello, MissRecord

MOST_RECORDS = 4096
"""Requests that are remembered."""

MOST_NAMES_BYTES = 8 << 20
"""Of the names of their chunks."""

MOST_TOLD = 16
"""Requests with one beginning in one answer."""

MOST_IN_PAGE = 128
"""Requests in one page of all of them."""

PAGE_NAMES_BYTES = 48 << 10
"""Of chunks' names in a page, unless one request alone has more: the page stays under 100 KiB."""

_PUT_BEFORE = re.compile(r"([0-9]+_)?([a-z]{1,12}-)?([a-z]{1,12}-)?")
"""What vLLM puts before a request's id: a number where a request has several answers, and the name
of the API, `cmpl-` for example, before an id that the client has chosen (`X-Request-Id`).
"""


class EndedRequest(NamedTuple):
    """A request that has ended, and the engine that had it, as that was called then."""

    record: MissRecord
    hello: EngineHello
    at: float

    @property
    def namespace(self) -> Namespace:
        """That the engine was in."""
        return Namespace(self.hello.namespace)

    def has_id(self, beginning: str) -> bool:
        """Whether the request's id begins so, with or without what vLLM puts before it.

        Args:
            beginning: as `shown_id` gives it; ids that were cut off there may go on with it.
        """
        whole = self.record.request_id
        put = _PUT_BEFORE.match(whole)
        starts = {0} if put is None else {0, *map(put.end, (1, 2, 3))} - {-1}
        is_cut = len(whole) >= MAX_REQUEST_ID
        return any(
            whole.startswith(beginning[: len(whole) - start] if is_cut else beginning, start)
            for start in starts
        )


class RequestLog:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque()
        self._names_bytes = 0
        self.last = 0
        """The number of the newest one."""

    def take(self, hello: EngineHello, records: Iterable[MissRecord], now: float) -> None:
        """Requests of an engine have ended."""
        for record in records:
            self._ended.append(EndedRequest(record, hello, now))
            self.last += 1
            self._names_bytes += len(record.chunks)
            while len(self._ended) > MOST_RECORDS or self._names_bytes > MOST_NAMES_BYTES:
                self._names_bytes -= len(self._ended.popleft().record.chunks)

    def find(self, beginning: str) -> list[EndedRequest]:
        """Requests whose ids begin so, the newest first."""
        asked = shown_id(beginning)
        return list(islice((e for e in reversed(self._ended) if e.has_id(asked)), MOST_TOLD))

    def after(self, number: int) -> tuple[int, list[EndedRequest]]:
        """The next requests after the one of that number, the oldest first, and the number of the
        first of them. Those that are forgotten are left out.
        """
        oldest = self.last - len(self._ended) + 1
        first = max(oldest, min(number, self.last) + 1)
        found: list[EndedRequest] = []
        names_bytes = 0
        for each in islice(self._ended, first - oldest, first - oldest + MOST_IN_PAGE):
            names_bytes += len(each.record.chunks)
            if found and names_bytes > PAGE_NAMES_BYTES:
                break
            found.append(each)
        return first, found

    def __len__(self) -> int:
        return len(self._ended)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self) <= min(MOST_RECORDS, self.last), len(self)
        num_bytes = sum(len(each.record.chunks) for each in self._ended)
        assert num_bytes == self._names_bytes <= MOST_NAMES_BYTES, num_bytes
