"""The pool's index, with ranks that write and readers that read one page after another.

The pool's memory says of each page, and of each rank's part of it, which record it was written for.
So a store or a load that is admitted wrongly meets wrong bytes. A reader of the listing follows it
in small steps, and knows in the end what the index has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    EVERY_NAMESPACE,
    NO_BLOCKS,
    Blocks,
    Key,
    Namespace,
    Refusal,
    Stamp,
    in_group,
)
from raykv.base.shares import Share
from raykv.node.pool.claims import Owner, OwnerKind
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import FRESH_S, OPEN_S, PoolIndex
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing, StorePart
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ALL_READ, ListingPart, Reason, Where
from tests.fixtures.node.listing_reader import ListingReader
from tests.fixtures.node.owned_pool import end_store, num_open_jobs

PAGE = 4096
HISTORY = 7
NAMESPACES = [Namespace("a"), Namespace("b")]
KEYS = [in_group(Key(bytes([number]) * 8), group) for number in range(5) for group in (0, 1)]
PAGES = {0: 1, 1: 2}
"""Of a chunk, by KV group."""

WIDE, NARROW = Blocks(0, 4), Blocks(2, 2)
LIVES = {1: 1, 2: 2}
"""Engines, and how many ranks each has."""

REQUEST = OwnerKind.REQUEST
PIN = Owner(OwnerKind.OPERATOR, "pin")
SHARES = [{}, {"1": Share(0.5, 1.0)}, {"1": Share(0.0, 0.3), "2": Share(0.3)}]

OWNERS = [
    PIN,
    Owner(REQUEST, "r"),
    Owner(OwnerKind.SESSION, "s"),
    Owner(OwnerKind.SESSION, "t"),
]

STANDINGS = [
    Standing.RELEASED,
    Standing.NORMAL,
    Standing.KEPT,
    Standing.KEPT_9,
    Standing.PINNED,
]

names = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(KEYS))
lives = st.sampled_from(list(LIVES))


@dataclass(eq=False)
class Writer:
    """A rank that copies to a record's slot, page by page."""

    record: ChunkRecord
    part: StorePart
    blocks: Blocks
    done: int = 0


@dataclass(eq=False)
class Reader:
    record: ChunkRecord
    content: dict[tuple[int, int], int]
    done: int = 0


