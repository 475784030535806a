"""A node's pool behind one lock: what is journaled, checked and served when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import raykv.node.keeper
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    SLOT_ALIGNMENT,
    Blocks,
    Direction,
    Key,
    Namespace,
    NodeId,
    Refusal,
    Stamp,
)
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.jobs import AdmittedJob
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import EngineHello
from raykv.protocol.listing import Reason
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key

PAGE = SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(8 * PAGE, 4 * PAGE)
MODEL = Namespace("model")
ENGINE = 5
LONG_S = 10.0
STORE, LOAD = Direction.STORE, Direction.LOAD
BLOCKS = Blocks(0, 1)
HISTORY = 3


def made(path: Path | None = None, life: int = 7) -> PoolKeeper:
    """A keeper at which an engine is."""
    keeper = PoolKeeper(NodeId("node"), life, GEOMETRY, "" if path is None else str(path))
    keeper.recover()
    hello = EngineHello("engine", ENGINE, MODEL, slot_bytes={0: PAGE})
    with keeper.lock:
        assert not keeper.owner.hello(hello, keeper.now()).error
        keeper.owner.jobs.begin_line(ENGINE, 0, 1)
    return keeper


@pytest.fixture
def keeper() -> Iterator[PoolKeeper]:
    """The pool's invariants hold when a test is over."""
    keeper = made()
    yield keeper
    keeper.owner.check()


def announced(keeper: PoolKeeper, way: Direction, *chunks: int, job_id: int = 1) -> AdmittedJob:
    keys = [numbered_key(chunk) for chunk in chunks]
    job = named_job(way, keys, [[0]] * len(keys), job_id=job_id, namespace=MODEL)
    return keeper.owner.jobs.announce(ENGINE, 0, 1, [job], keeper.now())[0]


_ids = iter(range(100, 1 << 30))


def store(keeper: PoolKeeper, *chunks: int, ok: bool = True) -> CopyResult:
    job = announced(keeper, STORE, *chunks, job_id=next(_ids))
    keeper.begin_chunks(job, range(len(chunks)))
    keeper.end_chunks(job, range(len(chunks)), ok=ok)
    return keeper.owner.jobs.end_job(job, 0, 0.0)


def found(keeper: PoolKeeper, chunk: int) -> ChunkRecord | None:
    return keeper.owner.index.find(MODEL, numbered_key(chunk))


def known(keeper: PoolKeeper, chunk: int) -> ChunkRecord:
    record = found(keeper, chunk)
    assert record is not None
    return record


def make_checksums(keeper: PoolKeeper) -> None:
    """As a NodeActor does it when it has nothing else to do."""
    integrity = Integrity(keeper)
    while integrity.work(lambda: False):
        pass


def orders(number: int, floors: Mapping[str, int] | None = None) -> OrdersDocument:
    return OrdersDocument(Stamp(HISTORY, number), floors=dict(floors or {}))


def land(keeper: PoolKeeper, chunk: int) -> ChunkRecord | Refusal:
    return keeper.land(ChunkRecord(MODEL, numbered_key(chunk), PAGE, Stamp(0, 0), BLOCKS))


# Jobs


def test_nothing_is_stored_into_untouched_pages_while_memory_is_short(keeper: PoolKeeper) -> None:
    keeper.pool.is_short = True
    assert list(store(keeper, 1).refusals) == [Refusal.COPY_FAILED]
    assert land(keeper, 2) is Refusal.COPY_FAILED
    keeper.pool.prefault()
    assert store(keeper, 1).refusals == b""


def test_whoever_waits_hears_of_what_has_changed(keeper: PoolKeeper) -> None:
    begun, heard = threading.Event(), threading.Event()

    def wait() -> None:
        with keeper.lock:
            begun.set()
            if keeper.lock.wait_for(lambda: found(keeper, 1) is not None, LONG_S):
                heard.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(LONG_S)
    store(keeper, 1)
    assert heard.wait(LONG_S)
    thread.join(LONG_S)


# Other nodes


def test_chunk_that_lands_has_the_checksum_that_came_along(keeper: PoolKeeper) -> None:
    record = land(keeper, 1)
    assert isinstance(record, ChunkRecord)
    keeper.landed(record, ok=True, checksum=77)
    assert known(keeper, 1).checksum == 77
    assert keeper.take_unchecked() is None
    assert land(keeper, 1) is Refusal.HERE


# Checksums


def test_chunk_that_is_put_back_is_the_next_one(keeper: PoolKeeper) -> None:
    store(keeper, 1, 2)
    first = keeper.take_unchecked()
    assert first is known(keeper, 1)
    keeper.put_back(first)
    keeper.end_read(first)
    assert keeper.take_unchecked() is first
    keeper.end_read(first)


def test_wait_for_checksums_says_how_many_have_none_and_forgets_no_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.node.keeper, "MAX_UNCHECKED", 1)
    keeper = made()
    store(keeper, 1, 2)
    for num_left in (2, 1, 0):
        assert keeper.wait_for_seals(0.0) == num_left
        make_checksums(keeper)


# Orders


