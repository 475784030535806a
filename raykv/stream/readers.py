"""Readers of the event stream: they ask, page by page, and the scheduler actor only answers.

Nothing is kept for a reader there. One that is slow asks later, one that dies asks no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import ray

from raykv.base.deadlines import CLIENT_S, READER_PATIENCE_S, READER_PAUSE_S, READER_S
from raykv.base.errors import ClusterError, MessageError, RayKVError, VersionError
from raykv.base.ids import EventKind
from raykv.base.version import __version__
from raykv.cluster.ask import HERE, SCHEDULER, answering
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.descriptions import Description, Descriptions, check_descriptions, rows_of
from raykv.protocol.events import Event, EventPage, EventsMissed, SnapshotPage, events_of
from raykv.protocol.framing import receive
from raykv.stream.descriptions import ANSWER_BYTES
from raykv.stream.replay import Replay

S = TypeVar("S", bound=msgspec.Struct)

MAX_PLACE = (1 << 63) - 1
"""Numbers of epochs and events that can be asked for."""

MAX_SNAPSHOTS_BEGUN = 3
"""How often a snapshot that others have displaced is begun anew."""


def read_events(
    find: Callable[[], Any], since: int | tuple[int, int] | None, *, follow: bool
) -> Iterator[Event]:
    """See `raykv.client.cluster.Cluster.events`; `find` returns the scheduler actor."""
    epoch, after = _place(find, since)
    # Who is not told anything yet is told soon that nobody answers.
    patience_s = CLIENT_S
    while True:
        page = _page(find, epoch, after, patience_s)
        patience_s = READER_PATIENCE_S
        events = _events(page, epoch, after)
        if page.is_gap:
            missed = page.first_seq - after - 1 if page.epoch == epoch else None
            is_past = missed is not None and missed > 0
            yield EventsMissed(
                epoch=page.epoch, seq=page.first_seq, missed=missed if is_past else None
            )
        yield from events
        epoch, after = page.epoch, page.first_seq + len(page) - 1
        if after >= page.last_seq:
            if not follow:
                return
            time.sleep(READER_PAUSE_S)


def _place(find: Callable[[], Any], since: int | tuple[int, int] | None) -> tuple[int, int]:
    """Epoch and number of the last event that the reader knows."""
    check_place(since)
    if isinstance(since, tuple):
        return since
    newest = _page(find, 0, 0)
    return newest.epoch, newest.last_seq if since is None else since


def check_place(since: int | tuple[int, int] | None) -> None:
    """Refuse what can't be the place of an event, with a ClusterError."""
    numbers: tuple[Any, ...] = (
        since if isinstance(since, tuple) else (0, 0 if since is None else since)
    )
    is_place = len(numbers) == 2 and all(
        isinstance(number, int) and 0 <= number <= MAX_PLACE for number in numbers
    )
    if not is_place:
        raise ClusterError(
            f"events since={since!r}: give the number of an event, or its epoch and number"
        )


def _page(
    find: Callable[[], Any], epoch: int, after: int, patience_s: float = CLIENT_S
) -> EventPage:
    return _answer(find, EventPage, "events", epoch, after, patience_s=patience_s)


def _events(page: EventPage, epoch: int, after: int) -> list[Event]:
    """The events of a page that answers a question for what follows a place.

    Raises:
        MessageError: it answers another question, or none.
    """
    follows = page.epoch == epoch and page.first_seq == after + 1
    begins_anew = page.kinds[:1] == [EventKind.EPOCH_BEGAN]
    if not follows and not page.is_gap and not begins_anew:
        raise MessageError(f"{SCHEDULER} answered with events {page.first_seq} of {page.epoch}")
    if not page.kinds and page.last_seq >= page.first_seq:
        raise MessageError(f"{SCHEDULER} has {page.last_seq} events and did not tell them")
    try:
        return list(events_of(page, time.time()))
    except (IndexError, ValueError) as error:
        raise MessageError(f"{SCHEDULER} sent events that can't be read: {error}") from error


def take_snapshot(find: Callable[[], Any]) -> Replay:
    for _ in range(MAX_SNAPSHOTS_BEGUN):
        replay = Replay()
        cursor = 0
        while True:
            page = _answer(find, SnapshotPage, "snapshot", cursor)
            if page.error:
                break
            _load(replay, page)
            if page.is_last:
                return replay
            if page.cursor <= cursor:
                raise MessageError(f"{SCHEDULER} sent a page of a snapshot again and again")
            cursor = page.cursor
    raise ClusterError("no snapshot could be taken: too many are being read; try again")


def _load(replay: Replay, page: SnapshotPage) -> None:
    try:
        replay.load(page)
    except (IndexError, ValueError) as error:
        raise MessageError(f"{SCHEDULER} sent a snapshot that can't be read: {error}") from error


def describe(
    find: Callable[[], Any], keys: Iterable[bytes], namespace: str | None = None
) -> list[Description]:
    """What engines have said of chunks; nothing for those that nobody has described.

    `find` returns the scheduler actor. None for the namespace: any in which the key is known.

    Raises:
        ClusterError: the scheduler actor does not answer.
        MessageError: it sent something invalid.
    """
    found: list[Description] = []
    left = list(keys)
    while left:
        asked, left = left[:MAX_KEYS], left[MAX_KEYS:]
        page = _answer(find, Descriptions, "describe_chunks", asked, namespace)
        check_descriptions(page)
        rows = list(rows_of(page))
        found += rows
        if rows and 2 * sum(row.num_bytes for row in rows) > ANSWER_BYTES:
            # The answer may have been cut off behind the last one.
            last = rows[-1].key
            left = [*asked[asked.index(last) + 1 :], *left] if last in asked else left
    return found


def _answer(
    find: Callable[[], Any],
    kind: type[S],
    method: str,
    *arguments: Any,
    patience_s: float = CLIENT_S,
) -> S:
    """Ask; an answer that can't be read here is a VersionError."""
    raw = _ask(find, method, *arguments, patience_s=patience_s)
    try:
        return receive(raw, kind, SCHEDULER, HERE)
    except MessageError as error:
        theirs = _ask(find, "ping")
        raise VersionError(
            f"{error}; the scheduler actor runs RayKV {theirs}, this process {__version__}"
        ) from error


def _ask(
    find: Callable[[], Any], method: str, *arguments: Any, patience_s: float = CLIENT_S
) -> Any:
    """Call the scheduler actor, again and again while it restarts."""
    give_up_at = time.monotonic() + min(patience_s, READER_PATIENCE_S)
    while True:
        with answering(SCHEDULER):
            try:
                ref = getattr(find(), method).remote(*arguments)
                left_s = max(READER_PAUSE_S, give_up_at - time.monotonic())
                return ray.get(ref, timeout=min(READER_S, left_s))
            except Exception as error:
                is_final = isinstance(error, RayKVError | ray.exceptions.RayTaskError)
                is_final &= not isinstance(error.__cause__, TimeoutError)
                if is_final or time.monotonic() > give_up_at:
                    raise
        time.sleep(READER_PAUSE_S)
