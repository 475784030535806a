"""Bugs that the simulation must find. Each takes out one thing that the design depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raykv.base.ids import ChunkName, Epoch, Generation, Namespace, Refusal, Slot
from raykv.directory import manager
from raykv.directory.book import PoolBook
from raykv.directory.leases import Generations
from raykv.directory.log import EventLog
from raykv.directory.manager import BlockManager
from raykv.directory.table.protocol import Lease
from raykv.engine.remote import RemoteChunks
from raykv.engine.view import EngineView
from raykv.node import slots
from raykv.node.slots import SlotState, SlotTable
from tests.simulation.cluster import GENERATIONS_PER_EPOCH

Plant = Callable[[pytest.MonkeyPatch], None]


def source_serves_what_is_in_the_slot(patches: pytest.MonkeyPatch) -> None:
    """A reader names a slot and gets it, whatever its generation and key."""

    def begin_load(table: SlotTable, name: ChunkName) -> Refusal:
        record = table._record(name.slot)
        if record is None or record.state is not SlotState.READY:
            return Refusal.STALE
        record.readers += 1
        return Refusal.NONE

    def finish_load(table: SlotTable, slot: Slot, _generation: Generation) -> None:
        record = table._record(slot)
        assert record is not None
        record.readers -= 1

    patches.setattr(SlotTable, "begin_load", begin_load)
    patches.setattr(SlotTable, "finish_load", finish_load)


def slot_is_written_under_its_readers(patches: pytest.MonkeyPatch) -> None:
    """A store does not wait for the loads that read its slot."""

    def is_busy(record: slots._SlotRecord) -> bool:
        return bool(record.writers)

    patches.setattr(slots._SlotRecord, "is_busy", property(is_busy))


def late_clock_is_believed(patches: pytest.MonkeyPatch) -> None:
    """A scheduler actor whose clock went back grants generations that were granted before."""
    patches.setattr(manager, "_seen_epoch", lambda _report: Epoch(0))


def stored_report_counts_at_any_generation(patches: pytest.MonkeyPatch) -> None:
    """A report about a slot that is leased is believed, even one from before the lease."""

    def lease_at(book: PoolBook, slot: Slot, _generation: int) -> Lease | None:
        return book.table.lease_of(slot)

    patches.setattr(PoolBook, "lease_at", lease_at)


def eviction_is_no_event(patches: pytest.MonkeyPatch) -> None:
    """Who reads the events never hears that a chunk went."""
    patches.setattr(EventLog, "removed", lambda *_: None)


def dead_engine_keeps_its_leases(patches: pytest.MonkeyPatch) -> None:
    """The slots of an engine that is gone are never free again."""
    patches.setattr(PoolBook, "end_leases", lambda *_: None)


def fetch_outlives_its_lease(patches: pytest.MonkeyPatch) -> None:
    """What was ordered into a lease that is lost is taken in all the same."""
    patches.setattr(RemoteChunks, "abandon", lambda *_: None)
    patches.setattr(RemoteChunks, "abandon_at", lambda *_: None)


def answer_from_before_a_reset_counts(patches: pytest.MonkeyPatch) -> None:
    """An engine that has emptied its view takes in what was said before."""
    patches.setattr(EngineView, "is_clearing", property(lambda _: False))


def clearing_is_of_what_is_known(patches: pytest.MonkeyPatch) -> None:
    """To clear everything is to clear each namespace that somebody has at that moment."""
    clear = BlockManager.clear

    def clear_known(self: BlockManager, namespace: Namespace | None = None) -> dict[str, int]:
        for name in self._known_namespaces() if namespace is None else {namespace}:
            clear(self, name)
        return self.cleared

    patches.setattr(BlockManager, "clear", clear_known)


def clearing_dies_with_its_scheduler_actor(patches: pytest.MonkeyPatch) -> None:
    """The next life does not hear of what was cleared."""
    begin = BlockManager.__init__

    def begin_anew(self: BlockManager, epoch: Epoch, settings: Any, **_: object) -> None:
        begin(self, epoch, settings)

    patches.setattr(BlockManager, "__init__", begin_anew)


def counter_begins_again(patches: pytest.MonkeyPatch) -> None:
    """The counter of generations comes to its end, and the epoch does not rise."""

    def skip(generations: Generations, count: int) -> None:
        generations._counter = (generations._counter + count) % GENERATIONS_PER_EPOCH

    patches.setattr(Generations, "skip", skip)


BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        source_serves_what_is_in_the_slot,
        slot_is_written_under_its_readers,
        late_clock_is_believed,
        stored_report_counts_at_any_generation,
        eviction_is_no_event,
        dead_engine_keeps_its_leases,
        fetch_outlives_its_lease,
        answer_from_before_a_reset_counts,
        clearing_is_of_what_is_known,
        clearing_dies_with_its_scheduler_actor,
        counter_begins_again,
    )
}


def room_is_kept_for_a_load_that_failed(patches: pytest.MonkeyPatch) -> None:
    """vLLM admits a request only if it fits beside itself."""
    patches.setattr("raykv.vllm.internals.scheduling.waits_anew", lambda *_: False)


def failed_load_waits_in_front_of_those_that_hold_blocks(patches: pytest.MonkeyPatch) -> None:
    """It waits for blocks of requests whose turn comes after its own: where no room is kept for
    windows either, these never end.
    """
    windows_need_no_room(patches)

    def keep_its_place(scheduler: Any, request: Any) -> bool:
        scheduler._inflight_prefills.discard(request)
        return False

    patches.setattr("raykv.vllm.internals.scheduling.waits_anew", keep_its_place)


def windows_need_no_room(patches: pytest.MonkeyPatch) -> None:
    """Loads are admitted beside others whose windows still need blocks."""
    patches.setattr("raykv.vllm.internals.scheduling.uncounted_blocks", lambda *_: 0)


def blocks_of_the_preempted_are_stored(patches: pytest.MonkeyPatch) -> None:
    """The last chunk of one that ends nevertheless is another one's by then."""
    tables = "raykv.vllm.internals.offloading.SchedulerTables"
    patches.setattr(f"{tables}.forget_preempted", lambda *_: None)


POOL_BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        blocks_of_the_preempted_are_stored,
        room_is_kept_for_a_load_that_failed,
        failed_load_waits_in_front_of_those_that_hold_blocks,
        windows_need_no_room,
    )
}
"""Of engines with small pools (`small_pools.py`)."""
