"""What an engine says, and to whom: to its places, and to the scheduler actor.

At most one message of each kind is under way to each; the next is made of what has gathered. What
is answered waits until the engine's next step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from raykv.base.ids import Namespace
from raykv.engine.remote import FetchOrder
from raykv.protocol.columns import Keys, Numbers, SourceRows
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.engine import (
    Ask,
    AskAnswer,
    ChangesAnswer,
    FoundKeys,
    Hints,
    Tell,
    Welcome,
)
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from raykv.base.ids import Stamp
    from tests.simulation.nodes.cluster import Cluster
    from tests.simulation.nodes.engine import PlayedEngine, Prefill

MOST_FOUND = 8
MOST_ASKED = 12
"""Keys of one message, so that a prompt takes several."""

MOST_GATHERED = 16

MOST_CHANGED = 6
"""Rows of one answer."""

FETCH_DEADLINE_S = 10.0

NOTHING_FOUND, NO_HINTS = FoundKeys(), Hints()


class PlaceTalk:
    """With one place of an engine."""

    def __init__(self, cluster: Cluster, engine: PlayedEngine, place: int) -> None:
        self._cluster = cluster
        self._engine = engine
        self._place = place
        self._node_id = engine.seats.node_ids[place]
        # The namespace in which the engine has introduced itself.
        self._known_in: Namespace | None = None
        self._hello: Call[Welcome] | None = None
        self._changes: Call[ChangesAnswer] | None = None
        self._tell: Call[bool] | None = None
        self._seq = 0
        self._untold: list[Tell] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is to be said at once."""
        return bool(self._untold) or self._known_in is None

    @property
    def feed(self) -> str:
        """The end of the wire over which it learns of changes."""
        return f"feed of {self._engine.seats.engine_id} at {self._node_id}"

    def calls(self) -> list[Call[Any]]:
        """What is under way."""
        calls: tuple[Call[Any] | None, ...] = (self._hello, self._changes, self._tell)
        return [call for call in calls if call is not None and call.is_open]

    def introduce_again(self) -> None:
        self._known_in = None

    def gather(self, found: FoundKeys, hints: Hints, sessions: tuple[SessionNews, ...]) -> None:
        """Something is to be told, with the next number."""
        self._seq += 1
        namespace = self._engine.namespace_at(self._place)
        tell = Tell(self._engine.life, self._seq, namespace, found, hints, [*sessions])
        self._untold = [*self._untold[1 - MOST_GATHERED :], tell]

    def talk(self) -> bool:
        """Say what is due; False if there is nothing to be said, or all waits for answers."""
        if self._known_in is None:
            return self._introduce()
        return any([self._ask_changes(), self._tell_more()])

    def _introduce(self) -> bool:
        if self._hello is not None and self._hello.is_open:
            return False
        hello = self._engine.hello(self._place)

        def welcome(answer: Welcome) -> None:
            assert not answer.error, answer
            if hello.namespace == self._engine.namespace_at(self._place):
                self._known_in = Namespace(hello.namespace)

        self._hello = Call(
            f"hello of {self._engine} at {self._node_id}",
            (self.feed, self._node_id),
            lambda post: self._cluster.at(self._node_id, lambda node: node.hello(hello, post)),
            welcome,
            lambda: None,
        )
        self._cluster.wire.send(self._hello)
        return True

    def _ask_changes(self) -> bool:
        if self._changes is not None and self._changes.is_open:
            return False
        query = msgspec.structs.replace(self._engine.view.query(self._place), most=MOST_CHANGED)
        self._changes = Call(
            f"changes for {self._engine} at {self._node_id}",
            (self.feed, self._node_id),
            lambda post: self._cluster.at(self._node_id, lambda node: node.changes(query, post)),
            lambda answer: self._engine.talk.news.append(lambda: self._take(answer)),
            lambda: None,
        )
        self._cluster.wire.send(self._changes)
        return True

    def _take(self, answer: ChangesAnswer) -> None:
        engine = self._engine
        engine.view.take(self._place, answer, engine.clock)
        engine.heard_at[self._place] = engine.clock
        if answer.is_known:
            engine.told[self._place].add(answer.facts.orders)
        else:
            self._known_in = None

    def _tell_more(self) -> bool:
        if not self._untold or (self._tell is not None and self._tell.is_open):
            return False
        message = self._untold.pop(0)
        self._tell = Call(
            f"tell {message.seq} of {self._engine} at {self._node_id}",
            (self.feed, self._node_id),
            lambda post: self._cluster.at(self._node_id, lambda node: node.tell(message, post)),
            lambda _: None,
            lambda: self._untold.insert(0, message),
        )
        self._cluster.wire.send(self._tell)
        return True


