"""A bit that flips in the pool is noticed, wherever the chunk goes next, and served nowhere."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    NO_BLOCKS,
    SLOT_ALIGNMENT,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Seal,
    Slot,
)
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.slots import SlotState
from raykv.protocol.columns import Keys, Source
from raykv.protocol.node import FailedStores
from raykv.protocol.peer import ReadRequest
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    NAMESPACE,
    Network,
    Node,
    assert_right,
    content,
    refusals,
)

PAGE = SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(16 * PAGE, 4 * PAGE)
NONE, CORRUPT = Refusal.NONE, Refusal.CORRUPT


def never() -> bool:
    return False


def flip_bit(keeper: PoolKeeper, name: ChunkName, bit: int = 12345) -> None:
    """In the pool, behind everybody's back."""
    place = keeper.pool.address + name.slot * PAGE + bit // 8 % name.slot_bytes
    ctypes.c_ubyte.from_address(place).value ^= 1 << bit % 8


def work_off(keeper: PoolKeeper) -> None:
    """Make or compare all checksums that wait for it."""
    integrity = Integrity(keeper)
    while integrity.work(never):
        pass


def load(keeper: PoolKeeper, name: ChunkName, loads_per_check: int) -> Refusal:
    (refusal,) = Integrity(keeper, loads_per_check).begin_loads([name], [NO_BLOCKS], never)
    if refusal is NONE:
        keeper.end_load(name)
    return refusal


@pytest.fixture
def node(network: Network) -> Node:
    return network.node("node")


# Local loads


def test_chosen_load_of_a_damaged_chunk_is_refused_and_the_chunk_is_gone(node: Node) -> None:
    good, bad = node.store(key(0)), node.store(key(1))
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    assert load(node.keeper, good, loads_per_check=1) is NONE
    assert load(node.keeper, bad, loads_per_check=1) is CORRUPT
    assert load(node.keeper, bad, loads_per_check=1) is Refusal.STALE
    assert node.ready() == {good}
    assert node.keeper.num_quarantined == 1
    assert CORRUPT.is_final


def test_directory_is_told_of_a_quarantined_chunk_as_of_a_later_store_that_failed(
    node: Node,
) -> None:
    bad = node.store(key(1), 2 * PAGE)
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    assert load(node.keeper, bad, 1) is CORRUPT
    told = node.keeper.take_failed(10)
    assert told == FailedStores([bad.slot], [bad.generation + 1], [bad.slot_bytes])


def test_slot_of_a_quarantined_chunk_takes_a_later_store_and_no_earlier_one(node: Node) -> None:
    bad = node.store(key(1))
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    assert load(node.keeper, bad, 1) is CORRUPT
    assert node.keeper.begin_store(bad, 0, 1, 0.0, 9.0) is Refusal.STALE
    later = node.store(key(2), at=node.lease(slot=bad.slot))
    work_off(node.keeper)
    assert node.load(later) == content(later)
    assert load(node.keeper, later, 1) is NONE


def test_damaged_chunk_that_is_being_read_is_not_overwritten_before_its_reader_ends(
    node: Node,
) -> None:
    bad = node.store(key(1))
    work_off(node.keeper)
    assert node.keeper.begin_load(bad) is NONE
    flip_bit(node.keeper, bad)
    assert load(node.keeper, bad, 1) is CORRUPT
    lease = node.lease(slot=bad.slot)
    later = ChunkName(NAMESPACE, key(2), lease.slot, lease.generation, PAGE)
    assert node.keeper.begin_store(later, 0, 1, 0.0, 9.0) is Refusal.WRITING
    node.keeper.end_load(bad)
    assert node.keeper.begin_store(later, 0, 1, 0.0, 9.0) is NONE
    node.keeper.end_store(later, 0, ok=False)


def test_one_load_of_so_many_is_compared(node: Node) -> None:
    name = node.store(key(0))
    work_off(node.keeper)
    integrity = Integrity(node.keeper, loads_per_check=8)
    integrity._random.seed(1)
    compared = sum(integrity._must_compare(name) for _ in range(4000))
    assert 400 < compared < 600


