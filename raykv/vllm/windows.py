"""Has vLLM's offloading scheduler store the windows of `raykv.engine.windows`.

vLLM asks the manager class of a KV group which blocks can ever serve a hit, and offers no others to
be stored. Here that class is asked as before, and what RayKV keeps is added to its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from raykv.engine.view import EngineView
from raykv.engine.windows import WindowPlan, checkpoint, parting, plan_windows
from raykv.protocol.groups import ChunkGroup
from raykv.vllm.internals import choose_blocks


@dataclass(frozen=True)
class KeptBlocks:
    """Stands for a KV group's manager class, vLLM's, where blocks to be stored are chosen."""

    manager_class: Any
    plan: WindowPlan
    blocks_per_chunk: int
    chunk_tokens: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager_class, name)

    def reachable_block_mask(self, *, start_block: int, end_block: int, **more: Any) -> Any:
        """See `SingleTypeKVCacheManager.reachable_block_mask`; None: all blocks."""
        mask = self.manager_class.reachable_block_mask(
            start_block=start_block, end_block=end_block, **more
        )
        # The prompt's end is the first; there is none where vLLM stores every window.
        boundaries = more.get("reachable_boundaries")
        if mask is None or not boundaries:
            return mask
        prompt = (boundaries[0] + 1) // self.chunk_tokens
        return [
            is_reachable or self.plan.keeps(block // self.blocks_per_chunk, prompt)
            for block, is_reachable in enumerate(mask, start_block)
        ]


class Windows:
    """On the scheduler's side of an engine with sliding windows or recurrent states.

    Args:
        scheduler: vLLM's `OffloadingConnectorScheduler`; from now on it stores more.
        groups: its KV groups, as clients know them.
        share: the setting `window_share`; 0 leaves everything to vLLM.
    """

    def __init__(self, scheduler: Any, groups: Sequence[ChunkGroup], share: float) -> None:
        self._groups = groups
        self._is_on = share > 0 and any(each.window is not None for each in groups)
        config = scheduler.config
        kinds = {each.group_idx: each.kv_cache_spec for each in config.kv_group_configs}
        self._has_states = any(isinstance(each, MambaSpec) for each in kinds.values())
        sliding = [group for group, kind in kinds.items() if isinstance(kind, SlidingWindowSpec)]
        tokens = {each.group: each.tokens for each in groups}
        chosen = {
            group: partial(
                KeptBlocks,
                plan=plan,
                blocks_per_chunk=config.blocks_per_chunk,
                chunk_tokens=tokens[group],
            )
            for group, plan in plan_windows(groups, sliding, share).items()
            if plan.interval
        }
        choose_blocks(scheduler, chosen)

    def keep_states(self, kv_cache_config: Any) -> None:
        """Have vLLM hand over the state at the end of each step, where by default it does so at the
        ends of prompts only; before it makes its cache.
        """
        is_default = kv_cache_config.prefix_cache_retention_interval == 0
        if self._is_on and self._has_states and is_default:
            kv_cache_config.prefix_cache_retention_interval = None

    def note_parting(self, request: Any, found: int, status: Any, view: EngineView) -> None:
        """Where a request parts from what the cluster has, windows and states are stored: vLLM
        takes it as a place where prompts part.

        Args:
            request: vLLM's.
            found: tokens that are in vLLM's cache or are loaded.
            status: what vLLM's offloading scheduler knows of the request.
            view: the engine's.
        """
        if not self._is_on:
            return
        prompt = request.num_prompt_tokens
        reach = {
            each.group: view.reach(request.request_id, state.offload_keys)
            for each, state in zip(self._groups, status.group_states, strict=True)
            if each.window is None
        }
        at = parting(self._groups, reach, prompt)
        if at > found:
            view.missed_window(request.request_id)
        elif self._has_states:
            at = checkpoint(self._groups, prompt)
        if at > max(found, request.shared_prefix_boundary):
            request.shared_prefix_boundary = at
