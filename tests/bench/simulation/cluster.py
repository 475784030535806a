"""The simulated cluster: requests come, a router sends each to a replica, replicas come and go.

One heap of events; equal times in the order in which they were made, so that a run is the same for
the same arguments. A request whose replica dies is sent again, by the router, as if it were new.

Invariants:
1. Each request gets one first token and ends once, whatever dies.
2. No request is sent to a replica that drains or is dead.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil
from typing import Any

from raykv.serve.router.rank import Candidate
from tests.bench.simulation.hardware import Hardware
from tests.bench.simulation.nodes import NodeNet
from tests.bench.simulation.replica import Events, Job, SimReplica
from tests.bench.simulation.routers import Pause, SimRouter
from tests.bench.simulation.workload import Workload

DIE, DRAIN, JOIN = "die", "drain", "join"


@dataclass(frozen=True)
class Change:
    """Something that happens to one replica, at a share of the time in which requests come."""

    at: float
    what: str


CHURN = (Change(0.3, DIE), Change(0.4, JOIN), Change(0.5, DRAIN), Change(0.6, JOIN))
"""Changes of a cluster whose replicas come and go."""


@dataclass(frozen=True)
class Simulated:
    """The outcome of a run; `waits_s` are the times to the first token, by request."""

    waits_s: Sequence[float]
    computed: int
    prompt_tokens: int
    replicas: Sequence[str]
    """Where each request went at last."""

    @property
    def mean_s(self) -> float:
        """To the first token."""
        return sum(self.waits_s) / len(self.waits_s)

    @property
    def p99_s(self) -> float:
        """The 99th percentile of it."""
        return sorted(self.waits_s)[ceil(0.99 * len(self.waits_s)) - 1]


class SimCluster:
    """One run."""

    def __init__(
        self,
        workload: Workload,
        num_replicas: int,
        hardware: Hardware,
        delay_s: float,
        changes: Sequence[Change] = (),
    ) -> None:
        self.now = 0.0
        self.net = NodeNet(workload.num_chunks, hardware, delay_s)
        self._workload, self._hardware = workload, hardware
        self._changes = changes
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._replicas: dict[str, SimReplica] = {}
        self._taking: set[str] = set()
        self._gone: list[SimReplica] = []
        self._waits: dict[int, float] = {}
        self._came: dict[int, float] = {}
        self._went: dict[int, str] = {}
        self._ended: set[int] = set()
        self._following: dict[int, list[int]] = defaultdict(list)
        for _ in range(num_replicas):
            self._add()

    def run(self, router: SimRouter) -> Simulated:
        """Send all requests, until they have ended."""
        self._router = router
        router.keep(self._taking)
        requests = self._workload.requests
        end = requests[-1].at
        for number, request in enumerate(requests):
            self._schedule(request.at, partial(self._due, number))
        for change in self._changes:
            self._schedule(change.at * end, partial(self._change, change))
        while self._calendar:
            self.now, _, act = heapq.heappop(self._calendar)
            act()
        assert len(self._ended) == len(self._waits) == len(requests), len(self._ended)
        every = [*self._replicas.values(), *self._gone]
        return Simulated(
            [self._waits[number] for number in range(len(requests))],
            sum(each.computed for each in every),
            self._workload.prompt_tokens,
            [self._went[number] for number in range(len(requests))],
        )

    def _schedule(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (at, next(self._order), act))

    # Replicas

    def candidates(self) -> list[Candidate]:
        """Replicas that take requests."""
        return [
            Candidate(each.name, each.node_id, each.num_ongoing)
            for name, each in self._replicas.items()
            if name in self._taking
        ]

    def _add(self) -> None:
        number = len(self._replicas) + len(self._gone)
        node = f"n{number // self._hardware.replicas_per_node}"
        name = f"r{number:03d}"
        events = Events(self._schedule, self._first, self._finished)
        self._replicas[name] = SimReplica(name, node, self.net, events, self._hardware)
        self._taking.add(name)

    def _change(self, change: Change) -> None:
        if change.what == JOIN:
            self._add()
            self._router.keep(self._taking)
            return
        name = min(self._taking)
        self._taking.remove(name)
        self._router.keep(self._taking)
        if change.what == DIE:
            self._die(self._replicas.pop(name))

    def _die(self, replica: SimReplica) -> None:
        self._gone.append(replica)
        lost = replica.die()
        for job in lost:
            self._router.ended(job.number)
        for job in lost:
            self._arrive(job.number)

    # Requests

    def _due(self, number: int) -> None:
        """Its time has come; the one that it follows may not have been answered."""
        follows = self._workload.requests[number].follows
        if follows is not None and follows not in self._ended:
            self._following[follows].append(number)
            return
        self._came[number] = self.now
        self._arrive(number)

    def _arrive(self, number: int) -> None:
        self._step(self._place(number))

    async def _place(self, number: int) -> None:
        request = self._workload.requests[number]
        name = await self._router.route(number, request, self.candidates)
        assert name in self._taking, name
        self._went[number] = name
        self._replicas[name].arrive(Job(request, number), self.now)

    def _step(self, running: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until its next pause."""
        try:
            pause = running.send(None)
        except StopIteration:
            return
        assert isinstance(pause, Pause), pause
        self._schedule(self.now + pause.seconds, lambda: self._step(running))

    def _first(self, job: Job) -> None:
        self._waits.setdefault(job.number, self.now - self._came[job.number])
        self._router.began(job.number)

    def _finished(self, job: Job) -> None:
        assert job.number not in self._ended, job.number
        self._ended.add(job.number)
        self._router.ended(job.number)
        for number in self._following.pop(job.number, ()):
            self._schedule(self.now, partial(self._due, number))
