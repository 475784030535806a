"""Who copies which chunks of a node now: workers, with their jobs, and other nodes.

            announce                begin_chunks            end_chunks           end_job
  (none) ─────────────► announced ────────────────► copied ────────────► ended ─────────► (none)
                          loads are admitted

A copy holds the chunk's record, its ticket, and ends with it.

Invariants:
1. The readers of all loads of a message are registered before a store of it takes a slot.
2. Each chunk that was begun is ended once, and each job.
3. What lands from other nodes takes a quarter of the pool at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import cast

from raykv.base.ids import GROUP_BYTES, Blocks, Direction, Key, Namespace, Refusal
from raykv.node.pool.engines import LocalEngines
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.records import VOID, ChunkRecord, StorePart
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import CopyJob, CopyResult
from raykv.protocol.listing import ListedRows

STORE_EXPIRY_S = 30.0
"""How long after a chunk's first part the others may come."""

LANDING_PART = 4
"""One part in this many of the pool is for chunks that land from other nodes."""

_blocks = lru_cache(1024)(Blocks)
"""Chunks of a job, and of many, share them: a million would take 70 MB."""

LANDINGS = 0
"""The life that lands what comes from other nodes; no engine has it."""


@dataclass(slots=True, eq=False)
class AdmittedJob:
    """A rank's job, with a ticket or a refusal for each chunk, None for those not begun. What fails
    of a chunk that has a ticket is its refusal from then on.

    `part`: of the store that is to be ended; None for loads, and where nothing was stored.
    `slot_bytes`: of each chunk; 0 if no slot is right for it. `under_way`: chunks that were begun
    and have not ended, by their numbers.
    """

    job: CopyJob
    life: int
    rank: int
    keys: list[Key]
    blocks: list[Blocks]
    chunks: list[ChunkRecord | Refusal | None]
    sizes: Mapping[int, int] = field(default_factory=dict)
    part: StorePart | None = None
    slot_bytes: list[int] = field(default_factory=list)
    under_way: dict[int, ChunkRecord] = field(default_factory=dict)

    @property
    def namespace(self) -> Namespace:
        """Of all its chunks."""
        return Namespace(self.job.namespace)

    @property
    def is_load(self) -> bool:
        """Whether it copies out of the pool."""
        return self.job.direction == Direction.LOAD

    def put(self, at: int, found: ChunkRecord | Refusal) -> None:
        """A chunk was begun, or refused."""
        self.chunks[at] = found
        if isinstance(found, ChunkRecord):
            self.under_way[at] = found

    def refuse_rest(self, refusal: Refusal) -> None:
        """Refuse all chunks that are not refused yet. Copies under way still have to end."""
        for at, found in enumerate(self.chunks):
            if not (isinstance(found, Refusal) and found):
                self.chunks[at] = refusal

    def take_sizes(self, sizes: Mapping[int, int]) -> None:
        """Its slots have these sizes, by KV group."""
        self.sizes = sizes
        ends = {group_id.to_bytes(GROUP_BYTES, "big"): size for group_id, size in sizes.items()}
        self.slot_bytes = [ends.get(key[-GROUP_BYTES:], 0) for key in self.keys]


