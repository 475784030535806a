"""vLLM's internals: each that RayKV touches is there, and none is touched but in one file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import pytest

from raykv.base.errors import VersionError
from raykv.vllm import internals
from raykv.vllm.internals import vllm_version
from tests.house import SOURCES

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

INTERFACES = {
    "vllm",
    "vllm.config",
    "vllm.entrypoints.cli.main",  # what the command `vllm` runs
    "vllm.platforms",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_offload.base",
    # In the signatures of `OffloadingManager` and `OffloadingConnector`.
    f"{OFFLOADING}.common",
    f"{OFFLOADING}.metrics",
    "vllm.v1.metrics.cache_hit_source",
    # The classes of which `OffloadingConnector` is made, and RayKV's subclasses instead.
    f"{OFFLOADING}.events",
    f"{OFFLOADING}.worker",
}
"""Modules whose public names any file may use."""

INHERITED = {"_get_connector_metadata"}
"""What `KVConnectorBase_V1` has for its subclasses, by its own docstring."""

NOT_VLLMS = {"_collector_to_names", "_name", "_commit_hash"}
"""Of prometheus_client's registry, and of configurations of Transformers."""

INTERNALS = {
    "vllm._custom_ops": "cpu_attn_reshape_and_cache",
    "vllm.device_allocator.alloc_conf": (
        "current_alloc_conf conf_flag_enabled with_conf_flag set_alloc_conf EXPANDABLE_SEGMENTS"
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "_registry",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "_kv_cache_manager",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": "_connectors",
    f"{OFFLOADING}.canonical_mapping": "canonical_format_id",
    f"{OFFLOADING}.config": "build_offloading_config",
    f"{OFFLOADING}.events:OffloadingEventsTracker": (
        "_build_event_metadata _group_specs record_store record_lookup take_events"
    ),
    f"{OFFLOADING}.metrics:OffloadPromMetrics": "_observe_deprecated_metrics",
    f"{OFFLOADING}.scheduler:GroupOffloadConfig": (
        "group_idx requires_cow_source tokens_per_block tokens_per_chunk "
        "sliding_window_size_in_chunks"
    ),
    f"{OFFLOADING}.scheduler:OffloadingConnectorScheduler": (
        "_block_id_to_pending_jobs _chunks_being_loaded _current_batch_allocated_block_ids "
        "_current_batch_jobs_to_flush _current_batch_load_jobs _events_tracker _job_counter _jobs "
        "_reachable_store_block_mask _req_status _reset_fence _stale_job_threshold config manager"
    ),
    f"{OFFLOADING}.scheduler:RequestGroupState": "block_ids offload_keys",
    f"{OFFLOADING}.scheduler:RequestOffloadState": (
        "finished_signaled group_states max_load_tokens max_offload_tokens req req_context "
        "transfer_jobs update_offload_keys"
    ),
    f"{OFFLOADING}.scheduler:SchedulerOffloadConfig": (
        "blocks_per_chunk from_spec kv_group_configs retention_interval tokens_per_hash"
    ),
    f"{OFFLOADING}.scheduler:TransferJobStatus": (
        "deferred_fence_block_ids fenced_block_ids is_store keys req_id"
    ),
    f"{OFFLOADING}.worker:OffloadingConnectorWorker": (
        "_connector_worker_meta _is_store_writer _load_jobs _unsubmitted_store_jobs worker"
    ),
    "vllm.distributed.kv_transfer.kv_connector.utils": "get_current_attn_backends",
    "vllm.distributed.parallel_state": (
        "_WORLD _INNER_DP_WORLD _TP _ETP _EP _EPLB _DCP _PCP _PP _DP _ENGRAM_DP GroupCoordinator"
    ),
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.lora.worker_manager:WorkerLoRAManager": "_load_adapter lora_config",
    "vllm.model_executor.model_loader.utils": "initialize_model",
    "vllm.renderers.base:BaseRenderer": "_process_tokens _process_tokens_async config",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils.import_utils": "resolve_obj_by_qualname",
    "vllm.utils.torch_utils": "set_default_torch_dtype",
    "vllm.v1.attention.backends.cpu_attn": "_get_attn_isa",
    "vllm.v1.attention.backends.utils": "get_supported_kv_cache_layouts",
    "vllm.v1.attention.selector": "get_attn_backend get_mamba_attn_backend",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "evict_blocks",
    "vllm.v1.core.kv_cache_utils": "DEFAULT_NONE_HASH_SEED _gen_lora_extra_hash_keys",
    "vllm.v1.engine.core:EngineCore": (
        "_initialize_kv_caches _reset_caches collective_rpc model_executor scheduler "
        "set_weight_version sleep"
    ),
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs vllm_config",
    "vllm.v1.executor.abstract:Executor": "collective_rpc is_sleeping",
    "vllm.v1.worker.gpu.attn_utils": "get_kv_cache_spec",
    "vllm.v1.worker.gpu_worker:Worker": "compile_or_warm_up_model get_model vllm_config",
}
"""Names by their owner, a module or a class in it."""

SINCE = {"_group_specs": "0.33", "_reset_fence": "0.33"}
"""Those that earlier versions do without."""

ROWS = [(owner, name) for owner, names in INTERNALS.items() for name in names.split()]


def given_names(tree: ast.AST) -> set[str]:
    """Names of functions and fields, and what objects are given by their own methods."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                found.add(name)
    return found


@cache
def names_of(owner: str) -> set[str]:
    """What a module of vLLM's has, or a class, its objects included."""
    module_name, _, class_name = owner.partition(":")
    found = import_module(module_name)
    if not class_name:
        return set(dir(found))
    kinds = inspect.getmro(getattr(found, class_name))
    sources = [inspect.getsource(each) for each in kinds if each.__module__.startswith("vllm")]
    return set(dir(kinds[0])).union(*(given_names(ast.parse(each)) for each in sources))


@pytest.mark.parametrize(("owner", "name"), ROWS, ids=lambda part: str(part).rpartition(".")[2])
def test_installed_vllm_has_what_is_touched(owner: str, name: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    is_early = vllm_version() < SINCE.get(name, "")
    assert is_early or name in names_of(owner), f"{owner} of this vLLM has no {name}"


def read_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are read of anything, by line; with `getattr` and a text too."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr=name)
                | ast.Call(
                    func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(str(name)), *_]
                )
            ):
                yield node.lineno, name


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Modules of vLLM that are imported, and what is taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""


