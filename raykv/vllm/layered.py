"""Loads within a step: RayKV's, by layer, and other connectors'.

`layerwise_loads`: what can't have it, and the scheduler's side of a load that nobody waits for.

A prompt that is found is scheduled at once; the worker waits for each layer before it is computed.
A request whose load failed is computed anew. vLLM's own recovery is not used: it takes a running
request back to the middle, of which its second model runner does not hear, and knows nothing of a
step that was scheduled meanwhile and computes with what did not come. So the request is preempted,
as by a reset of vLLM's cache, and what is under way of it counts for nothing. What of it must leave
vLLM's prefix cache, see `raykv.engine.layered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import FullAttentionSpec

from raykv.base import errors, guard
from raykv.base.settings import Settings
from raykv.engine import layered
from raykv.vllm.internals.offloading import OffloadedRequest, SchedulerTables
from raykv.vllm.internals.scheduling import (
    begun,
    blocks_of_running,
    forget_invalid_blocks,
    invalid_blocks_of,
    new_blocks,
    take_back,
)
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.weights import WeightChanges

PLAIN_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""KV caches of numbers alone: a page that is loaded and computed at once has either one's."""

LEFT_TO_COMPUTE = 2
"""Tokens of a prompt that are computed though they may be known. Without one the step would have no
result; with one it would look like a step of decoding, for which vLLM may have one graph of all
layers that waits for nothing. Should vLLM give it one token only, for want of room in the step, the
worker sees that no layer has waited, and the prompt is computed."""


def refuse_layerwise(settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
    """Allow only what is known to give the right tokens, whatever fails.

    Raises:
        SettingError: this engine is not known to.
    """
    reason = (
        _against_steps(vllm_config)
        or _against_model(vllm_config, kv_cache_config)
        or _against_rest(settings, vllm_config)
    )
    if reason:
        raise errors.SettingError(f"layerwise_loads can't be had: {reason}")


def _against_steps(vllm_config: Any) -> str:
    """The step of a load is to be one step, on one model runner, whose layers call the hook."""
    parallel = vllm_config.parallel_config
    connector = vllm_config.kv_transfer_config.kv_connector
    if connector == "RayKVHiddenStatesConnector":
        return "hidden states are not computed layer by layer: leave it out, or use RayKVConnector"
    if parallel.pipeline_parallel_size > 1:
        return (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} spreads the layers over "
            "workers: only 1 does not"
        )
    if vllm_config.speculative_config is not None:
        return "speculative_config adds layers that don't wait for their KV: leave it out"
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.mixed_mode().has_full_cudagraphs():
        return (
            f"cudagraph_mode={mode.name} captures the attention of prompts, which then can't wait "
            "for its KV: pass cudagraph_mode=FULL_AND_PIECEWISE, vLLM's default"
        )
    return ""


