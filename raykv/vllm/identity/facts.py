"""What a key means: every fact that must be equal before two engines may share KV bytes.

The namespace is the digest of `FACTS` and of nothing else. A *value* fact changes the numbers in
the KV cache, a *layout* fact where they lie in a chunk, a *key* fact what the chunks are called.
Where a fact is no plain field it has a reader, whose docstring has the details.

`CANNOT_MATTER` has all other fields of vLLM's configuration classes, each with the reason. Rounding
is one: which kernel adds up the same numbers in which order, on how many ranks, is left out on
purpose, as vLLM's own prefix cache and its disaggregated serving leave it out.

A field of a class that neither list has fails `tests/unit/vllm/identity/test_facts.py`, and so do a
fact that does not change the namespace, and a field in the second list that does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.ids import Namespace
from raykv.prompts.block_hashes import RANDOM
from raykv.vllm.identity import readers
from raykv.vllm.identity.readers import ReadableEngine, joined, plain, short, trait_of_seed

LONGEST_TRAIT = 64


class Kind(Enum):
    """What of a chunk a fact changes."""

    VALUE = auto()
    LAYOUT = auto()
    KEY = auto()


@dataclass(frozen=True)
class Fact:
    """One row. `fields` are those of vLLM's configuration classes that it stands for.

    With `read` they are all that the reader looks at, or determine it; without, their values as a
    whole are the fact.
    """

    name: str
    kind: Kind
    why: str
    fields: tuple[str, ...] = ()
    read: Callable[[ReadableEngine], Any] | None = None

    def value(self, engine: ReadableEngine) -> Any:
        """The fact as JSON has it; None if there is nothing to say.

        Raises:
            SettingError: it can't be read, and a setting is missing.
        """
        if self.read is not None:
            return plain(self.read(engine))
        found = joined((field.partition(".")[2], field_of(engine, field)) for field in self.fields)
        return next(iter(found.values())) if found and len(self.fields) == 1 else found


VALUE, LAYOUT, KEY = Kind.VALUE, Kind.LAYOUT, Kind.KEY

FACTS: tuple[Fact, ...] = (
    # The model
    Fact(
        "weights",
        VALUE,
        "K and V are made by them: the content, however it is named",
        (
            *("ModelConfig.model", "ModelConfig.model_weights", "ModelConfig.revision"),
            *("LoadConfig.load_format", "LoadConfig.model_loader_extra_config"),
            "LoadConfig.download_dir",
        ),
        readers.weights,
    ),
    Fact("weights_version", VALUE, "the user says they differ", (), readers.weights_version),
    Fact(
        "config",
        VALUE,
        "architecture, sizes, rope and all else, in force after overrides",
        (
            *("ModelConfig.hf_config", "ModelConfig.hf_text_config", "ModelConfig.hf_overrides"),
            *("ModelConfig.hf_config_path", "ModelConfig.config_format"),
        ),
        readers.config,
    ),
    Fact(
        "length",
        VALUE,
        "LongRoPE picks its factors, and Llama 4 its temperature, by the longest prompt",
        ("ModelConfig.max_model_len",),
        readers.length,
    ),
    Fact(
        "implementation",
        VALUE,
        "vLLM's model and Transformers' differ; pooling may be bidirectional",
        ("ModelConfig.model_impl", "ModelConfig.runner", "ModelConfig.convert"),
        readers.implementation,
    ),
    Fact("model_class", VALUE, "other code computes", ("ModelConfig.model_class_overrides",)),
    Fact(
        "code",
        VALUE,
        "the model's own code computes",
        ("ModelConfig.trust_remote_code", "ModelConfig.code_revision"),
        readers.code,
    ),
    Fact("dtype", VALUE, "what is computed in", ("ModelConfig.dtype",)),
    Fact(
        "quantization",
        VALUE,
        "rounds weights and activations",
        ("ModelConfig.quantization", "ModelConfig.quantization_config"),
    ),
    Fact(
        "quantized_kernels",
        VALUE,
        "some of them quantize activations that others leave alone",
        (
            *("KernelConfig.moe_backend", "KernelConfig.linear_backend"),
            "KernelConfig.linear_backend_per_quant",
        ),
    ),
    Fact(
        "window",
        VALUE,
        "which tokens are seen",
        (
            *("ModelConfig.disable_sliding_window", "CacheConfig.sliding_window"),
            *("AttentionConfig.use_non_causal", "CacheConfig.swa_bounded_replay"),
            "CacheConfig.kv_sharing_fast_prefill",
        ),
    ),
    Fact(
        "attention_rounding",
        VALUE,
        "Q in 8 bits, or tokens chosen by coarser scores: more than rounding in later layers",
        (
            *("AttentionConfig.use_prefill_query_quantization", "AttentionConfig.indexer_kv_dtype"),
            *("AttentionConfig.disable_flashinfer_q_quantization",),
            "AttentionConfig.indexer_sparse_logits",
        ),
    ),
    Fact(
        "adapters",
        VALUE,
        "how an adapter is applied; which one it is stands in the keys",
        (
            *("LoRAConfig.lora_dtype", "LoRAConfig.target_modules"),
            *("LoRAConfig.enable_tower_connector_lora", "LoRAConfig.enable_moe_shared_loras"),
            "LoRAConfig.enable_mixed_moe_lora_format",
        ),
        readers.adapters,
    ),
    Fact(
        "multimodal",
        VALUE,
        "what is made of an image or a sound; keys name only what was sent",
        (
            *("MultiModalConfig.mm_processor_kwargs", "MultiModalConfig.media_io_kwargs"),
            *("MultiModalConfig.limit_per_prompt", "MultiModalConfig.mm_device_do_normalize"),
            *("MultiModalConfig.mm_encoder_attn_dtype", "MultiModalConfig.video_pruning_rate"),
            "MultiModalConfig.video_pruning_method",
        ),
    ),
    Fact("processor", VALUE, "the same, by the model's folder", (), readers.processor),
    Fact(
        "encoder_scales",
        VALUE,
        "images in 8 bits",
        ("MultiModalConfig.mm_encoder_fp8_scale_path",),
        readers.scales_of_encoder,
    ),
    Fact(
        "draft",
        VALUE,
        "EAGLE's and MTP's layers, and captured hidden states, are in the chunks, too",
        (
            *("SpeculativeConfig.method", "SpeculativeConfig.model"),
            *("SpeculativeConfig.draft_model_config", "SpeculativeConfig.draft_load_config"),
            *("SpeculativeConfig.num_speculative_tokens", "SpeculativeConfig.parallel_drafting"),
            *("SpeculativeConfig.kv_cache_dtype", "SpeculativeConfig.quantization"),
            *("SpeculativeConfig.attention_backend", "SpeculativeConfig.max_model_len"),
            *("SpeculativeConfig.revision", "SpeculativeConfig.code_revision"),
            "SpeculativeConfig.draft_lm_head_quantization",
        ),
        readers.draft,
    ),
    Fact(
        "diffusion",
        VALUE,
        "tokens see their whole canvas",
        ("DiffusionConfig.canvas_length", "DiffusionConfig.max_denoising_steps"),
    ),
    Fact(
        "states",
        VALUE,
        "how states of Mamba layers are kept and rounded",
        (
            *("MambaConfig.enable_stochastic_rounding", "CacheConfig.mamba_cache_dtype"),
            *("MambaConfig.stochastic_rounding_philox_rounds", "CacheConfig.use_replayssm"),
            *("CacheConfig.mamba_ssm_cache_dtype", "CacheConfig.replayssm_buffer_len"),
            *("CacheConfig.use_kda_recoverssm", "CacheConfig.mamba_cache_mode"),
            "MambaConfig.backend",
        ),
    ),
    Fact(
        "kv_dtype",
        VALUE,
        "rounds K and V; the scales of a quantized cache are weights",
        ("CacheConfig.cache_dtype",),
        readers.kv_dtype,
    ),
    Fact(
        "kv_dtype_skips",
        VALUE,
        "layers that it spares",
        ("CacheConfig.kv_cache_dtype_skip_layers",),
    ),
    Fact(
        "plugins",
        VALUE,
        "workers and platforms of others may do anything",
        ("ParallelConfig.worker_cls", "VllmConfig.additional_config"),
    ),
    Fact("environment", VALUE, "vLLM's variables that change either", (), readers.environment),
    Fact("vllm", VALUE, "kernels and models change between builds", (), readers.vllm),
    # The layout
    Fact(
        "device",
        LAYOUT,
        "kernels of each kind order a page in their way",
        ("DeviceConfig.device", "DeviceConfig.device_type"),
        readers.device,
    ),
    Fact("machine", LAYOUT, "so do instruction sets, on a CPU only", (), readers.machine),
    Fact(
        "attention",
        LAYOUT,
        "back ends order K and V inside a page in their way: the one really chosen",
        (
            *("AttentionConfig.backend", "AttentionConfig.backend_per_kind"),
            "SchedulerConfig.disable_hybrid_kv_cache_manager",
        ),
        readers.attention,
    ),
    Fact("attention_version", LAYOUT, "the same", ("AttentionConfig.flash_attn_version",)),
    Fact(
        "kv_groups",
        LAYOUT,
        "pages: tokens, heads, dimensions, type, padding; which layers, in which order",
        (
            *("CacheConfig.block_size", "CacheConfig.user_specified_block_size"),
            *("CacheConfig.mamba_block_size", "CacheConfig.mamba_page_size_padded"),
            *("CacheConfig.skip_page_size_padded", "CacheConfig.is_attention_free"),
        ),
        readers.kv_groups,
    ),
    Fact(
        "kv_layout",
        LAYOUT,
        "order of dimensions",
        ("CacheConfig.kv_cache_layout",),
        readers.kv_layout,
    ),
    Fact("runner", LAYOUT, "both lay the cache out in their way", (), readers.runner),
    Fact(
        "parallel",
        LAYOUT,
        "which heads and tokens each part has; nothing of it where chunks are canonical",
        (
            *("ParallelConfig.tensor_parallel_size", "ParallelConfig.pipeline_parallel_size"),
            "ParallelConfig.prefill_context_parallel_size",
            "ParallelConfig.decode_context_parallel_size",
            *("ParallelConfig.world_size", "ParallelConfig.cp_kv_cache_interleave_size"),
            "ParallelConfig.dcp_kv_cache_interleave_size",
        ),
        readers.parallel,
    ),
    Fact("replicated", LAYOUT, "one part for all ranks, or one each", (), readers.replicated),
    Fact("blocks_per_chunk", LAYOUT, "RayKV's setting", (), readers.blocks_per_chunk),
    Fact("chunk_format", LAYOUT, "RayKV's own order of pages", (), readers.chunk_format),
    # The keys
    Fact(
        "tokens_per_hash",
        KEY,
        "what a key stands for",
        ("CacheConfig.prefix_match_unit", "CacheConfig.hash_block_size"),
        readers.tokens_per_hash,
    ),
    Fact(
        "hash_algorithm",
        KEY,
        "two hashes must not be compared",
        ("CacheConfig.prefix_caching_hash_algo",),
        readers.hash_algorithm,
    ),
    Fact("hash_seed", KEY, "nor two seeds", (), readers.hash_seed),
)

PLACES: Mapping[str, str] = {
    "VllmConfig": "",
    "ModelConfig": "model_config",
    "MultiModalConfig": "model_config.multimodal_config",
    "CacheConfig": "cache_config",
    "ParallelConfig": "parallel_config",
    "SchedulerConfig": "scheduler_config",
    "DeviceConfig": "device_config",
    "LoadConfig": "load_config",
    "AttentionConfig": "attention_config",
    "MambaConfig": "mamba_config",
    "KernelConfig": "kernel_config",
    "DiffusionConfig": "diffusion_config",
}
"""Where a `VllmConfig` has the classes whose fields are facts without a reader."""


def field_of(engine: ReadableEngine, field: str) -> Any:
    """A field's value as JSON has it; None if this engine or this vLLM lacks it."""
    name, _, attribute = field.partition(".")
    found = engine.vllm
    for step in filter(None, [*PLACES[name].split("."), attribute]):
        found = getattr(found, step, None)
    return plain(found)


