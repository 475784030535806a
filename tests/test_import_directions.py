"""Imports between packages point down the house, and the sources keep sizes that one can read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.house import (
    ALL,
    HOUSE,
    IMPURE,
    ROOT,
    SOURCES,
    Room,
    is_in,
    is_shell,
    module_name,
    room_of,
    tree_of,
)

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 70
LEAST_FILE_LINES = 40
"""Of a file with a single user."""

NOT_FOR_PURE = ("raykv.base.settings", "raykv.base.deadlines", "raykv.base.threads")
"""What pure files get told instead: settings and deadlines as arguments."""

USERS = 9
"""From this floor on, packages use RayKV as its users do: `raykv.connect()`."""

KILLS_VLLM_CPU_WORKERS = {"llvmlite", "numba"}
"""vLLM's CPU worker dies if one of them is loaded already."""

COMPILED = "raykv.copy.kernel"
"""It loads numba when it is imported."""
LOADER = "raykv.copy.rows"
"""The module that may import it, inside a function."""


OTHERWISE_NAMED = {"bench", "deploy", "vllm"}
"""Folders of unit tests: of files beside the package, and of vLLM's hooks one by one."""
SPANNING = {
    "base/test_without_extras", "cli/test_commands", "cli/test_silent_commands",
    "cluster/test_silent_actors", "engine/test_miss_reasons",
    "lab/test_chaos", "protocol/test_bad_events", "protocol/test_bad_messages",
    "protocol/test_messages",
}  # fmt: skip
"""Unit tests of what several modules do together."""


@dataclass(frozen=True)
class Import:
    """One imported module, or a name in one; `at_start`: when its module is imported."""

    target: str
    line: int
    at_start: bool


