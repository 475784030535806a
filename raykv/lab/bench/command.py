"""The benchmarks of `raykv bench` by name; their modules are loaded when they run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

import raykv
from raykv.base.errors import SettingError
from raykv.lab.bench.report import Options, Result, document
from raykv.lab.json_file import json_file, json_text, write_json


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's name and what it measures.

    `package` has a module of that name with a function `run`. A benchmark that `needs` something
    special runs only if it is named.
    """

    name: str
    summary: str
    package: str = "raykv.lab.bench"
    needs: str = ""

    def run(self, options: Options) -> Result:
        """Measure."""
        result: Result = import_module(f"{self.package}.{self.name}").run(options)
        result.summary = result.summary or self.summary
        return result


UnderWay = Callable[[str], AbstractContextManager[object]]
"""Shows that the benchmark of that name is running, until its results are printed."""

_ALL = (
    Benchmark("copy", "GB/s between a KV cache in RAM and the pool, compared with memcpy"),
    Benchmark("fetch", "GB/s from node to node, compared with a bare Ray pull"),
    Benchmark("disk", "MiB/s to the disk tier and from it, compared with plain files"),
    Benchmark("routing", "what it costs a router to place a request"),
    Benchmark(
        "policy", "hit rates of the pool's order of eviction, LRU and the optimum", needs="--trace"
    ),
    Benchmark("client", "vLLM's own client against vLLM with and without RayKV", needs="vLLM"),
    Benchmark(
        "gpu", "RayKV on a GPU, compared with vLLM alone and its native offloading", needs="a GPU"
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}

MOVED = (
    "directory", "disaggregated", "feed", "footprint", "pool", "scale", "step", "throughput",
    "ttft",
)  # fmt: skip
"""Benchmarks of RayKV's own design, which are in a clone of the repository only."""


def chosen(names: Sequence[str], known: Mapping[str, Benchmark] = BENCHMARKS) -> list[Benchmark]:
    """Look up benchmarks by name; without names, return all that need nothing special.

    Raises:
        SettingError: there is no benchmark of that name.
    """
    unknown = [name for name in names if name not in known]
    if unknown and unknown[0] in MOVED:
        raise SettingError(
            f"the benchmark {unknown[0]} is part of a clone of RayKV's repository: run "
            f"`python -m tests.bench {unknown[0]}` there"
        )
    if unknown:
        raise SettingError(f"there is no benchmark {unknown[0]}; choose from {', '.join(known)}")
    return [known[name] for name in names] or [each for each in known.values() if not each.needs]


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    options: Options,
    json_path: str | None,
    under_way: UnderWay = nullcontext,
) -> list[Result]:
    """Run benchmarks one after the other.

    Args:
        benchmarks: those to run.
        options: of each benchmark.
        json_path: file for the results, replaced after each part; "-" writes nothing but them to
            standard output at the end.
        under_way: entered for each benchmark while it measures.

    Raises:
        SettingError: the file can't be written.
    """
    path = json_file(json_path)
    with only_json() if json_path == "-" else nullcontext():
        console = Console(stderr=json_path == "-")
        results = _run_all(benchmarks, options, console, path, under_way)
    if json_path == "-":
        sys.stdout.write(json_text(_whole(results)))
    return results


def _run_all(
    benchmarks: Sequence[Benchmark],
    options: Options,
    console: Console,
    path: Path | None,
    under_way: UnderWay,
) -> list[Result]:
    results: list[Result] = []

    def keep(*unfinished: Result) -> None:
        if path is not None:
            # Atomic: a run that is cut short leaves the results up to its last part.
            new = path.with_name(f"{path.name}.new")
            write_json(new, _whole([*results, *unfinished]))
            new.replace(path)

    for benchmark in benchmarks:
        began = time.monotonic()
        with under_way(benchmark.name):
            result = benchmark.run(replace(options, keep=keep))
        results.append(result)
        keep()
        console.print(result.to_table())
        console.print(f"{benchmark.name} took {time.monotonic() - began:.0f} s\n", highlight=False)
    return results


def _whole(results: list[Result]) -> dict[str, Any]:
    return document(results, raykv.__version__, date.today().isoformat())


@contextmanager
def only_json() -> Iterator[None]:
    """Redirect standard output, vLLM's too, to standard error within the context."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
