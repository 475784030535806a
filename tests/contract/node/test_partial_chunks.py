"""Chunks of which only some blocks were stored: those are loaded, from wherever they come.

The other blocks hold nothing of what lay in the slot before, and a load that wants one is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from raykv.base.ids import SLOT_ALIGNMENT, Blocks, Direction, Namespace, Refusal, Stamp
from raykv.base.settings import DiskPlace
from raykv.client.import_source import ImportSource
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.peers import Bytes
from raykv.node.pool.records import ChunkRecord
from raykv.node.read import ReadService
from raykv.protocol.columns import Keys, Numbers, Source, SourceKind, SourceRows
from raykv.protocol.copies import CopyResult, Fetch, Read, ReadReply
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import Reason
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.worker import CanonicalPages, PageMap
from raykv.worker.job import JobRequest
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import lives
from tests.fixtures.node.links import PATIENT, Worker, changed, failures, job_ids
from tests.fixtures.node.local import LocalNode

STORE, LOAD = Direction.STORE, Direction.LOAD
PAGES = [256, 100]
PER_CHUNK = 4
SLOT_BYTES = SLOT_ALIGNMENT
NUM_SLOTS = 8
BEFORE = 0xEE
"""What every slot holds before: perhaps another model's KV."""

CHUNK = 3
SPACE = Namespace("ns")
LAST_TWO = Blocks(2, 2)


class Node(LocalNode):
    def begin_test(self) -> None:
        """It has no chunk, and slots hold what they held before."""
        with self.keeper.lock:
            index = self.keeper.owner.index
            for record in list(index.places):
                index.drop(record, Reason.DAMAGED)
            assert not list(index.places)
            for kept in index.shelf.page(0, 1 << 62)[0]:
                index.shelf.remove(kept.namespace, kept.key, Reason.DAMAGED)
            ctypes.memset(self.keeper.pool.address, BEFORE, NUM_SLOTS * SLOT_BYTES)

    def record(self, chunk: int = CHUNK) -> ChunkRecord | None:
        return self.keeper.owner.index.find(SPACE, numbered_key(chunk))

    def slot(self, chunk: int = CHUNK) -> bytes:
        record = self.record(chunk)
        assert record is not None
        return ctypes.string_at(self.keeper.address_of(record), SLOT_BYTES)

    def others(self) -> bytes:
        """What is in all slots but that of the chunk."""
        pool = ctypes.string_at(self.keeper.pool.address, NUM_SLOTS * SLOT_BYTES)
        record = self.record()
        assert record is not None
        start = record.slot * SLOT_ALIGNMENT
        return pool[:start] + pool[start + SLOT_BYTES :]


def begin(pool_path: str = "") -> Node:
    node = Node(NUM_SLOTS, pool_path=pool_path)
    node.start()
    node.keeper.take_orders(OrdersDocument(Stamp(0, 1)), 1.0)
    return node


@pytest.fixture(scope="module")
def running() -> Iterator[list[Node]]:
    made = [begin() for _ in range(3)]
    yield made
    for each in made:
        each.service.stop()


@pytest.fixture
def nodes(running: list[Node]) -> list[Node]:
    for each in running:
        each.begin_test()
    return running


@pytest.fixture
def node(nodes: list[Node]) -> Node:
    return nodes[0]


@pytest.fixture
def other(nodes: list[Node]) -> Node:
    return nodes[1]


@pytest.fixture
def workers() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    yield made
    for worker in made:
        worker.end()


class Rank(Worker):
    """A worker whose jobs are about some blocks of one chunk."""

    def part(
        self,
        direction: Direction,
        blocks: Blocks,
        ids: list[int],
        chunk: int = CHUNK,
        job_id: int = 0,
    ) -> JobRequest:
        """A job of these blocks of a chunk, which are those of the engine."""
        assert len(ids) == blocks.length
        return changed(
            self.job(direction, [chunk], ids, job_id),
            num_blocks=Numbers.of([blocks.length]),
            first_block=Numbers.of([blocks.first]),
            block_ids=Numbers.of(ids),
        )

    def carry_out(
        self, direction: Direction, blocks: Blocks, ids: list[int], **more: int
    ) -> list[Refusal]:
        return failures(self.run(self.part(direction, blocks, ids, **more)))


def attach(node: Node, workers: list[Rank], pages: list[int] = PAGES, **fields: Any) -> Rank:
    workers.append(Rank(node, pages, PER_CHUNK, settings=PATIENT, **fields))
    return workers[-1]


@pytest.fixture
def worker(node: Node, workers: list[Rank]) -> Rank:
    return attach(node, workers)


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


