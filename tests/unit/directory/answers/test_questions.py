"""Who has which chunk: what an engine is told, and for how long an announcement holds."""

from __future__ import annotations

import pytest

import raykv.directory.answers.questions
from raykv.base.ids import EngineId, Epoch, Key, Namespace, NodeId
from raykv.directory.answers.questions import FEW_NODES, MAX_TOLD
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.columns import Handles, Keys, Leases, Numbers, Replicas, Source
from raykv.protocol.engine import AttachEngine
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import NodeStats
from tests.fixtures.directory.desk import PAGE
from tests.fixtures.directory.desk import Desk as PlainDesk

pytestmark = pytest.mark.usefixtures("table")

EXPIRY_S = 10.0
PIN_S = 5.0
NODES = ("own", "one", "two", "three")


class Desk(PlainDesk):
    """Nodes of four one-page slots each, with an engine of the model that is named like its node.

    The engine "own" asks.
    """

    def __init__(self) -> None:
        settings = ManagerSettings(
            engine_expiry_s=EXPIRY_S, node_expiry_s=EXPIRY_S, settle_s=0.0, pin_s=PIN_S
        )
        super().__init__(BlockManager(Epoch(1), settings), asker="own")
        self.epochs = dict(zip(NODES, (7, 8, 9, 10), strict=True))
        for node in NODES:
            self.report(node)
            self.attach(node, node)

    def announce(self, engine: str, letters: str) -> Handles:
        handles = self.lease(engine, letters)
        self.sync(engine, announced=handles)
        return handles

    def ask(self, letters: str, engine: str = "own") -> Replicas:
        return self.sync(engine, asked=Keys.of([x.encode() for x in letters])).replicas

    def sources(self, letter: str, engine: str = "own") -> list[str]:
        """The nodes that are told for one key, in their order."""
        told = self.ask(letter, engine)
        return [told.sources[index].node_id for index in told.source_index]

    def pending(self, letters: str, engine: str = "own") -> str:
        return "".join(letters[position] for position in self.ask(letters, engine).pending)

    def held(self, node: str) -> str:
        place = (NodeId(node), Namespace("model"))
        return "".join(
            x for x in "abcdefgh" if self.manager.holds(*place, Key(x.encode())) is not None
        )

    def crowd(self) -> list[str]:
        """So many more nodes that their order is kept for a while; all nodes' names."""
        for number in range(FEW_NODES):
            self.join(f"other {number}")
        return list(self.epochs)

    def join(self, node: str) -> None:
        self.epochs[node] = 50
        self.report(node)
        self.attach(node, node)

    def keep_alive(self, *nodes: str) -> None:
        for node in nodes:
            self.report(node)
            self.sync(node)
        self.manager.expire(self.now)
        self.manager.check()


@pytest.fixture
def desk() -> Desk:
    return Desk()


# Answers


def test_key_that_is_nowhere_is_in_neither_list(desk: Desk) -> None:
    desk.store("one", "a")
    assert desk.ask("x") == Replicas()


def test_replica_is_told_with_its_node_its_life_and_its_place(desk: Desk) -> None:
    desk.store("two", "z")
    stored = desk.store("two", "a")
    told = desk.ask("a")
    assert told == Replicas(
        [Source("two")],
        [9],
        Numbers.of([0]),
        Numbers.of([0]),
        Numbers.of(stored.slots),
        Numbers.of(stored.generations),
    )


def test_answer_points_into_the_keys_that_were_asked_and_names_each_node_once(desk: Desk) -> None:
    one = desk.store("one", "ab")
    two = desk.store("two", "c")
    told = desk.ask("xbcya")
    assert (told.sources, told.node_epochs) == ([Source("one"), Source("two")], [8, 9])
    assert told.key_index == [1, 2, 4]
    assert told.source_index == [0, 1, 0]
    assert told.slots == [one.slots[1], two.slots[0], one.slots[0]]
    assert told.generations == [one.generations[1], two.generations[0], one.generations[0]]


