"""Bugs that `small_pools` must find: each takes out one thing that keeps vLLM's requests going."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


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
