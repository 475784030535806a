"""Chunks of which only some blocks were stored: those are loaded, from wherever they come.

The other blocks hold nothing of what lay in the slot before, and a load that wants one is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    Blocks,
    ChunkName,
    Direction,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.base.settings import DiskPlace
from raykv.client.import_source import EPOCH, GENERATION, ImportSource
from raykv.engine.fetches import fetch_request
from raykv.engine.remote import FetchOrder
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.peers import Bytes
from raykv.node.read import ReadService
from raykv.node.service import NodeService, ServiceSettings, boot_epoch
from raykv.node.slots import SlotState
from raykv.protocol.columns import Handle, Replica, Source
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import Demotions
from raykv.protocol.peer import ReadReply, ReadRequest
from raykv.protocol.worker import NOT_CANONICAL, CanonicalPages, PageMap
from raykv.worker.job import JobRequest
from tests.fixtures.node.links import Worker, failures

STORE, LOAD = Direction.STORE, Direction.LOAD
PAGES = [256, 100]
PER_CHUNK = 4
SLOT_BYTES = SLOT_ALIGNMENT
NUM_SLOTS = 8
BEFORE = 0xEE
"""What every slot holds before: perhaps another model's KV."""

CHUNK = 3
LAST_TWO = Blocks(2, 2)

_names = itertools.count()


@dataclass
class Node:
    """A NodeService in this process, with what a worker wants to know of one."""

    service: NodeService
    name: str
    slot_bytes: int = SLOT_BYTES
    generation: int = 1

    def begin_test(self) -> None:
        """Slots hold what they held before, and later stores are new ones."""
        ctypes.memset(self.service.keeper.pool.address, BEFORE, NUM_SLOTS * SLOT_BYTES)
        self.generation += 10

    def slot(self, chunk: int) -> bytes:
        place = self.service.keeper.pool.address + chunk * SLOT_BYTES
        return ctypes.string_at(place, SLOT_BYTES)

    def chunk(self, chunk: int = CHUNK) -> ChunkName:
        """As `Worker.job` names it."""
        key, namespace = Key(bytes([chunk]) * 36), Namespace("ns")
        return ChunkName(namespace, key, Slot(chunk), Generation(self.generation), SLOT_BYTES)

    def state(self, chunk: int = CHUNK) -> SlotState:
        return self.service.keeper.table.state_of(Slot(chunk))


def begin(pool_path: str = "") -> Node:
    name = f"raykv-test/partial/{os.getpid()}/{next(_names)}"
    size = NUM_SLOTS * SLOT_BYTES
    service = NodeService(ServiceSettings(name, PoolGeometry(size, size), pool_path), boot_epoch())
    service.start()
    return Node(service, name)


@pytest.fixture(scope="module")
def running() -> Iterator[list[Node]]:
    made = [begin() for _ in range(3)]
    yield made
    for each in made:
        each.service.stop()


@pytest.fixture
def node(running: list[Node]) -> Node:
    running[0].begin_test()
    return running[0]


@pytest.fixture
def other(running: list[Node]) -> Node:
    running[1].begin_test()
    return running[1]


@pytest.fixture
def third(running: list[Node]) -> Node:
    running[2].begin_test()
    return running[2]


@pytest.fixture
def workers() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    yield made
    for worker in made:
        worker.end()


class Rank(Worker):
    """A worker whose jobs are about some blocks of one chunk."""

    def __init__(
        self,
        node: Node,
        rank: int,
        num_ranks: int,
        pages: list[int],
        canonical: CanonicalPages,
    ) -> None:
        self.node = node
        of: Any = node
        super().__init__(of, pages, PER_CHUNK, rank, num_ranks, canonical=canonical)

    def part(
        self,
        direction: Direction,
        blocks: Blocks,
        ids: list[int],
        chunk: int = CHUNK,
        newer: int = 0,
    ) -> JobRequest:
        """A job of these blocks of a chunk, which are those of the engine."""
        assert len(ids) == blocks.length
        made = self.job(direction, [chunk], ids, self.node.generation + newer)
        return replace(made, num_blocks=[blocks.length], first_block=[blocks.first])

    def carry_out(
        self,
        direction: Direction,
        blocks: Blocks,
        ids: list[int],
        chunk: int = CHUNK,
        newer: int = 0,
    ) -> list[Refusal]:
        return failures(self.run(self.part(direction, blocks, ids, chunk, newer)))