def imports_of(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[Import]:
    """All imports of a module, those in functions and for annotations too.

    For a bare `import raykv`: what is taken from it, as in `raykv.connect`.
    """
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
        elif isinstance(node, ast.Attribute) and is_name(node.value, "raykv"):
            yield Import(f"raykv.{node.attr}", node.lineno, at_start)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and is_name(node.test, "TYPE_CHECKING")


@cache
def imports_in(path: Path) -> list[Import]:
    """All imports of a file of the package."""
    is_package = path.name == "__init__.py"
    return list(imports_of(tree_of(path), module_name(path), is_package=is_package))


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - 1 if is_package else node.level
    base = module.split(".")
    return ".".join([*base[: len(base) - up], *filter(None, [node.module])])


def complaints(imports: Iterable[Import], module: str) -> list[str]:
    """What is wrong with the imports of one module, one sentence each."""
    if room_of(module) is None and module != "raykv":
        return [f"{module} has no room in the house"]
    return [
        f"{module}, line {each.line}: {wrong}"
        for each in imports
        if (wrong := _complaint(each, module)) is not None
    ]


def _complaint(each: Import, module: str) -> str | None:
    package = each.target.partition(".")[0]
    loads = is_in(each.target, COMPILED) and module != COMPILED
    if loads and (each.at_start or module != LOADER):
        return f"{COMPILED} may be imported inside a function of {LOADER} only"
    if each.at_start and package in KILLS_VLLM_CPU_WORKERS and module != COMPILED:
        return f"{package} may be imported inside a function only"
    room = room_of(module)
    if room is None:
        return None
    if package == "raykv":
        return _complaint_inside(each.target, module, room)
    if package in IMPURE and not is_shell(module):
        return f"a pure file may not import {package}"
    if package in sys.stdlib_module_names or room.allows(package):
        return None
    return f"this package may not import {package}"


def _complaint_inside(target: str, module: str, own: Room) -> str | None:
    room = room_of(target)
    if room is None:
        return None if own.floor >= USERS else f"{target} is the public face, not a part"
    if room is not own and room.floor >= own.floor:
        return f"{target} is not on a lower floor"
    if not is_shell(module) and any(is_in(target, each) for each in NOT_FOR_PURE):
        return f"a pure file may not import {target}"
    return None


def long_functions(tree: ast.Module) -> list[str]:
    """Names of functions that are longer than the house allows."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_imports_of_every_module_point_down_the_house() -> None:
    found = []
    for path in SOURCES:
        found += complaints(imports_in(path), module_name(path))
    assert SOURCES
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("raykv.base.ids", "import msgspec", "may not import msgspec"),
        ("raykv.base.ids", "from raykv.protocol.engine import X", "X is not on a lower floor"),
        ("raykv.engine.view", "from raykv.base.settings import Settings", "settings.Settings"),
        ("raykv.engine.view", "import time", "a pure file may not import time"),
        ("raykv.engine.view", "def f():\n    from random import Random", "may not import random"),
        ("raykv.engine.view", "import os.path", "a pure file may not import os"),
        ("raykv.engine.view", "import ray", "a pure file may not import ray"),
        ("raykv.engine.session", "import torch", "this package may not import torch"),
        ("raykv.engine.view", "from ..client import cluster", "client.cluster is not on a lower"),
        ("raykv.engine", "from ..client.cluster import Cluster", "cluster.Cluster is not on a"),
        ("raykv.engine.view", "from .. import connect", "raykv.connect is the public face"),
        ("raykv.node.actor", "import raykv\nraykv.connect()", "raykv.connect is the public face"),
        ("raykv.copy.rows", "from raykv import node", "raykv.node is not on a lower floor"),
        ("raykv.node.actor", "import vllm.config", "may not import vllm"),
        ("raykv.node.actor", "if 1:\n    import raykv.vllm.spec", "vllm.spec is not on a lower"),
        ("raykv.vllm.spec", "import numba", "inside a function only"),
        ("raykv.vllm.spec", "try:\n    import llvmlite.ir\nfinally: ...", "inside a function only"),
        ("raykv.copy.kernels", "import numba", "inside a function only"),
        ("raykv.copy.rows", "from raykv.copy.kernel import copy_rows", "inside a function of"),
        ("raykv.copy.plan", "def f():\n    from raykv.copy import kernel", "inside a function of"),
        ("raykv.directory.answers", "import numba", "inside a function only"),
        ("raykv.unheard_of", "", "has no room"),
    ],
)
def test_complaints_name_an_import_that_points_up(module: str, source: str, expected: str) -> None:
    imports = imports_of(ast.parse(source), module, is_package=module == "raykv.engine")
    found = complaints(imports, module)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("raykv.base.ids", "import enum, math"),
        ("raykv.base.threads", "import threading, time"),
        ("raykv.node.wishes", "from .wishes import Wishes\nfrom ..base.ids import Key"),
        ("raykv.node.actor", "import ray\nimport raykv.node.wishes"),
        ("raykv.vllm.spec", "def compile():\n    import numba"),
        ("raykv.vllm.spec", "if TYPE_CHECKING:\n    import numba"),
        ("raykv.copy.kernel", "import numba"),
        ("raykv.copy.rows", "def load():\n    from raykv.copy.kernel import copy_rows"),
        ("raykv.cli", "from raykv.client.cluster import connect\nimport typer"),
        ("raykv", "from raykv.client.cluster import connect"),
    ],
)
def test_complaints_are_none_when_imports_point_down(module: str, source: str) -> None:
    assert complaints(imports_of(ast.parse(source), module, is_package=False), module) == []


def test_shells_are_those_that_need_to_be() -> None:
    named = {
        f"raykv.{package}.{shell}"
        for package, room in HOUSE.items()
        for shell in room.shells.split()
        if room.shells != ALL
    }
    needed = {
        module
        for path in SOURCES
        for module in [module_name(path)]
        for each in imports_in(path)
        if each.target.partition(".")[0] in IMPURE
        or any(is_in(each.target, other) for other in NOT_FOR_PURE)
    }
    assert named - needed == set()


def imported() -> dict[str, set[str]]:
    """The modules of `raykv` that each one imports; the public face left out."""
    modules = {module_name(path) for path in SOURCES}
    return {
        module: {
            target
            for each in imports_in(path)
            for target in [
                each.target if each.target in modules else each.target.rpartition(".")[0]
            ]
            if target in modules - {"raykv", module}
        }
        for path in SOURCES
        for module in [module_name(path)]
    }


def test_modules_import_each_other_in_no_circle() -> None:
    left = imported()
    # What imports nothing that is left is taken away, again and again; circles remain.
    while free := {module for module, targets in left.items() if not targets & left.keys()}:
        for module in free:
            del left[module]
    assert left == {}


LIGHT = {
    "matplotlib pandas ray torch transformers vllm": [
        "raykv",
        "raykv.cli",
        "raykv.inspect",
        "raykv.serve",
        *(
            module
            for path in SOURCES
            for module in [module_name(path)]
            if (room := room_of(module)) is not None and room.shells != ALL and not is_shell(module)
        ),
    ],
    "llvmlite numba torch vllm": [
        "raykv.node.actor",
        "raykv.worker.link",
        "raykv.directory.actor",
    ],
}
"""Modules that load none of some packages when one process imports them in this order."""


def test_imports_stay_light() -> None:
    assert all(LIGHT.values())
    code = (
        "import importlib, sys\n"
        f"for unwanted, modules in {LIGHT}.items():\n"
        "    for name in modules:\n"
        "        loaded = importlib.import_module(name)\n"
        "        if name == 'raykv.cli':\n"
        "            loaded.parser()\n"
        "        if found := sys.modules.keys() & set(unwanted.split()):\n"
        "            sys.exit(f'{name} loads {found}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_short() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not [path for path, length in lengths.items() if length > MAX_FILE_LINES]
    found = {path: long_functions(tree_of(path)) for path in SOURCES}
    assert not [(str(path), names) for path, names in found.items() if names]


def test_long_functions_are_named() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(ast.parse(long_function)) == ["f"]
    assert long_functions(ast.parse("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1))) == []


RUN_ON = re.compile(r"\S +(Args|Returns|Raises|Yields|Invariants):(?!\S)|[.:;] \d+\. [A-Z]")
"""A section or a numbered sentence that begins in the middle of a line."""


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_sections_of_docstrings_begin_on_lines_of_their_own() -> None:
    assert not [text for path in SOURCES for text in docstrings(path) if RUN_ON.search(text)]


def test_sections_that_run_on_are_found() -> None:
    assert RUN_ON.search("Store it. Args:\nkey: what.")
    assert RUN_ON.search("1. One holds. 2. Another one.")
    assert not RUN_ON.search("Store 1 of 2. It counts.\n\nArgs:\n    key: what.")


def test_every_module_opens_with_its_duty() -> None:
    silent = [str(path) for path in SOURCES if not ast.get_docstring(tree_of(path))]
    assert not silent


def test_small_files_have_more_than_one_user() -> None:
    users = Counter(target for targets in imported().values() for target in targets)
    small = {
        module_name(path)
        for path in SOURCES
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < LEAST_FILE_LINES
    }
    assert small
    assert not [module for module in small if users[module] == 1]


def test_unit_tests_are_named_for_the_module_that_they_test() -> None:
    unit = ROOT / "tests" / "unit"
    tests = [path.relative_to(unit) for path in unit.rglob("test_*.py")]
    odd = {
        str(path.with_suffix(""))
        for path in tests
        if path.parts[0] not in OTHERWISE_NAMED
        and not (ROOT / "raykv" / path.with_name(path.name.removeprefix("test_"))).exists()
    }
    assert odd == SPANNING


def test_files_are_named_for_a_noun() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    files = [*SOURCES, *Path(__file__).parent.rglob("*.py")]
    assert not [str(path) for path in files if path.name in vague]
