"""`raykv bench claims`: the published numbers, each with its bar, measured again.

A claim holds if what is measured now is within its bar. Claims that this machine, or an installed
wheel without a clone of the repository, can't measure are named, and do not count.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from raykv.base.errors import RayKVError
from raykv.lab.bench import client, fetch, gpu
from raykv.lab.bench.command import BENCHMARKS, run_benchmarks
from raykv.lab.bench.copy import least_of_memcpy
from raykv.lab.bench.report import Options, Result, Verdict, short

DESIGN = "tests.bench"
"""What a clone runs other benchmarks with."""

BENCHMARK_S = 7200.0
"""For one of those; the longest takes half an hour on two cores."""


def ratio(case: str, one: str, other: str) -> Callable[[Result], float]:
    """Of two subjects in a case."""
    return lambda result: result.row(case, one).ratio_to(result.row(case, other))


def median(case: str, subject: str, unit: str = "") -> Callable[[Result], float]:
    """Of a subject in a case; `unit`, where it has several."""
    return lambda result: next(
        row.median
        for row in result.rows
        if (row.case, row.subject) == (case, subject) and unit in ("", row.unit)
    )


@dataclass(frozen=True)
class PublishedClaim:
    """A published number: `published` was measured on `date`; `bar` is what still counts."""

    text: str
    benchmark: str
    value: Callable[[Result], float]
    bar: float
    published: float
    date: str
    is_most: bool = True

    @property
    def command(self) -> str:
        """What measures it."""
        here = self.benchmark in BENCHMARKS
        return f"raykv bench {self.benchmark}" if here else f"python -m {DESIGN} {self.benchmark}"


def _scheduler_mb(result: Result) -> float:
    memory = "idle, memory"
    return median(memory, "scheduler actor")(result) - median(memory, "bare Ray actor")(result)


def _million_mb(result: Result) -> float:
    return sum(row.median for row in result.rows if row.case == "a million chunks")


CLAIMS = (
    PublishedClaim(
        "pages from 64 KiB, copied, by the best memcpy of a thread",
        "copy",
        lambda result: least_of_memcpy(result).ratio,
        bar=0.85,
        published=0.88,
        date="2026-11-23",
        is_most=False,
    ),
    PublishedClaim(
        "GB/s of a fetch of 512 MiB, by a bare Ray pull",
        "fetch",
        ratio("512 MiB", fetch.RAYKV, fetch.PULL),
        bar=0.7,
        published=0.76,
        date="2026-11-24",
        is_most=False,
    ),
    PublishedClaim(
        "prefixes that come again: mean time to first token, by vLLM alone",
        "client",
        ratio(client.PREFIX_REPETITION, client.SUBJECTS["raykv"], client.SUBJECTS["plain"]),
        bar=0.9,
        published=0.84,
        date="2026-11-25",
    ),
    PublishedClaim(
        "nothing comes again: mean time to first token, by vLLM alone",
        "client",
        ratio(client.RANDOM, client.SUBJECTS["raykv"], client.SUBJECTS["plain"]),
        bar=1.15,
        published=1.11,
        date="2026-11-25",
    ),
    PublishedClaim(
        "time to first token, 4,096 tokens of the same node, by vLLM's own prefix hit",
        "ttft",
        ratio("4096 tokens", "RayKV, same node", "vLLM's own prefix hit"),
        bar=1.0,
        published=0.41,
        date="2026-11-25",
    ),
    PublishedClaim(
        "4,096 tokens of another node: times as fast as computing",
        "ttft",
        ratio("4096 tokens", "recompute", "RayKV, other node"),
        bar=5.0,
        published=14.5,
        date="2026-11-25",
        is_most=False,
    ),
    PublishedClaim(
        "documents that are asked about again: requests/s, by vLLM alone",
        "throughput",
        ratio("documents are reused", "with RayKV", "without RayKV"),
        bar=2.0,
        published=2.4,
        date="2026-11-23",
        is_most=False,
    ),
    PublishedClaim(
        "MB of an idle scheduler actor beyond a bare Ray actor",
        "footprint",
        _scheduler_mb,
        bar=30.0,
        published=-1.0,
        date="2026-11-27",
    ),
    PublishedClaim(
        "MB for a million chunks, in all processes",
        "footprint",
        _million_mb,
        bar=1000.0,
        published=811.0,
        date="2026-11-27",
    ),
    PublishedClaim(
        "% of a core that 2,000 nodes take of the scheduler actor",
        "scale",
        median("2000 nodes", "scheduler actor", "% busy"),
        bar=120.0,
        published=96.0,
        date="2026-11-27",
    ),
    PublishedClaim(
        "4,096 tokens loaded on an H200, by vLLM's native offloading",
        "gpu",
        ratio(gpu.length_case(4096), gpu.RAYKV, gpu.NATIVE),
        bar=1.35,
        published=1.27,
        date="2026-11-27",
    ),
)
"""What the README says. A bar leaves room for the noise of a machine, and no more."""


@dataclass(frozen=True)
class Judged:
    """A claim, and what was measured now; None: it could not be, and `why`."""

    claim: PublishedClaim
    measured: float | None
    why: str = ""

    @property
    def holds(self) -> bool:
        """Nothing speaks against it."""
        claim = self.claim
        return self.measured is None or Verdict("", self.measured, claim.bar, claim.is_most).is_met


def judge(claims: Sequence[PublishedClaim], found: Mapping[str, Result | str]) -> list[Judged]:
    """Each claim by its benchmark's rows, or by the sentence that says why there are none."""
    judged = []
    for claim in claims:
        result = found[claim.benchmark]
        if isinstance(result, str):
            judged.append(Judged(claim, None, result))
            continue
        try:
            judged.append(Judged(claim, claim.value(result)))
        except (KeyError, StopIteration):
            judged.append(Judged(claim, None, "it has no such row here"))
    return judged