def attach(
    node: Node,
    workers: list[Rank],
    rank: int = 0,
    num_ranks: int = 1,
    pages: list[int] | None = None,
    canonical: CanonicalPages = NOT_CANONICAL,
) -> Rank:
    worker = Rank(node, rank, num_ranks, pages or PAGES, canonical)
    workers.append(worker)
    return worker


def image(worker: Rank, blocks: Blocks, ids: list[int]) -> bytes:
    """The slot of a chunk that one rank has stored in part: region by region, the rest zero."""
    parts = {blocks.first + at: worker.block(number) for at, number in enumerate(ids)}
    none = [bytes(page) for page in worker.pages]
    regions = [
        parts.get(place, none)[layer]
        for layer in range(len(worker.pages))
        for place in range(PER_CHUNK)
    ]
    return b"".join(regions).ljust(SLOT_BYTES, b"\0")


def assert_range_is_kept(worker: Rank, chunk: int = CHUNK) -> None:
    """Blocks 1 and 2 of the engine are the last two of the chunk; nothing else is loaded."""
    assert worker.carry_out(LOAD, LAST_TWO, [10, 11], chunk) == []
    assert [worker.block(10), worker.block(11)] == [worker.block(1), worker.block(2)]
    assert worker.carry_out(LOAD, Blocks(3, 1), [12], chunk) == []
    assert worker.block(12) == worker.block(2)
    before = [worker.block(number) for number in range(14, 18)]
    for blocks in (Blocks(0, 4), Blocks(1, 3), Blocks(0, 2), Blocks(1, 1), Blocks(0, 3)):
        ids = list(range(14, 14 + blocks.length))
        assert worker.carry_out(LOAD, blocks, ids, chunk) == [Refusal.PARTIAL], blocks
    assert [worker.block(number) for number in range(14, 18)] == before


def test_load_gets_the_blocks_that_were_stored_and_is_refused_for_others(
    node: Node, workers: list[Rank]
) -> None:
    worker = attach(node, workers)
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert_range_is_kept(worker)


def test_load_by_layer_is_refused_for_blocks_that_were_not_stored(
    node: Node, workers: list[Rank]
) -> None:
    worker = attach(node, workers)
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    before = worker.block(15)
    load = replace(worker.part(LOAD, Blocks(1, 3), [14, 15, 16]), by_layer=True)
    assert failures(worker.run(load)) == [Refusal.PARTIAL]
    assert worker.block(15) == before


def test_refused_chunk_spoils_no_other_of_its_job(node: Node, workers: list[Rank]) -> None:
    worker = attach(node, workers)
    assert worker.carry_out(STORE, LAST_TWO, [1, 2], chunk=0) == []
    assert worker.carry_out(STORE, Blocks(0, 4), [3, 4, 5, 6], chunk=1) == []
    ids = list(range(10, 18))
    both = worker.job(LOAD, [0, 1], ids, node.generation)
    result = worker.run(both)
    assert (result.failed_chunks, failures(result)) == ([0], [Refusal.PARTIAL])
    assert [worker.block(n) for n in range(14, 18)] == [worker.block(n) for n in range(3, 7)]


@pytest.mark.parametrize("blocks", [LAST_TWO, Blocks(0, 1), Blocks(1, 2), Blocks(0, 4)])
def test_slot_holds_nothing_of_what_was_there_before(
    node: Node, workers: list[Rank], blocks: Blocks
) -> None:
    worker = attach(node, workers)
    ids = list(range(1, 1 + blocks.length))
    assert worker.carry_out(STORE, blocks, ids) == []
    assert node.slot(CHUNK) == image(worker, blocks, ids)
    untouched = bytes([BEFORE]) * SLOT_BYTES
    assert [node.slot(CHUNK - 1), node.slot(CHUNK + 1)] == [untouched] * 2


def test_later_store_of_the_whole_chunk_is_loaded_as_a_whole(
    node: Node, workers: list[Rank]
) -> None:
    worker = attach(node, workers)
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert worker.carry_out(STORE, Blocks(0, 4), [3, 4, 5, 6], newer=1) == []
    assert worker.carry_out(LOAD, Blocks(0, 4), [10, 11, 12, 13], newer=1) == []
    assert [worker.block(n) for n in range(10, 14)] == [worker.block(n) for n in range(3, 7)]


