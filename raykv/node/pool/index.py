"""Which chunks a node has, and who may touch which bytes now.

A copy that is admitted gets the chunk's record, and ends with that record, whatever the index has
under the same name by then. A store is one engine's job; its ranks' parts make one record.
All ranks get the answer that the first rank got for a chunk of a job, until all have ended the job,
or none has stored for it for long.

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

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from raykv.base import ids
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Blocks, Key, Namespace, Refusal, Stamp, group_of
from raykv.base.shares import Share
from raykv.node.pool import claims, places, room, shelf
from raykv.node.pool.floors import Floors
from raykv.node.pool.listing import Listing
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.records import (
    READY,
    VOID,
    WRITING,
    ChunkRecord,
    OpenJob,
    Standing,
    StorePart,
)
from raykv.protocol import listing as told
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.listing import ListedRow, ListedRows, ListingPart, Position, Reason, Where

MAX_OPEN_JOBS = 4096
"""Store jobs of one engine whose ranks have not all ended them; beyond that stores are refused."""

MOST_CLOSED = 1024
"""Jobs of one engine that are remembered once all ranks have ended them, lest they begin anew."""

OPEN_S = 60.0
"""Time after which a job that no rank stores for is closed: some rank has not heard of it. It is
longer than parts may take to come."""

_WHERE = tuple(map(Where, range(8)))
"""By their numbers: to put them together takes ten times as long. 1 is RAM."""

_WRONG = (Reason.CLEARED, Reason.DAMAGED)
"""Reasons for which the bytes of a chunk are of no use."""

_STORED = Reason.STORED

FRESH_S = 3.0
"""What was found so lately does not go for a store: its load may be on its way."""


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
        pin_share: part of the pool that pins may take.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        listing: Listing,
        floors: Floors,
        companions: room.Companions = lambda *_: (),
        pin_share: float = claims.PIN_SHARE,
    ) -> None:
        self.listing = listing
        self.places = places.Places(geometry)
        self.room = room.Room(self.places, self.find, companions)
        self.claims = claims.Claims(geometry.pool_bytes, self.find, self.stand, pin_share)
        self.floors = floors
        self.shelf = shelf.Shelf(listing, floors, self.room, self.places)
        self._ready: dict[Namespace, dict[Key, ChunkRecord]] = {}
        self._writing: dict[claims.Name, ChunkRecord] = {}
        self._parts: dict[ChunkRecord, _Parts] = {}
        # By the engine's life and the job's id; and the latest of those that are closed.
        self._jobs: dict[int, dict[int, OpenJob]] = {}
        self._closed: dict[int, dict[int, None]] = {}
        # By life, a bit for each rank that is gone while others are there.
        self._gone: dict[int, int] = {}

    def stand(self, record: ChunkRecord, standing: Standing) -> None:
        """A READY chunk goes sooner or later from now on, until claims say otherwise."""
        self.room.order_of(record).stand(record, standing)

    # Looking

    def find(self, namespace: Namespace, key: Key) -> ChunkRecord | None:
        """The READY record of a name."""
        chunks = self._ready.get(namespace)
        return None if chunks is None else chunks.get(key)

    def is_coming(self, namespace: Namespace, key: Key) -> bool:
        """Whether a chunk of that name is being written."""
        return (namespace, key) in self._writing

    @property
    def num_ready(self) -> int:
        """READY chunks of all namespaces."""
        return sum(map(len, self._ready.values()))

    def sizes(self) -> dict[Namespace, int]:
        """READY chunks by namespace."""
        return {namespace: len(chunks) for namespace, chunks in self._ready.items()}

    def contents(self) -> tuple[dict[Namespace, int], dict[Namespace, int]]:
        """By namespace, bytes of READY chunks, and of those that are being written."""
        writing: Counter[Namespace] = Counter()
        for record in self._writing.values():
            writing[record.namespace] += record.slot_bytes
        return dict(Counter(self.room.by_space) - writing), dict(writing)

    def part_after(
        self, position: Position, most: int, wanted: Collection[Namespace] | None = None
    ) -> ListingPart:
        """What a reader at that position reads next: at most `most` names that have changed, and
        chunks of as many slots. `wanted` limits it to some namespaces, and stays the same for as
        long as the reader goes on.

        Where `end` is not the listing's number there is more at once.
        """
        most = min(most, MAX_KEYS)
        life, newest = self.listing.life, self.listing.number
        found = None
        if position.life == life and position.place >= told.ALL_READ:
            found = self.listing.since(position.number, most)
        begins = found is None
        changes, number = found or ([], newest)
        reasons = {(each.record.namespace, each.record.key): each.reason for each in changes}
        start = Position(life, newest, 0, position.reader) if begins else position
        place = start.place
        if place != told.ALL_READ and wanted is not None:
            # A reader need not walk through chunks of others.
            here = self.room.by_space
            if not any(each in here or self.shelf.has_any(each) for each in wanted):
                place = told.ALL_READ
        rows = [
            self._row(*name, reason)
            for name, reason in reasons.items()
            if wanted is None or name[0] in wanted
        ]
        if place != told.ALL_READ:
            some, place = self.page(place, most)
            rows += self._page_rows(
                each
                for each in some
                if (wanted is None or each.namespace in wanted)
                and (each.namespace, each.key) not in reasons
            )
        end = Position(life, number, place, position.reader)
        return ListingPart(begins, start, end, ListedRows.of(rows))

    @property
    def disk_place(self) -> int:
        """The first place on the disk: it comes behind all in RAM."""
        return self.places.geometry.num_slabs << 32

    def page(
        self, place: int, most: int
    ) -> tuple[Sequence[ChunkRecord] | Sequence[shelf.ShelvedChunk], int]:
        """What is at up to `most` places from `place` on, and the place to go on at; at the end
        that is `ALL_READ`.
        """
        disk = self.disk_place
        if place >= disk:
            kept, place = self.shelf.page(place - disk, most)
            return kept, place if place == told.ALL_READ else disk + place
        records, place = self.places.records_from(place, most)
        return records, disk if place == told.ALL_READ and len(self.shelf) else place

    def _page_rows(self, page: Iterable[ChunkRecord | shelf.ShelvedChunk]) -> Iterator[ListedRow]:
        """How chunks of a page are, each name once: of a million most are just READY."""
        writing, on_disk = self._writing, self.shelf.find
        for each in page:
            name = each.namespace, each.key
            if isinstance(each, ChunkRecord):
                if each.state is READY and name not in writing and on_disk(*name) is None:
                    yield ListedRow(*name, Where.RAM, each.blocks, _STORED)
                    continue
                if each.state is VOID or (each.state is WRITING and self.find(*name) is not None):
                    continue
            yield self._row(*name, _STORED)

    def rows(self, namespace: Namespace, keys: Iterable[Key]) -> ListedRows:
        """How chunks are now."""
        return ListedRows.of([self._row(namespace, key) for key in dict.fromkeys(keys)])

    def _row(self, namespace: Namespace, key: Key, reason: Reason | None = None) -> ListedRow:
        """How a name is; for another reason than that, if one is given."""
        record, kept = self.find(namespace, key), self.shelf.find(namespace, key)
        is_coming = (namespace, key) in self._writing
        where = Where.COMING.value if is_coming else 0
        if kept is not None:
            where |= Where.DISK.value
        if record is not None:
            reason = _STORED if reason is None else reason
            return ListedRow(namespace, key, _WHERE[where | 1], record.blocks, reason)
        blocks = kept.chunk.blocks if kept is not None else ids.NO_BLOCKS
        if reason is None:
            reason = Reason.COMING if is_coming else Reason.FAILED
        return ListedRow(namespace, key, _WHERE[where], blocks, reason)

    # Loads

    def begin_loads(
        self, chunks: Iterable[tuple[Namespace, Key, Blocks, int]], now: float
    ) -> list[ChunkRecord | Refusal]:
        """Register a reader of each chunk that has the wanted blocks, and a slot of the size that
        the reader knows, all at once; with no blocks it takes the whole slot, and along with it
        which blocks are there.
        """
        found = [self._begin_load(*chunk) for chunk in chunks]
        self.touch([each for each in found if isinstance(each, ChunkRecord)], now)
        return found

    def _begin_load(
        self, namespace: Namespace, key: Key, wanted: Blocks, slot_bytes: int
    ) -> ChunkRecord | Refusal:
        record = self.find(namespace, key)
        if record is None:
            return Refusal.WRITING if self.is_coming(namespace, key) else Refusal.NOT_HERE
        if wanted is not record.blocks and not record.blocks.has(wanted):
            return Refusal.PARTIAL
        if record.slot_bytes != slot_bytes:
            return Refusal.BAD_HANDLE
        record.readers += 1
        return record

    def hold(self, record: ChunkRecord) -> bool:
        """Register a reader of that very record; False if it is not READY any more."""
        is_ready = record.state is READY
        record.readers += is_ready
        return is_ready

    def end_load(self, *records: ChunkRecord) -> None:
        """A reader is done with each record."""
        for record in records:
            assert record.readers > 0, record
            record.readers -= 1
            if record.state is VOID:
                self._free_if_idle(record)

    def touch(self, records: Sequence[ChunkRecord], now: float) -> None:
        """READY chunks of one prompt were found, from its head on."""
        for record in records:
            record.found_at = now
        for size in {record.slot_bytes for record in records}:
            self.room.want(size, now)
        self._touch(records)

    def _touch(self, records: Sequence[ChunkRecord]) -> None:
        by_order: dict[EvictionOrder, list[ChunkRecord]] = {}
        order_of, released = self.room.order_of, Standing.RELEASED
        for record in records:
            if record.state is READY:
                by_order.setdefault(order_of(record), []).append(record)
                if record.standing is released:
                    self.claims.found(record)
        for order, some in by_order.items():
            order.touch(some)

    # Stores

    def begin_stores(
        self, part: StorePart, chunks: Sequence[ChunkRecord], now: float, expires_at: float
    ) -> list[ChunkRecord | Refusal]:
        """Let a rank write its parts of a job's chunks, or say of each why not. They come as new
        records; those of the rank that comes first are those of all.

        `HERE`: it is there already, or has just been joined by the last part. `WRITING`: another
        job stores it. `NO_ROOM`: nothing may go for it. `POISONED`: another rank's part has failed,
        or the job has ended. `CLEARED`: its stamp is not above its namespace's floor. `BAD_HANDLE`:
        no chunk has such a key, such blocks or such a size.
        """
        assert 0 <= part.rank < part.num_ranks, part
        job = self._job(part)
        if isinstance(job, Refusal):
            return [job] * len(chunks)
        if job.ended >> part.rank & 1:
            return [Refusal.POISONED] * len(chunks)
        names = [(chunk.namespace, chunk.key) for chunk in chunks]
        new: dict[claims.Name, ChunkRecord] = {}
        for name, chunk in zip(names, chunks, strict=True):
            if name not in job.verdicts:
                new.setdefault(name, chunk)
        # A rank that has ended the job will not store its part of it.
        refused = dict.fromkeys(new, Refusal.POISONED) if job.ended else self._objections(new)
        for name, refusal in refused.items():
            job.verdicts[name] = refusal
            del new[name]
            if refusal is Refusal.HERE:
                here = self._ready[name[0]][name[1]]
                job.here.append(here)
                job.own.add(here)
        if new:
            self._open(job, part, new, now, expires_at)
        return [self._join(job.verdicts[name], part) for name in names]

    def _job(self, part: StorePart) -> OpenJob | Refusal:
        """The open job of a part, perhaps a new one."""
        jobs = self._jobs.get(part.life, {})
        job = jobs.get(part.job_id)
        if job is not None:
            return job
        if part.job_id in self._closed.get(part.life, ()):
            return Refusal.POISONED
        if len(jobs) >= MAX_OPEN_JOBS:
            return Refusal.QUEUE_FULL
        gone = self._gone.get(part.life, 0)
        if gone.bit_count() >= part.num_ranks:
            # Lines have spoken of more ranks than the engine has.
            return Refusal.POISONED
        job = OpenJob(part.num_ranks, ended=gone)
        self._jobs.setdefault(part.life, jobs)[part.job_id] = job
        return job

    def objection(self, chunk: ChunkRecord) -> Refusal | None:
        """Why a chunk that is offered needs no slot, or gets none, as things are."""
        name = chunk.namespace, chunk.key
        return self._objections({name: chunk}).get(name)

    def _objections(self, chunks: Mapping[claims.Name, ChunkRecord]) -> dict[claims.Name, Refusal]:
        """Those of chunks that are offered for which there is an objection."""
        found: dict[claims.Name, Refusal] = {}
        # Chunks of a job are mostly alike.
        known, refusal, ready = None, None, dict[Key, ChunkRecord]()
        for name, chunk in chunks.items():
            namespace, key = name
            kind = namespace, chunk.slot_bytes, chunk.stamp, chunk.blocks
            if kind != known:
                known, refusal = kind, self._objection_to(*kind)
                ready = self._ready.get(namespace, {})
            if not 0 < len(key) <= ids.MAX_KEY_BYTES:
                # No message can name it.
                found[name] = Refusal.BAD_HANDLE
            elif refusal is not None:
                found[name] = refusal
            elif key in ready and self._has(ready[key], chunk):
                found[name] = Refusal.HERE
            elif name in self._writing:
                found[name] = Refusal.WRITING
        return found

    def _objection_to(
        self, namespace: Namespace, size: int, stamp: Stamp, blocks: Blocks
    ) -> Refusal | None:
        """Why no chunk like that gets a slot."""
        if not blocks.is_sound or size <= 0 or size % ids.SLOT_ALIGNMENT:
            return Refusal.BAD_HANDLE
        if self.floors.is_void(namespace, stamp):
            return Refusal.CLEARED
        if size > self.places.geometry.slab_bytes or not self.places.takes(size):
            return Refusal.NO_ROOM
        return None

    def _has(self, here: ChunkRecord, chunk: ChunkRecord) -> bool:
        """Whether that has the blocks of a chunk that is offered, and is no older."""
        return here.blocks.has(chunk.blocks) and not self.floors.is_older(here.stamp, chunk.stamp)

    def _open(
        self,
        job: OpenJob,
        part: StorePart,
        new: Mapping[claims.Name, ChunkRecord],
        now: float,
        expires_at: float,
    ) -> None:
        """Give slots to new chunks of a job, as far as there is room."""
        left = Counter([chunk.slot_bytes for chunk in new.values()])
        for size in left:
            self.room.want(size, now)
        full, verdicts, coming = job.full, job.verdicts, Reason.COMING
        for name, record in new.items():
            is_full = bool(full) and group_of(record.key) in full
            has_slot = not is_full and self._place(job, record, left[record.slot_bytes], now)
            left[record.slot_bytes] -= 1
            if not has_slot:
                full.add(group_of(record.key))
                verdicts[name] = Refusal.NO_ROOM
                continue
            verdicts[name] = self._writing[name] = record
            job.own.add(record)
            self._parts[record] = _Parts(part, expires_at)
            self.room.came(record)
            self.listing.changed(record, coming)

    def _place(self, job: OpenJob, record: ChunkRecord, count: int, now: float) -> bool:
        """Give a record a slot; with more to come, room is made for as many like it."""
        record.tenant, record.came_at = self.room.tenant(record.tenant), now
        while not self.places.place(record):
            if not self._make_room(job, record, count, now):
                return False
        return True

    def _join(self, record: ChunkRecord | Refusal, part: StorePart) -> ChunkRecord | Refusal:
        """What a rank is told of a chunk, by the verdict about it."""
        if isinstance(record, Refusal):
            return record
        if record.state is READY:
            return Refusal.HERE
        if record.state is VOID:
            return Refusal.POISONED
        if (record.writers | self._parts[record].stored) >> part.rank & 1:
            # The same part again: it is copied once.
            return Refusal.WRITING
        record.writers |= 1 << part.rank
        return record

    def end_stores(
        self, records: Sequence[ChunkRecord], rank: int, *, ok: bool, blocks: Sequence[Blocks]
    ) -> list[ChunkRecord]:
        """A rank has stopped writing its parts of some chunks of a job, with these blocks of each;
        returns those that are READY now, of which it was the last one. Even if this raises, the
        rank counts as a writer of none of them.

        Ranks that have stored other blocks than the ones before make a chunk void.
        """
        mask, finished = 1 << rank, list[ChunkRecord]()
        assert all(record.writers & mask for record in records), (rank, records)
        for record in records:
            record.writers ^= mask
        for record, stored in zip(records, blocks, strict=True):
            parts = self._parts.get(record)
            if parts is None:
                self._free_if_idle(record)
            elif not ok or (parts.stored and stored != record.blocks):
                self._void(record)
            else:
                record.blocks = stored
                parts.stored |= mask
                if parts.stored.bit_count() == parts.part.num_ranks:
                    finished.append(record)
        stamps = {(record.namespace, record.stamp) for record in finished}
        if any(self.floors.is_void(*each) for each in stamps):
            for record in filter(self._is_void, finished):
                self._void(record)
            finished = [record for record in finished if record.state is not VOID]
        if finished:
            self._make_ready(finished)
        return finished

    def _make_ready(self, records: Sequence[ChunkRecord]) -> None:
        """Chunks of a job are there, all of one namespace."""
        part, namespace = self._parts[records[0]].part, records[0].namespace
        # A store goes from a prompt's head to its tail.
        latest = self._jobs[part.life][part.job_id].latest
        chunks, order_of = self._ready.setdefault(namespace, {}), self.room.order_of
        for record in records:
            key = record.key
            del self._parts[record], self._writing[namespace, key]
            if key in chunks:
                self._replace(chunks[key], record)
            record.state = READY
            chunks[key] = record
            self.listing.changed(record, _STORED)
            order_of(record).enter((record,), latest)
            if record.queue is not None:
                latest[record.queue] = record
            self.claims.came(record)

    def _replace(self, record: ChunkRecord, by: ChunkRecord) -> None:
        """A READY chunk goes for another one of its name."""
        by.found_at, by.hits = record.found_at, record.hits
        self.room.order_of(record).leave(record, remember=False)
        self.room.went(record)
        record.state = VOID
        self._free_if_idle(record)

    def adopt(self, records: Sequence[ChunkRecord]) -> None:
        """Make restored chunks READY, in the order in which they go, and end the one reader that
        each has. Those that are void, or whose name has a chunk by now, go.
        """
        for record in records:
            record.readers -= 1
            chunks = self._ready.setdefault(record.namespace, {})
            is_void = self.floors.is_void_of_earlier(record.namespace, record.stamp)
            if record.key in chunks or is_void:
                if not chunks:
                    del self._ready[record.namespace]
                self._free_if_idle(record)
                continue
            record.state = READY
            chunks[record.key] = record
            self.room.came(record)
            self.listing.changed(record, _STORED)
            self.room.order_of(record).enter((record,))
            self.claims.came(record)

    def end_job(self, part: StorePart) -> None:
        """A rank has ended a store job, which it may not have begun: what it has not stored of it
        is void, and stays so for the ranks that are still to come.
        """
        job = self._job(part)
        if isinstance(job, Refusal):
            return
        for record in self._unfinished(job):
            if not self._parts[record].stored >> part.rank & 1:
                self._void(record)
        job.ended |= 1 << part.rank
        if job.ended.bit_count() >= job.num_ranks:
            self._close(part.life, part.job_id)

    def _close(self, life: int, job_id: int) -> None:
        """No rank has anything left to do for a job."""
        jobs, closed = self._jobs[life], self._closed.setdefault(life, {})
        self._touch(jobs.pop(job_id).here)
        if not jobs:
            del self._jobs[life]
        closed[job_id] = None
        if len(closed) > MOST_CLOSED:
            del closed[next(iter(closed))]

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

    def end_life(self, life: int) -> None:
        """An engine is gone with all its ranks; nothing is remembered of its jobs."""
        for job_id, job in list(self._jobs.get(life, {}).items()):
            for record in self._unfinished(job):
                self._void(record)
            self._close(life, job_id)
        self._gone.pop(life, None)
        self._closed.pop(life, None)

    def _unfinished(self, job: OpenJob) -> list[ChunkRecord]:
        """Chunks of a job that wait for parts."""
        records = [each for each in job.verdicts.values() if isinstance(each, ChunkRecord)]
        return [each for each in records if each in self._parts]

    def expire(self, now: float) -> None:
        """Void what waits for parts that have not come in time. Close jobs that some rank has not
        heard of.
        """
        late = [record for record, parts in self._parts.items() if now >= parts.expires_at]
        for record in late:
            self._void(record)
        self.room.forget_sizes()
        for life, jobs in list(self._jobs.items()):
            for job_id, job in list(jobs.items()):
                if job.seen_at is None:
                    job.seen_at = now
                elif now - job.seen_at >= OPEN_S and not self._unfinished(job):
                    self._close(life, job_id)

    # What goes

    def drop_void(self, risen: Iterable[Namespace]) -> None:
        """Drop what the floors of namespaces have come to cover. Readers finish undisturbed."""
        families = set(risen)
        is_every = ids.EVERY_NAMESPACE in families
        gone = [
            each
            for namespace, chunks in self._ready.items()
            if is_every or ids.family_of(namespace) in families
            for each in chunks.values()
            if self._is_void(each)
        ]
        for record in gone:
            self._drop(record, Reason.CLEARED)
        for record in [each for each in self._writing.values() if self._is_void(each)]:
            self._void(record)

    def _is_void(self, record: ChunkRecord) -> bool:
        return self.floors.is_void(record.namespace, record.stamp)

    def drop(self, record: ChunkRecord, reason: Reason) -> None:
        """A chunk is not to be served any more; nothing if it is not READY."""
        if record.state is READY:
            self._drop(record, reason)

    def _make_room(self, job: OpenJob, record: ChunkRecord, count: int, now: float) -> bool:
        """Evict for up to `count` chunks like `record`; False if nothing may go."""

        def may_go(each: ChunkRecord) -> bool:
            # A prompt that has no room gives up its tail, not its head.
            return not each.readers and now - each.found_at >= FRESH_S and each not in job.own

        victims = self.room.victims(record, count, now, may_go)
        for each in victims or ():
            self._drop(each, Reason.QUOTA if self.room.is_over(each) else Reason.EVICTED)
        return victims is not None

    def _drop(self, record: ChunkRecord, reason: Reason) -> None:
        """A READY record is not found any more."""
        self.room.order_of(record).leave(record, remember=reason in told.EVICTIONS)
        self.room.went(record)
        self.claims.went(record)
        chunks = self._ready[record.namespace]
        del chunks[record.key]
        if not chunks:
            del self._ready[record.namespace]
        record.state = VOID
        if reason not in _WRONG:
            self.shelf.left(record)
        self.listing.changed(record, reason)
        self._free_if_idle(record)

    def _void(self, record: ChunkRecord) -> None:
        """A record that is being written will never be READY."""
        del self._parts[record], self._writing[record.namespace, record.key]
        self.room.went(record)
        record.state = VOID
        self.listing.changed(record, Reason.FAILED)
        self._free_if_idle(record)

    def _free_if_idle(self, record: ChunkRecord) -> None:
        if record.state is VOID and not record.readers and not record.writers:
            self.places.give_back(record)

    # Tenants

    def share(self, shares: Mapping[str, Share]) -> None:
        """Tenants have these shares of the pool and of the disk from now on, by label."""
        self.shelf.shares = shares
        self.room.share(shares, (r for some in self._ready.values() for r in some.values()))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self.places.check()
        self.shelf.check()
        self.claims.check()
        placed = set(self.places)
        for namespace, chunks in self._ready.items():
            assert chunks, namespace
            for key, record in chunks.items():
                assert (record.namespace, record.key) == (namespace, key), record
                assert record.state is READY, record
                assert record in placed, record
                assert not record.writers, record
                assert not self._is_void(record), record
        assert self._parts.keys() == set(self._writing.values())
        for record in self._writing.values():
            assert record.state is WRITING, record
            assert not record.readers, record
            assert record in placed, record
        for record in placed:
            assert record.state is not VOID or record.is_busy, record
        assert self.room.num_entered == self.num_ready
        used: Counter[str] = Counter()
        for record in placed:
            if record.state is not VOID:
                used[record.tenant] += record.slot_bytes
        assert self.room.used == used
        for jobs in self._jobs.values():
            assert jobs
            for job in jobs.values():
                assert job.ended.bit_count() < job.num_ranks, job
