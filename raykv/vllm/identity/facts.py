"""What a key means: every fact that must be equal before two engines may share KV bytes.

The namespace is the digest of `FACTS` and of nothing else. A *value* fact changes the numbers in
the KV cache, a *layout* fact where they lie in a chunk, a *key* fact what the chunks are called.
Where a fact is no plain field it has a reader, whose docstring has the details.

`tests/fixtures/vllm_fields.py` has all other fields of vLLM's configuration classes, each with the
reason why it can't matter. Rounding is one: which kernel adds up the same numbers in which order,
on how many ranks, is left out on purpose, as vLLM's own prefix cache and its disaggregated serving
leave it out.

A field of a class that neither list has fails `tests/unit/vllm/identity/test_facts.py`, and so do a
fact that does not change the namespace, and a field in the second list that does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
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
