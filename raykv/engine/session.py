"""What an engine says and hears while it runs: one line to its place, one thread that asks.

                     ┌─ PlaceLine ──► NodeActor: what is new there │ what is told it │ fetches
  engine's thread ───┤
   nudge │ drain     └─ asking ─────► scheduler actor: who else has chunks │ clears

The engine's thread never waits: what is to be said gathers in the view, and answers land in an
inbox that is drained between steps. Every call has a deadline; breakers keep a dead actor from
being asked more often than their pauses allow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from raykv.base import deadlines
from raykv.base.errors import ClusterError, cause_of, first_line
from raykv.base.ids import Namespace, NodeId, Refusal, Stamp
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.cluster import names
from raykv.cluster.breaker import Breakers, Pauses, aged, joined
from raykv.engine import fetches, lines, remote
from raykv.engine.hints import HintBox
from raykv.engine.view import EngineView
from raykv.metrics import engines, histogram, reach
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS
from raykv.protocol import columns, copies, engine, measures, node, operator, worker
from raykv.protocol.framing import encode, receive
from raykv.protocol.listing import Position, Reason
from raykv.stream.descriptions import DescriptionOutbox

logger = logging.getLogger("raykv.session")

# After a question without an answer, first and longest: a new scheduler actor is there within
# seconds, and only new requests wait for it.
SCHEDULER_PAUSES_S = (0.1, 2.0)

# Between two questions about chunks that are being stored elsewhere.
REPEAT_PAUSE_S = 0.02

SENDER = "the scheduler actor"

THE_PLACE = 0
"""An engine has one place so far."""

MAX_UNREAD = 65_536
"""Rows of answers that the engine has not taken in; at this limit it asks for no more."""

LEAST_ROWS = 64
"""An answer counts as at least this many rows, since taking it in takes as long."""


class WorkerReport(NamedTuple):
    """What a rank says of its line: to which life of the NodeActor (0: none), and its breaker."""

    life: int
    breakers: measures.BreakerReport


Call = Callable[[str, bytes | str], bytes]
"""Calls a method of the scheduler actor, and has its answer; raises if there is none in time."""


def _weight(answer: engine.ChangesAnswer) -> int:
    """As how many rows an answer counts."""
    return max(LEAST_ROWS, len(answer.part.rows.keys))


class Session:
    """See the module's docstring. The view is the engine's thread's, except for what it allows
    others to call.

    Args:
        view: of the engine; the session begins it.
        hello: who the engine is.
        node_id: where it is.
        call: to the scheduler actor.
        locate: see `PlaceLine`.
        hints: wishes of requests, which the place is told; None: there are none.
        described: what is inside of chunks; likewise.
    """

    def __init__(
        self,
        view: EngineView,
        hello: engine.EngineHello,
        node_id: NodeId,
        call: Call,
        locate: Callable[[bool], node.NodeDescription],
        hints: HintBox | None = None,
        described: DescriptionOutbox | None = None,
    ) -> None:
        view.begin(hello, [node_id], time.monotonic())
        self.hints, self.described = hints or HintBox(), described
        self._view = view
        self._first = hello
        self._call = call
        self._fetches = fetches.Fetches(view.settings, self._end_fetch)
        self._num_refused = 0
        self._line = lines.PlaceLine(self, self._fetches, node_id, locate)
        # What the engine's thread is to do between steps, in order.
        self._inbox: deque[Callable[[], None]] = deque()
        # Rows of answers that were put there, and those that were taken; where the last one ends.
        self._num_put = self._num_taken = 0
        self._read_to = Position()
        # The last answer that has only facts, and when it came, if none with rows came behind it.
        self._standing: tuple[engine.ChangesAnswer, float] | None = None
        # The one that the view has.
        self._taken: tuple[engine.ChangesAnswer, float] | None = None
        # Where the engine is, and where it is about to go.
        self._space = engine.Space(hello.namespace, hello.traits)
        self._next: engine.Space | None = None
        # What the user calls the weights, until the engine's thread takes it; the latest number.
        self._naming: engine.Naming | None = None
        self._heard = engine.NOTHING_ORDERED
        # How often these have changed.
        self._weights = 0
        # By rank, what the workers have said, and when; since when the place has its present life.
        self._workers: dict[int, tuple[float, WorkerReport]] = {}
        self.place_life, self._life_since = 0, 0.0
        # Of the line's thread.
        self._seq = 0
        self._tell_at = 0.0
        self._introduced = ""
        self._welcomed = 0, ""
        self._said = (engine.NOTHING_ORDERED, 0, engine.NOTHING_ORDERED)
        self._wanted = reach.WantedKeys()
        # Of the thread that asks.
        self._breakers = Breakers(Pauses(*SCHEDULER_PAUSES_S))
        self._question: engine.Ask | None = None
        self._repeat_at = 0.0
        # The engine has not taken in the last answer: what it repeats is not asked for again.
        self._has_answer = False
        self._clear: tuple[int, str] = (0, "")
        self._num_clears = 0
        self._cleared = 0
        self._orders = engine.NOTHING_ORDERED
        self._lookups = histogram.Histogram(LATENCY_BOUNDS)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._is_started = self._has_threads = False
        self._asking = SupervisedThread("raykv-ask", self._ask_on, OnFailure.RUN_AGAIN)

    # The engine's thread

    def attach(self, deadline_s: float) -> None:
        """Take in all that the place has, waiting for it at most `deadline_s`, so that the first
        request finds what is there.

        Raises:
            ClusterError: the place has said nothing by then, or refuses this engine.
        """
        give_up_at = time.monotonic() + deadline_s
        self._line.revive()
        while not self._view.is_whole and time.monotonic() < give_up_at:
            if self._line.refusal:
                raise ClusterError(self._line.refusal)
            time.sleep(deadlines.BRIEF_S)
            self.drain()
        if not self._view.life_of(THE_PLACE):
            raise ClusterError("cannot attach: the NodeActor does not answer")

    def start(self) -> None:
        """Begin with the rest; `nudge` tries again if there is no thread for it now."""
        self._is_started = True
        self.nudge()

    def drain(self) -> None:
        """Apply what has come. Only between engine steps."""
        was_full = self._is_full
        self._fetches.give_up_overdue(time.monotonic())
        while self._inbox:
            self._inbox.popleft()()
        standing, now = self._standing, time.monotonic()
        if standing is not self._taken and standing is not None and not self._inbox:
            self._view.take(THE_PLACE, *standing)
            self._view.hear(THE_PLACE, standing[1])
            self._taken = standing
        self._follow_workers(now)
        if was_full:
            self._line.wake()
        self._go_on()

    @property
    def _is_full(self) -> bool:
        """Whether the engine has to take something in before more is read."""
        return self._num_put - self._num_taken >= MAX_UNREAD

    def _end_fetch(self, orders: list[remote.FetchOrder], result: copies.CopyResult | None) -> None:
        """On any thread."""
        self._inbox.append(partial(self._finish, orders, result))

    def _finish(self, orders: list[remote.FetchOrder], result: copies.CopyResult | None) -> None:
        self._view.finish_fetch(orders, [result], time.monotonic())

    def _move(self, node_id: NodeId) -> None:
        self._workers.clear()
        self._view.move(THE_PLACE, node_id, time.monotonic())

    def _take_answer(self, question: engine.Ask, answer: engine.AskAnswer) -> None:
        self._has_answer = False
        self._view.take_answer(question, answer)
        if self._view.remote.has_repeats:
            self._wake.set()

    def _take_stamp(self, reset: int, orders: Stamp) -> None:
        self._view.cleared(reset, orders, time.monotonic())

    def _take_changes(self, answer: engine.ChangesAnswer, at: float) -> None:
        try:
            self._view.take(THE_PLACE, answer, at)
        except Exception:
            # What it said is lost: all is read anew.
            self._view.move(THE_PLACE, self._view.node_ids[THE_PLACE], at)
            raise
        finally:
            self._num_taken += _weight(answer)

    def _follow_workers(self, now: float) -> None:
        """The view hears to which life the workers are connected. What they said before the place
        had its present life does not count: those that say nothing are believed to be there.
        """
        life = self._view.life_of(THE_PLACE)
        if life != self.place_life:
            self.place_life, self._life_since = life, now
        since = [each for at, each in self._workers.values() if at >= self._life_since]
        is_there = all(each.life == life for each in since)
        self._view.set_line(THE_PLACE, life if is_there else None, now)

    def enter(self, space: engine.Space) -> None:
        """Go on in a namespace, between steps; waits a moment until what is there is known."""
        self._next = space
        give_up_at = time.monotonic() + deadlines.PROMPT_S
        while True:
            self.drain()
            is_there = self._next is None and self._view.is_whole
            is_hopeless = not self._is_started or self._line.is_left_alone
            if is_there or is_hopeless or time.monotonic() > give_up_at:
                return
            time.sleep(deadlines.BRIEF_S)

    def take_naming(self) -> engine.Naming | None:
        """What the user has called the weights since this was asked the last time."""
        naming, self._naming = self._naming, None
        return naming if naming is not None and naming.weights == self._weights else None

    def change_weights(self) -> None:
        """What was called somehow until now are other weights."""
        self._weights += 1
        self._line.wake()

    def _go_on(self) -> None:
        """A clearing is the last namespace's: first that has to be ordered."""
        if self._next is None or self._view.is_clearing:
            return
        space, self._next = self._next, None
        if space.namespace == self._view.namespace:
            space = self._space
        self._space = space
        self._view.enter(Namespace(space.namespace), time.monotonic())
        self._line.wake()

    def note_wanted(self, keys: Sequence[bytes]) -> None:
        """A new request's prompt consists of these chunks; the caller must not change `keys` any
        more.
        """
        self._wanted.note(keys)

    def take_lines(self, reports: dict[int, WorkerReport]) -> None:
        """Take what the workers report of their lines to the NodeActor, by rank."""
        now = time.monotonic()
        self._workers |= {rank: (now, report) for rank, report in reports.items()}

    def nudge(self) -> None:
        """Something is to be said, or was taken out of the inbox."""
        view = self._view
        if self._has_news:
            self._line.wake()
        if view.remote.has_news or view.wanted_clear:
            self._wake.set()
        if self._is_started and not self._has_threads:
            # Those that have begun end with the session only.
            begun = [self._line.revive(), self._asking.revive()]
            self._has_threads = all(begun)
        if orders := view.remote.take_orders():
            self._order(orders)

    @property
    def _has_news(self) -> bool:
        """Whether the place is to be told something of requests."""
        view = self._view
        return bool(view.found) or view.accounts.has_records or self.hints.has_news

    def _order(self, orders: list[remote.FetchOrder]) -> None:
        """Have chunks fetched; fails at once while the NodeActor is left alone."""
        view = self._view
        if self._line.is_left_alone:
            self._num_refused += 1
            refused = worker.not_done(0, len(orders), Refusal.BREAKER_OPEN)
            self._end_fetch(orders, refused)
            return
        self._fetches.submit(orders, view.life, view.namespace, time.monotonic())
        self._line.wake()

    def stop(self, timeout_s: float) -> None:
        """End the threads, and the line."""
        self._stopped.set()
        self._wake.set()
        self._line.stop(timeout_s)
        self._asking.join(timeout_s)

    # The line's thread

    def hello(self) -> engine.EngineHello:
        """See `LineOwner.hello`."""
        space = self._space
        self._introduced = space.namespace
        return msgspec.structs.replace(self._first, namespace=space.namespace, traits=space.traits)

    def query(self) -> engine.ChangesQuery:
        """See `LineOwner.query`: from where the view is, or the last answer before it."""
        is_full = self._is_full
        query = self._view.query(THE_PLACE)
        if self._num_put != self._num_taken and self._read_to.reader == query.position.reader:
            query = msgspec.structs.replace(query, position=self._read_to)
        most = query.most if self._is_started else columns.MAX_KEYS
        return msgspec.structs.replace(query, most=0 if is_full else most)

    def answered(self, query: engine.ChangesQuery, answer: engine.ChangesAnswer) -> None:
        """See `LineOwner.answered`."""
        now = time.monotonic()
        naming = answer.facts.naming
        is_mine = naming is not None and naming.weights == self._weights
        if naming is not None and is_mine and naming.stamp > self._heard:
            self._naming, self._heard = naming, naming.stamp
        part = answer.part
        if part.end == query.position:
            self._standing = answer, now
            return
        # Comes first, so that nothing older is applied after something newer.
        self._standing = None
        if part.end.reader == query.position.reader:
            self._read_to = part.end
        is_relisted = part.begins and part.end.life == query.position.life
        if self.described is not None and (is_relisted or Reason.CLEARED in part.rows.reasons):
            # What is stored again is described again; who begins anew hears of no reasons.
            self.described.clear()
        self._num_put += _weight(answer)
        if self._is_full:
            # Nothing is read on until it has been taken in.
            answer = msgspec.structs.replace(answer, has_more=True)
        self._inbox.append(partial(self._take_changes, answer, now))

    def welcomed(self, life: int) -> None:
        """See `LineOwner.welcomed`."""
        self._wanted.tell_all_again()
        self._tell_at = 0.0
        last, self._welcomed = self._welcomed, (life, self._introduced)
        if last != self._welcomed:
            # Sessions are of a namespace.
            self.hints.sessions.tell_again()
        if last[0] != life and self.described is not None:
            self.described.tell_again()

    def moved(self, node_id: NodeId) -> None:
        """See `LineOwner.moved`."""
        self._standing = None
        # Of another cluster, perhaps, whose numbers say nothing here.
        self._orders = engine.NOTHING_ORDERED
        self._inbox.append(partial(self._move, node_id))

    def next_tell(self) -> engine.Tell | None:
        """See `LineOwner.next_tell`."""
        view, now = self._view, time.monotonic()
        knows = (self._heard, self._weights, max(self._orders, view.orders))
        has_described = self.described is not None and self.described.has_news
        if not (self._has_news or has_described or knows != self._said or now >= self._tell_at):
            return None
        self._tell_at, self._said = now + deadlines.HEARTBEAT_S, knows
        self._seq += 1
        found = view.found.take()
        return engine.Tell(
            view.life,
            self._seq,
            view.namespace,
            found,
            self.hints.take(),
            # What is told of a session's end comes after all touches of its chunks.
            sessions=[] if view.found else self.hints.sessions.take(),
            finished=view.accounts.take_records(),
            counters=self._counters(),
            latencies={LOOKUPS: self._lookups.data()},
            wanted_keys=self._wanted.take(self._welcomed[0]),
            breakers=self._breaker_report(now),
            described=[] if self.described is None else self.described.take(),
            heard=knows[0],
            weights=knows[1],
            orders=knows[2],
        )

    def _counters(self) -> dict[str, int]:
        counters = {**self._view.counter_values(), **self.hints.counters}
        counters[engines.WANTED] = self._wanted.num_wanted
        if self.described is not None:
            counters |= self.described.counter_values()
        return counters

    def _breaker_report(self, now: float) -> measures.BreakerReport:
        """All breakers of the engine's processes."""
        refused = measures.BreakerReport(refused=self._num_refused)
        reports = [self._breakers.report(now), self._line.breakers.report(now), refused]
        workers = list(self._workers.values())
        return joined([*reports, *(aged(each.breakers, now - at) for at, each in workers)])

    # The thread that asks

    def _ask_on(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause())
            self._wake.clear()
            if self._stopped.is_set():
                return
            self._say_quietly()
            self._stopped.wait(deadlines.INSTANT_S)

    def _pause(self) -> float:
        """How long to wait for news."""
        now = time.monotonic()
        if not self._breakers.is_closed(names.SCHEDULER):
            self._stopped.wait(self._breakers.wait_s(names.SCHEDULER, now))
            return 0.0
        pause = deadlines.WAKE_S
        if self._wants_clear:
            pause = deadlines.BRIEF_S
        if self._view.remote.has_repeats and not self._has_answer:
            pause = min(pause, self._repeat_at - now)
        return max(0.0, pause)

    @property
    def _wants_clear(self) -> bool:
        reset = self._view.wanted_clear
        return bool(reset) and reset != self._cleared

    def _say_quietly(self) -> None:
        """Ask and order what is due; a failure opens the breaker and is logged once."""
        is_closed = self._breakers.is_closed(names.SCHEDULER)
        question = self._next_question()
        # An engine that no node knows says so: status and doctor name it.
        says_that_it_is = not is_closed or self._line.is_left_alone
        if question is None and not self._wants_clear and not says_that_it_is:
            return
        call = self._breakers.begin(names.SCHEDULER, time.monotonic())
        if call is None:
            return
        try:
            if question is not None or says_that_it_is:
                self._ask(question or self._view.question([], []))
            if self._wants_clear:
                self._order_clear(self._view.wanted_clear)
        except Exception as error:
            self._view.remote.is_cut_off = True
            reason = first_line(cause_of(error))
            if self._breakers.failed(names.SCHEDULER, call, time.monotonic(), reason):
                logger.warning("the scheduler actor does not answer: %s", reason)
            return
        self._view.remote.is_cut_off = False
        if self._breakers.worked(names.SCHEDULER):
            logger.warning("the scheduler actor answers again")

    def _next_question(self) -> engine.Ask | None:
        """The question that has no answer yet, or the next one."""
        view = self._view
        if self._question is not None and self._question.namespace == view.namespace:
            return self._question
        now = time.monotonic()
        may_repeat = now >= self._repeat_at and not self._has_answer
        if may_repeat:
            self._repeat_at = now + REPEAT_PAUSE_S
        keys = view.remote.take_questions(engine.MOST_ASKED, may_repeat)
        coming = view.remote.take_announced(engine.MOST_ASKED)
        has_some = bool(keys or coming)
        self._question = view.question(keys, coming) if has_some else None
        return self._question

    def _ask(self, question: engine.Ask) -> None:
        began = time.monotonic()
        answer = receive(
            self._call("ask", encode(question)), engine.AskAnswer, SENDER, "the engine"
        )
        self._question = None
        if question.keys:
            self._lookups.observe(time.monotonic() - began)
            self._has_answer = True
            self._inbox.append(partial(self._take_answer, question, answer))
        if self._view.remote.has_questions:
            self._wake.set()

    def _order_clear(self, reset: int) -> None:
        """Have the namespace cleared for a reset, and wait for that to be ordered."""
        if self._clear[0] != reset:
            self._num_clears += 1
            order_id = f"reset {self._num_clears} of {self._view.life:x}"
            raw = encode(operator.ClearOrder(order_id, self._view.namespace))
            taken = receive(self._call("order", raw), operator.OrderAnswer, SENDER, "the engine")
            if taken.error:
                raise ClusterError(taken.error)
            self._clear = (reset, order_id)
        raw = self._call("order_state", self._clear[1])
        state = receive(raw, operator.OrderState, SENDER, "the engine")
        if state.orders is not None:
            self._orders = max(self._orders, state.orders)
            self._cleared = reset
            self._inbox.append(partial(self._take_stamp, reset, state.orders))
            self._line.wake()
        elif state.error or not state.is_known:
            # It is ordered anew.
            self._clear = (0, "")
            raise ClusterError(state.error or "the clearing was forgotten")
