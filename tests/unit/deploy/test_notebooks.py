"""The notebooks as files: with what they show, and nothing but what every reader may use."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from raykv import inspect
from tests.house import ROOT

FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
ALLOWED = {"matplotlib", "pandas", "raykv", "ray", "torch", "transformers", "vllm"}
MAX_BYTES = 300_000
IMAGES = {"01": 4, "02": 2, "03": 2, "04": 2, "05": 2}
"""Plots in each, at least."""

STRANGE = re.compile(
    r"/(?:work|root|home|opt|usr|Users|tmp/(?!raykv/))\b[\w/.-]*|https?://(?!localhost)[\w.:/-]+"
    r"|\b(?!127\.0\.0\.1|192\.0\.2\.)\d{1,3}(?:\.\d{1,3}){3}\b"
)
"""Paths, hosts and addresses of where they were run; `make notebooks` is run in /tmp/raykv."""


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def code_of(path: Path) -> ast.Module:
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    return ast.parse("\n".join("".join(cell["source"]) for cell in cells))


def test_there_are_five() -> None:
    assert [path.stem[:2] for path in PATHS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_is_stored_with_its_outputs(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [each for cell in code for each in cell["outputs"]]
    images = [each for each in outputs if "image/png" in each.get("data", {})]
    assert len(images) >= IMAGES[path.stem[:2]]
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_show_something_and_tell_nothing_of_where_they_were_made(path: Path) -> None:
    for cell in read(path)["cells"]:
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output
            shown = output.get("text") or [
                line
                for kind, lines in output["data"].items()
                if kind.startswith("text/")
                for line in ([lines] if isinstance(lines, str) else lines)
            ]
            assert not STRANGE.findall("".join(shown)), shown


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_only_public_names_are_used(path: Path) -> None:
    tree = code_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package = name.partition(".")[0]
            assert package in ALLOWED or package in sys.stdlib_module_names, name
            assert package != "raykv" or name in ("raykv", "raykv.inspect"), name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr == "__doc__" or not node.attr.startswith("_"), ast.unparse(node)
            if isinstance(node.value, ast.Name) and node.value.id == "look":
                assert node.attr in inspect.__all__, node.attr


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_first_cell_says_how_to_get_a_cluster(path: Path) -> None:
    first = "".join(read(path)["cells"][0]["source"])
    assert first.startswith("# ")
    assert "raykv serve smollm2" in first
