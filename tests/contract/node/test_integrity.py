"""A bit that flips in the pool is noticed, wherever the chunk goes next, and served nowhere."""

from __future__ import annotations

import ctypes
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv.node.integrity
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Key, Namespace, NodeId, Refusal
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.protocol.listing import Reason, Where
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    NAMESPACE,
    STAMP,
    WHOLE,
    Network,
    Node,
    Wanted,
    assert_right,
    content,
    question,
    wanted,
)

PAGE = SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(16 * PAGE, 4 * PAGE)
NONE, CORRUPT = Refusal.NONE, Refusal.CORRUPT


def never() -> bool:
    return False


def flip_bit(keeper: PoolKeeper, record: ChunkRecord, bit: int = 12345) -> None:
    """In the pool, behind everybody's back."""
    place = keeper.address_of(record) + bit // 8 % record.slot_bytes
    ctypes.c_ubyte.from_address(place).value ^= 1 << bit % 8


def work_off(keeper: PoolKeeper) -> None:
    """Make or compare all checksums that wait for it."""
    integrity = Integrity(keeper)
    while integrity.work(never):
        pass


def load(keeper: PoolKeeper, chunk: ChunkRecord) -> Refusal:
    (found,) = keeper.begin_read(chunk.namespace, [chunk.key], [chunk.slot_bytes])
    if isinstance(found, Refusal):
        return found
    refusal = Integrity(keeper).objection(found, never)
    keeper.end_read(found)
    return refusal


def damaged(node: Node, number: int = 1) -> ChunkRecord:
    """A chunk with a checksum that is not its own any more."""
    record = node.store(key(number))
    work_off(node.keeper)
    flip_bit(node.keeper, record)
    return record


@pytest.fixture(autouse=True)
def _every_load_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.node.integrity, "LOADS_PER_CHECK", 1)


@pytest.fixture
def node(network: Network) -> Node:
    return network.node("node")


# Local loads


def test_chosen_load_of_a_damaged_chunk_is_refused_and_the_chunk_is_gone(node: Node) -> None:
    good, bad = node.store(key(0)), damaged(node)
    listing = node.keeper.owner.index.listing
    number = listing.number
    assert load(node.keeper, good) is NONE
    assert load(node.keeper, bad) is CORRUPT
    assert listing.since(number, 10) == ([(bad, Reason.DAMAGED)], number + 1)
    (row,) = node.keeper.owner.state_of(NAMESPACE, [bad.key])[2]
    assert row.where is Where.NOWHERE
    assert load(node.keeper, bad) is Refusal.NOT_HERE
    assert node.ready() == {good.key}
    assert node.keeper.num_quarantined == 1


def test_damaged_chunk_that_is_being_read_is_not_overwritten_before_its_reader_ends(
    node: Node,
) -> None:
    bad = damaged(node)
    node.keeper.begin_read(NAMESPACE, [bad.key], [PAGE])
    assert load(node.keeper, bad) is CORRUPT
    assert node.store(key(2)).slot != bad.slot
    node.keeper.end_read(bad)
    later = node.store(key(3))
    assert later.slot == bad.slot
    work_off(node.keeper)
    assert load(node.keeper, later) is NONE


