"""vLLM's internals: each that RayKV touches is there, has a row, and is touched in one folder."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raykv.base.errors import VersionError
from raykv.base.settings import Settings
from raykv.vllm import plugin
from raykv.vllm.internals import engine, names
from raykv.vllm.internals.names import (
    NEEDED,
    OFFLOADING_WORKER,
    TRACKER,
    WORKER,
    Touched,
    missing_of,
    require,
    vllm_version,
)
from tests.fixtures.vllm_names import INTERFACES, READ_ANYWHERE, TABLE, Row
from tests.house import ROOT, SOURCES

INHERITED = {"_get_connector_metadata"}
"""What `KVConnectorBase_V1` has for its subclasses, by its own docstring."""

NOT_VLLMS = {
    *("_collector_to_names", "_name", "_commit_hash"),  # prometheus_client, Transformers
    *("_exit", "_global_node", "_deployment_id", "_normalize_prompt_to_string"),  # os, Ray
    "_to_object_ref_gen",
}
"""Of others."""

GENERAL = {
    *("kv_cache_config", "kv_cache_spec", "lora_config", "req_id", "is_store"),
    *("collective_rpc", "sleep", "tokens_per_block"),
    *("kv_transfer_params", "num_cached_tokens", "outputs", "request_id", "cached_tokens"),
    "WAITING",
    *("add_request", "has_unfinished_requests", "reset_prefix_cache", "wake_up"),
}
"""Public names in the table that interfaces have as well, so that they tell nothing."""

ROWS = [(row, name) for row in TABLE for name in row.names.split() or [""]]
"""No name: the module itself."""


def given_names(tree: ast.AST) -> set[str]:
    """Names of functions and fields, and what objects are given by their own methods."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
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


@pytest.mark.parametrize(
    ("row", "name"), ROWS, ids=lambda part: part.owner if isinstance(part, Touched) else part
)
def test_installed_vllm_has_what_is_touched(row: Row, name: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    if row.is_in(vllm_version()):
        found = names_of(row.owner)
        assert not name or name in found, f"{row.owner} of this vLLM has no {name}"


@pytest.mark.parametrize("module", INTERFACES)
def test_installed_vllm_has_its_interfaces(module: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    import_module(module)


def test_no_name_stands_twice() -> None:
    assert len(ROWS) == len({(row.owner, name) for row, name in ROWS})


# What files touch


def read_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that are read or set of anything, by line; with `getattr` and a text too."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr=name)
                | ast.Call(
                    func=ast.Name(id="getattr" | "setattr" | "hasattr"),
                    args=[_, ast.Constant(str(name)), *_],
                )
                | ast.Subscript(
                    value=ast.Attribute(attr="__dict__") | ast.Call(func=ast.Name(id="vars")),
                    slice=ast.Constant(str(name)),
                )
            ):
                yield node.lineno, name


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Modules of vLLM that are imported or named by a text, and what is taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value), ""


def overridden(tree: ast.AST) -> set[str]:
    """Methods that do what their base class's does, and more."""
    return {
        method.name
        for method in ast.walk(tree)
        if isinstance(method, ast.FunctionDef)
        and not is_hidden(method.name)
        and f"super().{method.name}(" in ast.unparse(method)
    }


def is_hidden(name: str) -> bool:
    """Whether a name is not for others; those of every named tuple's methods are."""
    is_ours = name.endswith("__") or name in {"_asdict", "_replace"}
    return name.startswith("_") and name.isidentifier() and not is_ours


def is_known(module: str, name: str) -> bool:
    """Whether an import is of an interface, or has a row."""
    if module in INTERFACES and not name.startswith("_"):
        return True
    for row in TABLE:
        owner, _, class_name = row.owner.partition(":")
        if module == owner and name in {"", class_name, *row.names.split()}:
            return True
        if f"{module}.{name}" == owner:
            return True
    return False


PUBLIC = {
    name
    for row, name in ROWS
    if row not in READ_ANYWHERE and row.owner.count(":")
    if not is_hidden(name) and name not in GENERAL
}
"""Names in the table that tell whose they are, though they have no underscore."""


