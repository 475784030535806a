"""Imports point down one table only, and the sources keep the sizes that keep them readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "raykv").rglob("*.py"))

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class Row:
    """Modules that may import each other and all rows above, but not `except_for`.

    `packages` are what they may import from outside, besides the standard library; None: anything.
    """

    modules: tuple[str, ...]
    packages: frozenset[str] | None
    except_for: tuple[str, ...] = ()


def row(*modules: str, packages: str | None, except_for: tuple[str, ...] = ()) -> Row:
    names = None if packages is None else frozenset(packages.split())
    return Row(tuple(f"raykv.{module}" for module in modules), names, except_for)


TABLE = (
    row(
        "types",
        "errors",
        "config",
        "deadlines",
        "extras",
        "ownership",
        "parent",
        "parsing",
        "threads",
        packages="",
    ),
    row("warden", packages="psutil"),
    row(
        "messages",
        "breaker_types",
        "catalog_types",
        "description_types",
        "disk_types",
        "event_types",
        "findings",
        "handshake",
        "hint_types",
        "kv_types",
        "metric_types",
        "miss_types",
        "operation_types",
        "plan_types",
        "publisher_types",
        "state_types",
        "status_types",
        packages="msgspec",
        except_for=("raykv.config", "raykv.deadlines"),
    ),
    row(
        "block_hashes",
        "adapters",
        packages="cbor2 xxhash",
        except_for=("raykv.config", "raykv.deadlines"),
    ),
    row("core", packages="numpy", except_for=("raykv.config", "raykv.deadlines")),
    row(
        "directory", packages="llvmlite numba numpy", except_for=("raykv.config", "raykv.deadlines")
    ),
    row("memory", packages="cuda msgspec numpy torch", except_for=("raykv.directory",)),
    row("copy.kernel", packages="llvmlite numba", except_for=("raykv.directory",)),
    row("copy.cuda_kernel", packages="triton", except_for=("raykv.directory",)),
    row("copy", packages="cuda msgspec numpy torch", except_for=("raykv.directory",)),
    row("tiers", packages="msgspec numpy safetensors xxhash"),
    row("captured", packages="numpy safetensors torch"),
    row("actors", packages="msgspec numpy torch ray psutil prometheus_client xxhash zmq"),
    row("vllm", packages=None),
    row(
        "sizing",
        "tokens",
        packages="transformers vllm",
        except_for=("raykv.actors", "raykv.vllm"),
    ),
    row(
        "client",
        "client_operations",
        "listing",
        "shipping",
        packages="msgspec numpy ray psutil prometheus_client",
        except_for=("raykv.vllm",),
    ),
    row(
        "demo.prompts",
        "demo.report",
        packages="rich",
        except_for=("raykv.actors", "raykv.client", "raykv.vllm"),
    ),
    row("bench.prompts", "bench.conversations", packages=""),
    row("doctor", packages="rich", except_for=("raykv.actors", "raykv.client", "raykv.vllm")),
    row("bench.report", packages="rich", except_for=("raykv.actors", "raykv.client", "raykv.vllm")),
    row(
        "chaos.plan",
        "chaos.report",
        packages="rich",
        except_for=("raykv.actors", "raykv.client", "raykv.vllm"),
    ),
    row(
        "cli",
        "bench",
        "chaos",
        "demo",
        "inspect",
        "models",
        "serve",
        "vllm_command",
        "why_miss",
        packages=None,
    ),
)
VERSION = "raykv.__version__"
"""In `raykv/__init__.py`, and all that any other module may want from there."""

CORE_WITHOUT = {"asyncio", "os", "random", "socket", "threading", "time"}
"""The core gets the time, and anything random, as arguments; it touches nothing outside."""

KILLS_VLLM_CPU_WORKERS = {"llvmlite", "numba"}
"""vLLM's CPU worker dies if one of them is loaded already."""

LOADED_BY_NODES_ONLY = ("raykv.copy.kernel",)
"""Modules that import one of those when they are imported: that too is for functions only, and
which functions do it is listed here."""
LOADERS = {"raykv.copy.rows"}
LOADS_THEM = "raykv.directory"
"""Its modules, not the package itself, which anybody may import."""


