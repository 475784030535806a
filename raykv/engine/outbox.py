"""What the engine's view has to report: queues of news, and columns for messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from raykv.base.ids import Key
from raykv.protocol.columns import MAX_KEYS, Handle, Handles, Keys, Leases, handles_of, numbered
from raykv.protocol.engine import Owned

T = TypeVar("T")

MAX_TOUCHES = 65_536
"""Touches waiting for an exchange; beyond it the oldest are lost, which only ages them."""


def _queue() -> deque[Any]:
    return deque(maxlen=MAX_TOUCHES)


@dataclass
class Outbox:
    """What the scheduler actor should learn of this node's chunks and slots.

    Threads: `fields` and `has_news` alone may run on the exchange thread.
    """

    touched: deque[Key] = field(default_factory=_queue)
    pinned: deque[Key] = field(default_factory=_queue)
    released: deque[tuple[int, Handle]] = field(default_factory=deque)
    dropped: deque[tuple[Key, Handle]] = field(default_factory=_queue)
    owned: deque[tuple[str, Handle]] = field(default_factory=_queue)

    @property
    def has_news(self) -> bool:
        """Whether something should not wait for the next heartbeat."""
        return bool(self.pinned or self.released or self.dropped)

    def clear(self) -> None:
        """Drop everything: none of it is valid any more."""
        for queue in (self.touched, self.pinned, self.released, self.dropped, self.owned):
            queue.clear()

    def fields(self) -> dict[str, Any]:
        """Fields of the next `SyncRequest`."""
        touched, pinned = take(self.touched, MAX_KEYS // 2), take(self.pinned, MAX_KEYS // 2)
        return {
            "touched": Keys.of(touched),
            "pinned": Keys.of(pinned),
            "released": lease_columns(take(self.released, MAX_KEYS // 2)),
            "dropped": Handles.of(take(self.dropped, MAX_KEYS // 4)),
            "owned": owned_columns(take(self.owned, MAX_KEYS // 2)),
        }


def take(queue: deque[T], most: int) -> list[T]:
    """Take up to `most` off the left end; another thread may empty the queue meanwhile."""
    taken: list[T] = []
    with suppress(IndexError):
        while len(taken) < most:
            taken.append(queue.popleft())
    return taken


def rows(handles: Handles) -> Iterable[tuple[Key, Handle]]:
    """Columns as keys and handles."""
    places = handles_of(handles.slots, handles.generations)
    return zip(cast("Sequence[Key]", handles.keys), places, strict=True)


def lease_columns(leases: Iterable[tuple[int, Handle]]) -> Leases:
    """KV groups and handles as columns."""
    leases = list(leases)
    return Leases(
        [group for group, _ in leases],
        [handle.slot for _, handle in leases],
        [handle.generation for _, handle in leases],
    )


def owned_columns(owned: Iterable[tuple[str, Handle]]) -> Owned:
    """Tenants and handles as columns."""
    owned = list(owned)
    tenants: list[str] = []
    return Owned(
        tenant_index=numbered(tenants, [label for label, _ in owned]),
        tenants=tenants,
        slots=[handle.slot for _, handle in owned],
        generations=[handle.generation for _, handle in owned],
    )
