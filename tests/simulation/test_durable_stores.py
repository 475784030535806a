"""`durable_stores`: which chunks of an answered request are in the pool when it is answered.

vLLM's schedulers, its offloading scheduler and worker, and both sides of RayKV's connector are
real.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.fixtures.vllm import CHUNK, FULL, WINDOW
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_layered_scheduler import prompt


class DurableWorld(HookWorld):
    """It steps as vLLM's EngineCore does: with async scheduling a step is scheduled ahead.

    `pooled`: what of the cache was in the pool when a request was answered.
    """

    def __init__(self, model: Path, kinds: Sequence[KVCacheSpec], *, is_async: bool) -> None:
        super().__init__(model, 1, num_blocks=80, kinds=kinds, is_async=is_async)
        self.worker_side._worker._is_durable = True
        self.pooled: dict[str, set[bytes]] = {}
        self._most_ahead = 1 if is_async else 0
        self._scheduled: deque[tuple[Any, dict[str, int]]] = deque()

    def step(self, *aborted: str) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            requests = self.scheduler.requests
            ends = {
                name: requests[name].num_computed_tokens for name in output.num_scheduled_tokens
            }
            self._scheduled.append((output, ends))
            if len(self._scheduled) <= self._most_ahead and ends:
                return
        output, self._ends = self._scheduled.popleft()
        result = self._execute(output)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.asked[each.request_id].answer += each.new_token_ids
                if each.finish_reason is not None:
                    self.pooled[each.request_id] = self.names()
        self._exchange()

    def is_at_rest(self) -> bool:
        return not self._scheduled and super().is_at_rest()

    def names(self) -> set[bytes]:
        """Keys of the chunks that are in the pool."""
        return {*self.place.keys()}

    def late(self) -> dict[str, int]:
        """How many chunks came after an answer, in the end, by request."""
        return {name: len(self.names() - then) for name, then in self.pooled.items()}


def answered(world: DurableWorld, num_tokens: int) -> DurableWorld:
    """A prompt of two chunks and a half was just answered, so many tokens together."""
    text = prompt(1, 2 * CHUNK + CHUNK // 2)
    world.add(text, num_tokens - len(text))
    while not world.pooled:
        world.step()
    return world


def num_late(world: DurableWorld) -> int:
    """Chunks that were not in the pool with the answer; all are with the next step's end."""
    (then,) = world.pooled.values()
    for _ in range(1 + len(world._scheduled)):
        world.step()
    soon = world.names()
    world.run()
    world.check_all()
    assert soon == world.names()
    (asked,) = world.asked.values()
    # The last token of an answer is not computed.
    computed = asked.request.block_hashes[: (asked.request.num_tokens - 1) // CHUNK]
    assert {name[:-4] for name in soon if name.endswith(bytes(4))} == {*map(bytes, computed)}
    return len(soon - then)


LENGTHS = range(3 * CHUNK - 2, 4 * CHUNK + 3)
"""In tokens, of a prompt with its answer, the third and the fourth chunk ending among them."""


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW)], ids=["one_group", "several_groups"])
def test_all_chunks_are_in_the_pool_with_the_answer_without_async_scheduling(
    model: Path, kinds: Sequence[KVCacheSpec]
) -> None:
    for length in LENGTHS:
        world = DurableWorld(model, kinds, is_async=False)
        assert (length, num_late(answered(world, length))) == (length, 0)


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW)], ids=["one_group", "several_groups"])
def test_only_the_chunk_that_ends_before_the_last_token_is_a_step_late_with_async_scheduling(
    model: Path, kinds: Sequence[KVCacheSpec]
) -> None:
    for length in LENGTHS:
        world = DurableWorld(model, kinds, is_async=True)
        expected = len(kinds) if length % CHUNK == 1 else 0
        assert (length, num_late(answered(world, length))) == (length, expected)


def test_last_chunk_that_an_answer_filled_is_a_step_late_in_a_draft_models_group(
    model: Path,
) -> None:
    for length in LENGTHS:
        world = DurableWorld(model, (FULL,), is_async=False)
        config = world.connector.scheduler.config
        (group,) = config.kv_group_configs
        drafts = (group._replace(is_eagle_group=True),)
        world.connector.scheduler.config = config._replace(kv_group_configs=drafts)
        expected = 1 if length > 3 * CHUNK else 0
        assert (length, num_late(answered(world, length))) == (length, expected)
