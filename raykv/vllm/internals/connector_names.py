"""What RayKV touches of vLLM's offloading connector: the first part of the table in `names`."""

from __future__ import annotations

from raykv.vllm.internals.touched import LAYERWISE, SCHEDULER, WORKER, Touched

KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
OFFLOADING = f"{KV_CONNECTOR}.v1.offloading"
OFFLOADING_SCHEDULER = f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler"
OFFLOADING_WORKER = f"{OFFLOADING}.worker:OffloadingConnectorWorker"
TRACKER = f"{OFFLOADING}.events:OffloadingEventsTracker"

REFUSED = "the engine does not start"

CONNECTOR_TABLE = (
    Touched(
        f"{OFFLOADING}_connector:OffloadingConnector",
        "connector_scheduler",
        "the scheduler's side, whose tables are read after a hook that failed, and before some",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}_connector:OffloadingConnector",
        "connector_worker",
        "RayKV's worker side takes the place of vLLM's, which asserts that no load fails",
        REFUSED,
        WORKER,
    ),
    Touched(
        OFFLOADING_SCHEDULER,
        "config manager",
        "sizes of the KV groups' chunks, and the manager that the spec has made",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        OFFLOADING_SCHEDULER,
        "_req_status _jobs _job_counter _stale_job_threshold _current_batch_load_jobs "
        "_current_batch_jobs_to_flush _current_batch_allocated_block_ids _chunks_being_loaded "
        "_block_id_to_pending_jobs",
        "tables of requests and jobs, made consistent again after a hook that failed",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        OFFLOADING_SCHEDULER,
        "_reset_fence",
        "jobs from before a reset for whose ends the engine steps on",
        "there is nothing to wait for: 0.32 ignores such jobs",
        since="0.33",
    ),
    Touched(
        OFFLOADING_SCHEDULER,
        "_events_tracker",
        "the tracker that is called for each chunk with its request, replaced by RayKV's",
        "a warning: chunks are described to nobody, and vLLM's own events have none of them",
    ),
    Touched(
        f"{OFFLOADING}.scheduler:SchedulerOffloadConfig",
        "blocks_per_chunk kv_group_configs tokens_per_hash",
        "how many tokens a chunk of a KV group has, and a hash",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.scheduler:GroupOffloadConfig",
        "group_idx tokens_per_block tokens_per_chunk sliding_window_size_in_chunks "
        "kv_cache_spec manager_cls",
        "the same, by KV group, and who says which blocks are offered to be stored",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.scheduler",
        "get_sliding_window_size_in_chunks",
        "how many chunks of a KV group a prefix needs, as lookups have it",
        REFUSED,
        SCHEDULER,
        until="0.33",
    ),
    Touched(
        f"{OFFLOADING}.config",
        "get_sliding_window_size_in_chunks",
        "the same",
        REFUSED,
        SCHEDULER,
        since="0.33",
    ),
    Touched(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "reachable_block_mask",
        "which blocks vLLM keeps; RayKV stores more of sliding windows",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "prefix_cache_retention_interval",
        "whether vLLM hands over recurrent states where steps end",
        "those at prompts' ends alone are stored",
    ),
    Touched(
        f"{OFFLOADING}.scheduler:RequestOffloadState",
        "finished_signaled group_states max_load_tokens max_offload_tokens req req_context "
        "transfer_jobs update_offload_keys",
        "a request's chunks, asked for before it is scheduled, and what a mend leaves of it",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.scheduler:RequestGroupState",
        "block_ids next_stored_chunk_idx offload_keys",
        "the same, by KV group, and which of its blocks are offered, if they are its own still",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.scheduler:TransferJobStatus",
        "deferred_fence_block_ids fenced_block_ids is_store keys req_id",
        "jobs, from which a mend derives all else",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.config",
        "build_offloading_config",
        "what vLLM makes a spec from, so that RayKV names chunks by the same",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        f"{OFFLOADING}.canonical_mapping",
        "canonical_format_id",
        "the version of canonical pages, which belongs into the namespace",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        OFFLOADING_WORKER,
        "build_connector_worker_meta get_finished handle_preemptions prepare_store_kv "
        "start_kv_transfers",
        "overridden: loads fail without an assertion, and each job ends",
        REFUSED,
        WORKER,
    ),
    Touched(
        OFFLOADING_WORKER,
        "_connector_worker_meta _is_store_writer _load_jobs _unsubmitted_store_jobs "
        "kv_cache_config spec worker",
        "jobs between two steps, refused after a hook that failed, and RayKV's own worker",
        REFUSED,
        WORKER,
    ),
    Touched(
        TRACKER,
        "record_store record_lookup record_partial_store record_partial_lookup take_events",
        "overridden, or called: each chunk that is stored or found, with its request",
        "a warning: chunks are described to nobody, and vLLM's own events have none of them",
    ),
    Touched(
        TRACKER,
        "_build_event_metadata",
        "a chunk's tokens and hashes, for the readers of RayKV's events",
        "a guard reports it: chunks are described to nobody",
    ),
    Touched(
        f"{OFFLOADING}.events:_OffloadEventMetadata",
        "block_hashes block_size kv_cache_spec lora_name parent_block_hash token_ids",
        "the same",
        "the same",
    ),
    Touched(
        f"{OFFLOADING}.events:OffloadingEventGroupSpec",
        "kv_cache_spec_kind",
        "the same",
        "the same",
    ),
    Touched(
        TRACKER,
        "_group_specs",
        "kinds of the KV groups, for events of chunks that were not described",
        "such events have no kind",
        since="0.33",
    ),
    Touched(
        f"{OFFLOADING}.metrics:OffloadPromMetrics",
        "_observe_deprecated_metrics",
        "vLLM's older metrics of transfers, which its dashboards show, count too",
        "they stay at zero",
    ),
    Touched(
        f"{KV_CONNECTOR}.factory:KVConnectorFactory",
        "_registry",
        "whether the connectors are registered: plugins are loaded more than once",
        "they are registered anew, which vLLM refuses and RayKV ignores",
    ),
    Touched(
        "vllm.config:VllmConfig",
        "_post_init_kv_transfer_config",
        "wrapped: arguments that RayKV can't be used with are refused before any process starts",
        "the connectors refuse them later, but not kv_offloading_size, which replaces them",
    ),
    Touched(
        f"{KV_CONNECTOR}.v1.multi_connector:MultiConnector",
        "__init__",
        "wrapped: with RayKV among its connectors, requests are computed whose loads fail",
        "such a request ends, unless its user sets kv_load_failure_policy=recompute",
    ),
    Touched(
        f"{KV_CONNECTOR}.v1.multi_connector:MultiConnector",
        "_connectors",
        "RayKV's connector among others hears of calls that change weights",
        "the workers notice most of them a step later",
    ),
    Touched(
        f"{KV_CONNECTOR}.v1.base:KVConnectorBase_V1",
        "_kv_cache_manager",
        "vLLM's prefix cache, from which blocks are evicted that did not come",
        REFUSED,
        LAYERWISE,
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "evict_blocks get_block_ids",
        "the same, and which blocks requests have",
        REFUSED,
        LAYERWISE,
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "_preempt_request",
        "requests are preempted whose loads failed within their step",
        REFUSED,
        LAYERWISE,
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "connector kv_cache_manager requests running prev_step_scheduled_req_ids",
        "the same: who they are, and what their workers know of them",
        "a guard reports it: vLLM's own recovery computes them, on its first model runner and "
        "without steps ahead of others",
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "_handle_blocked_waiting_request",
        "wrapped: a request whose load brought nothing waits like one that has never loaded",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "_inflight_prefills",
        "the same: no room is kept for it",
        "a guard reports it: it is never admitted where it fits once and not twice",
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "reset_prefix_cache failed_recving_kv_req_ids finished_recving_kv_req_ids "
        "kv_holding_waiting waiting",
        "wrapped: a reset of running requests takes back those too whose load has ended",
        "a guard reports it: a pause that keeps requests does not end while a prompt is loaded",
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "free",
        "the same: blocks of requests that wait",
        "the same",
    ),
    Touched(
        "vllm.v1.request:RequestStatus",
        "WAITING WAITING_FOR_REMOTE_KVS PREEMPTED",
        "the same: how requests wait",
        "the same",
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "_inflight_prefill_reserved_blocks",
        "wrapped: room is kept for the blocks that windows still need of prefills under way",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "coordinator",
        "the same: the blocks that requests hold, by KV group",
        "a guard reports it: loads of models with windows may wait for each other's blocks",
    ),
    Touched(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        "single_type_managers",
        "the same",
        "the same",
    ),
    Touched(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "block_size max_admission_blocks_per_request req_to_blocks",
        "the same",
        "the same",
    ),
    Touched(
        "vllm.v1.request:Request",
        "num_stale_output_tokens drop_stale_output",
        "the same: what a step says counts for nothing that computed with what did not come",
        "the same",
    ),
    Touched(
        "vllm.v1.core.sched.output:CachedRequestData",
        "req_ids new_block_ids resumed_req_ids",
        "blocks that steps give to requests whose loads, or those of other connectors, are under "
        "way",
        "a guard reports it: the step loads and stores nothing",
    ),
)
"""Of vLLM's offloading connector and what it is part of."""
