"""The world of one seed: a cluster, what its parts do on their own, and what befalls it.

`run` plays a number of steps, each of them one thing that happens; then the faults stop, everybody
talks, and `tests.simulation.checks` compares what they know.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pytest

import raykv.directory.answers.snapshots
import raykv.directory.leases
import raykv.directory.log
import raykv.directory.mirror
import raykv.directory.sessions
import raykv.engine.hints
from raykv.base.clearings import Clearings
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Epoch, Namespace, NodeId
from raykv.directory.manager import ManagerSettings
from raykv.engine.hints import Hint
from tests.fixtures.keys import named_key as key
from tests.simulation.bugs import BUGS
from tests.simulation.checks import settle
from tests.simulation.cluster import GENERATIONS_PER_EPOCH, Cluster
from tests.simulation.engine import Engine
from tests.simulation.reader import Reader
from tests.simulation.session import Identity
from tests.simulation.wire import Manners, Wire

MAX_REQUESTS = 3
"""Of one engine at a time."""

DOCUMENT_CHUNKS = 4

NUM_REMEMBERED = 15
"""Actions that a failure shows."""


class SimulationError(AssertionError):
    """A seed has failed; says in which step, and what was done before."""


@dataclass(frozen=True)
class Nature:
    """What a world is like: how many parts it has, how fast each is, and what befalls them."""

    num_nodes: int
    num_engines: int
    num_documents: int
    num_slabs: int
    max_events: int
    manners: Manners
    routine: dict[str, float]
    faults: dict[str, float]


def nature(rng: random.Random) -> Nature:
    """A nature of its own for each seed: some faults never happen, others often."""
    is_calm = rng.random() < 0.1
    storm = 0.0 if is_calm else rng.choice([0.3, 1.0, 1.0, 3.0])
    faults = {
        name: 0.0 if rng.random() < 0.3 else weight * storm for name, weight in FAULTS.items()
    }
    loss, repeat, disorder = (
        rng.choice(chances) for chances in ([0.0, 0.02, 0.1], [0.0, 0.05, 0.15], [0.0, 0.1, 0.5])
    )
    return Nature(
        num_nodes=rng.choice([2, 2, 3, 4]),
        num_engines=rng.choice([2, 3, 3, 4]),
        num_documents=rng.choice([2, 6, 12, 24]),
        num_slabs=rng.choice([3, 4, 6]),
        max_events=rng.choice([30, 100, 100_000]),
        manners=Manners() if is_calm else Manners(loss, repeat, disorder),
        routine=ROUTINE | {name: ROUTINE[name] * rng.choice([0.3, 1, 3]) for name in WORK},
        faults=faults,
    )


SETTINGS = ManagerSettings(engine_expiry_s=4.0, node_expiry_s=4.0, settle_s=1.0, pin_s=2.0)

# How often each thing happens, beside the others.
ROUTINE = {
    "wire": 120.0,
    "engine_steps": 20.0,
    "request_comes": 10.0,
    "engine_exchanges": 20.0,
    "node_copies": 12.0,
    "node_sends": 4.0,
    "node_reports": 10.0,
    "time_passes": 4.0,
    "somebody_loses_patience": 0.5,
    "worker_looks_for_its_node": 1.0,
    "reader_polls": 4.0,
    "cut_heals": 1.0,
    "operator_resumes": 1.0,
}

# What is slow in some worlds, and fast in others.
WORK = ["engine_exchanges", "node_copies", "node_sends", "node_reports"]

FAULTS = {
    "copy_fails": 0.5,
    "store_expires": 0.2,
    "fetch_is_late": 0.3,
    "node_restarts": 0.1,
    "node_is_cut": 0.1,
    "engine_is_cut": 0.1,
    "scheduler_restarts": 0.1,
    "scheduler_restarts_with_a_late_clock": 0.05,
    "engine_dies": 0.1,
    "engine_resets": 0.1,
    "operator_clears": 0.05,
    "operator_pauses": 0.05,
    "time_jumps": 0.2,
    "engine_clock_jumps": 0.1,
}


class World:
    """Everything in one process; each step is one thing that happens to one part."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.session_rng = random.Random(seed)
        self.nature = nature(self.rng)
        settings = ManagerSettings(
            engine_expiry_s=SETTINGS.engine_expiry_s,
            node_expiry_s=SETTINGS.node_expiry_s,
            settle_s=SETTINGS.settle_s,
            pin_s=SETTINGS.pin_s,
            max_events=self.nature.max_events,
            generations_per_epoch=GENERATIONS_PER_EPOCH,
        )
        wire = Wire(self.rng, self.nature.manners)
        self.cluster = Cluster(self.rng, wire, settings, self.nature.num_slabs)
        self.reader = Reader()
        self.actions: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self.under_way = ""
        self._numbers = count()
        for number in range(self.nature.num_nodes):
            self.cluster.add_node(NodeId(f"node-{number}"))
        for place in self._places():
            self._add_engine(*place)
        chances = self.nature.routine | self.nature.faults
        self._methods: list[Callable[[], str | None]] = [getattr(self, name) for name in chances]
        self._weights = list(chances.values())

    def _places(self) -> Iterator[tuple[NodeId, Namespace, int]]:
        """Two engines of one namespace on two nodes; a third beside the first; one of another."""
        nodes = list(self.cluster.nodes)
        places = [
            (nodes[0], Namespace("shared"), 1),
            (nodes[1], Namespace("shared"), 1),
            (nodes[0], Namespace("shared"), 1),
            (self.rng.choice(nodes), Namespace("other"), 2),
        ]
        yield from places[: self.nature.num_engines]

    def _add_engine(self, node_id: NodeId, namespace: Namespace, pages: int) -> None:
        engine_id = EngineId(f"engine-{next(self._numbers)}")
        self.cluster.add_engine(Identity(engine_id, node_id, namespace, pages * SLOT_ALIGNMENT))

    def step(self) -> None:
        """One thing happens, of those that can happen now."""
        self.cluster.tick += 1
        said = None
        while said is None:
            (method,) = self.rng.choices(self._methods, self._weights)
            self.under_way = method.__name__
            said = method()
        self.actions.append(f"{self.under_way}: {said}")

    # What goes on all the time

    def wire(self) -> str | None:
        return self.cluster.wire.step()

    def engine_steps(self) -> str | None:
        engine = self._any_engine()
        engine.step(lambda: self.rng.random() < 0.5)
        engine.view.check()
        return engine.identity.engine_id

    def request_comes(self) -> str | None:
        engine = self._any_engine()
        if len(engine.requests) == MAX_REQUESTS:
            return None
        document = self.rng.randrange(self.nature.num_documents)
        length = self.rng.randint(1, DOCUMENT_CHUNKS)
        engine.begin([key(f"{document}{chunk}") for chunk in range(length)], self._hint())
        return f"{length} chunks of document {document} for {engine.identity.engine_id}"

    def _hint(self) -> Hint:
        """What the request says of its session; most have none."""
        session = self.session_rng.choice(("", "", "x", "y", "z"))
        if not session:
            return Hint()
        is_over = self.session_rng.random() < 0.3
        return Hint(
            session=session, is_over=is_over, pause_s=self.session_rng.choice((None, 0.1, 5.0))
        )

    def engine_exchanges(self) -> str | None:
        engine = self._any_engine()
        has_sent = engine.session.exchange(may_repeat=self.rng.random() < 0.5)
        return engine.identity.engine_id if has_sent else None

    def node_copies(self) -> str | None:
        busy = [node for node in self.cluster.nodes.values() if node.jobs]
        return self.rng.choice(busy).step_job(ok=True) if busy else None

    def copy_fails(self) -> str | None:
        busy = [node for node in self.cluster.nodes.values() if node.jobs]
        return self.rng.choice(busy).step_job(ok=False) if busy else None

    def node_sends(self) -> str | None:
        busy = [node for node in self.cluster.nodes.values() if node.reads]
        if not busy:
            return None
        node = self.rng.choice(busy)
        node.end_read(self.rng.randrange(len(node.reads)))
        return node.node_id

    def node_reports(self) -> str | None:
        node = self.cluster.nodes[self._any_node()]
        return node.node_id if node.report() else None

    def time_passes(self) -> str | None:
        self.cluster.now += self.rng.choice([0.01, 0.05, 0.2])
        return f"{self.cluster.now:.2f}"

    def somebody_loses_patience(self) -> str | None:
        return self.cluster.wire.lose_patience()

    def worker_looks_for_its_node(self) -> str | None:
        engine = self._any_engine()
        if engine.is_link_up:
            return None
        engine.lose_link()
        if self.rng.random() < 0.5:
            engine.find_link()
        return engine.identity.engine_id

    def reader_polls(self) -> str | None:
        is_up_to_date = self.reader.poll(self.cluster.manager)
        if is_up_to_date and not self.cluster.has_old_epoch:
            assert self.reader.replay.chunks == self.cluster.directory()
        return "all read" if is_up_to_date else ""

    def operator_resumes(self) -> str | None:
        if not self.cluster.manager.paused:
            return None
        self.cluster.manager.set_paused(False)
        return ""

    def cut_heals(self) -> str | None:
        cut = self.cluster.wire.cut
        if not cut:
            return None
        healed = self.rng.choice(sorted(cut))
        cut.remove(healed)
        return healed

    # What befalls them

    def store_expires(self) -> str | None:
        node = self.cluster.nodes[self._any_node()]
        return f"{node.table.expire(self.cluster.now + 100)} at {node.node_id}"

    def fetch_is_late(self) -> str | None:
        busy = [node for node in self.cluster.nodes.values() if len(node.fetches)]
        if not busy:
            return None
        node = self.rng.choice(busy)
        node.fetches.end_late(self.rng.randrange(len(node.fetches)))
        return node.node_id

    def node_restarts(self) -> str | None:
        node_id = self._any_node()
        self.cluster.restart_node(node_id)
        return node_id

    def node_is_cut(self) -> str | None:
        node_id = self._any_node()
        self.cluster.wire.cut.add(node_id)
        return node_id

    def engine_is_cut(self) -> str | None:
        engine = self._any_engine()
        self.cluster.wire.cut.add(engine.identity.engine_id)
        return engine.identity.engine_id

    def scheduler_restarts(self) -> str | None:
        """It finds what its last life has left with Ray's head node: but not that this one's clock
        was late, and that what was to be cleared may be of epochs that are still to come.
        """
        manager = self.cluster.manager
        if self.cluster.has_cleared and self.cluster.is_clock_late:
            return None
        epoch = Epoch(manager.granting + self.rng.randint(1, 2))
        self.cluster.restart_manager(epoch, manager.cleared)
        return f"with epoch {epoch}"

    def scheduler_restarts_with_a_late_clock(self) -> str | None:
        """The head node has lost everything too: a clearing lives on in nodes that have heard."""
        if not self.is_every_clearing_known():
            return None
        epoch = Epoch(self.rng.randint(1, self.cluster.manager.epoch))
        self.cluster.restart_manager(epoch, {})
        return f"with epoch {epoch}"

    def is_every_clearing_known(self) -> bool:
        """A clearing that not all nodes have heard of is not confirmed yet."""
        return all(
            Clearings(node.table.cleared).of(Namespace(name)) >= floor
            for node in self.cluster.nodes.values()
            for name, floor in self.cluster.manager.cleared.items()
        )

    def engine_dies(self) -> str | None:
        engine = self._any_engine()
        engine.die()
        self.cluster.engines.remove(engine)
        identity = engine.identity
        pages = identity.slot_bytes // SLOT_ALIGNMENT
        self._add_engine(identity.node_id, identity.namespace, pages)
        return identity.engine_id

    def engine_resets(self) -> str | None:
        engine = self._any_engine()
        engine.reset()
        return engine.identity.engine_id

    def operator_clears(self) -> str | None:
        namespace = self.rng.choice([None, *self.cluster.namespaces])
        self.cluster.clear(namespace)
        return namespace or "everything"

    def operator_pauses(self) -> str | None:
        self.cluster.manager.set_paused(True)
        return ""

    def time_jumps(self) -> str | None:
        self.cluster.now += self.rng.choice([1, 2, 5, 11])
        return f"{self.cluster.now:.2f}"

    def engine_clock_jumps(self) -> str | None:
        engine = self._any_engine()
        engine.clock_ahead_s += self.rng.choice([1, 3, 11])
        return engine.identity.engine_id

    def _any_engine(self) -> Engine:
        return self.rng.choice(self.cluster.engines)

    def _any_node(self) -> NodeId:
        return self.rng.choice(list(self.cluster.nodes))


