"""`directory`: the scheduler actor's directory under load, through its messages.

A node reports that many chunks; then they are asked for, go, and others come, in batches of 512.
Each size has a process of its own, so that its memory can be measured alone. Times are CPU time:
the actor has one thread. "messages" are decoding and encoding alone.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import psutil

from raykv.base.ids import ALL_BLOCKS, Key, Namespace
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.directory.known.events import MOST_EVENTS
from raykv.lab.bench.report import Options, Result
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ALL_READ, ListedRow, ListedRows, ListingPart, Position, Reason
from raykv.protocol.listing import Where as At
from raykv.protocol.node import Report, ReportAnswer, ReportedEngine
from tests.bench.pool import alone
from tests.fixtures.keys import random_key

LOOKUPS_PER_S = 4e5
CHANGES_PER_S = 5e4
"""Stores, and evictions."""

MOST_BYTES = 250.0
"""Of memory for a chunk, in all."""

PREFIX_MS = 5.0
"""To say where 2048 chunks are."""

MOST_GROWTH = 3.0
"""Growth of a lookup's time from the smallest size to the largest, caused by CPU caches."""

SIZES = {"10 k": 10_000, "100 k": 100_000, "1 M": 1_000_000, "10 M": 10_000_000}
QUICK_SIZES = {"2 k": 2_048, "4 k": 4_096}
BYTES_NEEDED = 400
"""Of free memory per chunk, before a size is tried."""

CORE, MESSAGES = "RayKV", "messages"

UNITS = {
    "lookups": "1/s",
    "stores": "1/s",
    "evictions": "1/s",
    "prefix of 2048": "ms",
    "memory": "B/chunk",
}

BATCH = 512
PREFIX = 2048
BATCHES = 64
"""In one measurement."""

SPACE = Namespace("model")
NODE, ELSEWHERE = "node", "elsewhere"
NOW = 100.0

Values = dict[str, dict[str, list[float]]]
M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class AnsweredCall(Generic[R]):
    """The scheduler actor's reply to a message, and its CPU seconds."""

    reply: R
    raw: bytes
    core_s: float
    messages_s: float


def exchange(raw: bytes, kind: type[M], decide: Callable[[M], R]) -> AnsweredCall[R]:
    """The scheduler actor's part: the message is new in memory, the reply soon forgotten."""
    began = time.thread_time()
    message = decode(raw, kind)
    decoded = time.thread_time()
    reply = decide(message)
    decided = time.thread_time()
    answer = encode(reply)
    messages_s = decoded - began + time.thread_time() - decided
    return AnsweredCall(reply, answer, decided - decoded, messages_s)


class Stopwatch:
    """CPU seconds in the core, and in the messages around it."""

    def __init__(self) -> None:
        self.core_s = self.messages_s = 0.0

    def add(self, answered: AnsweredCall[R]) -> R:
        """Count a call; returns the answer."""
        self.core_s += answered.core_s
        self.messages_s += answered.messages_s
        return answered.reply

    def rates(self, values: Values, what: str) -> None:
        """Chunks per second of `BATCHES` batches."""
        add(values, what, CORE, BATCHES * BATCH / max(self.core_s, 1e-9))
        add(values, what, MESSAGES, BATCHES * BATCH / max(self.messages_s, 1e-9))


def directory() -> Directory:
    """Make a directory like the scheduler actor's."""
    return Directory(1, Orders(None, 1, NOW))


class ReportingNode:
    """A NodeActor as the directory knows it: chunks come to its listing and go."""

    def __init__(self, node_id: str, engines: Sequence[ReportedEngine] = ()) -> None:
        self.node_id = node_id
        self._engines = list(engines)
        self._seq = self._number = 0
        self._read: Position | None = None

    def report(self, came: Sequence[Key] = (), went: Sequence[Key] = ()) -> Report:
        """The next report."""
        self._seq += 1
        self._number += len(came) + len(went)
        stored = [ListedRow(SPACE, each, At.RAM, ALL_BLOCKS, Reason.STORED) for each in came]
        gone = [ListedRow(SPACE, each, At.NOWHERE, ALL_BLOCKS, Reason.EVICTED) for each in went]
        start, end = self._read or Position(1), Position(1, self._number, ALL_READ)
        part = ListingPart(self._read is None, start, end, ListedRows.of(stored + gone))
        self._read = end
        return Report(self.node_id, 1, self._seq, part=part, engines=self._engines)