def test_ranks_that_store_the_same_blocks_make_a_chunk_of_these(
    node: Node, workers: list[Rank]
) -> None:
    ranks = [attach(node, workers, rank, 2) for rank in range(2)]
    assert [rank.carry_out(STORE, LAST_TWO, [1, 2]) for rank in ranks] == [[], []]
    for rank in ranks:
        assert_range_is_kept(rank)
    assert bytes([BEFORE]) not in node.slot(CHUNK)[2 * 4 * sum(PAGES) :]


@pytest.mark.parametrize("other", [Blocks(0, 4), Blocks(1, 3), Blocks(0, 2)])
def test_ranks_that_store_other_blocks_make_no_chunk(
    node: Node, workers: list[Rank], other: Blocks
) -> None:
    ranks = [attach(node, workers, rank, 2) for rank in range(2)]
    assert ranks[0].carry_out(STORE, LAST_TWO, [1, 2]) == []
    ids = list(range(1, 1 + other.length))
    assert ranks[1].carry_out(STORE, other, ids) == [Refusal.POISONED]
    assert node.state() is SlotState.EMPTY
    assert ranks[0].carry_out(LOAD, LAST_TWO, [10, 11]) == [Refusal.STALE]


def test_canonical_chunk_keeps_the_blocks_that_all_ranks_have_stored(
    node: Node, workers: list[Rank]
) -> None:
    def pages(own_bytes: int, place: int) -> CanonicalPages:
        columns = ([0], [place], [own_bytes], [1], [own_bytes], [own_bytes])
        return CanonicalPages([PageMap(512, *columns)], [[0]])

    two = [attach(node, workers, n, 2, [256], pages(256, n * 256)) for n in range(2)]
    one = attach(node, workers, pages=[512], canonical=pages(512, 0))
    assert [rank.carry_out(STORE, LAST_TWO, [1, 2]) for rank in two] == [[], []]
    assert one.carry_out(LOAD, LAST_TWO, [10, 11]) == []
    assert one.block(11) == [two[0].block(2)[0] + two[1].block(2)[0]]
    assert one.carry_out(LOAD, Blocks(1, 3), [10, 11, 12]) == [Refusal.PARTIAL]
    assert node.slot(CHUNK) == bytes(1024) + one.block(10)[0] + one.block(11)[0] + bytes(2048)


def test_pool_file_keeps_the_blocks_of_a_chunk_over_a_restart(
    tmp_path: Path, workers: list[Rank]
) -> None:
    path = str(tmp_path / "pool")
    first = begin(path)
    first.begin_test()
    worker = attach(first, workers)
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert first.service.keeper.wait_for_seals(10.0) == 0
    first.service.stop()
    second = begin(path)
    second.generation = first.generation
    assert_range_is_kept(attach(second, workers))
    second.service.stop()


# To other nodes, disks and files


class Direct:
    """A transport to one source, which answers at once; all goes through the wire's encoding."""

    def __init__(self, read: ReadService | DiskTier | ImportSource) -> None:
        self._read = read

    def start_read(self, source: Source, request: ReadRequest) -> Direct:
        raw = encode(request)
        if isinstance(self._read, ImportSource):
            answered, self._data = self._read.read(raw)
        else:
            read = self._read.reads if isinstance(self._read, DiskTier) else self._read
            reply, self._data = read.read(decode(raw, ReadRequest))
            answered = encode(reply)
        self._reply = decode(answered, ReadReply)
        return self

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        assert timeout_s > 0
        return self._reply, self._data

    def abandon(self) -> None:
        raise AssertionError


def fetch(to: Node, source: Direct, epoch: int, handle: Handle) -> None:
    """Have the chunk of `handle` at a source in slot `CHUNK` of a node."""
    name = to.chunk()
    replica = Replica(Source("source"), epoch, handle)  # type: ignore[arg-type]
    order = FetchOrder(name.key, Handle(name.slot, name.generation), SLOT_BYTES, (replica,))
    service = FetchService(to.service.keeper, to.service.epoch, source)
    result = service.fetch(fetch_request(name.namespace, [order], to.service.epoch, 10.0))
    assert result.refusals == [Refusal.NONE]


