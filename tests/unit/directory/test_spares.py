"""Eviction: a chunk that another node has too goes first, the last replica of one goes later."""

from __future__ import annotations

import pytest

import raykv.directory.manager
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import EngineId, Epoch, Generation, Namespace, NodeId
from raykv.directory.book import PoolBook
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.table.dicts import DictTable
from raykv.directory.table.policies import POLICIES
from raykv.directory.table.protocol import Changes, Name, TableChunk
from raykv.lab.bench.s3fifo import S3FIFO
from raykv.protocol.columns import Handles, Keys, LostReplicas, Source
from raykv.protocol.engine import AttachEngine
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import Inventory
from tests.fixtures.directory.desk import PAGE, name
from tests.fixtures.directory.desk import Desk as PlainDesk
from tests.fixtures.directory.tables import default_table

pytestmark = pytest.mark.usefixtures("table")

EXPIRY_S = 10.0
PIN_S = 5.0
NOW = 100.0
MODEL, SECOND = Namespace("model"), Namespace("second")


# The book of one pool


class Book(PoolBook):
    """A pool of `slabs` slabs of four pages, full of one-page chunks; it lists what goes.

    Another node, with room for all, has the `spares` too.
    """

    def __init__(self, letters: str, spares: str = "", slabs: int = 1) -> None:
        table = default_table()
        geometry = PoolGeometry(slabs * 4 * PAGE, 4 * PAGE)
        super().__init__(table.add_node(NodeId("this"), geometry), self._note)
        geometry = PoolGeometry(64 * PAGE, 64 * PAGE)
        self.other = PoolBook(table.add_node(NodeId("other"), geometry), lambda _: None)
        self.gone = ""
        self.generation = 0
        for letter in letters:
            self.put(letter)
        for letter in spares:
            self.set_spare(name(letter), True)

    def _note(self, changes: Changes) -> None:
        self.gone += "" if changes.stored else b"".join(changes.keys).decode()

    def put(self, letter: str, pages: int = 1, namespace: Namespace = MODEL) -> None:
        self.generation += 1
        put(self, name(letter, namespace), self.generation, pages * PAGE)
        self.check()

    def set_spare(self, name: Name, is_spare: bool) -> None:
        """Have a chunk on the other node too, or not any more."""
        if is_spare:
            put(self.other, name, self.generation, PAGE)
        else:
            self.other.drop(*name)

    def evict(self, count: int, now: float = NOW) -> str:
        """Letters of those that go for so many free slots; the slots are given back."""
        self.gone = ""
        self.make_room(PAGE, count, now)
        for slot in self.table.lend(PAGE, count, EngineId("engine"), 0, Generation(1)):
            self.table.end_lease(slot, Generation(1))
        self.check()
        return self.gone


def put(book: PoolBook, name: Name, generation: int, slot_bytes: int) -> None:
    book.make_room(slot_bytes, 1, NOW)
    (slot,) = book.table.lend(slot_bytes, 1, EngineId("engine"), 0, Generation(generation))
    book.hold(name, TableChunk(slot, Generation(generation), slot_bytes))


@pytest.mark.parametrize(
    ("spares", "order"), [("", "abcd"), ("c", "cabd"), ("db", "dbac"), ("abcd", "abcd")]
)
def test_spare_chunks_are_given_up_first_and_then_the_others(spares: str, order: str) -> None:
    assert Book("abcd", spares).evict(4) == order


def test_only_as_many_are_given_up_as_are_wanted() -> None:
    book = Book("abcd", "cd")
    assert book.evict(1) == "c"
    assert book.evict(3) == "da"


def test_least_recently_used_spare_goes_first_and_a_used_one_is_still_a_spare() -> None:
    book = Book("abcd", "abc")
    book.table.touch(MODEL, [b"a"])
    assert book.evict(4) == "bcad"


def test_use_of_an_ordinary_chunk_counts_among_the_ordinary_ones() -> None:
    book = Book("abcd", "d")
    book.table.touch(MODEL, [b"a"])
    assert book.evict(4) == "dbca"


def test_chunk_is_an_ordinary_one_again_when_it_is_no_spare_any_more() -> None:
    book = Book("abcd", "ab")
    book.set_spare(name("a"), False)
    assert book.evict(4) == "bcda"


