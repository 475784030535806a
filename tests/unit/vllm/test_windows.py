"""vLLM's offloading scheduler with RayKV's choice of windows: what is offered, and when."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)
from types import SimpleNamespace
from typing import Any

from raykv.base.ids import Key, MissReason
from raykv.base.settings import Settings
from raykv.engine.requests import Miss
from raykv.engine.view import EngineView
from raykv.vllm.internals.offloading import SchedulerTables
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.windows import Windows
from tests.fixtures.place import CopyingPlace, QuietSession, engine_hello
from tests.fixtures.vllm import CHUNK, FULL, STATE, WINDOW, PlayedRequest, key, vllm_scheduler


class World:
    """An engine with full attention and a window of two chunks."""

    def __init__(self, share: float, *kinds: Any) -> None:
        self.view, self.place = EngineView(Settings(request_deadline_s=5.0)), CopyingPlace()
        self.place.join(self.view, engine_hello(num_groups=2))
        manager: Any = RayOffloadingManager(self.view)
        manager.start(QuietSession())
        self.scheduler = vllm_scheduler(manager, kinds or (FULL, WINDOW))
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


TAIL = range(200 - 64 - 2, 200)


@pytest.mark.parametrize(
    ("share", "retention_interval", "kept"),
    [
        (0.5, 0, {chunk for chunk in range(200) if chunk % 4 in (2, 3)} | {*TAIL}),
        (0, 0, {197, 198}),
        (0.01, None, {*range(200)}),
    ],
    ids=["at intervals and in the tail", "what vLLM keeps", "where vLLM keeps all"],
)
def test_windows_are_stored(share: float, retention_interval: int | None, kept: set[int]) -> None:
    world = World(share)
    config = world.scheduler.config._replace(retention_interval=retention_interval)
    world.scheduler.config = config
    assert world.kept(200 * CHUNK, 200) == sorted(kept)


@pytest.mark.parametrize(
    ("found", "vllms", "boundary"),
    [(0, 0, 3 * CHUNK), (3 * CHUNK, 0, 0), (0, 4 * CHUNK, 4 * CHUNK)],
    ids=["windows are missing", "all that is known is loaded", "vLLM sees them part later"],
)
def test_request_parts_where_the_windows_of_a_known_prefix_are_missing(
    found: int, vllms: int, boundary: int
) -> None:
    request = PlayedRequest(shared_prefix_boundary=vllms)
    assert World(0.5).asked(request, here=3, found=found) == boundary


NEVER, LACKS = MissReason.NEVER_STORED, MissReason.WINDOW_MISSING


@pytest.mark.parametrize(
    ("share", "window", "expected"),
    [
        (0.5, NEVER, Miss(key(3), NEVER, 3 * CHUNK, LACKS)),
        (0, NEVER, Miss(key(3), NEVER, 3 * CHUNK, LACKS)),
        (0.5, MissReason.EVICTED, Miss(key(3), NEVER, 3 * CHUNK, MissReason.EVICTED)),
        (0.5, MissReason.UNANSWERED, Miss(Key(b"window"), MissReason.UNANSWERED)),
    ],
    ids=["missing", "missing without a share", "evicted", "not asked about in time"],
)
def test_known_prefix_without_its_window_is_said_to_lack_it(
    share: float, window: MissReason, expected: Miss
) -> None:
    """And what is behind it was never stored, wherever the window's chunks were looked for."""
    world, request = World(share), PlayedRequest()
    world.asked(request, here=3, found=0, window=window)
    assert world.view.requests.take_miss(request.request_id) == expected


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
