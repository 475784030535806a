"""Lines of EngineCores to their NodeActor: each hears what is new here at once.

      hello ──► welcome
      tell                               (no answer)
      fetch ──► a thread for it ──► its result
      query ──► wait for news ──► one answer ──► a short pause, if it had rows
                  │ silence for a second
                  └──► an answer that says nothing

A thread for each line reads, another one answers. They share what the pool's lock guards. Fetches
of all lines are carried out by threads of their own.

Invariants:
1. Each query gets one answer.
2. What a peer sends that is no message of an EngineCore, or of another life than the line's, ends
   its line and nothing else.
3. The pool hears that a life has gone when its last line has ended.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from raykv.base import deadlines, threads
from raykv.base.ids import Refusal
from raykv.cluster.deaths import Watch
from raykv.node.keeper import PoolKeeper
from raykv.protocol import copies, engine, framing, node, wire, worker
from raykv.protocol.columns import require

logger = logging.getLogger("raykv.node")

MOST_QUERIES = 8
"""Queries of one line that may wait for an answer. An EngineCore sends one at a time."""

MOST_FETCHES = 1024
"""Fetches of all lines that may wait for a thread. Further ones are refused."""

FETCH_THREADS = 4
"""Fetches that run at a time."""


class EngineLine:
    """One EngineCore's connection.

    Args:
        keeper: the pool.
        sock: the connection.
        life: of the EngineCore.
        fetches: where its fetches wait.
    """

    def __init__(
        self, keeper: PoolKeeper, sock: socket.socket, life: int, fetches: FetchQueue
    ) -> None:
        self._keeper = keeper
        self._fetches = fetches
        self._lock = keeper.lock
        self._sock = sock
        self.life = life
        self._queries: deque[tuple[engine.ChangesQuery, float]] = deque()
        # Its last query took no rows: it may not know what it lacks.
        self._is_blind = False
        self.is_open = True
        self._sending = threading.Lock()

    def serve(self, watch: Watch, reader: wire.FrameReader, frames: list[bytes]) -> None:
        """Read until the connection ends.

        Raises:
            MessageError: the peer is no EngineCore of that life.
        """
        answering = threads.start_thread("raykv-answers", self._answer, threads.OnFailure.GIVE_UP)
        try:
            while not watch.has_died:
                for raw in frames:
                    self._take(raw)
                # bounded: silence is fine; `DeathWatch` and `close` end it
                data = self._sock.recv(1 << 18)
                if not data:
                    return
                frames = reader.feed(data)
        finally:
            self.close()
            answering.join(deadlines.STOP_S)

    def close(self) -> None:
        """End it; any thread may call."""
        with self._lock:
            self.is_open = False
            self._lock.notify_all()
        wire.hang_up(self._sock)

    def _take(self, raw: bytes) -> None:
        message: engine.EngineMessage = framing.receive(
            raw, engine.EngineMessage, "an engine", "this NodeActor"
        )
        require(message.life == self.life, "an engine of another life than its line's")
        if isinstance(message, copies.Fetch):
            self._queue_fetch(message)
            return
        welcome = None
        with self._lock:
            now = self._keeper.now()
            if isinstance(message, engine.ChangesQuery):
                require(len(self._queries) < MOST_QUERIES, "queries that do not wait for answers")
                self._queries.append((message, now + deadlines.HEARTBEAT_S))
            elif isinstance(message, engine.Tell):
                self._keeper.owner.tell(message, now)
            else:
                welcome = self._keeper.owner.hello(message, now)
            self._lock.notify_all()
        if welcome is not None:
            self.send(welcome)

    def _queue_fetch(self, order: copies.Fetch) -> None:
        try:
            self._fetches.put_nowait((self, order, time.monotonic()))
        except queue.Full:
            refused = worker.not_done(order.number, len(order.keys), Refusal.QUEUE_FULL)
            self.send(engine.Fetched(refused))

    def send(self, message: msgspec.Struct) -> None:
        """Send, or end the line; frames of two threads do not mix."""
        with self._sending:
            try:
                # bounded: SO_SNDTIMEO, set when the line has begun
                self._sock.sendall(wire.frame(message))
            except OSError:
                self.close()

    def _answer(self) -> None:
        while True:
            with self._lock:
                query = self._next()
                if query is None:
                    return
                answer = self._keeper.owner.changes(query, self._keeper.now())
                self._queries.popleft()
                self._is_blind = not query.most
            self.send(answer)
            if answer.part.rows.keys:
                time.sleep(deadlines.INSTANT_S)

    def _next(self) -> engine.ChangesQuery | None:
        """The next query that is to be answered now; None at the line's end. Waits with the lock,
        which the caller holds.
        """
        while self.is_open:
            if not self._queries:
                self._lock.wait(deadlines.HEARTBEAT_S)
                continue
            query, until = self._queries[0]
            left = until - self._keeper.now()
            # Behind one that waits another one may want more.
            is_due = left <= 0 or len(self._queries) > 1 or (self._is_blind and query.most > 0)
            if is_due or self._keeper.owner.has_changes(query):
                return query
            self._lock.wait(left)
        return None


FetchQueue = queue.Queue[tuple[EngineLine, copies.Fetch, float]]
"""Fetches that wait, with the lines that their results go to, and since when."""


class EngineLines:
    """All lines; any thread may call.

    Args:
        keeper: the pool.
        fetch: carries out an order within its deadline; must not raise.
    """

    def __init__(
        self, keeper: PoolKeeper, fetch: Callable[[copies.Fetch], copies.CopyResult]
    ) -> None:
        self._keeper = keeper
        self._fetch = fetch
        self._fetches: FetchQueue = queue.Queue(MOST_FETCHES)
        self._is_closed = False
        self._lines: set[EngineLine] = set()

    def serve(
        self, watch: Watch, hello: engine.EngineHello, reader: wire.FrameReader, frames: list[bytes]
    ) -> None:
        """Serve a connection that began with `hello` until it ends; `frames` came behind it.

        Raises:
            MessageError: the peer is no EngineCore.
            ThreadError: there is no thread for it.
        """
        keeper, life = self._keeper, hello.life
        line = EngineLine(keeper, watch.sock, life, self._fetches)
        wire.limit_sends(watch.sock, deadlines.SEND_S)
        with keeper.lock:
            welcome = self._welcome(hello)
            if not welcome.error:
                self._lines.add(line)
            keeper.lock.notify_all()
        line.send(welcome)
        if welcome.error:
            return
        try:
            line.serve(watch, reader, frames)
        finally:
            with keeper.lock:
                self._lines.discard(line)
                if all(other.life != life for other in self._lines):
                    keeper.owner.bye(life)
                keeper.lock.notify_all()

    def fetch(self) -> None:
        """Fetch what engines order, one order after the other, until `close`."""
        while not self._is_closed:
            try:
                line, order, came_at = self._fetches.get(timeout=deadlines.WAKE_S)
            except queue.Empty:
                continue
            if not line.is_open:
                continue
            left_s = order.deadline_s - (time.monotonic() - came_at)
            if left_s > 0:
                result = self._fetch(msgspec.structs.replace(order, deadline_s=left_s))
            else:
                # The engine has given it up, and others wait behind it.
                result = worker.not_done(order.number, len(order.keys), Refusal.TOO_LATE)
            line.send(engine.Fetched(result))

    def _welcome(self, hello: engine.EngineHello) -> engine.Welcome:
        if len(self._lines) >= node.MOST_ENGINES:
            return engine.Welcome(
                self._keeper.life, f"{node.MOST_ENGINES} engines are connected already"
            )
        return self._keeper.owner.hello(hello, self._keeper.now())

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """End all of them, and carry out nothing more."""
        self._is_closed = True
        with self._keeper.lock:
            lines = list(self._lines)
        for line in lines:
            line.close()
