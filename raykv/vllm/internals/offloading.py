"""What vLLM keeps of the requests and jobs of its offloading connector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raykv.protocol.descriptions import ChunkGroup, Description, pack_tokens


class Inner:
    """An attribute of one of vLLM's objects, to be read and set under a name of ours."""

    def __init__(self, name: str) -> None:
        self.attribute = name

    def __get__(self, tables: Any, _owner: type) -> Any:
        return getattr(tables.owner, self.attribute)

    def __set__(self, tables: Any, value: Any) -> None:
        setattr(tables.owner, self.attribute, value)


# The scheduler's side


@dataclass(eq=False)
class OffloadedRequest:
    """Of vLLM's `RequestOffloadState`, the owner."""

    owner: Any

    request = Inner("req")
    context = Inner("req_context")
    """What the manager is given."""
    most_loaded = Inner("max_load_tokens")
    most_stored = Inner("max_offload_tokens")
    """What the client allows; None: all."""
    jobs = Inner("transfer_jobs")
    """Numbers of its jobs that have not ended."""
    is_signaled = Inner("finished_signaled")
    """Whether the manager has been told that it has finished."""

    def name_chunks(self) -> None:
        """Have vLLM make keys of those of its blocks that have got hashes."""
        self.owner.update_offload_keys()

    @property
    def keys(self) -> list[Sequence[Any]]:
        """Of its chunks, for each KV group."""
        return [state.offload_keys for state in self.owner.group_states]

    @property
    def has_blocks(self) -> bool:
        """Whether any are noted."""
        return any(state.block_ids for state in self.owner.group_states)


@dataclass(eq=False)
class OffloadJob:
    """Of vLLM's `TransferJobStatus`, the owner."""

    owner: Any

    request_id = Inner("req_id")
    keys = Inner("keys")
    is_store = Inner("is_store")
    fenced = Inner("fenced_block_ids")
    """Blocks that it reads and vLLM may give to others at any time; None: none."""
    fenced_at_end = Inner("deferred_fence_block_ids")
    """Those of which that is so from the request's end on."""