def test_fetched_chunk_has_the_blocks_that_its_source_has(
    node: Node, other: Node, workers: list[Rank]
) -> None:
    there, here = attach(node, workers), attach(other, workers)
    assert there.carry_out(STORE, LAST_TWO, [1, 2]) == []
    source = ReadService(node.service.keeper, node.service.epoch)
    at = Handle(node.chunk().slot, node.chunk().generation)
    fetch(other, Direct(source), node.service.epoch, at)
    assert_range_is_kept(here)
    assert other.slot(CHUNK) == image(there, LAST_TWO, [1, 2])


@pytest.mark.parametrize("blocks", [Blocks(0, 0), Blocks(-1, 2), Blocks(2, -1), Blocks(0, 1 << 40)])
def test_answer_with_impossible_blocks_is_not_believed(
    node: Node, other: Node, workers: list[Rank], blocks: Blocks
) -> None:
    there = attach(node, workers)
    assert there.carry_out(STORE, LAST_TWO, [1, 2]) == []

    class Liar(Direct):
        def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
            reply, data = super().wait(timeout_s)
            return replace_partial(reply, {0: blocks}), data

    source = Liar(ReadService(node.service.keeper, node.service.epoch))
    with pytest.raises(AssertionError):
        fetch(other, source, node.service.epoch, Handle(Slot(CHUNK), Generation(node.generation)))
    assert other.state() is SlotState.EMPTY


def replace_partial(reply: ReadReply, partial: dict[int, Blocks]) -> ReadReply:
    return ReadReply(reply.node_epoch, reply.refusals, reply.checksums, partial)


def tier_of(node: Node, path: Path) -> DiskTier:
    place = DiskPlace(str(path), most_bytes=1 << 20, floor_bytes=0)
    tier = DiskTier(place, node.service.keeper, node.service.epoch)
    tier.start()
    return tier


def write(tier: DiskTier, name: ChunkName) -> None:
    """Have a chunk written, if it has to be."""
    tier.demote(Demotions([str(name.namespace)], [0], [name.key], [name.slot], [name.generation]))
    tier._flush_now(time.monotonic() + 10.0)


def test_disk_and_import_bring_back_the_blocks_that_were_stored(
    node: Node, other: Node, third: Node, workers: list[Rank], tmp_path: Path
) -> None:
    there, here = attach(node, workers), attach(other, workers)
    assert there.carry_out(STORE, LAST_TWO, [1, 2]) == []
    tier = tier_of(node, tmp_path)
    try:
        write(tier, node.chunk())
        entry = tier._index.find(Namespace("ns"), node.chunk().key)
        assert entry is not None
        assert entry.chunk.blocks == LAST_TWO
        at = Handle(Slot(entry.place), entry.chunk.generation)
        fetch(other, Direct(tier), node.service.epoch, at)
        assert_range_is_kept(here)
        assert other.slot(CHUNK) == image(there, LAST_TWO, [1, 2])
        (path,) = tmp_path.glob("*/*.safetensors")
        assert bytes([BEFORE]) * 16 not in path.read_bytes()
        worker = attach(third, workers)
        source = ImportSource([str(path)])
        fetch(third, Direct(source), EPOCH, Handle(Slot(0), Generation(GENERATION)))
        assert_range_is_kept(worker)
    finally:
        tier.stop()


def test_disk_takes_a_chunk_again_when_more_of_it_was_stored_and_never_less(
    node: Node, workers: list[Rank], tmp_path: Path
) -> None:
    worker = attach(node, workers)
    tier = tier_of(node, tmp_path)

    def on_disk() -> Blocks:
        write(tier, node.chunk())
        entry = tier._index.find(Namespace("ns"), node.chunk().key)
        assert entry is not None
        return entry.chunk.blocks

    try:
        found = []
        for blocks in (LAST_TWO, Blocks(1, 3), LAST_TWO):
            node.generation += 1
            assert worker.carry_out(STORE, blocks, list(range(1, 1 + blocks.length))) == []
            found.append(on_disk())
        assert found == [LAST_TWO, Blocks(1, 3), Blocks(1, 3)]
    finally:
        tier.stop()
