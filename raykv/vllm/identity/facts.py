"""What a key means: every fact that must be equal before two engines may share KV bytes.

The namespace is the digest of `FACTS` and of nothing else. A *value* fact changes the numbers in
the KV cache, a *layout* fact where they lie in a chunk, a *key* fact what the chunks are called.
Where a fact is no plain field it has a reader, whose docstring has the details.

`tests/fixtures/vllm_fields.toml` has the fields of vLLM's configuration classes that readers look
at, or that determine what these see, and all others, each with why it can't matter. Rounding
is one: which kernel adds up the same numbers in which order, on how many ranks, is left out on
purpose, as vLLM's own prefix cache and its disaggregated serving leave it out.

A field of a class that is listed nowhere fails `tests/unit/vllm/identity/test_facts.py`, and so do
a fact that does not change the namespace, and a field that changes it though it can't matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.ids import Namespace
from raykv.prompts.block_hashes import RANDOM, seed_digest
from raykv.vllm.identity import readers
from raykv.vllm.identity.readers import RANDOM_SEED, ReadableEngine, plain
from raykv.vllm.internals.names import vllm_version

CHUNK_FORMAT = 1
"""How RayKV lays out a chunk in a pool, on disk and in a file. Rises when it changes."""

LONGEST_TRAIT = 64

_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Fact:
    """One row: a fact is what `read` says, or the values of some fields of vLLM's configuration.

    `fields`: by the part of a `VllmConfig`, their names, with spaces between them.
    """

    name: str
    why: str
    read: Callable[[ReadableEngine], Any] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """Of its fields in a `VllmConfig`."""
        return [f"{part}.{name}" for part, names in self.fields.items() for name in names.split()]

    def value(self, engine: ReadableEngine) -> Any:
        """The fact as JSON has it; None if there is nothing to say.

        Raises:
            SettingError: it can't be read, and a setting is missing.
        """
        if self.read is not None:
            return plain(self.read(engine))
        values = {path.rpartition(".")[2]: field_of(engine, path) for path in self.paths}
        found = {name: value for name, value in values.items() if value not in _NOTHING}
        return next(iter(found.values()), None) if len(values) == 1 else found or None


FACTS: tuple[Fact, ...] = (
    # What changes the numbers: the model
    Fact("weights", "K and V are made by them: the content, however it is named", readers.weights),
    Fact("weights_version", "the user says they differ", attrgetter("weights_version")),
    Fact(
        "config", "architecture, sizes, rope and all else, in force after overrides", readers.config
    ),
    Fact(
        "length",
        "LongRoPE picks its factors, and Llama 4 its temperature, by the longest prompt",
        readers.length,
    ),
    Fact(
        "implementation",
        "vLLM's model and Transformers' differ; pooling may be bidirectional",
        readers.implementation,
    ),
    Fact("model_class", "other code computes", fields={"model_config": "model_class_overrides"}),
    Fact("code", "the model's own code computes", readers.code),
    Fact("dtype", "what is computed in", fields={"model_config": "dtype"}),
    Fact(
        "quantization",
        "rounds weights and activations",
        fields={"model_config": "quantization quantization_config"},
    ),
    Fact(
        "quantized_kernels",
        "some of them quantize activations that others leave alone",
        fields={"kernel_config": "moe_backend linear_backend linear_backend_per_quant"},
    ),
    Fact(
        "window",
        "which tokens are seen",
        fields={
            "model_config": "disable_sliding_window",
            "cache_config": "sliding_window swa_bounded_replay kv_sharing_fast_prefill",
            "attention_config": "use_non_causal",
        },
    ),
    Fact(
        "attention_rounding",
        "Q in 8 bits, or tokens chosen by coarser scores: more than rounding in later layers",
        fields={
            "attention_config": "use_prefill_query_quantization disable_flashinfer_q_quantization "
            "indexer_kv_dtype indexer_sparse_logits"
        },
    ),
    Fact(
        "adapters",
        "how an adapter is applied; which one it is stands in the keys",
        readers.adapters,
    ),
    Fact(
        "multimodal",
        "what is made of an image or a sound; keys name only what was sent",
        fields={
            "model_config.multimodal_config": "mm_processor_kwargs media_io_kwargs "
            "limit_per_prompt mm_device_do_normalize mm_encoder_attn_dtype video_pruning_rate "
            "video_pruning_method"
        },
    ),
    Fact("processor", "the same, by the model's folder", readers.processor),
    Fact("encoder_scales", "images in 8 bits", readers.scales_of_encoder),
    Fact(
        "draft",
        "EAGLE's and MTP's layers, and captured hidden states, are in the chunks, too",
        readers.draft,
    ),
    Fact(
        "diffusion",
        "tokens see their whole canvas",
        fields={"diffusion_config": "canvas_length max_denoising_steps"},
    ),
    Fact(
        "states",
        "how states of Mamba layers are kept and rounded",
        fields={
            "mamba_config": "enable_stochastic_rounding stochastic_rounding_philox_rounds backend",
            "cache_config": "mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype "
            "use_replayssm replayssm_buffer_len use_kda_recoverssm",
        },
    ),
    Fact(
        "kv_dtype",
        "rounds K and V; the scales of a quantized cache are weights",
        attrgetter("offloading.model.dtype"),
    ),
    Fact(
        "kv_dtype_skips",
        "layers that it spares",
        fields={"cache_config": "kv_cache_dtype_skip_layers"},
    ),
    Fact(
        "plugins",
        "workers and platforms of others may do anything",
        fields={"parallel_config": "worker_cls", "": "additional_config"},
    ),
    Fact("environment", "vLLM's variables that change either", readers.environment),
    Fact("vllm", "kernels and models change between builds", lambda _: vllm_version()),
    # What changes where they lie: the layout
    Fact("device", "kernels of each kind order a page in their way", readers.device),
    Fact("machine", "so do instruction sets, on a CPU only", readers.machine),
    Fact(
        "attention",
        "back ends order K and V inside a page in their way: the one really chosen",
        readers.attention,
    ),
    Fact("attention_version", "the same", fields={"attention_config": "flash_attn_version"}),
    Fact(
        "kv_groups",
        "pages: tokens, heads, dimensions, type, padding; which layers, in which order",
        readers.kv_groups,
    ),
    Fact("kv_layout", "order of dimensions", attrgetter("offloading.kv_cache_layout")),
    Fact("runner", "both lay the cache out in their way", readers.runner),
    Fact(
        "parallel",
        "which heads and tokens each part has; nothing of it where chunks are canonical",
        readers.parallel,
    ),
    Fact("replicated", "one part for all ranks, or one each", readers.replicated),
    Fact("blocks_per_chunk", "RayKV's setting", attrgetter("offloading.cache.blocks_per_chunk")),
    Fact("chunk_format", "RayKV's own order of pages", lambda _: CHUNK_FORMAT),
    # What changes what chunks are called: the keys
    Fact(
        "tokens_per_hash", "what a key stands for", attrgetter("offloading.cache.tokens_per_hash")
    ),
    Fact(
        "hash_algorithm",
        "two hashes must not be compared",
        fields={"cache_config": "prefix_caching_hash_algo"},
    ),
    Fact("hash_seed", "nor two seeds", readers.hash_seed),
)


def field_of(engine: ReadableEngine, path: str) -> Any:
    """A field's value as JSON has it; None if this engine or this vLLM lacks it."""
    found = engine.vllm
    for step in filter(None, path.split(".")):
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
    traits = {name: _short(value) for name, value in facts.items()}
    seed = facts["hash_seed"]
    traits["hash_seed"] = RANDOM if seed.startswith(RANDOM_SEED) else seed_digest(seed)
    return traits


def _short(value: Any) -> str:
    """A fact as a text that can be compared and shown; what is too long, as a digest.

    Of several fields, those that are on are shown beside it, if there is room.
    """
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= LONGEST_TRAIT:
        return text
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
    on = {name: each for name, each in value.items() if each} if isinstance(value, dict) else {}
    shown = f"{json.dumps(on, sort_keys=True)} #{digest}"
    return shown if len(shown) <= LONGEST_TRAIT else digest