def test_load_without_a_checksum_is_not_compared(node: Node) -> None:
    name = node.store(key(0))
    assert node.keeper.seal_of(name) is None
    assert load(node.keeper, name, 1) is NONE
    assert node.keeper.seal_of(name) is None


def test_comparison_that_fails_leaves_no_reader_of_any_chunk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [node.store(key(number)) for number in range(3)]
    work_off(node.keeper)
    settle = node.keeper.settle

    def failing(name: ChunkName, checksum: int) -> Refusal:
        if name == names[1]:
            raise OSError("planted")
        return settle(name, checksum)

    monkeypatch.setattr(node.keeper, "settle", failing)
    with pytest.raises(OSError, match="planted"):
        Integrity(node.keeper, 1).begin_loads(names, [NO_BLOCKS] * 3, never)
    assert [node.keeper.table.readers_of(name.slot) for name in names] == [0, 0, 0]


def test_comparison_ends_when_the_job_is_cancelled(node: Node) -> None:
    name = node.store(key(0))
    work_off(node.keeper)
    integrity = Integrity(node.keeper, 1)
    assert integrity.begin_loads([name], [NO_BLOCKS], lambda: True) == [Refusal.CANCELLED]
    assert node.keeper.table.readers_of(name.slot) == 0
    assert node.keeper.num_quarantined == 0


def test_checksum_is_made_later_when_something_is_more_urgent(node: Node) -> None:
    name = node.store(key(0))
    integrity = Integrity(node.keeper)
    assert integrity.work(lambda: True)
    assert node.keeper.seal_of(name) is None
    assert integrity.work(never)
    seal = node.keeper.seal_of(name)
    assert seal is not None
    assert seal.is_proven
    assert not integrity.work(never)


def test_checksum_of_a_chunk_that_was_overwritten_meanwhile_is_forgotten(node: Node) -> None:
    name = node.store(key(0))
    later = node.store(key(1), at=node.lease(slot=name.slot))
    assert node.keeper.settle(name, 1) is Refusal.STALE
    assert node.keeper.seal_of(later) is None
    work_off(node.keeper)
    assert node.keeper.num_quarantined == 0


# Other nodes


def question(source: Node, name: ChunkName, *, with_checksums: bool = True) -> ReadRequest:
    request = source.request([source.order_of((source, name))])
    return ReadRequest(
        request.version,
        NAMESPACE,
        source.epoch,
        type(request.handles)(Keys.of([name.key]), [name.slot], [name.generation]),
        [name.slot_bytes],
        with_checksums=with_checksums,
    )


def test_damaged_chunk_does_not_leave_its_node(node: Node) -> None:
    bad = node.store(key(1))
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    reply, data = node.reader.read(question(node, bad))
    assert (reply.refusals, reply.checksums, len(data)) == ([CORRUPT], [], 0)
    assert node.keeper.num_quarantined == 1
    reply, data = node.reader.read(question(node, bad))
    assert (reply.refusals, len(data)) == ([Refusal.STALE], 0)


def test_read_makes_the_checksum_of_a_chunk_that_has_none(node: Node) -> None:
    name = node.store(key(1))
    reply, _ = node.reader.read(question(node, name))
    assert node.keeper.seal_of(name) == Seal(reply.checksums[0], is_proven=True)


def test_fetch_goes_to_the_next_replica_when_the_first_one_is_damaged(
    network: Network, node: Node
) -> None:
    other, here = network.node("other", epoch=8), network.node("here", epoch=9)
    bad, good = node.store(key(1)), other.store(key(1))
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    order = here.order_of((node, bad), (other, good))
    result = here.fetch([order])
    assert refusals(result) == [NONE]
    assert_right(here, [order])
    assert (result.lost.sources, result.lost.keys) == ([Source("node")], Keys.of([bad.key]))
    assert result.lost.generations == [bad.generation]
    assert (node.keeper.num_quarantined, here.keeper.num_quarantined) == (1, 0)