def test_chunk_of_another_namespace_is_not_told(desk: Desk) -> None:
    desk.attach("second", "one", "second")
    desk.store("one", "a", engine="second", namespace="second")
    assert desk.ask("a") == Replicas()


def test_chunk_that_is_gone_is_no_longer_told(desk: Desk) -> None:
    stored = desk.store("one", "a")
    assert desk.sources("a") == ["one"]
    desk.sync("one", dropped=stored)
    assert desk.sources("a") == []


def test_repeated_question_gets_the_same_answer_again(desk: Desk) -> None:
    desk.store("one", "a")
    first = desk.sync(asked=Keys.of([b"a"]), seq=500)
    desk.sync("one", wanted={0: 4})
    assert desk.sync(asked=Keys.of([b"a"]), seq=500) == first
    assert first.replicas.sources == [Source("one")]


def test_bare_heartbeat_has_no_answers(desk: Desk) -> None:
    desk.store("one", "a")
    assert desk.sync(asked=Keys.of([b"a"]), idle=True).replicas == Replicas()


# Preference


def test_own_node_comes_first_whatever_its_load(desk: Desk) -> None:
    desk.store("one", "a")
    desk.store("own", "a")
    desk.report("own", stats=NodeStats(queued_jobs=50))
    assert desk.sources("a") == ["own", "one"]
    assert desk.sources("a", "one") == ["one", "own"]


def test_node_that_has_just_come_to_a_large_cluster_is_a_source(desk: Desk) -> None:
    desk.crowd()
    assert desk.sources("a") == []
    desk.join("late")
    desk.store("late", "a")
    assert desk.sources("a") == ["late"]


def test_node_that_has_just_left_a_large_cluster_is_none(desk: Desk) -> None:
    names = desk.crowd()
    for node in ("one", "two"):
        desk.store(node, "a")
    desk.now += EXPIRY_S + 1
    for node in set(names) - {"one"}:
        desk.report(node)
    assert desk.sources("a") == ["one", "two"]
    desk.manager.expire(desk.now)
    assert desk.sources("a") == ["two"]


def test_node_on_the_same_host_comes_before_a_less_loaded_one(desk: Desk) -> None:
    for node in ("one", "two", "three"):
        desk.store(node, "a")
    desk.report("three", hostname="host of own", stats=NodeStats(queued_jobs=50))
    assert desk.sources("a") == ["three", "one"]


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        ([(2, 0), (1, 0), (0, 0)], ["three", "two"]),
        ([(0, 2), (0, 1), (0, 0)], ["three", "two"]),
        ([(1, 2), (2, 0), (0, 4)], ["two", "one"]),
        ([(1, 0), (1, 0), (1, 0)], ["one", "three"]),
    ],
)
def test_least_loaded_nodes_are_told_and_equal_ones_by_their_names(
    desk: Desk, loads: list[tuple[int, int]], order: list[str]
) -> None:
    for node, (queued_jobs, reading) in zip(("one", "two", "three"), loads, strict=True):
        desk.store(node, "a")
        desk.report(node, stats=NodeStats(queued_jobs=queued_jobs, reading=reading))
    assert desk.sources("a") == order


def test_no_more_than_the_bound_are_told_for_a_key_and_each_key_has_its_own(desk: Desk) -> None:
    for node in NODES:
        desk.store(node, "ab")
    told = desk.ask("ab")
    assert told.key_index == [0] * MAX_TOLD + [1] * MAX_TOLD
    assert [told.sources[index].node_id for index in told.source_index] == ["own", "one"] * 2


# Pins


def fill(desk: Desk, node: str) -> None:
    """Others want all slots of a node; they are given back."""
    granted = desk.sync(node, wanted={0: 4}).granted
    desk.sync(node, released=granted)


def test_told_replica_is_not_evicted_before_it_can_be_fetched(desk: Desk) -> None:
    desk.store("one", "abcd")
    desk.ask("c")
    desk.now += PIN_S - 0.1
    fill(desk, "one")
    assert desk.held("one") == "c"
    desk.now += 0.1
    fill(desk, "one")
    assert desk.held("one") == ""


