"""What more room would have saved: how far behind the edge of the pools missed chunks lay.

    evicted ──► behind the edge of its node's pool, farther with every eviction there
    missed  ──► had the pool had so much more room, it would have been there

An evicted chunk lies behind its pool's edge by the bytes that have been evicted there since. A pool
that evicts what was not used for longest has a chunk if its room reaches that far; what a policy
knows beyond that is left out. Chunks that came back meanwhile count as evicted too: the truth is a
little nearer, and more is saved. What a request has stored itself by the time of its record is left
out. Tokens count up to the prompt's first chunk that more room would not have kept, and for as long
as `WINDOW_S`.

It is for people only: nothing is decided by it.

Invariants:
1. Chunks behind the edge are remembered up to a bound, the latest.
2. In each minute and at each distance, no more tokens are saved than were computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raykv.base.departures import Departures
from raykv.base.ids import Epoch, MissReason, NodeId
from raykv.protocol.descriptions import ChunkGroup
from raykv.protocol.engine import CHUNK_NAME_BYTES, MissRecord
from raykv.protocol.status import MoreRoom

SIZES = tuple(1 << power for power in range(26, 38))
"""Of more room in each pool, in bytes: 64 MiB to 128 GiB."""

MAX_BEHIND = 262_144
"""Chunks behind the edges of all pools, at least half of which are the latest."""

WINDOW_S = 3600.0
MINUTE_S = 60.0

_GROUP_BYTES = 4
"""At the end of a key, which names the KV group."""

_COUNTED = (MissReason.EVICTED, MissReason.NEVER_STORED)
"""An engine that does not know why a chunk is not there says that it was never stored."""


Life = tuple[NodeId, Epoch]
"""Of a node's pool: a NodeActor that has restarted begins with another."""


@dataclass
class _Minute:
    """What the requests that ended in it had of tokens; `saved` by the distance in `SIZES`."""

    began_at: float
    prompt: int = 0
    computed: int = 0
    saved: list[int] = field(default_factory=lambda: [0] * len(SIZES))


class RoomMeter:
    """See the module's docstring."""

    def __init__(self) -> None:
        # Chunks by the beginning of their names and their group, with the node and the edge there.
        self._behind: Departures[tuple[Life, int]] = Departures(MAX_BEHIND)
        # Bytes that each pool has evicted.
        self._edges: dict[Life, int] = {}
        self._num_behind = 0
        self._bytes_behind = 0
        self._minutes: deque[_Minute] = deque(maxlen=round(WINDOW_S / MINUTE_S))

    def evicted(self, life: Life, keys: Sequence[bytes], slot_bytes: int) -> None:
        """Chunks have left a node's pool for lack of room."""
        edge = self._edges.get(life, 0)
        names = [key[:CHUNK_NAME_BYTES] + key[-_GROUP_BYTES:] for key in keys]
        self._behind.note(names, (life, edge))
        self._edges[life] = edge + slot_bytes * len(keys)
        self._num_behind += len(keys)
        self._bytes_behind += slot_bytes * len(keys)

    def lost(self, life: Life) -> None:
        """A pool is lost: more room would not have kept it."""
        self._edges.pop(life, None)

    def take(
        self,
        records: Iterable[MissRecord],
        groups: Sequence[ChunkGroup],
        slot_bytes: int,
        now: float,
    ) -> None:
        """Requests have ended, of an engine with these KV groups and slots of that size."""
        prefix = next((each for each in groups if each.window is None), None)
        for record in records:
            minute = self._minute(now)
            minute.prompt += record.prompt
            minute.computed += sum(record.missed.values())
            if prefix is not None:
                self._count(record, prefix, slot_bytes, minute)

    def _minute(self, now: float) -> _Minute:
        if not self._minutes or now - self._minutes[-1].began_at >= MINUTE_S:
            self._minutes.append(_Minute(now))
        return self._minutes[-1]

    def _count(
        self, record: MissRecord, group: ChunkGroup, slot_bytes: int, minute: _Minute
    ) -> None:
        left = sum(record.missed.get(str(reason), 0) for reason in _COUNTED)
        suffix = group.group.to_bytes(_GROUP_BYTES, "big")
        first, end = (tokens // group.tokens for tokens in (_found(record), record.prompt))
        # What the request itself has stored meanwhile has pushed out as much.
        own, reach = (end - first) * slot_bytes, 0
        for at in range(first, end):
            name = record.chunks[at * CHUNK_NAME_BYTES : (at + 1) * CHUNK_NAME_BYTES]
            place = self._behind.get(name + suffix)
            edge = None if place is None else self._edges.get(place[0])
            if place is None or edge is None or left <= 0:
                return
            reach = max(reach, edge - place[1] - own)
            tokens = min(left, group.tokens)
            left -= tokens
            size = bisect_left(SIZES, reach)
            if size < len(SIZES):
                minute.saved[size] += tokens

    def savings(self, num_nodes: int, pool_bytes: int, now: float) -> MoreRoom:
        """What more room would have saved of the last hour, or of what is known of it."""
        minutes = [each for each in self._minutes if now - each.began_at < WINDOW_S]
        saved, so_far = [], 0
        for column in zip(*(each.saved for each in minutes), strict=True):
            so_far += sum(column)
            saved.append(so_far)
        # At least so many chunks are remembered, of those that were evicted.
        share = min(1.0, MAX_BEHIND / 2 / max(1, self._num_behind))
        is_all = share == 1.0
        return MoreRoom(
            window_s=now - minutes[0].began_at if minutes else 0.0,
            nodes=num_nodes,
            pool_bytes=pool_bytes,
            prompt_tokens=sum(each.prompt for each in minutes),
            computed_tokens=sum(each.computed for each in minutes),
            more_bytes=list(SIZES),
            saved_tokens=saved or [0] * len(SIZES),
            reach_bytes=None if is_all else round(self._bytes_behind * share / max(1, num_nodes)),
        )


def _found(record: MissRecord) -> int:
    return record.own + record.loaded
