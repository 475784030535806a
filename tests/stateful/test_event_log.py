"""Readers of the event stream against the block manager, while its directory changes at random.

Only the block manager, its log and `Replay` are real. Nodes and engines are played as simply as it
can be; they are lost, come back, begin new lives, and store, drop and clear what they like. Readers
poll now and then. The log is short, so that they fall behind it and take snapshots, page by page,
of which only a few are kept.

A reader that has read to the end of the log knows what the directory holds, place by place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import raykv.directory.answers.snapshots
from raykv.base.ids import EVERY_NAMESPACE, EngineId, Epoch, Namespace, NodeId
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.columns import Handles, Keys, Leases, LostReplicas, Source
from raykv.protocol.engine import AttachEngine, SyncReply, SyncRequest
from raykv.protocol.events import EpochBegan, EventPage, SnapshotPage, events_of
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Inventory, NodeReport
from raykv.stream.replay import Replay
from tests.fixtures.directory.tables import open_table, use_table
from tests.fixtures.effort import examples
from tests.fixtures.keys import named_key as key

PAGE = 4096
SLAB = 4
NUM_PAGES = 8
NODES = ("one", "two", "three")
PAGES = {"model": 1, "second": 2}
"""Of a chunk, by namespace."""
LETTERS = "abcdef"
EXPIRY_S = 5.0
MAX_EVENTS = 20
SNAPSHOT_PAGE = 2
MAX_OPEN = 2
NUM_READERS = 3

SETTINGS = ManagerSettings(
    engine_expiry_s=1000, node_expiry_s=EXPIRY_S, settle_s=0, pin_s=3, max_events=MAX_EVENTS
)


class Row(NamedTuple):
    """A chunk as a node has it."""

    namespace: str
    letter: str
    slot: int
    generation: int

    @property
    def pages(self) -> range:
        return range(self.slot, self.slot + PAGES[self.namespace])


def inventory(rows: Iterable[Row]) -> Inventory:
    rows = list(rows)
    namespaces = list(PAGES)
    return Inventory(
        namespaces,
        [namespaces.index(row.namespace) for row in rows],
        Keys.of([key(row.letter) for row in rows]),
        [row.slot for row in rows],
        [row.generation for row in rows],
        [PAGES[row.namespace] * PAGE for row in rows],
    )


class Node:
    """A NodeActor: its life, what it has, and the latest that it has heard of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.seq = 0
        self.begin_life()

    def begin_life(self) -> None:
        self.life += 1
        self.rows: list[Row] = []
        self.highest = 0
        self.heard = 0

    def write(self, row: Row) -> None:
        """Store a chunk over whatever was there."""
        self.rows = [other for other in self.rows if not set(other.pages) & set(row.pages)]
        self.rows.append(row)
        self.highest = max(self.highest, row.generation)

    def report(
        self, manager: BlockManager, now: float, rows: Iterable[Row] = (), **fields: Any
    ) -> bool:
        """Send a report; returns whether an inventory is asked for."""
        self.seq += 1
        message = NodeReport(
            version=PROTOCOL_VERSION,
            node_id=self.name,
            epoch=self.life,
            seq=self.seq,
            pool_bytes=NUM_PAGES * PAGE,
            slab_bytes=SLAB * PAGE,
            highest_generation=self.highest,
            scheduler_epoch=self.heard,
            stored=inventory(rows),
            **fields,
        )
        reply = manager.node_report(message, now)
        self.heard = max(self.heard, reply.epoch)
        self.rows = [
            row for row in self.rows if row.generation > floor_of(reply.cleared, row.namespace)
        ]
        return reply.inventory

    def send_inventory(self, manager: BlockManager, now: float, split_at: int) -> None:
        """All that it has, in two pages."""
        rows = self.rows
        self.report(manager, now, rows[:split_at], page=1)
        self.report(manager, now, rows[split_at:], page=2, last_page=True)


def floor_of(cleared: dict[str, int], namespace: str) -> int:
    """Up to which generation a namespace was cleared, itself or with all others."""
    return max(cleared.get(namespace, 0), cleared.get(EVERY_NAMESPACE, 0))


