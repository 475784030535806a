"""What a namespace is made of: the table of facts against vLLM's own configuration classes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm")

import torch
import vllm.envs
from huggingface_hub import constants
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from raykv.base.errors import SettingError
from raykv.vllm.identity import facts as facts_module
from raykv.vllm.identity import readers
from raykv.vllm.identity.facts import FACTS, engine_facts, namespace_of
from tests.fixtures.gguf import gguf
from tests.fixtures.vllm_fields import CANNOT_MATTER, PLACES, READ, fields_of

TOKENS = 32


def engine(model: Path, **more: Any) -> Any:
    """vLLM's own configuration of an engine."""
    told = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, **more}
    return EngineArgs(model=str(model), **told).create_engine_config()


@pytest.fixture(scope="module")
def known(tiny_model: Path) -> Any:
    return engine(tiny_model, enforce_eager=True)


def offloading(**changed: Any) -> Any:
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    return SimpleNamespace(
        canonical_layout=changed.pop("canonical", False),
        replicated_layout=changed.pop("replicated", False),
        kv_cache_layout=changed.pop("layout", "LBHNC"),
        model=SimpleNamespace(dtype=changed.pop("dtype", "float32")),
        cache=SimpleNamespace(
            tokens_per_hash=changed.pop("tokens_per_hash", TOKENS),
            blocks_per_chunk=changed.pop("blocks_per_chunk", 1),
        ),
        parallel=SimpleNamespace(**{**sizes, **changed}),
    )


def caches(**changed: Any) -> Any:
    shape = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    group = SimpleNamespace(
        kv_cache_spec=FullAttentionSpec(**{**shape, **changed}), layer_names=["layer.0"]
    )
    return SimpleNamespace(kv_cache_groups=[group], num_blocks=8)


def namespace(
    config: Any, kv_cache: Any = None, offloaded: Any = None, weights_version: str = ""
) -> str:
    return namespace_of(
        engine_facts(config, kv_cache or caches(), offloaded or offloading(), weights_version)
    )


def changed(config: Any, field: str, value: Any) -> Any:
    """A copy of vLLM's configuration with another value in one field."""
    name, _, attribute = field.partition(".")
    whole = copy.copy(config)
    part = whole
    for step in filter(None, PLACES[name].split(".")):
        inner = copy.copy(getattr(part, step))
        part.__dict__[step] = inner
        part = inner
    part.__dict__[attribute] = value
    return whole


def other_than(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, list):
        return [*value, "other"]
    return f"{value} other"


# Completeness


def classes_of(kind: Any) -> Iterator[type]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
    for part in typing.get_args(kind):
        yield from classes_of(part)


def all_classes() -> dict[str, type]:
    """Every configuration class that vLLM's own leads to."""
    found: dict[str, type] = {}
    left: list[type] = [VllmConfig]
    while left:
        cls = left.pop()
        if cls.__name__ not in found:
            found[cls.__name__] = cls
            hints = typing.get_type_hints(cls)
            for field in dataclasses.fields(cls):
                left += classes_of(hints[field.name])
    return found


def test_every_field_of_vllms_configuration_is_a_fact_or_cannot_matter() -> None:
    facts = {field for fact in FACTS for field in (*fields_of(fact), *READ.get(fact.name, ()))}
    classes, others = all_classes(), set(chain(*CANNOT_MATTER.values()))
    assert set(PLACES) <= set(classes)
    missing = [
        field
        for name, cls in classes.items()
        for field in (f"{name}.{each.name}" for each in dataclasses.fields(cls))
        if not {field, f"{name}.*"} & (facts | others)
    ]
    assert not missing, f"of vLLM's fields neither list has {missing}"


def test_no_field_is_in_both_lists_or_twice() -> None:
    fields = [field for fact in FACTS for field in fields_of(fact)]
    fields += [*chain(*READ.values()), *chain(*CANNOT_MATTER.values())]
    assert len(fields) == len(set(fields))
    assert len({fact.name for fact in FACTS}) == len(FACTS)
    assert READ.keys() <= {fact.name for fact in FACTS if fact.read is not None}


