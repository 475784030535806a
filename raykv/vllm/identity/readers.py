"""What RayKV asks vLLM about an engine where a fact is no plain field of its configuration.

Each reader gets a `ReadableEngine` and returns what `plain` can write as JSON; None where it says
nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raykv.base.errors import SettingError
from raykv.vllm.identity.weights import texts_digest, weight_files, weights_digest
from raykv.vllm.internals.engine import attention_backend, default_hash_seed
from raykv.vllm.internals.offloading import canonical_format
from raykv.vllm.kv_form import layer_specs, spec_text

RANDOM_SEED = "random in "
"""Beginning of a seed of block hashes that no other process has."""

READABLE = frozenset(
    (
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt"),
        *("sharded_state", "runai_streamer", "runai_streamer_sharded", "tensorizer", "gguf"),
    )
)
"""Values of vLLM's `load_format` with which the weights are what lies in the model's files."""

WITHOUT_DRAFT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculation that put nothing into the KV cache."""

SAME_AT_ALL_LENGTHS = frozenset(
    (
        *("default", "linear", "dynamic", "ntk", "llama3", "yarn", "deepseek_yarn", "mrope"),
        *("bailing_mrope", "mllama4", "openpangu", "proportional"),
    )
)
"""Kinds of rope whose angles do not depend on `max_model_len`. vLLM's `dynamic` takes the length
from the model's config."""

LLAMA4_LONG = 32768
"""vLLM scales Llama 4's queries by position if `max_model_len` is larger, which changes the hidden
states that later layers make their KV of. Source: vLLM's `models/llama4.py`."""

