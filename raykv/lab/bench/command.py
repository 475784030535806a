"""What `raykv bench` does: the benchmarks by name, whose modules are loaded when they run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from importlib import import_module
from pathlib import Path

from rich.console import Console

import raykv
from raykv.base.errors import SettingError
from raykv.lab.bench.report import Options, Result, document


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's name and what it measures.

    `package` has a module of that name with a function `run`. `needs`: what not every machine or
    user has; such a benchmark runs only if it is named.
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


UnderWay = Callable[[str], AbstractContextManager[None]]
"""Shows that the benchmark of that name is under way, and nothing when its results are printed."""


def unseen(_name: str) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


def by_name(*benchmarks: Benchmark) -> dict[str, Benchmark]:
    """A registry."""
    return {benchmark.name: benchmark for benchmark in benchmarks}


BENCHMARKS = by_name(
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

MOVED = (
    "directory", "disaggregated", "feed", "footprint", "pool", "scale", "step", "throughput",
    "ttft",
)  # fmt: skip
"""Benchmarks of RayKV's own design, which a clone of the repository has."""


def chosen(names: Sequence[str], known: Mapping[str, Benchmark] = BENCHMARKS) -> list[Benchmark]:
    """Benchmarks by name; if none is named, all that need nothing.

    Raises:
        SettingError: there is no benchmark of such a name.
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


def json_file(json_path: str | None) -> Path | None:
    """The file that `--json` names, if it does.

    Raises:
        SettingError: it can't be written.
    """
    path = None if json_path in (None, "-") else Path(str(json_path))
    if path is not None and not path.parent.is_dir():
        raise SettingError(f"--json {path}: there is no folder {path.parent}")
    return path


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    options: Options,
    json_path: str | None,
    under_way: UnderWay = unseen,
) -> list[Result]:
    """Run benchmarks one after the other.

    Args:
        benchmarks: which.
        options: for each.
        json_path: file for the results, written anew after each part; "-" writes them to standard
            output at the end, and nothing else.
        under_way: is entered for each benchmark while it measures.

    Raises:
        SettingError: the file can't be written.
    """
    path = json_file(json_path)
    with only_json() if json_path == "-" else nullcontext():
        console = Console(stderr=json_path == "-")
        results = _run_all(benchmarks, options, console, path, under_way)
    if json_path == "-":
        sys.stdout.write(_text(results))
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
            # Whole or not at all: a run that is cut short leaves the last part's.
            new = path.with_name(f"{path.name}.new")
            new.write_text(_text([*results, *unfinished]), encoding="utf-8")
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


def _text(results: list[Result]) -> str:
    today = date.today().isoformat()
    return json.dumps(document(results, raykv.__version__, today), indent=2) + "\n"


@contextmanager
def only_json() -> Iterator[None]:
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
