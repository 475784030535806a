"""What `raykv bench` does: run, show, write."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import raykv
from raykv.base.errors import SettingError
from raykv.lab.bench.registry import BENCHMARKS, Benchmark, chosen
from raykv.lab.bench.report import Options, Result, document


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
        json_path: file for the results, written anew after each part; "-" writes them to standard
            output at the end, and nothing else.

    Raises:
        SettingError: no such benchmark, or the file can't be written.
    """
    benchmarks = chosen(names)
    path = None if json_path in (None, "-") else Path(str(json_path))
    if path is not None and not path.parent.is_dir():
        raise SettingError(f"--json {path}: there is no folder {path.parent}")
    with _only_json() if json_path == "-" else nullcontext():
        results = _run_all(benchmarks, options, Console(stderr=json_path == "-"), path)
    if json_path == "-":
        sys.stdout.write(_text(results))


def _run_all(
    benchmarks: list[Benchmark], options: Options, console: Console, path: Path | None
) -> list[Result]:
    results: list[Result] = []

    def keep(*unfinished: Result) -> None:
        if path is not None:
            # Whole or not at all: a run that is cut short leaves the last part's.
            new = path.with_name(f"{path.name}.new")
            new.write_text(_text([*results, *unfinished]), encoding="utf-8")
            new.replace(path)

    for benchmark in benchmarks:
        began = time.monotonic()
        result = benchmark.run(replace(options, keep=keep))
        results.append(result)
        keep()
        console.print(result.to_table())
        console.print(f"{benchmark.name} took {time.monotonic() - began:.0f} s\n", highlight=False)
    return results


def _text(results: list[Result]) -> str:
    return json.dumps(document(results, raykv.__version__), indent=2) + "\n"


@contextmanager
def _only_json() -> Iterator[None]:
    """Send what is written to standard output meanwhile, by vLLM too, to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