CANNOT_MATTER: Mapping[str, tuple[str, ...]] = {
    "parts of the configuration, whose fields are listed one by one": (
        *("VllmConfig.model_config", "VllmConfig.cache_config", "VllmConfig.parallel_config"),
        *("VllmConfig.scheduler_config", "VllmConfig.device_config", "VllmConfig.load_config"),
        *("VllmConfig.attention_config", "VllmConfig.mamba_config", "VllmConfig.kernel_config"),
        *("VllmConfig.lora_config", "VllmConfig.speculative_config", "VllmConfig.diffusion_config"),
        *("ModelConfig.multimodal_config", "VllmConfig.compilation_config"),
        *("VllmConfig.kv_transfer_config", "VllmConfig.offload_config", "VllmConfig.engram_config"),
    ),
    "what is logged, measured, reported or watched": (
        *("VllmConfig.observability_config", "ObservabilityConfig.*", "VllmConfig.logging_config"),
        *("LoggingConfig.*", "VllmConfig.profiler_config", "ProfilerConfig.*"),
        *("VllmConfig.kv_events_config", "KVEventsConfig.*", "VllmConfig.instance_id"),
        *("ParallelConfig.enable_fault_tolerance", "ParallelConfig.fault_tolerance_config"),
        *("FaultToleranceConfig.*", "VllmConfig.watchdog_config", "WatchdogConfig.*"),
        *("VllmConfig.shutdown_timeout", "LoadConfig.use_tqdm_on_load"),
        *("ModelConfig.served_model_name", "AuxOutputConfig.*", "VllmConfig.aux_output_config"),
    ),
    "which tokens are chosen once the logits are there, and what is reported of them": (
        *("VllmConfig.structured_outputs_config", "StructuredOutputsConfig.*"),
        *("VllmConfig.reasoning_config", "ReasoningConfig.*", "VllmConfig.watermark_config"),
        *("WatermarkConfig.*", "ModelConfig.seed", "ModelConfig.return_sampling_mask"),
        *("ModelConfig.max_logprobs", "ModelConfig.logprobs_mode", "ModelConfig.use_fp64_gumbel"),
        *("ModelConfig.enable_trace_replay", "ModelConfig.generation_config"),
        *("ModelConfig.override_generation_config", "ModelConfig.logits_processors"),
        *("ModelConfig.io_processor_plugin", "ModelConfig.pooler_config", "PoolerConfig.*"),
        "ParallelConfig.enable_batch_sharded_sampling",
    ),
    "makes token ids, which are in the keys, and no KV": (
        *("ModelConfig.tokenizer", "ModelConfig.tokenizer_mode", "ModelConfig.tokenizer_revision"),
        *("ModelConfig.skip_tokenizer_init", "ModelConfig.renderer_num_workers"),
        "MultiModalConfig.interleave_mm_strings",
    ),
    "which inputs are allowed; what is given is in the keys": (
        *("ModelConfig.allowed_local_media_path", "ModelConfig.allowed_media_domains"),
        *("ModelConfig.enable_prompt_embeds", "MultiModalConfig.language_model_only"),
        *("MultiModalConfig.enable_mm_embeds", "MultiModalConfig.allow_missing_mm_embeddings"),
        *("MultiModalConfig.mm_hasher_algorithm", "LoRAConfig.default_mm_loras"),
    ),
    "how things are fetched and read; what is read counts": (
        *("ModelConfig.hf_token", "LoadConfig.safetensors_load_strategy", "LoadConfig.device"),
        *("LoadConfig.safetensors_prefetch_num_threads", "LoadConfig.pt_load_map_location"),
        *("LoadConfig.safetensors_prefetch_block_size", "LoadConfig.ignore_patterns"),
        *("ModelConfig.word_embeddings_untied_by_checkpoint", "ModelConfig.is_submodel_config"),
        *("ModelConfig.allow_deprecated_quantization", "VllmConfig.quant_config"),
        *("ParallelConfig.max_parallel_loading_workers", "ParallelConfig.enable_ep_weight_filter"),
        *("QuantizationConfigArgs.*", "QuantSpec.*", "QuantKey.*", "ScalarType.*", "ScaleDesc.*"),
        *("VllmConfig.weight_transfer_config", "WeightTransferConfig.*"),
    ),
    "where memory is, and how much": (
        *("OffloadConfig.*", "UVAOffloadConfig.*", "PrefetchOffloadConfig.*", "EngramConfig.*"),
        *("CacheConfig.gpu_memory_utilization", "CacheConfig.num_gpu_blocks_override"),
        *("CacheConfig.num_gpu_blocks", "CacheConfig.num_cpu_blocks"),
        *("CacheConfig.kv_cache_memory_bytes", "CacheConfig.kv_offloading_size"),
        *("CacheConfig.kv_offloading_backend", "CacheConfig.kv_cache_size_tokens"),
        *("CacheConfig.kv_cache_max_concurrency", "CacheConfig.simple_cpu_offload_num_blocks"),
        *("ModelConfig.enable_sleep_mode", "ModelConfig.sleep_preserve_parameter_names"),
        *("ModelConfig.sleep_mode_backend", "ModelConfig.sleep_mode_offload_cudagraph"),
        *("ModelConfig.enable_nccl_comm_suspend", "ModelConfig.enable_cumem_allocator"),
        *("LoRAConfig.max_lora_rank", "LoRAConfig.max_loras", "LoRAConfig.max_cpu_loras"),
        *("LoRAConfig.specialize_active_lora", "LoRAConfig.max_lora_cls_labels"),
        *("MultiModalConfig.mm_processor_cache_gb", "MultiModalConfig.mm_processor_cache_type"),
        *("MultiModalConfig.mm_shm_cache_max_object_size_mb", "MultiModalConfig.mm_tensor_ipc"),
        *("MultiModalConfig.skip_mm_profiling", "MultiModalConfig.mm_ipc_gpu_memory_gb"),
        *("AttentionConfig.hisparse_config", "HiSparseConfig.*"),
        "AttentionConfig.sparse_mla_prefill_workspace_factor",
    ),
    "when a token is computed, and what of the cache is kept or found": (
        *("SchedulerConfig.runner_type", "SchedulerConfig.max_num_batched_tokens"),
        *("SchedulerConfig.max_num_scheduled_tokens", "SchedulerConfig.max_num_seqs"),
        *("SchedulerConfig.max_num_active_seqs", "SchedulerConfig.long_prefill_token_threshold"),
        "SchedulerConfig.long_prefill_token_threshold_adaptive",
        *("SchedulerConfig.max_num_queued_reqs", "SchedulerConfig.max_num_queued_tokens"),
        *("SchedulerConfig.enable_chunked_prefill", "SchedulerConfig.is_multimodal_model"),
        *("SchedulerConfig.max_num_encoder_input_tokens", "SchedulerConfig.encoder_cache_size"),
        *("SchedulerConfig.policy", "SchedulerConfig.disable_chunked_mm_input"),
        *("SchedulerConfig.scheduler_cls", "SchedulerConfig.scheduler_reserve_full_isl"),
        *("SchedulerConfig.watermark", "SchedulerConfig.prefill_schedule_interval"),
        *("SchedulerConfig.async_scheduling", "SchedulerConfig.stream_interval"),
        *("CacheConfig.enable_prefix_caching", "CacheConfig.prefix_cache_retention_interval"),
        *("CacheConfig.enable_mamba_shared_prefix_checkpoint", "VllmConfig.performance_mode"),
        *("CacheConfig.effective_attention_block_size", "CacheConfig.cache_hit_alignment_tokens"),
        *("CacheConfig._block_size_resolved", "SpeculativeConfig.disable_lookahead_block_hashes"),
    ),
    "who speaks to whom, and where processes run": (
        *("KVTransferConfig.*", "VllmConfig.ec_transfer_config", "ECTransferConfig.*"),
        *("VllmConfig.ec_manager_config", "EncoderCacheManagerConfig.*", "EPLBConfig.*"),
        *("ParallelConfig.data_parallel_size", "ParallelConfig.data_parallel_size_local"),
        *("ParallelConfig.data_parallel_rank", "ParallelConfig.data_parallel_rank_local"),
        *("ParallelConfig.data_parallel_master_ip", "ParallelConfig.data_parallel_rpc_port"),
        *("ParallelConfig.dp_sync_interval", "ParallelConfig.data_parallel_master_port"),
        *("ParallelConfig.data_parallel_backend", "ParallelConfig.data_parallel_external_lb"),
        *("ParallelConfig.data_parallel_hybrid_lb", "ParallelConfig.data_parallel_index"),
        *("ParallelConfig.enable_elastic_ep", "ParallelConfig.elastic_ep_max_dp_size"),
        *("ParallelConfig.ray_workers_use_nsight", "ParallelConfig.ray_runtime_env"),
        *("ParallelConfig.placement_group", "ParallelConfig.distributed_executor_backend"),
        *("ParallelConfig.worker_extension_cls", "ParallelConfig.master_addr"),
        *("ParallelConfig.master_port", "ParallelConfig.node_rank", "ParallelConfig.nnodes"),
        *("ParallelConfig.numa_bind", "ParallelConfig.numa_bind_nodes"),
        *("ParallelConfig.numa_bind_cpus", "ParallelConfig.assigned_physical_gpu_ids"),
        *("ParallelConfig.distributed_timeout_seconds", "ParallelConfig.rank"),
        *("ParallelConfig.cpu_distributed_timeout_seconds", "ParallelConfig._coord_store_port"),
        *("ParallelConfig._data_parallel_master_port_list", "ParallelConfig._api_process_count"),
        *("ParallelConfig._api_process_rank", "ParallelConfig.enable_shm_tensor_arena"),
        "ParallelConfig.disable_nccl_for_dp_synchronization",
        "ParallelConfig._allow_auto_resolve_cp_interleave_size",
    ),
    "rounding: the same formulas in other kernels, in other graphs, on other ranks": (
        *("CompilationConfig.*", "PassConfig.*", "DynamicShapesConfig.*", "IrOpPriorityConfig.*"),
        *("VllmConfig.optimization_level", "ModelConfig.enforce_eager"),
        *("ModelConfig.disable_cascade_attn", "KernelConfig.ir_op_priority"),
        *("KernelConfig.enable_flashinfer_autotune", "KernelConfig.enable_cutedsl_warmup"),
        *("KernelConfig.enable_rocm_segmented_attn_autotune", "KernelConfig.enable_jit_warmup"),
        *("KernelConfig.sparse_indexer_topk_backend", "KernelConfig.monokernel"),
        *("MambaConfig.ssu_algorithm", "LoRAConfig.fully_sharded_loras"),
        *("AttentionConfig.minimax_m3_msa_decode_backend", "AttentionConfig.minimax_m3_indexer_cp"),
        *("AttentionConfig.flash_attn_max_num_splits_for_cuda_graph",),
        *("AttentionConfig.tokenspeed_mla_min_split_kv", "AttentionConfig.use_trtllm_attention"),
        *("AttentionConfig.tq_max_kv_splits_for_cuda_graph", "AttentionConfig.mla_prefill_backend"),
        *("AttentionConfig.trtllm_ragged_backend", "AttentionConfig.indexer_tp_shard_min_rows"),
        *("AttentionConfig.sparse_mla_force_mqa", "AttentionConfig.flex_attn_block_m"),
        *("AttentionConfig.flex_attn_block_n", "AttentionConfig.flex_attn_q_block_size"),
        *("AttentionConfig.flex_attn_kv_block_size", "ParallelConfig.is_moe_model"),
        *("ParallelConfig.enable_hc_sp", "ParallelConfig.enable_expert_parallel"),
        *("ParallelConfig.enable_eplb", "ParallelConfig.eplb_config"),
        *("ParallelConfig.expert_placement_strategy", "ParallelConfig.all2all_backend"),
        *("ParallelConfig.disable_custom_all_reduce", "ParallelConfig.enable_dbo"),
        *("ParallelConfig.ubatch_size", "ParallelConfig.dbo_decode_token_threshold"),
        *("ParallelConfig.dbo_prefill_token_threshold", "ParallelConfig.dcp_comm_backend"),
        *("ParallelConfig.dcp_q_replicate", "MultiModalConfig.mm_encoder_tp_mode"),
        "MultiModalConfig.mm_encoder_attn_backend",
    ),
    "an engine that only encodes has no KV, and scales are saved, not used": (
        *("MultiModalConfig.mm_encoder_only", "MultiModalConfig.mm_encoder_fp8_scale_save_path"),
        "MultiModalConfig.mm_encoder_fp8_scale_save_margin",
    ),
    "which guesses are made and taken: what is in the cache are tokens that were taken": (
        *("SpeculativeConfig.enforce_eager", "SpeculativeConfig.draft_tensor_parallel_size"),
        *("SpeculativeConfig.tensor_parallel_size", "SpeculativeConfig.moe_backend"),
        *("SpeculativeConfig.index_share_for_mtp_iteration", "SpeculativeConfig.prompt_lookup_max"),
        *("SpeculativeConfig.disable_padded_drafter_batch", "SpeculativeConfig.prompt_lookup_min"),
        *("SpeculativeConfig.disable_eagle_block_drop", "SpeculativeConfig.target_model_config"),
        *("SpeculativeConfig.use_local_argmax_reduction", "SpeculativeConfig.draft_sample_method"),
        *("SpeculativeConfig.use_heterogeneous_vocab", "SpeculativeConfig.target_parallel_config"),
        *("SpeculativeConfig.num_speculative_tokens_per_batch_size",),
        *("SpeculativeConfig.draft_parallel_config", "SpeculativeConfig.dspark_draft_topk"),
        *("SpeculativeConfig.suffix_decoding_max_tree_depth",),
        *("SpeculativeConfig.suffix_decoding_max_cached_requests",),
        *("SpeculativeConfig.suffix_decoding_max_spec_factor",),
        *("SpeculativeConfig.suffix_decoding_min_token_prob",),
        *("SpeculativeConfig.rejection_sample_method",),
        *("SpeculativeConfig.synthetic_acceptance_rates",),
        *("SpeculativeConfig.synthetic_acceptance_length",),
        *("SpeculativeConfig.enable_adaptive_verification", "SpeculativeConfig.xpress_topc"),
        *("SpeculativeConfig.fly_entropy_threshold", "SpeculativeConfig.fly_entropy_top_k"),
        *("SpeculativeConfig.fly_window_size", "ModelConfig.spec_target_max_model_len"),
    ),
}
"""The other fields, under the reason; `Class.*` are all of a class that is about one thing."""