def test_fetch_of_a_damaged_chunk_fails_when_nobody_else_has_it(
    network: Network, node: Node
) -> None:
    here = network.node("here", epoch=9)
    bad = node.store(key(1))
    work_off(node.keeper)
    flip_bit(node.keeper, bad)
    assert refusals(here.fetch([here.order_of((node, bad))])) == [CORRUPT]
    assert here.ready() == set()


def test_chunk_keeps_the_checksum_that_it_came_with(network: Network, node: Node) -> None:
    here = network.node("here", epoch=9)
    name = node.store(key(1))
    work_off(node.keeper)
    order = here.order_of((node, name))
    here.fetch([order])
    (arrived,) = here.ready()
    assert here.keeper.seal_of(arrived) == node.keeper.seal_of(name)
    flip_bit(here.keeper, arrived)
    assert load(here.keeper, arrived, 1) is CORRUPT


# Pool files


def names(count: int = 3) -> list[ChunkName]:
    return [
        ChunkName(NAMESPACE, Key(b"key%d" % i), Slot(4 * i), Generation(5 + i), (1 + i % 2) * PAGE)
        for i in range(count)
    ]


def fill(path: Path, chunks: list[ChunkName]) -> None:
    """A life of a pool that stores chunks and ends, after it has had some idle time."""
    keeper = PoolKeeper(GEOMETRY, str(path))
    keeper.recover()
    for name in chunks:
        assert keeper.begin_store(name, 0, 1, 0.0, 9.0) is NONE
        ctypes.memmove(keeper.pool.address + name.slot * PAGE, content(name), name.slot_bytes)
        assert keeper.end_store(name, 0, ok=True) is SlotState.READY
    work_off(keeper)
    keeper.pool._region.close()


