"""The world of one seed in which the nodes decide: its parts, and what befalls them.

`run` plays a number of steps, each of them one thing that happens; then the faults stop, everybody
talks, and `tests.simulation.nodes.checks` compares what they know.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import pytest

import raykv.node.pool.reporting
from raykv.base.ids import EngineId, Key, Namespace, NodeId, Stamp
from raykv.node.pool.listing import Listing
from tests.simulation.nodes.bugs import BUGS
from tests.simulation.nodes.checks import check_calm, settle
from tests.simulation.nodes.cluster import Cluster
from tests.simulation.nodes.engine import PlayedEngine, Seats
from tests.simulation.nodes.head import SHARES
from tests.simulation.nodes.models import MODELS, Prompt
from tests.simulation.nodes.nature import nature
from tests.simulation.nodes.node import Copying, PlayedNode
from tests.simulation.nodes.reader import FoldingReader
from tests.simulation.wire import Call, Manners, Wire

MOST_REQUESTS = 4
"""Of one engine at a time."""

LONGEST_PROMPT = 4

NUM_REMEMBERED = 15
"""Actions that a failure shows."""

TENANTS = ("", "", "t1", "t2")


class SeedError(AssertionError):
    """A seed has failed; says in which step, and what was done before."""


class NodesWorld:
    """Everything in one process; each step is one thing that happens to one part.

    `over_nodes`: all engines have two places, with their ranks one way round or the other.
    """

    def __init__(self, seed: int, *, over_nodes: bool = False) -> None:
        self.rng = random.Random(seed)
        self.nature = nature(self.rng)
        if over_nodes:
            # Each pool has parts of twice as many engines.
            self.nature = replace(self.nature, num_slabs=2 * self.nature.num_slabs)
        self._over_nodes = over_nodes
        wire = Wire(self.rng, self.nature.manners)
        repeat = 0.0 if self.nature.is_calm else 0.02
        sockets = Wire(self.rng, Manners(repeat=repeat, disorder=1.0))
        self.cluster = Cluster(
            self.rng,
            wire,
            sockets,
            self.nature.most_events,
            self.nature.kv_blocks,
            self.nature.results_share,
            is_calm=self.nature.is_calm,
        )
        self.reader = FoldingReader()
        self.actions: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self.under_way = ""
        self._numbers = count()
        # Orders that operators repeat until they are answered.
        self._orders: dict[str, Callable[[], None]] = {}
        self._is_paused = False
        # The node that has to show what the store has lost.
        self._witness: tuple[NodeId, Stamp] | None = None
        self._lost_at = 0.0
        for number in range(self.nature.num_nodes):
            self.cluster.add_node(NodeId(f"node-{number}"), self.nature.num_slabs)
        for model, node_ids in self._seats():
            engine_id = EngineId(f"engine-{next(self._numbers)}")
            self.cluster.add_engine(Seats(engine_id, model, node_ids))
        chances = self.nature.routine | self.nature.faults
        self._methods: list[Callable[[], str | None]] = [getattr(self, name) for name in chances]
        self._weights = list(accumulate(chances.values()))

    def _seats(self) -> Iterator[tuple[Any, tuple[NodeId, ...]]]:
        """Two engines of one model on two nodes; a third beside the first; then one of another."""
        nodes = list(self.cluster.nodes)
        small, windowed, mixed, wide = MODELS
        if self._over_nodes:
            seats = [(0, 1), (1, 0), (-1, 0), (0, -1)]
            pairs = [(nodes[one], nodes[two]) for one, two in seats[: self.nature.num_engines]]
            yield from ((wide, pair) for pair in pairs)
            return
        first = self.rng.choice([small, windowed, windowed, mixed])
        other = self.rng.choice([small, windowed, mixed, wide])
        places = [
            (first, (nodes[0],)),
            (first, (nodes[1],)),
            (first, (self.rng.choice([nodes[0], nodes[-1]]),)),
            (other, (nodes[0], nodes[1]) if len(other.ranks) > 1 else (nodes[-1],)),
        ]
        self.rng.shuffle(places[2:])
        yield from places[: self.nature.num_engines]

    def step(self) -> None:
        """One thing happens, of those that can happen now."""
        self.cluster.tick += 1
        self._look_for_witness()
        said = None
        while said is None:
            (method,) = self.rng.choices(self._methods, cum_weights=self._weights)
            self.under_way = method.__name__
            said = method()
        self.actions.append(f"{self.under_way}: {said}")

    # What goes on all the time

    def wire(self) -> str | None:
        return self.cluster.wire.step()

    def sockets(self) -> str | None:
        return self.cluster.sockets.step()

    def engine_steps(self) -> str | None:
        engine = self._any_engine()
        if engine.is_frozen:
            return None
        engine.step(self.rng)
        engine.talk.talk()
        return str(engine)

    def request_comes(self) -> str | None:
        engine = self._any_engine()
        if len(engine.requests) >= MOST_REQUESTS or engine.view.has_left or engine.is_frozen:
            return None
        document = self.rng.randrange(self.nature.num_documents)
        prompt = Prompt.of(document, self.rng.randint(1, LONGEST_PROMPT))
        engine.begin(prompt, self.rng.choice(TENANTS), self.expected(engine, prompt))
        return f"{'.'.join(prompt.chunks)} for {engine}"

    def expected(self, engine: PlayedEngine, prompt: Prompt) -> int:
        """In a calm world, how many chunks of a prompt are surely found."""
        return engine.surely_known(prompt) if self.nature.is_calm else 0

    def engine_talks(self) -> str | None:
        engine = self._any_engine()
        if engine.is_frozen:
            return None
        return str(engine) if engine.talk.talk() else None

    def node_copies(self) -> str | None:
        return self._copy(ok=True)

    def _copy(self, *, ok: bool) -> str | None:
        busy = [node for node in self._awake() if not all(each.is_hung for each in node.copies)]
        if not busy:
            return None
        node = self.rng.choice(busy)
        copying = self.rng.choice([each for each in node.copies if not each.is_hung])
        node.copy(copying, self.rng.choice(self.nature.pieces), ok=ok)
        return f"{node} for {copying.line.life} rank {copying.line.rank}, ok={ok}"

    def node_fetches(self) -> str | None:
        busy = [node for node in self._awake() if node.fetches.is_busy]
        if not busy:
            return None
        node = self.rng.choice(busy)
        writing = list(node.fetches.writing())
        if writing and (not node.fetches.reads or self.rng.random() < 0.5):
            fetch, landing = self.rng.choice(writing)
            node.fetches.write(fetch, landing, self.rng.choice(self.nature.pieces), ok=True)
            return f"{node} writes {landing.key!r}"
        if not node.fetches.reads:
            return None
        read = self.rng.choice(node.fetches.reads)
        node.fetches.send(read, self.rng.choice(self.nature.pieces))
        return f"{node} sends {read.record.key!r}"

    def node_answers(self) -> str | None:
        node = self._any_awake()
        return str(node) if node and node.answer_changes() else None

    def node_reports(self) -> str | None:
        node = self._any_awake()
        return str(node) if node and node.report() else None

    def node_looks_at_its_clock(self) -> str | None:
        node = self._any_awake()
        if node is None:
            return None
        node.pool.expire(node.clock)
        return str(node)

    def node_looks_for_pins(self) -> str | None:
        node = self._any_awake()
        return str(node) if node and node.look_for_pins() else None

    def head_works(self) -> str | None:
        return self.cluster.head.work()

    def head_looks_at_its_clock(self) -> str | None:
        head = self.cluster.head
        if head.is_away:
            return None
        return f"{head.directory.expire(head.clock)} are lost"

    def time_passes(self) -> str | None:
        if self._witness is not None and self.cluster.head.clock > self._lost_at + 4.0:
            # Members show in time what the store has lost.
            return None
        self.cluster.now += self.rng.choice([0.01, 0.1, 0.4])
        return f"{self.cluster.now:.2f}"

    def somebody_loses_patience(self) -> str | None:
        if self.nature.is_calm:
            return None
        return self.cluster.wire.lose_patience()

    def worker_looks_for_its_node(self) -> str | None:
        engine = self._any_engine()
        for place, rank in engine.ranks():
            line = engine.lines.get((place, rank))
            if (line is None or not line.is_open) and engine.connect(place, rank):
                return f"{engine}, rank {rank} of place {place}"
        return None

    def node_notices_a_closed_line(self) -> str | None:
        lines = self.cluster.closed_lines()
        if not lines:
            return None
        line = self.rng.choice(lines)
        line.node.end_line(line, is_first=self.rng.random() < 0.5)
        return f"{line.node} of {line.life}, rank {line.rank}"

    def rank_notices_a_broken_line(self) -> str | None:
        broken = self.cluster.broken_lines()
        if not broken:
            return None
        engine, line = self.rng.choice(broken)
        engine.line_broke(line)
        line.lose_all()
        return f"{engine}, rank {line.rank}"

    def reader_polls(self) -> str | None:
        head = self.cluster.head
        if head.is_away:
            return None
        return "all read" if self.reader.poll(head.directory) else ""

    def cut_heals(self) -> str | None:
        cut = self.cluster.wire.cut
        if not cut:
            return None
        healed = self.rng.choice(sorted(cut))
        cut.remove(healed)
        return healed

    def node_thaws(self) -> str | None:
        frozen = [node for node in self.cluster.nodes.values() if node.is_frozen]
        if not frozen:
            return None
        node = self.rng.choice(frozen)
        node.thaw()
        return str(node)

    def ghost_thaws(self) -> str | None:
        if not self.cluster.ghosts:
            return None
        ghost = self.cluster.ghosts.pop(0)
        ghost.thaw()
        return str(ghost)

    def head_comes_back(self) -> str | None:
        head = self.cluster.head
        if not head.is_down:
            return None
        head.begin()
        return f"life {head.num_lives}"

    def operator_repeats(self) -> str | None:
        if not self._orders:
            return None
        order_id = self.rng.choice(list(self._orders))
        self._orders[order_id]()
        return order_id

    def operator_resumes(self) -> str | None:
        if not self._is_paused:
            return None
        self._is_paused = False
        return self._change("resume", is_paused=False)

    def weights_come(self) -> str | None:
        engine = self._any_engine()
        if not engine.view.has_left or engine.view.is_clearing:
            return None
        engine.enter()
        return str(engine)

    # What befalls the copies

    def copy_fails(self) -> str | None:
        return self._copy(ok=False)

    def copy_hangs(self) -> str | None:
        copies = self._copies(is_hung=False)
        if not copies:
            return None
        copying = self.rng.choice(copies)
        copying.is_hung = True
        return f"job {copying.job.job_id} of {copying.line.life}, rank {copying.line.rank}"

    def rank_fails_while_another_hangs(self) -> str | None:
        ranks: dict[tuple[int, int], list[Copying]] = {}
        for each in self._copies(is_hung=False):
            if each.is_store and not each.line.node.is_frozen:
                ranks.setdefault((each.line.life, each.job.job_id), []).append(each)
        several = [copies for copies in ranks.values() if len(copies) > 1]
        if not several:
            return None
        one, other, *_ = self.rng.choice(several)
        one.is_hung = True
        other.line.node.copy(other, 100, ok=False)
        self._store_again(one)
        return f"job {one.job.job_id} of {one.line.life}: {one.line.rank} hangs"

    def _store_again(self, copying: Copying) -> None:
        """Other engines of its place are asked for what a copy that hangs is about."""
        job, node_id = copying.rank_job.job, copying.line.node.node_id
        for engine in self.cluster.engines:
            is_other = engine.life != copying.line.life and not engine.view.has_left
            if is_other and node_id in engine.seats.node_ids and engine.namespace == job.namespace:
                engine.begin(job.prompt, "")

    def copy_goes_on(self) -> str | None:
        hung = self._copies(is_hung=True)
        if not hung:
            return None
        copying = self.rng.choice(hung)
        copying.is_hung = False
        return f"job {copying.job.job_id} of {copying.line.life}, rank {copying.line.rank}"

    def late_copy_meets_a_new_one(self) -> str | None:
        """A rank goes on with a chunk that is void, while another job stores it anew."""
        meeting = [
            each
            for each in self._copies(is_hung=True)
            if each.is_store and not each.line.node.is_frozen and each.is_stored_anew()
        ]
        if not meeting:
            return None
        copying = self.rng.choice(meeting)
        copying.is_hung = False
        copying.line.node.copy(copying, 100)
        return f"job {copying.job.job_id} of {copying.line.life}, rank {copying.line.rank}"

    def _copies(self, *, is_hung: bool) -> list[Copying]:
        return [
            each
            for node in self.cluster.nodes.values()
            for each in node.copies
            if each.is_hung is is_hung
        ]

    def bits_rot(self) -> str | None:
        node = self._any_awake()
        ready = self.cluster.ready(node.node_id) if node else []
        if node is None or not ready:
            return None
        record = self.rng.choice([each for each in ready if each.readers] or ready)
        ranks = range(self.cluster.num_ranks_of(record.namespace))
        node.memory.damage(record, ranks)
        return f"{record} of {node}"

    def engine_gives_a_job_up(self) -> str | None:
        engine = self._any_engine()
        if not engine.flying:
            return None
        job = self.rng.choice(engine.flying)
        job.is_given_up = True
        return f"job {job.job_id} of {engine}"

    def fetch_is_late(self) -> str | None:
        busy = [node for node in self._awake() if node.fetches.under_way]
        if not busy:
            return None
        node = self.rng.choice(busy)
        node.fetches.end_late(self.rng.choice(node.fetches.under_way))
        return str(node)

    def line_breaks(self) -> str | None:
        engine = self._any_engine()
        lines = [line for line in engine.lines.values() if line.is_open]
        if not lines:
            return None
        line = self.rng.choice(lines)
        engine.line_broke(line)
        return f"{engine}, rank {line.rank}"

    # What befalls the nodes

    def node_restarts(self) -> str | None:
        node_id = self._any_node().node_id
        if self._is_needed(node_id):
            return None
        num_slabs = self.nature.num_slabs + self.rng.choice([0, 0, 2])
        self.cluster.restart_node(node_id, num_slabs, keeps_memory=self.rng.random() < 0.7)
        return node_id

    def node_is_cut(self) -> str | None:
        return self._cut(self._any_node().node_id)

    def node_is_cut_from_the_head(self) -> str | None:
        return self._cut(f"reports of {self._any_node().node_id}")

    def _cut(self, end: str) -> str | None:
        if self._witness is not None and end in (
            self._witness[0],
            f"reports of {self._witness[0]}",
        ):
            return None
        self.cluster.wire.cut.add(end)
        return end

    def node_freezes(self) -> str | None:
        node = self._any_node()
        if node.is_frozen or self._is_needed(node.node_id):
            return None
        node.is_frozen = True
        return str(node)

    def node_leaves(self) -> str | None:
        node = self._any_node()
        node.pool.is_leaving = not node.pool.is_leaving
        return f"{node} leaves: {node.pool.is_leaving}"

    # What befalls the engines

    def engine_is_cut(self) -> str | None:
        return self._cut(self._any_engine().seats.engine_id)

    def feed_is_cut(self) -> str | None:
        return self._cut(self.rng.choice(self._any_engine().talk.places).feed)

    def engine_dies(self) -> str | None:
        engine = self._any_engine()
        return self.kill(engine, self.rng.choice([None, self.rng.choice(engine.ranks())]))

    def engine_dies_while_it_stores(self) -> str | None:
        """Some of its ranks have stored their part of a chunk, and its node hears of no other."""
        lives = {
            parts.part.life
            for node in self._awake()
            for record, parts in node.pool.index._parts.items()
            if parts.stored and not record.writers
        }
        dying = [engine for engine in self.cluster.engines if engine.life in lives]
        if not dying:
            return None
        engine = self.rng.choice(dying)
        self.kill(engine, None)
        for line in [line for line in self.cluster.closed_lines() if line.life == engine.life]:
            line.node.end_line(line, is_first=True)
        return str(engine)

    def kill(self, engine: PlayedEngine, frozen: tuple[int, int] | None) -> str:
        """An engine dies, but for a rank that is frozen; another one takes its place."""
        engine.die(frozen)
        self.cluster.engines.remove(engine)
        if frozen is not None:
            self.cluster.ghosts.append(engine)
        self.cluster.add_engine(engine.seats)
        for each in self._copies(is_hung=False):
            if frozen is not None and each.line is engine.lines.get(frozen):
                each.is_hung = True
                self._store_again(each)
        return f"{engine}, but for {frozen}"

    def engine_resets(self) -> str | None:
        engine = self._any_engine()
        if engine.view.has_left:
            return None
        engine.reset()
        return str(engine)

    def weights_change(self) -> str | None:
        engine = self._any_engine()
        if engine.view.has_left:
            return None
        engine.leave()
        return str(engine)

    # What befalls the scheduler actor

    def head_dies(self) -> str | None:
        head = self.cluster.head
        if head.is_down or self._witness is not None:
            return None
        head.die()
        return ""

    def head_dies_while_it_orders(self) -> str | None:
        head = self.cluster.head
        if not head.is_keeping or self._witness is not None:
            return None
        is_kept = self.rng.random() < 0.5
        head.die_while_keeping(is_kept=is_kept)
        return f"kept: {is_kept}"

    def store_loses_what_it_kept(self) -> str | None:
        """It has nothing any more, or an earlier document; a node knows the latest."""
        head = self.cluster.head
        document = head.store.document
        if document is None or self._witness is not None or head.is_keeping:
            return None
        knows = [
            node.node_id
            for node in self._awake()
            if node.pool.orders.stamp == document.stamp and not self.cluster.is_cut(node.node_id)
        ]
        if not knows or "head" in self.cluster.wire.cut:
            return None
        self._witness, self._lost_at = (self.rng.choice(knows), document.stamp), head.clock
        count_kept = self.rng.choice([0, len(head.store.kept) - 1])
        del head.store.kept[count_kept:]
        head.die()
        head.begin()
        return f"{count_kept} documents are left; {self._witness[0]} knows"

    def _look_for_witness(self) -> None:
        """The witness is free once a later document than the one that it knows is in force."""
        if self._witness is not None:
            stamp = self.cluster.head.orders.stamp
            if stamp > self._witness[1]:
                self._witness = None

    def _is_needed(self, node_id: NodeId) -> bool:
        return self._witness is not None and node_id == self._witness[0]

    # Operators

    def operator_clears(self) -> str | None:
        namespace = self.rng.choice([Namespace(""), *self.cluster.models])
        order_id = f"order {next(self._numbers)}"
        self._order(order_id, lambda post: self.cluster.head.order_clear(order_id, namespace, post))
        return namespace or "everything"

    def node_misses_a_clear(self) -> str | None:
        """What it has from before may come to others, which have heard of it."""
        cut = self._cut(f"reports of {self._any_node().node_id}")
        return f"{self.operator_clears()}; {cut}" if cut else None

    def operator_pauses(self) -> str | None:
        if self._is_paused:
            return None
        self._is_paused = True
        return self._change("pause", is_paused=True)

    def operator_shares(self) -> str | None:
        return self._change("shares", shares=self.rng.choice(SHARES))

    def _change(self, what: str, **changes: Any) -> str:
        order_id = f"{what} {next(self._numbers)}"
        self._order(order_id, lambda post: self.cluster.head.change(order_id, post, **changes))
        return order_id

    def operator_pins(self) -> str | None:
        engine = self._any_engine()
        prompt = Prompt.of(self.rng.randrange(self.nature.num_documents), 2)
        order_id = f"pin {next(self._numbers)}"
        keys: list[Key] = engine.model.keys(0, prompt)
        self._order(
            order_id, lambda post: self.cluster.head.pin(order_id, engine.namespace, keys, post)
        )
        return order_id

    def _order(self, order_id: str, send: Callable[[Callable[[Stamp], None]], None]) -> None:
        def again() -> None:
            call: Call[Stamp] = Call(
                order_id,
                ("operator", "head"),
                send,
                lambda _: self._orders.pop(order_id, None) and None,
                lambda: None,
            )
            self.cluster.wire.send(call)

        self._orders[order_id] = again
        again()

    # Clocks

    def time_jumps(self) -> str | None:
        if self._witness is not None:
            return None
        self.cluster.now += self.rng.choice([1, 2, 4, 11, 31])
        return f"{self.cluster.now:.2f}"

    def node_clock_jumps(self) -> str | None:
        node = self._any_node()
        self.cluster.jump(node.node_id, self.rng.choice([1, 3, 11, 31]))
        return str(node)

    def engine_clock_jumps(self) -> str | None:
        engine = self._any_engine()
        engine.ahead_s += self.rng.choice([1, 3, 11])
        return str(engine)

    def head_clock_jumps(self) -> str | None:
        if self._witness is not None:
            return None
        self.cluster.head.ahead_s += self.rng.choice([1, 3, 11])
        return ""

    # Choosing

    def _any_engine(self) -> PlayedEngine:
        return self.rng.choice(self.cluster.engines)

    def _any_node(self) -> PlayedNode:
        return self.rng.choice(list(self.cluster.nodes.values()))

    def _awake(self) -> list[PlayedNode]:
        return [node for node in self.cluster.nodes.values() if not node.is_frozen]

    def _any_awake(self) -> PlayedNode | None:
        awake = self._awake()
        return self.rng.choice(awake) if awake else None


@contextmanager
def small_bounds() -> Iterator[pytest.MonkeyPatch]:
    """Few changes are kept and few rows make a part, so that a few chunks make several."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Listing.__init__, "__defaults__", (40,))
        patches.setattr(raykv.node.pool.reporting, "MOST_ROWS", 5)
        yield patches


def run(seed: int, steps: int, bug: str | None = None, *, over_nodes: bool = False) -> NodesWorld:
    """Play one seed, with a planted bug if one is named.

    Raises:
        SeedError: something did not hold.
    """
    with small_bounds() as patches:
        if bug is not None:
            BUGS[bug](patches)
        world = NodesWorld(seed, over_nodes=over_nodes)
        number = 0
        try:
            for number in range(steps):
                world.step()
                if number % 25 == 0:
                    world.cluster.check()
            if world.nature.is_calm:
                check_calm(world.cluster)
            settle(world.cluster, world.reader)
        except Exception as error:
            shown = "\n  ".join([*world.actions, f"{world.under_way} (failed)"])
            raise SeedError(
                f"seed {seed}, step {number} of {steps}: {type(error).__name__}: {error}\n"
                f"last actions:\n  {shown}\n{world.nature}"
            ) from error
        return world