def test_chunk_that_is_stored_anew_is_a_spare_if_another_node_still_has_it() -> None:
    book = Book("abcd", "a")
    book.drop(*name("a"))
    book.put("a")
    assert book.evict(4) == "abcd"


def test_chunk_that_is_stored_anew_is_no_spare_if_nobody_else_has_it_any_more() -> None:
    book = Book("abcd", "a")
    book.drop(*name("a"))
    book.set_spare(name("a"), False)
    book.put("a")
    assert book.evict(4) == "bcda"


def test_spare_that_is_not_held_here_is_not_noted() -> None:
    book = Book("abcd")
    book.set_spare(name("e"), True)
    book.set_spare(name("a", SECOND), True)
    book.check()
    assert book.evict(4) == "abcd"


@pytest.mark.parametrize(
    ("spares", "released", "order"),
    [("", "", "abcd"), ("", "db", "dbac"), ("a", "dc", "dcab"), ("ab", "cb", "cbad")],
)
def test_released_chunks_are_given_up_before_all_others_in_their_order(
    spares: str, released: str, order: str
) -> None:
    book = Book("abcd", spares)
    book.release(MODEL, [letter.encode() for letter in released])
    assert book.evict(4) == order


def test_chunk_that_is_released_again_is_given_up_after_those_released_meanwhile() -> None:
    book = Book("abcd")
    for letter in (b"c", b"d", b"c"):
        book.release(MODEL, [letter])
    assert book.evict(4) == "dcab"


@pytest.mark.parametrize(
    ("spares", "order"), [("", "dbca"), ("a", "dabc"), ("ab", "dbac"), ("d", "dbca")]
)
def test_released_chunk_that_is_used_again_is_an_ordinary_one_or_a_spare(
    spares: str, order: str
) -> None:
    book = Book("abcd", spares)
    book.release(MODEL, [b"a", b"d"])
    book.table.touch(MODEL, [b"a"])
    assert book.evict(4) == order


def test_released_chunk_goes_first_whether_another_node_gets_it_or_loses_it() -> None:
    book = Book("abcd", "c")
    book.release(MODEL, [b"c", b"d"])
    book.set_spare(name("c"), False)
    book.set_spare(name("d"), True)
    book.check()
    assert book.evict(4) == "cdab"


def test_released_chunk_that_is_pinned_is_given_up_when_the_pin_is_over() -> None:
    book = Book("abcd")
    book.release(MODEL, [b"d"])
    book.table.pin(MODEL, [b"d"], NOW + PIN_S)
    assert book.evict(1) == "a"
    assert book.evict(2, NOW + PIN_S) == "d"


def test_release_of_chunks_that_are_not_held_changes_nothing() -> None:
    book = Book("abcd", "b")
    book.release(MODEL, [b"e"])
    book.release(SECOND, [b"a"])
    book.drop(*name("a"))
    book.put("a")
    assert book.evict(4) == "bcda"


def test_release_outlives_a_chunk_no_longer_than_the_chunk_is_held() -> None:
    book = Book("abcd")
    book.release(MODEL, [b"d"])
    book.drop(*name("d"))
    book.put("d")
    assert book.evict(4) == "abcd"


