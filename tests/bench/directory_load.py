"""What `directory` runs in a process for each size: fill a directory, work it, print JSON."""

from __future__ import annotations

import gc
import json
import random
import sys
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
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ALL_READ, ListedRow, ListedRows, ListingPart, Position, Reason
from raykv.protocol.listing import Where as At
from raykv.protocol.node import Report, ReportAnswer, ReportedEngine
from tests.bench.directory import CORE, MESSAGES
from tests.fixtures.keys import random_key

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
    """What the scheduler actor made of a message, and the CPU seconds that it took."""

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
    """One like the scheduler actor's."""
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
        """So many chunks come, and the oldest go."""
        new = [random_key(number) for number in range(self.num_keys, self.num_keys + came)]
        old = [random_key(number) for number in range(self._first, self._first + went)]
        self.num_keys, self._first = self.num_keys + came, self._first + went
        watch.add(exchange(encode(self._node.report(new, old)), Report, self._take))

    def ask(self, watch: Stopwatch, keys: Sequence[Key]) -> None:
        """The engine asks where keys are."""
        ask = Ask("engine", 1, SPACE, [ELSEWHERE], Keys.of(keys))
        answer = watch.add(exchange(encode(ask), Ask, self._answer))
        assert len(answer.key_index) == len(keys), len(answer.key_index)

    def _answer(self, ask: Ask) -> AskAnswer:
        return self.directory.ask(ask, NOW)

    def fill(self) -> None:
        """Store until there is no room."""
        watch = Stopwatch()
        while self.num_keys < self.num_chunks:
            self.report(watch, min(BATCH, self.num_chunks - self.num_keys))

    def asked(self, count: int) -> list[Key]:
        """Keys that are held, from anywhere."""
        return [random_key(random.randrange(self._first, self.num_keys)) for _ in range(count)]

    def prefix(self, count: int) -> list[Key]:
        """Keys that are held, neighbours in the order in which they were stored."""
        first = random.randrange(self._first, max(self._first + 1, self.num_keys - count + 1))
        return [random_key(number) for number in range(first, min(first + count, self.num_keys))]


def looked_up(load: DirectoryLoad, values: Values) -> None:
    """Lookups of batches anywhere, and of a long prefix."""
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
    """Evictions, and as many stores."""
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


def in_raykv(size: int, repeats: int, values: Values) -> None:
    """The directory."""
    before = resident()
    load = DirectoryLoad(size)
    load.fill()
    add(values, "memory", CORE, (resident() - before) / size)
    # Until the event log is full: from then on, memory that one chunk frees is another's.
    for _ in range(MOST_EVENTS // (2 * BATCHES * BATCH)):
        replaced(load, {})
    for _ in range(repeats):
        looked_up(load, values)
        replaced(load, values)


def main(size: int, repeats: int) -> Values:
    """All values of one size."""
    random.seed(size)
    values: Values = {}
    # What is loaded once belongs to no chunk.
    warm = DirectoryLoad(BATCH)
    warm.fill()
    looked_up(warm, {})
    del warm
    in_raykv(size, repeats, values)
    return values


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