class Engine:
    """An engine of a namespace on a node, and its leases: generations by slot."""

    def __init__(self, node: Node, namespace: str) -> None:
        self.node = node
        self.namespace = namespace
        self.engine_id = f"{node.name} {namespace}"
        self.leases: dict[int, int] = {}
        self._life = 0
        self._seq = 0

    def attach(self, manager: BlockManager, now: float) -> bool:
        """False if the node is not known."""
        held = list(self.leases.items())
        message = AttachEngine(
            version=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            node_id=self.node.name,
            namespace=self.namespace,
            model="tiny",
            num_ranks=1,
            slot_bytes={0: PAGES[self.namespace] * PAGE},
            leases=Leases([0] * len(held), [s for s, _ in held], [g for _, g in held]),
        )
        answer = manager.attach_engine(message, now)
        for slot in answer.rejected:
            del self.leases[slot]
        return not answer.error

    def sync(self, manager: BlockManager, now: float, **fields: Any) -> SyncReply:
        """An exchange; once more if the engine has to attach first."""
        for _ in range(2):
            self._seq += 1
            request = SyncRequest(self.engine_id, manager.epoch, self._seq, **fields)
            reply = manager.sync(request, now)
            if reply.void or reply.node_epoch != self._life:
                self.leases.clear()
            if not reply.attach:
                self._life = reply.node_epoch
                granted = zip(reply.granted.slots, reply.granted.generations, strict=True)
                self.leases.update(granted)
                return reply
            if not self.attach(manager, now):
                break
        return SyncReply(manager.epoch, 0)

    def store(self, letters: Iterable[str]) -> list[Row]:
        """Use up leases; the node has the chunks then."""
        rows = []
        for letter, slot in zip(letters, list(self.leases), strict=False):
            row = Row(self.namespace, letter, slot, self.leases.pop(slot))
            self.node.write(row)
            rows.append(row)
        return rows