@pytest.fixture
def s3fifo(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that remembers what it has evicted, in place of `table`."""
    monkeypatch.setitem(POLICIES, "s3fifo", S3FIFO)
    monkeypatch.setattr(raykv.directory.manager, "DictTable", lambda _: DictTable("s3fifo"))


@pytest.mark.usefixtures("s3fifo")
def test_policy_may_remember_a_chunk_that_was_evicted_but_not_one_that_was_lost() -> None:
    book = Book("abcd")
    assert book.evict(1) == "a"
    book.drop(*name("b"))
    book.put("a")
    book.put("b")
    assert book.evict(4) == "cdba"


@pytest.mark.usefixtures("s3fifo")
def test_policy_may_remember_a_chunk_while_it_is_a_spare() -> None:
    book = Book("abcde", "a", slabs=2)
    book.set_spare(name("a"), False)
    book.put("f")
    book.put("g")
    book.put("h")
    assert book.evict(8) == "bcdefgha"


def test_pinned_spare_stays_and_an_ordinary_chunk_goes_instead() -> None:
    book = Book("abcd", "a")
    book.table.pin(MODEL, [b"a"], NOW + 1)
    assert book.evict(2) == "bc"
    assert book.evict(4, now=NOW + 1) == "ad"


def test_book_has_room_for_no_more_when_all_else_is_pinned() -> None:
    book = Book("abcd", "ab")
    for letter in "abc":
        book.table.pin(MODEL, [letter.encode()], NOW + 1)
    assert book.evict(4) == "d"
    assert book.num_chunks == 3


def test_cleared_namespace_leaves_no_spares_behind() -> None:
    book = Book("ab", "ab")
    book.put("a", namespace=SECOND)
    book.set_spare(name("a", SECOND), True)
    book.table.clear(MODEL)
    book.check()
    assert book.names() == [name("a", SECOND)]
    assert book.evict(4) == "a"


def test_spares_of_a_slab_that_is_overwritten_or_dropped_are_forgotten() -> None:
    book = Book("abcd", "bd")
    chunk = book.find(*name("b"))
    assert chunk is not None
    book.drop_overwritten([TableChunk(chunk.slot, Generation(9), PAGE)])
    book.drop(*name("d"))
    book.check()
    assert book.evict(4) == "ac"


def test_slab_with_spares_moves_to_another_slot_size() -> None:
    book = Book("abcdefgh", "aceg", slabs=2)
    book.put("x", pages=2)
    assert sorted(book.gone) == list("abcd")
    book.set_spare(name("x"), True)
    book.check()
    book.put("y", pages=2)
    book.put("z", pages=2)
    assert book.gone[-1] == "x", "the other slab is the one-page chunks' fair share"
    assert book.evict(4) == "egfh"


def test_pinned_spare_keeps_its_slab_where_it_is() -> None:
    book = Book("abcdefgh", "ae", slabs=2)
    book.table.pin(MODEL, [b"a"], NOW + 1)
    book.put("x", pages=2)
    assert sorted(book.gone) == list("efgh")


# All nodes


class Desk(PlainDesk):
    """Three nodes of four one-page slots each, with an engine that is named like its node."""

    def __init__(self) -> None:
        settings = ManagerSettings(
            engine_expiry_s=EXPIRY_S, node_expiry_s=EXPIRY_S, settle_s=0.0, pin_s=PIN_S
        )
        super().__init__(BlockManager(Epoch(1), settings), NOW)
        for node in ("one", "two", "three"):
            self.join(node)

    def join(self, node: str) -> None:
        """A life of a NodeActor begins, with an empty pool."""
        self.epochs[node] = self.epochs.get(node, 6) + 1
        self.report(node)
        self.attach(node, node)

    def held(self, node: str) -> str:
        letters = "abcdefgh"
        return "".join(x for x in letters if self.generation(node, x) is not None)

    def generation(self, node: str, letter: str) -> int | None:
        return self.manager.holds(NodeId(node), *name(letter))

    def evict(self, node: str, count: int) -> str:
        """Letters of those that a node gives up for so many slots."""
        before = self.held(node)
        granted = self.sync(node, wanted={0: count}).granted
        self.sync(node, released=granted)
        return "".join(letter for letter in before if letter not in self.held(node))

    def order(self, node: str) -> str:
        """In which order a full node gives up what it has."""
        return "".join(self.evict(node, count) for count in range(1, 5))

    def handles(self, node: str, letter: str) -> Handles:
        return Handles(Keys.of([letter.encode()]), [0], [self.generation(node, letter) or 0])


@pytest.fixture
def desk() -> Desk:
    """Nodes "one" with the chunks abcd and "two" with c and b."""
    made = Desk()
    made.store("one", "abcd")
    made.store("two", "cb")
    return made


def test_chunk_that_another_node_has_too_goes_first(desk: Desk) -> None:
    assert desk.order("one") == "cbad"


def test_chunk_of_another_namespace_is_no_replica() -> None:
    desk = Desk()
    desk.store("one", "abcd")
    answer = desk.manager.attach_engine(
        AttachEngine(PROTOCOL_VERSION, "second", "two", SECOND, "tiny", 1, {0: PAGE}), desk.now
    )
    assert not answer.error
    granted = desk.sync("second", wanted={0: 1}).granted
    columns = (granted.slots, granted.generations, [PAGE])
    desk.report("two", Inventory(["second"], [0], Keys.of([b"c"]), *columns))
    assert desk.order("one") == "abcd"


def test_spare_that_an_engine_uses_goes_after_the_other_spares(desk: Desk) -> None:
    desk.sync("one", touched=Keys.of([b"c"]))
    assert desk.order("one") == "bcad"


def test_newcomer_and_the_one_that_was_there_are_both_spares(desk: Desk) -> None:
    desk.store("three", "efga")
    assert desk.evict("three", 1) == "a"
    desk.store("three", "b")
    assert desk.evict("three", 1) == "b"


def test_chunk_is_an_ordinary_one_again_when_the_other_replica_is_evicted(desk: Desk) -> None:
    assert desk.evict("two", 3) == "c"
    assert desk.order("one") == "badc"


def test_chunk_is_an_ordinary_one_again_when_the_other_replica_is_said_to_be_gone(
    desk: Desk,
) -> None:
    desk.sync("two", dropped=desk.handles("two", "c"))
    assert desk.evict("one", 1) == "b"


def test_chunk_is_an_ordinary_one_again_when_a_fetch_did_not_find_the_other_replica(
    desk: Desk,
) -> None:
    gone = desk.handles("two", "c")
    desk.sync("three", lost=LostReplicas([Source("two")], gone.keys, gone.generations))
    assert desk.evict("one", 1) == "b"


def test_chunk_is_an_ordinary_one_again_when_the_other_node_is_lost(desk: Desk) -> None:
    desk.now += EXPIRY_S + 1
    for node in ("one", "three"):
        desk.report(node)
        desk.sync(node)
    desk.manager.expire(desk.now)
    desk.manager.check()
    assert desk.held("two") == ""
    assert desk.order("one") == "adcb"


def test_chunk_is_an_ordinary_one_again_when_the_other_node_begins_a_new_life(desk: Desk) -> None:
    desk.join("two")
    assert desk.order("one") == "adcb"


def test_replica_that_a_node_brings_along_makes_spares() -> None:
    desk = Desk()
    desk.store("one", "abcd")
    generation = desk.generation("one", "c")
    assert generation is not None
    desk.epochs["two"] += 1
    desk.report("two", highest_generation=generation)
    rows = Inventory(["model"], [0], Keys.of([b"c"]), [0], [generation - 1], [PAGE])
    desk.report("two", rows, highest_generation=generation, page=1, last_page=True)
    assert desk.held("two") == "c"
    assert desk.order("one") == "cabd"


def test_chunk_with_three_replicas_is_a_spare_until_one_is_left() -> None:
    desk = Desk()
    desk.store("one", "abcd")
    desk.store("two", "c")
    desk.store("three", "ecfg")
    assert desk.evict("two", 4) == "c"
    assert desk.evict("three", 1) == "c"
    assert desk.order("one") == "abdc"


def test_new_replica_of_a_chunk_with_two_leaves_their_order_as_it_is(desk: Desk) -> None:
    desk.store("three", "c")
    assert desk.order("one") == "cbad"


def test_lost_replica_of_a_chunk_with_three_leaves_the_order_of_the_others_as_it_is(
    desk: Desk,
) -> None:
    desk.store("three", "c")
    desk.sync("three", dropped=desk.handles("three", "c"))
    assert desk.order("one") == "cbad"


def test_chunk_that_is_stored_again_on_a_node_stays_a_spare_on_both(desk: Desk) -> None:
    desk.store("one", "b")
    assert desk.held("one") == "abd", "c went for it"
    assert desk.evict("two", 3) == "b"
    desk.store("two", "b")
    assert desk.evict("one", 2) == "b"


def test_replicas_of_a_cleared_namespace_are_forgotten(desk: Desk) -> None:
    desk.manager.clear(MODEL)
    desk.store("one", "bcda")
    assert desk.order("one") == "bcda"


def test_pinned_spare_stays_until_its_time_is_over(desk: Desk) -> None:
    desk.sync("one", pinned=Keys.of([b"c", b"b"]))
    assert desk.evict("one", 4) == "ad"
    desk.now += PIN_S
    assert desk.evict("one", 4) == "bc"