def touches(tree: ast.AST, own: set[str]) -> list[str]:
    """Where a file touches what only the internals may, or imports what has no row."""
    allowed = own | INHERITED | NOT_VLLMS
    elsewhere = PUBLIC - own - overridden(tree)
    found = [
        f"line {line}: {name}"
        for line, name in read_names(tree)
        if (is_hidden(name) and name not in allowed) or name in elsewhere
    ]
    for line, module, name in imports(tree):
        if module.partition(".")[0] == "vllm" and not is_known(module, name):
            found.append(f"line {line}: {module}.{name}")
    return found


@cache
def trees() -> dict[str, ast.AST]:
    """Of all sources, by path."""
    paths = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    return {path: ast.parse(Path(ROOT, path).read_text()) for path in paths}


def is_internal(path: str) -> bool:
    return path.startswith("raykv/vllm/internals/")


def test_internals_are_touched_in_one_folder_only() -> None:
    """A name with an underscore counts as vLLM's if none of our files gives it to its own objects.

    What it does not see: public names of internal objects that are ours too, or too general; names
    that are put together when the code runs; and what is passed on as a text.
    """
    files = {path: tree for path, tree in trees().items() if not is_internal(path)}
    own = {name for tree in files.values() for name in given_names(tree)}
    found = {path: touches(tree, own) for path, tree in files.items()}
    assert not {path: lines for path, lines in found.items() if lines}


def test_rows_have_what_the_folder_touches() -> None:
    hidden, imported = set(), set()
    for path, tree in trees().items():
        if not is_internal(path) or Path(path).name == "names.py":
            continue
        imported |= {each[1:] for each in imports(tree) if each[1].startswith("vllm")}
        texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        read = texts.union(name for _, name in read_names(tree))
        hidden |= {name for name in read if is_hidden(name)} - given_names(tree)
    assert hidden - {name for _, name in ROWS} == {"_raykv"}
    assert not {each for each in imported if not is_known(*each)}


@pytest.mark.parametrize(
    "source",
    [
        "scheduler._jobs",
        "super()._lookup(key)",
        "self._kv_cache_manager.refresh()",
        'getattr(scheduler, "_events_tracker", None)',
        'self.__dict__["connector_worker"]',
        'vars(connector)["connector_worker"]',
        "status.transfer_jobs.clear()",
        "request.finished_signaled = True",
        "model.load_weights = call",
        "from vllm.v1.engine.core import EngineCoreProc",
        "from vllm.platforms import _current_platform",
        "import vllm.v1.engine.utils",
        'import_module("vllm.v1.engine.utils")',
    ],
)
def test_touch_is_seen(source: str) -> None:
    assert len(touches(ast.parse(source), {"_own"})) == 1


