"""A replica: continuous batching with chunked prefill and an own prefix cache, as vLLM has it.

    arrive ─► waiting ─admit─► loading ─loaded─► computing ─first token─► decoding ─► finished
                  └──────────────────────────────▲

A step gives each decoding sequence its next token and fills up with tokens of prompts, oldest
first. Without prompts to compute, many steps are one event, which an arrival cuts short at the end
of the step under way. All times are of the cluster's virtual clock. Not modelled: preemption, and
the chunks of answers, which no trace names.

Invariants:
1. A job is in exactly one of waiting, loading, computing and decoding until it has finished.
2. An admitted job's chunks are pinned or reserved, so that none of them is given up.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil

from tests.bench.simulation.chunk_cache import ChunkCache
from tests.bench.simulation.hardware import TOKENS, Hardware
from tests.bench.simulation.nodes import NodeNet, Wire
from tests.bench.simulation.workload import SimRequest

Schedule = Callable[[float, Callable[[], None]], None]
"""Calls something at a time."""


@dataclass(eq=False)
class Job:
    """A request at a replica. `done`: tokens of its prompt that are there."""

    request: SimRequest
    number: int
    done: int = 0
    reserved: int = 0
    first_at: float | None = None


@dataclass(frozen=True)
class Events:
    """The cluster's clock, and whom a replica tells of first tokens and finished requests."""

    schedule: Schedule
    first: Callable[[Job], None]
    finished: Callable[[Job], None]


@dataclass
class _Steps:
    """Current steps, all of the same length, from `began` on."""

    began: float
    step_s: float
    steps: int
    parts: list[tuple[Job, int]] = field(default_factory=list)
    is_over: bool = False