@dataclass(frozen=True)
class Import:
    """One imported module, or a name in one; `at_start`: when its module is imported."""

    target: str
    line: int
    at_start: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """All imports in `source`, those in functions and for annotations too.

    For a bare `import raykv`: what is taken from it, as in `raykv.__version__`.
    """
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(outer)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        at_start = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != "raykv":
                    yield Import(alias.name, node.lineno, at_start)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(node, module, is_package=is_package)
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.lineno, at_start)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "raykv":
            yield Import(f"raykv.{node.attr}", node.lineno, at_start)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - 1 if is_package else node.level
    base = module.split(".")
    return ".".join([*base[: len(base) - up], *filter(None, [node.module])])


def row_of(name: str) -> int | None:
    """Index of the row of the module `name`, or of something in it."""
    for index, entry in enumerate(TABLE):
        if any(is_in(name, module) for module in entry.modules):
            return index
    return None


def is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module, one sentence each."""
    index = len(TABLE) - 1 if module == "raykv" else row_of(module)
    if index is None:
        return [f"{module} has no row in the table of imports"]
    return [
        f"{module}, line {each.line}: {wrong}"
        for each in imports_of(source, module, is_package=is_package)
        if (wrong := _complaint(each, module, index)) is not None
    ]


def _complaint(each: Import, module: str, index: int) -> str | None:
    own, package = TABLE[index], each.target.partition(".")[0]
    may_load = module in LOADED_BY_NODES_ONLY or module.startswith(f"{LOADS_THEM}.")
    if each.at_start and not may_load:
        if package in KILLS_VLLM_CPU_WORKERS:
            return f"{package} may be imported inside a function only"
        if each.target.rpartition(".")[0].startswith(f"{LOADS_THEM}."):
            return f"{each.target} may be imported inside a function only"
    for late in LOADED_BY_NODES_ONLY:
        if is_in(each.target, late) and (each.at_start or module not in LOADERS):
            return f"{late} may be imported inside a function of {', '.join(LOADERS)} only"
    if package == "raykv":
        return _complaint_inside(each.target, own, index)
    if is_in(module, "raykv.core") and package in CORE_WITHOUT:
        return f"the core may not import {package}"
    if package in sys.stdlib_module_names or own.packages is None or package in own.packages:
        return None
    return f"this row may not import {package}"


def _complaint_inside(target: str, own: Row, index: int) -> str | None:
    wanted = row_of(target)
    if target == VERSION:
        return None
    if wanted is None:
        is_bottom = index == len(TABLE) - 1
        return None if is_bottom else f"{target} is the public face, not a part"
    if wanted > index or any(is_in(target, other) for other in own.except_for):
        return f"{target} is not above it in the table"
    return None


def oversizes(source: str, module: str) -> list[str]:
    """Functions, and the file itself, that are longer than the house allows."""
    found = []
    if (length := len(source.splitlines())) > MAX_FILE_LINES:
        found.append(f"{module} has {length} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{module}.{node.name} has {length} lines")
    return found


def test_imports_of_every_module_point_down_the_table() -> None:
    found = []
    for path in SOURCES:
        is_package = path.name == "__init__.py"
        found += complaints(path.read_text(), module_name(path), is_package=is_package)
    assert SOURCES
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("raykv.types", "import msgspec", "may not import msgspec"),
        ("raykv.messages", "from raykv.config import Settings", "config.Settings is not above"),
        ("raykv.core.view", "import time", "the core may not import time"),
        ("raykv.core.view", "def f():\n    from random import Random", "may not import random"),
        ("raykv.core.view", "import os.path", "the core may not import os"),
        ("raykv.core.view", "import ray", "may not import ray"),
        ("raykv.core.view", "from raykv.config import Settings", "is not above"),
        ("raykv.core.view", "from ..memory import region", "raykv.memory.region is not above"),
        ("raykv.core", "from ..memory.region import Region", "memory.region.Region is not above"),
        ("raykv.core.view", "from .. import connect", "raykv.connect is the public face"),
        ("raykv.actors.node", "import raykv\nraykv.connect()", "raykv.connect is the public face"),
        ("raykv.copy.cpu", "from raykv import actors", "raykv.actors is not above"),
        ("raykv.actors.node", "import vllm.config", "may not import vllm"),
        ("raykv.actors.node", "if 1:\n    import raykv.vllm.spec", "raykv.vllm.spec is not above"),
        ("raykv.client", "import raykv.vllm.spec", "raykv.vllm.spec is not above"),
        ("raykv.client", "import torch", "may not import torch"),
        ("raykv.vllm.spec", "import numba", "inside a function only"),
        ("raykv.vllm.spec", "try:\n    import llvmlite.ir\nfinally: ...", "inside a function only"),
        ("raykv.copy.cpu", "import numba", "inside a function only"),
        ("raykv.copy.rows", "from raykv.copy.kernel import copy_rows", "inside a function of"),
        ("raykv.copy.cpu", "def f():\n    from raykv.copy import kernel", "inside a function of"),
        ("raykv.directory", "import numba", "inside a function only"),
        ("raykv.directory", "from .flat_table import FlatTable", "inside a function only"),
        ("raykv.actors.node", "from raykv.directory.rows import Rows", "inside a function only"),
        ("raykv.copy.cpu", "from raykv.directory import open_table", "is not above it"),
        ("raykv.demo.report", "def f():\n    import vllm", "may not import vllm"),
        ("raykv.demo.prompts", "from raykv.demo.run import run_demo", "run.run_demo is not above"),
        ("raykv.unheard_of", "", "has no row"),
    ],
)
def test_complaints_name_an_import_that_points_up(module: str, source: str, expected: str) -> None:
    found = complaints(source, module, is_package=module in ("raykv.core", "raykv.directory"))
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("raykv.types", "import enum, time"),
        ("raykv.core.view", "from .slots import SlotTable\nfrom ..types import Key\nimport numpy"),
        ("raykv.actors.node", "import ray\nfrom raykv import __version__\nimport raykv.core.slots"),
        ("raykv.directory.kernels", "import numba\nfrom raykv.directory.layout import KEY"),
        ("raykv.directory", "def f():\n    from raykv.directory.flat_table import FlatTable"),
        ("raykv.actors.scheduler", "from raykv.directory import open_table"),
        ("raykv.actors.node", "import raykv\nprint(raykv.__version__)"),
        ("raykv.vllm.spec", "def compile():\n    import numba"),
        ("raykv.vllm.spec", "if TYPE_CHECKING:\n    import numba"),
        ("raykv.copy.kernel", "import numba"),
        ("raykv.copy.rows", "def load():\n    from raykv.copy.kernel import copy_rows"),
        ("raykv.client", "from raykv.actors import cluster"),
        ("raykv.cli", "from raykv.client import connect\nimport typer"),
        ("raykv.demo.prompts", "from raykv.demo.report import Phase"),
        ("raykv.demo.run", "from raykv.demo.report import Report\nimport vllm"),
        ("raykv", "from raykv.client import connect"),
    ],
)
def test_complaints_are_none_when_imports_point_down(module: str, source: str) -> None:
    assert complaints(source, module) == []


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import raykv", ["ray", "torch", "vllm"]),
        ("import raykv.cli", ["torch", "vllm"]),
        ("import raykv.demo", ["ray", "torch", "vllm"]),
        ("import raykv.serve", ["ray", "torch", "vllm"]),
        ("import raykv.actors.node", ["llvmlite", "numba", "torch", "vllm"]),
        ("import raykv.actors.link", ["llvmlite", "numba", "torch", "vllm"]),
        ("import raykv.actors.scheduler", ["llvmlite", "numba", "torch", "vllm"]),
        *[
            (f"import {module_name(path)}", ["ray", "torch", "vllm"])
            for path in SOURCES
            if path.parent.name == "core"
        ],
    ],
)
def test_import_stays_light(statement: str, unwanted: list[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sys.modules.keys() & set({unwanted}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_files_and_functions_stay_short() -> None:
    found = []
    for path in SOURCES:
        found += oversizes(path.read_text(), module_name(path))
    assert not found, "\n".join(found)


def test_oversizes_are_named() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert oversizes(long_function, "m") == ["m.f has 71 lines"]
    assert oversizes("pass\n" * (MAX_FILE_LINES + 1), "m") == ["m has 701 lines, more than 700"]
    assert oversizes("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1), "m") == []


def test_core_modules_open_with_their_duty() -> None:
    silent = [
        module_name(path)
        for path in SOURCES
        if path.parent.name == "core" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_files_are_named_for_a_noun() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    files = [*SOURCES, *Path(__file__).parent.rglob("*.py")]
    assert not [str(path) for path in files if path.name in vague]
