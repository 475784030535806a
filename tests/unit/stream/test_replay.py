"""The directory rebuilt by its readers: from all events, or from a snapshot and what came after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

import raykv.directory.answers.snapshots
from raykv.base.ids import Epoch, Namespace, NodeId
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.columns import Handles, Keys, LostReplicas, Source
from raykv.protocol.events import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EpochBegan,
    EventPage,
    EventsMissed,
    NodeJoined,
    NodeLost,
    SnapshotPage,
    events_of,
)
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Inventory
from raykv.stream.replay import Replay
from tests.fixtures.directory.desk import PAGE
from tests.fixtures.directory.desk import Desk as PlainDesk
from tests.fixtures.keys import named_key as key

EXPIRY_S = 5.0
NODES = ("one", "two")
SLOTS = 16


# Event by event


def stored(
    name: str, slot: int = 0, generation: int = 5, node: str = "one", namespace: str = "model"
) -> BlockStored:
    return BlockStored(
        epoch=1,
        seq=9,
        node_id=node,
        namespace=namespace,
        key=key(name),
        slot=slot,
        generation=generation,
    )


def removed(name: str, generation: int = 5, node: str = "one") -> BlockRemoved:
    return BlockRemoved(
        epoch=1,
        seq=9,
        node_id=node,
        namespace="model",
        key=key(name),
        slot=0,
        generation=generation,
    )


def joined(node: str, node_epoch: int) -> NodeJoined:
    return NodeJoined(epoch=1, seq=9, node_id=node, node_epoch=node_epoch)


def lost(node: str) -> NodeLost:
    return NodeLost(epoch=1, seq=9, node_id=node, node_epoch=7)


def cleared(namespace: str, generation: int) -> CacheCleared:
    return CacheCleared(epoch=1, seq=9, namespace=namespace, generation=generation)


def replay_of(*events: BlockStored | BlockRemoved | NodeJoined | NodeLost | CacheCleared) -> Replay:
    replay = Replay()
    for event in events:
        replay.apply(event)
    return replay


def known(replay: Replay) -> dict[tuple[str, str], int]:
    """Generations by node and letter."""
    return {
        (str(node), name[:-4].decode()): generation
        for (node, _, name), (_, generation) in replay.chunks.items()
    }


def test_nothing_is_known_at_first() -> None:
    replay = Replay()
    assert (replay.nodes, replay.chunks, replay.place) == ({}, {}, (0, 0))


def test_stored_chunk_is_known_with_its_slot_and_generation() -> None:
    replay = replay_of(stored("a", slot=3, generation=5))
    assert replay.chunks == {("one", "model", key("a")): (3, 5)}


def test_chunk_that_is_stored_again_is_known_at_its_new_place() -> None:
    replay = replay_of(stored("a", 3, 5), stored("a", 4, 6))
    assert replay.chunks == {("one", "model", key("a")): (4, 6)}


@pytest.mark.parametrize(("generation", "is_left"), [(4, True), (5, False), (6, False)])
def test_chunk_is_removed_at_its_generation_or_a_later_one(generation: int, is_left: bool) -> None:
    replay = replay_of(stored("a", generation=5), stored("b"), removed("a", generation))
    assert (("one", "a") in known(replay)) == is_left
    assert ("one", "b") in known(replay)


def test_removal_on_one_node_leaves_the_other_replica() -> None:
    replay = replay_of(stored("a"), stored("a", node="two"), removed("a"))
    assert known(replay) == {("two", "a"): 5}
    assert replay.nodes_with(Namespace("model"), key("a")) == ["two"]


def test_nodes_with_a_chunk_are_all_that_have_it_in_that_namespace() -> None:
    replay = replay_of(stored("a"), stored("a", node="two"), stored("b", node="three"))
    assert replay.nodes_with(Namespace("model"), key("a")) == ["one", "two"]
    assert replay.nodes_with(Namespace("second"), key("a")) == []


def test_removal_of_what_was_never_known_changes_nothing() -> None:
    replay = replay_of(stored("a"), removed("b"), removed("a", node="two"), lost("three"))
    assert known(replay) == {("one", "a"): 5}


def test_clearing_takes_a_namespace_on_all_nodes_up_to_its_generation() -> None:
    replay = replay_of(
        stored("a", generation=4),
        stored("b", generation=5, node="two"),
        stored("c", generation=6),
        stored("d", generation=4, namespace="second"),
        cleared("model", 5),
    )
    assert known(replay) == {("one", "c"): 6, ("one", "d"): 4}


def test_lost_node_takes_its_chunks_along_and_no_others() -> None:
    replay = replay_of(
        joined("one", 7), joined("two", 8), stored("a"), stored("a", node="two"), lost("one")
    )
    assert known(replay) == {("two", "a"): 5}
    assert replay.nodes == {"two": 8}


def test_node_is_known_at_its_latest_life() -> None:
    assert replay_of(joined("one", 7), lost("one"), joined("one", 8)).nodes == {"one": 8}


def test_new_epoch_begins_with_nothing() -> None:
    replay = replay_of(joined("one", 7), stored("a"))
    replay.apply(EpochBegan(epoch=2, seq=1))
    assert (replay.nodes, replay.chunks, replay.place) == ({}, {}, (2, 1))


def test_missed_events_change_nothing() -> None:
    replay = replay_of(joined("one", 7), stored("a"))
    replay.apply(EventsMissed(epoch=2, seq=500, missed=3))
    assert (replay.nodes, known(replay)) == ({"one": 7}, {("one", "a"): 5})
    assert replay.place == (1, 9)


def test_snapshot_page_without_a_node_changes_its_place_only() -> None:
    replay = replay_of(joined("one", 7), stored("a"))
    replay.load(SnapshotPage(PROTOCOL_VERSION, 2, 17, 0, is_last=True))
    assert (replay.nodes, known(replay), replay.place) == ({"one": 7}, {("one", "a"): 5}, (2, 17))


def test_snapshot_page_adds_to_what_is_known() -> None:
    replay = replay_of(joined("one", 7), stored("a"))
    chunks = Inventory(
        ["model"], [0, 0], Keys.of([key("b"), key("c")]), [3, 4], [8, 9], [PAGE, PAGE]
    )
    replay.load(SnapshotPage(PROTOCOL_VERSION, 1, 17, 0, "one", 7, chunks))
    replay.load(SnapshotPage(PROTOCOL_VERSION, 1, 17, 0, "two", 8))
    assert known(replay) == {("one", "a"): 5, ("one", "b"): 8, ("one", "c"): 9}
    assert replay.chunks[NodeId("one"), Namespace("model"), key("c")] == (4, 9)
    assert replay.nodes == {"one": 7, "two": 8}


# With a block manager


class Desk(PlainDesk):
    """A manager, two nodes, and on each an engine of the model that is named like the node."""

    def __init__(self, max_events: int = 1000) -> None:
        settings = ManagerSettings(node_expiry_s=EXPIRY_S, max_events=max_events)
        super().__init__(BlockManager(Epoch(1), settings), 1000.0, SLOTS)
        # Where it was stored, by generation.
        self.slots: dict[int, int] = {}
        for node in NODES:
            self.report(node)
            self.attach_both(node)

    def attach_both(self, node: str) -> None:
        """An engine of each namespace."""
        for namespace in ("model", "second"):
            self.attach(f"{node} {namespace}", node, namespace)

    def key(self, letter: str) -> bytes:
        return key(letter)

    def store(
        self, node: str, letters: Sequence[str], engine: str = "", namespace: str = "model"
    ) -> Handles:
        handles = super().store(node, letters, engine or f"{node} {namespace}", namespace)
        self.slots.update(zip(handles.generations, handles.slots, strict=True))
        return handles

    def generation(self, node: str, letter: str, namespace: str = "model") -> int | None:
        return self.manager.holds(NodeId(node), Namespace(namespace), key(letter))

    def drop(self, node: str, letters: str) -> None:
        """An engine says that chunks of its node are gone."""
        rows = [(key(letter), 0, self.generation(node, letter) or 0) for letter in letters]
        keys, slots, generations = (list(column) for column in zip(*rows, strict=True))
        self.sync(f"{node} model", dropped=Handles(Keys.of(keys), slots, generations))

    def lose(self, node: str) -> None:
        self.now += EXPIRY_S + 1
        for other in NODES:
            if other != node:
                self.report(other)
        self.manager.expire(self.now)

    def rejoin(self, node: str) -> None:
        """A new life of the NodeActor, empty."""
        self.epochs[node] += 1
        self.report(node)
        self.attach_both(node)

    def directory(self) -> dict[tuple[str, str, bytes], tuple[int, int]]:
        """Slot and generation of all that is held."""
        places = [
            (node, namespace, letter)
            for node in NODES
            for namespace in ("model", "second")
            for letter in "abcdefghijklmnopqrstuvwxyz"
        ]
        held = {(node, ns, key(x)): self.generation(node, x, ns) for node, ns, x in places}
        return {place: (self.slots[gen], gen) for place, gen in held.items() if gen is not None}

    def living(self) -> dict[str, int]:
        return {node.node_id: node.epoch for node in self.manager.status("", "", self.now).nodes}

    # The readers

    def catch_up(self, replay: Replay, place: tuple[int, int]) -> None:
        """Apply all events after a place; they come over the wire."""
        raw = encode(self.manager.events(Epoch(place[0]), place[1]))
        page = decode(raw, EventPage)
        assert not page.is_gap
        for event in events_of(page):
            replay.apply(event)
        assert replay.place == (self.manager.epoch, self.manager.last_event)

    def snapshot_page(self, cursor: int = 0) -> SnapshotPage:
        page = decode(encode(self.manager.snapshot(cursor)), SnapshotPage)
        assert not page.error
        return page

    def agrees(self, replay: Replay) -> None:
        assert replay.chunks == self.directory()
        assert replay.nodes == self.living()


def test_all_events_of_an_epoch_give_the_directory() -> None:
    desk = Desk()
    desk.store("one", "abcd")
    desk.store("two", "abxyz")
    desk.store("one", "abcde", namespace="second")
    desk.store("one", "a")
    desk.drop("two", "x")
    desk.manager.clear(Namespace("second"))
    desk.store("one", "f", namespace="second")
    desk.lose("two")
    desk.rejoin("two")
    desk.store("two", "y")
    replay = Replay()
    desk.catch_up(replay, (0, 0))
    desk.agrees(replay)
    assert "".join(letter for node, letter in known(replay) if node == "one") == "dcbaf"
    assert "".join(letter for node, letter in known(replay) if node == "two") == "y"


def test_reader_of_the_old_epoch_comes_to_the_directory_when_the_epoch_rises() -> None:
    desk = Desk()
    desk.store("one", "ab")
    replay = Replay()
    desk.catch_up(replay, (0, 0))
    desk.report("two", scheduler_epoch=9)
    assert desk.manager.epoch == 10
    desk.attach("one model", "one")
    desk.store("one", "bc")
    desk.catch_up(replay, replay.place)
    desk.agrees(replay)


def nothing(desk: Desk) -> None:
    pass


def store_new(desk: Desk) -> None:
    desk.store("one", "xy")
    desk.store("two", "ax")


def remove(desk: Desk) -> None:
    desk.drop("one", "ae")
    desk.drop("two", "b")


def store_again(desk: Desk) -> None:
    desk.drop("one", "bc")
    desk.store("one", "abe")
    desk.store("two", "ab")


def store_again_and_remove(desk: Desk) -> None:
    desk.store("one", "abe")
    desk.drop("one", "abe")


def lose(desk: Desk) -> None:
    desk.lose("one")


def lose_and_rejoin(desk: Desk) -> None:
    desk.lose("one")
    desk.rejoin("one")
    desk.store("one", "ade")


def restart(desk: Desk) -> None:
    desk.rejoin("one")
    desk.store("one", "ad")


def clear(desk: Desk) -> None:
    desk.manager.clear(Namespace("model"))


def clear_and_store_again(desk: Desk) -> None:
    desk.manager.clear()
    desk.store("one", "aef")
    desk.store("two", "s", namespace="second")


def change_the_other(desk: Desk) -> None:
    desk.store("two", "acs")
    desk.drop("two", "c")


def all_of_it(desk: Desk) -> None:
    for change in (store_again, lose_and_rejoin, clear_and_store_again, restart, store_new):
        change(desk)


CHANGES = (
    nothing,
    store_new,
    remove,
    store_again,
    store_again_and_remove,
    lose,
    lose_and_rejoin,
    restart,
    clear,
    clear_and_store_again,
    all_of_it,
)


@pytest.fixture
def pages_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.answers.snapshots, "MAX_PAGE", 2)


def busy_desk() -> Desk:
    """Its snapshot has three pages of node "one" and two of "two", then the last one."""
    desk = Desk()
    desk.store("one", "abcde")
    desk.store("two", "ab")
    desk.store("two", "s", namespace="second")
    return desk


def read(
    desk: Desk, changes: Iterable[tuple[int, Callable[[Desk], None]]], *, twice: bool = False
) -> None:
    """Take a snapshot, with changes before the pages of those numbers; then catch up and compare.

    `twice`: each page is asked for once more, with the changes in between.
    """
    due = dict(changes)
    replay = Replay()
    cursor, number, is_last = 0, 0, False
    first = None
    while not is_last:
        if twice and cursor:
            replay.load(desk.snapshot_page(cursor))
        if first is not None:
            due.get(number, nothing)(desk)
        page = desk.snapshot_page(cursor)
        first = first or page
        assert (page.epoch, page.seq) == (first.epoch, first.seq)
        replay.load(page)
        cursor, is_last = page.cursor, page.is_last
        number += 1
    assert number == 6
    desk.catch_up(replay, replay.place)
    desk.agrees(replay)


@pytest.mark.usefixtures("pages_of_two")
@pytest.mark.parametrize("before_page", range(1, 6))
@pytest.mark.parametrize("change", CHANGES)
def test_snapshot_and_later_events_give_the_directory_when_it_changes_between_pages(
    change: Callable[[Desk], None], before_page: int
) -> None:
    read(busy_desk(), [(before_page, change)])


@pytest.mark.usefixtures("pages_of_two")
@pytest.mark.parametrize("change", CHANGES)
def test_snapshot_gives_the_directory_when_pages_are_asked_for_again(
    change: Callable[[Desk], None],
) -> None:
    read(busy_desk(), [(2, change), (4, change_the_other)], twice=True)


@pytest.mark.usefixtures("pages_of_two")
def test_snapshot_gives_the_directory_when_it_changes_before_every_page() -> None:
    changes = [store_new, restart, clear_and_store_again, remove, lose_and_rejoin]
    read(busy_desk(), enumerate(changes, start=1))


def test_reader_that_fell_behind_comes_to_the_directory_by_a_snapshot() -> None:
    desk = Desk(max_events=4)
    desk.store("one", "abc")
    place = (1, desk.manager.last_event)
    desk.store("two", "abc")
    assert not desk.manager.events(Epoch(1), place[1]).is_gap
    desk.store("two", "de")
    assert desk.manager.events(Epoch(1), place[1]).is_gap
    replay = Replay()
    page = desk.snapshot_page()
    while not page.is_last:
        replay.load(page)
        page = desk.snapshot_page(page.cursor)
    desk.drop("one", "a")
    desk.catch_up(replay, replay.place)
    desk.agrees(replay)


def test_source_that_has_lost_a_chunk_is_no_longer_known_to_have_it() -> None:
    desk = Desk()
    desk.store("one", "ab")
    generation = desk.generation("one", "a")
    assert generation is not None
    replay = Replay()
    desk.catch_up(replay, (0, 0))
    desk.sync(
        "two model", lost=LostReplicas([Source("one")], Keys.of([key("a")]), [generation - 1])
    )
    desk.sync(
        "two model", lost=LostReplicas([Source("strange")], Keys.of([key("a")]), [generation])
    )
    assert desk.generation("one", "a") == generation
    desk.sync("two model", lost=LostReplicas([Source("one")], Keys.of([key("a")]), [generation]))
    desk.catch_up(replay, replay.place)
    assert known(replay) == {("one", "b"): desk.generation("one", "b")}
