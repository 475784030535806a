"""One life of a NodeActor: its pool's index as it is, the memory and the threads as a model.

Copies take several steps, a block each, and end in any order. What comes while the node is frozen
waits at its door.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    Blocks,
    Direction,
    Key,
    Namespace,
    NodeId,
    Refusal,
)
from raykv.node.pool.jobs import AdmittedJob
from raykv.node.pool.owner import NodePool
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.protocol.copies import CopyJob
from raykv.protocol.engine import (
    ChangesAnswer,
    ChangesQuery,
    EngineHello,
    Tell,
    Welcome,
)
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import EVICTIONS, Reason
from raykv.protocol.node import Report, ReportAnswer
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.node.owned_pool import admit
from tests.simulation.nodes.content import PoolBytes
from tests.simulation.nodes.fetches import Fetches
from tests.simulation.nodes.jobs import Line, RankJob
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.nodes.cluster import Cluster

A = TypeVar("A")
S = TypeVar("S", bound=msgspec.Struct)
Post = Callable[[A], None]

LONGEST_S = 0.5
"""An engine waits so long for news, at most."""

FOUND_S = 3.0
"""So long what was found stays."""


def sent(message: S) -> S:
    """A message as its receiver gets it: nobody shares what is in it."""
    return decode(encode(message), type(message))


@dataclass(eq=False)
class Copying:
    """A rank's job that was admitted; `left` are the blocks that are still to be copied, by the
    number of their chunk. One that is hung is for a while not copied on.
    """

    line: Line
    rank_job: RankJob
    job: CopyJob
    admitted: AdmittedJob
    left: deque[tuple[int, int, int]] = field(default_factory=deque)
    failures: dict[int, Refusal] = field(default_factory=dict)
    is_repeated: bool = False
    is_hung: bool = False

    def __post_init__(self) -> None:
        ids = iter(self.job.block_ids)
        rows = zip(self.job.first_block, self.job.num_blocks, strict=True)
        for at, (first, length) in enumerate(rows):
            for block in range(first, first + length):
                block_id = next(ids)
                if not self.is_repeated and self.record(at) is not None:
                    self.left.append((at, block, block_id))

    def record(self, at: int) -> ChunkRecord | None:
        """What was admitted of a chunk."""
        ticket = self.admitted.chunks[at]
        return ticket if isinstance(ticket, ChunkRecord) else None

    def is_stored_anew(self) -> bool:
        """Whether another record of one of its chunks is being written."""
        index = self.line.node.pool.index
        return any(
            (record := self.record(at)) is not None
            and record.state is ChunkState.VOID
            and index.is_coming(record.namespace, record.key)
            for at in sorted(self.admitted.under_way)
        )

    @property
    def is_store(self) -> bool:
        return self.job.direction == Direction.STORE


class PlayedNode:
    """See the module's docstring."""

    def __init__(
        self,
        cluster: Cluster,
        node_id: NodeId,
        life: int,
        geometry: PoolGeometry,
        memory: PoolBytes,
    ) -> None:
        self.node_id, self.life, self.geometry = node_id, life, geometry
        self.memory = memory
        self.pool = NodePool(node_id, life, geometry)
        self.ahead_s = cluster.ahead_of(node_id)
        self.is_frozen = self.is_dead = False
        self.num_answered = self.num_evicted = 0
        self.fetches = Fetches(cluster, self)
        self.copies: list[Copying] = []
        self.lines: list[Line] = []
        self.document: OrdersDocument | None = None
        self._cluster = cluster
        self._numbers = count()
        # By life of an engine, the last number of what it has told.
        self._told: dict[int, int] = {}
        self._found_at: dict[tuple[Namespace, Key], float] = {}
        self._waiting: list[tuple[ChangesQuery, Post[ChangesAnswer], float]] = []
        self._at_door: deque[Callable[[], None]] = deque()
        self._report: Call[ReportAnswer] | None = None
        self._asked_for: Call[OrdersDocument] | None = None
        self._shown: Call[bool] | None = None
        self._pin: Call[tuple[Namespace, list[Key]]] | None = None

    def __repr__(self) -> str:
        return f"{self.node_id} (life {self.life})"

    @property
    def clock(self) -> float:
        return self._cluster.now + self.ahead_s

    @property
    def read_up_to(self) -> int:
        """How far the directory has read its listing, as it knows."""
        position = self.pool.reporting._position
        return position.number if position is not None and position.life == self.life else 0

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do."""
        return bool(self.copies or self.fetches.is_busy or self._at_door)

    def receive(self, deal: Callable[[], None]) -> None:
        """A message comes; a frozen node deals with it later, a dead one never."""
        if self.is_frozen:
            self._at_door.append(deal)
        elif not self.is_dead:
            deal()

    def thaw(self) -> None:
        self.is_frozen = False
        while self._at_door:
            self._at_door.popleft()()

    def die(self) -> None:
        """Nothing that it has begun goes on, and all who have a line to it notice."""
        self.is_dead = True
        self._at_door.clear()
        self.copies.clear()
        for call in (self._report, self._asked_for, self._shown, self._pin):
            if call is not None:
                call.forget()
        self.fetches.die()

    # Engines

    def hello(self, hello: EngineHello, post: Post[Welcome]) -> None:
        post(sent(self.pool.hello(sent(hello), self.clock)))
        self._told.setdefault(hello.life, -1)

    def tell(self, message: Tell, post: Post[bool]) -> None:
        if self._told.get(message.life, -1) < message.seq:
            for key in message.found.keys:
                self.found(Namespace(message.namespace), Key(key))
        if message.life in self._told:
            self._told[message.life] = max(message.seq, self._told[message.life])
        self.pool.tell(sent(message), self.clock)
        post(True)

    def changes(self, query: ChangesQuery, post: Post[ChangesAnswer]) -> None:
        """The answer waits until there is something new."""
        self._waiting.append((sent(query), post, self.clock))

    def answer_changes(self, *, is_late: bool = False) -> bool:
        """Answer who waits for news that there are; and some for which there are none, after a
        while.
        """
        waiting, self._waiting = self._waiting, []
        for query, post, since in waiting:
            if is_late or self.pool.has_changes(query) or self.clock - since >= LONGEST_S:
                post(sent(self.pool.changes(query, self.clock)))
            else:
                self._waiting.append((query, post, since))
        return len(self._waiting) < len(waiting)

    # Workers

    def open_line(self, life: int, place: int, rank: int, num_ranks: int) -> Line:
        """A rank connects; what it had before it came again is over."""
        for old in [one for one in self.lines if (one.life, one.rank) == (life, rank)]:
            self.end_line(old, is_first=True)
        line = Line(life, place, rank, num_ranks, self, next(self._numbers))
        self.lines.append(line)
        self.pool.jobs.begin_line(life, rank, num_ranks)
        return line

    def end_line(self, line: Line, *, is_first: bool) -> None:
        """The node notices that a rank has hung up: its copies end, before or after the pool
        hears of it.
        """
        self.lines.remove(line)
        if is_first:
            self.pool.jobs.end_line(line.life, line.rank)
        for copying in [each for each in self.copies if each.line is line]:
            self.end_copying(copying, Refusal.CANCELLED)
        if not is_first:
            self.pool.jobs.end_line(line.life, line.rank)
        line.lose_all()
        self._check_ended(line.life)

    def _check_ended(self, life: int) -> None:
        """Nothing is being written for an engine that has no line any more."""
        if any(line.life == life for line in self.lines):
            return
        for record, parts in self.pool.index._parts.items():
            assert parts.part.life != life, f"{record} of {self} waits for ranks that are gone"

    def admit(self, line: Line, batch: list[RankJob]) -> None:
        """A message of a worker: all its jobs are admitted at once."""
        if line not in self.lines:
            return
        jobs = [sent(each.job.named(each.part)) for each in batch]
        loadable = self._loadable(jobs)
        number = self.pool.index.listing.number
        admitted = admit(self.pool, line.life, line.rank, line.num_ranks, jobs, self.clock)
        self._check_loads(admitted, loadable)
        self._check_evicted(number)
        for rank_job, job, each in zip(batch, jobs, admitted, strict=True):
            copying = Copying(line, rank_job, job, each, is_repeated=rank_job in line.admitted)
            line.admitted.add(rank_job)
            self.copies.append(copying)
            if copying.is_repeated:
                self.end_copying(copying, Refusal.WRITING)
        self.check_slots()

    def check_slots(self) -> None:
        """Nobody copies where somebody else copies: a slot is one record's until all have ended."""
        of_page: dict[int, ChunkRecord] = {}
        for record in self._tickets():
            for page in range(record.slot, record.slot + record.slot_bytes // SLOT_ALIGNMENT):
                other = of_page.setdefault(page, record)
                assert other is record, f"{self} has {record} where somebody copies {other}"

    def _tickets(self) -> Iterator[ChunkRecord]:
        """The records that somebody copies now."""
        for copying in self.copies:
            for at in sorted(copying.admitted.under_way):
                record = copying.record(at)
                if record is not None:
                    yield record
        yield from (read.record for read in self.fetches.reads)
        for _, landing in self.fetches.writing():
            assert landing.record is not None
            yield landing.record

    def _loadable(self, jobs: list[CopyJob]) -> set[tuple[int, int]]:
        """Which chunks, by numbers of job and chunk, can be loaded as things are."""
        return {
            (number, at)
            for number, job in enumerate(jobs)
            if job.direction == Direction.LOAD
            for at, key in enumerate(job.keys)
            if (record := self.find(Namespace(job.namespace), Key(key))) is not None
            and record.blocks.has(Blocks(job.first_block[at], job.num_blocks[at]))
        }

    def _check_loads(self, admitted: list[AdmittedJob], loadable: set[tuple[int, int]]) -> None:
        """What can be loaded is loaded, whatever is stored by the same message."""
        for number, at in sorted(loadable):
            found = admitted[number].chunks[at]
            is_known = found is not Refusal.BAD_HANDLE
            is_refused = isinstance(found, Refusal) and is_known
            assert not is_refused, f"{self} refuses a chunk that it has: {found!r}"

    def found(self, namespace: Namespace, key: Key) -> None:
        """A request has found a chunk: it does not go for a store in the next seconds."""
        if self.find(namespace, key) is not None:
            self._found_at[namespace, key] = self.clock

    def _check_evicted(self, number: int) -> None:
        """What has gone for room since that number was not found lately."""
        changes = self.pool.index.listing.since(number, 1 << 20)
        for record, reason in changes[0] if changes else ():
            found_at = self._found_at.pop((record.namespace, record.key), None)
            self.num_evicted += reason in EVICTIONS
            if reason in EVICTIONS and found_at is not None:
                found_s = self.clock - found_at
                assert found_s >= FOUND_S, f"{self} evicts {record}, found {found_s} s ago"

    def copy(self, copying: Copying, num_blocks: int, *, ok: bool = True) -> None:
        """Some blocks are copied; a chunk ends with its last one."""
        if copying.rank_job.job.is_given_up:
            self.end_copying(copying, Refusal.CANCELLED)
            return
        for _ in range(num_blocks):
            if not copying.left:
                break
            at, block, block_id = copying.left.popleft()
            self._copy_block(copying, at, block, block_id)
            if not copying.left or copying.left[0][0] != at:
                self._end_chunk(copying, at, ok=ok)
        if not copying.left:
            self.end_copying(copying, Refusal.NONE)

    def _copy_block(self, copying: Copying, at: int, block: int, block_id: int) -> None:
        record, rank_job = copying.record(at), copying.rank_job
        assert record is not None
        rank = copying.line.rank
        if copying.is_store:
            content = rank_job.kv.read(rank_job.rank, block_id)
            self.memory.write(record, rank, block, content)
            return
        content = self.memory.read(record, rank, block)
        rank_job.kv.write(rank_job.rank, block_id, content)
        if content is not None and content.is_damaged:
            copying.failures[at] = Refusal.CORRUPT
            self.pool.index.drop(record, Reason.DAMAGED)

    def _end_chunk(self, copying: Copying, at: int, *, ok: bool) -> None:
        if not ok:
            copying.failures[at] = Refusal.COPY_FAILED
        self.pool.jobs.end_chunks(copying.admitted, (at,), ok=at not in copying.failures)

    def end_copying(self, copying: Copying, refusal: Refusal) -> None:
        """A job is over; what is not copied yet has failed."""
        self.copies.remove(copying)
        for at in sorted(copying.admitted.under_way):
            copying.failures[at] = refusal
            self.pool.jobs.end_chunks(copying.admitted, (at,), ok=False)
        copying.left.clear()
        for at, failure in copying.failures.items():
            if failure:
                copying.admitted.chunks[at] = failure
        result = self.pool.jobs.end_job(copying.admitted, 4096, 0.001)
        if not copying.is_repeated:
            self._cluster.send_result(copying.line, copying.rank_job, sent(result))

    # The directory

    def report(self) -> bool:
        """Say what is new; False while the last report is not answered."""
        if self._report is not None and self._report.is_open:
            return False
        report = self.pool.report()
        self._report = Call(
            f"report {report.seq} of {self}",
            (f"reports of {self.node_id}", "head"),
            lambda post: self._cluster.head.report(report, post),
            lambda answer: self.receive(lambda: self._answered(report, answer)),
            self.pool.reporting.give_up,
        )
        self._cluster.wire.send(self._report)
        return True

    def _answered(self, report: Report, answer: ReportAnswer) -> None:
        before = {name: self._is_spare(*name) for name in answer.marks.spare}
        self.pool.answered(answer, self.clock, report.seq)
        for name, was_spare in before.items():
            record = self.find(*name)
            if record is not None and record.number > answer.marks.known and not was_spare:
                assert not self._is_spare(*name), f"{self} takes {record} for spare by an old mark"
        self.num_answered += 1
        if answer.wants_orders and self.document is not None and not _is_open(self._shown):
            document = self.document
            self._shown = Call(
                f"document {document.stamp} of {self}",
                (f"reports of {self.node_id}", "head"),
                lambda post: self._cluster.head.meet(document, post),
                lambda _: None,
                lambda: None,
            )
            self._cluster.wire.send(self._shown)
        if self.pool.wants_document and not _is_open(self._asked_for):
            self._asked_for = Call(
                f"document for {self}",
                (f"reports of {self.node_id}", "head"),
                self._cluster.head.tell_orders,
                lambda document: self.receive(lambda: self.take_orders(document)),
                lambda: None,
            )
            self._cluster.wire.send(self._asked_for)

    def _is_spare(self, namespace: Namespace, key: Key) -> bool:
        record = self.find(namespace, key)
        return record is not None and record.standing is Standing.SPARE

    def take_orders(self, document: OrdersDocument) -> None:
        """The document of orders has come."""
        document = sent(document)
        self.pool.take_orders(document, self.clock)
        if self.pool.orders.stamp == document.stamp:
            self.document = document
            self._cluster.note(document)

    def look_for_pins(self) -> bool:
        """Ask for the keys of a pin that is not known yet; False if there is none."""
        wanted = self.pool.orders.wanted()
        if not wanted or _is_open(self._pin):
            return False
        digest = wanted[0]
        self._pin = Call(
            f"keys of a pin for {self}",
            (f"reports of {self.node_id}", "head"),
            lambda post: self._cluster.head.pin_keys(digest, post),
            lambda named: self.receive(lambda: self.pool.orders.pin_keys(digest, *named)),
            lambda: None,
        )
        self._cluster.wire.send(self._pin)
        return True

    def check(self) -> None:
        """Assert what always holds."""
        self.pool.check()
        index = self.pool.index
        for record, parts in index._parts.items():
            job = index._jobs.get(parts.part.life, {}).get(parts.part.job_id)
            missing = job.ended & ~parts.stored if job is not None else -1
            assert not missing, f"{record} of {self} waits for ranks {missing:b} that have ended it"

    # Other nodes

    def find(self, namespace: Namespace, key: Key) -> ChunkRecord | None:
        return self.pool.index.find(namespace, key)


def _is_open(call: Call[A] | None) -> bool:
    return call is not None and call.is_open