def test_one_load_of_so_many_is_compared(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = damaged(node)
    monkeypatch.setattr(raykv.node.integrity, "LOADS_PER_CHECK", 8)
    with monkeypatch.context() as seeded:
        seeded.setattr(random, "Random", partial(random.Random, 1))
        integrity = Integrity(node.keeper)
    node.keeper.begin_read(NAMESPACE, [bad.key], [PAGE])
    compared = sum(integrity.objection(bad, never) is CORRUPT for _ in range(4000))
    assert 400 < compared < 600
    node.keeper.end_read(bad)


def test_load_without_a_checksum_is_not_compared(node: Node) -> None:
    record = node.store(key(0))
    assert load(node.keeper, record) is NONE
    assert record.checksum is None


def test_load_of_a_chunk_that_goes_meanwhile_is_compared_all_the_same(node: Node) -> None:
    """Its bytes stay as long as it has a reader."""
    good, bad = node.store(key(0)), damaged(node)
    node.keeper.begin_read(NAMESPACE, [good.key, bad.key], [PAGE, PAGE])
    node.evict(good)
    node.evict(bad)
    integrity = Integrity(node.keeper)
    assert [integrity.objection(each, never) for each in (good, bad)] == [NONE, CORRUPT]
    node.keeper.end_read(good, bad)


def test_comparison_ends_when_the_job_is_cancelled(node: Node) -> None:
    record = node.store(key(0))
    work_off(node.keeper)
    node.keeper.begin_read(NAMESPACE, [record.key], [PAGE])
    assert Integrity(node.keeper).objection(record, lambda: True) is Refusal.CANCELLED
    assert record.readers == 1
    assert node.keeper.num_quarantined == 0
    node.keeper.end_read(record)


def test_checksum_is_made_later_when_something_is_more_urgent(node: Node) -> None:
    record = node.store(key(0))
    integrity = Integrity(node.keeper)
    assert integrity.work(lambda: True)
    assert (record.checksum, record.readers) == (None, 0)
    assert integrity.work(never)
    assert record.checksum is not None
    assert record.is_proven
    assert not integrity.work(never)


def test_checksum_of_a_chunk_that_is_gone_is_not_that_of_the_next_one_of_its_name(
    node: Node,
) -> None:
    record = node.store(key(0))
    node.evict(record)
    again = node.store(key(0))
    assert node.keeper.check_bytes(record, 1) is Refusal.NOT_HERE
    assert (record.checksum, again.checksum) == (None, None)
    assert node.load(again) == content(again)
    work_off(node.keeper)
    assert record.checksum is None
    assert node.keeper.num_quarantined == 0


# Other nodes


def test_damaged_chunk_is_neither_read_nor_offered(node: Node) -> None:
    bad, good = damaged(node, 2), node.store(key(3))
    reply, held = node.reader.hold(question(bad, good))
    assert (reply.refusals, held) == (bytes([CORRUPT, NONE]), [good])
    assert (bad.readers, good.readers) == (0, 1)
    node.keeper.end_read(*held)
    bad = damaged(node)
    reply, data = node.reader.read(question(bad))
    assert (reply.refusals, reply.checksums, len(data)) == (bytes([CORRUPT]), [], 0)
    assert node.keeper.num_quarantined == 2
    reply, data = node.reader.read(question(bad))
    assert (reply.refusals, len(data)) == (bytes([Refusal.NOT_HERE]), 0)


def test_read_makes_the_checksum_of_a_chunk_that_has_none(node: Node) -> None:
    record = node.store(key(1))
    reply, _ = node.reader.read(question(record))
    assert [record.checksum] == reply.checksums


def test_fetch_goes_to_the_next_source_when_the_first_one_is_damaged(
    network: Network, node: Node
) -> None:
    other, here = network.node("other", life=8), network.node("here", life=9)
    bad = damaged(node)
    other.store(key(1))
    assert here.fetch([wanted(bad, node, other)]).refusals == [NONE]
    assert_right(here, [bad])
    assert (node.keeper.num_quarantined, here.keeper.num_quarantined) == (1, 0)


def test_fetch_of_a_damaged_chunk_fails_when_nobody_else_has_it(
    network: Network, node: Node
) -> None:
    here = network.node("here", life=9)
    bad = damaged(node)
    assert here.fetch([wanted(bad, node)]).refusals == [CORRUPT]
    assert here.ready() == set()


def test_chunk_keeps_the_checksum_that_it_came_with(network: Network, node: Node) -> None:
    here = network.node("here", life=9)
    record = node.store(key(1))
    work_off(node.keeper)
    here.fetch([wanted(record, node)])
    arrived = here.record(record)
    assert arrived.checksum == record.checksum is not None
    flip_bit(here.keeper, arrived)
    assert load(here.keeper, arrived) is CORRUPT


# Pool files


CHUNKS = [Wanted(Key(b"key%d" % i), (), (1 + i % 2) * PAGE) for i in range(3)]


def open_pool(path: Path, geometry: PoolGeometry = GEOMETRY) -> PoolKeeper:
    """The next life of a pool, which knows what was cleared."""
    keeper = PoolKeeper(NodeId("node"), 1, geometry, str(path))
    keeper.recover()
    assert keeper.take_orders(OrdersDocument(STAMP), 9.0)
    return keeper


def store(keeper: PoolKeeper, chunk: Wanted) -> ChunkRecord:
    record = keeper.land(ChunkRecord(chunk.namespace, chunk.key, chunk.slot_bytes, STAMP, WHOLE))
    assert isinstance(record, ChunkRecord)
    ctypes.memmove(keeper.address_of(record), content(chunk), chunk.slot_bytes)
    keeper.landed(record, ok=True)
    assert record.state is ChunkState.READY
    return record


def fill(path: Path, chunks: list[Wanted], gone: Wanted) -> list[int]:
    """A life of a pool that stores chunks and ends, after it has had some idle time; returns where
    they are. Before, it had another one, which went.
    """
    keeper = open_pool(path)
    before = store(keeper, gone)
    work_off(keeper)
    with keeper.lock:
        keeper.owner.index.drop(before, Reason.EVICTED)
    offsets = [store(keeper, chunk).slot * PAGE for chunk in chunks]
    work_off(keeper)
    keeper.pool._region.close()
    return offsets


def served(path: Path, geometry: PoolGeometry = GEOMETRY) -> tuple[dict[Wanted, bytes], int]:
    """What the next life serves, without having been idle, and what it has quarantined. No load is
    chosen to be compared.
    """
    keeper = open_pool(path, geometry)
    integrity = Integrity(keeper)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raykv.node.integrity, "LOADS_PER_CHECK", 1 << 30)
        for record in list(keeper.owner.index.places):
            name = record.namespace, [record.key], [record.slot_bytes]
            assert keeper.begin_read(*name) == [record]
            if integrity.objection(record, never) is NONE:
                chunk = Wanted(record.key, (), record.slot_bytes, record.namespace)
                found[chunk] = ctypes.string_at(keeper.address_of(record), record.slot_bytes)
            keeper.end_read(record)
    with keeper.lock:
        keeper.owner.check()
    count = keeper.num_quarantined
    keeper.pool._region.close()
    return found, count


