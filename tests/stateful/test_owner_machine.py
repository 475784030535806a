"""A node's pool behind its door: engines, workers, other nodes and the directory, in any order.

Messages repeat, come late or make no sense; workers end what they have begun when they like. A
reader of the changes knows in the end what the pool has, and nothing is left of who is gone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.base.ids import Blocks, Direction, Key, Namespace, Refusal, Stamp, in_group
from raykv.node.pool.jobs import LANDING_PART, AdmittedJob
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.protocol.columns import Keys, NamedKeys, Texts
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import ChangesQuery, FoundKeys, Hints
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ALL_READ, Position, Where
from raykv.protocol.node import Marks, Report, ReportAnswer, SessionsWord
from raykv.protocol.operator import OrderedPin, OrderedShare, OrdersDocument
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures.node.listing_reader import ListingReader
from tests.fixtures.node.owned_pool import LIFE, PAGE, OwnedPool, land, num_open_jobs

NUM_SLABS = 4
NAMESPACES = [Namespace("a"), Namespace("b")]
KEYS = [in_group(Key(bytes([number]) * 8), group) for number in range(6) for group in (0, 1)]
LIVES = {1: 1, 2: 2}
"""Engines, and how many ranks each has, as long as it says nothing else."""

WIDE, NARROW = Blocks(0, 4), Blocks(2, 2)
TENANTS = ["", "t", "u", "odd\n"]

names = st.sampled_from(NAMESPACES)
keys = st.lists(st.sampled_from(KEYS), max_size=6)
lives = st.sampled_from(list(LIVES))
strangers = st.sampled_from([0, 1, 2, 3])
ranks = st.sampled_from([0, 0, 1, 1, 2])
stamps = st.builds(Stamp, st.sampled_from([0, 5, 6]), st.integers(0, 6))


class OwnerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = OwnedPool(NUM_SLABS)
        self.node = self.pool.node
        self.jobs: list[AdmittedJob] = []
        self.landing: list[ChunkRecord] = []
        self.reading: list[ChunkRecord] = []
        self.reports: list[Report] = []
        self.is_out = False
        self.reader = ListingReader()
        self.lines: list[tuple[int, int]] = []
        for life, num_ranks in LIVES.items():
            self.hello(life, NAMESPACES[0], num_ranks)

    # Engines

    @rule(life=lives, namespace=names, num_ranks=st.sampled_from([1, 2]))
    def hello(self, life: int, namespace: Namespace, num_ranks: int) -> None:
        assert not self.pool.hello(life, namespace, num_ranks=num_ranks)

    @rule(life=lives)
    def bye(self, life: int) -> None:
        self.node.bye(life)

    @rule(life=lives, namespace=names, some=keys, seq=st.integers(0, 40), data=st.data())
    def tell(
        self, life: int, namespace: Namespace, some: list[Key], seq: int, data: st.DataObject
    ) -> None:
        column = Keys.of(some)
        tenants = Texts.of(data.draw(st.sampled_from(TENANTS)) for _ in some)
        seconds = [data.draw(st.sampled_from([-1.0, 5.0, 90.0])) for _ in some]
        word = data.draw(st.sampled_from(list(SessionWord)))
        name = data.draw(st.sampled_from(["s", "t"]))
        news = SessionNews(name, word, column, 9.0 if word is SessionWord.PAUSED else 0.0)
        found = FoundKeys(column, tenants)
        hints = Hints(column, seconds, column[:2], [3, 99])
        self.pool.tell(life, namespace, seq=seq, found=found, hints=hints, sessions=[news])

    @rule(
        life=lives,
        place=st.integers(-3, 9),
        number=st.integers(-2, 99),
        at=st.integers(LIFE - 1, LIFE + 1),
    )
    def ask_oddly(self, life: int, place: int, number: int, at: int) -> None:
        query = ChangesQuery(life, NAMESPACES[0], Position(at, number, place))
        self.node.has_changes(query)
        assert self.node.changes(query, self.pool.now).part.end.life == LIFE

    @rule(most=st.integers(0, 5), is_lost=st.booleans())
    def read(self, most: int, is_lost: bool) -> None:
        query = ChangesQuery(1, NAMESPACES[0], self.reader.position, most)
        self.node.has_changes(query)
        answer = self.pool.changes(query)
        if not is_lost:
            self.reader.take(answer.part)

    # Workers

    @rule(life=strangers, rank=ranks, num_ranks=st.sampled_from([1, 2]))
    def begin_line(self, life: int, rank: int, num_ranks: int) -> None:
        self.node.jobs.begin_line(life, rank, num_ranks)
        self.lines.append((life, rank))

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def end_line(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.lines))
        self.lines.remove(line)
        self.node.jobs.end_line(*line)

    @rule(
        life=lives,
        rank=ranks,
        is_odd=st.booleans(),
        some=st.lists(
            st.tuples(st.sampled_from(list(Direction)), names, keys, st.integers(0, 9), stamps),
            max_size=3,
        ),
        narrow=st.booleans(),
    )
    def admit(self, life: int, rank: int, is_odd: bool, some: list[Any], narrow: bool) -> None:
        blocks, num_ranks = NARROW if narrow else WIDE, LIVES[life]
        if not is_odd:
            rank %= num_ranks
        jobs = [
            self.pool.job_of(
                direction,
                each,
                blocks,
                job_id=job_id,
                namespace=namespace,
                orders=stamp,
                tenant=TENANTS[job_id % len(TENANTS)],
            )
            for direction, namespace, each, job_id, stamp in some
        ]
        admitted = self.pool.admit(*jobs, life=life, rank=rank, of=num_ranks)
        assert [made.job for made in admitted] == jobs
        for made in admitted:
            assert None not in made.chunks or made.part is None
        self.jobs += admitted

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ok=st.booleans())
    def end_chunk(self, data: st.DataObject, ok: bool) -> None:
        made = data.draw(st.sampled_from(self.jobs))
        if made.keys:
            at = data.draw(st.integers(0, len(made.keys) - 1))
            self.node.jobs.end_chunks(made, (at,), ok=ok)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), refusal=st.sampled_from(list(Refusal)), ok=st.booleans())
    def end_job(self, data: st.DataObject, refusal: Refusal, ok: bool) -> None:
        made = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(made)
        self.node.jobs.end_chunks(made, range(len(made.keys)), ok=ok)
        if made.chunks:
            made.chunks[0] = refusal
        result = self.node.jobs.end_job(made, 1, 0.5)
        result = decode(encode(result), CopyResult)
        for row in result.rows:
            there = self.node.index.find(row.namespace, row.key)
            assert bool(row.where & Where.RAM) == (there is not None)

    # Other nodes

    @rule(namespace=names, some=keys, stamp=stamps, size=st.sampled_from([PAGE, PAGE, 0, 5 * PAGE]))
    def land(self, namespace: Namespace, some: list[Key], stamp: Stamp, size: int) -> None:
        for each in some:
            found = land(self.node, namespace, each, size, stamp, WIDE, "t", self.pool.now)
            if isinstance(found, ChunkRecord):
                self.landing.append(found)
        num_bytes = sum(record.slot_bytes for record in self.landing)
        assert num_bytes <= NUM_SLABS * 4 * PAGE // LANDING_PART

    @precondition(lambda self: self.landing)
    @rule(ok=st.booleans())
    def landed(self, ok: bool) -> None:
        self.node.landings.landed(self.landing.pop(0), ok=ok)

    @rule(namespace=names, some=keys)
    def begin_read(self, namespace: Namespace, some: list[Key]) -> None:
        sizes = [PAGE * (1 + each[-1]) for each in some]
        found = self.node.begin_read(namespace, some, sizes, self.pool.now)
        self.reading += [each for each in found if isinstance(each, ChunkRecord)]

    @precondition(lambda self: self.reading)
    @rule()
    def end_read(self) -> None:
        self.node.index.end_load(self.reading.pop(0))

    # The directory

    @precondition(lambda self: not self.is_out)
    @rule()
    def report(self) -> None:
        self.reports.append(self.pool.report())
        self.is_out = True

    @rule()
    def give_up(self) -> None:
        self.node.reporting.give_up()
        self.is_out = False

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), life=st.integers(1, 2), some=keys, forget=st.booleans())
    def answered(self, data: st.DataObject, life: int, some: list[Key], forget: bool) -> None:
        report = data.draw(st.sampled_from(self.reports[-3:]))
        numbers = st.integers(0, 12)
        spare = NamedKeys.of((NAMESPACES[0], each) for each in some)
        known = data.draw(st.sampled_from([0, self.node.index.listing.number, 1 << 60]))
        answer = ReportAnswer(
            life,
            report.part.end if report.part else Position(),
            Stamp(5, data.draw(numbers)),
            marks=Marks(data.draw(numbers), known, spare, NamedKeys(), forget),
            left=data.draw(st.lists(names, max_size=2)),
            words=[SessionsWord("a", SessionNews("s", SessionWord.OVER))],
            words_number=data.draw(numbers),
        )
        self.node.answered(decode(encode(answer), ReportAnswer), self.pool.now, report.seq)
        self.is_out = self.is_out and report is not self.reports[-1]

    @rule(stamp=stamps, floor=st.integers(0, 6), data=st.data())
    def order(self, stamp: Stamp, floor: int, data: st.DataObject) -> None:
        namespace = data.draw(st.sampled_from(["", *NAMESPACES]))
        parts = st.sampled_from([0.0, 0.3, 0.9])
        share = OrderedShare("", data.draw(parts), data.draw(parts))
        pin = OrderedPin(NAMESPACES[0], b"d", 1, data.draw(st.sampled_from([0.0, 40.0])))
        document = OrdersDocument(stamp, {namespace: floor}, shares={"t": share}, pins={"p": pin})
        before = self.node.orders.stamp
        self.node.take_orders(document, self.pool.now)
        assert self.node.orders.stamp == max(before, stamp)

    @rule(some=keys.filter(bool))
    def pin_keys(self, some: list[Key]) -> None:
        for digest in self.node.orders.wanted():
            self.node.orders.pin_keys(digest, NAMESPACES[0], some)
        assert not self.node.orders.wanted()

    @rule(seconds=st.sampled_from([0.1, 3.0, 12.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.pool.wait(seconds)

    @invariant()
    def pool_is_sound(self) -> None:
        self.node.check()

    def teardown(self) -> None:
        """Once all have ended and are gone, there is nothing but READY chunks."""
        for made in self.jobs:
            self.node.jobs.end_chunks(made, range(len(made.keys)), ok=True)
            self.node.jobs.end_job(made, 0, 0.0)
        for record in self.landing:
            self.node.landings.landed(record, ok=True)
        for record in self.reading:
            self.node.index.end_load(record)
        for line in self.lines:
            self.node.jobs.end_line(*line)
        for life in LIVES:
            self.node.bye(life)
        self.node.check()
        index = self.node.index
        assert num_open_jobs(index) == 0
        assert all(record.state is ChunkState.READY for record in index.places)
        self.hello(1, NAMESPACES[0], 1)
        for _ in range(100):
            self.read(5, is_lost=False)
            if self.reader.position == Position(LIFE, index.listing.number, ALL_READ):
                break
        believed = {key for (_, key), where in self.reader.believed.items() if where}
        assert believed == {key for key in KEYS if index.find(NAMESPACES[0], key)}


OwnerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_pool_is_right_whatever_its_peers_say = OwnerMachine.TestCase
