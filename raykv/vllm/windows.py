"""Has vLLM's offloading scheduler store the windows of `raykv.engine.windows`.

vLLM asks the manager class of a KV group which blocks can ever serve a hit, and offers no others to
be stored. Here that class is asked as before, and what RayKV keeps is added to its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from raykv.engine.view import EngineView
from raykv.engine.windows import WindowPlan, checkpoint, parting, plan_windows
from raykv.vllm.internals.offloading import SchedulerTables, hand_over_every_state


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
        tables: of vLLM's scheduler side, which stores more from now on.
        share: the setting `window_share`; 0 leaves everything to vLLM.
    """

    def __init__(self, tables: SchedulerTables, share: float) -> None:
        self._tables = tables
        self._groups = tables.groups
        self._has_windows = any(each.window is not None for each in self._groups)
        self._is_on = share > 0 and self._has_windows
        kinds = tables.kinds
        self._has_states = bool(tables.states)
        sliding = [group for group, kind in kinds.items() if isinstance(kind, SlidingWindowSpec)]
        tokens = {each.group: each.tokens for each in self._groups}
        plans = plan_windows(self._groups, sliding, share)
        tables.choose_blocks(
            {
                group: partial(
                    KeptBlocks,
                    plan=plan,
                    blocks_per_chunk=tables.blocks_per_chunk,
                    chunk_tokens=tokens[group],
                )
                for group, plan in plans.items()
                if plan.interval
            }
        )

    def keep_states(self, kv_cache_config: Any) -> None:
        """Have vLLM hand over more states, unless its user has said when."""
        if self._is_on and self._has_states:
            hand_over_every_state(kv_cache_config)

    def note_parting(self, request: Any, found: int, view: EngineView) -> None:
        """Where a request parts from what the cluster has, windows and states are stored: vLLM
        takes it as a place where prompts part. What it can't have of that is explained in any case.

        Args:
            request: vLLM's.
            found: tokens that are in vLLM's cache or are loaded.
            view: the engine's.
        """
        known = self._tables.find(request.request_id)
        if not self._has_windows or known is None:
            return
        prompt = request.num_prompt_tokens
        whole = {
            each.group: keys
            for each, keys in zip(self._groups, known.keys, strict=True)
            if each.window is None
        }
        reach = {group: view.reach(request.request_id, keys) for group, keys in whole.items()}
        at = parting(self._groups, reach, prompt)
        if at > found:
            unknown = (
                keys[reach[group]] for group, keys in whole.items() if reach[group] < len(keys)
            )
            view.missed_window(request.request_id, at - found, next(unknown, None))
        elif self._has_states:
            at = checkpoint(self._groups, prompt)
        if self._is_on and at > max(found, request.shared_prefix_boundary):
            request.shared_prefix_boundary = at
