"""Pools in a file: what a NodeActor finds again after its death, and what it must not believe."""

from __future__ import annotations

import ctypes
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import raykv.memory.pool
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Blocks, Slot, Stamp
from raykv.memory.pool import JOURNAL_VERSION, Pool, PoolEntry

PAGE = SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(16 * PAGE, 4 * PAGE)
CHECKSUM = (1 << 64) - 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def journal(path: Path) -> Path:
    return path.with_name("pool.journal")


def chunk(
    number: int, slot: int = 0, key: bytes = b"k", namespace: str = "model", pages: int = 1
) -> PoolEntry:
    """Stored under orders of that number."""
    return PoolEntry(slot, pages * PAGE, namespace, key, CHECKSUM, Stamp(3, number), Blocks(1, 2))


def life(path: Path, geometry: PoolGeometry = GEOMETRY) -> tuple[Pool, set[PoolEntry]]:
    """A pool in its next life, and what it found."""
    pool = Pool(geometry, str(path))
    return pool, set(pool.recover())


def found(path: Path, geometry: PoolGeometry = GEOMETRY) -> set[PoolEntry]:
    return life(path, geometry)[1]


def store(pool: Pool, entry: PoolEntry, text: bytes = b"") -> None:
    """As the node's service does it: strike off, write, enter."""
    pool.forget(Slot(entry.slot), entry.slot_bytes)
    ctypes.memmove(pool.address + entry.slot * PAGE, text, len(text))
    pool.journal.enter(entry)


def test_path_may_end_in_a_slash(path: Path) -> None:
    pool = Pool(GEOMETRY, f"{path}/")
    assert not pool.recover()
    assert path.stat().st_size == GEOMETRY.pool_bytes
    store(pool, chunk(5))
    assert found(path) == {chunk(5)}


def test_chunks_and_their_bytes_survive_a_new_life(path: Path) -> None:
    pool, _ = life(path)
    first, second = chunk(5, key=b"a"), chunk(6, slot=4, key=b"b", namespace="other", pages=2)
    store(pool, first, b"hello")
    store(pool, second, b"world")
    again, names = life(path)
    assert names == {first, second}
    assert ctypes.string_at(again.address, 5) == b"hello"
    assert ctypes.string_at(again.address + 4 * PAGE, 5) == b"world"


def test_chunks_survive_several_lives(path: Path) -> None:
    for slot in range(4):
        pool, names = life(path)
        assert names == {chunk(slot, earlier) for earlier, slot in enumerate(range(1, slot + 1))}
        store(pool, chunk(slot + 1, slot))


def test_chunk_is_struck_off_before_its_slot_is_written(path: Path) -> None:
    pool, _ = life(path)
    store(pool, chunk(5))
    store(pool, chunk(5, slot=1))
    pool.forget(Slot(0), PAGE)
    again, names = life(path)
    assert names == {chunk(5, slot=1)}
    again.forget(Slot(1), PAGE)
    assert found(path) == set()


def test_chunks_are_found_in_the_order_in_which_they_came(path: Path) -> None:
    pool, _ = life(path)
    for slot in (0, 1, 2, 0):
        store(pool, chunk(5, slot))
    assert [each.slot for each in Pool(GEOMETRY, str(path)).recover()] == [1, 2, 0]


def test_clearing_is_remembered_over_lives_by_history(path: Path) -> None:
    pool, _ = life(path)
    pool.journal.keep_floors({9: {"": 4, "gone": 9}, 3: {"gone": 1}})
    again, _ = life(path)
    assert list(again.journal.floors.items()) == [(9, {"": 4, "gone": 9}), (3, {"gone": 1})]
    again.journal.keep_floors({3: {"gone": 1}, 9: {"": 9}})
    last, _ = life(path)
    assert list(last.journal.floors.items()) == [(3, {"gone": 1}), (9, {"": 9})]


def test_journal_of_another_version_is_given_up_and_said_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(raykv.memory.pool, "JOURNAL_VERSION", JOURNAL_VERSION - 1)
        pool, _ = life(path)
        store(pool, chunk(5))
    again, names = life(path)
    assert names == set()
    assert f"it is of version {JOURNAL_VERSION - 1}" in caplog.text
    assert again.journal.num_set_aside == 0
    store(again, chunk(6))
    assert found(path) == {chunk(6)}


def test_slab_is_struck_off_as_a_whole_when_it_takes_another_slot_size(path: Path) -> None:
    pool, _ = life(path)
    for slot in (0, 3, 4):
        store(pool, chunk(5, slot))
    pool.forget(Slot(0), 2 * PAGE)
    again, names = life(path)
    assert names == {chunk(5, slot=4)}
    store(again, chunk(6, slot=6, pages=2))
    assert found(path) == {chunk(6, slot=6, pages=2)}


def test_slab_that_went_back_to_its_slot_size_has_only_new_chunks(path: Path) -> None:
    pool, _ = life(path)
    store(pool, chunk(5, slot=3))
    store(pool, chunk(6, slot=0, pages=2))
    store(pool, chunk(7, slot=1))
    assert found(path) == {chunk(7, slot=1)}


# Files that are not to be believed


@pytest.mark.parametrize(
    "geometry", [PoolGeometry(16 * PAGE, 2 * PAGE), PoolGeometry(12 * PAGE, 4 * PAGE)]
)
def test_pool_is_empty_when_it_is_cut_another_way(path: Path, geometry: PoolGeometry) -> None:
    pool, _ = life(path)
    store(pool, chunk(5))
    assert found(path, geometry) == set()
    assert found(path) == set()


