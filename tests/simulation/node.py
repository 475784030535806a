"""A NodeActor as the simulation plays it: one job at a time, reads, fetches, and reports.

It does what `raykv/node/actor.py` and its parts do, without threads and real bytes: whatever takes
time there is begun by one method here and ended by another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    ChunkName,
    Direction,
    Epoch,
    Generation,
    Key,
    Namespace,
    NodeId,
    Refusal,
    Slot,
)
from raykv.node.keeper import failed_columns, inventory_of
from raykv.node.slots import Admission, SlotState, SlotTable
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import FailedStores, NodeReport, NodeReportReply
from raykv.protocol.peer import ReadReply, ReadRequest
from tests.simulation.fetch import Fetches, Post, ReadAnswer
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

MAX_PAGE = 3
"""Chunks in a report, so that a few make several pages."""

STORE_EXPIRY_S = 30.0


@dataclass(frozen=True)
class Content:
    """The bytes of a chunk: whose KV it is, and in which step of the world it was computed."""

    namespace: Namespace
    key: Key
    made_at: int


@dataclass(eq=False)
class Job:
    """A copy job of an engine. `admitted` is None until the node has begun it.

    `made_at` is the step in which a store's bytes were computed. `seen` has what a load has read,
    by chunk: None is neither this nor that.
    """

    owner: str
    direction: Direction
    request_id: str
    names: list[ChunkName]
    node_epoch: Epoch
    made_at: int
    ended: Callable[[Job], None]
    floor: int = 0
    is_completed_by_vllm: bool = True
    admitted: list[int] | None = None
    refusals: dict[int, Refusal] = field(default_factory=dict)
    seen: dict[int, Content | None] = field(default_factory=dict)

    def refuse_all(self, refusal: Refusal) -> None:
        for chunk in range(len(self.names)):
            self.refusals.setdefault(chunk, refusal)


@dataclass(eq=False)
class _Read:
    """A chunk on its way out to another node."""

    name: ChunkName
    seen: Content | None
    post: Post[ReadAnswer]


class Node:
    """One life of a NodeActor."""

    def __init__(
        self, cluster: Cluster, node_id: NodeId, epoch: Epoch, geometry: PoolGeometry
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.table = SlotTable(geometry)
        self.jobs: deque[Job] = deque()
        self.reads: list[_Read] = []
        self.fetches = Fetches(self, cluster)
        self._cluster = cluster
        self._memory: list[Content | None] = [None] * (geometry.pool_bytes // SLOT_ALIGNMENT)
        self._seq = 0
        self._scheduler_epoch = 0
        self._paused = False
        self._unreported: deque[ChunkName] = deque()
        self._unanswered: NodeReport | None = None
        # What is left of an inventory, with the number of its next page.
        self._pages: list[list[ChunkName]] = []
        self._page = 0
        self._call: Call[NodeReportReply] | None = None

    def die(self) -> None:
        """Nobody hears of it any more; the engines see that their jobs are lost."""
        if self._call is not None:
            self._call.forget()
        self.fetches.die()
        self.reads.clear()
        for job in self.jobs:
            job.refuse_all(Refusal.NODE_LOST)
            job.ended(job)

    # Memory

    def bytes_at(self, name: ChunkName) -> Content | None:
        """What is where the chunk should be; None if it is not one whole chunk."""
        pages = self._memory[name.slot : name.slot + name.slot_bytes // SLOT_ALIGNMENT]
        return pages[0] if all(page is pages[0] for page in pages) else None

    def write(self, name: ChunkName, content: Content | None) -> None:
        for page in range(name.slot, name.slot + name.slot_bytes // SLOT_ALIGNMENT):
            self._memory[page] = content

    def begin_store(self, name: ChunkName) -> Refusal:
        """Admit a chunk for writing; half of it is written at once."""
        expires_at = self._cluster.now + STORE_EXPIRY_S
        answer = self.table.begin_store(name, rank=0, num_ranks=1, expires_at=expires_at)
        if answer.admission is Admission.GO:
            self.write(name, None)
            return Refusal.NONE
        return answer.refusal or Refusal.WRITING

    def end_store(self, name: ChunkName, content: Content | None, ok: bool) -> SlotState:
        """The chunk is written, or won't be."""
        if ok:
            self.write(name, content)
        state = self.table.finish_store(name.slot, name.generation, rank=0, ok=ok)
        if state is SlotState.READY:
            self._unreported.append(name)
        return state

    # Jobs

    def step_job(self, ok: bool) -> str:
        """Begin the oldest job, or end it."""
        job = self.jobs[0]
        if job.admitted is None:
            self._begin(job)
            return f"{self.node_id} begins a {job.direction.name} of {job.owner}"
        self.jobs.popleft()
        self._finish(job, ok)
        return f"{self.node_id} ends a {job.direction.name} of {job.owner}, ok={ok}"

    def _begin(self, job: Job) -> None:
        job.admitted = []
        if job.node_epoch != self.epoch:
            job.refuse_all(Refusal.BAD_HANDLE)
            return
        for chunk, name in enumerate(job.names):
            is_store = job.direction is Direction.STORE
            refusal = self.begin_store(name) if is_store else self.table.begin_load(name)
            if refusal is Refusal.NONE:
                job.admitted.append(chunk)
                job.seen[chunk] = self.bytes_at(name)
            else:
                job.refusals[chunk] = refusal

    def _finish(self, job: Job, ok: bool) -> None:
        for chunk in job.admitted or []:
            name = job.names[chunk]
            if job.direction is Direction.LOAD:
                if self.bytes_at(name) is not job.seen[chunk]:
                    job.seen[chunk] = None
                self.table.finish_load(name.slot, name.generation)
            else:
                content = Content(name.namespace, name.key, job.made_at)
                if self.end_store(name, content, ok) is SlotState.EMPTY and ok:
                    job.refusals[chunk] = Refusal.POISONED
            if not ok:
                job.refusals[chunk] = Refusal.COPY_FAILED
        job.ended(job)

    def drop_jobs(self, owner: str) -> None:
        """An engine is dead: what it has queued is void, what runs is given up."""
        if self.jobs and self.jobs[0].owner == owner and self.jobs[0].admitted is not None:
            self._finish(self.jobs.popleft(), ok=False)
        self.jobs = deque(job for job in self.jobs if job.owner != owner)

    # For other nodes

    def read(self, request: ReadRequest, post: Post[ReadAnswer]) -> None:
        """Begin to copy one chunk out."""
        (key,), (slot,) = request.handles.keys, request.handles.slots
        name = ChunkName(
            Namespace(request.namespace),
            Key(key),
            Slot(slot),
            Generation(request.handles.generations[0]),
            request.slot_bytes[0],
        )
        is_ours = request.node_epoch == self.epoch
        refusal = self.table.begin_load(name) if is_ours else Refusal.BAD_HANDLE
        if refusal is Refusal.NONE:
            self.reads.append(_Read(name, self.bytes_at(name), post))
        else:
            post((ReadReply(self.epoch, [int(refusal)]), None))

    def end_read(self, number: int) -> None:
        """The bytes are out and on the wire."""
        read = self.reads.pop(number)
        is_same = self.bytes_at(read.name) is read.seen
        self.table.finish_load(read.name.slot, read.name.generation)
        read.post((ReadReply(self.epoch, [int(Refusal.NONE)]), read.seen if is_same else None))

    # Reports

    def report(self) -> bool:
        """Send a page of an inventory, or what is new, or again what got no answer.

        Returns:
            False if nothing was sent, since a report is under way.
        """
        if self._call is not None and self._call.is_open:
            return False
        if self._pages:
            ready = [name for name in self._pages[0] if self.table.is_ready(name)]
            message = self._message(ready, FailedStores(), self._page)
        else:
            if self._unanswered is None:
                self._seq += 1
                count = min(MAX_PAGE, len(self._unreported))
                self._unanswered = self._message(
                    [self._unreported.popleft() for _ in range(count)],
                    failed_columns(self.table.take_failed(MAX_PAGE)),
                )
            message = self._unanswered
        page = f" page {message.page}" if message.page else ""
        self._call = Call(
            label=f"report {message.seq}{page} of {self.node_id}",
            ends=(self.node_id, "scheduler"),
            receive=lambda post: self._cluster.take_report(message, post),
            answered=lambda reply: self._answered(message, reply),
            given_up=self._pages.clear,
        )
        self._cluster.wire.send(self._call, lane=f"reports of {self.node_id}")
        return True

    def _message(self, chunks: list[ChunkName], failed: FailedStores, page: int = 0) -> NodeReport:
        return NodeReport(
            version=PROTOCOL_VERSION,
            node_id=self.node_id,
            epoch=self.epoch,
            seq=self._seq,
            pool_bytes=self.table.geometry.pool_bytes,
            slab_bytes=self.table.geometry.slab_bytes,
            highest_generation=self.table.highest_generation,
            scheduler_epoch=self._scheduler_epoch,
            stored=inventory_of(chunks),
            failed=failed,
            page=page,
            last_page=page > 0 and len(self._pages) == 1,
            cleared=self.table.cleared,
            paused=self._paused,
        )

    def _answered(self, message: NodeReport, reply: NodeReportReply) -> None:
        self._scheduler_epoch = max(self._scheduler_epoch, reply.epoch)
        self._paused = reply.paused
        for namespace, generation in reply.cleared.items():
            self.table.discard_namespace(Namespace(namespace), Generation(generation))
        if message.page:
            self._pages.pop(0)
            self._page += 1
            return
        self._unanswered = None
        if reply.inventory:
            self._begin_inventory()

    def _begin_inventory(self) -> None:
        self._unreported.clear()
        chunks = list(self.table.inventory())
        starts = range(0, len(chunks), MAX_PAGE)
        self._pages[:] = [chunks[start : start + MAX_PAGE] for start in starts] or [[]]
        self._page = 1

    @property
    def num_unreported(self) -> int:
        """Chunks that the scheduler actor has not heard of."""
        return len(self._unreported)

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do or to say."""
        return bool(self.jobs or self.reads or self._unreported or self._pages or self._unanswered)
