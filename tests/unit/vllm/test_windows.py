"""vLLM's offloading scheduler with RayKV's choice of windows: what is offered, and when."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from raykv.base.ids import Key, MissReason
from raykv.base.settings import Settings
from raykv.engine.requests import Miss
from raykv.engine.view import EngineView
from raykv.vllm.internals.offloading import SchedulerTables
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.windows import Windows
from tests.fixtures.place import CopyingPlace, engine_hello
from tests.fixtures.vllm import CHUNK, FULL, PlayedRequest, key, vllm_scheduler

WINDOW = SlidingWindowSpec(
    block_size=CHUNK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=2 * CHUNK
)
STATE = MambaSpec(
    block_size=CHUNK,
    shapes=((2, 2),),
    dtypes=(torch.float32,),
    mamba_cache_mode="align",
)


class World:
    """An engine with full attention and a window of two chunks."""

    def __init__(self, share: float, *kinds: Any) -> None:
        self.view, self.place = EngineView(Settings(request_deadline_s=5.0)), CopyingPlace()
        self.place.join(self.view, engine_hello(num_groups=2))
        self.scheduler = vllm_scheduler(RayOffloadingManager(self.view), kinds or (FULL, WINDOW))
        # vLLM's default.
        self.scheduler.config = self.scheduler.config._replace(retention_interval=0)
        self.tables = SchedulerTables(self.scheduler)
        self.windows = Windows(self.tables, share)

    def kept(self, prompt: int, chunks: int) -> list[int]:
        """Chunks of the window that are offered, of a prompt of so many tokens."""
        group = self.scheduler.config.kv_group_configs[1]
        mask = self.scheduler._reachable_store_block_mask(
            group_config=group,
            start_chunk_idx=0,
            end_chunk_idx=chunks,
            final_segment_end_chunk_idx=None,
            reachable_boundaries=(prompt - 1,),
        )
        return [chunk for chunk in range(chunks) if mask is None or mask[chunk]]

    def asked(
        self,
        request: PlayedRequest,
        *,
        here: int,
        found: int,
        window: MissReason | None = None,
    ) -> int:
        """Where vLLM believes a request to part, of whose full chunks the first ones are here, and
        whose window was missed for that reason.
        """
        self.place.hold(self.view, map(key, range(here)))
        self.scheduler.on_new_request(request)
        if window is not None:
            self.view.requests.get(request.request_id).missed(Key(b"window"), window)
        known = self.tables.find(request.request_id)
        assert known is not None
        known.name_chunks()
        self.windows.note_parting(request, found, self.view)
        return request.shared_prefix_boundary


def test_windows_are_stored_at_intervals_and_in_the_tail() -> None:
    world = World(0.5)
    tail = range(200 - 64 - 2, 200)
    expected = {chunk for chunk in range(200) if chunk % 4 in (2, 3)} | set(tail)
    assert world.kept(200 * CHUNK, 200) == sorted(expected)


def test_only_what_vllm_keeps_is_stored_with_a_share_of_zero() -> None:
    assert World(0).kept(200 * CHUNK, 200) == [197, 198]


def test_every_window_is_stored_where_vllm_keeps_every_window() -> None:
    world = World(0.01)
    world.scheduler.config = world.scheduler.config._replace(retention_interval=None)
    assert len(world.kept(200 * CHUNK, 200)) == 200


def test_request_parts_where_the_windows_of_a_known_prefix_are_missing() -> None:
    assert World(0.5).asked(PlayedRequest(), here=3, found=0) == 3 * CHUNK


def test_request_parts_nowhere_where_all_that_is_known_is_loaded() -> None:
    assert World(0.5).asked(PlayedRequest(), here=3, found=3 * CHUNK) == 0


def test_place_where_vllm_sees_prompts_part_later_stays() -> None:
    request = PlayedRequest(shared_prefix_boundary=4 * CHUNK)
    assert World(0.5).asked(request, here=3, found=0) == 4 * CHUNK


@pytest.mark.parametrize("share", [0.5, 0])
def test_known_prefix_without_its_window_is_said_to_lack_it(share: float) -> None:
    """And what is behind it was never stored, wherever the window's chunks were looked for."""
    world, request = World(share), PlayedRequest()
    parted = world.asked(request, here=3, found=0, window=MissReason.NEVER_STORED)
    assert parted == (3 * CHUNK if share else 0)
    missed = world.view.requests.take_miss(request.request_id)
    assert missed == Miss(key(3), MissReason.NEVER_STORED, 3 * CHUNK, MissReason.WINDOW_MISSING)


def test_prefix_whose_window_was_evicted_is_said_to_be_evicted() -> None:
    world, request = World(0.5), PlayedRequest()
    world.asked(request, here=3, found=0, window=MissReason.EVICTED)
    missed = world.view.requests.take_miss(request.request_id)
    assert missed == Miss(key(3), MissReason.NEVER_STORED, 3 * CHUNK, MissReason.EVICTED)


def test_prefix_that_was_not_asked_about_in_time_is_not_said_to_lack_a_window() -> None:
    world, request = World(0.5), PlayedRequest()
    world.asked(request, here=3, found=0, window=MissReason.UNANSWERED)
    missed = world.view.requests.take_miss(request.request_id)
    assert missed == Miss(Key(b"window"), MissReason.UNANSWERED)


def test_prompt_leaves_a_state_behind_before_its_end() -> None:
    world = World(0.5, FULL, STATE)
    assert world.asked(PlayedRequest(num_prompt_tokens=40 * CHUNK), here=0, found=0) == 30 * CHUNK


@pytest.mark.parametrize(
    ("share", "kind", "interval", "kept"),
    [(0.5, STATE, 0, None), (0.5, STATE, 64, 64), (0, STATE, 0, 0), (0.5, WINDOW, 0, 0)],
)
def test_states_are_kept_at_each_step_unless_the_user_says_when(
    share: float, kind: Any, interval: int, kept: int | None
) -> None:
    config = SimpleNamespace(prefix_cache_retention_interval=interval)
    World(share, FULL, kind).windows.keep_states(config)
    assert config.prefix_cache_retention_interval == kept