class SimReplica:
    """One GPU with a model. `computed` counts tokens of prompts."""

    def __init__(
        self, name: str, node_id: str, net: NodeNet, events: Events, hardware: Hardware
    ) -> None:
        self.name, self.node_id = name, node_id
        self.computed = 0
        self.is_dead = False
        self.cache = ChunkCache(net.num_chunks, hardware.cache_chunks)
        self._net, self._events, self._hardware = net, events, hardware
        self._gpu = Wire()
        self._waiting: deque[Job] = deque()
        self._loading: list[Job] = []
        self._computing: list[Job] = []
        # By the step after which each one ends.
        self._decoding: list[tuple[int, int, Job]] = []
        self._context = 0.0
        self._steps = 0
        self._order = count()
        self._run: _Steps | None = None
        self._node = net.node(node_id)

    @property
    def num_ongoing(self) -> int:
        """Requests that wait or run here."""
        admitted = len(self._loading) + len(self._computing) + len(self._decoding)
        return len(self._waiting) + admitted

    def jobs(self) -> list[Job]:
        """All that have not finished."""
        decoding = [job for _, _, job in self._decoding]
        return [*self._waiting, *self._loading, *self._computing, *decoding]

    def die(self) -> list[Job]:
        """End at once: all jobs that are lost."""
        self.is_dead = True
        if self._run is not None:
            self._run.is_over = True
        return self.jobs()

    def arrive(self, job: Job, now: float) -> None:
        """A request comes."""
        assert not self.is_dead, self.name
        self._waiting.append(job)
        self._wake(now)

    def _wake(self, now: float) -> None:
        """There is something to admit: cut steps short, or begin one."""
        run = self._run
        if run is None:
            self._begin(now)
        elif run.steps > 1:
            run.is_over = True
            steps = min(run.steps, max(1, ceil((now - run.began) / run.step_s)))
            self._go(_Steps(run.began, run.step_s, steps), now)

    def _begin(self, now: float) -> None:
        """Plan the next step, or stop if there is nothing to do."""
        hardware = self._hardware
        self._admit(now)
        budget = max(0, hardware.step_tokens - len(self._decoding))
        parts, taken_s = [], 0.0
        for job in self._computing:
            tokens = min(budget, job.request.num_tokens - job.done)
            if not tokens:
                break
            budget -= tokens
            parts.append((job, tokens))
            taken_s += hardware.prefill_s(job.done, tokens)
        if not parts and not self._decoding:
            self._run = None
            return
        steps = 1 if parts else max(1, self._decoding[0][0] - self._steps)
        taken_s += hardware.step_s + hardware.decoding_s(len(self._decoding), self._context)
        self._go(_Steps(now, taken_s, steps, parts), now)

    def _go(self, run: _Steps, now: float) -> None:
        self._run = run
        end = max(now, run.began + run.steps * run.step_s)
        self._events.schedule(end, lambda: self._end(run, end))

    def _end(self, run: _Steps, now: float) -> None:
        if run.is_over:
            return
        self._steps += run.steps
        finished = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            finished.append(heapq.heappop(self._decoding)[2])
        for job, tokens in run.parts:
            self._advance(job, tokens)
        firsts = [job for job, _ in run.parts if job.done >= job.request.num_tokens]
        for job in firsts:
            self._computing.remove(job)
            job.first_at = now
            self._events.first(job)
            left = job.request.output_tokens - 1
            if left <= 0:
                finished.append(job)
                continue
            self._context += job.request.num_tokens + left / 2
            heapq.heappush(self._decoding, (self._steps + left, next(self._order), job))
        for job in finished:
            self._release(job)
            self._events.finished(job)
        self._begin(now)

    def _advance(self, job: Job, tokens: int) -> None:
        """Tokens were computed: whole chunks of them are in the cache and on the node."""
        self.computed += tokens
        begin = job.done // TOKENS
        job.done += tokens
        new = job.request.chunks[begin : job.done // TOKENS]
        if len(new):
            self.cache.reserved -= len(new)
            job.reserved -= len(new)
            self.cache.put(job.request.chunks[: begin + len(new)])
            self._node.store(new)

    def _release(self, job: Job) -> None:
        request = job.request
        if request.output_tokens > 1:
            self._context -= request.num_tokens + (request.output_tokens - 1) / 2
        if not self._decoding:
            self._context = 0.0
        self.cache.reserved -= job.reserved
        job.reserved = 0
        self.cache.unpin(request.chunks)

    def _admit(self, now: float) -> None:
        """Admit jobs in order while there is room; jobs with chunks elsewhere load them first."""
        while self._waiting:
            running = len(self._loading) + len(self._computing) + len(self._decoding)
            tokens = sum(job.request.num_tokens - job.done for job in self._computing)
            if running >= self._hardware.max_sequences or tokens >= self._hardware.step_tokens:
                return
            job = self._waiting[0]
            if not self._has_room(job, is_alone=not running):
                return
            self._waiting.popleft()
            chunks = job.request.chunks
            own = self.cache.prefix(chunks)
            self.cache.put(chunks[:own])
            loaded = self._net.load(self.node_id, self._gpu, chunks, own, now)
            job.done = own * TOKENS
            if loaded.number:
                self._loading.append(job)
                end = own + loaded.number
                self._events.schedule(loaded.at, partial(self._loaded, job, end, loaded.at))
            else:
                self._computing.append(job)

    def _has_room(self, job: Job, *, is_alone: bool) -> bool:
        """Pin and reserve what a job needs, if there is room."""
        chunks = job.request.chunks
        own = self.cache.prefix(chunks)
        new = len(chunks) - own + 1 + ceil(job.request.output_tokens / TOKENS)
        self.cache.pin(chunks)
        if not self.cache.make_room(new) and not is_alone:
            self.cache.unpin(chunks)
            return False
        job.reserved = new
        self.cache.reserved += new
        return True

    def _loaded(self, job: Job, end: int, now: float) -> None:
        if self.is_dead:
            return
        number = end - job.done // TOKENS
        self.cache.reserved -= number
        job.reserved -= number
        self.cache.put(job.request.chunks[:end])
        job.done = end * TOKENS
        self._loading.remove(job)
        self._computing.append(job)
        self._wake(now)
