"""What is on a disk, against a model that shares nothing with it: sets of names."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raykv.base.clearings import Clearings
from raykv.base.ids import (
    EVERY_NAMESPACE,
    GENERATIONS_PER_EPOCH,
    Epoch,
    Generation,
    Key,
    Namespace,
    make_generation,
)
from raykv.base.shares import Share
from raykv.node.disk.index import DiskChunk, DiskIndex

A, B = Namespace("a"), Namespace("b")


def chunk(name: str, generation: int = 1) -> DiskChunk:
    return DiskChunk(Key(name.encode()), Generation(generation), 0, 4096, 7)


def index(most_bytes: int = 100) -> DiskIndex:
    return DiskIndex(most_bytes, 1)


def told(disk: DiskIndex) -> set[bytes]:
    """What a directory believes that hears everything."""
    known: dict[int, bytes] = {}
    while True:
        news = disk.news(2)
        known |= zip(news.came.places, news.came.keys, strict=True)
        for place in news.gone:
            known.pop(place, None)
        disk.heard(news.listing, news.upto)
        if news.is_last:
            return set(known.values())


def test_oldest_file_goes_first_unless_it_was_read() -> None:
    disk = index()
    for name in "xyz":
        disk.add(name, 30, A, [chunk(name)])
    first = disk.find(A, Key(b"x"))
    assert first is not None
    disk.was_read(first)
    assert disk.give_way(30) == ["y"]
    assert disk.find(A, Key(b"y")) is None
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
    disk = index()
    disk.shares = {"noisy": Share(0.0, 0.4)}
    for name in ("n1", "n2"):
        disk.add(name, 20, A, [chunk(name)], "noisy")
    assert disk.give_way(20, "noisy") == ["n1"]
    assert disk.give_way(20) == []
    assert not disk.is_full
    assert disk.can_hold(50)
    assert not disk.can_hold(50, "noisy")


def test_file_that_was_read_has_a_second_chance_among_those_of_its_tenant() -> None:
    disk = index()
    disk.shares = {"noisy": Share(0.0, 0.4)}
    for name, tenant in (("n1", "noisy"), ("o1", ""), ("n2", "noisy")):
        disk.add(name, 20, A, [chunk(name)], tenant)
    first = disk.find(A, Key(b"n1"))
    assert first is not None
    disk.was_read(first)
    assert disk.give_way(20, "noisy") == ["n2"]
    disk.add("n3", 20, A, [chunk("n3")], "noisy")
    assert disk.give_way(20, "noisy") == ["n1"], "its second chance is over"


def test_nothing_is_full_before_a_file_had_to_go() -> None:
    disk = index()
    disk.add("x", 100, A, [chunk("x")])
    assert not disk.is_full
    assert disk.give_way(1) == ["x"]
    assert disk.is_full
    assert not disk.can_hold(101)


def test_later_generation_of_a_chunk_replaces_the_earlier_one_only() -> None:
    disk = index()
    disk.add("x", 10, A, [chunk("k", 5)])
    disk.add("y", 10, A, [chunk("k", 4)])
    found = disk.find(A, Key(b"k"))
    assert found is not None
    assert found.file == "x"
    disk.add("z", 10, A, [chunk("k", 6)])
    found = disk.find(A, Key(b"k"))
    assert found is not None
    assert found.file == "z"
    assert sorted(disk.take_empty()) == ["x", "y"]
    assert disk.used_bytes == 10


def test_clearing_forgets_a_namespace_up_to_a_generation() -> None:
    disk = index()
    disk.add("x", 10, A, [chunk("old", 3), chunk("new", 4)])
    disk.add("y", 10, B, [chunk("old", 3)])
    disk.clear(Clearings({A: 3}))
    assert disk.find(A, Key(b"old")) is None
    assert disk.find(A, Key(b"new")) is not None
    assert disk.find(B, Key(b"old")) is not None
    assert disk.take_empty() == []


def test_directory_that_began_anew_is_told_everything() -> None:
    disk = index()
    disk.add("x", 10, A, [chunk("k"), chunk("l")])
    assert told(disk) == {b"k", b"l"}
    assert disk.news().came.keys == []
    disk.heard(0, 0)
    assert told(disk) == {b"k", b"l"}
    disk.drop_file("x")
    disk.heard(0, 0)
    assert told(disk) == set()


def test_news_are_repeated_until_they_were_heard() -> None:
    disk = index()
    disk.add("x", 10, A, [chunk("k"), chunk("l"), chunk("m")])
    page = disk.news(2)
    assert not page.is_last
    assert disk.news(2) == page
    # It went between being sent and being heard of: that must be told too.
    disk.drop_file("x")
    disk.heard(page.listing, page.upto)
    assert disk.news().gone == [1, 2]


def test_listing_begins_anew_when_nobody_listens() -> None:
    disk = DiskIndex(1 << 40, 1)
    for number in range(66_000):
        disk.add(f"{number}", 1, A, [chunk(f"{number}")])
    while not disk.news(100_000).is_last:
        pass
    for number in range(65_999):
        disk.drop_file(f"{number}")
    assert disk.listing == 2
    disk.heard(1, 70_000)
    assert told(disk) == {b"65999"}
    disk.check()


def test_chunk_of_a_risen_epoch_takes_the_place_of_the_earlier_one() -> None:
    disk = index()
    last, first = make_generation(Epoch(3), GENERATIONS_PER_EPOCH), make_generation(Epoch(4), 1)
    disk.add("x", 10, A, [chunk("a", last)])
    disk.add("y", 10, A, [chunk("a", first), chunk("b", first)])
    assert disk.news().came.generations == [first, first]
    disk.clear(Clearings({EVERY_NAMESPACE: last}))
    assert len(disk) == 2
    disk.clear(Clearings({EVERY_NAMESPACE: first}))
    assert len(disk) == 0


class Listening(RuleBasedStateMachine):
    """A directory hears pages in any interleaving with changes, may forget, and catches up."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = index(60)
        self.model: dict[bytes, tuple[str, int]] = {}
        self.known: dict[int, bytes] = {}
        self.listing = self.heard = self.files = 0

    @rule(names=st.sets(st.sampled_from("abcdef"), min_size=1), generation=st.integers(1, 4))
    def write(self, names: set[str], generation: int) -> None:
        gone = self.disk.give_way(20)
        self.model = {key: at for key, at in self.model.items() if at[0] not in gone}
        self.files += 1
        name = f"{self.files}"
        for each in names:
            key = each.encode()
            if key not in self.model or self.model[key][1] < generation:
                self.model[key] = (name, generation)
        self.disk.add(name, 20, A, [chunk(each, generation) for each in sorted(names)])

    @rule(upto=st.integers(1, 4))
    def clear(self, upto: int) -> None:
        self.model = {key: at for key, at in self.model.items() if at[1] > upto}
        self.disk.clear(Clearings({A: upto}))
        self.disk.take_empty()

    @rule(key=st.sampled_from("abcdef"))
    def read(self, key: str) -> None:
        entry = self.disk.find(A, Key(key.encode()))
        if entry is not None:
            self.disk.was_read(entry)

    @rule(most=st.integers(1, 3), is_answered=st.booleans())
    def hear(self, most: int, is_answered: bool) -> None:
        news = self.disk.news(most)
        if news.listing != self.listing or news.after != self.heard:
            if news.listing == self.listing and news.after != 0:
                self.disk.heard(self.listing, self.heard)
                return
            self.known, self.listing, self.heard = {}, news.listing, 0
            if news.after:
                self.disk.heard(news.listing, 0)
                return
        self.known |= zip(news.came.places, news.came.keys, strict=True)
        for place in news.gone:
            self.known.pop(place, None)
        self.heard = news.upto
        if is_answered:
            self.disk.heard(self.listing, self.heard)

    @rule()
    def forget(self) -> None:
        self.known, self.listing, self.heard = {}, 0, 0
        self.disk.heard(0, 0)

    @invariant()
    def holds(self) -> None:
        self.disk.check()
        assert len(self.disk) == len(self.model)
        for key, (name, generation) in self.model.items():
            entry = self.disk.find(A, Key(key))
            assert entry is not None
            assert (entry.file, entry.chunk.generation) == (name, generation)

    def teardown(self) -> None:
        for _ in range(200):
            self.hear(3, is_answered=True)
        assert sorted(self.known.values()) == sorted(self.model)


Listening.TestCase.settings = settings(max_examples=150, deadline=None)
test_directory_catches_up = Listening.TestCase