# What changes the namespace, and what must not

PLAIN_FIELDS = [
    field
    for fact in FACTS
    for field in fields_of(fact)
    if field.partition(".")[0] not in ("MultiModalConfig", "DiffusionConfig")
]


@pytest.mark.parametrize("field", PLAIN_FIELDS)
def test_fact_without_a_reader_changes_the_namespace(known: Any, field: str) -> None:
    value = readers.plain(getattr_of(known, field))
    assert namespace(changed(known, field, other_than(value))) != namespace(known)


def getattr_of(config: Any, field: str) -> Any:
    name, _, attribute = field.partition(".")
    for step in filter(None, PLACES[name].split(".")):
        config = getattr(config, step)
    return getattr(config, attribute, None)


def test_facts_of_images_and_sound_change_the_namespace(known: Any) -> None:
    config = changed(known, "ModelConfig.multimodal_config", MultiModalConfig())
    fields = [field for fact in FACTS for field in fields_of(fact)]
    mine = [field for field in fields if field.startswith("MultiModalConfig.")]
    values = [other_than(readers.plain(getattr_of(config, field))) for field in mine]
    found = {
        namespace(changed(config, field, value)) for field, value in zip(mine, values, strict=True)
    }
    assert len(found | {namespace(config), namespace(known)}) == len(mine) + 2


def test_engines_with_adapters_share_what_the_model_computes_alone(known: Any) -> None:
    def adapting(**told: Any) -> str:
        return namespace(changed(known, "VllmConfig.lora_config", LoRAConfig(**told)))

    assert adapting() == adapting(max_loras=2, lora_dtype=torch.float32) == namespace(known)
    others: list[dict[str, Any]] = [
        *({"target_modules": ["q_proj"]}, {"lora_dtype": torch.bfloat16}),
        *({"enable_tower_connector_lora": True}, {"enable_moe_shared_loras": True}),
        {"enable_mixed_moe_lora_format": True},
    ]
    assert len({adapting(**other) for other in others} | {namespace(known)}) == len(others) + 1


NOT_CHANGEABLE = next(iter(CANNOT_MATTER.values()))
"""Parts of the configuration, whose fields are tried one by one."""