@pytest.mark.parametrize(
    ("ours", "owner"),
    [("worker:RayKVConnectorWorker", OFFLOADING_WORKER), ("manager:ChunkTracker", TRACKER)],
)
def test_rows_have_what_a_subclass_overrides(ours: str, owner: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    module, _, class_name = ours.partition(":")
    subclass = getattr(import_module(f"raykv.vllm.{module}"), class_name)
    base = subclass.__mro__[1]
    both = {name for name in vars(subclass) if name in vars(base) and not name.endswith("__")}
    assert both
    assert both <= {name for row, name in ROWS if row.owner == owner}


# What the start refuses


class Owner:
    """Of objects with an attribute."""

    def __init__(self) -> None:
        self.number = 1

    def method(self) -> None:
        """There."""


class Heir(Owner):
    """Overrides what its base may have no more."""

    def gone(self) -> None:
        """Not there."""


@pytest.mark.parametrize(
    ("owner", "wanted", "expected"),
    [
        (f"{__name__}:Owner", "method number", ""),
        (f"{__name__}:Owner", "method gone", "Owner.gone"),
        (f"{__name__}:Gone", "method", f"{__name__}.Gone"),
        ("vllm.gone", "method", "vllm.gone"),
        ("dataclasses", "field gone", "dataclasses.gone"),
    ],
)
def test_missing_name_is_found(owner: str, wanted: str, expected: str) -> None:
    assert missing_of(Touched(owner, wanted), Heir()) == expected


def worker_side() -> Any:
    """Of RayKV, made as by vLLM."""
    from raykv.vllm.worker import RayKVConnectorWorker
    from tests.fixtures.vllm import FULL, kv_cache_config, layerwise_config, worker_spec

    return RayKVConnectorWorker(
        worker_spec(Settings()), layerwise_config(), kv_cache_config([FULL])
    )


@pytest.fixture(scope="module")
def objects() -> list[Any]:
    """What an engine's start has at hand: connector, vLLM's offloading scheduler, worker's side."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from tests.fixtures.vllm import Engine

    connector = Engine().connector
    connector._kv_cache_manager = None
    return [connector, connector.scheduler, worker_side()]


@pytest.mark.parametrize("part", NEEDED)
def test_installed_vllm_has_what_each_part_needs(part: str, objects: list[Any]) -> None:
    assert NEEDED[part]
    require(part, *objects)


@pytest.mark.parametrize(
    ("part", "row"),
    [(part, row) for part, rows in NEEDED.items() for row in rows],
    ids=lambda each: each.owner if isinstance(each, Touched) else each,
)
def test_start_is_refused_in_one_sentence_without_a_name_that_is_needed(
    part: str, row: Touched, objects: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = replace(row, names=f"{row.names.split()[0]} gone")
    monkeypatch.setattr(names, "NEEDED", {part: (lacking,)})
    with pytest.raises(VersionError, match=r"know this vLLM .*: there is no .*gone; install"):
        require(part, *objects)


def test_start_is_refused_where_vllm_does_not_call_what_a_subclass_overrides(
    objects: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = type(objects[2]).__mro__[1]
    monkeypatch.delattr(base, "prepare_store_kv")
    with pytest.raises(VersionError, match=r"no OffloadingConnectorWorker\.prepare_store_kv"):
        require(WORKER, *objects)


@pytest.fixture
def lost_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector is in a module that needs one of vLLM's that has gone."""
    (tmp_path / "needs_what_has_gone.py").write_text("from vllm.gone import anything\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(plugin.CONNECTORS, "RayKVConnector", "needs_what_has_gone")


@pytest.mark.usefixtures("lost_module")
def test_connector_without_a_module_of_vllms_is_refused_in_one_sentence() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    with pytest.raises(VersionError, match=r"know this vLLM .*: No module named 'vllm.gone'; inst"):
        plugin.__getattr__("RayKVConnector")


def test_plugin_has_no_other_classes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'OffloadingConnector'"):
        plugin.__getattr__("OffloadingConnector")


def test_hook_that_vllm_lacks_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
    monkeypatch.setattr(factory.KVConnectorFactory, "_registry", {})
    hooked: list[str] = []

    def lacking(*_: object) -> None:
        raise AttributeError("planted")

    monkeypatch.setattr(plugin, "wrap_arguments", lacking)
    monkeypatch.setattr(engine, "wrap_multi_connector", lacking)
    monkeypatch.setattr(plugin, "watch_front_ends", lacking)
    monkeypatch.setattr(plugin, "watch_prompts", lambda: hooked.append("prompts"))
    plugin.register()
    assert hooked == ["prompts"]


@pytest.mark.usefixtures("lost_module")
def test_other_version_is_refused_before_its_modules_are_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raykv.vllm.internals.names.vllm_version", lambda: "0.34.0")
    with pytest.raises(VersionError, match=r"works with vLLM 0.32 or 0.33; this is vLLM 0.34.0"):
        plugin.__getattr__("RayKVConnector")


# Methods that are wrapped


def test_method_that_is_wrapped_stays_wrapped_once() -> None:
    class Wrapped:
        def method(self) -> int:
            return 1

    def one_more(method: object) -> object:
        return lambda owner: method(owner) + 1  # type: ignore[operator]

    assert [engine.wrap(Wrapped, "method", one_more) for _ in range(2)] == [True, True]
    assert Wrapped().method() == 2
    assert not engine.wrap(Wrapped, "gone", one_more)