def served(path: Path, geometry: PoolGeometry = GEOMETRY) -> tuple[dict[ChunkName, bytes], int]:
    """What the next life serves, without having been idle, and what it has quarantined."""
    keeper = PoolKeeper(geometry, str(path))
    keeper.recover()
    integrity = Integrity(keeper, 1 << 30)
    found = {}
    for name in keeper.all_ready():
        if integrity.begin_loads([name], [NO_BLOCKS], never) == [NONE]:
            place = keeper.pool.address + name.slot * PAGE
            found[name] = ctypes.string_at(place, name.slot_bytes)
            keeper.end_load(name)
    keeper.table.check()
    count = keeper.num_quarantined
    keeper.pool._region.close()
    return found, count


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool file, with a slot that was overwritten, and its journal."""
    path = tmp_path_factory.mktemp("pool") / "pool"
    fill(path, [ChunkName(NAMESPACE, Key(b"old"), Slot(0), Generation(1), PAGE), *names()])
    return path


def copy_of(original: Path, to: Path) -> tuple[Path, Path]:
    shutil.copy(original, to / "pool")
    shutil.copy(original.with_name("pool.journal"), to / "pool.journal")
    return to / "pool", to / "pool.journal"


def assert_true(found: dict[ChunkName, bytes]) -> None:
    """Whatever is served are the bytes that were stored under that name."""
    assert set(found) <= {*names()}
    assert all(data == content(name) for name, data in found.items())


def test_sound_pool_file_is_served_whole(original: Path, tmp_path: Path) -> None:
    path, _ = copy_of(original, tmp_path)
    found, quarantined = served(path)
    assert set(found) == {*names()}
    assert_true(found)
    assert quarantined == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flipped_bit_of_a_pool_file_costs_its_chunk_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, original: Path, data: st.DataObject
) -> None:
    path, _ = copy_of(original, tmp_path_factory.mktemp("flipped"))
    hit = data.draw(st.sampled_from(names()))
    bit = data.draw(st.integers(0, hit.slot_bytes * 8 - 1))
    raw = bytearray(path.read_bytes())
    raw[hit.slot * PAGE + bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    found, quarantined = served(path)
    assert set(found) == {*names()} - {hit}
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
    whole = {name for name in names() if name.slot * PAGE + name.slot_bytes <= size}
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


def test_pool_file_of_another_pool_is_not_served(original: Path, tmp_path: Path) -> None:
    path, _ = copy_of(original, tmp_path)
    other = tmp_path / "other"
    fill(
        other,
        [ChunkName(Namespace("x"), n.key, n.slot, n.generation, n.slot_bytes) for n in names()],
    )
    shutil.copy(other, path)
    assert served(path) == ({}, 3)


def test_pool_file_of_zeros_is_not_served(original: Path, tmp_path: Path) -> None:
    path, _ = copy_of(original, tmp_path)
    path.write_bytes(bytes(GEOMETRY.pool_bytes))
    assert served(path) == ({}, 3)


def test_data_that_is_older_than_the_journal_is_not_served(original: Path, tmp_path: Path) -> None:
    path, _ = copy_of(original, tmp_path)
    later = [ChunkName(NAMESPACE, Key(b"later"), Slot(0), Generation(9), PAGE)]
    fill(path, later)
    shutil.copy(original, path)
    found, quarantined = served(path)
    assert set(found) == {*names()} - {names()[0]}
    assert_true(found)
    assert quarantined == 1


@pytest.mark.parametrize(
    "geometry", [PoolGeometry(16 * PAGE, 2 * PAGE), PoolGeometry(32 * PAGE, 4 * PAGE)]
)
def test_pool_of_another_layout_is_set_aside_and_counted(
    original: Path, tmp_path: Path, geometry: PoolGeometry
) -> None:
    path, journal = copy_of(original, tmp_path)
    raw = journal.read_bytes()
    assert served(path, geometry) == ({}, 1)
    assert journal.with_name("pool.journal.quarantined-1").read_bytes() == raw


def test_number_of_journals_that_are_kept_is_bounded(original: Path, tmp_path: Path) -> None:
    path, journal = copy_of(original, tmp_path)
    for number in range(9):
        journal.write_bytes(b"damaged %d" % number)
        assert served(path) == ({}, 1)
    kept = sorted(file.read_bytes() for file in tmp_path.glob("*.quarantined-*"))
    assert kept == [b"damaged %d" % number for number in range(5, 9)]


def test_idle_time_finds_damage_that_nobody_has_asked_for(original: Path, tmp_path: Path) -> None:
    path, _ = copy_of(original, tmp_path)
    raw = bytearray(path.read_bytes())
    raw[names()[1].slot * PAGE] ^= 1
    path.write_bytes(raw)
    keeper = PoolKeeper(GEOMETRY, str(path))
    keeper.recover()
    assert keeper.table.num_unproven == 3
    work_off(keeper)
    assert keeper.table.num_unproven == 0
    assert set(keeper.all_held()) == {*names()} - {names()[1]}
    assert keeper.num_quarantined == 1
    keeper.pool._region.close()


def test_restored_chunk_is_compared_once_before_it_goes_to_another_node_unchecked(
    network: Network, original: Path, tmp_path: Path
) -> None:
    path, _ = copy_of(original, tmp_path)
    raw = bytearray(path.read_bytes())
    bad, good = names()[0], names()[1]
    raw[bad.slot * PAGE] ^= 1
    path.write_bytes(raw)
    node = network.node("node")
    node.keeper.pool._region.close()
    node.keeper = PoolKeeper(GEOMETRY, str(path))
    node.keeper.recover()
    node.reader = type(node.reader)(node.keeper, node.epoch)
    for name, expected in ((bad, [CORRUPT]), (good, [NONE]), (good, [NONE])):
        reply, data = node.reader.read(question(node, name, with_checksums=False))
        assert (reply.refusals, reply.checksums) == (expected, [])
        assert data.tobytes() == (content(name) if expected == [NONE] else b"")
    assert node.keeper.table.num_unproven == 1
