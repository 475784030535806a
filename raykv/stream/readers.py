"""Readers of the event stream: they ask, page by page, and the actors only answer.

Nothing is kept for a reader there. One that is slow asks later, one that dies asks no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import ray

from raykv.base import deadlines, version
from raykv.base.errors import ClusterError, MessageError, RayKVError, VersionError
from raykv.base.ids import EventKind, Key, Namespace, NodeId
from raykv.cluster.ask import HERE, NODE_ACTOR, SCHEDULER, answering, ask_all
from raykv.cluster.breaker import Breakers, Pauses
from raykv.protocol import columns, descriptions, status
from raykv.protocol.events import (
    Event,
    EventPage,
    EventsMissed,
    ListingQuery,
    NodeEvent,
    events_of,
)
from raykv.protocol.framing import encode, receive
from raykv.protocol.listing import ALL_READ, ListingPart, Position, Where
from raykv.stream.descriptions import ANSWER_BYTES
from raykv.stream.replay import Replay

# How long a reader of events asks a restarting scheduler actor again.
READER_PATIENCE_S = 30.0


S = TypeVar("S", bound=msgspec.Struct)

FindNodes = Callable[[], Mapping[str, Any]]

logger = logging.getLogger("raykv")


def read_events(
    find: Callable[[], Any], since: int | tuple[int, int] | None, *, follow: bool
) -> Iterator[Event]:
    """See `raykv.client.cluster.Cluster.events`; `find` returns the scheduler actor."""
    life, after = _place(find, since)
    # Readers that have heard nothing yet soon hear that the actor does not answer.
    patience_s = deadlines.CLIENT_S
    while True:
        page = _page(find, life, after, patience_s)
        patience_s = READER_PATIENCE_S
        events = _events(page, life, after)
        if page.is_gap:
            missed = page.first_seq - after - 1 if page.life == life else 0
            yield EventsMissed(
                life=page.life, seq=page.first_seq, missed=missed if missed > 0 else None
            )
        yield from events
        life, after = page.life, page.first_seq + len(page) - 1
        if after >= page.last_seq:
            if not follow:
                return
            time.sleep(deadlines.IDLE_LOOK_S)


def whole_reports(log: Iterable[Event], most: int) -> Iterator[Event]:
    """The next `most` events, and the rest of the last one's report.

    A report's chunks come by how they have changed: a prompt's later chunk may come before an
    earlier one. Readers of the whole report have both.
    """
    last = None
    for count, event in enumerate(log):
        report = None
        if isinstance(event, NodeEvent):
            report = event.node_id, event.node_life, event.number
        if count >= most and (report is None or report != last):
            return
        last = report
        yield event


def _place(find: Callable[[], Any], since: int | tuple[int, int] | None) -> tuple[int, int]:
    """Life and number of the last event that the reader knows."""
    check_place(since)
    if isinstance(since, tuple):
        return since
    newest = _page(find, 0, 0)
    return newest.life, newest.last_seq if since is None else since


def check_place(since: int | tuple[int, int] | None) -> None:
    """Refuse what can't be the place of an event, with a ClusterError."""
    numbers: tuple[Any, ...] = (
        since if isinstance(since, tuple) else (0, 0 if since is None else since)
    )
    is_place = len(numbers) == 2 and all(
        isinstance(number, int) and 0 <= number <= columns.MAX_NUMBER for number in numbers
    )
    if not is_place:
        raise ClusterError(
            f"events since={since!r}: give the number of an event, or its life and number"
        )


def _page(
    find: Callable[[], Any], life: int, after: int, patience_s: float = deadlines.CLIENT_S
) -> EventPage:
    return _answer(find, EventPage, "events", life, after, patience_s=patience_s)


def _events(page: EventPage, life: int, after: int) -> list[Event]:
    """The events of a page that answers a question for what follows a place.

    Raises:
        MessageError: it answers another question, or none.
    """
    follows = page.life == life and page.first_seq == after + 1
    begins_anew = page.kinds[:1] == bytes([EventKind.LIFE_BEGAN])
    if not follows and not page.is_gap and not begins_anew:
        raise MessageError(f"{SCHEDULER} answered with events {page.first_seq} of {page.life}")
    if not page.kinds and page.last_seq >= page.first_seq:
        raise MessageError(f"{SCHEDULER} has {page.last_seq} events and did not tell them")
    try:
        return list(events_of(page, time.time()))
    except (IndexError, ValueError) as error:
        raise MessageError(f"{SCHEDULER} sent events that can't be read: {error}") from error


def take_snapshot(find: Callable[[], Any], find_nodes: FindNodes) -> Replay:
    """All that nodes have; events after the replay's `place` go on.

    `find` returns the scheduler actor, `find_nodes` the NodeActors by node; those are asked that
    report to the scheduler actor.

    Raises:
        ClusterError: one of them does not answer.
        MessageError: it sent something invalid.
    """
    replay = Replay()
    replay.place = _place(find, None)
    members = {each.node_id for each in _answer(find, status.ClusterStatus, "status").nodes}
    nodes = {node_id: actor for node_id, actor in find_nodes().items() if node_id in members}
    listings = {node_id: _Listing() for node_id in nodes}
    while listings:
        questions = {node_id: each.question for node_id, each in listings.items()}
        for node_id, answer in ask_all(nodes, questions, deadlines.ANSWER_S).items():
            listing = listings[node_id]
            if answer.is_dead:
                del listings[node_id]
            elif answer.error:
                raise ClusterError(f"node {node_id[:12]} does not tell what it has: {answer.error}")
            elif listing.take(receive(answer.value, ListingPart, NODE_ACTOR, HERE)):
                replay.load(NodeId(node_id), listing.position.life, listing.names)
                del listings[node_id]
    return replay