@dataclass(eq=False)
class SchedulerTables:
    """Of vLLM's `OffloadingConnectorScheduler`, the owner."""

    owner: Any

    manager = Inner("manager")
    requests = Inner("_req_status")
    """vLLM's objects by request, until that and its last job have ended; see `find`."""
    jobs = Inner("_jobs")
    """vLLM's objects by number, of jobs that have not ended; see `known_jobs`."""
    next_job = Inner("_job_counter")
    first_job = Inner("_stale_job_threshold")
    """vLLM ignores the ends of jobs before this one, because there was a reset."""
    loads = Inner("_current_batch_load_jobs")
    """A `TransferJob` for each load that goes out with this step's metadata."""
    flushed = Inner("_current_batch_jobs_to_flush")
    """Stores that the workers wait for before this step."""
    allocated = Inner("_current_batch_allocated_block_ids")
    """Blocks that were given to requests in this step."""
    loading = Inner("_chunks_being_loaded")
    """Chunks that are being loaded; None where vLLM has no prefix cache of its own."""
    fences = Inner("_block_id_to_pending_jobs")
    """By block: stores that are to be waited for before it is used anew."""

    @property
    def fence(self) -> dict[int, int]:
        """Jobs from before a reset until whose ends vLLM steps on; 0.32 does not."""
        found: dict[int, int] = getattr(self.owner, "_reset_fence", {})
        return found

    @cached_property
    def groups(self) -> list[ChunkGroup]:
        """Those that are offloaded."""
        return [
            ChunkGroup(each.group_idx, each.tokens_per_chunk, each.sliding_window_size_in_chunks)
            for each in self.owner.config.kv_group_configs
        ]

    @property
    def tokens_per_prefix(self) -> int:
        """The most tokens of a chunk of those groups that are loaded as whole prefixes; of all
        groups if there are none.
        """
        prefixes = [each for each in self.groups if each.window is None]
        return max(each.tokens for each in prefixes or self.groups)

    @property
    def tokens_per_block(self) -> int:
        """How many tokens a block of the first group has."""
        return int(self.owner.config.kv_group_configs[0].tokens_per_block)

    @property
    def kinds(self) -> dict[int, Any]:
        """What vLLM says of each KV group's cache."""
        return {each.group_idx: each.kv_cache_spec for each in self.owner.config.kv_group_configs}

    @property
    def states(self) -> list[int]:
        """The KV groups with recurrent states."""
        from vllm.v1.kv_cache_interface import MambaSpec

        return [group for group, kind in self.kinds.items() if isinstance(kind, MambaSpec)]

    @property
    def blocks_per_chunk(self) -> int:
        """How many of vLLM's blocks a chunk has."""
        return int(self.owner.config.blocks_per_chunk)

    def choose_blocks(self, chosen: Mapping[int, Callable[[Any], Any]]) -> None:
        """Have others say which blocks of some KV groups are offered to be stored.

        `chosen` has, by group, what stands for its manager class from now on, given that.
        """
        config = self.owner.config
        groups = [
            each._replace(manager_cls=chosen[each.group_idx](each.manager_cls))
            if each.group_idx in chosen
            else each
            for each in config.kv_group_configs
        ]
        self.owner.config = config._replace(kv_group_configs=tuple(groups))

    @property
    def tokens_per_hash(self) -> int:
        """How many tokens a hash of a request names."""
        return int(self.owner.config.tokens_per_hash)

    def find(self, request_id: str) -> OffloadedRequest | None:
        """A request that is known."""
        found = self.requests.get(request_id)
        return None if found is None else OffloadedRequest(found)

    def known_requests(self) -> dict[str, OffloadedRequest]:
        """All that are known now."""
        return {name: OffloadedRequest(each) for name, each in self.requests.items()}

    def known_jobs(self) -> dict[int, OffloadJob]:
        """All that have not ended."""
        return {number: OffloadJob(each) for number, each in self.jobs.items()}

    def pop_job(self, number: int) -> OffloadJob | None:
        """Forget a job, whether it goes out with this step or went before."""
        self.loads.pop(number, None)
        found = self.jobs.pop(number, None)
        return None if found is None else OffloadJob(found)

    def loads_of(self, request_id: str) -> list[int]:
        """Numbers of a request's loads that go out with this step's metadata."""
        return [number for number, job in self.loads.items() if job.req_id == request_id]

    def is_loading(self, request_id: str) -> bool:
        """Whether a load of the request has not ended."""
        request = self.find(request_id)
        numbers = () if request is None else request.jobs
        return any(number in self.jobs and not self.jobs[number].is_store for number in numbers)

    def put_aside(self, request: Any) -> OffloadedRequest | None:
        """Take an earlier request with the id of a new one out of its way; None: there is none.

        Its jobs go on under another name, and end as they would have.
        """
        name = request.request_id
        earlier = self.find(name)
        if earlier is None or earlier.request is request:
            return None
        del self.requests[name]
        if earlier.jobs:
            other = f"{name}, before job {self.next_job}"
            self.requests[other] = earlier.owner
            for number in earlier.jobs:
                self.jobs[number].req_id = other
        return earlier

    def ended(self, scheduled: Any) -> set[str]:
        """Requests that have ended before this step, but for those whose id a new one has."""
        names = scheduled.finished_req_ids
        if not names:
            return set()
        known = {name: self.find(name) for name in names}
        return {name for name, each in known.items() if each is None or each.request.is_finished()}

    def seen(self, scheduled: Any, ended: Set[str]) -> Any:
        """What was scheduled, where those have `ended`, without the ends of requests whose id a new
        one has, and without the preempted requests of which a load has not ended.

        Of the latter vLLM asserts that there are none: 0.32 of those that load again in the same
        step, as after a reset, and both of those that were preempted with the step of their load
        under way. It would wait for their stores, but who loads has none: a load ends with its
        step, or has not begun.
        """
        preempted = scheduled.preempted_req_ids or ()
        loading = set(filter(self.is_loading, preempted))
        if not loading and ended == (scheduled.finished_req_ids or set()):
            return scheduled
        preempted = {*preempted} - loading
        return replace(scheduled, preempted_req_ids=preempted, finished_req_ids=ended)

    def hold_stores(self, request_ids: Iterable[str]) -> list[tuple[OffloadedRequest, int | None]]:
        """Have vLLM offer nothing of these requests for now, with what was allowed them; what it
        offers not it offers later.
        """
        found = [*filter(None, map(self.find, request_ids))]
        held = [(each, each.most_stored) for each in found]
        for each in found:
            each.most_stored = 0
        return held

    def adopt(self, request: Any) -> None:
        """Make a request known, if it is not yet, as one without wishes."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
        from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext

        if request.request_id not in self.requests:
            context, nothing = ReqContext(request.request_id), RequestOffloadingContext()
            state = scheduler.RequestOffloadState(self.owner.config, request, context, nothing)
            self.requests[request.request_id] = state

    def forget_blocks(self, request_ids: Iterable[str]) -> None:
        """All blocks of these requests come anew with this step.

        0.32 adds them to those that it has of a prompt that comes bit by bit, so that places in the
        prompt no longer fit blocks; later versions do this themselves.
        """
        for request in filter(None, map(self.requests.get, request_ids)):
            for state in request.group_states:
                state.block_ids.clear()

    def forget_preempted(self, scheduled: Any) -> None:
        """Have no block offered again of requests that are preempted in this step: others have it.

        vLLM keeps their ids until the request runs again. With steps ahead its last token may be on
        its way, which ends it: then its last chunk would be stored from a block of another one.
        """
        self.forget_blocks(scheduled.preempted_req_ids or ())

    def forget_blocks_left_behind(self, request_ids: Iterable[str]) -> None:
        """Have no block offered again that a window has left behind: others may have it by now.

        vLLM keeps the ids of those that it has offered, and does not notice when they are given
        away. It offers some again after a reset, and those before a request's end where blocks of
        KV groups differ in size.
        """
        config = self.owner.config
        for request in filter(None, map(self.requests.get, request_ids)):
            for group, state in zip(config.kv_group_configs, request.group_states, strict=True):
                if group.sliding_window_size_in_chunks is not None:
                    offered = state.next_stored_chunk_idx * config.blocks_per_chunk
                    count = min(offered, len(state.block_ids))
                    state.block_ids[:count] = [0] * count

    def replace_tracker(self, tracker: Any) -> None:
        """Have vLLM call this tracker for chunks."""
        # From 0.33 on: what the KV groups are, for events of chunks that were not described.
        tracker._group_specs = getattr(self.owner._events_tracker, "_group_specs", {})
        self.owner._events_tracker = tracker


def scheduler_side(connector: Any) -> Any:
    """To whom vLLM's `OffloadingConnector` leaves what it does in EngineCore."""
    return getattr(connector, "connector_scheduler", None)