def run_claims(options: Options, json_path: str | None) -> int:
    """Measure all claims again and show them; the command's exit code."""
    found = {name: _measured(name, options) for name in dict.fromkeys(c.benchmark for c in CLAIMS)}
    judged = judge(CLAIMS, found)
    if json_path is not None:
        told = [
            {"claim": each.claim.text, "measured": each.measured, "holds": each.holds}
            for each in judged
        ]
        text = json.dumps(told, indent=2) + "\n"
        sys.stdout.write(text) if json_path == "-" else Path(json_path).write_text(text)
    Console(stderr=json_path == "-").print(show(judged))
    return 0 if all(each.holds for each in judged) else 1


def _measured(name: str, options: Options) -> Result | str:
    """A benchmark's rows, or why it has none."""
    with tempfile.TemporaryDirectory(prefix="raykv-bench-") as folder:
        path = Path(folder) / "result.json"
        try:
            if name in BENCHMARKS:
                return run_benchmarks([BENCHMARKS[name]], options, str(path))[0]
            if importlib.util.find_spec("tests") is None or not Path("tests/bench").is_dir():
                return "it takes a clone of the repository, and its folder"
            command = [sys.executable, "-m", DESIGN, name, "--json", str(path)]
            subprocess.run(command, timeout=BENCHMARK_S, check=True)
            return Result.of_json(json.loads(path.read_text())["results"][0])
        except (RayKVError, subprocess.SubprocessError) as error:
            return str(error)


def show(judged: Sequence[Judged]) -> Table:
    """A table for people."""
    columns = ("claim", "command", "bar", "measured on", "then", "now", "")
    table = Table(*columns, box=SIMPLE_HEAD)
    for each in judged:
        claim = each.claim
        now = "" if each.measured is None else short(each.measured)
        sign = "holds" if each.holds else "[bold red]DOES NOT HOLD"
        bar = f"at {'most' if claim.is_most else 'least'} {short(claim.bar)}"
        cells = (claim.text, claim.command, bar, claim.date, short(claim.published), now)
        table.add_row(*cells, f"not measured: {each.why}" if each.measured is None else sign)
    return table