@dataclass
class Follower(ListingReader):
    """It reads of some namespaces."""

    last: ListingPart | None = None


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.number = 1
        self.floors = Floors(HISTORY)
        self.index = PoolIndex(
            PoolGeometry(3 * 4 * PAGE, 4 * PAGE), Listing(1, most=12), self.floors, self.companions
        )
        # By page and rank, the id of the record that it was written for.
        self.memory: dict[tuple[int, int], int] = {}
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        # What was written, of all ranks; by record.
        self.contents: dict[ChunkRecord, dict[tuple[int, int], int]] = {}
        self.offered: dict[ChunkRecord, set[Blocks]] = {}
        self.verdicts: dict[tuple[int, int, Namespace, Key], ChunkRecord | Refusal] = {}
        self.ended: set[tuple[int, int, int]] = set()
        self.jobs = dict.fromkeys(LIVES, 1)
        # When a job was first seen open as time passed, by its life.
        self.open_since: dict[int, float] = {}
        self.claimed: dict[tuple[Namespace, Key], dict[Owner, tuple[Standing, float]]] = {}
        self.followers = [Follower(), Follower()]

    def companions(self, namespace: Namespace, keys: Any) -> list[Key]:
        del namespace
        return [in_group(key, 1) for key in keys if key[-1] == 0]

    def pages(self, record: ChunkRecord) -> list[int]:
        return [record.slot + page for page in range(record.slot_bytes // PAGE)]

    # Stores

    @rule(life=lives, name=names, rank=st.integers(0, 1), old=st.booleans(), narrow=st.booleans())
    def offer(
        self, life: int, name: tuple[Namespace, Key], rank: int, old: bool, narrow: bool
    ) -> None:
        part = StorePart(life, self.jobs[life], rank % LIVES[life], LIVES[life])
        if (life, part.job_id, part.rank) in self.ended:
            return
        namespace, key = name
        blocks = NARROW if narrow else WIDE
        stamp = Stamp(HISTORY, self.number - old)
        size = PAGES[key[-1]] * PAGE
        before = self.index.find(*name)
        protected = [each for each in self.ready() if self.is_protected(each, part)]
        chunk = ChunkRecord(namespace, key, size, stamp, blocks, tenant=str(life))
        is_first = (life, part.job_id, *name) not in self.verdicts
        found = self.index.begin_stores(part, [chunk], self.now, self.now + 30)[0]
        first = self.verdicts.setdefault((life, part.job_id, *name), found)
        assert all(record.state is ChunkState.READY for record in protected)
        if isinstance(first, Refusal):
            assert found is first
        if found is Refusal.HERE and is_first:
            assert before is not None
            assert before.blocks.has(blocks)
            assert before.stamp >= stamp
        if isinstance(found, ChunkRecord):
            assert found is first
            assert not found.readers
            assert found.slot_bytes == size
            self.writers.append(Writer(found, part, blocks))

    def ready(self) -> list[ChunkRecord]:
        found = [self.index.find(*name) for name in self.all_names()]
        return [record for record in found if record is not None]

    def is_protected(self, record: ChunkRecord, part: StorePart) -> bool:
        """Whether it may not go for a store of that job."""
        name = part.life, part.job_id, record.namespace, record.key
        return (
            record.standing is Standing.PINNED
            or record.readers > 0
            or self.now - record.found_at < FRESH_S
            or self.verdicts.get(name) is record
        )

    @rule(life=lives, name=names, narrow=st.booleans())
    def store(self, life: int, name: tuple[Namespace, Key], narrow: bool) -> None:
        """All ranks, without a fault."""
        for rank in range(LIVES[life]):
            self.offer(life, name, rank, old=False, narrow=narrow)
        for writer in [each for each in self.writers if each.part.life == life]:
            if (writer.record.namespace, writer.record.key) == name:
                for page in self.pages(writer.record)[writer.done :]:
                    self.memory[page, writer.part.rank] = id(writer.record)
                    writer.done += 1
                self._end(writer, ok=True)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        pages = self.pages(writer.record)
        if writer.done < len(pages):
            self.memory[pages[writer.done], writer.part.rank] = id(writer.record)
            writer.done += 1

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: st.DataObject, ok: bool) -> None:
        self._end(data.draw(st.sampled_from(self.writers)), ok=ok)

    def _end(self, writer: Writer, *, ok: bool) -> None:
        pages = self.pages(writer.record)
        ok = ok and writer.done == len(pages)
        self.writers.remove(writer)
        self.offered.setdefault(writer.record, set()).add(writer.blocks)
        for page in pages if ok else ():
            content = self.contents.setdefault(writer.record, {})
            content[page, writer.part.rank] = id(writer.record)
        was = writer.record.state
        state = end_store(self.index, writer.record, writer.part.rank, ok=ok, blocks=writer.blocks)
        if state is ChunkState.READY:
            assert ok
            assert was is ChunkState.WRITING
            assert self.offered[writer.record] == {writer.record.blocks}
            assert len(self.contents[writer.record]) == len(pages) * writer.part.num_ranks
            assert self.index.find(writer.record.namespace, writer.record.key) is writer.record

    @rule(life=lives, rank=st.integers(0, 1))
    def end_job(self, life: int, rank: int) -> None:
        """A rank ends its copies before the job."""
        rank, job_id = rank % LIVES[life], self.jobs[life]
        for writer in [w for w in self.writers if (w.part.life, w.part.rank) == (life, rank)]:
            self.writers.remove(writer)
            end_store(self.index, writer.record, rank, ok=False)
        self.index.end_job(StorePart(life, job_id, rank, LIVES[life]))
        self.ended.add((life, job_id, rank))
        if all((life, job_id, each) in self.ended for each in range(LIVES[life])):
            self._next_job(life)

    @rule(life=lives, rank=st.integers(0, 1))
    def end_line(self, life: int, rank: int) -> None:
        """Its copies may go on for a while."""
        rank, job_id = rank % LIVES[life], self.jobs[life]
        self.index.end_line(life, rank, LIVES[life])
        self.index.begin_line(life, rank)
        self.ended.add((life, job_id, rank))
        if all((life, job_id, each) in self.ended for each in range(LIVES[life])):
            self._next_job(life)

    @rule()
    def expire(self) -> None:
        self.now += 31
        self.index.expire(self.now)
        assert not any(self.index.is_coming(*name) for name in self.all_names())
        for life, num_ranks in LIVES.items():
            if not self.is_open(life):
                self.open_since.pop(life, None)
            elif self.now - self.open_since.setdefault(life, self.now) >= OPEN_S:
                # Some rank has never heard of it.
                self.ended |= {(life, self.jobs[life], rank) for rank in range(num_ranks)}
                self._next_job(life)

    def is_open(self, life: int) -> bool:
        """Whether some rank has offered or ended the present job of an engine."""
        job = life, self.jobs[life]
        return any(each[:2] == job for each in [*self.verdicts, *self.ended])

    def _next_job(self, life: int) -> None:
        self.jobs[life] += 1
        self.open_since.pop(life, None)

    # Loads

    @rule(name=names, wanted=st.sampled_from([WIDE, NARROW, NO_BLOCKS]))
    def load(self, name: tuple[Namespace, Key], wanted: Blocks) -> None:
        record = self.index.find(*name)
        slot_bytes = record.slot_bytes if record is not None else 0
        (found,) = self.index.begin_loads([(*name, wanted, slot_bytes)], self.now)
        if isinstance(found, ChunkRecord):
            assert found is record
            assert found.blocks.has(wanted)
            self.readers.append(Reader(found, dict(self.contents[found])))
        elif record is not None:
            assert found is Refusal.PARTIAL
        else:
            assert found is (Refusal.WRITING if self.index.is_coming(*name) else Refusal.NOT_HERE)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        for place, content in reader.content.items():
            assert self.memory[place] == content

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        for place, content in reader.content.items():
            assert self.memory[place] == content
        self.index.end_load(reader.record)

    # What goes

    @rule(namespace=st.sampled_from([*NAMESPACES, EVERY_NAMESPACE]))
    def clear(self, namespace: Namespace) -> None:
        self.number += 1
        self.floors.take({namespace: self.number})
        self.index.drop_void([namespace])
        for name in self.all_names():
            if namespace in (EVERY_NAMESPACE, name[0]):
                assert self.index.find(*name) is None

    @rule(name=names)
    def damage(self, name: tuple[Namespace, Key]) -> None:
        record = self.index.find(*name)
        if record is not None:
            self.index.drop(record, Reason.DAMAGED)

    @rule(
        owner=st.sampled_from(OWNERS),
        some=st.lists(names, min_size=1, max_size=4),
        standing=st.sampled_from(STANDINGS),
        seconds=st.sampled_from([0.5, 50.0, 500.0]),
    )
    def claim(
        self,
        owner: Owner,
        some: list[tuple[Namespace, Key]],
        standing: Standing,
        seconds: float,
    ) -> None:
        self.index.claims.claim(owner, some, standing, self.now + seconds)
        for name in some:
            self.claimed.setdefault(name, {})[owner] = (standing, self.now + seconds)

    @rule(owner=st.sampled_from(OWNERS))
    def end_claims(self, owner: Owner) -> None:
        self.index.claims.end(owner)
        for claims in self.claimed.values():
            claims.pop(owner, None)

    @rule()
    def expire_claims(self) -> None:
        self.index.claims.expire(self.now)
        for claims in self.claimed.values():
            for owner in [o for o, (_, until) in claims.items() if until <= self.now]:
                del claims[owner]

    def check_claims(self) -> None:
        """No chunk stands higher than somebody wants, nor is a pin that has room not kept."""
        for name in self.all_names():
            record, claims = self.index.find(*name), self.claimed.get(name, {})
            if record is None:
                continue
            standings = {owner: each for owner, (each, _) in claims.items()}
            is_released = Standing.RELEASED in standings.values()
            wanted = max(standings.values(), default=Standing.NORMAL)
            assert record.standing <= max(wanted, Standing.NORMAL)
            firm = {each for owner, each in standings.items() if owner.kind is not REQUEST}
            if record.standing is Standing.RELEASED:
                assert is_released
                assert firm <= {Standing.RELEASED}
                assert Standing.PINNED not in standings.values()
                assert sum(owner.kind is OwnerKind.SESSION for owner in standings) <= 1
            if standings.get(PIN, Standing.NORMAL) is not Standing.PINNED:
                assert record.standing >= standings.get(PIN, Standing.RELEASED)
            if wanted > record.standing and not is_released:
                assert self.index.claims.num_waiting

    @rule(share=st.sampled_from(SHARES))
    def share(self, share: dict[str, Share]) -> None:
        self.index.share(share)

    @rule(seconds=st.sampled_from([0.5, FRESH_S, 90.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # The listing

    @rule(most=st.integers(1, 6), again=st.booleans(), is_lost=st.booleans(), at=st.integers(0, 1))
    def follow(self, most: int, again: bool = False, is_lost: bool = False, at: int = 0) -> None:
        """A part of the listing: the next one, perhaps lost, or the last one once more."""
        follower = self.followers[at]
        if follower.last is not None and again:
            follower.take(follower.last)
            return
        part = self.index.part_after(follower.position, most, NAMESPACES[: at + 1])
        follower.last = decode(encode(part), ListingPart)
        if not is_lost:
            follower.take(follower.last)

    @rule(at=st.integers(0, 1))
    def catch_up(self, at: int) -> None:
        follower = self.followers[at]
        for _ in range(100):
            self.follow(5, at=at)
            position = follower.position
            if (position.place, position.number) == (ALL_READ, self.index.listing.number):
                break
        there = {name: self.where(*name) for name in self.all_names()}
        believed = {name: where for name, where in follower.believed.items() if where}
        wanted = {name: where for name, where in there.items() if name[0] in NAMESPACES[: at + 1]}
        assert believed == {name: where for name, where in wanted.items() if where}

    def where(self, namespace: Namespace, key: Key) -> Where:
        coming = Where.COMING if self.index.is_coming(namespace, key) else Where.NOWHERE
        return coming | (Where.RAM if self.index.find(namespace, key) else Where.NOWHERE)

    def all_names(self) -> list[tuple[Namespace, Key]]:
        return [(namespace, key) for namespace in NAMESPACES for key in KEYS]

    @invariant()
    def index_is_sound(self) -> None:
        self.index.check()
        self.check_claims()

    def teardown(self) -> None:
        """Once all have ended, what is left is what is found."""
        for reader in self.readers:
            self.index.end_load(reader.record)
        for writer in self.writers:
            end_store(self.index, writer.record, writer.part.rank, ok=False)
        self.index.expire(self.now + 31)
        self.index.check()
        assert len(list(self.index.places)) == self.index.num_ready
        for life, num_ranks in LIVES.items():
            for rank in range(num_ranks):
                self.index.end_line(life, rank, num_ranks)
        assert num_open_jobs(self.index) == 0


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
test_pool_is_right_whatever_ranks_readers_and_operators_do = PoolMachine.TestCase
