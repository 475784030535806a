"""An engine's line to the NodeActor of one of its places: what is new there, and what is told it.

          hello        welcome                        a refusal, no answer, the end of the stream
  DOWN ─────────► ... ─────────► OPEN: query ──► answer ──────────────────────────────────────► DOWN
    ▲                             │      ▲          │                                            │
    │                tell, fetch ◄┘      └──────────┘                                            │
    └───────────────────────── a pause, longer after each failure ───────────────────────────────┘

One thread per line does all of that. While the engine takes nothing in, queries ask for no rows,
and only hear that the place is there; as soon as it does, another query goes out.

What comes over it waits until the engine's thread takes it in, between steps:

    line's thread:    query ──► answered ──┬─ rows ───────► the engine's inbox
                                           └─ facts alone ─► standing: the last one counts
    engine's thread:  the inbox, then what stands, then whether all workers are connected there
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from raykv.base import deadlines
from raykv.base.errors import AttachError, cause_of, first_line
from raykv.base.ids import NodeId
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.cluster.breaker import Breakers, Pauses, aged
from raykv.engine.fetches import Fetches
from raykv.engine.view import EngineView
from raykv.protocol import columns, engine, framing, measures, wire
from raykv.protocol.listing import Position
from raykv.protocol.node import NodeDescription

logger = logging.getLogger("raykv.session")

# Connect again to a NodeActor that has been silent for this long: it answers each second.
PLACE_LOST_S = 4.0

OWN_PLACE = "own node (changes)"
"""How an engine calls its NodeActor in reports of its breakers, when it follows what that has."""


MAX_UNREAD = 65_536
"""Rows of answers that the engine has not taken in; at this limit it asks for no more."""

LEAST_ROWS = 64
"""An answer counts as at least this many rows, since taking it in takes as long."""

MAX_TOLD = 256
"""What waits to be told to one of several places; beyond it the oldest is lost."""


class WorkerReport(NamedTuple):
    """What a rank says of its line: to which life of the NodeActor (0: none), and its breaker.

    `node_id`: the Ray node of its host, where the line has failed; empty: it says nothing.
    """

    life: int
    breakers: measures.BreakerReport
    node_id: str = ""


class LineOwner(Protocol):
    """Whose lines they are. The engine's thread empties the inbox; the lines' threads call all
    else.
    """

    inbox: deque[Callable[[], None]]
    is_started: bool
    """Before, places are read as fast as they can be."""

    def hello(self) -> engine.EngineHello:
        """Introduce the engine as it is now, without a place."""

    def heard(
        self, line: PlaceLine, query: engine.ChangesQuery, answer: engine.ChangesAnswer
    ) -> None:
        """A place has answered, perhaps with rows."""

    def moved(self, line: PlaceLine) -> None:
        """A place is another node from now on."""

    def welcomed(self, line: PlaceLine, life: int, namespace: str) -> None:
        """A NodeActor of that life has let the engine in, and knows nothing of before."""

    def next_tell(self, line: PlaceLine) -> engine.Tell | None:
        """What to say to a place now; None: nothing is due."""


def _weight(answer: engine.ChangesAnswer) -> int:
    """Return the number of rows that an answer counts as."""
    return max(LEAST_ROWS, len(answer.part.rows.keys))


class PlaceLine:
    """See the module's docstring.

    Args:
        owner: the session.
        view: of the engine; the engine's thread's, except for what it allows others to call.
        at: number of the place.
        locate: where the NodeActor is; told whether where it was does not do any more. It may take
            seconds, and raise.
    """

    def __init__(
        self,
        owner: LineOwner,
        view: EngineView,
        at: int,
        locate: Callable[[bool], NodeDescription],
    ) -> None:
        self._owner = owner
        self._view = view
        self.at, self.place = at, view.places[at]
        # They are lost when the line breaks, or can't be opened.
        self.fetches = Fetches(view.settings, at, self.place.slot_bytes)
        self._node_id = self.place.node_id
        self._locate = locate
        self.refusal = ""
        """Why the NodeActor does not let the engine in, as it said last; else empty."""
        # What is to be told here, where the session speaks to another place first.
        self.told: deque[engine.Tell] = deque(maxlen=MAX_TOLD)
        # Rows of answers that were put into the inbox, and those that were taken; where the last
        # one ends.
        self._num_put = self._num_taken = 0
        self._read_to = Position()
        # The last answer that has only facts, and when it came, if none with rows came behind it.
        self._standing: tuple[engine.ChangesAnswer, float] | None = None
        # The one that the view has.
        self._taken: tuple[engine.ChangesAnswer, float] | None = None
        # By rank, what the workers have said, and when; since when the place has its present life.
        self._workers: dict[int, tuple[float, WorkerReport]] = {}
        self.life, self._life_since = 0, 0.0
        self.breakers = Breakers(Pauses(*deadlines.RETRY_PAUSES_S))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopped = threading.Event()
        # All else is the line's thread's.
        self._sock: socket.socket | None = None
        self._reader = wire.FrameReader()
        self._hello: engine.EngineHello | None = None
        self._call = 0
        self._queries: deque[tuple[engine.ChangesQuery, float]] = deque()
        self._tell_at = 0.0
        self._thread = SupervisedThread("raykv-place", self._run, OnFailure.RUN_AGAIN)

    def revive(self) -> bool:
        """Begin, or try again if there was no thread for it; whether there is one, if wanted."""
        return self._stopped.is_set() or self._thread.revive()

    def wake(self) -> None:
        """Have the line's thread say what is due, or read on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def stop(self, timeout_s: float) -> None:
        """End it: the NodeActor sees that the engine is gone."""
        self._stopped.set()
        self.wake()
        self._thread.join(timeout_s)

    @property
    def is_left_alone(self) -> bool:
        """Whether the last attempt failed."""
        return not self.breakers.is_closed(OWN_PLACE)

    # The engine's thread

    @property
    def is_full(self) -> bool:
        """Whether the engine has to take something in before more is read."""
        return self._num_put - self._num_taken >= MAX_UNREAD

    def take_lines(self, reports: Mapping[int, WorkerReport], now: float) -> str:
        """Take what the place's workers report of their lines to the NodeActor, by rank; returns
        the Ray node where one says that it is, or nothing.
        """
        ranks = self.place.ranks
        mine = {rank: each for rank, each in reports.items() if not ranks or rank in ranks}
        self._workers |= {rank: (now, report) for rank, report in mine.items()}
        return next((each.node_id for each in mine.values() if each.node_id), "")

    def take_standing(self, now: float) -> None:
        """Once all is taken in that came before: what holds now, and who is connected."""
        standing = self._standing
        if standing is not self._taken and standing is not None and not self._owner.inbox:
            self._view.take(self.at, *standing)
            self._view.hear(self.at, standing[1])
            self._taken = standing
        self._follow_workers(now)

    def _follow_workers(self, now: float) -> None:
        """The view hears to which life the workers are connected. What they said before the place
        had its present life does not count: those that say nothing are believed to be there.
        """
        life = self._view.life_of(self.at)
        if life != self.life:
            self.life, self._life_since = life, now
        since = [each for at, each in self._workers.values() if at >= self._life_since]
        is_there = all(each.life == life for each in since)
        self._view.set_line(self.at, life if is_there else None, now)

    def _take_changes(self, answer: engine.ChangesAnswer, came_at: float) -> None:
        try:
            self._view.take(self.at, answer, came_at)
        except Exception:
            # What it said is lost: all is read anew.
            self._view.move(self.at, self._view.node_ids[self.at], came_at)
            raise
        finally:
            self._num_taken += _weight(answer)

    def _move(self, node_id: NodeId) -> None:
        self._workers.clear()
        self._view.move(self.at, node_id, time.monotonic())

    # The line's thread

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._sock is None and not self._open():
                    continue
                try:
                    self._speak()
                    self._listen(self._time_to_next())
                except Exception as error:
                    self._failed(error)
        finally:
            self._close()
            self.fetches.lose_all()

    def _open(self) -> bool:
        """One attempt to connect, or a part of the pause before it."""
        now = time.monotonic()
        call = self.breakers.begin(OWN_PLACE, now)
        if call is None:
            self._stopped.wait(min(deadlines.IDLE_LOOK_S, self.breakers.wait_s(OWN_PLACE, now)))
            return False
        self._call = call
        try:
            self._connect()
        except Exception as error:
            self._failed(error)
            return False
        return True

    def _connect(self) -> None:
        """To where the NodeActor was, which does not need Ray; else to where it is."""
        try:
            self._reach(self._locate(False))
        except (OSError, AttachError):
            if not self.is_left_alone:
                raise
            self._close()
            self._reach(self._locate(True))

    def _reach(self, node: NodeDescription) -> None:
        if node.node_id != self._node_id:
            self._node_id = NodeId(node.node_id)
            self._standing = None
            self._owner.moved(self)
            self._owner.inbox.append(partial(self._move, self._node_id))
        sock = wire.connect(node.socket_name, deadlines.ANSWER_S)
        self._sock, self._reader = sock, wire.FrameReader()
        wire.peer_of(sock)
        wire.limit_sends(sock, deadlines.SEND_S)
        self._introduce()

    def _introduce(self) -> None:
        """Say who the engine is; returns when it has been let in."""
        self._hello = hello = msgspec.structs.replace(
            self.place.introduced(self._owner.hello()),
            place=self.at + 1,
            num_places=len(self._view.places),
        )
        self._send(hello)
        give_up_at = time.monotonic() + deadlines.ANSWER_S
        welcome = None
        while welcome is None:
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise AttachError("the NodeActor does not let this engine in")
            welcome = self._listen(left)
        self.refusal = welcome.error
        if welcome.error:
            raise AttachError(f"the NodeActor refuses this engine: {welcome.error}")
        self._owner.welcomed(self, welcome.life, hello.namespace)

    def _failed(self, error: Exception) -> None:
        """The line is down; said once until something has been heard."""
        self._close()
        self.fetches.lose_all()
        now, reason = time.monotonic(), first_line(cause_of(error))
        if self.breakers.failed(OWN_PLACE, self._call, now, reason) and not self._stopped.is_set():
            logger.warning("no line to the NodeActor: %s", reason)

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = self._hello = None
        self._queries.clear()

    def _speak(self) -> None:
        """Say what is due."""
        query = self._query()
        if self._hello is None or query.namespace != self._hello.namespace:
            self._introduce()
            query = self._query()
        now = time.monotonic()
        if self._queries and now - self._queries[0][1] > PLACE_LOST_S:
            raise AttachError("the NodeActor does not answer")
        if not self._queries or (query.most and not any(each.most for each, _ in self._queries)):
            self._send(query)
            self._queries.append((query, now))
        while (order := self.fetches.take()) is not None:
            self._send(order)
        if now < self._tell_at:
            return
        tell = self._owner.next_tell(self)
        if tell is not None:
            self._send(tell)
            self._tell_at = time.monotonic() + deadlines.BRIEF_S

    def _time_to_next(self) -> float:
        """Until a tell may go out; then until something comes."""
        left = self._tell_at - time.monotonic()
        return left if left > 0 else deadlines.IDLE_LOOK_S

    def _listen(self, timeout_s: float) -> engine.Welcome | None:
        """Take what comes until the deadline; returns the answer to a hello."""
        assert self._sock is not None
        readable = wire.wait_readable([self._wake, self._sock.fileno()], timeout_s)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        if self._sock.fileno() not in readable:
            return None
        data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
        if not data:
            raise AttachError("the NodeActor has hung up")
        welcome = None
        for raw in self._reader.feed(data):
            message = framing.receive(raw, engine.PlaceMessage, "the NodeActor", "this engine")
            if isinstance(message, engine.Welcome):
                welcome = message
            elif isinstance(message, engine.Fetched):
                self.fetches.came(message.result)
            elif self._queries:
                self._answered(self._queries.popleft()[0], message)
        return welcome

    def _answered(self, query: engine.ChangesQuery, answer: engine.ChangesAnswer) -> None:
        if self.breakers.worked(OWN_PLACE):
            logger.warning("the line to the NodeActor is there again")
        # Of the state that it is in now.
        self._call = self.breakers.begin(OWN_PLACE, time.monotonic()) or self._call
        known_in = self._hello.namespace if self._hello is not None else ""
        if not answer.is_known and query.namespace == known_in:
            # It has forgotten the engine.
            self._hello = None
        self._put(query, answer)

    def _send(self, message: msgspec.Struct) -> None:
        assert self._sock is not None
        self._sock.sendall(wire.frame(message))  # bounded: SO_SNDTIMEO, set when it is connected

    def breaker_reports(self, now: float) -> list[measures.BreakerReport]:
        """Report the breakers of the line and of the place's workers."""
        workers = list(self._workers.values())
        of_workers = [aged(each.breakers, now - at) for at, each in workers]
        return [self.breakers.report(now), *of_workers]

    def _query(self) -> engine.ChangesQuery:
        """The next query: from where the view is, or the last answer before it."""
        is_full = self.is_full
        query = self._view.query(self.at)
        if self._num_put != self._num_taken and self._read_to.reader == query.position.reader:
            query = msgspec.structs.replace(query, position=self._read_to)
        most = query.most if self._owner.is_started else columns.MAX_KEYS
        return msgspec.structs.replace(query, most=0 if is_full else most)

    def _put(self, query: engine.ChangesQuery, answer: engine.ChangesAnswer) -> None:
        """Keep an answer until the engine's thread takes it in."""
        now = time.monotonic()
        self._owner.heard(self, query, answer)
        part = answer.part
        if part.end == query.position:
            self._standing = answer, now
            return
        # Comes first, so that nothing older is applied after something newer.
        self._standing = None
        if part.end.reader == query.position.reader:
            self._read_to = part.end
        self._num_put += _weight(answer)
        if self.is_full:
            # Nothing is read on until it has been taken in.
            answer = msgspec.structs.replace(answer, has_more=True)
        self._owner.inbox.append(partial(self._take_changes, answer, now))
