"""A disk tier over a real pool and a real folder: what the pool gives up comes back as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raykv.node.disk.folder
import raykv.node.disk.tier
from raykv.base.ids import EVERY_NAMESPACE, Blocks, Key, NodeId, Refusal, Stamp
from raykv.base.settings import DiskPlace
from raykv.node.disk.chunk_file import (
    PART_SUFFIX,
    ChunkBytes,
    ChunkFile,
    read_header,
    write_chunks,
)
from raykv.node.disk.folder import TierFolder
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import PendingRead
from raykv.node.pool.records import ChunkRecord
from raykv.node.pool.shelf import RESERVED_PART
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.copies import Read
from raykv.protocol.listing import Where
from raykv.protocol.operator import OrderedShare, OrdersDocument
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    HISTORY,
    NAMESPACE,
    PAGE,
    Network,
    Node,
    Wanted,
    assert_right,
    content,
)
from tests.fixtures.waiting import wait_until

Made = Callable[..., DiskTier]
NONE = Refusal.NONE
NUM_SLOTS = 32
RESERVE = NUM_SLOTS // RESERVED_PART


@pytest.fixture(autouse=True)
def _keep_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.01)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def here(network: Network) -> Node:
    return network.node("here", slab_bytes=NUM_SLOTS * PAGE // 8)


@pytest.fixture
def make(here: Node, tmp_path: Path) -> Iterator[Made]:
    """Tiers of the node `here`, one after another on the same folder."""
    made: list[DiskTier] = []

    def one(path: Path = tmp_path, *, is_open: bool = True, **place: int) -> DiskTier:
        limits = {"most_bytes": 1 << 20, "floor_bytes": 0, **place}
        tier = DiskTier(DiskPlace(str(path), **limits), here.keeper)
        here.keeper.keep_floors = tier.keep_floors
        made.append(tier)
        tier.start()
        if is_open:
            wait_until(lambda: not tier.reads.stats().problem, 10.0, "the folder is read")
        return tier

    yield one
    for tier in made:
        tier.stop()
    for tier in made:
        end(tier)
        tier._shelf.check()


def end(tier: DiskTier) -> None:
    """As if its process had ended."""
    tier.stop()
    wait_until(lambda: not threads(), 5.0, "the tier's threads end")
    folder = tier.reads.folder
    if folder is not None:
        tier.reads.folder = None
        folder.close()


def folder_of(tier: DiskTier) -> TierFolder:
    folder = tier.reads.folder
    assert folder is not None
    return folder


def begin_life(here: Node, tier: DiskTier, number: int = 1) -> None:
    """Another NodeActor with an empty pool, which has no orders if `number` is 0."""
    end(tier)
    here.keeper.pool._region.close()
    here.life += 1
    here.use(PoolKeeper(NodeId("here"), here.life, here.geometry))
    if number:
        here.order(number)


def restarted(here: Node, tier: DiskTier, make: Made) -> DiskTier:
    """The tier of another NodeActor, which has no orders."""
    begin_life(here, tier, 0)
    again = make(is_open=False)
    wait_until(lambda: again.reads.folder is not None, 10.0, "the folder is there")
    return again


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("raykv-disk")]


def on_disk(here: Node) -> set[Key]:
    """What the listing says."""
    with here.keeper.lock:
        shelf = here.keeper.owner.index.shelf
        return {each.key for each in shelf.page(0, 1 << 20)[0]}


def files(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("*/*.safetensors"))


def fill(here: Node, count: int = NUM_SLOTS) -> list[ChunkRecord]:
    """The first one goes first."""
    return [here.store(key(number)) for number in range(count)]


def written(here: Node, tier: DiskTier, number: int = 1, **fields: Any) -> ChunkRecord:
    """A chunk that is on the disk alone."""
    record = here.store(key(number), **fields)
    assert tier.keep(10.0) == 0
    here.evict(record)
    return record


def from_disk(chunk: ChunkRecord, node_id: str = "here") -> Wanted:
    source = Source(node_id, SourceKind.DISK)
    return Wanted(chunk.key, (source,), chunk.slot_bytes, chunk.namespace)


def fetch(here: Node, tier: DiskTier, *chunks: ChunkRecord) -> list[Refusal]:
    """Bring chunks back from the disk."""
    here.fetcher = FetchService(here.keeper, TieredTransport("here", tier.reads, here.network))
    return here.fetch([from_disk(chunk) for chunk in chunks]).refusals


# What is written


def test_what_goes_next_is_written_before_it_goes_and_comes_back_as_it_was(
    here: Node, make: Made
) -> None:
    tier = make()
    records = fill(here)
    first = records[:RESERVE]
    wait_until(lambda: on_disk(here) == {each.key for each in first}, 10.0, "chunks are written")
    (row,) = here.keeper.owner.state_of(NAMESPACE, [first[0].key])[2]
    assert row.where == Where.RAM | Where.DISK
    for record in first:
        here.evict(record)
    for number in range(RESERVE):
        here.store(key(100 + number))
    wait_until(lambda: len(on_disk(here)) == 2 * RESERVE, 10.0, "the next ones are written")
    for record in here.records():
        here.evict(record)
    assert fetch(here, tier, *first) == [NONE] * RESERVE
    assert_right(here, first)
    arrived = here.record(first[0])
    assert (arrived.stamp, arrived.blocks) == (first[0].stamp, first[0].blocks)
    assert tier.reads.stats().chunks_read == RESERVE
    assert tier.reads.stats().chunks_written == 2 * RESERVE


@dataclass
class SlowDisk:
    """It writes once it may go on."""

    begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def write(self, *arguments: Any) -> int:
        self.begun.set()
        self.goes_on.wait(20.0)
        return write_chunks(*arguments)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    made = SlowDisk()
    monkeypatch.setattr("raykv.node.disk.chunk_file.write_chunks", made.write)
    return made


def test_slow_disk_holds_up_no_store(here: Node, make: Made, slow_disk: SlowDisk) -> None:
    tier = make()
    records = fill(here)
    assert slow_disk.begun.wait(10.0)
    wait_until(lambda: records[0].readers == 0, 10.0, "they have no reader")
    # Their slots are free for others while the disk is at it.
    here.evict(records[0])
    assert here.store(key(100)).slot == records[0].slot
    slow_disk.goes_on.set()
    wait_until(lambda: records[0].key in on_disk(here), 10.0, "it is written")
    here.evict(here.records()[0])
    assert fetch(here, tier, records[0]) == [NONE]
    assert here.load(records[0]) == content(records[0])


def test_chunk_that_is_cleared_while_it_is_written_does_not_count(
    here: Node, make: Made, slow_disk: SlowDisk
) -> None:
    tier = make()
    here.store(key(0))
    here.store(key(1), stamp=Stamp(HISTORY, 2))
    keeping = threading.Thread(target=lambda: tier.keep(20.0))
    keeping.start()
    assert slow_disk.begun.wait(10.0)
    with here.keeper.lock:
        document = OrdersDocument(Stamp(HISTORY, 2), floors={NAMESPACE: 2})
        here.keeper.owner.take_orders(document, here.keeper.now())
    slow_disk.goes_on.set()
    keeping.join(10.0)
    assert on_disk(here) == {key(1)}


def test_copy_that_comes_to_the_disk_last_is_not_always_the_best_one(
    here: Node, make: Made
) -> None:
    """Batches of tenants are written when each is full, or old, whatever is in the others."""
    tier = make()
    wide = here.store(key(1), stamp=Stamp(HISTORY, 1))
    later = here.store(key(2), stamp=Stamp(HISTORY, 2))
    tier.keep(10.0)
    folder = folder_of(tier)
    path = folder.new_path()
    data = np.zeros(PAGE, np.uint8)
    chunks = [
        ChunkBytes(wide.key, wide.stamp, 1, data, Blocks(0, 1)),
        ChunkBytes(later.key, Stamp(HISTORY, 1), 1, data, later.blocks),
    ]
    write_chunks(path, NAMESPACE, chunks)
    tier._add(read_header(path), {wide.key, later.key})
    entries = [tier._shelf.find(NAMESPACE, each.key) for each in (wide, later)]
    assert all(entry is not None and entry.file.name != path.name for entry in entries)


def test_chunk_from_before_the_orders_is_not_found_again_where_anything_was_cleared(
    here: Node, make: Made
) -> None:
    tier = make()
    here.order(2, floors={NAMESPACE: 2})
    begin_life(here, tier, 0)
    here.store(key(1), stamp=Stamp(0, 0))
    again = make(is_open=False)
    wait_until(lambda: again.reads.folder is not None, 10.0, "the folder is there")
    assert here.keeper.take_orders(OrdersDocument(Stamp(HISTORY + 1, 1)), 10.0)
    again.keep(10.0)
    assert on_disk(here) == {key(1)}
    third = restarted(here, again, make)
    assert here.keeper.take_orders(OrdersDocument(Stamp(HISTORY + 1, 1)), 10.0)
    wait_until(lambda: not third.reads.stats().problem, 10.0, "the folder is read")
    assert on_disk(here) == set()


def test_keep_writes_all_that_the_pool_has(here: Node, make: Made) -> None:
    tier = make()
    fill(here, 20)
    assert tier.keep(10.0) == 0
    assert tier.reads.stats().num_chunks == 20
    # A second time there is nothing to do.
    assert tier.keep(10.0) == 0
    assert tier.reads.stats().chunks_written == 20


def test_damaged_chunk_is_not_written(here: Node, make: Made) -> None:
    tier = make()
    record = here.store(key(0))
    record.checksum = 1
    assert tier.keep(10.0) == 0
    assert on_disk(here) == set()
    assert here.keeper.num_quarantined == 1


# Reads


def test_another_node_reads_from_the_disk_through_the_node(
    here: Node, network: Network, make: Made
) -> None:
    tier, other = make(), network.node("other")
    record = written(here, tier, stamp=Stamp(HISTORY, 4))

    class Remote:
        def start_read(self, source: Source, request: Read) -> PendingRead:
            assert source.node_id == "here"
            assert request.from_disk
            return tier.reads.start_read(request)

    other.fetcher = FetchService(other.keeper, TieredTransport("other", None, Remote()))
    assert other.fetch([from_disk(record)]).refusals == [NONE]
    assert_right(other, [record])
    assert other.record(record).stamp == Stamp(HISTORY, 4)


def test_chunk_of_another_size_is_refused(here: Node, make: Made) -> None:
    tier = make()
    record = written(here, tier)
    record.slot_bytes = 2 * PAGE
    assert fetch(here, tier, record) == [Refusal.BAD_HANDLE]
    record.slot_bytes = PAGE


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_damaged_file_is_a_refusal_and_is_forgotten(
    here: Node, make: Made, tmp_path: Path, harm: str
) -> None:
    tier = make()
    record = written(here, tier)
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    if harm == "delete":
        path.unlink()
    else:
        raw[-1] ^= 1
        path.write_bytes(raw if harm == "flip" else raw[:-1])
    refusal = Refusal.NOT_HERE if harm == "delete" else Refusal.CORRUPT
    assert fetch(here, tier, record) == [refusal]
    assert on_disk(here) == set()
    assert tier.reads.stats().num_chunks == 0
    assert tier.reads.stats().chunks_damaged == (harm != "delete")


# Lives


def test_restart_finds_the_chunks_again_once_there_are_orders(
    here: Node, make: Made, tmp_path: Path
) -> None:
    tier = make()
    written(here, tier, 1)
    record = written(here, tier, 2, stamp=Stamp(HISTORY, 2))
    again = restarted(here, tier, make)
    assert on_disk(here) == set()
    assert len(files(tmp_path)) == 2
    # What was cleared while nobody had the folder does not come back.
    here.order(2, floors={NAMESPACE: 2})
    wait_until(lambda: not again.reads.stats().problem, 10.0, "the folder is read")
    assert on_disk(here) == {key(2)}
    assert fetch(here, again, record) == [NONE]
    assert_right(here, [record])


def test_cleared_chunks_never_come_back(here: Node, make: Made, tmp_path: Path) -> None:
    tier = make()
    record = here.store(key(1))
    tier.keep(10.0)
    here.order(2, floors={NAMESPACE: 2})
    assert on_disk(here) == set()
    assert fetch(here, tier, record) == [Refusal.NOT_HERE]
    wait_until(lambda: not files(tmp_path), 10.0, "the file is deleted")
    assert folder_of(tier).read_floors()[HISTORY] == {NAMESPACE: 2}


def test_floors_of_earlier_histories_are_kept(here: Node, make: Made) -> None:
    """Their clears count for what another disk or pool brings along."""
    tier = make()
    here.order(2, floors={EVERY_NAMESPACE: 2})
    old = here.store(key(1), stamp=Stamp(HISTORY, 2))
    tier.keep(10.0)
    again = restarted(here, tier, make)
    assert here.keeper.take_orders(OrdersDocument(Stamp(HISTORY + 1, 1)), 10.0)
    wait_until(lambda: not again.reads.stats().problem, 10.0, "the folder is read")
    # It is of an earlier history, of which something is known.
    assert on_disk(here) == {old.key}
    assert here.keeper.owner.index.floors.told[HISTORY] == {EVERY_NAMESPACE: 2}
    assert folder_of(again).read_floors() == here.keeper.owner.index.floors.told


def test_file_that_outlived_its_clearing_is_not_believed(
    here: Node, make: Made, tmp_path: Path
) -> None:
    """A crash came after the clearing was noted and before the files were deleted."""
    tier = make()
    written(here, tier)
    folder = folder_of(tier)
    begin_life(here, tier)
    folder.write_floors({0: {}, HISTORY: {NAMESPACE: 2}})
    again = make()
    assert again.reads.stats().num_chunks == 0
    wait_until(lambda: not files(tmp_path), 10.0, "it is deleted")


def test_folder_whose_floors_can_not_be_meant_is_not_believed(here: Node, make: Made) -> None:
    tier = make()
    written(here, tier)
    folder = folder_of(tier)
    begin_life(here, tier)
    (folder.path / "floors.json").write_text(f'{{"3": {{"": {1 << 63}}}}}')
    again = make(is_open=False)
    wait_until(lambda: "can't be read" in again.reads.stats().problem, 10.0, "it says why")
    assert again.reads.stats().num_chunks == 0
    # It serves nothing, and holds up no orders.
    assert here.keeper.take_orders(OrdersDocument(Stamp(HISTORY, 2)), 0.0)


# Clears that meet a bad disk


def test_clearing_is_noted_while_nothing_is_written_below_the_floor(
    here: Node, make: Made, tmp_path: Path
) -> None:
    tier = make()
    written(here, tier)
    begin_life(here, tier)
    full = make(floor_bytes=1 << 60, is_open=False)
    wait_until(lambda: "must stay free" in full.reads.stats().problem, 10.0, "it says why")
    here.store(key(2))
    assert full.keep(10.0) == 1
    assert full.reads.stats().chunks_written == 0
    here.order(2, floors={NAMESPACE: 2})
    assert folder_of(full).read_floors()[HISTORY] == {NAMESPACE: 2}
    wait_until(lambda: not files(tmp_path), 10.0, "the file goes")


def test_clearing_makes_room_where_it_can_not_be_noted(
    here: Node, make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    written(here, tier)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    document = OrdersDocument(Stamp(HISTORY, 2), floors={NAMESPACE: 2})
    with monkeypatch.context() as broken:
        broken.setattr(TierFolder, "write_floors", full)
        assert not here.keeper.take_orders(document, 0.2)
        wait_until(lambda: not files(tmp_path), 10.0, "the file goes")
    assert here.keeper.take_orders(document, 10.0)
    assert folder_of(tier).read_floors()[HISTORY] == {NAMESPACE: 2}


# Room


def test_oldest_files_go_when_the_limit_is_reached(here: Node, make: Made, tmp_path: Path) -> None:
    tier = make(most_bytes=20 * PAGE)
    for number in range(8):
        written(here, tier, number, num_bytes=4 * PAGE)
    stats = tier.reads.stats()
    assert stats.is_full
    assert stats.used_bytes <= 20 * PAGE
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * PAGE
    assert stats.files_evicted >= 4
    assert key(7) in on_disk(here)
    assert key(0) not in on_disk(here)


def test_flood_of_others_leaves_a_tenant_what_it_is_guaranteed_of_the_disk(
    here: Node, make: Made
) -> None:
    shares = {"quiet": OrderedShare("", 0.4, 1.0), "greedy": OrderedShare("", 0.0, 0.2)}
    most = 20 * (PAGE + 1024)
    tier = make(most_bytes=most)
    here.order(2, shares=shares)

    for number in range(6):
        written(here, tier, number, tenant="quiet")
    for number in range(100, 140):
        written(here, tier, number, tenant="greedy" if number % 2 else "")
    stats = tier.reads.stats()
    assert stats.used_bytes <= stats.most_bytes
    assert stats.tenant_bytes["greedy"] <= 0.2 * stats.most_bytes
    told = on_disk(here)
    assert {key(number) for number in range(6)} <= told
    assert len(told) > 9
    # Files say whose they are.
    begin_life(here, tier)
    assert make(most_bytes=most).reads.stats().tenant_bytes == stats.tenant_bytes


def test_chunk_that_can_have_no_place_is_not_tried_again(here: Node, make: Made) -> None:
    tier = make(most_bytes=PAGE // 2)
    record = here.store(key(0))
    assert tier.keep(10.0) == 1
    assert record.is_written
    assert not tier.reads.stats().problem


# Disks that fail


def test_disk_that_fails_for_a_while_is_used_again(
    here: Node, make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.disk.tier, "DISK_RETRY_S", 0.2)
    tier = make()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    record = here.store(key(1))
    with monkeypatch.context() as broken:
        broken.setattr("raykv.node.disk.chunk_file.write_chunks", full)
        assert tier.keep(10.0) == 1
        assert tier.reads.stats().problem == "No space left on device"
        assert record.readers == 0
    wait_until(lambda: not tier.reads.stats().problem, 10.0, "it is tried again")
    assert tier.keep(10.0) == 0
    assert not list(tmp_path.glob(f"*/*{PART_SUFFIX}"))


def test_place_that_can_not_be_a_folder_is_a_problem_and_no_error(
    here: Node, make: Made, tmp_path: Path
) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    tier = make(place, is_open=False)
    wait_until(lambda: "disk_path=" in tier.reads.stats().problem, 10.0, "it says why")
    assert here.keeper.take_orders(OrdersDocument(Stamp(HISTORY, 2)), 0.0)
    record = here.store(key(1))
    here.evict(record)
    assert fetch(here, tier, record) == [Refusal.NOT_HERE]


def test_file_that_can_not_be_read_for_a_moment_is_no_damage(
    here: Node, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    written(here, tier)
    begin_life(here, tier)
    monkeypatch.setattr(raykv.node.disk.tier, "DISK_RETRY_S", 0.1)

    def fails(_: Path) -> ChunkFile:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(raykv.node.disk.folder, "read_header", fails)
        again = make(is_open=False)
        wait_until(lambda: again.reads.stats().problem == "Input/output error", 10.0, "it says why")
    wait_until(lambda: again.reads.stats().num_chunks == 1, 10.0, "it is tried again")
    assert again.reads.stats().files_damaged == 0