def described_chunk(
    tracker: Any, request: Any, group_config: Any, chunk_idx: int, **named: Any
) -> Description:
    """What vLLM's `OffloadingEventsTracker` would say in its events of a chunk that is `named` so:
    by namespace, key and model.
    """
    found = tracker._build_event_metadata(request, group_config, chunk_idx)
    parent = found.parent_block_hash
    return Description(
        parent=None if parent is None else bytes(parent),
        inner=b"".join(found.block_hashes[:-1]),
        tokens=pack_tokens(found.token_ids),
        block_size=found.block_size,
        kind=found.kv_cache_spec.kv_cache_spec_kind or "",
        lora=found.lora_name,
        **named,
    )


def is_windowed(group_config: Any) -> bool:
    """Whether a KV group, as the tracker is given it, is not loaded as whole prefixes."""
    return group_config.sliding_window_size_in_chunks is not None


def silent() -> dict[str, bool]:
    """What has an `OffloadingEvent` of removed chunks tell no subscriber; 0.32 tells them all."""
    from vllm.v1.kv_offload.base import OffloadingEvent

    return {"metadata_only": True} if "metadata_only" in OffloadingEvent.__annotations__ else {}


def offloading_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """What vLLM makes a spec from, as a connector's process has it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    return config.build_offloading_config(vllm_config, kv_cache_config)


def window_in_chunks(kv_cache_spec: Any, tokens_per_chunk: int) -> int | None:
    """How many chunks of a KV group a prefix needs, as vLLM's lookups have it; None: all."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, scheduler

    # 0.32 has it in `scheduler`.
    owner = config if hasattr(config, "get_sliding_window_size_in_chunks") else scheduler
    found: int | None = owner.get_sliding_window_size_in_chunks(kv_cache_spec, tokens_per_chunk)
    return found


def hand_over_every_state(kv_cache_config: Any) -> None:
    """Have vLLM hand over the recurrent state at the end of each step, where by default it does so
    at the ends of prompts only; before it makes its cache.
    """
    if kv_cache_config.prefix_cache_retention_interval == 0:
        kv_cache_config.prefix_cache_retention_interval = None


def canonical_format(kv_cache_layout: str) -> str:
    """vLLM's name of how canonical pages lie."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

    return str(canonical_mapping.canonical_format_id(kv_cache_layout))


def evict_blocks(connector: Any, block_ids: Collection[int]) -> None:
    """Take blocks out of vLLM's own prefix cache; one that is in use only loses its name."""
    connector._kv_cache_manager.evict_blocks(block_ids)


# The workers' side


@dataclass(eq=False)
class WorkerTables:
    """Of vLLM's `OffloadingConnectorWorker`, the owner."""

    owner: Any

    loads = Inner("_load_jobs")
    """The request of each load that has not ended."""
    unsubmitted = Inner("_unsubmitted_store_jobs")
    """Stores that are left to the next step: number, blocks and places in the pool."""
    is_store_writer = Inner("_is_store_writer")
    """Whether this rank stores; the others only confirm."""
    confirmed = Inner("_connector_worker_meta")
    """Confirms the end of jobs in which this rank has no part."""


def worker_side(connector: Any) -> Any:
    """To whom vLLM's `OffloadingConnector` leaves what it does in a worker's process."""
    return getattr(connector, "connector_worker", None)


def replace_worker_side(connector: Any, side: Any) -> None:
    """Have it leave that to another one."""
    connector.connector_worker = side


# In the API server's process


def count_by_transfer_type(metrics: Any) -> Any:
    """Have vLLM's older metrics of transfers count too; returns `metrics`.

    `vllm:kv_offload_total_bytes`, `_total_time` and `_size` with their label `transfer_type` are
    what dashboards of vLLM's offloading show. vLLM exports them for every spec, and feeds them for
    the subclasses of its own alone, from the same numbers as those that take their place.
    """
    metrics._observe_deprecated_metrics = True
    return metrics
