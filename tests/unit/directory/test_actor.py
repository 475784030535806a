"""The scheduler actor before its fast table is compiled, and after."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

import raykv.directory.actor
from raykv.base.ids import (
    MAX_EPOCH,
    MAX_GENERATION,
    SLOT_ALIGNMENT,
    epoch_of,
    make_generation,
)
from raykv.directory.actor import SchedulerActor, first_epoch
from raykv.directory.table.choose import fast_table
from raykv.directory.table.protocol import ChunkTable
from raykv.protocol.columns import Keys
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Inventory, NodeReport
from tests.fixtures.directory.tables import open_table

PAGE = SLOT_ALIGNMENT
REPORT = NodeReport(PROTOCOL_VERSION, "node", 7, 1, 64 * PAGE, 8 * PAGE, 0, 0)
ATTACH = AttachEngine(PROTOCOL_VERSION, "engine", "node", "space", "tiny", 1, {0: PAGE})


class Desk:
    """An actor without Ray, with a node and an engine."""

    def __init__(self) -> None:
        self.actor = SchedulerActor("here", "lru")
        self.actor.report(encode(REPORT))
        self.epoch = self.attach().epoch
        self.seq = 1

    def attach(self) -> EngineAttached:
        return decode(self.actor.attach(encode(ATTACH)), EngineAttached)

    def sync(self, wanted: dict[int, int] | None = None) -> SyncReply:
        self.seq += 1
        request = SyncRequest("engine", self.epoch, self.seq, wanted or {})
        return decode(self.actor.sync(encode(request)), SyncReply)

    def store(self, *keys: bytes) -> None:
        granted = self.sync({0: len(keys)}).granted
        count = len(keys)
        stored = Inventory(
            ["space"],
            [0] * count,
            Keys.of([*keys]),
            granted.slots,
            granted.generations,
            [PAGE] * count,
        )
        self.seq += 1
        self.actor.report(encode(msgspec.structs.replace(REPORT, seq=self.seq, stored=stored)))

    @property
    def kind(self) -> str:
        return type(self.actor._manager._table).__name__


YEAR = 365.25 * 86_400


@pytest.mark.parametrize("year", [-1, 0, 54, 55.1, 56, 123.1, 200, 8000])
def test_actor_begins_with_an_epoch_above_the_last_one_whatever_the_clock_says(year: float) -> None:
    for last in (0, 5, MAX_EPOCH - 1):
        epoch = first_epoch(year * YEAR, last)
        assert last < epoch <= max(last + 1, MAX_EPOCH)
        assert epoch_of(make_generation(epoch, 1)) == epoch
        assert make_generation(epoch, 1) <= MAX_GENERATION


def test_actor_whose_earlier_lives_nobody_remembers_begins_above_them_by_the_clock() -> None:
    assert first_epoch(57 * YEAR, 0) > first_epoch(56 * YEAR, 0) > first_epoch(0, 0)


def test_actor_serves_while_it_compiles_and_forgets_nothing_when_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_compiled = threading.Event()

    def compiled(policy: str) -> ChunkTable | None:
        assert is_compiled.wait(30.0)
        return fast_table(policy)

    monkeypatch.setattr(raykv.directory.actor, "fast_table", compiled)
    desk = Desk()
    desk.store(b"first", b"second")
    assert desk.sync().stored.keys == [b"first", b"second"]
    assert desk.kind == "DictTable"
    # A lease is out, and another engine is in the middle of its mirror.
    (late,) = desk.sync({0: 1}).granted.generations
    assert desk.attach().error == ""
    is_compiled.set()
    desk.actor._compiler.join(120.0)
    after = desk.sync()
    assert desk.kind == "FlatTable"
    assert sorted(after.stored.keys) == [b"first", b"second"], "a mirror from the beginning"
    desk.store(b"third")
    reply = desk.sync()
    assert b"third" in reply.stored.keys
    desk.actor._manager.check()
    assert late < desk.sync({0: 1}).granted.generations[0]


def test_chunks_are_no_older_for_a_change_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(raykv.directory.actor, "fast_table", lambda _: None)
    desk = Desk()
    desk.actor._compiler.join(120.0)
    desk.store(b"first")
    desk.actor._fast = open_table("flat")
    desk.sync()
    assert desk.kind == "FlatTable"
    (node,) = desk.actor._manager._nodes.values()
    uses = node.book.table.uses_at(node.book.table.places())
    assert all(float(at) >= began - 1.0 for at in [*uses.stored_at, *uses.used_at])


def test_actor_stays_with_what_it_has_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.directory.actor, "fast_table", lambda _: None)
    desk = Desk()
    desk.actor._compiler.join(120.0)
    desk.store(b"first")
    assert desk.sync().stored.keys == [b"first"]
    assert desk.kind == "DictTable"