def test_orders_clear_what_was_stored_before_them(keeper: PoolKeeper) -> None:
    store(keeper, 1)
    kept: list[Mapping[int, Mapping[str, int]]] = []

    def keep(floors: Mapping[int, Mapping[str, int]], deadline_s: float) -> bool:
        kept.append(floors)
        return len(kept) > 1

    keeper.keep_floors = keep
    assert not keeper.take_orders(orders(1, {MODEL: 1}), 1.0)
    assert found(keeper, 1) is None
    # The disk had no time for it.
    assert keeper.take_orders(orders(1, {MODEL: 1}), 1.0)
    assert kept == [{HISTORY: {MODEL: 1}}] * 2


# Pool files

NextLife = Callable[..., PoolKeeper]


@pytest.fixture
def next_life(tmp_path: Path) -> Iterator[NextLife]:
    """Keepers of one pool file, one after another; the orders come if there are any. The invariants
    of the last pool hold when a test is over.
    """
    lives: list[PoolKeeper] = []

    def begin(document: OrdersDocument | None = None) -> PoolKeeper:
        lives.append(made(tmp_path / "pool", 7 + len(lives)))
        assert document is None or lives[-1].take_orders(document, 1.0)
        return lives[-1]

    yield begin
    lives[-1].owner.check()


def store_sealed(keeper: PoolKeeper, *chunks: int) -> None:
    """With their checksums."""
    store(keeper, *chunks)
    make_checksums(keeper)


def here(keeper: PoolKeeper) -> list[int]:
    """Chunks that are found."""
    return [chunk for chunk in range(30) if found(keeper, chunk)]


def test_keeper_of_a_pool_file_finds_what_was_ready_and_nothing_else(next_life: NextLife) -> None:
    first = next_life()
    store_sealed(first, 1, 2, 3)
    # One without a checksum; one that is being written; one that is overwritten.
    store(first, 4)
    begun = announced(first, STORE, 5, job_id=next(_ids))
    first.begin_chunks(begun, [0])
    first.owner.index.drop(known(first, 2), Reason.EVICTED)
    filling = announced(first, STORE, *range(20, 24), job_id=next(_ids))
    first.begin_chunks(filling, range(4))
    assert len(filling.under_way) == 4
    again = next_life()
    assert here(again) == []
    assert again.take_orders(orders(1), 1.0)
    assert here(again) == [1, 3]
    record = known(again, 1)
    assert (record.blocks, record.stamp) == (BLOCKS, Stamp(0, 0))
    assert not record.is_proven
    assert again.num_quarantined == 0
    assert here(next_life(orders(1))) == [1, 3]
    # What was cleared meanwhile is void.
    assert here(next_life(orders(2, {MODEL: 2}))) == []


def test_nothing_of_a_pool_file_is_overwritten_before_the_orders_come(next_life: NextLife) -> None:
    store_sealed(next_life(), *range(8))
    again = next_life()
    assert list(store(again, 20).refusals) == [Refusal.NO_ROOM]
    assert again.take_orders(orders(1), 1.0)
    assert store(again, 21).refusals == b""
    assert len(here(again)) == 8


def test_what_was_cleared_is_known_in_the_next_life(next_life: NextLife) -> None:
    next_life(orders(3, {MODEL: 3}))
    again = next_life()
    assert again.owner.index.floors.is_void(MODEL, Stamp(HISTORY, 2))
    # What is stored here is new; of what others have stored before their first orders who knows?
    assert store(again, 2).refusals == b""
    assert land(again, 1) is Refusal.CLEARED
    assert again.take_orders(orders(3, {MODEL: 3}), 1.0)
    assert found(again, 2) is None


def test_chunks_of_a_pool_file_from_before_the_orders_are_void_where_anything_was_cleared(
    next_life: NextLife,
) -> None:
    next_life(orders(3, {MODEL: 3}))
    second = next_life()
    store_sealed(second, 1)
    later = OrdersDocument(Stamp(HISTORY + 1, 1))
    assert second.take_orders(later, 1.0)
    assert here(second) == [1]
    assert here(next_life(later)) == []


def test_chunks_of_a_pool_file_are_given_up_when_no_orders_come(
    next_life: NextLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_sealed(next_life(), *range(8))
    monkeypatch.setattr(raykv.node.keeper, "POOL_FILE_ORDERS_S", 0.0)
    again = next_life()
    again.expire()
    assert store(again, 20).refusals == b""
    assert again.take_orders(orders(1), 1.0)
    assert here(again) == [20]
    again.owner.check()
    assert not set(range(8)) & set(here(next_life(orders(1))))


def test_damaged_chunk_is_not_found_in_the_next_life(next_life: NextLife) -> None:
    first = next_life()
    store_sealed(first, 1, 2)
    assert first.check_bytes(known(first, 1), 0) is Refusal.CORRUPT
    assert here(next_life(orders(1))) == [2]


def test_of_a_name_in_two_slots_the_later_one_is_found(next_life: NextLife) -> None:
    first = next_life()
    store_sealed(first, 1)
    old = known(first, 1)
    first.owner.index.drop(old, Reason.EVICTED)
    # The slot is taken by a reader no more, and not overwritten: another one is used.
    record = ChunkRecord(MODEL, Key(b"x" * 36), PAGE, Stamp(0, 0), blocks=ALL_BLOCKS)
    assert first.owner.index.places.place(record)
    assert record.slot == old.slot
    store_sealed(first, 1)
    new = known(first, 1)
    assert new.slot != old.slot
    again = next_life(orders(1))
    assert known(again, 1).slot == new.slot
    assert again.num_quarantined == 0