def test_pool_is_empty_when_the_host_has_booted_but_what_was_cleared_is_known(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_id = tmp_path / "boot_id"
    monkeypatch.setattr(raykv.memory.pool, "_BOOT_ID", boot_id)
    boot_id.write_text("first\n")
    pool, _ = life(path)
    store(pool, chunk(5))
    pool.journal.keep_floors({3: {"": 4}})
    assert found(path) == {chunk(5)}
    boot_id.write_text("second\n")
    again, names = life(path)
    assert names == set()
    assert again.journal.floors == {3: {"": 4}}
    boot_id.write_text("first\n")
    assert found(path) == set()


@pytest.mark.parametrize("raw", [b"", b"x", bytes(8), bytes(100), b"\xff" * 100])
def test_pool_is_empty_when_the_journal_is_not_one(path: Path, raw: bytes) -> None:
    journal(path).write_bytes(raw)
    pool, names = life(path)
    assert names == set()
    store(pool, chunk(5))
    assert found(path) == {chunk(5)}


def test_pool_is_empty_when_the_journal_is_gone(path: Path) -> None:
    pool, _ = life(path)
    store(pool, chunk(5))
    journal(path).unlink()
    assert found(path) == set()


OVERWRITTEN = chunk(5, key=b"overwritten")
LAST = {chunk(7, key=b"last"), chunk(6, slot=1, key=b"beside")}


def worn(path: Path) -> bytes:
    """A journal in which one chunk was entered, struck off and overwritten."""
    pool, _ = life(path)
    store(pool, OVERWRITTEN)
    for name in sorted(LAST, key=lambda name: name.slot):
        store(pool, name)
    assert found_in_copy(path, journal(path).read_bytes()) == LAST
    return journal(path).read_bytes()


def found_in_copy(path: Path, raw: bytes) -> set[PoolEntry]:
    """What a life finds that begins with the journal `raw`."""
    other = path.with_name("copy")
    other.with_name("copy.journal").write_bytes(raw)
    return found(other)


def test_record_that_was_cut_off_is_not_believed(path: Path) -> None:
    raw = worn(path)
    last = max(LAST, key=lambda name: name.slot)
    assert raw.rindex(last.key) > len(raw) - 40
    for missing in range(1, 8):
        assert last not in found_in_copy(path, raw[:-missing])


def test_overwritten_chunk_is_not_believed_whatever_bit_of_the_journal_is_flipped(
    path: Path,
) -> None:
    raw = worn(path)
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        assert found_in_copy(path, bytes(flipped)) <= LAST


@pytest.mark.parametrize("rest", [b"\0", bytes(8), bytes(100), b"rest"])
def test_journal_is_not_believed_when_something_else_follows(path: Path, rest: bytes) -> None:
    assert found_in_copy(path, worn(path) + rest) == set()


def test_journal_with_more_than_can_be_read_is_not_believed(path: Path) -> None:
    payload = b"\x95\x01\xa1x\x01\x01" + b"\x91" * 100_000 + b"\x00"
    sealed = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little")
    assert found_in_copy(path, sealed + payload) == set()


def test_journal_is_sound_again_after_a_life_that_began_with_a_damaged_one(path: Path) -> None:
    raw = worn(path)
    journal(path).write_bytes(raw[:-3])
    pool, _ = life(path)
    store(pool, chunk(9, slot=3))
    assert chunk(9, slot=3) in found(path)


@contextmanager
def full_disk(path: Path, room: int) -> Iterator[None]:
    """No file of this process grows more than `room` bytes beyond the journal's size now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal(path).stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 5])
def test_overwritten_chunk_is_not_believed_when_the_disk_was_full(path: Path, room: int) -> None:
    pool, _ = life(path)
    store(pool, OVERWRITTEN)
    with full_disk(path, room):
        store(pool, chunk(6, key=b"overwrites"))
    store(pool, chunk(7, slot=1, key=b"later"))
    assert OVERWRITTEN not in found(path)


# Housekeeping


def test_journal_stays_short_however_often_slots_are_overwritten(path: Path) -> None:
    pool, _ = life(path)
    kept = chunk(1, slot=9, key=b"kept")
    store(pool, kept)
    for generation in range(2, 4000):
        store(pool, chunk(generation))
    assert journal(path).stat().st_size < 150_000
    assert found(path) == {kept, chunk(3999)}


def test_pool_in_memory_finds_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    pool = Pool(GEOMETRY, "")
    assert pool.recover() == []
    store(pool, chunk(5))
    pool.forget(Slot(0), 2 * PAGE)
    pool.journal.keep_floors({3: {"model": 9}})
    assert list(tmp_path.iterdir()) == []


def test_prefault_waits_while_memory_is_short_and_goes_on_afterwards(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.SELDOM_S", 0.01)
    size = 160 << 20
    pool = Pool(replace(GEOMETRY, pool_bytes=size), "")
    answers = iter([False, False, False, True])
    seen: list[tuple[int, bool, bool, bool]] = []

    def has_room() -> bool:
        answer = next(answers, True)
        beyond = Slot((128 << 20) // SLOT_ALIGNMENT)
        seen.append(
            (
                pool.prefaulted_bytes,
                pool.is_short,
                pool.may_touch(Slot(0), PAGE),
                pool.may_touch(beyond, PAGE),
            )
        )
        return answer

    pool.prefault(has_room)
    first = seen[0][0]
    assert 0 < first < size
    # Found to be short, asked again while it waits, then at the next look on the way.
    assert seen[1:3] == [(first, True, True, False)] * 2
    assert not pool.is_short
    assert pool.prefaulted_bytes == size
    assert caplog.text.count("memory is short") == 1


def test_prefault_stops_when_the_pool_is_stopped() -> None:
    pool = Pool(replace(GEOMETRY, pool_bytes=100 << 20), "")
    pool.stop()
    pool.prefault()
    assert 0 < pool.prefaulted_bytes < 100 << 20
