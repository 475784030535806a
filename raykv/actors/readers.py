"""Readers of the event stream: they ask, page by page, and the scheduler actor only answers.

Nothing is kept for a reader there. One that is slow asks later, one that dies asks no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from raykv.core.replay import Replay
from raykv.errors import ClusterError
from raykv.event_types import Event, EventPage, EventsMissed, SnapshotPage, events_of
from raykv.messages import decode

POLL_S = 0.2
"""Between two questions when nothing is new."""

DEADLINE_S = 5.0
"""For one answer."""

PATIENCE_S = 30.0
"""A scheduler actor that restarts is asked again for so long."""

MAX_SNAPSHOTS_BEGUN = 3
"""A snapshot that others have pushed out is begun anew so often."""


def read_events(
    find: Callable[[], Any], since: int | tuple[int, int] | None, *, follow: bool
) -> Iterator[Event]:
    """See `raykv.client.Cluster.events`; `find` returns the scheduler actor."""
    epoch, after = _place(find, since)
    while True:
        page = decode(_ask(find, "events", epoch, after), EventPage)
        if page.is_gap:
            missed = page.first_seq - after - 1 if page.epoch == epoch else None
            is_past = missed is not None and missed > 0
            yield EventsMissed(
                epoch=page.epoch, seq=page.first_seq, missed=missed if is_past else None
            )
        yield from events_of(page)
        epoch, after = page.epoch, page.first_seq + len(page) - 1
        if after >= page.last_seq:
            if not follow:
                return
            time.sleep(POLL_S)


def _place(find: Callable[[], Any], since: int | tuple[int, int] | None) -> tuple[int, int]:
    """Epoch and number of the last event that the reader knows."""
    if isinstance(since, tuple):
        return since
    newest = decode(_ask(find, "events", 0, 0), EventPage)
    return newest.epoch, newest.last_seq if since is None else since


def take_snapshot(find: Callable[[], Any]) -> Replay:
    """See `raykv.client.Cluster.snapshot`."""
    for _ in range(MAX_SNAPSHOTS_BEGUN):
        replay = Replay()
        cursor = 0
        while True:
            page = decode(_ask(find, "snapshot", cursor), SnapshotPage)
            if page.error:
                break
            replay.load(page)
            if page.is_last:
                return replay
            cursor = page.cursor
    raise ClusterError("no snapshot could be taken: too many are being read; try again")


def _ask(find: Callable[[], Any], method: str, *arguments: Any) -> bytes:
    """Call the scheduler actor, again and again while it restarts."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            ref = getattr(find(), method).remote(*arguments)
            answer: bytes = ray.get(ref, timeout=DEADLINE_S)
            return answer
        except Exception as error:
            if isinstance(error, ClusterError) or time.monotonic() > give_up_at:
                raise ClusterError(f"no events: {error}") from error
            time.sleep(POLL_S)
