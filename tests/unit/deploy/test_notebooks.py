"""The notebooks as files: nothing but source, and nothing but what every reader may use."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raykv import inspect
from tests.house import ROOT

FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
ALLOWED = {"matplotlib", "pandas", "raykv", "ray", "torch", "transformers", "vllm"}
MAX_BYTES = 16 << 10


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def code_of(path: Path) -> ast.Module:
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    return ast.parse("\n".join("".join(cell["source"]) for cell in cells))


def test_there_are_five() -> None:
    assert [path.stem[:2] for path in PATHS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    notebook = read(path)
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), cell["source"]
        assert cell.get("execution_count") is None
        assert cell["metadata"] == {}
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert path.stat().st_size < MAX_BYTES


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
            assert not node.attr.startswith("_"), ast.unparse(node)
            if isinstance(node.value, ast.Name) and node.value.id == "look":
                assert node.attr in inspect.__all__, node.attr


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_first_cell_says_how_to_get_a_cluster(path: Path) -> None:
    first = "".join(read(path)["cells"][0]["source"])
    assert first.startswith("# ")
    assert "raykv serve smollm2" in first
