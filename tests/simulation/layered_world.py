"""vLLM's own scheduler with RayKV's connector, and a model of the KV cache below them.

Each place of a block holds what was written there last: the name of the whole prefix up to its
token, or rubbish. A block with a recurrent state holds one name, of the prefix that it stands for.
A token that is computed from rubbish is rubbish, in the KV and as the answer, so that whatever of
it is stored, shared or said comes to light. Loads fail at random.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from raykv.base.ids import Direction, Refusal
from raykv.base.settings import Settings
from raykv.engine.cost import StepTimes
from raykv.engine.view import EngineView
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.internals.offloading import evict_blocks
from raykv.vllm.internals.scheduling import watch_scheduler
from raykv.vllm.layered import LayeredScheduling
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.transfers import RayKVWorkerMetadata, flying_job, transfer_result
from raykv.vllm.weights import WeightChanges
from raykv.vllm.windows import Windows
from tests.fixtures.place import NOTHING_FAILS, CopyingPlace, QuietSession, engine_hello
from tests.fixtures.vllm import CHUNK, FULL, vllm_scheduler

RUBBISH = 0
"""In place of a prefix's name."""

WRONG = 1
"""The token of a request whose KV is rubbish; no prompt has it, and no right answer is."""

MAX_LENGTH = 512
MOST_TOKENS = 4 * CHUNK
MOST_RUNNING = 4


MOST_LEFT_OUT = 100
"""Steps that may leave out a request though there is room for it: all its loads take fewer, and
what they must leave room for."""


class WrongAnswerError(AssertionError):
    """A request was answered from rubbish."""


class ForgottenError(AssertionError):
    """A request is scheduled by nobody, though there is room for it."""


def prefix_names(tokens: Iterable[int]) -> list[int]:
    """Of all that the tokens begin with, the first token alone at first."""
    names = list(accumulate(tokens, lambda name, token: hash((name, token)) or 1, initial=1))
    return names[1:]


def next_token(tokens: list[int]) -> int:
    return 2 + abs(hash(tuple(tokens))) % 50


def seen(kind: KVCacheSpec, at: int, num_prompt: int) -> Iterator[int]:
    """The tokens before the one at this place that it looks back to."""
    if isinstance(kind, RSWASpec):
        window = range(max(num_prompt, at + 1 - kind.rswa_window), at)
        return chain(range(min(num_prompt, at)), window)
    if isinstance(kind, ChunkedLocalAttentionSpec):
        return iter(range(at - at % kind.attention_chunk_size, at))
    first = at + 1 - (getattr(kind, "sliding_window", None) or MAX_LENGTH)
    return iter(range(max(0, first), at))


@dataclass
class Asked:
    """What a request should answer, and what it has."""

    request: Request
    answer: list[int] = field(default_factory=list)
    is_aborted: bool = False


