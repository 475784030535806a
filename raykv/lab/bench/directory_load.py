"""What `directory` runs in a process for each size: fill a block manager, work it, print JSON."""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np
import psutil

from raykv.base.ids import SLOT_ALIGNMENT, Epoch
from raykv.directory.log import MAX_EVENTS
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.table.choose import fast_table
from raykv.lab.bench.directory import CORE, DICT, MESSAGES
from raykv.protocol.columns import Keys, Leases
from raykv.protocol.engine import AttachEngine, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Inventory, NodeReport, NodeReportReply

BATCH = 512
PREFIX = 4096
BATCHES = 64
"""In one measurement."""

SLOT_BYTES = 1 << 20
SLAB_BYTES = 256 << 20
NODE, ENGINE, MODEL = "node", "engine", "model"
NOW = 100.0

Values = dict[str, dict[str, list[float]]]
M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


def key(number: int) -> bytes:
    """36 bytes that look like a block hash and a KV group; the same for the same number."""
    return hashlib.blake2b(number.to_bytes(8), digest_size=32).digest() + bytes(4)


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

    def sync(self, load: DirectoryLoad, raw: bytes) -> SyncReply:
        """An engine's exchange."""
        return self._add(exchange(raw, SyncRequest, load.sync))

    def report(self, load: DirectoryLoad, raw: bytes) -> None:
        """A NodeActor's report."""
        self._add(exchange(raw, NodeReport, load.take))

    def _add(self, answered: AnsweredCall[R]) -> R:
        self.core_s += answered.core_s
        self.messages_s += answered.messages_s
        return answered.reply

    def rates(self, values: Values, what: str) -> None:
        """Chunks per second of `BATCHES` batches."""
        add(values, what, CORE, BATCHES * BATCH / max(self.core_s, 1e-9))
        add(values, what, MESSAGES, BATCHES * BATCH / max(self.messages_s, 1e-9))


def manager() -> BlockManager:
    """A block manager like the scheduler actor's."""
    return BlockManager(Epoch(1), table=fast_table(ManagerSettings().eviction_policy))