ENVIRONMENT = (
    *("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_MLA_DISABLE"),
    *("VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_USE_DEEP_GEMM_E8M0"),
    *("VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_CPU_INT4_W4A8"),
    *("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
    *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_DEEPEPLL_NVFP4_DISPATCH"),
    *("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_VIDEO_LOADER_BACKEND"),
    "VLLM_MEDIA_CONNECTOR",
)
"""vLLM's variables that change the layout of KV, or its values by more than rounding."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANK = re.compile(r"%0?\d*d")


@dataclasses.dataclass(frozen=True)
class ReadableEngine:
    """Where facts are read: what vLLM gives a connector on the scheduler's side, and a setting."""

    vllm: Any
    kv_cache: Any
    offloading: Any
    weights_version: str = ""

    @property
    def model(self) -> Any:
        """vLLM's `ModelConfig`."""
        return self.vllm.model_config

    @property
    def is_canonical(self) -> bool:
        """Whether engines of other sizes may read its chunks."""
        return bool(self.offloading.canonical_layout)


def plain(value: Any) -> Any:
    """`value` as JSON has it, the same in every process: no address of an object in it."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(each) for each in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if " at 0x" in (text := str(value)):
        raise TypeError(f"no text of {type(value).__qualname__} is the same in every process")
    return text


# The model


def config(engine: ReadableEngine) -> Any:
    """The model's configuration after all overrides, without what only says where it is from."""
    whole = _cleaned(engine.model.hf_config.to_dict())
    text = _cleaned(engine.model.hf_text_config.to_dict())
    return whole if text == whole else {"whole": whole, "text": text}


def _cleaned(found: Any) -> Any:
    """Without names, paths and versions, at any depth."""
    if isinstance(found, Mapping):
        left_out = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
        return {key: _cleaned(each) for key, each in found.items() if key not in left_out}
    return [_cleaned(each) for each in found] if isinstance(found, list | tuple) else found


def length(engine: ReadableEngine) -> Any:
    """What the model derives from `max_model_len`; nothing where it does not use it.

    Engines that differ in it alone share chunks wherever that is safe, so the length itself is
    here only where its effect is not known: kinds of rope that this list does not have, and
    models with images or sound, whose processors may fit them to it.
    """
    model = engine.model
    # With "auto", vLLM builds the model before it shortens the length to what fits.
    is_auto = getattr(model, "original_max_model_len", None) == -1
    most = int(model.max_model_len)
    length = "auto" if is_auto else most
    found: dict[str, Any] = {}
    if model.is_multimodal_model:
        found["multimodal"] = length
    for part in _parts(model.hf_config.to_dict()):
        if str(part.get("model_type", "")).startswith("llama4"):
            found["temperature"] = length if is_auto else most > LLAMA4_LONG
        rope = part.get("rope_parameters") or part.get("rope_scaling")
        for kind, original in _ropes(rope, part):
            if kind in SAME_AT_ALL_LENGTHS:
                continue
            if kind in ("longrope", "su") and isinstance(original, int) and not is_auto:
                found["rope"] = "long" if most > original else "short"
            else:
                found["rope"] = [kind, length]
    return found or None


def _parts(found: Any) -> Iterator[Mapping[str, Any]]:
    """A configuration and those nested in it."""
    if isinstance(found, Mapping):
        yield found
        for each in found.values():
            yield from _parts(each)


def _ropes(rope: Any, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Kind and original length of a rope, or of several by kind of layer."""
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type", rope.get("type"))
    if kind is not None:
        name = "original_max_position_embeddings"
        yield str(kind), rope.get(name, part.get(name))
        return
    for each in rope.values():
        yield from _ropes(each, part)


def implementation(engine: ReadableEngine) -> Any:
    """The class that computes: a model of vLLM's own, or its wrapper of Transformers' model.

    Transformers computes in the latter, and prepares images and sound: its version counts there.
    """
    model = engine.model
    found = [model.architecture, model.runner_type, model.convert_type]
    if model.using_transformers_backend() or model.is_multimodal_model:
        found.append(f"transformers {metadata.version('transformers')}")
    return found


def code(engine: ReadableEngine) -> Any:
    """The model's own code, where it is run."""
    model = engine.model
    if not model.trust_remote_code:
        return None
    folder = folder_of(engine)
    files = [] if folder is None else list(folder.glob("*.py"))
    has_map = any("auto_map" in part for part in _parts(model.hf_config.to_dict()))
    if not files and not has_map:
        return None
    return [model.code_revision, texts_digest(files)]


def processor(engine: ReadableEngine) -> Any:
    """Settings of the model's processor of images and sound, out of its folder."""
    folder = folder_of(engine)
    if not engine.model.is_multimodal_model or folder is None:
        return None
    return texts_digest([*folder.glob("*processor*.json"), *folder.glob("params.json")])


def scales_of_encoder(engine: ReadableEngine) -> Any:
    """The content of the file with the scales of the encoder of images, if one is named."""
    multimodal = engine.model.multimodal_config
    path = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def adapters(engine: ReadableEngine) -> Any:
    """How adapters are applied, if not in the usual way.

    Engines with adapters and without share what the model computes alone.
    """
    lora = engine.vllm.lora_config
    names = (
        *("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras"),
        *("enable_mixed_moe_lora_format", "lora_dtype"),
    )
    found = {name: plain(getattr(lora, name, None)) for name in names}
    if found["lora_dtype"] in ("auto", plain(engine.model.dtype)):
        del found["lora_dtype"]
    return {name: value for name, value in found.items() if value} or None


# The weights


def weights(engine: ReadableEngine) -> Any:
    """The content of the weights.

    Raises:
        SettingError: it can't be read, and `weights_version` is not set.
    """
    try:
        return content_of(engine)
    except SettingError:
        if not engine.weights_version:
            raise
        return "not read"


def content_of(engine: ReadableEngine) -> str:
    """The content of a model's weights, as vLLM loads them.

    A local folder or file, and what the hub's cache has of a hub model, go by a digest of all
    tensors; a hub model whose weights are not there by the commit that its config came from.

    Raises:
        SettingError: it can't be read.
    """
    model, load = engine.model, engine.vllm.load_config
    form = str(load.load_format)
    if form == "dummy":
        return _dummy(model, engine.vllm.parallel_config)
    source = str(getattr(model, "model_weights", "") or model.model)
    if form == "tensorizer":
        return weights_digest(_tensorizer_files(load.model_loader_extra_config))
    if form not in READABLE or "://" in source:
        where = f"{source} with load_format={form}"
        raise _unreadable(f"what is loaded from {where} is not read from local files")
    if Path(source).is_file():
        return weights_digest(_with_its_parts(Path(source)))
    folder = folder_of(engine)
    if folder is not None:
        files = weight_files(folder, form)
        beside = texts_digest(folder.glob("*quant*.json"))
        return weights_digest(files) + (f", {beside}" if beside else "")
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if commit and _COMMIT.fullmatch(str(commit)):
        return f"{source} at {commit}"
    raise _unreadable(f"{source} is no local folder, and its commit on the hub is not known")


def _unreadable(why: str) -> SettingError:
    return SettingError(
        f"RayKV can't tell these weights from others: {why}. Set weights_version to a name for "
        "them, and change it whenever they change"
    )


def _dummy(model: Any, parallel: Any) -> str:
    """vLLM fills each rank's part of a tensor from one fixed seed, so the ranks count.

    Raises:
        SettingError: weights of whole numbers are left as the memory was found.
    """
    if model.quantization is not None:
        raise _unreadable(f"dummy weights with quantization={model.quantization} are not seeded")
    sizes = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    if parallel.enable_expert_parallel:
        sizes.append(parallel.data_parallel_size)
    return f"dummy, of {sizes} ranks"


def _tensorizer_files(extra: Any) -> list[Path]:
    """Those of all ranks.

    Raises:
        SettingError: they are not on this machine.
    """
    given = extra.get("tensorizer_config", extra) if isinstance(extra, Mapping) else vars(extra)
    uri = str(given.get("tensorizer_uri") or "")
    folder = given.get("tensorizer_dir")
    pattern = Path(_RANK.sub("*", uri)) if uri else Path(str(folder)) / "*.tensors"
    files = sorted(pattern.parent.glob(pattern.name)) if "://" not in f"{uri}{folder}" else []
    if not files:
        raise _unreadable(f"the tensorizer's file {uri or folder} is not on this machine")
    return files


def _with_its_parts(path: Path) -> list[Path]:
    """A GGUF file may be one part of several: `name-00001-of-00003.gguf`."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if found is None:
        return [path]
    return sorted(path.parent.glob(f"{found[1]}*{found[2]}"))


def folder_of(engine: ReadableEngine) -> Path | None:
    """The model's folder on this machine: its own, or where the hub's cache has the commit."""
    folder = Path(str(engine.model.model))
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    for cache in filter(None, (engine.vllm.load_config.download_dir, HF_HUB_CACHE)):
        found = snapshot_of(Path(cache), engine.model)
        if found is not None:
            return found
    return None


def snapshot_of(cache: Path, model: Any) -> Path | None:
    """Where a cache of the hub has the weights of a model; None if it has not."""
    root = cache / f"models--{str(model.model).replace('/', '--')}"
    commit = str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (root / "refs" / (model.revision or "main")).read_text().strip()
        except OSError:
            return None
    folder = root / "snapshots" / commit
    try:
        return folder if commit and weight_files(folder) else None
    except (SettingError, OSError):
        return None


def draft(engine: ReadableEngine) -> Any:
    """The model that guesses tokens, where the chunks have its KV, too."""
    speculative = engine.vllm.speculative_config
    if speculative is None or speculative.method in WITHOUT_DRAFT_KV:
        return None
    model = speculative.draft_model_config
    if speculative.method == "extract_hidden_states":
        layers = getattr(model.hf_config, "eagle_aux_hidden_state_layer_ids", None) or []
        return {"hidden states of layers": [int(layer) for layer in layers]}
    told = SimpleNamespace(
        model_config=model,
        load_config=getattr(speculative, "draft_load_config", None) or engine.vllm.load_config,
        parallel_config=engine.vllm.parallel_config,
    )
    drafting = dataclasses.replace(engine, vllm=told)
    is_own = str(model.model) != str(engine.model.model)
    return {
        "method": speculative.method,
        "tokens": speculative.num_speculative_tokens,
        "parallel": getattr(speculative, "parallel_drafting", None),
        "config": config(drafting),
        "dtype": plain(model.dtype),
        "quantization": [
            plain(model.quantization),
            plain(getattr(speculative, "draft_lm_head_quantization", None)),
        ],
        "kv_dtype": plain(getattr(speculative, "kv_cache_dtype", None)),
        "attention": plain(getattr(speculative, "attention_backend", None)),
        "length": length(drafting),
        "weights": weights(drafting) if is_own else None,
    }


# The layout


def kv_groups(engine: ReadableEngine) -> Any:
    """What each KV group contains: its layers, and the page of each."""
    return [
        [spec_text(engine.vllm, group, whole=engine.is_canonical), list(group.layer_names)]
        for group in engine.kv_cache.kv_cache_groups
    ]


def parallel(engine: ReadableEngine) -> Any:
    """Sizes, and with context parallelism how tokens are spread; canonical chunks have no parts."""
    if engine.is_canonical:
        return f"canonical {canonical_format(engine.offloading.kv_cache_layout)}"
    sizes = engine.offloading.parallel
    found = [sizes.tp_size, sizes.pp_size, sizes.pcp_size, sizes.dcp_size]
    if sizes.pcp_size * sizes.dcp_size > 1:
        parallel = engine.vllm.parallel_config
        found += [parallel.cp_kv_cache_interleave_size, parallel.dcp_kv_cache_interleave_size]
    return found


def replicated(engine: ReadableEngine) -> Any:
    """Whether a chunk has one part for all ranks, which have the same bytes."""
    return bool(engine.offloading.replicated_layout) and not engine.is_canonical


def device(engine: ReadableEngine) -> Any:
    """The platform that computes."""
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def machine(engine: ReadableEngine) -> Any:
    """Of engines that compute on a CPU: its kind and instruction sets.

    The order of elements in a page depends on them; GPUs don't care on which host they are.
    """
    from vllm.platforms import current_platform

    return [platform.machine(), cpu_features()] if current_platform.is_cpu() else None


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Instruction sets on which vLLM's CPU kernels, and with them the KV layout, depend."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags = next((each.split(":")[1] for each in lines if each.startswith("flags")), "")
    found = {flag for flag in flags.split() if flag.startswith(("avx", "amx"))}
    # ARM has another word for them, and few.
    flags = next((each.split(":")[1] for each in lines if each.startswith("Features")), "")
    return sorted(found | set(flags.split()))


def attention(engine: ReadableEngine) -> Any:
    """The back end that vLLM chooses for each kind of layer, by vLLM's own selector.

    The layers are in the workers, and whether they have attention sinks no spec says: it is asked
    both ways, and engines with equal answers have made the same choice.
    """
    found: dict[str, Any] = {}
    for group in engine.kv_cache.kv_cache_groups:
        for spec in layer_specs(group):
            name = f"{type(spec).__name__}({getattr(spec, 'head_size', '')})"
            found[name] = _backends(engine, spec)
    values = list(found.values())
    return values[0] if values and all(each == values[0] for each in values) else found


def _backends(engine: ReadableEngine, spec: Any) -> Any:
    """Without sinks and with them; one where it is the same."""
    from vllm.platforms import current_platform

    answers = [attention_backend(engine.vllm, spec, has_sink=each) for each in (False, True)]
    if answers == [None, None]:
        # vLLM does not say: then the inputs of its decision.
        asked = plain(getattr(engine.vllm.attention_config, "backend", None))
        return f"{asked} on {current_platform.get_device_capability()}"
    return answers[0] if answers[0] == answers[1] else answers


def runner(engine: ReadableEngine) -> Any:
    """Which of vLLM's two model runners allocates the cache: they lay it out differently."""
    return "V2" if getattr(engine.vllm, "use_v2_model_runner", False) else None


# The keys


def hash_seed(engine: ReadableEngine) -> Any:
    """Root seed of vLLM's block hashes.

    A hash that is not cryptographic gets a random seed per process unless PYTHONHASHSEED is set;
    then the engine's id stands for it and nobody else shares its chunks.
    """
    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if "xxhash" in str(engine.vllm.cache_config.prefix_caching_hash_algo):
        return f"{RANDOM_SEED}{engine.vllm.kv_transfer_config.engine_id}"
    return default_hash_seed()


# The rest


def environment(engine: ReadableEngine) -> Any:
    """vLLM's variables that change layout or values, where they are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} or None
