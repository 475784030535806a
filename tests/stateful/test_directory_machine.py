"""Two engines, a NodeActor and the scheduler actor's manager, with messages that get lost.

Only the state machines are real. What is around them is played here as simply as it can be: a
node that copies one job at a time and reports, engines with one exchange under way, and a wire on
which requests and answers are lost, and old requests come again late.

While faults go on: no load that the node admits reads other bytes than those of its key, and the
invariants of all parts hold. Once they stop, and everybody has talked a few times: what the
directory has is on the node, what the views have is in the directory, each lease is known on both
sides, and a new chunk is stored and found.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import raykv.directory.leases
import raykv.directory.mirror
from raykv.base.clearings import Clearings
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    NO_GENERATION,
    ChunkName,
    Direction,
    EngineId,
    Epoch,
    Generation,
    Key,
    Lookup,
    Namespace,
    NodeId,
    Refusal,
)
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.engine.requests import FailedLoad, RequestOptions
from raykv.engine.view import EngineView
from raykv.node.keeper import failed_columns
from raykv.node.slots import Admission, SlotTable
from raykv.protocol.columns import Handle, Keys
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import FailedStores, Inventory, NodeReport
from tests.fixtures.directory.tables import open_table, use_table
from tests.fixtures.effort import examples
from tests.fixtures.keys import named_key as key

PAGE = 4096
NUM_PAGES = 16
SLAB = 4
NODE = NodeId("node")
NAMES = "abcdefghijkl"
LEASE_SLOTS = 4
MAX_INBOX = 4
PAGE_KEYS = 3
"""Keys in a page of a mirror and chunks in one of an inventory, so that a few make several."""

SETTINGS = ManagerSettings(
    engine_expiry_s=10, node_expiry_s=10, settle_s=2, pin_s=3, generations_per_epoch=20
)


class Fate(Enum):
    """What the wire does with a request and its answer."""

    ARRIVES = "arrives"
    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"


fates = st.sampled_from([Fate.ARRIVES] * 6 + [Fate.REQUEST_LOST, Fate.ANSWER_LOST])


@dataclass(eq=False)
class Job:
    """A copy job. `admitted` is None until the node has begun it.

    A load may not read a chunk of the generation `floor` or an older one.
    """

    engine: Engine
    direction: Direction
    request_id: str
    keys: list[Key]
    handles: list[Handle]
    node_epoch: Epoch
    floor: Generation
    namespace: Namespace
    admitted: list[int] | None = None
    refusals: dict[int, Refusal] = field(default_factory=dict)
    is_completed_by_vllm: bool = True

    def name(self, chunk: int) -> ChunkName:
        handle = self.handles[chunk]
        engine = self.engine
        return ChunkName(
            self.namespace, self.keys[chunk], handle.slot, handle.generation, engine.pages * PAGE
        )

    def refuse_all(self, refusal: Refusal) -> None:
        for chunk in range(len(self.keys)):
            self.refusals.setdefault(chunk, refusal)


def text_of(name: ChunkName) -> str:
    """The bytes of a chunk."""
    return f"{name.namespace} {name.key!r} {name.generation}"


class Node:
    """What a NodeActor does: copies, and reports."""

    def __init__(self, epoch: int) -> None:
        self.epoch = Epoch(epoch)
        self.table = SlotTable(PoolGeometry(NUM_PAGES * PAGE, SLAB * PAGE))
        self.memory = [""] * NUM_PAGES
        self.jobs: deque[Job] = deque()
        self.scheduler_epoch = 0
        self._seq = 0
        self._paused = False
        self._unreported: list[ChunkName] = []
        self._unanswered: NodeReport | None = None
        # What is left of an inventory, with the number of its next page.
        self._pages: list[list[ChunkName]] = []
        self._page = 0

    # Copies

    def begin_next(self) -> None:
        """Admit the chunks of the oldest job; a store leaves half-written bytes at once."""
        job = self.jobs[0]
        job.admitted = []
        if job.node_epoch != self.epoch:
            job.refuse_all(Refusal.BAD_HANDLE)
            return
        for chunk in range(len(job.keys)):
            refusal = self._begin(job, chunk)
            if refusal is Refusal.NONE:
                job.admitted.append(chunk)
            else:
                job.refusals[chunk] = refusal

    def _begin(self, job: Job, chunk: int) -> Refusal:
        name = job.name(chunk)
        if job.direction is Direction.LOAD:
            refusal = self.table.begin_load(name)
            if refusal is Refusal.NONE:
                self._read(job, name)
            return refusal
        answer = self.table.begin_store(name, 0, 1, expires_at=float("inf"))
        if answer.admission is Admission.GO:
            self._write(job, name, "half of " + text_of(name))
            return Refusal.NONE
        return answer.refusal or Refusal.WRITING

    def finish_next(self, ok: bool) -> None:
        """End the oldest job and hand its result to its engine."""
        job = self.jobs.popleft()
        for chunk in job.admitted or []:
            name = job.name(chunk)
            if job.direction is Direction.LOAD:
                self._read(job, name)
                self.table.finish_load(name.slot, name.generation)
            else:
                self._write(job, name, text_of(name))
                self.table.finish_store(name.slot, name.generation, 0, ok)
                if self.table.begin_load(name) is Refusal.NONE:
                    self.table.finish_load(name.slot, name.generation)
                    self._unreported.append(name)
                elif ok:
                    job.refusals[chunk] = Refusal.POISONED
            if not ok:
                job.refusals[chunk] = Refusal.COPY_FAILED
        job.engine.ended.append(job)

    def _read(self, job: Job, name: ChunkName) -> None:
        pages = set(self.memory[name.slot : name.slot + job.engine.pages])
        assert pages == {text_of(name)}, "a load has read other bytes than those of its key"
        assert name.generation > job.floor, "a load has read what was there before a reset"

    def _write(self, job: Job, name: ChunkName, text: str) -> None:
        for page in range(name.slot, name.slot + job.engine.pages):
            self.memory[page] = text

    # Reports

    def report(self, manager: BlockManager, now: float, fate: Fate) -> NodeReport:
        """One page of an inventory, or what is new; returns what was sent."""
        if self._pages:
            ready = [name for name in self._pages[0] if self.table.is_ready(name)]
            message = self._message(ready, page=self._page)
        else:
            if self._unanswered is None:
                self._seq += 1
                failed = failed_columns(self.table.take_failed(100))
                self._unanswered = self._message(self._unreported, failed)
                self._unreported = []
            message = self._unanswered
        if fate is Fate.REQUEST_LOST:
            self._pages = []
            return message
        reply = manager.node_report(message, now)
        if fate is Fate.ANSWER_LOST:
            self._pages = []
            return message
        if self._pages:
            del self._pages[0]
            self._page += 1
        else:
            self._unanswered = None
        self.scheduler_epoch = max(self.scheduler_epoch, reply.epoch)
        self._paused = reply.paused
        for namespace, generation in reply.cleared.items():
            self.table.discard_namespace(Namespace(namespace), Generation(generation))
        if reply.inventory:
            self._begin_inventory()
        return message

    def _begin_inventory(self) -> None:
        self._unreported = []
        chunks = list(self.table.inventory())
        starts = range(0, len(chunks), PAGE_KEYS)
        self._pages = [chunks[start : start + PAGE_KEYS] for start in starts] or [[]]
        self._page = 1

    def _message(
        self,
        chunks: list[ChunkName],
        failed: FailedStores = FailedStores(),  # noqa: B008
        page: int = 0,
    ) -> NodeReport:
        namespaces = sorted({name.namespace for name in chunks})
        return NodeReport(
            version=PROTOCOL_VERSION,
            node_id=NODE,
            epoch=self.epoch,
            seq=self._seq,
            pool_bytes=NUM_PAGES * PAGE,
            slab_bytes=SLAB * PAGE,
            highest_generation=self.table.highest_generation,
            scheduler_epoch=self.scheduler_epoch,
            stored=Inventory(
                [str(name) for name in namespaces],
                [namespaces.index(name.namespace) for name in chunks],
                Keys.of([name.key for name in chunks]),
                [name.slot for name in chunks],
                [name.generation for name in chunks],
                [name.slot_bytes for name in chunks],
            ),
            failed=failed,
            page=page,
            last_page=page > 0 and len(self._pages) == 1,
            cleared=self.table.cleared,
            paused=self._paused,
        )


class Engine:
    """vLLM around a view, and the session that exchanges messages for it."""

    def __init__(self, name: str, namespace: str, pages: int) -> None:
        self.engine_id = EngineId(name)
        self.namespace = Namespace(namespace)
        self.pages = pages
        self.view = EngineView(self.engine_id, [0], lookup_deadline_s=1.0, lease_slots=LEASE_SLOTS)
        self.ended: deque[Job] = deque()
        self.flying: list[Job] = []
        self.late: list[SyncRequest] = []
        # What was stored up to this generation is from before the last reset, by namespace.
        self.floors: dict[Namespace, Generation] = {}
        self.is_link_up = True
        self._requests = 0
        # The session: the actor's epoch as far as it knows, and the one message under way.
        self._epoch = Epoch(0)
        self._inbox: deque[tuple[Namespace, EngineAttached] | SyncReply] = deque()
        self._unanswered: SyncRequest | None = None
        self._failures = 0
        self.under_way: AttachEngine | SyncRequest | None = None

    # The session

    def send(self) -> None:
        """Make up the next message; the engine goes on while it is under way."""
        if not self._epoch:
            node_epoch, leases = self.view.declared_leases()
            self.under_way = AttachEngine(
                version=PROTOCOL_VERSION,
                engine_id=self.engine_id,
                node_id=NODE,
                namespace=self.namespace,
                model="tiny",
                num_ranks=1,
                slot_bytes={0: self.pages * PAGE},
                leases=leases,
                node_epoch=node_epoch,
            )
            return
        if self._unanswered is None:
            self._unanswered = self.view.take_request(
                self._epoch, may_grow=len(self._inbox) < MAX_INBOX, may_want=not self._inbox
            )
        self.under_way = self._unanswered

    def receive(self, manager: BlockManager, now: float, fate: Fate) -> Generation:
        """The manager gets the message, and the session its answer; returns the last grant."""
        message, self.under_way = self.under_way, None
        if isinstance(message, AttachEngine):
            self.late.clear()
            self._attach(manager, message, now, fate)
            return NO_GENERATION
        assert isinstance(message, SyncRequest)
        if fate is Fate.REQUEST_LOST:
            self._fail()
            return NO_GENERATION
        reply = manager.sync(message, now)
        granted = Generation(max(reply.granted.generations, default=0))
        self.late.append(message)
        if fate is Fate.ANSWER_LOST:
            self._fail()
            return granted
        self._failures = 0
        self._unanswered = None
        if reply.attach:
            self._epoch = Epoch(0)
        elif not message.idle or reply.cleared:
            self._inbox.append(reply)
        return granted

    def _attach(self, manager: BlockManager, message: AttachEngine, now: float, fate: Fate) -> None:
        if fate is Fate.REQUEST_LOST:
            return
        answer = manager.attach_engine(message, now)
        if fate is Fate.ANSWER_LOST or answer.error:
            return
        self._epoch = Epoch(answer.epoch)
        self._unanswered = None
        self._inbox.append((Namespace(message.namespace), answer))
        if message.namespace != self.namespace:
            self._epoch = Epoch(0)

    def _fail(self) -> None:
        self._failures += 1
        if self._failures > 1:
            self._epoch = Epoch(0)

    def drain(self) -> None:
        """Take in the answers; between two steps of the engine."""
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, SyncReply):
                self.view.apply(message)
            elif message[0] == self.namespace:
                self.view.attached(message[1])

    # vLLM

    def new_request(self) -> str:
        self._requests += 1
        request_id = f"request-{self._requests}"
        self.view.start_request(request_id, RequestOptions())
        return request_id

    def store(self, node: Node, keys: list[Key]) -> Job | None:
        request_id = self.new_request()
        plan = self.view.prepare_store(request_id, keys)
        if plan is None or not plan.keys:
            return None
        return self._submit(node, Direction.STORE, request_id, plan.keys, plan.handles)

    def load(self, node: Node, keys: list[Key], now: float) -> Job | None:
        """Load the longest prefix that the view has."""
        request_id = self.new_request()
        found: list[Key] = []
        for name in keys:
            if self.view.lookup(request_id, name, now) is not Lookup.HIT:
                break
            found.append(name)
        if not found:
            return None
        handles = self.view.prepare_load(found)
        return self._submit(node, Direction.LOAD, request_id, found, handles)

    def _submit(
        self,
        node: Node,
        direction: Direction,
        request_id: str,
        keys: list[Key],
        handles: list[Handle],
    ) -> Job:
        job = Job(
            self,
            direction,
            request_id,
            keys,
            handles,
            self.view.node_epoch,
            self.floor,
            self.namespace,
        )
        self.flying.append(job)
        if self.is_link_up:
            node.jobs.append(job)
        else:
            job.refuse_all(Refusal.NODE_LOST)
            self.ended.append(job)
        return job

    def take_result(self) -> None:
        """vLLM learns how the job ended that ended first."""
        job = self.ended.popleft()
        self.flying.remove(job)
        for chunk, refusal in job.refusals.items():
            generation = job.handles[chunk].generation
            if job.direction is Direction.STORE:
                self.view.fail_store(job.keys[chunk], generation)
            else:
                failed = FailedLoad(
                    job.request_id, job.keys[chunk], generation, job.node_epoch, refusal.is_final
                )
                self.view.fail_load(failed)
        if not job.is_completed_by_vllm:
            return
        if job.direction is Direction.STORE:
            self.view.complete_store(job.keys)
        else:
            self.view.complete_load(job.keys)

    def lose_link(self) -> None:
        self.is_link_up = False
        self.view.set_link(False)

    def find_link(self, node: Node) -> None:
        self.is_link_up = True
        self.view.set_link(True)
        self.view.node_restarted(node.epoch)

    @property
    def floor(self) -> Generation:
        return self.floors.get(self.namespace, NO_GENERATION)

    def change_weights(self, namespace: str) -> None:
        """What is under way goes on; a clearing has to be confirmed first."""
        if self.view.is_clearing:
            return
        self.view.leave()
        self.view.enter(namespace)
        if namespace != self.namespace:
            self.namespace = Namespace(namespace)
            self._epoch = Epoch(0)

    def reset(self, floor: Generation) -> None:
        """vLLM never completes the jobs from before."""
        self.view.reset()
        self.floors[self.namespace] = max(self.floor, floor)
        for job in self.flying:
            job.is_completed_by_vllm = False


names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
engines = st.integers(0, 1)


class DirectoryMachine(RuleBasedStateMachine):
    SECOND_NAMESPACE = "first"
    SECOND_PAGES = 1
    TABLE = "dict"

    @initialize(filled=st.integers(0, len(NAMES)))
    def begin(self, filled: int) -> None:
        self.patches = pytest.MonkeyPatch()
        use_table(self.patches, self.TABLE)
        self.patches.setattr(raykv.directory.leases, "MAX_KEYS", PAGE_KEYS)
        self.patches.setattr(raykv.directory.mirror, "MAX_KEYS", PAGE_KEYS)
        self.now = 1000.0
        self.manager = BlockManager(Epoch(1), SETTINGS)
        self.highest = NO_GENERATION
        self.node = Node(epoch=1)
        self.late_reports: list[NodeReport] = []
        self.num_engines = 2
        self.engines = [
            Engine("engine-0", "first", 1),
            Engine("engine-1", self.SECOND_NAMESPACE, self.SECOND_PAGES),
        ]
        self.talk_until_quiet()
        for name in NAMES[:filled]:
            for which in (0, 1):
                self.engine_works(which, [name])

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.patches.undo()

    @precondition(lambda self: self.TABLE == "dict")
    @rule()
    def fast_table_is_ready(self) -> None:
        """Once at most, at any time."""
        self.TABLE = "flat"
        self.manager.change_table(open_table("flat"), self.now)

    # What the engines do

    @rule(which=engines, keys=names)
    def engine_works(self, which: int, keys: list[str]) -> None:
        """It asks for some chunks, stores them if it has to, and everybody hears of it."""
        if not self.engines[which].load(self.node, list(map(key, keys)), self.now):
            self.engines[which].store(self.node, list(map(key, keys)))
        self.talk()

    @rule(which=engines, keys=names)
    def engine_stores(self, which: int, keys: list[str]) -> None:
        self.engines[which].store(self.node, list(map(key, keys)))

    @rule(which=engines, keys=names)
    def engine_loads(self, which: int, keys: list[str]) -> None:
        self.engines[which].load(self.node, list(map(key, keys)), self.now)

    @rule(which=engines, keys=names)
    def chunks_are_released(self, which: int, keys: list[str]) -> None:
        for node in self.manager._nodes.values():
            node.book.release(self.engines[which].namespace, [key(name) for name in keys])

    @precondition(lambda self: any(engine.ended for engine in self.engines))
    @rule()
    def engines_learn_how_their_jobs_ended(self) -> None:
        for engine in self.engines:
            while engine.ended:
                engine.take_result()

    @rule(which=engines, back=st.booleans())
    def engine_changes_its_weights(self, which: int, back: bool) -> None:
        """To ones of its own, or back to those of the start."""
        engine = self.engines[which]
        start = "first" if which == 0 else self.SECOND_NAMESPACE
        engine.change_weights(start if back else f"{start} changed")

    @rule(which=engines)
    def engine_drains_its_inbox(self, which: int) -> None:
        self.engines[which].drain()

    def engine_resets(self, which: int) -> None:
        self.engines[which].reset(self.highest)

    def engine_dies_and_another_starts(self, which: int) -> None:
        dead = self.engines[which]
        if self.node.jobs and self.node.jobs[0].engine is dead and self.node.jobs[0].admitted:
            self.node.finish_next(ok=False)
        self.node.jobs = deque(job for job in self.node.jobs if job.engine is not dead)
        self.engines[which] = Engine(f"engine-{self.num_engines}", dead.namespace, dead.pages)
        self.num_engines += 1

    # What the node does

    @precondition(lambda self: self.node.jobs)
    @rule(ok=st.sampled_from([True] * 9 + [False]))
    def node_copies(self, ok: bool) -> None:
        if self.node.jobs[0].admitted is None:
            self.node.begin_next()
        else:
            self.node.finish_next(ok)

    @precondition(lambda self: self.node.jobs)
    @rule()
    def node_copies_everything(self) -> None:
        while self.node.jobs:
            if self.node.jobs[0].admitted is None:
                self.node.begin_next()
            self.node.finish_next(ok=True)

    def node_restarts(self) -> None:
        jobs = self.node.jobs
        self.node = Node(self.node.epoch + 1)
        for job in jobs:
            job.refuse_all(Refusal.NODE_LOST)
            job.engine.ended.append(job)
        # Its memory is new: there is nothing from before a reset.
        self.generations_may_begin_anew()
        for engine in self.engines:
            engine.is_link_up = False

    def generations_may_begin_anew(self) -> None:
        """Nobody is left who has heard of those that were granted."""
        self.highest = NO_GENERATION
        for engine in self.engines:
            engine.floors.clear()

    @precondition(lambda self: not all(engine.is_link_up for engine in self.engines))
    @rule(which=engines, is_back=st.booleans())
    def workers_look_for_their_node(self, which: int, is_back: bool) -> None:
        engine = self.engines[which]
        if not engine.is_link_up:
            engine.lose_link()
            if is_back and not engine.ended:
                engine.find_link(self.node)

    # What the wire does

    def tick(self) -> None:
        self.manager.expire(self.now)

    @rule(which=engines)
    def engine_sends(self, which: int) -> None:
        if self.engines[which].under_way is None:
            self.engines[which].send()

    @rule(which=engines, fate=fates)
    def manager_answers(self, which: int, fate: Fate) -> None:
        if self.engines[which].under_way is not None:
            self.tick()
            granted = self.engines[which].receive(self.manager, self.now, fate)
            self.highest = max(self.highest, granted)

    @rule(which=engines, fate=fates)
    def engine_exchanges(self, which: int, fate: Fate) -> None:
        self.engine_sends(which)
        self.manager_answers(which, fate)

    @rule(fate=fates)
    def node_reports(self, fate: Fate) -> None:
        self.tick()
        sent = self.node.report(self.manager, self.now, fate)
        self.late_reports.append(sent)

    @precondition(lambda self: self.late_reports)
    @rule(data=st.data())
    def old_report_comes_again(self, data: st.DataObject) -> None:
        self.tick()
        self.manager.node_report(data.draw(st.sampled_from(self.late_reports[-5:])), self.now)

    @rule(which=engines, data=st.data())
    def old_request_comes_again(self, which: int, data: st.DataObject) -> None:
        late = self.engines[which].late
        if late:
            self.tick()
            self.manager.sync(data.draw(st.sampled_from(late[-5:])), self.now)

    # What time and the scheduler actor do

    @rule(seconds=st.sampled_from([1, 1, 2, 3, 11]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(
        what=st.sampled_from(
            [
                "engine resets",
                "engine dies",
                "node restarts",
                "scheduler actor restarts",
                "scheduler actor restarts",
                "scheduler actor restarts with a late clock",
                "operator clears a namespace",
                "operator clears everything",
                "operator pauses",
                "operator resumes",
            ]
        ),
        which=engines,
    )
    def something_happens(self, what: str, which: int) -> None:
        match what.split():
            case ["engine", "resets"]:
                self.engine_resets(which)
            case ["engine", "dies"]:
                self.engine_dies_and_another_starts(which)
            case ["node", "restarts"]:
                self.node_restarts()
            case ["scheduler", "actor", "restarts", *clock]:
                if self.is_every_clearing_on_the_node():
                    epoch = 1 if clock else self.manager.granting + 1
                    self.manager = BlockManager(Epoch(epoch), SETTINGS)
                    if not self.node.scheduler_epoch and not self.node.table.highest_generation:
                        self.generations_may_begin_anew()
            case ["operator", "clears", extent, *_]:
                self.manager.clear(None if extent == "everything" else Namespace("first"))
            case ["operator", verb]:
                self.manager.set_paused(verb == "pauses")

    def is_every_clearing_on_the_node(self) -> bool:
        """A clearing that the node has not heard of dies with the scheduler actor."""
        heard = Clearings(self.node.table.cleared)
        return all(
            heard.of(Namespace(name)) >= generation
            for name, generation in self.manager.cleared.items()
        )

    # What always holds

    @invariant()
    def parts_are_consistent(self) -> None:
        self.manager.check()
        self.node.table.check()
        for engine in self.engines:
            engine.view.check()

    # What holds in the end

    def talk_until_quiet(self) -> None:
        """No more faults: everybody says and hears all there is, twice the time to settle."""
        until = self.now + 2 * SETTINGS.settle_s
        quiet_rounds = 0
        while self.now < until or quiet_rounds < 2:
            assert self.now < until + 50, "there is no end of news"
            self.now += 0.5
            before = self.picture()
            self.talk()
            quiet_rounds = quiet_rounds + 1 if self.picture() == before else 0
        self.parts_are_consistent()

    def talk(self) -> None:
        """One round: jobs run and end, and everybody exchanges one message."""
        self.node_copies_everything()
        for which, engine in enumerate(self.engines):
            while engine.ended:
                engine.take_result()
            if not engine.is_link_up:
                engine.find_link(self.node)
            self.engine_exchanges(which, Fate.ARRIVES)
            engine.drain()
        self.node_reports(Fate.ARRIVES)

    def picture(self) -> object:
        """What changes while there is news."""
        status = self.manager.status("", "", 0.0)
        views = [
            (engine.view.num_ready, engine.view.declared_leases(), engine.view.has_news)
            for engine in self.engines
        ]
        leases = [(engine.engine_id, engine.leased_slots) for engine in status.engines]
        return views, leases, status.namespaces, status.epoch

    def settle(self) -> None:
        self.manager.set_paused(False)
        self.now += 20
        self.talk_until_quiet()
        self.directory_is_on_the_node()
        self.views_are_in_the_directory()
        self.leases_are_known_on_both_sides()
        # The lookups have pinned all chunks.
        self.now += SETTINGS.pin_s
        self.talk_until_quiet()
        for engine in self.engines:
            self.new_chunk_is_stored_and_found(engine)

    def directory_is_on_the_node(self) -> None:
        there = {
            (name.namespace, name.key, name.generation) for name in self.node.table.inventory()
        }
        for namespace in {engine.namespace for engine in self.engines}:
            for name in map(key, NAMES):
                held = self.manager.holds(NODE, namespace, name)
                assert held is None or (namespace, name, held) in there

    def views_are_in_the_directory(self) -> None:
        for engine in self.engines:
            for name in map(key, NAMES):
                if engine.view.lookup("later", name, self.now) is Lookup.HIT:
                    (handle,) = engine.view.prepare_load([name])
                    held = self.manager.holds(NODE, engine.namespace, name)
                    assert held == handle.generation

    def leases_are_known_on_both_sides(self) -> None:
        status = self.manager.status("", "", self.now)
        leased = {engine.engine_id: engine.leased_slots for engine in status.engines}
        declared = {
            engine.engine_id: len(engine.view.declared_leases()[1].slots) for engine in self.engines
        }
        assert leased == declared
        assert sum(node.leased_slots for node in status.nodes) == sum(declared.values())

    def new_chunk_is_stored_and_found(self, engine: Engine) -> None:
        name = key(f"new-{engine.engine_id}")
        job = engine.store(self.node, [name])
        if job is None:
            # The other engine's leases may lie in every slab.
            assert {other.pages for other in self.engines} == {1, 2}
            return
        self.talk_until_quiet()
        held = self.manager.holds(NODE, engine.namespace, name)
        if held is None and len({other.pages for other in self.engines}) > 1:
            # The other slot size was below its fair share and got the slab with the new chunk.
            return
        assert held == job.handles[0].generation
        for other in self.engines:
            if other.namespace == engine.namespace:
                load = other.load(self.node, [name], self.now)
                assert load is not None
                self.node_copies_everything()
                assert load.refusals == {}


class TwoNamespacesMachine(DirectoryMachine):
    SECOND_NAMESPACE = "second"


class TwoSlotSizesMachine(DirectoryMachine):
    SECOND_NAMESPACE = "second"
    SECOND_PAGES = 2


class FlatMachine(DirectoryMachine):
    TABLE = "flat"


class FlatTwoNamespacesMachine(TwoNamespacesMachine):
    TABLE = "flat"


class FlatTwoSlotSizesMachine(TwoSlotSizesMachine):
    TABLE = "flat"


PROFILE = settings(max_examples=examples(30), stateful_step_count=50, deadline=None)

for machine in (
    DirectoryMachine,
    TwoNamespacesMachine,
    TwoSlotSizesMachine,
    FlatMachine,
    FlatTwoNamespacesMachine,
    FlatTwoSlotSizesMachine,
):
    machine.TestCase.settings = PROFILE

test_directory_comes_to_the_truth_with_two_engines_of_one_model = DirectoryMachine.TestCase
test_directory_comes_to_the_truth_with_engines_of_two_models = TwoNamespacesMachine.TestCase
test_directory_comes_to_the_truth_with_two_slot_sizes = TwoSlotSizesMachine.TestCase
test_flat_directory_comes_to_the_truth_with_two_engines_of_one_model = FlatMachine.TestCase
test_flat_directory_comes_to_the_truth_with_engines_of_two_models = (
    FlatTwoNamespacesMachine.TestCase
)
test_flat_directory_comes_to_the_truth_with_two_slot_sizes = FlatTwoSlotSizesMachine.TestCase