def assert_range_is_kept(worker: Rank) -> None:
    """Blocks 1 and 2 of the engine are the last two of the chunk; nothing else is loaded."""
    assert worker.carry_out(LOAD, LAST_TWO, [10, 11]) == []
    assert [worker.block(10), worker.block(11)] == [worker.block(1), worker.block(2)]
    assert worker.carry_out(LOAD, Blocks(3, 1), [12]) == []
    assert worker.block(12) == worker.block(2)
    before = [worker.block(number) for number in range(14, 18)]
    for blocks in (Blocks(0, 4), Blocks(1, 3), Blocks(0, 2), Blocks(1, 1), Blocks(0, 3)):
        ids = list(range(14, 14 + blocks.length))
        assert worker.carry_out(LOAD, blocks, ids) == [Refusal.PARTIAL], blocks
    assert [worker.block(number) for number in range(14, 18)] == before


def test_load_gets_the_blocks_that_were_stored_and_is_refused_for_others(worker: Rank) -> None:
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert_range_is_kept(worker)
    before = worker.block(15)
    load = changed(worker.part(LOAD, Blocks(1, 3), [14, 15, 16]), by_layer=True)
    assert failures(worker.run(load)) == [Refusal.PARTIAL]
    assert worker.block(15) == before


def test_refused_chunk_spoils_no_other_of_its_job(worker: Rank) -> None:
    assert worker.carry_out(STORE, LAST_TWO, [1, 2], chunk=0) == []
    assert worker.carry_out(STORE, Blocks(0, 4), [3, 4, 5, 6], chunk=1) == []
    ids = list(range(10, 18))
    both = worker.job(LOAD, [0, 1], ids)
    result = worker.run(both)
    assert (list(result.failed_chunks), failures(result)) == ([0], [Refusal.PARTIAL])
    assert [worker.block(n) for n in range(14, 18)] == [worker.block(n) for n in range(3, 7)]


@pytest.mark.parametrize("blocks", [LAST_TWO, Blocks(0, 1), Blocks(1, 2), Blocks(0, 4)])
def test_slot_holds_nothing_of_what_was_there_before(
    node: Node, worker: Rank, blocks: Blocks
) -> None:
    ids = list(range(1, 1 + blocks.length))
    assert worker.carry_out(STORE, blocks, ids) == []
    assert node.slot(CHUNK) == image(worker, blocks, ids)
    assert set(node.others()) == {BEFORE}


def test_later_store_of_the_whole_chunk_is_loaded_as_a_whole(worker: Rank) -> None:
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert worker.carry_out(STORE, Blocks(0, 4), [3, 4, 5, 6]) == []
    assert worker.carry_out(LOAD, Blocks(0, 4), [10, 11, 12, 13]) == []
    assert [worker.block(n) for n in range(10, 14)] == [worker.block(n) for n in range(3, 7)]


def test_ranks_that_store_the_same_blocks_make_a_chunk_of_these(
    node: Node, workers: list[Rank]
) -> None:
    life, job_id = next(lives), next(job_ids)
    ranks = [attach(node, workers, rank=rank, num_ranks=2, life=life) for rank in range(2)]
    stored = [rank.carry_out(STORE, LAST_TWO, [1, 2], job_id=job_id) for rank in ranks]
    assert stored == [[], []]
    for rank in ranks:
        assert_range_is_kept(rank)
    assert bytes([BEFORE]) not in node.slot(CHUNK)[2 * 4 * sum(PAGES) :]


@pytest.mark.parametrize("other", [Blocks(0, 4), Blocks(1, 3), Blocks(0, 2)])
def test_ranks_that_store_other_blocks_make_no_chunk(
    node: Node, workers: list[Rank], other: Blocks
) -> None:
    life, job_id = next(lives), next(job_ids)
    ranks = [attach(node, workers, rank=rank, num_ranks=2, life=life) for rank in range(2)]
    assert ranks[0].carry_out(STORE, LAST_TWO, [1, 2], job_id=job_id) == []
    ids = list(range(1, 1 + other.length))
    assert ranks[1].carry_out(STORE, other, ids, job_id=job_id) == [Refusal.POISONED]
    assert node.record() is None
    assert ranks[0].carry_out(LOAD, LAST_TWO, [10, 11]) == [Refusal.NOT_HERE]


def test_canonical_chunk_keeps_the_blocks_that_all_ranks_have_stored(
    node: Node, workers: list[Rank]
) -> None:
    def pages(own_bytes: int, place: int) -> CanonicalPages:
        columns = ([0], [place], [own_bytes], [1], [own_bytes], [own_bytes])
        return CanonicalPages([PageMap(512, *columns)], [[0]])

    life, job_id = next(lives), next(job_ids)
    two = [
        attach(node, workers, [256], rank=n, num_ranks=2, canonical=pages(256, n * 256), life=life)
        for n in range(2)
    ]
    one = attach(node, workers, [512], canonical=pages(512, 0))
    stored = [rank.carry_out(STORE, LAST_TWO, [1, 2], job_id=job_id) for rank in two]
    assert stored == [[], []]
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
    assert first.keeper.wait_for_seals(10.0) == 0
    first.service.stop()
    second = begin(path)
    assert_range_is_kept(attach(second, workers))
    second.service.stop()