@contextmanager
def small_pages() -> Iterator[pytest.MonkeyPatch]:
    """Pages of few keys, so that a few chunks make several; undone at the end."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(raykv.directory.leases, "MAX_KEYS", 3)
        patches.setattr(raykv.directory.mirror, "MAX_KEYS", 3)
        patches.setattr(raykv.directory.answers.snapshots, "MAX_PAGE", 4)
        patches.setattr(raykv.directory.sessions, "MAX_SESSIONS", 3)
        patches.setattr(raykv.directory.sessions, "MAX_KEYS_EACH", 6)
        patches.setattr(raykv.directory.sessions, "MAX_KEYS_ALL", 12)
        patches.setattr(raykv.engine.hints, "MAX_TOLD", 3)
        patches.setattr(raykv.directory.log.EventLog.page, "__defaults__", (5,))
        yield patches


def run(seed: int, steps: int, bug: str | None = None) -> World:
    """Play one seed, with a planted bug if one is named.

    Raises:
        SimulationError: something did not hold.
    """
    with small_pages() as patches:
        if bug is not None:
            BUGS[bug](patches)
        world = World(seed)
        number = 0
        try:
            for number in range(steps):
                world.step()
                if number % 10 == 0:
                    world.cluster.check()
            settle(world.cluster, world.reader)
        except Exception as error:
            shown = "\n  ".join([*world.actions, f"{world.under_way} (failed)"])
            raise SimulationError(
                f"seed {seed}, step {number} of {steps}: {type(error).__name__}: {error}\n"
                f"last actions:\n  {shown}\n{world.nature}"
            ) from error
        return world