def is_hidden(name: str) -> bool:
    """Whether a name is not for others; that of every named tuple's method is."""
    is_ours = name.endswith("__") or name == "_replace"
    return name.startswith("_") and name.isidentifier() and not is_ours


def touches(tree: ast.AST, own: set[str]) -> list[str]:
    """Where a file touches vLLM's internals."""
    allowed = own | INHERITED | NOT_VLLMS
    found = [
        f"line {line}: {name}"
        for line, name in read_names(tree)
        if is_hidden(name) and name not in allowed
    ]
    for line, module, name in imports(tree):
        is_open = module in INTERFACES and not name.startswith("_")
        if module.partition(".")[0] == "vllm" and not is_open:
            found.append(f"line {line}: {module}.{name}")
    return found


def trees() -> dict[str, ast.AST]:
    files = [path for path in SOURCES if "raykv/vllm/" in path.as_posix()]
    return {path.stem: ast.parse(path.read_text()) for path in files}


def test_internals_are_touched_in_one_file_only() -> None:
    """A name with an underscore counts as vLLM's if none of our files gives it to its own objects.

    What it does not see: public names of objects that are internal, of which the table above has
    those that matter; a name that one of our classes has as well; names that are put together
    when the code runs; and what `vars` and `__dict__` give.
    """
    files = trees()
    ours = files.pop("internals")
    own = {name for tree in files.values() for name in given_names(tree)}
    assert touches(ours, set()), "the file is not read as it should be"
    found = {name: touches(tree, own) for name, tree in files.items()}
    assert not {name: lines for name, lines in found.items() if lines}


def test_table_has_what_the_file_touches() -> None:
    tree = trees()["internals"]
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    hidden = {name for name in texts.union(name for _, name in read_names(tree)) if is_hidden(name)}
    assert hidden - {name for _, name in ROWS} - given_names(tree) == {"_raykv"}
    known = {f"{owner}:{name}" for owner, name in ROWS}.union(INTERNALS)
    known |= {owner.partition(":")[0] for owner in INTERNALS}
    for _, module, name in imports(tree):
        if module.startswith("vllm.") and module not in INTERFACES:
            assert known & {f"{module}:{name}", f"{module}.{name}"}


@pytest.mark.parametrize(
    "source",
    [
        "scheduler._jobs",
        "super()._lookup(key)",
        "self._kv_cache_manager.evict_blocks([])",
        'getattr(scheduler, "_events_tracker", None)',
        "from vllm.v1.engine.core import EngineCore",
        "from vllm.platforms import _current_platform",
    ],
)
def test_touch_is_seen(source: str) -> None:
    assert len(touches(ast.parse(source), {"_own"})) == 1


def test_method_that_is_wrapped_stays_wrapped_once() -> None:
    class Owner:
        def method(self) -> int:
            return 1

    def one_more(method: object) -> object:
        return lambda owner: method(owner) + 1  # type: ignore[operator]

    assert [internals.wrap(Owner, "method", one_more) for _ in range(2)] == [True, True]
    assert Owner().method() == 2
    assert not internals.wrap(Owner, "gone", one_more)


def inner_names(tables: type) -> list[str]:
    return [each.attribute for each in vars(tables).values() if isinstance(each, internals.Inner)]


@pytest.mark.parametrize("tables", [internals.SchedulerTables, internals.WorkerTables])
def test_vllm_that_lacks_a_table_is_refused_at_the_start_in_one_sentence(tables: type) -> None:
    names = inner_names(tables)
    internals.require(tables(SimpleNamespace(**dict.fromkeys(names))))
    for name in names:
        others = SimpleNamespace(**dict.fromkeys(set(names) - {name}))
        with pytest.raises(VersionError, match=f"has no {name}; install vLLM"):
            internals.require(tables(others))
