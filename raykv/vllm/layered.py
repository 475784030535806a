"""Loads within a step: RayKV's, by layer, and other connectors'.

`layerwise_loads`: what can't have it, and both sides of a load that nobody waits for.

A prompt that is found is scheduled at once; the worker waits for each layer before it is computed.
A request whose load failed is computed anew. vLLM's own recovery is not used: it takes a running
request back to the middle, of which its second model runner does not hear, and knows nothing of a
step that was scheduled meanwhile and computes with what did not come. So the request is preempted,
as by a reset of vLLM's cache, and what is under way of it counts for nothing. What of it must leave
vLLM's prefix cache, see `raykv.engine.layered`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import FullAttentionSpec

from raykv.base import errors, guard
from raykv.base.settings import Settings
from raykv.engine import layered
from raykv.vllm.internals.offloading import SchedulerTables
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
from raykv.vllm.worker import RayKVConnectorWorker
from raykv.worker.link import ALL_LAYERS

logger = logging.getLogger("raykv")

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
            f"kv_cache_dtype={dtype} keeps scales with its numbers, and the last token of a "
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
            "with durable_stores a step ends with its chunks in the pool, and chunks that are "
            "computed along with a load are stored one step later: leave out one of the two"
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


class LoadScheduling:
    """Between vLLM's scheduler and loads that it waits for. On EngineCore's scheduler thread."""

    def __init__(self) -> None:
        # Requests that vLLM waits for although there is no load job, and blocks that it believes to
        # be loaded; until `take_stranded`.
        self._requests: list[str] = []
        self._blocks: list[int] = []

    @property
    def is_busy(self) -> bool:
        """Whether any request may have to wait for another one's load."""
        return False

    @property
    def held(self) -> Set[str]:
        """The requests of which nothing is stored for now."""
        return frozenset()

    def must_wait(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether vLLM's own prefix hit has blocks that are not to be trusted yet."""
        del request, num_computed_tokens
        return False

    def found(
        self, request: Any, num_computed_tokens: int, num_found: int, *, is_async: bool
    ) -> tuple[int, bool]:
        """Tokens to load, and whether vLLM waits for them."""
        del request, num_computed_tokens
        return num_found, is_async

    def begin(self, request: Any, blocks: Any) -> Any:
        """A request that loads has its blocks; how vLLM's offloading scheduler is to see them."""
        del request
        return blocks

    def strand(self, request: Any, blocks: Any) -> None:
        """The load of a request that has its blocks may never have been made up."""
        del blocks
        self._requests.append(request.request_id)

    def strand_step(self, request_ids: Iterable[str]) -> None:
        """A step could not be made up, and the loads of these requests go to nobody."""
        self._requests += request_ids

    def take_stranded(self) -> tuple[list[str], list[int]]:
        """Requests and blocks that the workers report as not loaded."""
        stranded = self._requests, self._blocks
        self._requests, self._blocks = [], []
        return stranded

    def begin_step(self, scheduled: Any) -> None:
        """A step was scheduled, and its stores are not made up yet."""

    def close_step(self, scheduled: Any) -> None:
        """A step goes out."""

    def end_step(self, scheduler: Any, scheduled: Any, result: Any) -> None:
        """A step has ended, and nobody has been told what it computed."""


class LayeredScheduling(LoadScheduling):
    """The same for loads whose requests vLLM goes on with at once: it waits in
    `wait_for_layer_load`.

    Args:
        loads: shared with the manager, which stores nothing of a request that is loading.
        tables: of vLLM's offloading scheduler.
        evict: takes blocks out of vLLM's prefix cache.
    """

    def __init__(
        self,
        loads: layered.LayeredLoads,
        tables: SchedulerTables,
        evict: Callable[[Set[int]], None],
    ) -> None:
        super().__init__()
        self._evict_blocks = evict
        self.loads = loads
        self._tables = tables
        self._tokens_per_hash = self._tables.tokens_per_hash
        self._tokens_per_block = self._tables.tokens_per_block
        # How many tokens vLLM's own cache has of requests that were asked about last.
        self._num_local: dict[str, int] = {}
        # The numbers of those with loads.
        self._steps: layered.Steps[int] = layered.Steps()
        # Requests that were taken back for what another connector did not load.
        self._taken_back: set[str] = set()

    @property
    def is_busy(self) -> bool:
        return self.loads.is_busy

    @property
    def held(self) -> Set[str]:
        return self.loads.held

    def must_wait(self, request: Any, num_computed_tokens: int) -> bool:
        if not self.loads.is_busy:
            return False
        num_hashes = -(-num_computed_tokens // self._tokens_per_hash)
        return self.loads.must_wait(request.block_hashes[:num_hashes])

    def found(
        self, request: Any, num_computed_tokens: int, num_found: int, *, is_async: bool
    ) -> tuple[int, bool]:
        del is_async
        self._num_local[request.request_id] = num_computed_tokens
        most = request.num_tokens - LEFT_TO_COMPUTE - num_computed_tokens
        return max(0, min(num_found, most)), False

    def begin(self, request: Any, blocks: Any) -> FreshBlocks:
        """See `LoadScheduling.begin`; they are returned as they look where vLLM waits.

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

    def strand(self, request: Any, blocks: Any) -> None:
        """See `LoadScheduling.strand`; nobody else is given these blocks."""
        name = request.request_id
        if name not in self.loads.beginning:
            whole = tuple(block.block_id for each in blocks.blocks for block in each)
            self.loads.begin(layered.LayeredLoad(name, frozenset(request.block_hashes), whole))
        self._blocks += self.loads.beginning[name].blocks

    def strand_step(self, request_ids: Iterable[str]) -> None:
        """See `LoadScheduling.strand_step`; what any load of the step brings does not count."""
        for load in self.loads.beginning.values():
            self._blocks += load.blocks

    def begin_step(self, scheduled: Any) -> None:
        """See `LoadScheduling.begin_step`; it may give blocks to requests whose loads are under
        way. What is left of steps of whose end nobody tells is evicted.
        """
        if not self.loads.is_busy:
            return
        for request_id, (blocks,) in new_blocks(scheduled):
            self.loads.grow(request_id, blocks)
        if self.loads.to_evict:
            self._evict(self.loads.to_evict)

    def close_step(self, scheduled: Any) -> None:
        is_loading = bool(self.loads.beginning)
        number = self.loads.close_step()
        if is_loading and (lost := self._steps.begin(scheduled, number)) is not None:
            self.loads.lose_step(lost)
        self._num_local.clear()

    def end_step(self, scheduler: Any, scheduled: Any, result: Any) -> None:
        """See `LoadScheduling.end_step`.

        Blocks of requests that have ended as well are free, but not given away yet; evicting one
        that is in use only removes its name.
        """
        invalid = invalid_blocks_of(result)
        lost = self.loads.end_step(self._steps.end(scheduled, -1), invalid)
        if invalid:
            lost |= self._compute_anew(scheduler, result, invalid)
        self._evict(lost)

    @guard.guarded(guard.nothing)
    def _evict(self, lost: Set[int]) -> None:
        """Until it has left vLLM's prefix cache, requests that would hit it go on waiting."""
        if lost:
            self._evict_blocks(lost)
        self.loads.evicted()
        for name in [*self.loads.spoiled]:
            request = self._tables.find(name)
            if request is None or request.is_signaled:
                # It was over before its load.
                self.loads.spoiled.discard(name)

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
        evict: takes blocks out of vLLM's prefix cache.
    """

    def __init__(
        self,
        tables: SchedulerTables,
        manager: RayOffloadingManager,
        evict: Callable[[Set[int]], None],
    ) -> None:
        self._evict = evict
        self._tables = tables
        self._manager = manager
        self._can_fail = len(tables.groups) == 1
        self._loads = layered.SiblingLoads()
        # How many tokens vLLM's own cache has of requests that were asked about for this step.
        self._asked: dict[str, int] = {}
        # The numbers of those that have gone out while others loaded.
        self._steps: layered.Steps[int] = layered.Steps()

    def ask(self, request_id: str, num_computed_tokens: int) -> None:
        """vLLM asks what RayKV finds behind these tokens."""
        self._asked[request_id] = num_computed_tokens

    def load_own(self, request_id: str) -> None:
        """RayKV loads what was found."""
        self._asked.pop(request_id, None)

    @property
    def held(self) -> Set[str]:
        """The requests of which nothing is stored for now."""
        return self._loads.held

    def begin(self, scheduled: Any, weights: WeightChanges) -> None:
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
            weights.begin(name, count)
        number, lost = self._loads.begin(
            {name: each.blocks for name, each in given.items()},
            {name: [*chain(*blocks)] for name, blocks in new_blocks(scheduled)},
            scheduled.finished_req_ids or (),
            has_loads=self._can_fail and any(count > asked[name] for name, count in begins.items()),
        )
        self._lose(lost)
        if self._loads.held:
            self._steps.begin(scheduled, number)

    def end_step(self, scheduled: Any, result: Any) -> None:
        """A step has ended, and vLLM has not looked at its result yet."""
        if number := self._steps.end(scheduled, 0):
            known = self._tables.requests.keys()
            self._lose(self._loads.end(number, invalid_blocks_of(result), known))

    def _lose(self, lost: layered.Lost) -> None:
        self._manager.barred |= lost.requests & self._tables.requests.keys()
        if lost.blocks:
            self._evict(lost.blocks)


class LayeredConnectorWorker(RayKVConnectorWorker):
    """A worker's side of loads that its steps wait for, layer by layer."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        """Raises SettingError where the engine can't have it."""
        super().__init__(spec, vllm_config, kv_cache_config)
        refuse_layerwise(spec.settings, vllm_config, kv_cache_config)
        # Blocks of loads of this step whose end has not been seen.
        self._unseen: dict[int, list[int]] = {}
        # The layers that have waited for these loads.
        self._waited: set[str] = set()
        self._numbers: dict[str, int] | None = None

    def _note_loads(self, metadata: Any) -> None:
        for job_id, load in metadata.load_jobs.items():
            self._unseen[job_id] = load.dst_spec.block_ids.tolist()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `RayKVConnectorWorker.get_finished`. What is not there is to be known before anybody
        sees what was computed with it.
        """
        self._ended |= finished_req_ids
        if self._unseen and self.raykv is not None:
            self.raykv.wait_layers(self._unseen, ALL_LAYERS)
            self._check_that_all_waited()
        finished = super().get_finished(finished_req_ids)
        self._end_loads()
        return finished

    def end_badly(self) -> set[str]:
        received = super().end_badly()
        self._end_loads()
        return received

    def _end_load_badly(self, job_id: int, request_id: str) -> None:
        """vLLM does not wait for the request, which is told by its blocks."""
        self._invalid_block_ids.update(self._unseen.pop(job_id, ()))

    def _end_load(self, job_id: int, request_id: str) -> None:
        self._unseen.pop(job_id, None)

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait until the KV of a layer is there, of all prompts that are being loaded."""
        if not self._unseen:
            return
        self._waited.add(layer_name)
        if not self._unseen.keys() <= self._vllm.loads.keys():
            # A load begins behind a layer that wants it: vLLM is not the one that we know.
            self.distrust_loads()
        if self.raykv is not None:
            self.raykv.wait_layers(self._unseen, self._layer_numbers().get(layer_name, ALL_LAYERS))

    def _check_that_all_waited(self) -> None:
        """A layer that does not call the hook was computed with what was not there yet."""
        missing = {*self.kv_cache_config.kv_cache_groups[0].layer_names} - self._waited
        if missing:
            logger.warning(
                "layerwise_loads: %d layers (%s) did not wait for their KV, so that the prompt is "
                "computed anew: if this comes often, leave layerwise_loads out with this model",
                len(missing),
                min(missing),
            )
            self.distrust_loads()

    def _layer_numbers(self) -> dict[str, int]:
        """How many layers of a load are to be there before a layer is computed.

        Empty where the NodeActor's layers are not vLLM's: then all have to be there.
        """
        if self._numbers is None:
            assert self.raykv is not None
            names = self.kv_cache_config.kv_cache_groups[0].layer_names
            is_known = len(self.raykv.layout.groups[0]) == len(names)
            self._numbers = {name: at for at, name in enumerate(names, 1)} if is_known else {}
        return self._numbers

    def distrust_loads(self) -> None:
        self._invalid_block_ids.update(*self._unseen.values())

    def _end_loads(self) -> None:
        """At the end of a step: loads that were never submitted, or whose end got lost, failed."""
        self.distrust_loads()
        for job_id in self._unseen:
            if self.raykv is None or not self.raykv.is_flying(job_id):
                self._vllm.loads.pop(job_id, None)
                self._meta.mark_completed(job_id)
        self._unseen.clear()
        self._waited.clear()
