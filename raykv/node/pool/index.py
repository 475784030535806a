"""Which chunks a node has, and who may touch which bytes now.

Whoever is admitted gets the chunk's record, and ends with that record: what the index has under the
same name by then does not matter. A store is one engine's job; its ranks' parts make one record.
What the first rank was told about a chunk of a job is what all of them are told, until all have
ended the job.

Invariants:
1. A name has at most one READY record and one WRITING record.
2. A record that is being written has no readers; one with readers is not written.
3. A slot has one record, which keeps it while anybody copies, whether it is in the index or not.
4. READY means that all ranks of one job have stored the same blocks, and that its stamp is above
   the floor of its namespace.
5. Every change of what the index finds is a change of the listing.
6. What goes to make room has no reader and no writer, is not pinned, was not found lately and is
   not of the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    EVERY_NAMESPACE,
    MAX_KEY_BYTES,
    NO_BLOCKS,
    Blocks,
    Key,
    Namespace,
    Refusal,
    Stamp,
    group_of,
)
from raykv.base.shares import Share
from raykv.node.pool.claims import Claims
from raykv.node.pool.floors import Floors
from raykv.node.pool.listing import Listing
from raykv.node.pool.places import Places
from raykv.node.pool.records import ChunkRecord, ChunkState, RecordQueue, Standing
from raykv.node.pool.room import Room
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)

MAX_OPEN_JOBS = 4096
"""Store jobs of one engine whose ranks have not all ended them; beyond that stores are refused."""

FRESH_S = 3.0
"""What was found so lately does not go for a store: its load may be on its way."""


class StorePart(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of a store job.

    Args:
        life: of the EngineCore process; jobs of another life are others.
        job_id: rises within a life.
        rank: of this node's ranks.
        num_ranks: so many parts make a chunk.
    """

    life: int
    job_id: int
    rank: int = 0
    num_ranks: int = 1


class OfferedChunk(msgspec.Struct, frozen=True, gc=False):
    """What a store offers; see `ChunkRecord` for its fields."""

    namespace: Namespace
    key: Key
    slot_bytes: int
    stamp: Stamp
    blocks: Blocks = ALL_BLOCKS
    owner: int = 0


@dataclass(slots=True)
class _OpenJob:
    """What ranks are told about a job's chunks; `ended` has a bit for each rank that has ended it.

    `full`: KV groups of which a chunk found no room. All later chunks of those groups are refused:
    behind a gap in a prefix nothing is worth its slot. `here`: what was offered and is there. Of
    each queue, `latest` is the chunk that has entered it last.
    """

    num_ranks: int
    verdicts: dict[tuple[Namespace, Key], ChunkRecord | Refusal] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    here: dict[ChunkRecord, None] = field(default_factory=dict)
    latest: dict[RecordQueue, ChunkRecord] = field(default_factory=dict)
    ended: int = 0


class _Parts(msgspec.Struct, gc=False):
    """Of a record that is being written: a bit for each rank that has stored its part."""

    part: StorePart
    expires_at: float
    stored: int = 0


