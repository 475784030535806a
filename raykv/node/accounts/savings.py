"""What more room would have saved: how far behind the edge of the pool missed chunks lay.

    evicted ──► behind the pool's edge, farther with every eviction
    missed  ──► had the pool had so much more room, it would have been there

An evicted chunk lies behind the pool's edge by the bytes that have been evicted since. A pool that
evicts what was not used for longest has a chunk if its room reaches that far; what a policy knows
beyond that is left out. Chunks that came back meanwhile count as evicted too: the truth is a little
nearer, and more is saved. What a request has stored itself by the time of its record is left out.
Tokens count up to the prompt's first chunk that more room would not have kept, and for as long as
`WINDOW_S`. Chunks that another node would have had are counted here as well.

It is for people only: nothing is decided by it.

Invariants:
1. Chunks behind the edge are remembered up to a bound, the latest.
2. In each minute and at each distance, no more tokens are saved than were computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from raykv.base.departures import Departures
from raykv.base.ids import GROUP_BYTES, MissReason
from raykv.node.accounts.requests import EndedRequest
from raykv.node.pool.engines import groups_of
from raykv.protocol.descriptions import ChunkGroup
from raykv.protocol.engine import CHUNK_NAME_BYTES, MissRecord
from raykv.protocol.status import MoreRoom

SIZES = tuple(1 << power for power in range(26, 38))
"""Of more room, in bytes: 64 MiB to 128 GiB."""

MOST_BEHIND = 131_072
"""Chunks behind the edge, at least half of which are the latest."""

WINDOW_S = 3600.0
"""What was saved longer ago does not count."""

MINUTE_S = 60.0
"""What was saved within it is one sum: all of its goes out of the window at once."""

_COUNTED = (MissReason.EVICTED, MissReason.QUOTA, MissReason.NEVER_STORED)
"""An engine that does not know why a chunk is not there says that it was never stored."""


@dataclass
class _SavedMinute:
    """What the requests that ended in it had of tokens; `saved` by the distance in `SIZES`."""

    began_at: float
    prompt: int = 0
    computed: int = 0
    saved: list[int] = field(default_factory=lambda: [0] * len(SIZES))


class Savings:
    """See the module's docstring."""

    def __init__(self) -> None:
        # Chunks by the beginning of their names and their group, with the edge then.
        self._behind: Departures[int] = Departures(MOST_BEHIND)
        # Bytes that the pool has evicted, and in how many chunks.
        self._edge = 0
        self._num_behind = 0
        self._minutes: deque[_SavedMinute] = deque(maxlen=round(WINDOW_S / MINUTE_S))

    def evicted(self, key: bytes, slot_bytes: int) -> None:
        """A chunk has left the pool for lack of room."""
        self._behind.note([key[:CHUNK_NAME_BYTES] + key[-GROUP_BYTES:]], self._edge)
        self._edge += slot_bytes
        self._num_behind += 1

    def take(self, ended: EndedRequest, now: float) -> None:
        """A request has ended."""
        minute, record = self._minute(now), ended.record
        minute.prompt += record.prompt
        minute.computed += sum(record.missed.values())
        groups = groups_of(ended.hello)
        prefix = next((each for each in groups if each.window is None), None)
        if prefix is not None:
            largest = max(ended.hello.slot_bytes.values(), default=0)
            self._count(record, prefix, largest, minute)

    def _minute(self, now: float) -> _SavedMinute:
        if not self._minutes or now - self._minutes[-1].began_at >= MINUTE_S:
            self._minutes.append(_SavedMinute(now))
        return self._minutes[-1]

    def _count(
        self, record: MissRecord, group: ChunkGroup, slot_bytes: int, minute: _SavedMinute
    ) -> None:
        left = sum(record.missed.get(str(reason), 0) for reason in _COUNTED)
        suffix = group.group.to_bytes(GROUP_BYTES, "big")
        found = record.own + record.loaded
        first, end = found // group.tokens, record.prompt // group.tokens
        # What the request itself has stored meanwhile has pushed out as much.
        own, reach = (end - first) * slot_bytes, 0
        for at in range(first, min(end, len(record.chunks) // CHUNK_NAME_BYTES)):
            name = record.chunks[at * CHUNK_NAME_BYTES : (at + 1) * CHUNK_NAME_BYTES]
            place = self._behind.get(name + suffix)
            if place is None or left <= 0:
                return
            reach = max(reach, self._edge - place - own)
            tokens = min(left, group.tokens)
            left -= tokens
            size = bisect_left(SIZES, reach)
            if size < len(SIZES):
                minute.saved[size] += tokens

    def told(self, pool_bytes: int, now: float) -> MoreRoom:
        """What more room would have saved of the last hour, or of what is known of it."""
        minutes = [each for each in self._minutes if now - each.began_at < WINDOW_S]
        saved, so_far = [], 0
        for column in zip(*(each.saved for each in minutes), strict=True):
            so_far += sum(column)
            saved.append(so_far)
        # At least this many evicted chunks are remembered.
        share = min(1.0, MOST_BEHIND / 2 / max(1, self._num_behind))
        return MoreRoom(
            window_s=now - minutes[0].began_at if minutes else 0.0,
            nodes=1,
            pool_bytes=pool_bytes,
            prompt_tokens=sum(each.prompt for each in minutes),
            computed_tokens=sum(each.computed for each in minutes),
            more_bytes=list(SIZES),
            saved_tokens=saved or [0] * len(SIZES),
            reach_bytes=None if share == 1.0 else round(self._edge * share),
        )