def test_no_field_that_cannot_matter_changes_the_namespace(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM takes one model runner or the other for what is asked of it: a fact of its own.
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    before = namespace(known)
    for field in chain(*CANNOT_MATTER.values()):
        name, _, attribute = field.partition(".")
        if name not in PLACES or attribute == "*" or field in NOT_CHANGEABLE:
            continue
        if name in ("MultiModalConfig", "DiffusionConfig"):
            continue
        value = getattr_of(known, field)
        assert namespace(changed(known, field, other_than(value))) == before, field


def test_equal_engines_have_one_namespace(known: Any, tiny_model: Path) -> None:
    assert namespace(engine(tiny_model)) == namespace(known)


LAYOUTS: dict[str, dict[str, Any]] = {
    "kv_groups": {"kv_cache": caches(block_size=16)},
    "kv_layout": {"offloaded": offloading(layout="LBNHC")},
    "kv_dtype": {"offloaded": offloading(dtype="fp8")},
    "parallel": {"offloaded": offloading(tp_size=2)},
    "replicated": {"offloaded": offloading(replicated=True)},
    "blocks_per_chunk": {"offloaded": offloading(blocks_per_chunk=2)},
    "tokens_per_hash": {"offloaded": offloading(tokens_per_hash=16)},
    "weights_version": {"weights_version": "2"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_keys_change_the_namespace(known: Any, name: str) -> None:
    assert namespace(known, **LAYOUTS[name]) != namespace(known)


def test_hash_algorithm_changes_the_namespace(known: Any) -> None:
    other = changed(known, "CacheConfig.prefix_caching_hash_algo", "sha256_cbor")
    assert namespace(other) != namespace(known)


def test_interleaving_of_context_parallelism_counts_only_with_it(known: Any) -> None:
    field = "ParallelConfig.cp_kv_cache_interleave_size"
    other = changed(known, field, 16)
    spread = offloading(dcp_size=2)
    assert namespace(other, None, spread) != namespace(known, None, spread)
    assert namespace(other) == namespace(known)
    whole = offloading(canonical=True)
    assert namespace(other, None, whole) == namespace(known, None, whole)


# Readers


def model(**config: Any) -> Any:
    """What the readers look at in vLLM's `ModelConfig`."""
    told = {name: config.pop(name) for name in list(config) if name in MODEL}
    hf_config = SimpleNamespace(to_dict=lambda: config, _commit_hash=told.pop("commit", None))
    return SimpleNamespace(**{**MODEL, "hf_config": hf_config, "hf_text_config": hf_config, **told})


MODEL: dict[str, Any] = {
    "model": "/nowhere",
    "model_weights": "",
    "revision": None,
    "commit": None,
    "max_model_len": 4096,
    "original_max_model_len": 4096,
    "is_multimodal_model": False,
    "multimodal_config": None,
    "trust_remote_code": False,
    "code_revision": None,
    "quantization": None,
    "dtype": "float32",
}


def length_of(**config: Any) -> Any:
    return readers.length(
        readers.ReadableEngine(SimpleNamespace(model_config=model(**config)), None, None)
    )


ORIGINAL = "original_max_position_embeddings"
LONG: dict[str, Any] = {"rope_type": "longrope", ORIGINAL: 4096}
LLAMA4: dict[str, Any] = {"text_config": {"model_type": "llama4_text"}}


@pytest.mark.parametrize(
    ("config", "most", "expected"),
    [
        ({"rope_parameters": LONG}, 2048, {"rope": "short"}),
        ({"rope_parameters": LONG}, 4096, {"rope": "short"}),
        ({"rope_parameters": LONG}, 4097, {"rope": "long"}),
        ({"rope_scaling": {"type": "su"}, ORIGINAL: 4096}, 8192, {"rope": "long"}),
        ({"text_config": {"rope_parameters": {"full": LONG}}}, 8192, {"rope": "long"}),
        (LLAMA4, 8192, {"temperature": False}),
        (LLAMA4, 32768, {"temperature": False}),
        (LLAMA4, 32769, {"temperature": True}),
        *(
            ({"rope_parameters": {"rope_type": kind}}, 8192, None)
            for kind in ("default", "linear", "llama3", "yarn", "dynamic")
        ),
        ({"rope_parameters": {"rope_type": "new"}}, 4096, {"rope": ["new", 4096]}),
        ({"is_multimodal_model": True}, 4096, {"multimodal": 4096}),
    ],
)
def test_longest_prompt_counts_by_its_effect_or_as_it_is_where_that_is_not_known(
    config: dict[str, Any], most: int, expected: Any
) -> None:
    assert length_of(max_model_len=most, **config) == expected


def test_longrope_of_a_length_that_workers_did_not_know_is_another() -> None:
    """They built the model before."""
    found = [
        length_of(max_model_len=most, original_max_model_len=first, rope_parameters=LONG)
        for most, first in ((2048, -1), (2048, 4096), (8192, 4096))
    ]
    assert found[0] not in found[1:]


def test_only_longrope_looks_at_the_longest_prompt_among_vllms_ropes() -> None:
    """A rope that vLLM adds, and that does so as well, must come into `readers.length`."""
    folder = Path(inspect.getfile(rotary_embedding)).parent
    found = [path.name for path in folder.glob("*.py") if "max_model_len" in path.read_text()]
    assert found == ["phi3_long_rope_scaled_rope.py"]
    kinds = set(
        re.findall(
            r'scaling_type (?:==|in) [\[("]+([a-z0-9_]+)',
            folder.joinpath("__init__.py").read_text(),
        )
    )
    assert {"llama3", "longrope"} <= kinds
    assert kinds <= readers.SAME_AT_ALL_LENGTHS | {"longrope"}


# Weights


LOAD = SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={})
PARALLEL = SimpleNamespace(
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=1,
    enable_expert_parallel=False,
)


def load(form: str, **extra: Any) -> Any:
    return SimpleNamespace(load_format=form, download_dir=None, model_loader_extra_config=extra)


def content(load_config: Any = LOAD, parallel: Any = PARALLEL, **told: Any) -> str:
    config = SimpleNamespace(
        model_config=model(**told), load_config=load_config, parallel_config=parallel
    )
    return readers.content_of(readers.ReadableEngine(config, None, None))


def weights_in(folder: Path, text: bytes = b"w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.frombuffer(text, np.uint8)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("inside", ["", "model.safetensors"], ids=["folder", "file"])
def test_weights_in_a_folder_or_a_file_go_by_content(tmp_path: Path, inside: str) -> None:
    one, same = weights_in(tmp_path / "one"), weights_in(tmp_path / "same")
    other = weights_in(tmp_path / "other", b"v")
    found = [content(model=str(folder / inside)) for folder in (one, same, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("named", "last"),
    [("m.gguf", "m.gguf"), ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")],
    ids=["whole", "parts"],
)
def test_weights_in_a_gguf_file_and_its_other_parts_go_by_content(
    tmp_path: Path, named: str, last: str
) -> None:
    found = []
    for folder, value in ((tmp_path / "one", 1), (tmp_path / "same", 1), (tmp_path / "other", 2)):
        folder.mkdir()
        gguf(folder / named, {"v": np.zeros(64, np.float32)})
        gguf(folder / last, {"w": np.full(64, value, np.float32)})
        found.append(content(load("gguf"), model=str(folder / named)))
    assert found[0] == found[1] != found[2]


def test_scales_in_a_file_beside_the_weights_count(tmp_path: Path) -> None:
    folder = weights_in(tmp_path)
    before = content(model=str(folder))
    (folder / "hf_quant_config.json").write_text("{}")
    assert content(model=str(folder)) != before


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub; returns where the commit's files are."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    return root / "snapshots" / COMMIT


@pytest.mark.parametrize("told", [{}, {"commit": COMMIT}, {"revision": COMMIT}])
def test_weights_of_a_hub_model_go_by_content_if_they_are_here(
    hub: Path, tmp_path: Path, told: dict[str, str]
) -> None:
    weights_in(hub)
    folder = weights_in(tmp_path / "copied")
    assert content(model="org/name", **told) == content(model=str(folder))


def test_weights_of_a_hub_model_go_by_its_commit_if_they_are_not_here(hub: Path) -> None:
    assert content(model="org/name", commit=COMMIT) == f"org/name at {COMMIT}"


@pytest.mark.parametrize("revision", [None, "main", "None"])
def test_hub_model_of_an_unknown_commit_is_refused(hub: Path, revision: str | None) -> None:
    with pytest.raises(SettingError, match=r"commit on the hub is not known. Set weights_version"):
        content(model="org/name", revision=revision)


@pytest.mark.parametrize(
    ("load_config", "told"),
    [
        (load("runai_streamer"), {"model_weights": "s3://bucket/model"}),
        (load("auto"), {"model": "gs://bucket/model"}),
        (load("runai_streamer"), {"model": "az://bucket/model"}),
        (load("tensorizer", tensorizer_config={"tensorizer_uri": "s3://b/m.tensors"}), {}),
        (load("tensorizer", tensorizer_config={"tensorizer_dir": "/nowhere"}), {}),
        (load("modelexpress"), {}),
        (load("ipc_cache"), {}),
        (load("a plugin's"), {}),
        (load("dummy"), {"quantization": "awq"}),
    ],
)
def test_weights_that_cannot_be_read_are_refused(
    tmp_path: Path, load_config: Any, told: dict[str, str]
) -> None:
    folder = str(weights_in(tmp_path))
    with pytest.raises(SettingError, match=r"Set weights_version"):
        content(load_config, **{"model": folder, **told})


def test_weights_that_cannot_be_read_go_by_weights_version(known: Any) -> None:
    far = changed(known, "ModelConfig.model_weights", "s3://bucket/model")
    with pytest.raises(SettingError, match="weights_version"):
        namespace(far)
    assert namespace(far, weights_version="1") != namespace(far, weights_version="2")


def test_tensorizers_files_of_all_ranks_count(tmp_path: Path) -> None:
    uri = str(tmp_path / "model-rank-%03d.tensors")
    found = []
    for last in (b"a", b"a", b"b"):
        for rank, text in enumerate((b"0", last)):
            (tmp_path / f"model-rank-{rank:03}.tensors").write_bytes(text)
        told = load("tensorizer", tensorizer_config={"tensorizer_uri": uri})
        found.append(content(told, model="/nowhere"))
    assert found[0] == found[1] != found[2]


def test_dummy_weights_depend_on_ranks() -> None:
    two = SimpleNamespace(**{**vars(PARALLEL), "tensor_parallel_size": 2})
    assert content(load("dummy")) != content(load("dummy"), two)


def test_vllm_fills_dummy_weights_from_one_fixed_seed() -> None:
    tensors = [torch.empty(64) for _ in range(2)]
    for seed, tensor in enumerate(tensors):
        torch.manual_seed(seed)
        initialize_single_dummy_weight(tensor)
    assert torch.equal(*tensors)


# The rest


def test_model_that_transformers_computes_is_another(tiny_model: Path, known: Any) -> None:
    assert namespace(engine(tiny_model, model_impl="transformers")) != namespace(known)
    assert namespace(changed(known, "ModelConfig.model_impl", "vllm")) == namespace(known)


def test_overrides_of_the_models_config_count_as_what_they_have_changed(
    tiny_model: Path, known: Any
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    same = {"rms_norm_eps": known.model_config.hf_config.rms_norm_eps}
    assert namespace(engine(tiny_model, hf_overrides=rope)) != namespace(known)
    assert namespace(engine(tiny_model, hf_overrides=same)) == namespace(known)


SPECULATIVE = "VllmConfig.speculative_config"


def speculative(method: str, folder: Path, **hf_config: Any) -> Any:
    draft = model(model=str(folder), **hf_config)
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=2,
        draft_model_config=draft,
        enable_adaptive_verification=False,
    )


def test_draft_counts_by_its_weights_where_chunks_have_its_kv(known: Any, tmp_path: Path) -> None:
    def drafted(method: str, folder: Path) -> str:
        return namespace(changed(known, SPECULATIVE, speculative(method, folder)))

    one, same = weights_in(tmp_path / "one"), weights_in(tmp_path / "same")
    other = weights_in(tmp_path / "other", b"v")
    assert drafted("eagle3", one) == drafted("eagle3", same) != drafted("eagle3", other)
    assert drafted("ngram", one) == drafted("suffix", other) == namespace(known)


def test_captured_layers_count(known: Any, tmp_path: Path) -> None:
    found = set()
    for layers in ([1], [1, 2]):
        told = speculative("extract_hidden_states", tmp_path)
        told.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = layers
        found.add(namespace(changed(known, SPECULATIVE, told)))
    assert len(found | {namespace(known)}) == 3


def test_instruction_sets_count_only_where_a_cpu_computes(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(features: list[str]) -> str:
        monkeypatch.setattr(readers, "cpu_features", lambda: features)
        return namespace(known)

    assert on(["avx2"]) != on(["avx2", "amx_tile"])
    on_cpu = on(["avx2"])
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    assert on(["avx2"]) == on(["avx2", "amx_tile"]) != on_cpu


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags : fpu avx2 sse amx_tile\nflags : avx2", ["amx_tile", "avx2"]),
        ("Features\t: asimd bf16", ["asimd", "bf16"]),
        ("", []),
    ],
)
def test_instruction_sets_are_those_of_the_first_core(
    tmp_path: Path, cpuinfo: str, expected: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert readers.cpu_features(tmp_path / "cpuinfo") == expected
    assert readers.cpu_features(tmp_path / "none") == []


def test_attention_is_what_vllm_chooses_whatever_was_asked_for(known: Any) -> None:
    asked = changed(known, "AttentionConfig.backend", AttentionBackendEnum.FLASH_ATTN)
    assert readers.attention(readers.ReadableEngine(asked, caches(), offloading())) == "CPU_ATTN"
    assert namespace(asked) == namespace(known)


def test_attention_of_other_devices_is_another(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespace(known)
    backend = SimpleNamespace(get_name=lambda: "OTHER")
    monkeypatch.setattr(selector, "get_attn_backend", lambda *_, **__: backend)
    assert namespace(known) != before


def test_variables_that_change_values_count(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(readers.ENVIRONMENT) <= set(vllm.envs.environment_variables)
    before = namespace(known)
    for name in readers.ENVIRONMENT:
        monkeypatch.setenv(name, "other")
        assert namespace(known) != before, name
        monkeypatch.delenv(name)


def test_version_counts_whole(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for version in ("0.32.0", "0.32.1", "0.32.1+cpu"):
        monkeypatch.setattr(facts_module, "vllm_version", lambda version=version: version)
        found.add(namespace(known))
    assert len(found) == 3


def test_seed_of_hashes_counts_and_a_random_one_is_nobody_elses(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(algorithm: str, engine: str) -> str:
        config = changed(known, "CacheConfig.prefix_caching_hash_algo", algorithm)
        config.__dict__["kv_transfer_config"] = SimpleNamespace(engine_id=engine)
        return namespace(config)

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert seeded("sha256", "a") == seeded("sha256", "b")
    assert seeded("xxhash", "a") != seeded("xxhash", "b")
    unseeded = seeded("sha256", "a")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert seeded("xxhash", "a") == seeded("xxhash", "b")
    assert seeded("sha256", "a") != unseeded


@pytest.mark.parametrize(
    ("read", "file", "told"),
    [
        (readers.code, "modeling.py", {"trust_remote_code": True}),
        (readers.processor, "preprocessor_config.json", {"is_multimodal_model": True}),
    ],
    ids=["code", "processor"],
)
def test_models_own_code_and_processor_count_by_their_files_where_they_are_used(
    tmp_path: Path, read: Callable[[Any], Any], file: str, told: dict[str, Any]
) -> None:
    def found(text: str, **told: Any) -> Any:
        (tmp_path / file).write_text(text)
        config = SimpleNamespace(model_config=model(model=str(tmp_path), **told), load_config=LOAD)
        return read(readers.ReadableEngine(config, None, None))

    assert found("a", **told) != found("b", **told)
    assert found("a") == found("b") is None


def test_scales_of_an_encoder_count_by_content(tmp_path: Path) -> None:
    found = set()
    for text in ("a", "b"):
        (tmp_path / "scales").write_text(text)
        told = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / "scales"))
        config = SimpleNamespace(model_config=model(multimodal_config=told))
        found.add(readers.scales_of_encoder(readers.ReadableEngine(config, None, None)))
    assert len(found) == 2


def test_fact_that_cannot_be_read_stops_the_start_with_its_name(known: Any, tmp_path: Path) -> None:
    config = changed(known, "ModelConfig.multimodal_config", None)
    config.model_config.__dict__["multimodal_config"] = SimpleNamespace(
        mm_encoder_fp8_scale_path=str(tmp_path / "missing")
    )
    with pytest.raises(SettingError, match=r"can't read encoder_scales .*missing"):
        namespace(config)


def test_fact_without_the_same_text_everywhere_is_refused() -> None:
    with pytest.raises(TypeError, match="same in every process"):
        readers.plain({"a": object()})
    assert readers.plain({"b": {2, 1}, 1: (torch.float32, Path)}) == {
        "b": [1, 2],
        "1": ["torch.float32", f"{Path.__module__}.Path"],
    }
