"""Snapshots of the directory: their pages, how long they are kept, what a page tells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raykv.directory.answers.snapshots
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Epoch, Generation, Key, Namespace, NodeId, Slot
from raykv.directory.answers.snapshots import MAX_OPEN, Snapshots
from raykv.directory.book import PoolBook
from raykv.directory.members import Node
from raykv.directory.table.protocol import TableChunk
from raykv.protocol.events import SnapshotPage
from raykv.protocol.framing import decode, encode
from tests.fixtures.directory.tables import default_table

pytestmark = pytest.mark.usefixtures("table")

PAGE = SLOT_ALIGNMENT
MODEL = Namespace("model")
EPOCH, SEQ = 4, 17


@pytest.fixture(autouse=True)
def two_chunks_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.answers.snapshots, "MAX_PAGE", 2)


def node(name: str, keys: str = "", epoch: int = 7) -> Node:
    """A node that holds a chunk for each letter."""
    tables = default_table()
    table = tables.add_node(NodeId(name), PoolGeometry(64 * PAGE, 64 * PAGE))
    book = PoolBook(table, lambda _: None)
    made = Node(NodeId(name), Epoch(epoch), book, last_report=0.0, settled_at=0.0)
    for number, letter in enumerate(keys):
        hold(made, letter, number + 1)
    return made


def lend(node: Node, generation: int) -> Slot:
    node.book.make_room(PAGE, 1, 0.0)
    (slot,) = node.book.table.lend(PAGE, 1, EngineId("engine"), 0, Generation(generation))
    return slot


def hold(node: Node, letter: str, generation: int, namespace: str = "model") -> None:
    slot = lend(node, generation)
    name = (Namespace(namespace), Key(letter.encode()))
    node.book.hold(name, TableChunk(slot, Generation(generation), PAGE))


class Reader:
    """One snapshot of `nodes`, read page by page."""

    def __init__(self, snapshots: Snapshots, *nodes: Node) -> None:
        self.snapshots = snapshots
        self.nodes = {node.node_id: node for node in nodes}
        self.cursor = snapshots.begin(EPOCH, SEQ, list(nodes))

    def look(self) -> SnapshotPage:
        return self.snapshots.page(self.cursor, self.nodes)

    def next(self) -> SnapshotPage:
        page = self.look()
        self.cursor = page.cursor
        return page

    def rest(self) -> Iterator[SnapshotPage]:
        """All pages up to the last one, which has no chunks."""
        while not (page := self.next()).is_last:
            assert not page.error
            yield page


def told(page: SnapshotPage) -> str:
    return b"".join(page.chunks.keys).decode()


def test_snapshot_tells_all_chunks_of_all_nodes_page_by_page() -> None:
    reader = Reader(Snapshots(), node("one", "abcde"), node("two", "xy", epoch=8))
    pages = [(page.node_id, page.node_epoch, told(page)) for page in reader.rest()]
    assert pages == [
        ("one", 7, "ab"),
        ("one", 7, "cd"),
        ("one", 7, "e"),
        ("two", 8, "xy"),
    ]


def test_node_without_chunks_has_a_page_too() -> None:
    reader = Reader(Snapshots(), node("one"), node("two", "x"), node("three"))
    pages = [(page.node_id, told(page)) for page in reader.rest()]
    assert pages == [("one", ""), ("two", "x"), ("three", "")]


def test_first_page_is_the_last_one_when_there_are_no_nodes() -> None:
    page = Reader(Snapshots()).look()
    assert page.is_last
    assert (page.epoch, page.seq, page.node_id, page.error) == (EPOCH, SEQ, "", "")


def test_every_page_has_the_place_at_which_the_snapshot_began() -> None:
    reader = Reader(Snapshots(), node("one", "abc"))
    pages = [reader.next() for _ in range(3)]
    assert [page.is_last for page in pages] == [False, False, True]
    assert {(page.epoch, page.seq) for page in pages} == {(EPOCH, SEQ)}


def test_page_can_be_asked_for_again() -> None:
    reader = Reader(Snapshots(), node("one", "abc"), node("two", "x"))
    for _ in range(4):
        assert reader.look() == reader.look()
        reader.next()
    assert reader.look().is_last


def test_page_names_place_and_size_of_each_chunk_over_the_wire() -> None:
    one = node("one", "a")
    hold(one, "b", 9, "second")
    page = decode(encode(Reader(Snapshots(), one).look()), SnapshotPage)
    assert (page.epoch, page.seq, page.node_id, page.node_epoch) == (EPOCH, SEQ, "one", 7)
    assert page.chunks.namespaces == ["model", "second"]
    assert page.chunks.namespace_index == [0, 1]
    assert page.chunks.keys == [b"a", b"b"]
    assert page.chunks.slots == [0, 1]
    assert page.chunks.generations == [1, 9]
    assert page.chunks.slot_bytes == [PAGE, PAGE]


# What happens meanwhile


def test_page_leaves_out_what_is_gone_and_what_came_later() -> None:
    one = node("one", "abcd")
    reader = Reader(Snapshots(), one)
    one.book.drop(MODEL, Key(b"a"))
    hold(one, "e", 9)
    assert [told(page) for page in reader.rest()] == ["b", "cd"]


def test_page_tells_a_chunk_as_it_is_held_now() -> None:
    one = node("one", "ab")
    reader = Reader(Snapshots(), one)
    hold(one, "a", 9)
    page = reader.look()
    generations = dict(zip(page.chunks.keys, page.chunks.generations, strict=True))
    assert generations[b"b"] == 2
    # A table may leave the new place of a chunk to the event that tells it.
    assert generations.get(b"a", 9) == 9


def test_pages_of_a_node_that_is_gone_are_empty_and_the_others_are_told() -> None:
    reader = Reader(Snapshots(), node("one", "abc"), node("two", "x"))
    assert told(reader.next()) == "ab"
    del reader.nodes[NodeId("one")]
    assert [(page.node_id, told(page)) for page in reader.rest()] == [("one", ""), ("two", "x")]


def test_page_of_an_earlier_life_tells_nothing_of_the_later_one() -> None:
    reader = Reader(Snapshots(), node("one", "ab"))
    reader.nodes[NodeId("one")] = node("one", "ab", epoch=8)
    page = reader.look()
    assert (page.node_id, page.node_epoch, told(page)) == ("one", 7, "")


def test_snapshot_is_of_the_nodes_that_were_there_when_it_began() -> None:
    reader = Reader(Snapshots(), node("one", "a"))
    reader.nodes[NodeId("two")] = node("two", "x")
    assert [told(page) for page in reader.rest()] == ["a"]


def test_leased_slot_is_no_chunk() -> None:
    one = node("one")
    lend(one, 3)
    assert [told(page) for page in Reader(Snapshots(), one).rest()] == [""]


# Several at a time


def test_open_snapshots_do_not_mix() -> None:
    snapshots = Snapshots()
    one = node("one", "abc")
    early = Reader(snapshots, one)
    early.next()
    hold(one, "d", 9)
    late = Reader(snapshots, one)
    assert told(late.next()) == "ab"
    assert told(early.next()) == "c"
    assert told(late.next()) == "cd"
    assert early.look().is_last
    assert late.look().is_last


def test_oldest_snapshot_is_given_up_for_a_new_one_above_the_bound() -> None:
    snapshots = Snapshots()
    readers = [Reader(snapshots, node("one", "abc")) for _ in range(MAX_OPEN)]
    assert [told(reader.next()) for reader in readers] == ["ab"] * MAX_OPEN
    Reader(snapshots, node("one"))
    page = readers[0].look()
    assert "begin anew" in page.error
    assert not page.is_last
    assert page.node_id == ""
    assert [told(reader.next()) for reader in readers[1:]] == ["c"] * (MAX_OPEN - 1)


@pytest.mark.parametrize("cursor", [1, 5 << 40, (5 << 40) + 3])
def test_cursor_that_no_snapshot_gave_out_is_an_error(cursor: int) -> None:
    snapshots = Snapshots()
    Reader(snapshots, node("one", "abc"))
    assert snapshots.page(cursor, {}).error


def test_snapshot_that_was_read_to_its_end_can_be_read_again() -> None:
    reader = Reader(Snapshots(), node("one", "abc"))
    first = reader.cursor
    before = list(reader.rest())
    reader.cursor = first
    assert list(reader.rest()) == before
