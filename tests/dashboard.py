"""Grafana's dashboard, by the script that makes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[1] / "deploy" / "grafana" / "make.py"


def generator() -> ModuleType:
    """The script that writes the dashboard."""
    spec = importlib.util.spec_from_file_location("grafana_make", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def metrics_of_all_panels() -> set[str]:
    """Names of the series that queries read."""
    made = generator()
    return {name for text in made.expressions() for name in made.metrics_in(text)}