# To other nodes, disks and files


class Direct:
    """A transport to one source, which answers at once; all goes through the wire's encoding."""

    def __init__(self, read: ReadService | DiskTier | ImportSource) -> None:
        self._read = read

    def start_read(self, source: Source, request: Read) -> Direct:
        raw = encode(request)
        if isinstance(self._read, ImportSource):
            answered, self._data = self._read.read(raw)
        else:
            read = self._read.reads if isinstance(self._read, DiskTier) else self._read
            reply, self._data = read.read(decode(raw, Read))
            answered = encode(reply)
        self._reply = decode(answered, ReadReply)
        return self

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        assert timeout_s > 0
        return self._reply, self._data

    def abandon(self) -> None:
        raise AssertionError


def fetch(to: Node, source: Direct, kind: SourceKind = SourceKind.POOL) -> CopyResult:
    """Have the chunk at a source come to a node."""
    order = Fetch(
        number=1,
        life=0,
        namespace=SPACE,
        keys=Keys.of([numbered_key(CHUNK)]),
        slot_bytes=Numbers.of([SLOT_BYTES]),
        sources=SourceRows.of([[Source("source", kind)]]),
    )
    return FetchService(to.keeper, source).fetch(order)


def test_fetched_chunk_has_the_blocks_that_its_source_has(
    node: Node, other: Node, workers: list[Rank]
) -> None:
    there, here = attach(node, workers), attach(other, workers)
    assert there.carry_out(STORE, LAST_TWO, [1, 2]) == []
    assert fetch(other, Direct(ReadService(node.keeper))).refusals == b""
    assert_range_is_kept(here)
    assert other.slot() == image(there, LAST_TWO, [1, 2])


@pytest.mark.parametrize("blocks", [Blocks(0, 0), Blocks(-1, 2), Blocks(2, -1), Blocks(0, 1 << 40)])
def test_answer_with_impossible_blocks_is_not_believed(
    node: Node, other: Node, worker: Rank, blocks: Blocks
) -> None:
    assert worker.carry_out(STORE, LAST_TWO, [1, 2]) == []

    class Liar(Direct):
        def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
            reply, data = super().wait(timeout_s)
            rows = msgspec.structs.replace(reply.rows)
            lies = {"first_block": blocks.first, "num_blocks": blocks.length}
            for name, number in lies.items():
                msgspec.structs.force_setattr(rows, name, Numbers.of([number]))
            return msgspec.structs.replace(reply, rows=rows), data

    assert fetch(other, Liar(ReadService(node.keeper))).refusals != b""
    assert other.record() is None


def tier_of(node: Node, path: Path) -> DiskTier:
    place = DiskPlace(str(path), most_bytes=1 << 20, floor_bytes=0)
    tier = DiskTier(place, node.keeper)
    tier.start()
    return tier


def test_disk_and_import_bring_back_the_blocks_that_were_stored(
    nodes: list[Node], workers: list[Rank], tmp_path: Path
) -> None:
    node, other, third = nodes
    there, here = attach(node, workers), attach(other, workers)
    assert there.carry_out(STORE, LAST_TWO, [1, 2]) == []
    tier = tier_of(node, tmp_path)
    try:
        assert tier.keep(10.0) == 0
        kept = node.keeper.owner.index.shelf.find(SPACE, numbered_key(CHUNK))
        assert kept is not None
        assert kept.chunk.blocks == LAST_TWO
        assert fetch(other, Direct(tier), SourceKind.DISK).refusals == b""
        assert_range_is_kept(here)
        assert other.slot() == image(there, LAST_TWO, [1, 2])
        (path,) = tmp_path.glob("*/*.safetensors")
        assert bytes([BEFORE]) * 16 not in path.read_bytes()
        worker = attach(third, workers)
        source = ImportSource([str(path)])
        assert fetch(third, Direct(source), SourceKind.IMPORT).refusals == b""
        assert_range_is_kept(worker)
    finally:
        tier.stop()


def test_disk_takes_a_chunk_again_when_more_of_it_was_stored_and_never_less(
    node: Node, worker: Rank, tmp_path: Path
) -> None:
    tier = tier_of(node, tmp_path)

    def on_disk() -> Blocks:
        assert tier.keep(10.0) == 0
        kept = node.keeper.owner.index.shelf.find(SPACE, numbered_key(CHUNK))
        assert kept is not None
        return kept.chunk.blocks

    try:
        found = []
        for blocks in (LAST_TWO, Blocks(1, 3), LAST_TWO):
            assert worker.carry_out(STORE, blocks, list(range(1, 1 + blocks.length))) == []
            found.append(on_disk())
        assert found == [LAST_TWO, Blocks(1, 3), Blocks(1, 3)]
    finally:
        tier.stop()