OFFSETS: list[int] = []
"""Where the chunks of the original are."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool file, with a slot that was overwritten, and its journal."""
    path = tmp_path_factory.mktemp("pool") / "pool"
    OFFSETS[:] = fill(path, CHUNKS, Wanted(Key(b"old"), ()))
    return path


def copy_of(original: Path, to: Path) -> tuple[Path, Path]:
    shutil.copy(original, to / "pool")
    shutil.copy(original.with_name("pool.journal"), to / "pool.journal")
    return to / "pool", to / "pool.journal"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A pool file of one's own."""
    return copy_of(original, tmp_path)[0]


def assert_true(found: dict[Wanted, bytes]) -> None:
    """Whatever is served are the bytes that were stored under that name."""
    assert set(found) <= {*CHUNKS}
    assert all(data == content(chunk) for chunk, data in found.items())


def test_sound_pool_file_is_served_whole(path: Path) -> None:
    found, quarantined = served(path)
    assert set(found) == {*CHUNKS}
    assert_true(found)
    assert quarantined == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flipped_bit_of_a_pool_file_costs_its_chunk_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, original: Path, data: st.DataObject
) -> None:
    path, _ = copy_of(original, tmp_path_factory.mktemp("flipped"))
    hit = data.draw(st.sampled_from(range(len(CHUNKS))))
    bit = data.draw(st.integers(0, CHUNKS[hit].slot_bytes * 8 - 1))
    raw = bytearray(path.read_bytes())
    raw[OFFSETS[hit] + bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    found, quarantined = served(path)
    assert set(found) == {*CHUNKS} - {CHUNKS[hit]}
    assert_true(found)
    assert quarantined == 1
    assert served(path)[1] == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_truncated_pool_file_serves_what_is_left(
    tmp_path_factory: pytest.TempPathFactory, original: Path, data: st.DataObject
) -> None:
    path, _ = copy_of(original, tmp_path_factory.mktemp("short"))
    size = data.draw(st.integers(0, GEOMETRY.pool_bytes))
    path.write_bytes(path.read_bytes()[:size])
    found, quarantined = served(path)
    assert_true(found)
    ends = [at + each.slot_bytes for at, each in zip(OFFSETS, CHUNKS, strict=True)]
    whole = {each for end, each in zip(ends, CHUNKS, strict=True) if end <= size}
    assert whole <= set(found)
    assert quarantined == 3 - len(found)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_journal_is_set_aside_or_tells_the_truth(
    tmp_path_factory: pytest.TempPathFactory, original: Path, data: st.DataObject
) -> None:
    path, journal = copy_of(original, tmp_path_factory.mktemp("journal"))
    raw = bytearray(journal.read_bytes())
    match data.draw(st.sampled_from(["truncate", "flip", "zero", "insert", "replace"])):
        case "truncate":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "flip":
            bit = data.draw(st.integers(0, 8 * len(raw) - 1))
            raw[bit // 8] ^= 1 << bit % 8
        case "zero":
            raw[data.draw(st.integers(0, len(raw) - 1)) :] = bytes(8)
        case "insert":
            at = data.draw(st.integers(0, len(raw)))
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        case "replace":
            raw = bytearray(data.draw(st.binary(max_size=200)))
    journal.write_bytes(raw)
    found, quarantined = served(path)
    assert_true(found)
    aside = journal.with_name("pool.journal.quarantined-1")
    if aside.exists():
        assert (found, quarantined) == ({}, 1)
        assert aside.read_bytes() == raw
    # And the next life begins with a sound one.
    again, quarantined = served(path)
    assert again == found
    assert quarantined == 0


def test_pool_file_of_another_pool_or_of_zeros_is_not_served(
    path: Path, original: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    fill(
        other,
        [Wanted(each.key, (), each.slot_bytes, Namespace("x")) for each in CHUNKS],
        Wanted(Key(b"old"), ()),
    )
    shutil.copy(other, path)
    assert served(path) == ({}, 3)
    path, _ = copy_of(original, tmp_path)
    path.write_bytes(bytes(GEOMETRY.pool_bytes))
    assert served(path) == ({}, 3)


def test_data_that_is_older_than_the_journal_is_not_served(path: Path, original: Path) -> None:
    keeper = open_pool(path)
    with keeper.lock:
        first = keeper.owner.index.find(NAMESPACE, CHUNKS[0].key)
        assert first is not None
        keeper.owner.index.drop(first, Reason.EVICTED)
    assert store(keeper, Wanted(Key(b"later"), ())).slot == first.slot
    work_off(keeper)
    keeper.pool._region.close()
    shutil.copy(original, path)
    found, quarantined = served(path)
    assert set(found) == {*CHUNKS[1:]}
    assert_true(found)
    assert quarantined == 1


@pytest.mark.parametrize(
    "geometry", [PoolGeometry(16 * PAGE, 2 * PAGE), PoolGeometry(32 * PAGE, 4 * PAGE)]
)
def test_pool_of_another_layout_is_set_aside_and_counted(
    path: Path, geometry: PoolGeometry
) -> None:
    journal = path.with_name("pool.journal")
    raw = journal.read_bytes()
    assert served(path, geometry) == ({}, 1)
    assert journal.with_name("pool.journal.quarantined-1").read_bytes() == raw


def test_number_of_journals_that_are_kept_is_bounded(path: Path, tmp_path: Path) -> None:
    journal = path.with_name("pool.journal")
    for number in range(9):
        journal.write_bytes(b"damaged %d" % number)
        assert served(path) == ({}, 1)
    kept = sorted(file.read_bytes() for file in tmp_path.glob("*.quarantined-*"))
    assert kept == [b"damaged %d" % number for number in range(5, 9)]


def test_idle_time_finds_damage_that_nobody_has_asked_for(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[OFFSETS[1]] ^= 1
    path.write_bytes(raw)
    keeper = open_pool(path)
    records = list(keeper.owner.index.places)
    assert [record.is_proven for record in records] == [False] * 3
    work_off(keeper)
    left = list(keeper.owner.index.places)
    assert {record.key for record in left} == {CHUNKS[0].key, CHUNKS[2].key}
    assert all(record.is_proven for record in left)
    assert keeper.num_quarantined == 1
    keeper.pool._region.close()


def test_restored_chunk_is_compared_once_before_it_goes_to_another_node(
    network: Network, path: Path
) -> None:
    raw = bytearray(path.read_bytes())
    raw[OFFSETS[0]] ^= 1
    path.write_bytes(raw)
    node = network.node("node")
    node.keeper.pool._region.close()
    node.use(open_pool(path))
    records = {record.key: record for record in node.records()}
    bad, good, other = (records[chunk.key] for chunk in CHUNKS)
    for record, expected in ((bad, CORRUPT), (good, NONE), (good, NONE)):
        reply, data = node.reader.read(question(record))
        assert reply.refusals == bytes([expected])
        assert data.tobytes() == (b"" if expected else content(record))
    assert (good.is_proven, other.is_proven) == (True, False)
