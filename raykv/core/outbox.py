"""Helpers of the engine's view for the messages that it exchanges: queues and columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from raykv.core.requests import Handle
from raykv.messages import Handles, Leases
from raykv.types import Generation, Key, Slot

T = TypeVar("T")


def take(queue: deque[T], most: int) -> list[T]:
    """Take up to `most` off the left end; another thread may empty the queue meanwhile."""
    taken: list[T] = []
    with suppress(IndexError):
        while len(taken) < most:
            taken.append(queue.popleft())
    return taken


def rows(handles: Handles) -> Iterable[tuple[Key, Handle]]:
    """Columns as keys and handles."""
    columns = zip(handles.keys, handles.slots, handles.generations, strict=True)
    for key, slot, generation in columns:
        yield Key(key), Handle(Slot(slot), Generation(generation))


def columns(named: Iterable[tuple[Key, Handle]]) -> Handles:
    """Keys and handles as columns."""
    named = list(named)
    return Handles(
        [key for key, _ in named],
        [handle.slot for _, handle in named],
        [handle.generation for _, handle in named],
    )


def lease_columns(leases: Iterable[tuple[int, Handle]]) -> Leases:
    """KV groups and handles as columns."""
    leases = list(leases)
    return Leases(
        [group for group, _ in leases],
        [handle.slot for _, handle in leases],
        [handle.generation for _, handle in leases],
    )