@dataclass
class _Listing:
    """A node's listing, read part by part."""

    position: Position = field(default_factory=Position)
    names: set[tuple[Namespace, Key]] = field(default_factory=set)

    def question(self, actor: Any) -> Any:
        return actor.ask.remote("listing", encode(ListingQuery(self.position)))

    def take(self, part: ListingPart) -> bool:
        """Take in the next part; True: it was the last one."""
        if not part.follows(self.position) or part.end == self.position:
            raise MessageError(f"{NODE_ACTOR} sent another part of its listing")
        if part.begins:
            self.names.clear()
        for row in part.rows:
            if row.where & (Where.RAM | Where.DISK):
                self.names.add((row.namespace, row.key))
            else:
                self.names.discard((row.namespace, row.key))
        self.position = part.end
        return part.end.place == ALL_READ


class Insides:
    """Asks what engines have said of chunks. A node that does not answer is named in a warning, and
    left alone for a while.

    Args:
        find_nodes: returns the NodeActors by node.
        deadline_s: for one answer.
    """

    def __init__(self, find_nodes: FindNodes, deadline_s: float = deadlines.ANSWER_S) -> None:
        self._find_nodes = find_nodes
        self._deadline_s = deadline_s
        self._breakers = Breakers(Pauses(*deadlines.SOURCE_PAUSES_S))

    def describe(
        self, keys: Iterable[bytes], namespace: str | None = None
    ) -> dict[bytes, descriptions.Description]:
        """Descriptions by key, of any namespace if that is None; without keys that no engine has
        described, and without invalid descriptions.

        Raises:
            ClusterError: Ray does not answer.
            MessageError: what a node sent is no message of descriptions.
        """
        nodes = self._find_nodes()
        found: dict[bytes, descriptions.Description] = {}
        left = list(dict.fromkeys(keys))
        while left:
            asked, is_cut, num_before = left[: columns.MAX_KEYS], False, len(found)
            for rows in self._told(nodes, asked, namespace):
                sound = columns.valid(rows, descriptions.check_description)
                found |= {row.key: row for row in sound if row.key not in found}
                # The answer may have been cut off behind the last one.
                is_cut |= 2 * sum(row.num_bytes for row in rows) > ANSWER_BYTES
            again = [key for key in asked if key not in found] if is_cut else []
            left = (again if len(found) > num_before else []) + left[columns.MAX_KEYS :]
        return found

    def _told(
        self, nodes: Mapping[str, Any], keys: list[bytes], namespace: str | None
    ) -> Iterator[list[descriptions.Description]]:
        now = time.monotonic()
        calls = {node_id: self._breakers.begin(node_id, now) for node_id in nodes}
        asked = {node_id: call for node_id, call in calls.items() if call is not None}
        questions = dict.fromkeys(
            asked, lambda each: each.ask.remote("descriptions", keys, namespace)
        )
        for node_id, answer in ask_all(nodes, questions, self._deadline_s).items():
            if not answer.error:
                self._breakers.worked(node_id)
                yield receive(answer.value, descriptions.Descriptions, NODE_ACTOR, HERE).rows
            elif self._breakers.failed(node_id, asked[node_id], time.monotonic(), answer.error):
                logger.warning(
                    "what node %s knows of chunks' insides is left out: %s",
                    *(node_id[:12], answer.error),
                )


def _answer(
    find: Callable[[], Any],
    kind: type[S],
    method: str,
    *arguments: Any,
    patience_s: float = deadlines.CLIENT_S,
) -> S:
    """Ask; an answer that can't be read here is a VersionError."""
    raw = _ask(find, method, *arguments, patience_s=patience_s)
    try:
        return receive(raw, kind, SCHEDULER, HERE)
    except MessageError as error:
        theirs = _ask(find, "ping")
        raise VersionError(
            f"{error}; the scheduler actor runs RayKV {theirs}, this process {version.__version__}"
        ) from error


def _ask(
    find: Callable[[], Any], method: str, *arguments: Any, patience_s: float = deadlines.CLIENT_S
) -> Any:
    """Call the scheduler actor, again and again while it restarts."""
    give_up_at = time.monotonic() + min(patience_s, READER_PATIENCE_S)
    while True:
        with answering(SCHEDULER):
            try:
                ref = getattr(find(), method).remote(*arguments)
                left_s = max(deadlines.IDLE_LOOK_S, give_up_at - time.monotonic())
                return ray.get(ref, timeout=min(deadlines.ANSWER_S, left_s))
            except Exception as error:
                is_final = isinstance(error, RayKVError | ray.exceptions.RayTaskError)
                is_final &= not isinstance(error.__cause__, TimeoutError)
                if is_final or time.monotonic() > give_up_at:
                    raise
        time.sleep(deadlines.IDLE_LOOK_S)
