"""Pins against a model: what a pin has promised stays, whatever is stored and evicted.

The model knows nothing of the bookkeeping. A pin that is accepted promises every replica that is
there at that moment, until it ends, its node is lost or its namespace is cleared; one that is
refused must have had a reason, and has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raykv.base.ids import NodeId
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Hints
from raykv.protocol.sessions import SessionWord
from tests.fixtures.directory.pinned import PAGE, SPACE, Cluster, key
from tests.fixtures.directory.tables import TABLES, use_table

SLOTS = 8
QUOTA_CHUNKS = 4
NODES = ("a", "b")
CHUNKS = range(14)

some_chunks = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=6, unique=True)
nodes = st.sampled_from(NODES)
pin_ids = st.sampled_from(("p", "q", "r"))
priorities = st.one_of(st.none(), st.none(), st.integers(1, 3))


@dataclass
class Promise:
    """Replicas, by node and number, that a pin keeps until a time."""

    replicas: set[tuple[str, int]]
    until: float


class PinsMachine(RuleBasedStateMachine):
    """Two nodes of eight slots, of which pins may take four."""

    cluster: Cluster

    @initialize()
    def begin(self) -> None:
        self.cluster = Cluster(slots=SLOTS)
        for node in NODES:
            self.cluster.add(node)
        self.promises: dict[str, Promise] = {}

    def replicas(self, numbers: list[int]) -> set[tuple[str, int]]:
        return {(node, n) for node in NODES for n in self.cluster.held(node, *numbers)}

    @rule(node=nodes, numbers=some_chunks)
    def store(self, node: str, numbers: list[int]) -> None:
        held = self.cluster.held(node, *numbers)
        self.cluster.store(node, *[n for n in numbers if n not in held])

    @rule(pin_id=pin_ids, numbers=some_chunks, ttl_s=st.sampled_from((3, 30)), priority=priorities)
    def pin(self, pin_id: str, numbers: list[int], ttl_s: int, priority: int | None) -> None:
        before = self.cluster.manager.pins.pinned(self.cluster.now)
        wanted = self.replicas(numbers)
        answer = self.cluster.pin(*numbers, pin_id=pin_id, ttl_s=ttl_s, priority=priority)
        if answer.error:
            assert self.cluster.manager.pins.pinned(self.cluster.now) == before
            kept = {node.node_id: node.kept_chunks for node in before.nodes}
            counts = [(node, sum(place == node for place, _ in wanted)) for node in NODES]
            assert any(kept[node] + count > QUOTA_CHUNKS for node, count in counts if count)
            return
        assert answer.pin is not None
        assert answer.pin.held_chunks == len({number for _, number in wanted})
        assert answer.pin.kept_bytes == len(wanted) * PAGE
        firm = wanted if priority is None else set()
        self.promises[pin_id] = Promise(firm, self.cluster.now + ttl_s)

    @rule(pin_id=pin_ids)
    def unpin(self, pin_id: str) -> None:
        known = self.promises.pop(pin_id, None)
        assert self.cluster.manager.pins.unpin(pin_id, self.cluster.now) == (known is not None)

    @rule(
        node=nodes, numbers=some_chunks, pin_s=st.sampled_from((2.0, 20.0)), favours=st.booleans()
    )
    def hint(self, node: str, numbers: list[int], pin_s: int, favours: bool) -> None:
        keys: list[bytes] = [key(number) for number in numbers]
        count = len(keys)
        hints = Hints(favoured=Keys.of(keys), priorities=[2] * count) if favours else None
        self.cluster.sync(node, hints=hints or Hints(Keys.of(keys), [pin_s] * count))

    @rule(session=st.sampled_from("xy"), word=st.sampled_from(SessionWord), numbers=some_chunks)
    def session_says(self, session: str, word: SessionWord, numbers: list[int]) -> None:
        """What sessions release and keep takes nothing from a pin."""
        pause_s = 5.0 if word is SessionWord.PAUSED else 0.0
        self.cluster.say("a", session, word, *numbers, pause_s=pause_s)

    @rule(seconds=st.sampled_from((0.5, 2, 7)))
    def wait(self, seconds: float) -> None:
        ended = self.cluster.wait(seconds)
        assert set(ended) <= self.promises.keys()
        for pin_id in ended:
            assert self.promises.pop(pin_id).until <= self.cluster.now
        for promise in self.promises.values():
            if promise.until <= self.cluster.now:
                promise.replicas.clear()

    @rule()
    def clear(self) -> None:
        self.cluster.manager.clear(SPACE)
        for node in NODES:
            self.cluster.sync(node)
        for promise in self.promises.values():
            promise.replicas.clear()

    @rule(node=nodes)
    def lose(self, node: str) -> None:
        manager = self.cluster.manager
        manager._lose(manager._nodes[NodeId(node)])
        self.cluster.add(node)
        for promise in self.promises.values():
            promise.replicas = {place for place in promise.replicas if place[0] != node}

    @invariant()
    def what_is_promised_is_there(self) -> None:
        for promise in self.promises.values():
            for node, number in promise.replicas:
                assert self.cluster.held(node, number), (node, number)

    @invariant()
    def books_are_right(self) -> None:
        self.cluster.manager.check()
        for node in self.cluster.manager.pins.pinned(self.cluster.now).nodes:
            assert node.kept_bytes <= QUOTA_CHUNKS * PAGE


@pytest.mark.parametrize("kind", TABLES)
def test_pins_keep_what_they_promise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    use_table(monkeypatch, kind)
    run_state_machine_as_test(
        PinsMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