def fields_that_cannot_matter() -> Iterator[str]:
    """All of them, in order."""
    for fields in CANNOT_MATTER.values():
        yield from fields


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, offloading_config: Any, weights_version: str
) -> dict[str, Any]:
    """All facts of an engine by name, as JSON has them, without those that say nothing.

    Raises:
        SettingError: one can't be read: a setting is missing, or a file or vLLM is not as expected.
    """
    engine = ReadableEngine(vllm_config, kv_cache_config, offloading_config, weights_version)
    found = {}
    for fact in FACTS:
        try:
            value = fact.value(engine)
        except SettingError:
            raise
        except Exception as error:
            raise SettingError(
                f"RayKV can't tell this engine's KV from others', since it can't read {fact.name} "
                f"({fact.why}): {type(error).__name__}: {error}"
            ) from error
        if value is not None:
            found[fact.name] = value
    return found


def namespace_of(facts: dict[str, Any]) -> Namespace:
    """Digest of `facts`; equal facts give equal namespaces."""
    text = json.dumps(facts, sort_keys=True)
    return Namespace(hashlib.sha256(text.encode()).hexdigest()[:32])


def traits_of(facts: dict[str, Any]) -> dict[str, str]:
    """`facts` in short texts that can be compared and shown; all of them, so that a difference of
    two namespaces always has a name. Secrets, as a seed may be one, are digests.
    """
    traits = {name: short(value, LONGEST_TRAIT) for name, value in facts.items()}
    traits["hash_seed"] = trait_of_seed(facts["hash_seed"], RANDOM)
    return traits