def _against_model(vllm_config: Any, kv_cache_config: Any) -> str:
    """Each layer must wait, and blocks that did not come must have names."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"this model has {len(groups)} KV groups, and vLLM can't compute single blocks of "
            "them anew: leave it out"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return (
            f"this model's KV is of the kind {type(spec).__name__}, and only layers of plain full "
            "attention are known to wait for theirs: leave it out"
        )
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in PLAIN_DTYPES:
        return (
            f"kv_cache_dtype={dtype} keeps scales beside its numbers, and the last token of a "
            f"prompt is both loaded and computed: only {', '.join(PLAIN_DTYPES)}"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)} spreads a block over ranks: only 1 does not"
    return ""


def _against_rest(settings: Settings, vllm_config: Any) -> str:
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        return f"kv_load_failure_policy={policy} ends requests: only recompute computes them"
    if settings.durable_stores:
        return (
            "with durable_stores a step is to end with its chunks in the pool, and what is "
            "computed beside a load is stored one step later: leave one of them out"
        )
    return ""


class FreshBlock(NamedTuple):
    """One of vLLM's blocks that holds nothing yet; what vLLM's offloading scheduler reads of it."""

    block_id: int
    is_null: bool
    block_hash: None = None


class FreshBlocks(NamedTuple):
    """A request's blocks by KV group, as in vLLM's `KVCacheBlocks`."""

    blocks: tuple[list[Any], ...]


class LayeredScheduling:
    """Between vLLM's scheduler and the loads under way. On EngineCore's scheduler thread.

    Args:
        loads: shared with the manager, which stores nothing of a request that is loading.
        tables: of vLLM's offloading scheduler.
    """

    def __init__(self, loads: layered.LayeredLoads, tables: SchedulerTables) -> None:
        self.loads = loads
        self._tables = tables
        self._tokens_per_hash = self._tables.tokens_per_hash
        self._tokens_per_block = self._tables.tokens_per_block
        # How many tokens vLLM's own cache has of requests that were asked about last.
        self._num_local: dict[str, int] = {}
        # What users allowed requests to store, while they must not.
        self._allowed: dict[str, tuple[OffloadedRequest, int | None]] = {}
        # The numbers of those with loads.
        self._steps: layered.Steps[int] = layered.Steps()
        # Requests that were taken back for what another connector did not load.
        self._taken_back: set[str] = set()

    def must_wait(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether vLLM's own prefix hit has blocks that are not to be trusted yet."""
        if not self.loads.is_busy:
            return False
        num_hashes = -(-num_computed_tokens // self._tokens_per_hash)
        return self.loads.must_wait(request.block_hashes[:num_hashes])

    def found(self, request: Any, num_computed_tokens: int, num_found: int) -> int:
        """Tokens to load."""
        self._num_local[request.request_id] = num_computed_tokens
        most = request.num_tokens - LEFT_TO_COMPUTE - num_computed_tokens
        return max(0, min(num_found, most))

    def begin(self, request: Any, blocks: Any) -> FreshBlocks:
        """A request that loads has its blocks. They are returned as they look where vLLM waits.

        A request that goes on at once has its blocks in vLLM's prefix cache already, and vLLM's
        offloading scheduler would take them for loaded.
        """
        num_local = self._num_local.pop(request.request_id, 0)
        first_hash = num_local // self._tokens_per_hash
        first = num_local // self._tokens_per_block
        (group,) = blocks.blocks
        self.loads.begin(
            layered.LayeredLoad(
                request.request_id,
                frozenset(request.block_hashes[first_hash:]),
                tuple(block.block_id for block in group[first:]),
            )
        )
        fresh = [FreshBlock(block.block_id, block.is_null) for block in group[first:]]
        return FreshBlocks(([*group[:first], *fresh],))

    def strand(self, request: Any, blocks: Any) -> tuple[int, ...]:
        """The blocks of a load that may never have been made up; nobody else is given them."""
        name = request.request_id
        if name not in self.loads.beginning:
            whole = tuple(block.block_id for each in blocks.blocks for block in each)
            self.loads.begin(layered.LayeredLoad(name, frozenset(request.block_hashes), whole))
        return self.loads.beginning[name].blocks

    def hold_stores(self, request: Any) -> None:
        """Make vLLM offer nothing of the request before its load has ended: the manager would
        refuse it, and vLLM would warn of that.
        """
        known = self._tables.find(request.request_id)
        assert known is not None, request.request_id
        self._allowed.setdefault(request.request_id, (known, known.most_stored))
        known.most_stored = 0

    def grow(self, scheduled: Any) -> None:
        """A step gives blocks to requests whose loads are under way."""
        if self.loads.is_busy:
            for request_id, (blocks,) in new_blocks(scheduled):
                self.loads.grow(request_id, blocks)

    def close_step(self, scheduled: Any) -> None:
        """A step goes out."""
        is_loading = bool(self.loads.beginning)
        number = self.loads.close_step()
        if is_loading and (lost := self._steps.begin(scheduled, number)) is not None:
            self.loads.lose_step(lost)
        self._num_local.clear()

    def end_step(
        self, scheduler: Any, scheduled: Any, result: Any, evict: Callable[[Set[int]], None]
    ) -> None:
        """A step has ended, and nobody has been told what it computed.

        Blocks of requests that have ended as well are free, but not given away yet; evicting one
        that is in use only removes its name.
        """
        invalid = invalid_blocks_of(result)
        lost = self.loads.end_step(self._steps.end(scheduled, -1), invalid)
        if invalid:
            lost |= self._compute_anew(scheduler, result, invalid)
        if lost:
            evict(lost)
        self.loads.evicted()
        self._allow_stores()

    @guard.guarded(lambda *_: set())
    def _compute_anew(self, scheduler: Any, result: Any, invalid: set[int]) -> set[int]:
        """Take back whoever has one of these blocks; if that fails, it is left to vLLM. Which of
        their blocks were computed from them.

        For blocks that RayKV did not load, only once: another connector may find them again, and
        fail again, without end.
        """
        taken: dict[str, Sequence[int]] = {**self.loads.lost()}
        others = {
            request_id: blocks
            for request_id, blocks in blocks_of_running(scheduler)
            if not invalid.isdisjoint(blocks)
            and not (request_id in self._taken_back and request_id not in taken)
        }
        self._taken_back &= self._tables.requests.keys()
        self._taken_back |= others.keys() - taken.keys()
        taken |= others
        lost = {
            block for blocks in taken.values() for block in layered.spoiled_blocks(blocks, invalid)
        }
        take_back(scheduler, taken.keys())
        forget_invalid_blocks(result, invalid & lost)
        return lost

    def _allow_stores(self) -> None:
        """Of requests whose loads have ended."""
        for name in [name for name in self._allowed if not self.loads.is_under_way(name)]:
            known, num_tokens = self._allowed.pop(name)
            known.most_stored = num_tokens
        for name in [*self.loads.spoiled]:
            request = self._tables.find(name)
            if request is None or request.is_signaled:
                # It was over before its load.
                self.loads.forget(name)


class SiblingScheduling:
    """What other connectors load within a step, beside RayKV in vLLM's `MultiConnector`; see
    `raykv.engine.layered`. On EngineCore's scheduler thread.

    vLLM doesn't tell a connector what another one loads. But each is asked what it finds behind the
    tokens of vLLM's own cache: a request that begins with the step behind more tokens than that,
    and that RayKV doesn't load, has the others from another connector, or is one of which vLLM has
    the beginning of a block. A load that vLLM waits for is over when its request begins, and then
    nobody is asked.

    Only engines of one KV group can be told of blocks that did not come: vLLM raises with others.

    Args:
        tables: of vLLM's offloading scheduler.
        manager: bars requests for good.
    """

    def __init__(self, tables: SchedulerTables, manager: RayOffloadingManager) -> None:
        self._tables = tables
        self._manager = manager
        self._can_fail = len(tables.groups) == 1
        self._loads = layered.SiblingLoads()
        # How many tokens vLLM's own cache has of requests that were asked about for this step.
        self._asked: dict[str, int] = {}
        # The numbers of those that have gone out while others loaded.
        self._steps: layered.Steps[int] = layered.Steps()

    def ask(self, request_id: str, num_computed_tokens: int) -> None:
        """RayKV is asked what it finds behind so many tokens."""
        self._asked[request_id] = num_computed_tokens

    def load_own(self, request_id: str) -> None:
        """RayKV loads what was found."""
        self._asked.pop(request_id, None)

    @property
    def held(self) -> Set[str]:
        """The requests of which nothing is stored for now."""
        return self._loads.held

    def begin(
        self,
        scheduled: Any,
        evict: Callable[[Set[int]], None],
        weights: WeightChanges | None = None,
    ) -> None:
        """Take note of a step before its stores are made up.

        vLLM asks about whole blocks only: a request may go on behind more of its own cache, of
        which `weights` hear.
        """
        asked, self._asked = self._asked, {}
        if not (asked or self._loads.is_busy):
            return
        given = begun(scheduled)
        begins = {name: given[name].num_computed for name in asked if name in given}
        for name, count in begins.items():
            if weights is not None:
                weights.begin(name, count)
        number, lost = self._loads.begin(
            {name: each.blocks for name, each in given.items()},
            {name: [*chain(*blocks)] for name, blocks in new_blocks(scheduled)},
            scheduled.finished_req_ids or (),
            has_loads=self._can_fail and any(count > asked[name] for name, count in begins.items()),
        )
        self._lose(lost, evict)
        if self._loads.held:
            self._steps.begin(scheduled, number)

    def end_step(self, scheduled: Any, result: Any, evict: Callable[[Set[int]], None]) -> None:
        """A step has ended, and vLLM has not looked at its result yet."""
        if number := self._steps.end(scheduled, 0):
            known = self._tables.requests.keys()
            self._lose(self._loads.end(number, invalid_blocks_of(result), known), evict)

    def _lose(self, lost: layered.Lost, evict: Callable[[Set[int]], None]) -> None:
        self._manager.barred |= lost.requests & self._tables.requests.keys()
        if lost.blocks:
            evict(lost.blocks)