class Reader:
    """Follows the stream with a `Replay`; takes a snapshot when it has missed events."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.replay = Replay()
        self.place = (0, 0)
        # The cursor of the next page of the snapshot that it takes.
        self.cursor: int | None = None

    def poll(self, most: int) -> None:
        """Take in up to so many events, or begin a snapshot."""
        epoch, after = self.place
        page = decode(encode(self.manager.events(Epoch(epoch), after)), EventPage)
        if page.is_gap:
            self.begin_snapshot()
            return
        events = list(events_of(page))[:most]
        follows = (page.epoch, page.first_seq) == (epoch, after + 1)
        assert follows or isinstance(events[0], EpochBegan), (self.place, events)
        for number, event in enumerate(events, start=page.first_seq):
            assert event.seq == number, event
            self.replay.apply(event)
            self.place = (event.epoch, event.seq)

    def begin_snapshot(self) -> None:
        self.replay = Replay()
        self.cursor = 0

    def read_page(self, *, again: bool = False) -> None:
        """Take in the next page of the snapshot; `again`: but ask for it once more later."""
        assert self.cursor is not None
        page = decode(encode(self.manager.snapshot(self.cursor)), SnapshotPage)
        if page.error:
            self.begin_snapshot()
            return
        self.replay.load(page)
        if page.is_last:
            self.cursor = None
            self.place = (page.epoch, page.seq)
        elif not again or not self.cursor:
            self.cursor = page.cursor

    @property
    def is_up_to_date(self) -> bool:
        return self.cursor is None and self.place == (self.manager.epoch, self.manager.last_event)

    def catch_up(self) -> None:
        """Read to the end; nothing happens meanwhile."""
        while not self.is_up_to_date:
            if self.cursor is None:
                self.poll(MAX_EVENTS)
            else:
                self.read_page()


engines = st.sampled_from([(node, namespace) for node in NODES for namespace in PAGES])
nodes = st.sampled_from(NODES)
letters = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4, unique=True)
readers = st.integers(0, NUM_READERS - 1)


class EventLogMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    TABLE = "dict"

    @initialize()
    def begin(self) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(raykv.directory.answers.snapshots, "MAX_PAGE", SNAPSHOT_PAGE)
        self.patches.setattr(raykv.directory.answers.snapshots, "MAX_OPEN", MAX_OPEN)
        self.now = 1000.0
        use_table(self.patches, self.TABLE)
        self.manager = BlockManager(Epoch(1), SETTINGS)
        self.nodes = {name: Node(name) for name in NODES}
        self.engines = {
            (name, namespace): Engine(self.nodes[name], namespace)
            for name in NODES
            for namespace in PAGES
        }
        self.readers = [Reader(self.manager) for _ in range(NUM_READERS)]
        for node in self.nodes.values():
            node.report(self.manager, self.now)

    def teardown(self) -> None:
        try:
            for reader in self.readers:
                reader.catch_up()
            self.readers_at_the_end_of_the_log_know_the_directory()
        finally:
            self.patches.undo()

    def sync(self, which: tuple[str, str], **fields: Any) -> SyncReply:
        return self.engines[which].sync(self.manager, self.now, **fields)

    def generation(self, node: str, namespace: str, letter: str) -> int:
        """At which a chunk is held; 0 if it is not."""
        return self.manager.holds(NodeId(node), Namespace(namespace), key(letter)) or 0

    @precondition(lambda self: self.TABLE == "dict")
    @rule()
    def fast_table_is_ready(self) -> None:
        """Once at most, at any time."""
        self.TABLE = "flat"
        self.manager.change_table(open_table("flat"), self.now)

    # The directory changes

    @rule(which=engines, some=letters)
    def engine_stores(self, which: tuple[str, str], some: list[str]) -> None:
        """It may have leases left from before."""
        engine = self.engines[which]
        self.sync(which, wanted={0: max(0, len(some) - len(engine.leases))})
        engine.node.report(self.manager, self.now, engine.store(some))

    @rule(namespace=st.sampled_from(["model", "model", "second"]), some=letters)
    def engines_of_all_nodes_store(self, namespace: str, some: list[str]) -> None:
        for name in NODES:
            self.engine_stores((name, namespace), some)

    @rule(which=engines, count=st.integers(1, 4))
    def engine_takes_leases(self, which: tuple[str, str], count: int) -> None:
        self.sync(which, wanted={0: count})

    @rule(which=engines, some=letters)
    def engine_stores_into_old_leases(self, which: tuple[str, str], some: list[str]) -> None:
        """The manager may not know them any more."""
        engine = self.engines[which]
        engine.node.report(self.manager, self.now, engine.store(some))

    @rule(which=engines, some=letters)
    def engine_uses_chunks(self, which: tuple[str, str], some: list[str]) -> None:
        names = [*map(key, some)]
        self.sync(
            which, touched=Keys.of(names), pinned=Keys.of(names[:1]), asked=Keys.of(names[1:])
        )

    @rule(name=nodes, namespace=st.sampled_from(sorted(PAGES)), some=letters)
    def chunks_are_released(self, name: str, namespace: str, some: list[str]) -> None:
        node = self.manager._nodes.get(NodeId(name))
        if node is not None:
            node.book.release(Namespace(namespace), [key(letter) for letter in some])

    @rule(which=engines, some=letters)
    def engine_drops_chunks(self, which: tuple[str, str], some: list[str]) -> None:
        generations = [self.generation(*which, letter) for letter in some]
        self.sync(which, dropped=Handles(Keys.of([*map(key, some)]), [0] * len(some), generations))

    @rule(which=engines, source=nodes, letter=st.sampled_from(LETTERS))
    def engine_misses_a_replica(self, which: tuple[str, str], source: str, letter: str) -> None:
        generation = self.generation(source, which[1], letter)
        self.sync(which, lost=LostReplicas([Source(source)], Keys.of([key(letter)]), [generation]))

    def nodes_go_silent(self, silent: set[str]) -> None:
        known = {node.node_id for node in self.manager.status("", "", self.now).nodes}
        self.now += EXPIRY_S + 1
        for name in known - silent:
            self.nodes[name].report(self.manager, self.now)
        self.manager.expire(self.now)

    @rule(name=nodes, split_at=st.integers(0, 5))
    def node_reports(self, name: str, split_at: int) -> None:
        """It has come back from its silence, perhaps; it brings its chunks along."""
        node = self.nodes[name]
        if node.report(self.manager, self.now):
            node.send_inventory(self.manager, self.now, split_at)

    @rule(
        what=st.sampled_from(
            [
                "engine attaches again",
                "engine detaches",
                "node begins a new life",
                "node goes silent",
                "other nodes go silent",
                "node has heard of a later life of the manager",
                "operator clears a namespace",
                "operator clears everything",
            ]
        ),
        which=engines,
    )
    def something_happens(self, what: str, which: tuple[str, str]) -> None:
        node = self.nodes[which[0]]
        match what:
            case "engine attaches again":
                self.engines[which].attach(self.manager, self.now)
            case "engine detaches":
                self.manager.detach_engine(EngineId(self.engines[which].engine_id))
            case "node begins a new life":
                node.begin_life()
                node.report(self.manager, self.now)
            case "node goes silent":
                self.nodes_go_silent({node.name})
            case "other nodes go silent":
                self.nodes_go_silent(set(NODES) - {node.name})
            case "node has heard of a later life of the manager":
                node.heard = self.manager.epoch + 1
                node.report(self.manager, self.now)
            case "operator clears a namespace":
                self.manager.clear(Namespace(which[1]))
            case "operator clears everything":
                self.manager.clear()

    # The readers read

    @rule(which=readers, most=st.integers(1, MAX_EVENTS))
    def reader_reads(self, which: int, most: int) -> None:
        reader = self.readers[which]
        if reader.cursor is None:
            reader.poll(most)
        else:
            reader.read_page()

    @rule(which=readers)
    def reader_asks_for_a_page_that_it_will_ask_for_again(self, which: int) -> None:
        reader = self.readers[which]
        if reader.cursor is not None:
            reader.read_page(again=True)

    @rule(which=readers)
    def reader_begins_a_snapshot(self, which: int) -> None:
        self.readers[which].begin_snapshot()
        self.readers[which].read_page()

    @rule(which=readers)
    def reader_catches_up(self, which: int) -> None:
        self.readers[which].catch_up()

    # What holds

    def held(self) -> dict[tuple[str, str, bytes], int]:
        """Generations of all that the directory holds."""
        places = [(n, ns, letter) for n in NODES for ns in PAGES for letter in LETTERS]
        return {
            (node, namespace, key(letter)): generation
            for node, namespace, letter in places
            if (generation := self.generation(node, namespace, letter))
        }

    @invariant()
    def manager_is_sound(self) -> None:
        self.manager.check()

    @invariant()
    def readers_at_the_end_of_the_log_know_the_directory(self) -> None:
        held = self.held()
        living = {node.node_id: node.epoch for node in self.manager.status("", "", self.now).nodes}
        for reader in self.readers:
            if reader.is_up_to_date:
                known = {place: gen for place, (_, gen) in reader.replay.chunks.items()}
                assert known == held
                assert reader.replay.nodes == living

    @invariant()
    def spares_are_the_chunks_that_another_node_has_too(self) -> None:
        held = self.held()
        for node_id, node in self.manager._nodes.items():
            spares = {(node_id, *name) for name in node.book.table.spares()}
            assert spares == {
                place
                for place in held
                if place[0] == node_id and any(o[0] != node_id and o[1:] == place[1:] for o in held)
            }


class FlatEventLogMachine(EventLogMachine):
    TABLE = "flat"


PROFILE = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)

for machine in (EventLogMachine, FlatEventLogMachine):
    machine.TestCase.settings = PROFILE

test_readers_come_to_know_the_directory = EventLogMachine.TestCase
test_readers_come_to_know_the_flat_directory = FlatEventLogMachine.TestCase