class DirectoryLoad:
    """One node full of chunks, one engine, and the block manager between them."""

    def __init__(self, manager: BlockManager, num_chunks: int) -> None:
        self._manager = manager
        slabs = -(-num_chunks // (SLAB_BYTES // SLOT_BYTES))
        self._pool_bytes = slabs * SLAB_BYTES
        self.num_slots = slabs * (SLAB_BYTES // SLOT_BYTES)
        self._epoch = 1
        self._report_seq = self._sync_seq = self.num_keys = 0
        # By place, the number of the key that is held there.
        self._held = np.zeros(self.num_slots, np.int64)
        self._epoch = manager.node_report(self.report(), NOW).epoch
        attach = AttachEngine(PROTOCOL_VERSION, ENGINE, NODE, MODEL, "a model", 1, {0: SLOT_BYTES})
        assert not manager.attach_engine(attach, NOW).error

    def report(self, leases: Leases | None = None) -> NodeReport:
        """The node's next report: new chunks at the leases."""
        self._report_seq += 1
        leases = leases or Leases()
        count = len(leases.slots)
        keys = Keys.of(map(key, range(self.num_keys, self.num_keys + count)))
        places = np.array(leases.slots, np.int64) // (SLOT_BYTES // SLOT_ALIGNMENT)
        self._held[places] = np.arange(self.num_keys, self.num_keys + count)
        self.num_keys += count
        columns = [MODEL] if count else [], [0] * count, keys, leases.slots, leases.generations
        return NodeReport(
            version=PROTOCOL_VERSION,
            node_id=NODE,
            epoch=1,
            seq=self._report_seq,
            pool_bytes=self._pool_bytes,
            slab_bytes=SLAB_BYTES,
            highest_generation=0,
            scheduler_epoch=0,
            stored=Inventory(*columns, [SLOT_BYTES] * count),
        )

    def request(self, wanted: int = 0, asked: list[bytes] | None = None) -> SyncRequest:
        """The engine's next exchange."""
        self._sync_seq += 1
        return SyncRequest(
            ENGINE,
            self._epoch,
            self._sync_seq,
            {0: wanted} if wanted else {},
            asked=Keys.of(asked or []),
        )

    def sync(self, request: SyncRequest) -> SyncReply:
        """Exchange at a time when no earlier pin is left."""
        return self._manager.sync(request, NOW + self._sync_seq * 100.0)

    def take(self, report: NodeReport) -> NodeReportReply:
        return self._manager.node_report(report, NOW)

    def granted(self, count: int = BATCH) -> Leases:
        """Leases, with the changes before taken in."""
        reply = self.sync(self.request(wanted=count))
        while reply.more:
            reply = msgspec.structs.replace(self.sync(self.request()), granted=reply.granted)
        assert len(reply.granted.slots) == count, len(reply.granted.slots)
        return reply.granted

    def fill(self) -> None:
        """Store until there is no free slot."""
        while self.num_keys < self.num_slots:
            self.take(self.report(self.granted(min(BATCH, self.num_slots - self.num_keys))))

    @property
    def own_bytes(self) -> int:
        """What is in memory to know the keys that are held."""
        return self._held.nbytes

    def asked(self, count: int) -> list[bytes]:
        """Keys that are held, from anywhere."""
        return [key(int(number)) for number in random.choices(self._held, k=count)]

    def prefix(self, count: int) -> list[bytes]:
        """Keys that are held, neighbours in the order in which they were stored."""
        held = np.sort(self._held)
        first = random.randrange(max(1, len(held) - count + 1))
        return [key(int(number)) for number in held[first : first + count]]


def looked_up(load: DirectoryLoad, values: Values) -> None:
    """Lookups of batches anywhere, and of a long prefix."""
    watch = Stopwatch()
    for raw in [encode(load.request(asked=load.asked(BATCH))) for _ in range(BATCHES)]:
        reply = watch.sync(load, raw)
        assert len(reply.replicas.slots) == BATCH
    watch.rates(values, "lookups")
    for raw in [encode(load.request(asked=load.prefix(PREFIX))) for _ in range(8)]:
        watch = Stopwatch()
        reply = watch.sync(load, raw)
        assert len(reply.replicas.slots) == min(PREFIX, load.num_slots)
        add(values, "prefix of 4096", CORE, watch.core_s * 1e3)
        add(values, "prefix of 4096", MESSAGES, watch.messages_s * 1e3)


def replaced(load: DirectoryLoad, values: Values) -> None:
    """Evictions in a full pool for leases, and stores at them."""
    evicting, storing = Stopwatch(), Stopwatch()
    for _ in range(BATCHES):
        reply = evicting.sync(load, encode(load.request(wanted=BATCH)))
        assert len(reply.granted.slots) == BATCH
        storing.report(load, encode(load.report(reply.granted)))
        assert not load.sync(load.request()).more
    storing.rates(values, "stores")
    evicting.rates(values, "evictions")


def add(values: Values, what: str, subject: str, value: float) -> None:
    values.setdefault(what, {}).setdefault(subject, []).append(value)


def timed(work: Callable[[], object]) -> float:
    """CPU seconds."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def in_dict(size: int, repeats: int, values: Values) -> None:
    """The same with a dict of keys to (slot, generation), which orders and reports nothing."""
    before = resident()
    table = {key(number): (number, number) for number in range(size)}
    add(values, "memory", DICT, (resident() - before) / size)
    count = BATCHES * BATCH
    for repeat in range(repeats):
        some = [key(random.randrange(repeat * count, size + repeat * count)) for _ in range(count)]
        news = [key(size + repeat * count + number) for number in range(count)]
        olds = list(table)[:count]
        prefix = some[:PREFIX]
        found: list[object] = []
        taken = timed(lambda s=some, f=found: f.extend([table.get(name) for name in s]))  # type: ignore[misc]
        add(values, "lookups", DICT, count / taken)
        taken = timed(lambda p=prefix, f=found: f.extend([table.get(name) for name in p]))  # type: ignore[misc]
        add(values, "prefix of 4096", DICT, taken * 1e3)
        taken = timed(lambda o=olds: [table.pop(name) for name in o])  # type: ignore[misc]
        add(values, "evictions", DICT, len(olds) / taken)
        taken = timed(lambda n=news: table.update((name, (1, 1)) for name in n))  # type: ignore[misc]
        add(values, "stores", DICT, count / taken)


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def in_raykv(size: int, repeats: int, values: Values) -> None:
    """The block manager."""
    before = resident()
    load = DirectoryLoad(manager(), size)
    load.fill()
    add(values, "memory", CORE, (resident() - before - load.own_bytes) / load.num_slots)
    # Until the event log is full: from then on, memory that one chunk frees is another's.
    for _ in range(MAX_EVENTS // (BATCHES * BATCH)):
        replaced(load, {})
    for _ in range(repeats):
        looked_up(load, values)
        replaced(load, values)


def main(subject: str, size: int, repeats: int) -> Values:
    """All values of one subject and size."""
    random.seed(size)
    values: Values = {}
    if subject == DICT:
        in_dict(size, repeats, values)
        return values
    # What is loaded and compiled once belongs to no chunk.
    warm = DirectoryLoad(manager(), 1)
    warm.fill()
    looked_up(warm, {})
    del warm
    in_raykv(size, repeats, values)
    return values


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