class Jobs:
    """Jobs of workers; see the module's docstring.

    Args:
        index: of the pool.
        engines: those that are here.
    """

    def __init__(self, index: PoolIndex, engines: LocalEngines) -> None:
        self._index = index
        self._engines = engines
        # By life and rank, how many ranks each of its lines speaks of; and stores that have not
        # ended, by life.
        self._lines: dict[int, dict[int, list[int]]] = {}
        self._stores: dict[int, set[StorePart]] = {}

    # Lines

    def begin_line(self, life: int, rank: int, num_ranks: int) -> None:
        """A worker is connected, perhaps before its last connection has ended."""
        self._lines.setdefault(life, {}).setdefault(rank, []).append(num_ranks)
        self._index.begin_line(life, rank)

    def end_line(self, life: int, rank: int) -> None:
        """It is not any more: what it has not stored is void, and stays so for other ranks.

        Its copies may go on, and are ended as they stop.
        """
        lines = self._lines.get(life, {})
        if rank not in lines:
            return
        num_ranks = lines[rank].pop()
        if not lines[rank]:
            del lines[rank]
            self._index.end_line(life, rank, num_ranks)
        self.forget(life)

    def forget(self, life: int) -> None:
        """Forget an engine that is gone, once all its workers are as well."""
        if not self._lines.get(life):
            self._lines.pop(life, None)
            if self._engines.get(life) is None:
                self._stores.pop(life, None)
                self._index.end_life(life)

    # Jobs

    def announce(
        self, life: int, rank: int, num_ranks: int, jobs: Sequence[CopyJob], now: float
    ) -> list[AdmittedJob]:
        """A message of jobs: all its loads are admitted, and no chunk of its stores yet."""
        engine = self._engines.get(life)
        is_known = engine is not None and num_ranks == engine.hello.num_ranks
        is_known = is_known and 0 <= rank < num_ranks
        admitted = []
        for job in jobs:
            keys = cast("list[Key]", list(job.keys))
            blocks = list(map(_blocks, job.first_block, job.num_blocks))
            made = AdmittedJob(job, life, rank, keys, blocks, [None] * len(keys))
            sizes = engine.sizes.get(made.namespace) if engine is not None else None
            if job.capture is not None:
                # It touches no chunk.
                made.chunks = [Refusal.NONE] * len(keys)
            elif not is_known or sizes is None:
                made.chunks = [Refusal.BAD_HANDLE] * len(keys)
            else:
                made.take_sizes(sizes)
                if not made.is_load:
                    self._begin_store(made, num_ranks)
            admitted.append(made)
        self._begin_loads([made for made in admitted if made.is_load and made.sizes], now)
        return admitted

    def _begin_store(self, made: AdmittedJob, num_ranks: int) -> None:
        part = StorePart(made.life, made.job.job_id, made.rank, num_ranks)
        stores = self._stores.setdefault(made.life, set())
        if part in stores:
            # The same job again: it is copied once.
            made.chunks = [Refusal.WRITING] * len(made.keys)
        else:
            stores.add(part)
            made.part = part

    def _begin_loads(self, loads: Sequence[AdmittedJob], now: float) -> None:
        chunks: list[tuple[Namespace, Key, Blocks, int]] = []
        for made in loads:
            chunks += zip(repeat(made.namespace), made.keys, made.blocks, made.slot_bytes)
        found = iter(self._index.begin_loads(chunks, now))
        for made in loads:
            for at, record in zip(range(len(made.keys)), found, strict=False):
                made.put(at, record)

    def begin_chunks(self, made: AdmittedJob, numbers: Iterable[int], now: float) -> None:
        """Begin the next chunks of a store, from heads of prompts to tails, as far as it can be."""
        if made.part not in self._stores.get(made.life, ()):
            return
        assert made.part is not None, made
        namespace, orders, tenant = made.namespace, made.job.orders, made.job.tenant
        keys, sizes, blocks = made.keys, made.slot_bytes, made.blocks
        new = [at for at in numbers if made.chunks[at] is None]
        offered = [
            ChunkRecord(namespace, keys[at], sizes[at], orders, blocks[at], tenant) for at in new
        ]
        found = self._index.begin_stores(made.part, offered, now, now + STORE_EXPIRY_S)
        for at, each in zip(new, found, strict=True):
            made.put(at, each)

    def end_chunks(
        self, made: AdmittedJob, numbers: Iterable[int], *, ok: bool
    ) -> list[ChunkRecord]:
        """A rank has stopped copying these, those of them that it was copying; others were refused,
        or have ended. Returns what is READY now by its store.
        """
        if made.is_load:
            for at in numbers:
                if (read := made.under_way.pop(at, None)) is not None:
                    self._index.end_load(read)
            return []
        ended = {at: made.under_way.pop(at) for at in numbers if at in made.under_way}
        records = list(ended.values())
        blocks = [made.blocks[at] for at in ended]
        stored = self._index.end_stores(records, made.rank, ok=ok, blocks=blocks)
        if len(stored) < len(ended):
            for at, record in ended.items():
                if record.state is VOID and made.chunks[at] is record:
                    is_void = self._index.floors.is_void(record.namespace, record.stamp)
                    made.chunks[at] = Refusal.CLEARED if is_void else Refusal.POISONED
        space = self._engines.spaces.get(made.namespace)
        if space is not None and stored:
            space.count(len(stored), 0)
        return stored

    def end_job(self, made: AdmittedJob, num_bytes: int, seconds: float) -> CopyResult:
        """A rank has ended a job, once all of its chunks have.

        The result says how each chunk of a store is now, and of a load those that failed.
        """
        assert not made.under_way, made
        failed: dict[int, Refusal] = {}
        for at, found in enumerate(made.chunks):
            if isinstance(found, ChunkRecord):
                continue
            refusal = Refusal.CANCELLED if found is None else self._still(made, at, found)
            if refusal and refusal is not Refusal.HERE:
                failed[at] = refusal
        part, made.part = made.part, None
        stores = self._stores.get(made.life, set())
        if part in stores:
            stores.remove(part)
            self._index.end_job(part)
        rows = ListedRows()
        if made.job.capture is None:
            shown = failed if made.is_load else range(len(made.keys))
            rows = self._index.rows(made.namespace, [made.keys[at] for at in shown])
        return CopyResult(
            made.job.job_id,
            self._index.listing.life,
            self._index.listing.number,
            rows,
            Numbers.of(failed),
            bytes(failed.values()),
            num_bytes,
            seconds,
        )

    def _still(self, made: AdmittedJob, at: int, refusal: Refusal) -> Refusal:
        """Why a chunk was refused, as things are now: the blocks may have come that it lacked."""
        if refusal is Refusal.PARTIAL:
            here = self._index.find(made.namespace, made.keys[at])
            if here is None or here.blocks.has(made.blocks[at]):
                return Refusal.WRITING
        return refusal

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for life in self._stores:
            assert self._lines.get(life) or self._engines.get(life) is not None, life
        assert all(self._lines.values()), self._lines