class World:
    """An engine whose scheduler is real.

    Args:
        model: a folder.
        seed: of all that is left to chance.
        failing: how often a chunk does not come.
        num_blocks: of the KV cache.
        kinds: of attention, one for each KV group.
        is_async: the scheduler is the one that runs a step ahead.
        retention_interval: vLLM's `prefix_cache_retention_interval`; its own default is 0.
        share: the setting `window_share`.
    """

    def __init__(
        self,
        model: Path,
        seed: int,
        failing: float,
        num_blocks: int = 60,
        kinds: Sequence[KVCacheSpec] = (FULL,),
        *,
        is_async: bool = False,
        retention_interval: int | None = None,
        share: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.failing = failing
        self.kinds = kinds
        self.view = EngineView(Settings(request_deadline_s=5.0))
        self.place = CopyingPlace()
        self.place.join(self.view, engine_hello(num_groups=len(kinds)))
        self.manager = RayOffloadingManager(self.view)
        session: Any = QuietSession()
        self.manager.start(session)
        self.connector = make_connector(self.manager, kinds, retention_interval, share)
        cache = kv_cache(num_blocks, kinds, retention_interval)
        self.connector._windows.keep_states(cache)
        self.scheduler = make_scheduler(model, cache, is_async=is_async)
        bind(self.connector, self.scheduler)
        self.asked: dict[str, Asked] = {}
        self.blocks: dict[int, list[int]] = {}
        # Of requests, by KV group, as vLLM's worker has them: they only grow.
        self.tables: dict[str, tuple[list[int], ...]] = {}
        # Stores go with the next step, as with vLLM's worker.
        self._stores: dict[int, Any] = {}
        # How far a step goes that is executed after the next one was scheduled.
        self._ends: dict[str, int] = {}
        # How often a request of a step is taken back while the model runs.
        self.aborting = 0.0
        # Steps that left out a request, and all that came before it, though there was room.
        self._left_out: dict[str, int] = {}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(CHUNK, sha256)

    def add(self, prompt: list[int], max_tokens: int = 3) -> str:
        request_id = f"r{len(self.asked)}"
        self._add(request_id, prompt, max_tokens)
        return request_id

    def add_turn(self, session: str, prompt: list[int], max_tokens: int = 3) -> None:
        """A prompt that comes bit by bit: vLLM goes on where the turn before has ended.

        The last token that it said is no part of the prompt.
        """
        self._add(session, prompt, max_tokens, resumable=True)

    def _add(self, request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> None:
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=self._hasher,
            **more,
        )
        request.sampling_params.update_from_generation_config({}, None)
        self.asked.setdefault(request_id, Asked(request))
        self.scheduler.add_request(request)

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.asked and self.asked[request_id].request.is_finished()

    def abort(self, request_id: str) -> None:
        self.asked[request_id].is_aborted = True
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, *aborted: str) -> None:
        """One step of the engine; requests are `aborted` while the model runs, as vLLM does it."""
        output = self._schedule()
        result = self._execute(output)
        self._end_step(output, result, aborted)

    def _schedule(self) -> SchedulerOutput:
        """What vLLM's scheduler makes of a step.

        Raises:
            ForgottenError: a request is left out while none that came before it goes on.
        """
        output = self.scheduler.schedule()
        waiting = []
        for name, each in self.scheduler.requests.items():
            if name in output.num_scheduled_tokens:
                break
            if each.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                waiting.append(each)
        step = int(self._has_room(output, waiting))
        self._left_out = {
            each.request_id: self._left_out.get(each.request_id, 0) + step for each in waiting
        }
        for name, count in self._left_out.items():
            if count > MOST_LEFT_OUT:
                raise ForgottenError(self._why_forgotten(name, count))
        return output

    def _has_room(self, output: SchedulerOutput, waiting: Sequence[Request]) -> bool:
        """Whether more could have been scheduled; if nothing was, requests wait for each other."""
        if not output.num_scheduled_tokens:
            return True
        needed = [self.scheduler._request_remaining_blocks(each) for each in waiting]
        return (
            len(self.scheduler.running) < MOST_RUNNING
            and output.total_num_scheduled_tokens < MOST_TOKENS
            and max(needed, default=0) <= self._num_free()
        )

    def _num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _why_forgotten(self, name: str, count: int) -> str:
        scheduler = self.scheduler
        return (
            f"{name} ({scheduler.requests[name].status.name}) was left out of {count} steps with "
            f"room for it: {self._num_free()} of "
            f"{scheduler.kv_cache_config.num_blocks} blocks are free, "
            f"{scheduler._inflight_prefill_reserved_blocks()} are kept for prompts under way, "
            f"running: {[each.request_id for each in scheduler.running]}"
        )

    def _end_step(self, output: Any, result: ModelRunnerOutput, aborted: Sequence[str]) -> None:
        for request_id in output.num_scheduled_tokens:
            if request_id in aborted or self.rng.random() < self.aborting:
                self.abort(request_id)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.asked[each.request_id].answer += each.new_token_ids
        self.place.exchange(self.view)

    def run(self, most: int = 400) -> None:
        """Until all is answered and stored."""
        for _ in range(most):
            if not (self.scheduler.has_requests() or self._stores):
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        """Every answer is the right one; of sessions nobody knows which turn said what."""
        for asked in self.asked.values():
            if asked.request.resumable:
                continue
            tokens = list(asked.request.prompt_token_ids)
            for token in asked.answer:
                if token != next_token(tokens):
                    raise WrongAnswerError(asked.request.request_id)
                tokens.append(token)
            if not asked.is_aborted:
                assert len(asked.answer) == asked.request.max_tokens

    def _execute(self, output: Any) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        meta = RayKVWorkerMetadata()
        # Blocks that are given away in this step are stored before.
        flushed = metadata.store_jobs.keys() & (metadata.jobs_to_flush or set())
        urgent = {job_id: metadata.store_jobs.pop(job_id) for job_id in flushed}
        for job_id, job in {**self._stores, **urgent}.items():
            self._copy(job_id, Direction.STORE, job.src_spec, job.dst_spec, meta)
        self._take_blocks(output)
        invalid = set(metadata.stranded_blocks)
        for job_id, job in metadata.load_jobs.items():
            invalid |= self._copy(job_id, Direction.LOAD, job.dst_spec, job.src_spec, meta)
        sampled = [self._compute(i, n) for i, n in output.num_scheduled_tokens.items()]
        self._stores = metadata.store_jobs
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            sampled,
            kv_connector_output=KVConnectorOutput(
                kv_connector_worker_meta=meta, invalid_block_ids=invalid
            ),
        )

    def _copy(
        self, job_id: int, direction: Direction, blocks: Any, chunks: Any, meta: RayKVWorkerMetadata
    ) -> set[int]:
        """A job, as a worker has it carried out; which blocks were not loaded."""
        flying = flying_job(job_id, direction, blocks, chunks, one_block_layout(len(self.kinds)))
        rubbish, fail = [RUBBISH] * CHUNK, self._fail if flying.is_load else NOTHING_FAILS
        result = self.place.copy(self.view.life, flying.job, self.blocks, rubbish, fail)
        ended = transfer_result(flying, result)
        if ended.end is not None:
            meta.ends.append(ended.end)
        meta.mark_completed(job_id)
        return set(ended.lost_blocks)

    def _fail(self) -> Refusal:
        """Why a chunk does not come: half of the lost are damaged, and gone for all."""
        if self.rng.random() >= self.failing:
            return Refusal.NONE
        return Refusal.CORRUPT if self.rng.random() < 0.5 else Refusal.COPY_FAILED

    @property
    def num_loaded(self) -> int:
        """Chunks that were to be loaded, also in vain."""
        return self.place.num_loaded + self.place.num_failed

    @property
    def num_failed(self) -> int:
        return self.place.num_failed

    @property
    def num_stored(self) -> int:
        return self.place.num_stored

    def _take_blocks(self, output: Any) -> None:
        """What a worker does first with a step: it notes blocks, and copies some."""
        new = {each.req_id for each in output.scheduled_new_reqs}
        for request_id, groups, is_resumed in yield_req_data(output):
            if request_id in new or is_resumed:
                self.tables[request_id] = tuple([] for _ in self.kinds)
            for table, blocks in zip(self.tables[request_id], groups or (), strict=False):
                table += blocks
        for copy in output.kv_cache_block_copies or ():
            self.blocks[copy.dst_block_id] = list(self.blocks[copy.src_block_id])

    def _computed(self, request_id: str, count: int) -> Computed:
        """What a worker makes of so many tokens of a request."""
        request = self.asked[request_id].request
        end = self._ends.pop(request_id, request.num_computed_tokens)
        return Computed(list(request.all_token_ids), request.num_prompt_tokens, end - count, end)

    def _compute(self, request_id: str, count: int) -> list[int]:
        step = self._computed(request_id, count)
        groups = [*zip(self.tables[request_id], self.kinds, strict=True)]
        is_right = all(self._is_there(step, table, kind) for table, kind in groups)
        for table, kind in groups:
            self._write(step, table, kind, is_right)
        if step.end < len(step.tokens):
            return []
        return [next_token(step.tokens) if is_right else WRONG]

    def _is_there(self, step: Computed, table: list[int], kind: KVCacheSpec) -> bool:
        """Whether a group has all that is needed of what is before a step's tokens."""
        if isinstance(kind, MambaSpec):
            before = step.begin - 1
            return before < 0 or self.blocks[table[before // CHUNK]][0] == step.names[before]
        size = kind.block_size
        return all(
            self.blocks[table[at // size]][at % size] == step.names[at]
            for at in seen(kind, step.begin, step.num_prompt)
        )

    def _write(self, step: Computed, table: list[int], kind: KVCacheSpec, is_right: bool) -> None:
        if isinstance(kind, MambaSpec):
            for column, last in states_of(step, kind, self.scheduler).items():
                self.blocks[table[column]] = [step.names[last] if is_right else RUBBISH] * CHUNK
            return
        size = kind.block_size
        for at in range(step.begin, step.end):
            block = self.blocks.setdefault(table[at // size], [RUBBISH] * size)
            # Blocks of all groups are of one size in bytes, and go from one to another.
            block += [RUBBISH] * (size - len(block))
            block[at % size] = step.names[at] if is_right else RUBBISH


@dataclass
class Held:
    """What a worker knows of a request: its tokens, also those that it has said itself."""

    tokens: list[int]
    num_prompt: int
    num_computed: int


class AheadWorld(World):
    """It steps as vLLM's EngineCore does, and its worker knows what vLLM's model runners know.

    With async scheduling a step is scheduled, and computed, before the scheduler has looked at the
    one before it. The first model runner is told how far requests are, and anew what they have said
    when they come back; the second one only counts on.
    """

    def __init__(
        self,
        model: Path,
        seed: int,
        failing: float,
        *,
        is_async: bool,
        is_second: bool,
        **more: Any,
    ) -> None:
        super().__init__(model, seed, failing, is_async=is_async, **more)
        self.scheduler.use_v2_model_runner = self._is_second = is_second
        # With steps ahead vLLM keeps the blocks of who is preempted, or has ended, until those are
        # over; without, and in some engines with them, it gives them away at once.
        self.scheduler.defer_block_free = is_async and seed % 3 > 0
        self._most_ahead = 1 if is_async else 0
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._held: dict[str, Held] = {}

    def _has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._stores)

    def step(self, *aborted: str) -> None:
        if self._has_work():
            output = self._schedule()
            self._under_way.append((output, self._execute(output)))
            if len(self._under_way) <= self._most_ahead and output.num_scheduled_tokens:
                return
        if self._under_way:
            output, result = self._under_way.popleft()
            self._end_step(output, result, aborted)

    def run(self, most: int = 400) -> None:
        super().run(most)
        while self._under_way:
            self.step()

    def reset_running(self) -> None:
        """Forget vLLM's cache, between two steps; all requests begin anew."""
        with suppress(RuntimeError):  # of blocks that it keeps until a step is over
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def check_rest(self) -> None:
        """Nothing is left of loads that are over."""
        layered = self.connector._loading
        assert isinstance(layered, LayeredScheduling)
        left = layered._steps, *vars(layered.loads).values()
        assert [each for each in left if not isinstance(each, int) and each] == []

    def _take_blocks(self, output: Any) -> None:
        super()._take_blocks(output)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self._is_second else new.prompt_token_ids
            num_prompt = len(new.prompt_token_ids)
            self._held[new.req_id] = Held(list(tokens), num_prompt, new.num_computed_tokens)
        if self._is_second:
            return
        cached = output.scheduled_cached_reqs
        told = zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )
        for request_id, num_computed, num_said in told:
            held = self._held[request_id]
            held.num_computed = num_computed
            if request_id in cached.resumed_req_ids:
                held.tokens = list(cached.all_token_ids.get(request_id, held.tokens))
            elif num_said < len(held.tokens) - held.num_prompt - self._most_ahead:
                del held.tokens[held.num_prompt + num_said :]

    def _computed(self, request_id: str, count: int) -> Computed:
        held = self._held[request_id]
        begin, held.num_computed = held.num_computed, held.num_computed + count
        if held.num_computed > len(held.tokens):
            raise WrongAnswerError(f"{request_id}: places that it has no tokens for")
        return Computed(list(held.tokens), held.num_prompt, begin, held.num_computed)

    def _compute(self, request_id: str, count: int) -> list[int]:
        said = super()._compute(request_id, count)
        self._held[request_id].tokens += said
        return said


@dataclass(frozen=True)
class Computed:
    """Tokens of a request that are computed in a step, from `begin` to before `end`."""

    tokens: list[int]
    num_prompt: int
    begin: int
    end: int

    @cached_property
    def names(self) -> list[int]:
        """By place, of the prefix that ends with the token there."""
        return prefix_names(self.tokens)


def states_of(step: Computed, kind: MambaSpec, scheduler: Scheduler) -> dict[int, int]:
    """By place in the block table, the last token of the states that a step leaves behind: where it
    ends, and where the layer is told to save another one.
    """
    hash_tokens = scheduler.hash_block_size
    (offset,), (column,) = compute_mamba_prefill_checkpoints(
        [step.end],
        [step.end - step.begin],
        hash_block_size=hash_tokens,
        mamba_block_size=CHUNK,
        checkpoint_alignment=kind.prefill_checkpoint_alignment,
        drop_eagle_block=False,
        cache_hit_alignment_tokens=hash_tokens,
    )
    inside = {column: step.begin + offset - 1} if kind.num_prefill_checkpoint_blocks else {}
    inside.pop(-1, None)
    return {**inside, (step.end - 1) // CHUNK: step.end - 1}


def one_block_layout(num_groups: int) -> KVLayout:
    """Of a KV cache where a block is a chunk."""
    numbers = list(range(num_groups))
    tensors = [TensorLayout(0, 10, 64, 64) for _ in numbers]
    return KVLayout("memfd", 1, 1, tensors, numbers, [[at] for at in numbers])


_CONFIGS: dict[tuple[Path, bool], Any] = {}


def kv_cache(
    num_blocks: int, kinds: Sequence[KVCacheSpec], retention_interval: int | None
) -> KVCacheConfig:
    """Of a layer for each KV group."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"l{at}"], kind) for at, kind in enumerate(kinds)],
        prefix_cache_retention_interval=retention_interval,
    )


def make_scheduler(model: Path, cache: KVCacheConfig, *, is_async: bool) -> Scheduler:
    """No more than 64 tokens a step."""
    if (model, is_async) not in _CONFIGS:
        _CONFIGS[model, is_async] = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            async_scheduling=is_async,
            max_model_len=MAX_LENGTH,
            block_size=CHUNK,
            max_num_batched_tokens=MOST_TOKENS,
            max_num_seqs=MOST_RUNNING,
            enforce_eager=True,
            dtype="float32",
        ).create_engine_config()
    config = _CONFIGS[model, is_async]
    config.cache_config.num_gpu_blocks = cache.num_blocks
    config.cache_config.mamba_cache_mode = "align" if cache.has_mamba_layers else "none"
    return (AsyncScheduler if is_async else Scheduler)(
        config,
        cache,
        StructuredOutputManager(config),
        block_size=max(group.kv_cache_spec.block_size for group in cache.kv_cache_groups),
        hash_block_size=CHUNK,
    )


def make_connector(
    manager: RayOffloadingManager,
    kinds: Sequence[KVCacheSpec],
    retention_interval: int | None,
    share: float,
) -> RayKVConnector:
    """The scheduler's side, without Ray."""
    connector: Any = RayKVConnector.__new__(RayKVConnector)
    connector.connector_scheduler = vllm_scheduler(
        manager, kinds, retention_interval=retention_interval
    )
    connector._windows = Windows(connector._tables, share)
    connector.raykv_weights = WeightChanges({}, manager, connector._tables)
    connector.connector_worker = None
    connector._manager = manager
    connector._runtime = None
    connector._steps = StepTimes()
    connector._connector_metadata = None
    connector.__dict__["_bounding_group_ids"] = ()
    evict = partial(evict_blocks, connector)
    connector._loading = LayeredScheduling(manager.layered, connector._tables, evict)
    manager.view.accounts.tokens_per_chunk = CHUNK
    made: RayKVConnector = connector
    return made


def bind(connector: RayKVConnector, scheduler: Scheduler) -> None:
    """Put a connector in its place, as vLLM's scheduler does it."""
    connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    scheduler.connector = connector
    scheduler.recompute_kv_load_failures = True
    watch_scheduler(RayKVConnector)
