"""What `raykv bench` does: run, show, write."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console

import raykv
from raykv.bench.registry import BENCHMARKS, chosen
from raykv.bench.report import Options, document
from raykv.errors import SettingError


def list_benchmarks() -> None:
    """One line for each."""
    width = max(map(len, BENCHMARKS))
    for benchmark in BENCHMARKS.values():
        sys.stdout.write(f"{benchmark.name:{width}}  {benchmark.summary}\n")


def run_benchmarks(names: list[str], options: Options, json_path: str | None) -> None:
    """Run benchmarks one after the other.

    Args:
        names: which; all if empty.
        options: for each.
        json_path: file for the results; "-" writes them to standard output and nothing else.

    Raises:
        SettingError: no such benchmark, or the file can't be written.
    """
    benchmarks = chosen(names)
    path = None if json_path in (None, "-") else Path(str(json_path))
    if path is not None and not path.parent.is_dir():
        raise SettingError(f"--json {path}: there is no folder {path.parent}")
    console = Console(stderr=json_path == "-")
    results = []
    for benchmark in benchmarks:
        began = time.monotonic()
        result = benchmark.run(options)
        results.append(result)
        console.print(result.to_table())
        console.print(f"{benchmark.name} took {time.monotonic() - began:.0f} s\n", highlight=False)
    if json_path is None:
        return
    text = json.dumps(document(results, raykv.__version__), indent=2)
    if path is None:
        sys.stdout.write(text + "\n")
    else:
        path.write_text(text + "\n", encoding="utf-8")