class Landings:
    """What comes from other nodes; see the module's docstring.

    Each landing is a job of its own: what one was told says nothing of the next.
    """

    def __init__(self, index: PoolIndex) -> None:
        self._index = index
        self._most_bytes = index.places.geometry.pool_bytes // LANDING_PART
        self._landing: dict[ChunkRecord, StorePart] = {}
        self._num_begun = 0

    def land(self, chunk: ChunkRecord, now: float) -> ChunkRecord | Refusal:
        """Give a chunk that has come a slot to be written to, or say why it gets none.

        It was wanted here: for some seconds it does not go.
        """
        if self._num_bytes + chunk.slot_bytes > self._most_bytes:
            return self._index.objection(chunk) or Refusal.NO_ROOM
        self._num_begun += 1
        part = StorePart(LANDINGS, self._num_begun)
        (record,) = self._index.begin_stores(part, [chunk], now, now + STORE_EXPIRY_S)
        if isinstance(record, Refusal):
            self._index.end_job(part)
            return record
        record.found_at = now
        self._landing[record] = part
        return record

    def landed(self, record: ChunkRecord, *, ok: bool) -> None:
        """The write of a landing chunk has ended."""
        assert record in self._landing, record
        part = self._landing.pop(record)
        self._index.end_stores([record], 0, ok=ok, blocks=[record.blocks])
        self._index.end_job(part)

    @property
    def _num_bytes(self) -> int:
        return sum(record.slot_bytes for record in self._landing)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._num_bytes <= self._most_bytes, self._num_bytes
        assert all(record.writers == 1 for record in self._landing), self._landing