def test_replica_that_is_not_told_is_not_pinned(desk: Desk) -> None:
    for node in ("one", "two", "three"):
        desk.store(node, "a")
    assert desk.sources("a") == ["one", "three"]
    for node in ("one", "two", "three"):
        fill(desk, node)
    assert [desk.held(node) for node in ("one", "two", "three")] == ["a", "", "a"]


# Announcements


def test_announced_chunk_is_pending_for_all_who_ask(desk: Desk) -> None:
    desk.announce("one", "ab")
    assert desk.ask("xbya") == Replicas(pending=[1, 3])
    assert desk.pending("ab", engine="two") == "ab"
    assert desk.pending("ab", engine="one") == "ab"


def test_announcement_of_another_namespace_is_not_told(desk: Desk) -> None:
    desk.attach("second", "one", "second")
    desk.announce("second", "a")
    assert desk.pending("a") == ""


def test_question_in_the_message_of_an_announcement_knows_it_already(desk: Desk) -> None:
    handles = desk.lease("own", "a")
    assert desk.sync(announced=handles, asked=Keys.of([b"a"])).replicas.pending == [0]


def test_lease_that_was_not_announced_is_not_told(desk: Desk) -> None:
    desk.lease("one", "ab")
    assert desk.pending("ab") == ""


def test_announced_chunk_is_told_with_its_place_once_it_is_stored(desk: Desk) -> None:
    handles = desk.announce("one", "ab")
    desk.arrive("one", Handles(Keys.of([b"a"]), handles.slots[:1], handles.generations[:1]))
    told = desk.ask("ab")
    assert (told.sources, told.pending) == ([Source("one")], [1])
    assert told.key_index == [0]


def test_announcements_do_not_pile_up_once_their_chunks_are_stored(desk: Desk) -> None:
    handles = desk.announce("one", "ab")
    assert desk.manager._questions.num_announced == 2
    desk.arrive("one", handles)
    assert desk.manager._questions.num_announced == 0


def test_chunk_that_is_there_is_not_waited_for_because_another_node_stores_it_too(
    desk: Desk,
) -> None:
    desk.store("one", "a")
    desk.announce("two", "a")
    told = desk.ask("a")
    assert (told.sources, told.pending) == ([Source("one")], [])


def test_announcement_ends_when_the_lease_is_released(desk: Desk) -> None:
    handles = desk.announce("one", "ab")
    desk.sync("one", released=Leases([0], handles.slots[:1], handles.generations[:1]))
    assert desk.pending("ab") == "b"


def test_announcement_does_not_hold_for_a_later_lease_of_the_slot(desk: Desk) -> None:
    handles = desk.announce("one", "abcd")
    desk.sync("one", released=Leases([0] * 4, handles.slots, handles.generations))
    assert sorted(desk.lease("one", "efgh").slots) == sorted(handles.slots)
    assert desk.pending("abcdefgh") == ""


def test_announcement_ends_with_its_engine(desk: Desk) -> None:
    desk.announce("one", "a")
    desk.announce("two", "b")
    desk.manager.detach_engine(EngineId("one"))
    assert desk.pending("ab") == "b"


def test_announcement_ends_when_its_engine_goes_silent(desk: Desk) -> None:
    desk.announce("one", "a")
    desk.now += EXPIRY_S + 1
    desk.report("one")
    desk.keep_alive("own", "two", "three")
    assert desk.pending("a") == ""


def test_announcement_holds_when_its_engine_attaches_again_with_the_lease(desk: Desk) -> None:
    handles = desk.announce("one", "ab")
    held = Leases([0], handles.slots[:1], handles.generations[:1])
    message = AttachEngine(
        PROTOCOL_VERSION,
        "one",
        "one",
        "model",
        "tiny",
        1,
        {0: PAGE},
        held,
        node_epoch=desk.epochs["one"],
    )
    desk.manager.attach_engine(message, desk.now)
    assert desk.pending("ab") == "a"