class DirectoryLoad:
    """A node full of chunks, an engine elsewhere, and the directory between them."""

    def __init__(self, num_chunks: int) -> None:
        self.directory = directory()
        self._node = ReportingNode(NODE)
        self.num_chunks = num_chunks
        # Numbers of the keys that are held: from `_first` to before `num_keys`.
        self._first = self.num_keys = 0
        self._take(self._node.report())
        self._take(ReportingNode(ELSEWHERE).report())

    def _take(self, report: Report) -> ReportAnswer:
        return self.directory.report(report, NOW)

    def report(self, watch: Stopwatch, came: int = 0, went: int = 0) -> None:
        """Report new chunks, and that the oldest ones are gone."""
        new = [random_key(number) for number in range(self.num_keys, self.num_keys + came)]
        old = [random_key(number) for number in range(self._first, self._first + went)]
        self.num_keys, self._first = self.num_keys + came, self._first + went
        watch.add(exchange(encode(self._node.report(new, old)), Report, self._take))

    def ask(self, watch: Stopwatch, keys: Sequence[Key]) -> None:
        """The engine asks where keys are."""
        ask = Ask("engine", 1, SPACE, [ELSEWHERE], Keys.of(keys))
        answer = watch.add(exchange(encode(ask), Ask, self._answer))
        assert len(answer.sources.key_index) == len(keys), len(answer.sources.key_index)

    def _answer(self, ask: Ask) -> AskAnswer:
        return self.directory.ask(ask, NOW)

    def fill(self) -> None:
        """Store until there is no room."""
        watch = Stopwatch()
        while self.num_keys < self.num_chunks:
            self.report(watch, min(BATCH, self.num_chunks - self.num_keys))

    def asked(self, count: int) -> list[Key]:
        """Pick held keys at random."""
        return [random_key(random.randrange(self._first, self.num_keys)) for _ in range(count)]

    def prefix(self, count: int) -> list[Key]:
        """Pick keys that were stored one after the other."""
        first = random.randrange(self._first, max(self._first + 1, self.num_keys - count + 1))
        return [random_key(number) for number in range(first, min(first + count, self.num_keys))]


def looked_up(load: DirectoryLoad, values: Values) -> None:
    """Measure lookups of random batches, and of a long prefix."""
    watch = Stopwatch()
    for keys in [load.asked(BATCH) for _ in range(BATCHES)]:
        load.ask(watch, keys)
    watch.rates(values, "lookups")
    for keys in [load.prefix(PREFIX) for _ in range(8)]:
        watch = Stopwatch()
        load.ask(watch, keys)
        add(values, "prefix of 2048", CORE, watch.core_s * 1e3)
        add(values, "prefix of 2048", MESSAGES, watch.messages_s * 1e3)


def replaced(load: DirectoryLoad, values: Values) -> None:
    """Measure evictions, and as many stores."""
    count = min(BATCH, load.num_chunks)
    gone, stored = Stopwatch(), Stopwatch()
    for _ in range(BATCHES):
        load.report(gone, went=count)
        load.report(stored, came=count)
    gone.rates(values, "evictions")
    stored.rates(values, "stores")


def add(values: Values, what: str, subject: str, value: float) -> None:
    """Note a value."""
    values.setdefault(what, {}).setdefault(subject, []).append(value)


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def load(size: int, repeats: int) -> Values:
    """Measure one size, in a process of its own; return values by measurement and subject."""
    random.seed(size)
    values: Values = {}
    # What is loaded once belongs to no chunk.
    warm = DirectoryLoad(BATCH)
    warm.fill()
    looked_up(warm, {})
    del warm
    before = resident()
    full = DirectoryLoad(size)
    full.fill()
    add(values, "memory", CORE, (resident() - before) / size)
    # Until the event log is full: from then on, memory that one chunk frees is another's.
    for _ in range(MOST_EVENTS // (2 * BATCHES * BATCH)):
        replaced(full, {})
    for _ in range(repeats):
        looked_up(full, values)
        replaced(full, values)
    return values


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("directory")
    sizes = QUICK_SIZES if options.quick else SIZES
    measured: dict[str, Values] = {}
    for label, size in sizes.items():
        if psutil.virtual_memory().available < size * BYTES_NEEDED:
            result.notes.append(f"{label} chunks: not enough free memory, left out.")
            continue
        measured[label] = alone(load, size, options.repeats_or(5))
    for what, unit in UNITS.items():
        for label, values in measured.items():
            for subject, some in values[what].items():
                result.add(f"{what}, {label} chunks", subject, unit, *some)
    _judge(result, list(measured))
    return result


def _judge(result: Result, labels: list[str]) -> None:
    """The budgets, at the largest size that was measured."""
    smallest, largest = labels[0], labels[-1]
    at_largest = f"at {largest} chunks"

    def ours(what: str, label: str = largest) -> float:
        return result.row(f"{what}, {label} chunks", CORE).median

    lookups = ours("lookups")
    result.at_least(LOOKUPS_PER_S, lookups, f"400,000 lookups/s in the core {at_largest}")
    for what in ("stores", "evictions"):
        result.at_least(CHANGES_PER_S, ours(what), f"50,000 {what}/s in the core {at_largest}")
    result.at_most(PREFIX_MS, ours("prefix of 2048"), f"2048 chunks under 5 ms {at_largest}")
    result.at_most(MOST_BYTES, ours("memory"), f"at most 250 bytes a chunk {at_largest}")
    growth = ours("lookups", smallest) / lookups
    budget = f"a lookup {at_largest} at most {MOST_GROWTH:.0f} times one at {smallest}"
    result.at_most(MOST_GROWTH, growth, budget)
