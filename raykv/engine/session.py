"""What an engine says and hears while it runs: a line to each of its places, one thread that asks.

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

from msgspec.structs import replace

from raykv.base import deadlines
from raykv.base.errors import ClusterError, cause_of, first_line
from raykv.base.ids import Namespace, NodeId, Refusal, part_of
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.cluster import names
from raykv.cluster.breaker import Breakers, Pauses, joined
from raykv.engine import fetches, remote
from raykv.engine.hints import HintBox
from raykv.engine.lines import PlaceLine, WorkerReport
from raykv.engine.listed import EnginePlace
from raykv.engine.view import EngineView
from raykv.metrics import engines, histogram, reach
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS
from raykv.protocol import copies, engine, measures, node, operator, worker
from raykv.protocol.framing import encode, receive
from raykv.protocol.listing import Reason
from raykv.stream.descriptions import DescriptionOutbox

logger = logging.getLogger("raykv.session")

# After a question without an answer, first and longest: a new scheduler actor is there within
# seconds, and only new requests wait for it.
SCHEDULER_PAUSES_S = (0.1, 2.0)

# Between two questions about chunks that are being stored elsewhere.
REPEAT_PAUSE_S = 0.02

SENDER = "the scheduler actor"

Call = Callable[[str, bytes | str], bytes]
"""Calls a method of the scheduler actor, and has its answer; raises if there is none in time."""


class Session:
    """See the module's docstring. The view is the engine's thread's, except for what it allows
    others to call.

    Args:
        view: of the engine; the session begins it.
        hello: who the engine is.
        places: of the engine, at least one.
        locate: where the NodeActor of a place is, by the place's number; else as in `PlaceLine`.
        call: to the scheduler actor.
        hints: wishes of requests, which the places are told; None: there are none.
        described: what is inside of chunks; likewise.
    """

    def __init__(
        self,
        view: EngineView,
        hello: engine.EngineHello,
        places: Sequence[EnginePlace],
        locate: Callable[[int, bool], node.NodeDescription],
        call: Call,
        hints: HintBox | None = None,
        described: DescriptionOutbox | None = None,
    ) -> None:
        view.begin(hello, places, time.monotonic())
        self.hints, self.described = hints or HintBox(), described
        self._view = view
        self._first = hello
        self._call = call
        self._num_refused = 0
        # What the engine's thread is to do between steps, in order.
        self.inbox: deque[Callable[[], None]] = deque()
        # Told that the ranks of a place, by its number, have that Ray node on their host now.
        self.follow: Callable[[int, NodeId], None] = lambda _at, _node_id: None
        self.lines = [PlaceLine(self, view, at, partial(locate, at)) for at in range(len(places))]
        # The place that hears of requests first, and alone of the engine itself.
        self._first_line = self.lines[0]
        # Where the engine is, and where it is about to go.
        self._space = engine.Space(hello.namespace, hello.traits)
        self._next: engine.Space | None = None
        # What the user calls the weights, until the engine's thread takes it; the latest number.
        self._naming: engine.Naming | None = None
        self._heard = engine.NOTHING_ORDERED
        # How often these have changed.
        self._weights = 0
        # Of the first line's thread.
        self._seq = 0
        self._tell_at = 0.0
        self._welcomed = 0, ""
        # One of the others knows no sessions yet.
        self._has_new_place = False
        self._said = (engine.NOTHING_ORDERED, 0, engine.NOTHING_ORDERED)
        self._wanted = reach.WantedKeys()
        # Of the thread that asks.
        self._breakers = Breakers(Pauses(*SCHEDULER_PAUSES_S))
        self._question: list[engine.Ask] | None = None
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
        self.is_started = self._has_threads = False
        self._asking = SupervisedThread("raykv-ask", self._ask_on, OnFailure.RUN_AGAIN)

    # The engine's thread

    def attach(self, deadline_s: float) -> None:
        """Take in all that the places have, waiting for it at most `deadline_s`, so that the first
        request finds what is there.

        Raises:
            ClusterError: a place has said nothing by then, or refuses this engine.
        """
        give_up_at = time.monotonic() + deadline_s
        for line in self.lines:
            line.revive()
        while not self._view.is_whole and time.monotonic() < give_up_at:
            for line in self.lines:
                if line.refusal:
                    raise ClusterError(line.refusal)
            time.sleep(deadlines.BRIEF_S)
            self.drain()
        for line in self.lines:
            if not self._view.life_of(line.at):
                raise ClusterError("cannot attach: the NodeActor does not answer")

    def start(self) -> None:
        """Begin with the rest; `nudge` tries again if there is no thread for it now."""
        self.is_started = True
        self.nudge()

    def drain(self) -> None:
        """Apply what has come. Only between engine steps."""
        full = [line for line in self.lines if line.is_full]
        now = time.monotonic()
        for line in self.lines:
            line.fetches.give_up_overdue(now)
        while self.inbox:
            self.inbox.popleft()()
        for line in self.lines:
            line.take_standing(time.monotonic())
        for line in full:
            line.wake()
        self._go_on()

    @property
    def place_lives(self) -> list[int]:
        """Of the NodeActors of the places, as far as they are known."""
        return [line.life for line in self.lines]

    @property
    def _is_left_alone(self) -> bool:
        """Whether there is a place that nothing is heard of."""
        return any(line.is_left_alone for line in self.lines)

    def _wake_lines(self) -> None:
        for line in self.lines:
            line.wake()

    def _take_answers(self, questions: list[engine.Ask], answers: list[engine.AskAnswer]) -> None:
        self._has_answer = False
        self._view.take_answers(questions, answers)
        if self._view.remote.has_repeats:
            self._wake.set()

    def enter(self, space: engine.Space) -> None:
        """Go on in a namespace, between steps; waits a moment until what is there is known."""
        self._next = space
        give_up_at = time.monotonic() + deadlines.PROMPT_S
        while True:
            self.drain()
            is_there = self._next is None and self._view.is_whole
            is_hopeless = not self.is_started or self._is_left_alone
            if is_there or is_hopeless or time.monotonic() > give_up_at:
                return
            time.sleep(deadlines.BRIEF_S)

    def take_naming(self) -> engine.Naming | None:
        """What the user has called the weights since this was asked the last time."""
        naming, self._naming = self._naming, None
        return naming if naming is not None and naming.weights == self._weights else None

    def change_weights(self) -> None:
        """The weights have changed: names that were given before are void."""
        self._weights += 1
        self._wake_lines()

    def _go_on(self) -> None:
        """A clearing is the last namespace's: first that has to be ordered."""
        if self._next is None or self._view.is_clearing:
            return
        space, self._next = self._next, None
        if space.namespace == self._view.namespace:
            space = self._space
        self._space = space
        self._view.enter(Namespace(space.namespace), time.monotonic())
        self._wake_lines()

    def note_wanted(self, keys: Sequence[bytes]) -> None:
        """A new request's prompt consists of these chunks; the caller must not change `keys` any
        more.
        """
        self._wanted.note(keys)

    def take_lines(self, reports: dict[int, WorkerReport]) -> None:
        """Take what the workers report of their lines to the NodeActor, by rank."""
        now = time.monotonic()
        for line in self.lines:
            if node_id := line.take_lines(reports, now):
                self.follow(line.at, NodeId(node_id))

    def nudge(self) -> None:
        """Something is to be said, or was taken out of the inbox."""
        view = self._view
        if self._has_news:
            self._first_line.wake()
        if view.remote.has_news or view.wanted_clear:
            self._wake.set()
        if self.is_started and not self._has_threads:
            # Those that have begun end with the session only.
            begun = [self._asking.revive(), *(line.revive() for line in self.lines)]
            self._has_threads = all(begun)
        for orders in fetches.split(view.remote.take_orders()):
            self._order(orders)

    @property
    def _has_news(self) -> bool:
        """Whether the places are to be told something of requests."""
        view = self._view
        return bool(view.found) or view.accounts.has_records or self.hints.has_news

    def _order(self, orders: list[remote.FetchOrder]) -> None:
        """Have each place fetch its part of chunks; where the NodeActor is left alone that fails at
        once.
        """
        view, now = self._view, time.monotonic()
        results: dict[int, copies.CopyResult | None] = {}

        def take(at: int, result: copies.CopyResult | None) -> None:
            results[at] = result
            if len(results) == len(self.lines):
                in_order = [results[line.at] for line in self.lines]
                view.finish_fetch(orders, in_order, time.monotonic())

        def end(at: int, result: copies.CopyResult | None) -> None:
            """On any thread."""
            self.inbox.append(partial(take, at, result))

        for line in self.lines:
            if line.is_left_alone:
                self._num_refused += 1
                end(line.at, worker.not_done(0, len(orders), Refusal.BREAKER_OPEN))
                continue
            query = view.query(line.at)
            line.fetches.submit(orders, query.life, query.namespace, now, partial(end, line.at))
            line.wake()

    def stop(self, timeout_s: float) -> None:
        """End the threads, and the lines."""
        self._stopped.set()
        self._wake.set()
        give_up_at = time.monotonic() + timeout_s
        for line in self.lines:
            line.stop(0.0)
        for line in self.lines:
            line.stop(max(0.0, give_up_at - time.monotonic()))
        self._asking.join(timeout_s)

    # The lines' threads

    def hello(self) -> engine.EngineHello:
        space = self._space
        return replace(self._first, namespace=space.namespace, traits=space.traits)

    def heard(
        self, line: PlaceLine, query: engine.ChangesQuery, answer: engine.ChangesAnswer
    ) -> None:
        if line is not self._first_line:
            return
        naming = answer.facts.naming
        is_mine = naming is not None and naming.weights == self._weights
        if naming is not None and is_mine and naming.stamp > self._heard:
            self._naming, self._heard = naming, naming.stamp
        part = answer.part
        is_relisted = part.begins and part.end.life == query.position.life
        if self.described is not None and (is_relisted or Reason.CLEARED in part.rows.reasons):
            # What is stored again is described again; who begins anew hears of no reasons.
            self.described.clear()

    def welcomed(self, line: PlaceLine, life: int, namespace: str) -> None:
        if line is not self._first_line:
            # What waited there is old by now.
            line.told.clear()
            self._has_new_place = True
            return
        self._wanted.tell_all_again()
        self._tell_at = 0.0
        last, self._welcomed = self._welcomed, (life, namespace)
        if last != self._welcomed:
            # Sessions are of a namespace.
            self.hints.sessions.tell_again()
        if last[0] != life and self.described is not None:
            self.described.tell_again()

    def moved(self, line: PlaceLine) -> None:
        if line is self._first_line:
            # Of another cluster, perhaps, whose numbers say nothing here.
            self._orders = engine.NOTHING_ORDERED

    def next_tell(self, line: PlaceLine) -> engine.Tell | None:
        """See `LineOwner.next_tell`; the first place is told all, others what is about chunks."""
        if line is not self._first_line:
            return line.told.popleft() if line.told else None
        tell = self._first_tell()
        if tell is None:
            return None
        for other in self.lines[1:]:
            self._has_new_place |= len(other.told) == other.told.maxlen
            other.told.append(_addressed(_of_chunks(tell), other.place))
            other.wake()
        return _addressed(tell, line.place)

    def _first_tell(self) -> engine.Tell | None:
        view, now = self._view, time.monotonic()
        if self._has_new_place:
            self._has_new_place = False
            self.hints.sessions.tell_again()
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
        """Report all breakers of the engine's processes."""
        refused = measures.BreakerReport(refused=self._num_refused)
        reports = [self._breakers.report(now), refused]
        for line in self.lines:
            reports += line.breaker_reports(now)
        return joined(reports)

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
        """Return how long to wait for news, in seconds."""
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
        says_that_it_is = not is_closed or self._is_left_alone
        if question is None and not self._wants_clear and not says_that_it_is:
            return
        call = self._breakers.begin(names.SCHEDULER, time.monotonic())
        if call is None:
            return
        try:
            if question is not None or says_that_it_is:
                self._ask(question or self._view.questions([], []))
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

    def _next_question(self) -> list[engine.Ask] | None:
        """The question that has no answer yet, or the next one; one for each place."""
        view = self._view
        if self._question is not None and self._question[0].namespace == view.query(0).namespace:
            return self._question
        now = time.monotonic()
        may_repeat = now >= self._repeat_at and not self._has_answer
        if may_repeat:
            self._repeat_at = now + REPEAT_PAUSE_S
        keys = view.remote.take_questions(engine.MOST_ASKED, may_repeat)
        coming = view.remote.take_announced(engine.MOST_ASKED)
        has_some = bool(keys or coming)
        self._question = view.questions(keys, coming) if has_some else None
        return self._question

    def _ask(self, questions: list[engine.Ask]) -> None:
        began = time.monotonic()
        answers = [
            receive(self._call("ask", encode(each)), engine.AskAnswer, SENDER, "the engine")
            for each in questions
        ]
        self._question = None
        if questions[0].keys:
            self._lookups.observe(time.monotonic() - began)
            self._has_answer = True
            self.inbox.append(partial(self._take_answers, questions, answers))
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
            self.inbox.append(partial(self._view.cleared, reset, state.orders, time.monotonic()))
            self._first_line.wake()
        elif state.error or not state.is_known:
            # It is ordered anew.
            self._clear = (0, "")
            raise ClusterError(state.error or "the clearing was forgotten")


def _of_chunks(tell: engine.Tell) -> engine.Tell:
    """Leave out what is about the engine itself."""
    return engine.Tell(
        tell.life,
        tell.seq,
        tell.namespace,
        tell.found,
        tell.hints,
        tell.sessions,
        heard=tell.heard,
        weights=tell.weights,
        orders=tell.orders,
    )


def _addressed(tell: engine.Tell, place: EnginePlace) -> engine.Tell:
    """Put in the life and the namespaces that a place knows the engine by."""
    described = [
        replace(each, namespace=part_of(each.namespace, place.part)) for each in tell.described
    ]
    namespace = part_of(tell.namespace, place.part)
    return replace(tell, life=place.life, namespace=namespace, described=described)