class PoolIndex:
    """See the module's docstring. Threads take turns, under one lock of the owner.

    Args:
        geometry: the pool's.
        listing: where changes are numbered.
        floors: what is void.
        companions: what is worth nothing once chunks of a namespace are gone.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        listing: Listing,
        floors: Floors,
        companions: Callable[[Namespace, Sequence[Key]], Iterable[Key]] = lambda *_: (),
    ) -> None:
        self.listing = listing
        self.places = Places(geometry)
        self.room = Room(self.places)
        self.claims = Claims(
            geometry.pool_bytes,
            self.find,
            lambda record, standing: self.room.order_of(record).stand(record, standing),
        )
        self.floors = floors
        self._companions = companions
        self._ready: dict[Namespace, dict[Key, ChunkRecord]] = {}
        self._writing: dict[tuple[Namespace, Key], ChunkRecord] = {}
        self._parts: dict[ChunkRecord, _Parts] = {}
        # By the engine's life and the job's id.
        self._jobs: dict[int, dict[int, _OpenJob]] = {}
        # By life, a bit for each rank that is gone while others are there.
        self._gone: dict[int, int] = {}

    # Looking

    def find(self, namespace: Namespace, key: Key) -> ChunkRecord | None:
        """The READY record of a name."""
        return self._ready.get(namespace, {}).get(key)

    def is_coming(self, namespace: Namespace, key: Key) -> bool:
        """Whether a chunk of that name is being written."""
        return (namespace, key) in self._writing

    @property
    def num_ready(self) -> int:
        """READY chunks of all namespaces."""
        return sum(map(len, self._ready.values()))

    @property
    def num_open_jobs(self) -> int:
        """Store jobs that not all ranks have ended."""
        return sum(map(len, self._jobs.values()))

    def part_after(
        self, position: Position, most: int, wanted: Container[Namespace] | None = None
    ) -> ListingPart:
        """What a reader who is there reads next: at most so many names that have changed, and
        chunks of so many slots; of some namespaces only, the same ones for as long as it reads on.

        Where `end` is not the listing's number there is more at once.
        """
        most = min(most, MAX_KEYS // 2)
        life, newest = self.listing.life, self.listing.number
        found = self.listing.since(position.number, most) if position.life == life else None
        begins = found is None
        changes, number = found or ([], newest)
        reasons = {(each.record.namespace, each.record.key): each.reason for each in changes}
        start = Position(life, newest, 0, position.reader) if begins else position
        place = start.place
        if place != ALL_READ:
            records, place = self.places.records_from(place, most)
            for record in records:
                if record.state is not ChunkState.VOID:
                    reasons.setdefault((record.namespace, record.key), Reason.STORED)
        rows = [
            self._row(*name, reason)
            for name, reason in reasons.items()
            if wanted is None or name[0] in wanted
        ]
        end = Position(life, number, place, position.reader)
        return ListingPart(begins, start, end, ListedRows.of(rows))

    def _row(self, namespace: Namespace, key: Key, reason: Reason) -> ListedRow:
        record = self.find(namespace, key)
        where = Where.COMING if self.is_coming(namespace, key) else Where.NOWHERE
        if record is None:
            return ListedRow(namespace, key, where, NO_BLOCKS, reason)
        return ListedRow(namespace, key, where | Where.RAM, record.blocks, reason)

    # Loads

    def begin_loads(
        self, chunks: Sequence[tuple[Namespace, Key, Blocks]], now: float
    ) -> list[ChunkRecord | Refusal]:
        """Register a reader of each chunk that has the wanted blocks, all at once; with no blocks
        it takes the whole slot, and along with it which blocks are there.
        """
        found = [self._begin_load(*chunk) for chunk in chunks]
        self.touch([each for each in found if isinstance(each, ChunkRecord)], now)
        return found

    def _begin_load(
        self, namespace: Namespace, key: Key, wanted: Blocks = NO_BLOCKS
    ) -> ChunkRecord | Refusal:
        record = self.find(namespace, key)
        if record is None:
            return Refusal.WRITING if self.is_coming(namespace, key) else Refusal.NOT_HERE
        if not record.blocks.has(wanted):
            return Refusal.PARTIAL
        record.readers += 1
        return record

    def end_load(self, record: ChunkRecord) -> None:
        """A reader is done with its record."""
        assert record.readers > 0, record
        record.readers -= 1
        self._free_if_idle(record)

    def touch(self, records: Sequence[ChunkRecord], now: float) -> None:
        """READY chunks of one prompt were found, from its head on."""
        for record in records:
            record.found_at = now
            self.room.want(record.slot_bytes, now)
        self._touch(records)

    def _touch(self, records: Sequence[ChunkRecord]) -> None:
        by_order: dict[int, list[ChunkRecord]] = {}
        for record in records:
            if record.state is ChunkState.READY:
                by_order.setdefault(id(self.room.order_of(record)), []).append(record)
                if record.standing is Standing.RELEASED:
                    self.claims.found(record)
        for some in by_order.values():
            self.room.order_of(some[0]).touch(some)

    # Stores

    def begin_store(
        self, part: StorePart, chunk: OfferedChunk, now: float, expires_at: float
    ) -> ChunkRecord | Refusal:
        """Let a rank write its part of a chunk, or say why not.

        `HERE`: it is there already, or has just been joined by the last part. `WRITING`: another
        job stores it. `NO_ROOM`: nothing may go for it. `POISONED`: another rank's part has failed.
        `CLEARED`: its stamp is not above its namespace's floor. `BAD_HANDLE`: no chunk has such a
        key, or such blocks.
        """
        assert 0 <= part.rank < part.num_ranks, part
        job = self._job(part)
        if job is None:
            return Refusal.QUEUE_FULL
        if job.ended >> part.rank & 1:
            return Refusal.POISONED
        name = (chunk.namespace, chunk.key)
        verdict = job.verdicts.get(name)
        if verdict is None:
            verdict = job.verdicts[name] = self._judge(job, part, chunk, now, expires_at)
        if isinstance(verdict, Refusal):
            return verdict
        return self._join(verdict, part)

    def _job(self, part: StorePart) -> _OpenJob | None:
        """The open job of a part, perhaps a new one; None: there are too many."""
        jobs = self._jobs.setdefault(part.life, {})
        job = jobs.get(part.job_id)
        if job is None and len(jobs) < MAX_OPEN_JOBS:
            job = jobs[part.job_id] = _OpenJob(part.num_ranks, ended=self._gone.get(part.life, 0))
        return job

    def _judge(
        self, job: _OpenJob, part: StorePart, chunk: OfferedChunk, now: float, expires_at: float
    ) -> ChunkRecord | Refusal:
        if job.ended:
            # That rank will not store its part of it.
            return Refusal.POISONED
        if not 0 < len(chunk.key) <= MAX_KEY_BYTES or not chunk.blocks.is_sound:
            # Nobody could be told of it.
            return Refusal.BAD_HANDLE
        if self.floors.is_void(chunk.namespace, chunk.stamp):
            return Refusal.CLEARED
        if not self.places.geometry.slots_per_slab(chunk.slot_bytes):
            return Refusal.NO_ROOM
        here = self.find(chunk.namespace, chunk.key)
        if (
            here is not None
            and here.blocks.has(chunk.blocks)
            and not self.floors.is_older(here.stamp, chunk.stamp)
        ):
            job.here[here] = None
            return Refusal.HERE
        if self.is_coming(chunk.namespace, chunk.key):
            return Refusal.WRITING
        self.room.want(chunk.slot_bytes, now)
        group = group_of(chunk.key)
        record = None if group in job.full else self._new_record(job, chunk, now)
        if record is None:
            job.full.add(group)
            return Refusal.NO_ROOM
        self._writing[chunk.namespace, chunk.key] = record
        self._parts[record] = _Parts(part, expires_at)
        self.room.begun(record)
        self.listing.changed(record, Reason.COMING)
        return record

    def _new_record(self, job: _OpenJob, chunk: OfferedChunk, now: float) -> ChunkRecord | None:
        record = ChunkRecord(
            chunk.namespace,
            chunk.key,
            chunk.slot_bytes,
            chunk.stamp,
            chunk.owner,
            blocks=chunk.blocks,
        )
        while not self.places.place(record):
            if not self._make_room(job, record, now):
                return None
        return record

    def _join(self, record: ChunkRecord, part: StorePart) -> ChunkRecord | Refusal:
        if record.state is ChunkState.READY:
            return Refusal.HERE
        if record.state is ChunkState.VOID:
            return Refusal.POISONED
        if (record.writers | self._parts[record].stored) >> part.rank & 1:
            # The same part again: it is copied once.
            return Refusal.WRITING
        record.writers |= 1 << part.rank
        return record

    def end_store(
        self, record: ChunkRecord, rank: int, *, ok: bool, blocks: Blocks = ALL_BLOCKS
    ) -> ChunkState:
        """A rank has stopped writing its part: of READY chunks it was the last one.

        Ranks that have stored other blocks than the ones before make the chunk void.
        """
        assert record.writers >> rank & 1, (rank, record)
        record.writers ^= 1 << rank
        parts = self._parts.get(record)
        if parts is None:
            self._free_if_idle(record)
            return record.state
        if not ok or (parts.stored and blocks != record.blocks):
            self._void(record)
            return record.state
        record.blocks = blocks
        parts.stored |= 1 << rank
        if parts.stored.bit_count() == parts.part.num_ranks:
            self._make_ready(record)
        return record.state

    def _make_ready(self, record: ChunkRecord) -> None:
        if self._is_void(record):
            self._void(record)
            return
        part = self._parts.pop(record).part
        del self._writing[record.namespace, record.key]
        self.room.ended(record)
        replaced = self.find(record.namespace, record.key)
        if replaced is not None:
            record.found_at, record.hits = replaced.found_at, replaced.hits
            self.room.order_of(replaced).leave(replaced, remember=False)
            replaced.state = ChunkState.VOID
            self._free_if_idle(replaced)
        record.state = ChunkState.READY
        self._ready.setdefault(record.namespace, {})[record.key] = record
        self.listing.changed(record, Reason.STORED)
        # A store goes from a prompt's head to its tail.
        latest = self._jobs[part.life][part.job_id].latest
        self.room.order_of(record).enter([record], latest)
        if record.queue is not None:
            latest[record.queue] = record
        self.claims.came(record)

    def end_job(self, part: StorePart) -> None:
        """A rank has ended a store job, which it may not have begun: what it has not stored of it
        is void, and stays so for the ranks that are still to come.
        """
        job = self._job(part)
        if job is None:
            return
        for verdict in job.verdicts.values():
            parts = self._parts.get(verdict) if isinstance(verdict, ChunkRecord) else None
            if parts is not None and not parts.stored >> part.rank & 1:
                assert isinstance(verdict, ChunkRecord)
                self._void(verdict)
        job.ended |= 1 << part.rank
        if job.ended.bit_count() == job.num_ranks:
            self._touch(list(job.here))
            del self._jobs[part.life][part.job_id]
            if not self._jobs[part.life]:
                del self._jobs[part.life]

    def begin_line(self, life: int, rank: int) -> None:
        """A rank of an engine is here, again or for the first time."""
        gone = self._gone.get(life, 0) & ~(1 << rank)
        if gone:
            self._gone[life] = gone
        else:
            self._gone.pop(life, None)

    def end_line(self, life: int, rank: int, num_ranks: int) -> None:
        """A rank of an engine is gone: it has ended all its jobs, and those that others begin."""
        for job_id in list(self._jobs.get(life, ())):
            self.end_job(StorePart(life, job_id, rank, num_ranks))
        gone = self._gone.pop(life, 0) | 1 << rank
        if gone.bit_count() < num_ranks:
            self._gone[life] = gone

    def expire(self, now: float) -> int:
        """Void what waits for parts that have not come in time; returns how many."""
        late = [record for record, parts in self._parts.items() if now >= parts.expires_at]
        for record in late:
            self._void(record)
        return len(late)

    # What goes

    def drop_void(self, risen: Iterable[Namespace]) -> int:
        """Drop what the floors of some namespaces have come to cover; returns how many chunks.
        Readers finish undisturbed.
        """
        names = set(risen)
        if EVERY_NAMESPACE in names:
            names = set(self._ready)
        ready = [each for name in names for each in self._ready.get(name, {}).values()]
        gone = [each for each in ready if self._is_void(each)]
        for record in gone:
            self._drop(record, Reason.CLEARED)
        for record in [each for each in self._writing.values() if self._is_void(each)]:
            self._void(record)
        return len(gone)

    def _is_void(self, record: ChunkRecord) -> bool:
        return self.floors.is_void(record.namespace, record.stamp)

    def drop(self, record: ChunkRecord, reason: Reason) -> None:
        """A chunk is not to be served any more; nothing if it is not READY."""
        if record.state is ChunkState.READY:
            self._drop(record, reason)

    def _make_room(self, job: _OpenJob, record: ChunkRecord, now: float) -> bool:
        """Evict what lets `record` have a slot; False if nothing may go."""

        def may_go(each: ChunkRecord) -> bool:
            if each.is_busy or now - each.found_at < FRESH_S:
                return False
            # A prompt that has no room gives up its tail, not its head.
            return job.verdicts.get((each.namespace, each.key)) is not each and (
                each not in job.here
            )

        victims = self.room.victims(record, now, may_go)
        for each in victims or ():
            self._drop(each, Reason.EVICTED)
        by_namespace: dict[Namespace, list[Key]] = {}
        for each in victims or ():
            by_namespace.setdefault(each.namespace, []).append(each.key)
        for namespace, keys in by_namespace.items():
            for key in self._companions(namespace, keys):
                other = self.find(namespace, key)
                if other is not None and may_go(other) and self.room.may_evict(other):
                    self._drop(other, Reason.EVICTED)
        return victims is not None

    def _drop(self, record: ChunkRecord, reason: Reason) -> None:
        self._take_out(record, was_evicted=reason is Reason.EVICTED)
        self.listing.changed(record, reason)
        self._free_if_idle(record)

    def _take_out(self, record: ChunkRecord, *, was_evicted: bool = False) -> None:
        """A READY record is not found any more."""
        self.room.order_of(record).leave(record, remember=was_evicted)
        self.claims.went(record)
        chunks = self._ready[record.namespace]
        del chunks[record.key]
        if not chunks:
            del self._ready[record.namespace]
        record.state = ChunkState.VOID

    def _void(self, record: ChunkRecord) -> None:
        """A record that is being written will never be READY."""
        del self._parts[record], self._writing[record.namespace, record.key]
        self.room.ended(record)
        record.state = ChunkState.VOID
        self.listing.changed(record, Reason.FAILED)
        self._free_if_idle(record)

    def _free_if_idle(self, record: ChunkRecord) -> None:
        if record.state is ChunkState.VOID and not record.is_busy:
            self.places.give_back(record)

    # Tenants

    def share(self, shares: Mapping[int, Share]) -> None:
        """Tenants have these shares of the pool from now on, by number."""
        self.room.share(shares, [r for some in self._ready.values() for r in some.values()])

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self.places.check()
        self.claims.check()
        placed = set(self.places)
        for namespace, chunks in self._ready.items():
            assert chunks, namespace
            for key, record in chunks.items():
                assert (record.namespace, record.key) == (namespace, key), record
                assert record.state is ChunkState.READY, record
                assert record in placed, record
                assert not record.writers, record
                assert not self._is_void(record), record
        assert self._parts.keys() == set(self._writing.values())
        for record in self._writing.values():
            assert record.state is ChunkState.WRITING, record
            assert not record.readers, record
            assert record in placed, record
        for record in placed:
            assert record.state is not ChunkState.VOID or record.is_busy, record
        assert self.room.num_entered == self.num_ready
        for jobs in self._jobs.values():
            assert jobs
            for job in jobs.values():
                assert job.ended.bit_count() < job.num_ranks, job
