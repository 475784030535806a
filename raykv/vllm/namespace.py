"""The namespace: a digest of all that must be equal before two engines may share KV bytes."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from raykv.block_hashes import RANDOM, seed_digest
from raykv.types import Namespace
from raykv.vllm.canonical import layout_facts

RANDOM_SEED = "random in "
"""How a seed of block hashes begins that no other process has."""

_LONGEST_TRAIT = 64
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def namespace_of(facts: dict[str, Any]) -> Namespace:
    """Digest of `facts`, which must be JSON; equal facts give equal namespaces."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return Namespace(hashlib.sha256(text.encode()).hexdigest()[:32])


def traits_of(facts: dict[str, Any]) -> dict[str, str]:
    """`facts` in short texts that can be compared and shown; all of them, so that a difference of
    two namespaces always has a name. Secrets, as a seed may be one, are digests.
    """
    algorithm, seed = facts["hash"]
    is_random = seed.startswith(RANDOM_SEED)
    traits = {
        "hash_algorithm": algorithm,
        "hash_seed": RANDOM if is_random else seed_digest(seed),
        "config": _digest(facts["model"]["config"]),
    }
    rest = {**facts["model"], **facts}
    for name in ("model", "hash", "config"):
        del rest[name]
    for name, value in rest.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        traits[name] = text if len(text) <= _LONGEST_TRAIT else _digest(value)
    return traits


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, offloading_config: Any, weights_version: str
) -> dict[str, Any]:
    """All that the KV bytes of an engine, or the hashes that name them, depend on.

    Sources: DESIGN §2 and §9. The CPU layout of a block depends on the instruction set and the
    data type (measured), so the machine's type is a fact as well.
    """
    from raykv.vllm.versions import vllm_version

    model = vllm_config.model_config
    return {
        "model": model_facts(model, vllm_config.load_config),
        "weights_version": weights_version,
        "dtype": str(model.dtype),
        "kv_dtype": offloading_config.model.dtype,
        "kv_layout": str(offloading_config.kv_cache_layout),
        **layout_facts(vllm_config, kv_cache_config, offloading_config),
        "tokens_per_hash": offloading_config.cache.tokens_per_hash,
        "blocks_per_chunk": offloading_config.cache.blocks_per_chunk,
        "hash": hash_facts(vllm_config),
        "attention": str(getattr(vllm_config.attention_config, "backend", "")),
        **states_facts(vllm_config.speculative_config),
        "machine": [platform.machine(), cpu_features()],
        "vllm": ".".join(vllm_version().split(".")[:2]),
    }


def states_facts(speculative_config: Any) -> dict[str, Any]:
    """Of which layers the hidden states in the chunks are; nothing where there are none."""
    if getattr(speculative_config, "method", None) != "extract_hidden_states":
        return {}
    config = speculative_config.draft_model_config.hf_config
    layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or []
    return {"hidden_states_of_layers": [int(layer) for layer in layers]}


def hash_facts(vllm_config: Any) -> list[str]:
    """Algorithm and root seed of vLLM's block hashes.

    A hash that is not cryptographic gets a random seed per process unless PYTHONHASHSEED is set;
    then the engine's id stands for it and nobody else shares its chunks.
    """
    import os

    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.getenv("PYTHONHASHSEED")
    if seed is None and "xxhash" in algorithm:
        seed = f"{RANDOM_SEED}{vllm_config.kv_transfer_config.engine_id}"
    return [algorithm, DEFAULT_NONE_HASH_SEED if seed is None else seed]


def model_facts(model_config: Any, load_config: Any) -> dict[str, Any]:
    """The model's configuration, and its revision or a fingerprint of its weights."""
    facts: dict[str, Any] = {
        "config": model_config.hf_config.to_dict(),
        "revision": str(model_config.revision),
        "quantization": str(model_config.quantization),
    }
    facts["config"].pop("_name_or_path", None)
    load_format = str(getattr(load_config, "load_format", ""))
    if "dummy" in load_format:
        facts["weights"] = f"dummy, seed {model_config.seed}"
        return facts
    folder = Path(str(model_config.model))
    facts["weights"] = weights_fingerprint(folder) if folder.is_dir() else str(model_config.model)
    return facts


def weights_fingerprint(folder: Path) -> str:
    """Digest of names, sizes and samples of a model folder's weight files: cheap, not complete.

    Two models that differ in a few weights only may get the same; `weights_version` tells them
    apart.
    """
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
    for path in sorted(p for pattern in patterns for p in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def cpu_features() -> list[str]:
    """Instruction sets on which vLLM's CPU kernels, and with them the KV layout, depend."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line.split(":")[1] for line in text.splitlines() if line.startswith("flags")), "")
    return sorted(flag for flag in flags.split() if flag.startswith(("avx", "amx")))
