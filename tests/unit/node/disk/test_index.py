"""What is on a disk, against a model that shares nothing with it: names, and their files."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, Blocks, Key, Namespace, Stamp
from raykv.base.shares import Share
from raykv.node.disk.index import DiskIndex
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.listing import Listing
from raykv.node.pool.shelf import DiskChunk, ShelvedChunk
from raykv.protocol.listing import Reason, Where

A, B = Namespace("a"), Namespace("b")
HISTORY = 3


def chunk(name: str, number: int = 1, blocks: Blocks = ALL_BLOCKS) -> DiskChunk:
    return DiskChunk(Key(name.encode()), Stamp(HISTORY, number), 0, 4096, 7, blocks)


def pool_index() -> PoolIndex:
    return PoolIndex(PoolGeometry(4096, 4096), Listing(1), Floors(HISTORY))


def index(most_bytes: int = 100) -> DiskIndex:
    return DiskIndex(most_bytes, pool_index().shelf)


def found(disk: DiskIndex, key: bytes, namespace: Namespace = A) -> ShelvedChunk | None:
    return disk._shelf.find(namespace, Key(key))


def test_oldest_file_goes_first_unless_it_was_read() -> None:
    disk = index()
    for name in "xyz":
        disk.add(name, 30, A, [chunk(name)])
    disk.was_read("x")
    assert disk.give_way(30) == ["y"]
    assert found(disk, b"y") is None
    disk.add("w", 30, A, [chunk("w")])
    # Its second chance is over.
    assert disk.give_way(60) == ["z", "x"]
    disk.check()


def test_file_of_whoever_is_furthest_above_its_share_goes_first() -> None:
    disk = index()
    disk.shares = {"quiet": Share(0.5), "": Share(0.0)}
    for name in ("q1", "q2"):
        disk.add(name, 20, A, [chunk(name)], "quiet")
    for name in ("n1", "n2", "n3"):
        disk.add(name, 20, A, [chunk(name)], "unknown")
    assert disk.give_way(20) == ["n1"]
    disk.add("q3", 20, A, [chunk("q3")], "quiet")
    # The one that writes is above its guarantee now, and the others are further.
    assert disk.give_way(20, "quiet") == ["n2"]
    disk.add("q4", 20, A, [chunk("q4")], "quiet")
    assert disk.give_way(20, "quiet") == ["q1"]
    assert disk.tenant_bytes == {"quiet": 60, "unknown": 20}
    disk.check()


def test_tenant_at_its_greatest_share_gives_up_its_own_file_while_there_is_room() -> None:
    shelf = pool_index().shelf
    disk = DiskIndex(100, shelf)
    disk.shares = {"noisy": Share(0.0, 0.4)}
    for name, tenant in (("n1", "noisy"), ("o1", ""), ("n2", "noisy")):
        disk.add(name, 20, A, [chunk(name)], tenant)
    disk.was_read("n1")
    assert disk.give_way(20, "noisy") == ["n2"], "the other one has a second chance"
    disk.add("n3", 20, A, [chunk("n3")], "noisy")
    assert disk.give_way(20, "noisy") == ["n1"], "its second chance is over"
    assert disk.give_way(20) == []
    assert not shelf.is_full
    assert disk.can_hold(50)
    assert not disk.can_hold(50, "noisy")


def test_nothing_is_full_before_a_file_had_to_go() -> None:
    shelf = pool_index().shelf
    disk = DiskIndex(100, shelf)
    disk.add("x", 100, A, [chunk("x")])
    assert not shelf.is_full
    assert disk.give_way(1) == ["x"]
    assert shelf.is_full
    assert not disk.can_hold(101)


def test_later_file_with_a_chunk_has_it() -> None:
    disk = index()
    disk.add("x", 10, A, [chunk("k", 5, Blocks(0, 1))])
    disk.add("y", 10, A, [chunk("k", 5)])
    kept = found(disk, b"k")
    assert kept is not None
    assert (kept.file, kept.chunk.blocks) == ("y", ALL_BLOCKS)
    assert disk.take_empty() == ["x"]
    assert disk.used_bytes == 10
    disk.check()


def test_chunks_that_are_void_are_forgotten() -> None:
    disk, floors = index(), Floors(HISTORY)
    disk.add("x", 10, A, [chunk("old", 3), chunk("new", 4)])
    disk.add("y", 10, B, [chunk("old", 3)])
    floors.take({A: 4})
    disk.clear(floors)
    assert found(disk, b"old") is None
    assert found(disk, b"new") is not None
    assert found(disk, b"old", B) is not None
    assert disk.take_empty() == []
    floors.begin(HISTORY + 1)
    floors.take({B: 1})
    disk.clear(floors)
    assert disk.take_empty() == ["y"]


def test_listing_says_what_came_and_why_it_went() -> None:
    pool = pool_index()
    disk, listing = DiskIndex(100, pool.shelf), pool.listing
    disk.add("x", 10, A, [chunk("damaged"), chunk("evicted"), chunk("cleared"), chunk("other")])
    assert {row.where for row in pool.rows(A, [Key(b"evicted"), Key(b"other")])} == {Where.DISK}
    number = listing.number
    kept = found(disk, b"damaged")
    assert kept is not None
    # What is not that very copy stays.
    disk.drop(A, chunk("damaged"))
    disk.drop(B, kept.chunk)
    assert found(disk, b"damaged") is kept
    disk.drop(A, kept.chunk)
    floors = Floors(HISTORY)
    floors.take({A: 2})
    disk.add("y", 10, A, [chunk("evicted", 2), chunk("other", 2)])
    disk.clear(floors)
    disk.drop_file("y")
    changes, _ = listing.since(number, 100) or ([], 0)
    assert {each.record.key: each.reason for each in changes} == {
        b"damaged": Reason.DAMAGED,
        b"cleared": Reason.CLEARED,
        b"evicted": Reason.EVICTED,
        b"other": Reason.EVICTED,
    }
    assert len(pool.shelf) == 0


class Filling(RuleBasedStateMachine):
    """Files come and go in any order; the shelf has what the index has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_index()
        self.disk = DiskIndex(60, self.pool.shelf)
        self.model: dict[bytes, tuple[str, int]] = {}
        self.files = 0

    @rule(names=st.sets(st.sampled_from("abcdef"), min_size=1), number=st.integers(1, 4))
    def write(self, names: set[str], number: int) -> None:
        gone = self.disk.give_way(20)
        self.model = {key: at for key, at in self.model.items() if at[0] not in gone}
        self.files += 1
        name = f"{self.files}"
        self.model |= {each.encode(): (name, number) for each in names}
        self.disk.add(name, 20, A, [chunk(each, number) for each in sorted(names)])

    @rule(floor=st.integers(1, 4))
    def clear(self, floor: int) -> None:
        floors = Floors(HISTORY)
        floors.take({A: floor})
        self.model = {key: at for key, at in self.model.items() if at[1] >= floor}
        self.disk.clear(floors)

    @rule()
    def delete_empty(self) -> None:
        used = {name for name, _ in self.model.values()}
        assert not used & set(self.disk.take_empty())

    @rule(key=st.sampled_from("abcdef"), is_damaged=st.booleans())
    def read(self, key: str, is_damaged: bool) -> None:
        kept = found(self.disk, key.encode())
        if kept is None:
            return
        if is_damaged:
            del self.model[key.encode()]
            self.disk.drop(A, kept.chunk)
        else:
            self.disk.was_read(kept.file)

    @invariant()
    def holds(self) -> None:
        self.disk.check()
        self.pool.shelf.check()
        assert len(self.pool.shelf) == len(self.model)
        for key, (name, number) in self.model.items():
            kept = self.pool.shelf.find(A, Key(key))
            assert kept is not None
            assert (kept.file, kept.chunk.stamp) == (name, (HISTORY, number))


Filling.TestCase.settings = settings(max_examples=150, deadline=None)
test_shelf_has_what_is_on_the_disk = Filling.TestCase
