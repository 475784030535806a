"""Requests for a simulated cluster: from a trace with times, or of synthetic agents. Seeded.

A trace's line has `hash_ids`, `input_length`, `output_length` and `timestamp`, in milliseconds.
One with `session` or `session_id` is of agents: each session goes on as long as in the trace, with
its own pauses, and enough of them go on at once that the pauses keep their length; there are as
many copies of a session, with prompts of their own, as that needs. Without, requests come in the
trace's order and at its times. Prompts that the model does not take are left out. All times are
then stretched by one factor, which makes the load.

A request that continues another one's prompt does not come before that is answered.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from raykv.base.errors import SettingError
from raykv.inspect.trace_files import read_timed_prompts
from tests.bench.simulation.chunk_cache import ChunkCache, Chunks
from tests.bench.simulation.hardware import TOKENS, Hardware

TRACED_SESSIONS, AGENTS = 20, 60
"""Concurrent sessions per replica: with their own pauses, about as many as it can serve."""

MOST_PAUSE_S = 300.0
"""Between two turns: who pauses for longer does not come back."""


@dataclass(frozen=True, eq=False)
class SimRequest:
    """`chunks`: the whole ones of its prompt but the last token's, as vLLM reuses them."""

    at: float
    num_tokens: int
    output_tokens: int
    chunks: Chunks = field(repr=False)
    follows: int | None = None
    """The number of the request whose prompt it continues."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their times; chunks have numbers below `num_chunks`."""

    requests: Sequence[SimRequest]
    num_chunks: int

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(each.num_tokens for each in self.requests)

    def at_load(self, load: float, num_replicas: int, hardware: Hardware) -> Workload:
        """The same at a load: the share of all replicas' time that `work_s` takes."""
        begin, end = self.requests[0].at, self.requests[-1].at
        span_s = self.work_s(num_replicas, hardware) / (num_replicas * load)
        factor = span_s / max(end - begin, 1e-9)
        moved = [replace(each, at=(each.at - begin) * factor) for each in self.requests]
        return replace(self, requests=moved)

    def work_s(self, num_replicas: int, hardware: Hardware) -> float:
        """Seconds of replicas for all of it, if each prompt found what one cache finds that has
        the cluster's whole memory, whoever computed it, and steps were shared by as many sequences
        as a replica has room for: no router makes it less.
        """
        num_nodes = -(-num_replicas // hardware.replicas_per_node)
        memory = num_replicas * hardware.cache_chunks
        memory += num_nodes * (hardware.pool_chunks + hardware.disk_chunks)
        cache = ChunkCache(self.num_chunks, memory)
        chunks = sum(len(each.chunks) for each in self.requests) / len(self.requests)
        at_once = min(hardware.max_sequences, hardware.cache_chunks / max(1.0, chunks))
        work_s = 0.0
        for each in self.requests:
            found = cache.prefix(each.chunks) * TOKENS
            cache.put(each.chunks)
            work_s += hardware.prefill_s(found, each.num_tokens - found)
            shared_s = hardware.step_s / at_once + hardware.decoding_s(1, each.num_tokens)
            work_s += each.output_tokens * shared_s
        return work_s


def from_trace(
    path: str, num_requests: int, num_replicas: int, seed: int, max_tokens: int
) -> Workload:
    """The first requests of a trace, those with at most `max_tokens` tokens.

    Raises:
        SettingError: the file can't be read, is no trace with times, or has no such request.
    """
    rows = [
        row
        for row in read_timed_prompts(path)
        if row["input_length"] + row["output_length"] <= max_tokens
    ]
    if not rows:
        raise SettingError(f"--trace {path}: no request in it has {max_tokens:,} tokens or fewer")
    rows.sort(key=lambda row: row["timestamp"])
    if "session" in rows[0]:
        return _of_sessions(rows, num_requests, num_replicas, seed)
    return _in_order(rows[:num_requests])


class _Numbers:
    """Makes chunks of names: equal names, equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def chunks(self, names: Sequence[Any], num_tokens: int) -> Chunks:
        """Return the chunks of a prompt, without those that are always computed."""
        numbers = self._numbers
        usable = names[: max(0, num_tokens - 1) // TOKENS]
        return np.fromiter((numbers.setdefault(n, len(numbers)) for n in usable), np.int64)


def _in_order(rows: Sequence[Any]) -> Workload:
    numbers = _Numbers()
    requests: list[SimRequest] = []
    # The request that brought a chunk as its last one.
    ended: dict[int, int] = {}
    for number, row in enumerate(rows):
        num_tokens = int(row["input_length"])
        chunks = numbers.chunks(row["hash_ids"], num_tokens)
        follows = next((ended[c] for c in chunks[::-1].tolist() if c in ended), None)
        at = row["timestamp"] / 1e3
        requests.append(
            SimRequest(at, num_tokens, max(1, int(row["output_length"])), chunks, follows)
        )
        if len(chunks):
            ended.setdefault(int(chunks[-1]), number)
    return Workload(requests, len(numbers))


@dataclass(frozen=True)
class Turn:
    """A turn of a session: its pause after the one before, and its request."""

    pause_s: float
    num_tokens: int
    output_tokens: int
    names: Sequence[Any]


@dataclass
class _Alive:
    """A session that goes on."""

    name: int
    turns: Sequence[Turn]
    next: int = 0
    last: int | None = None


def _of_sessions(rows: Sequence[Any], num_requests: int, num_replicas: int, seed: int) -> Workload:
    sessions: dict[str, list[Turn]] = defaultdict(list)
    before: dict[str, float] = {}
    for row in rows:
        name, at = row["session"], row["timestamp"] / 1e3
        pause_s = min(MOST_PAUSE_S, at - before.get(name, at))
        before[name] = at
        turn = Turn(pause_s, row["input_length"], max(1, row["output_length"]), row["hash_ids"])
        sessions[name].append(turn)
    random = Random(seed)
    known = list(sessions.values())
    order = [known[i] for i in random.sample(range(len(known)), len(known))]

    def session(number: int) -> Sequence[Turn]:
        return [
            replace(turn, names=[(number, name) for name in turn.names])
            for turn in order[number % len(order)]
        ]

    return interleave(session, num_requests, num_replicas * TRACED_SESSIONS, random)


def interleave(
    session: Callable[[int], Sequence[Turn]], num_requests: int, alive: int, random: Random
) -> Workload:
    """Return the first requests of `alive` concurrent sessions; `session` makes one by number."""
    numbers, requests = _Numbers(), list[SimRequest]()
    started = 0
    due: list[tuple[float, int, _Alive]] = []

    def start(at: float) -> None:
        nonlocal started
        heapq.heappush(due, (at, started, _Alive(started, session(started))))
        started += 1

    first = session(0)
    pause_s = sum(turn.pause_s for turn in first) / len(first)
    for _ in range(alive):
        start(random.uniform(0, 2 * pause_s))
    while len(requests) < num_requests:
        at, name, each = heapq.heappop(due)
        turn = each.turns[each.next]
        chunks = numbers.chunks(turn.names, turn.num_tokens)
        requests.append(SimRequest(at, turn.num_tokens, turn.output_tokens, chunks, each.last))
        each.last = len(requests) - 1
        each.next += 1
        if each.next < len(each.turns):
            heapq.heappush(due, (at + each.turns[each.next].pause_s, name, each))
        else:
            start(at + pause_s)
    return Workload(requests, len(numbers))


def agents(num_requests: int, num_replicas: int, seed: int) -> Workload:
    """Synthetic agents of 12 kinds, some far more usual than others, each kind with instructions
    and tools of its own; every eighth turn or so an agent sends out four others at once, which
    begin with all that it has read and work for three turns.
    """
    random = Random(seed)
    kinds = [[(kind, n) for n in range(random.randint(8, 40))] for kind in range(12)]

    def session(number: int) -> Sequence[Turn]:
        kind = kinds[min(11, int(random.paretovariate(0.8)) - 1)]
        names: list[Any] = [*kind]
        turns = []
        for turn in range(random.randint(4, 24)):
            names = [*names, *((number, turn, n) for n in range(random.randint(1, 12)))]
            pause_s = random.expovariate(1 / 12.0)
            num_tokens = len(names) * TOKENS + random.randrange(1, TOKENS)
            turns.append(Turn(pause_s, num_tokens, random.randint(30, 600), names))
        return turns

    made = interleave(session, num_requests, num_replicas * AGENTS, random)
    return _sending_out(made, num_requests, random)


def _sending_out(workload: Workload, num_requests: int, random: Random) -> Workload:
    """Add the agents that agents send out."""
    requests = [*workload.requests]
    new = workload.num_chunks
    for number, each in enumerate(workload.requests):
        if random.random() >= 1 / 8:
            continue
        for _ in range(4):
            chunks, at, last = each.chunks, each.at, number
            for _ in range(3):
                more = random.randint(1, 6)
                chunks = np.concatenate([chunks, np.arange(new, new + more)])
                new += more
                at += random.expovariate(1 / 10.0)
                tokens = len(chunks) * TOKENS + random.randrange(1, TOKENS)
                requests.append(SimRequest(at, tokens, random.randint(30, 300), chunks, last))
                last = len(requests) - 1
    return Workload(_in_time(requests, num_requests), new)


def _in_time(requests: Sequence[SimRequest], most: int) -> list[SimRequest]:
    """The first ones in order of time, with the numbers in `follows` as they are then."""
    order = sorted(range(len(requests)), key=lambda number: requests[number].at)[:most]
    place = {old: new for new, old in enumerate(order)}
    return [
        replace(each, follows=None if each.follows is None else place.get(each.follows))
        for each in (requests[old] for old in order)
    ]
