"""Helpers of the engine's view for the messages that it exchanges: queues and columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar, cast

from raykv.messages import Handle, Handles, Leases, handles_of
from raykv.types import Key

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
    places = handles_of(handles.slots, handles.generations)
    return zip(cast("list[Key]", handles.keys), places, strict=True)


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