@pytest.mark.parametrize("namespace", ["model", None])
def test_announcement_ends_when_its_namespace_is_cleared(desk: Desk, namespace: str | None) -> None:
    handles = desk.announce("one", "a")
    desk.manager.clear(None if namespace is None else Namespace(namespace))
    desk.arrive("one", handles)
    assert desk.ask("a") == Replicas()


def test_announcement_stays_when_another_namespace_is_cleared(desk: Desk) -> None:
    desk.announce("one", "a")
    desk.manager.clear(Namespace("second"))
    assert desk.pending("a") == "a"


def test_announcement_ends_with_its_node(desk: Desk) -> None:
    desk.announce("one", "a")
    desk.now += EXPIRY_S + 1
    desk.keep_alive("own", "two", "three")
    assert desk.pending("a") == ""


def test_announcement_does_not_hold_for_a_new_life_of_its_node(desk: Desk) -> None:
    desk.announce("one", "a")
    desk.epochs["one"] += 1
    desk.report("one")
    desk.attach("one", "one")
    desk.lease("one", "x")
    assert desk.pending("a") == ""


def test_latest_announcement_of_a_key_counts(desk: Desk) -> None:
    first = desk.announce("one", "a")
    second = desk.announce("two", "a")
    desk.sync("one", released=Leases([0], first.slots, first.generations))
    assert desk.pending("a") == "a"
    desk.sync("two", released=Leases([0], second.slots, second.generations))
    assert desk.pending("a") == ""


def test_announcement_at_a_lease_that_was_never_granted_is_not_believed(desk: Desk) -> None:
    handles = desk.lease("one", "a")
    strange = Handles(Keys.of([b"a", b"b"]), handles.slots * 2, [handles.generations[0] + 1, 0])
    desk.sync("one", announced=strange)
    assert desk.pending("ab") == ""


def test_oldest_announcements_are_forgotten_above_the_bound(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.answers.questions, "MAX_ANNOUNCED", 3)
    handles = desk.announce("one", "abc")
    assert desk.pending("abc") == "abc"
    desk.sync("one", announced=Handles(Keys.of([b"a"]), handles.slots[:1], handles.generations[:1]))
    desk.announce("two", "d")
    assert desk.pending("abcd") == "acd", "a was announced once more"


def test_announcements_that_have_ended_make_room_for_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.answers.questions, "MAX_ANNOUNCED", 3)
    handles = desk.announce("one", "abc")
    desk.sync("one", released=Leases([0], handles.slots[2:], handles.generations[2:]))
    desk.announce("two", "d")
    assert desk.pending("abcd") == "abd"


# Peers


@pytest.fixture
def alone() -> Desk:
    """All engines but "own" are gone; the nodes are still there."""
    desk = Desk()
    for engine in ("one", "two", "three"):
        desk.manager.detach_engine(EngineId(engine))
    return desk


def test_engine_alone_has_no_peers_whatever_its_own_node_holds(alone: Desk) -> None:
    alone.store("own", "ab")
    assert not alone.sync().has_peers


@pytest.mark.parametrize("node", ["own", "one"])
def test_other_engine_of_the_namespace_is_a_peer_on_any_node(alone: Desk, node: str) -> None:
    alone.attach("other", node)
    assert alone.sync().has_peers
    alone.manager.detach_engine(EngineId("other"))
    assert not alone.sync().has_peers


def test_engine_of_another_namespace_is_no_peer_nor_are_its_chunks(alone: Desk) -> None:
    alone.attach("second", "one", "second")
    alone.store("one", "a", engine="second", namespace="second")
    assert not alone.sync().has_peers


def test_node_with_chunks_of_the_namespace_is_a_peer_until_they_are_gone(alone: Desk) -> None:
    alone.attach("one", "one")
    alone.store("one", "a")
    alone.manager.detach_engine(EngineId("one"))
    assert alone.sync().has_peers
    alone.manager.clear(Namespace("model"))
    assert not alone.sync().has_peers


def test_bare_heartbeat_is_told_of_peers_too(desk: Desk) -> None:
    desk.sync(clear=1)
    reply = desk.sync(idle=True)
    assert reply.cleared == 1
    assert reply.has_peers