class EngineTalk:
    """With all whom an engine speaks to."""

    def __init__(self, cluster: Cluster, engine: PlayedEngine) -> None:
        self._cluster = cluster
        self._engine = engine
        self.places = [
            PlaceTalk(cluster, engine, place) for place in range(len(engine.seats.node_ids))
        ]
        self.news: deque[Callable[[], None]] = deque()
        self._question: Call[list[AskAnswer]] | None = None
        # That has no answer yet: it is asked until it has. One for each place.
        self._asked: list[Ask] | None = None
        self._clear: Call[Stamp] | None = None
        self._fetches: list[Call[CopyResult]] = []
        self._num_fetches = 0
        self.rng = random.Random(engine.life)

    @property
    def is_busy(self) -> bool:
        """Whether it has something to say, or waits for chunks."""
        view = self._engine.view
        open_fetches = any(call.is_open for call in self._fetches)
        wants = bool(self._asked or view.remote.has_questions or view.found or view.wanted_clear)
        talks = any(each.is_busy for each in self.places)
        return open_fetches or wants or talks

    def die(self) -> None:
        """The engine is dead."""
        calls: list[Call[Any]] = [call for each in self.places for call in each.calls()]
        for call in [*calls, self._question, self._clear, *self._fetches]:
            if call is not None:
                call.forget()

    def take_news(self) -> None:
        """What has been answered is taken in, between steps."""
        while self.news:
            self.news.popleft()()

    def introduce_again(self) -> None:
        """The engine is in another namespace."""
        for each in self.places:
            each.introduce_again()

    def talk(self) -> bool:
        """Say what is due; False if there is nothing."""
        self._gather()
        said = [each.talk() for each in self.places]
        return any([*said, self._ask(), self._order_clear()])

    def _gather(self) -> None:
        engine = self._engine
        if engine.view.found:
            self._tell(engine.view.found.take(MOST_FOUND))

    def _tell(
        self,
        found: FoundKeys = NOTHING_FOUND,
        hints: Hints = NO_HINTS,
        sessions: tuple[SessionNews, ...] = (),
    ) -> None:
        for each in self.places:
            each.gather(found, hints, sessions)

    def request_ended(self, request: Prefill) -> None:
        """Some requests belong to a session, or wish something for their chunks."""
        luck = self.rng.random()
        keys = Keys.of(list(request.blocks))
        if not keys or luck > 0.4:
            return
        if luck < 0.1:
            self._tell(hints=Hints(keys, [2.0] * len(keys)))
            return
        name = self.rng.choice(("x", "y", "z"))
        words = [SessionNews(name, SessionWord.CAME), SessionNews(name, SessionWord.USED, keys)]
        if luck < 0.2:
            words.append(SessionNews(name, SessionWord.OVER))
        elif luck < 0.3:
            words.append(SessionNews(name, SessionWord.PAUSED, pause_s=1.0, priority=1))
        self._tell(sessions=tuple(words))

    # The scheduler actor

    def _ask(self) -> bool:
        view = self._engine.view
        if self._question is not None and self._question.is_open:
            return False
        questions = self._asked
        if questions is None or questions[0].namespace != view.query(0).namespace:
            keys = view.remote.take_questions(MOST_ASKED, self.rng.random() < 0.5)
            coming = view.remote.take_announced(MOST_ASKED)
            if not keys and not coming:
                self._asked = None
                return False
            questions = view.questions(keys, coming)
        self._asked = asked = questions
        self._question = Call(
            f"{len(asked[0].keys)} questions of {self._engine}",
            (self._engine.seats.engine_id, "head"),
            lambda post: self._cluster.head.ask(asked, post),
            lambda answers: self._heard(asked, answers),
            lambda: None,
        )
        self._cluster.wire.send(self._question)
        return True

    def _heard(self, questions: list[Ask], answers: list[AskAnswer]) -> None:
        self._asked = None
        self.news.append(lambda: self._engine.view.take_answers(questions, answers))

    def _order_clear(self) -> bool:
        reset = self._engine.view.wanted_clear
        if not reset or (self._clear is not None and self._clear.is_open):
            return False
        order_id = f"reset {reset} of {self._engine.life}"
        namespace = self._engine.namespace
        engine = self._engine
        self._clear = Call(
            order_id,
            (engine.seats.engine_id, "head"),
            lambda post: self._cluster.head.order_clear(order_id, namespace, post),
            lambda stamp: self.news.append(lambda: engine.view.cleared(reset, stamp, engine.clock)),
            lambda: None,
        )
        self._cluster.wire.send(self._clear)
        return True

    # Fetches

    def order_fetches(self) -> None:
        """What other nodes have is fetched to each place."""
        orders = self._engine.view.remote.take_orders()
        if orders:
            self._fetches = [call for call in self._fetches if call.is_open]
            results: list[CopyResult | None] = [None] * len(self.places)
            waiting = set(range(len(self.places)))
            for place in range(len(self.places)):
                self._fetch(orders, place, results, waiting)

    def _fetch(
        self,
        orders: list[FetchOrder],
        place: int,
        results: list[CopyResult | None],
        waiting: set[int],
    ) -> None:
        engine, node_id = self._engine, self._engine.seats.node_ids[place]
        self._num_fetches += 1
        order = self._named(orders, place, self._num_fetches)

        def ended(result: CopyResult | None) -> None:
            results[place] = result
            waiting.discard(place)
            if not waiting:
                self.news.append(lambda: engine.view.finish_fetch(orders, results, engine.clock))

        call: Call[CopyResult] = Call(
            f"fetch {order.number} of {len(orders)} chunks for {engine}",
            (engine.seats.engine_id, node_id),
            lambda post: self._cluster.at(node_id, lambda node: node.fetches.begin(order, post)),
            ended,
            lambda: ended(None),
        )
        self._fetches.append(call)
        self._cluster.wire.send(call)

    def _named(self, orders: list[FetchOrder], place: int, number: int) -> Fetch:
        return Fetch(
            number,
            self._engine.life,
            self._engine.namespace_at(place),
            Keys.of(order.key for order in orders),
            Numbers.of(order.num_bytes for order in orders),
            SourceRows.of(order.sources[place] for order in orders),
            "",
            FETCH_DEADLINE_S,
        )
