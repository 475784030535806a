"""`raykv bench claims`: the published numbers, each with its bar, measured again.

A claim holds if what is measured now is within its bar. Those that this machine can't measure are
named, and do not count. A clone of the repository has more: `python -m tests.bench claims`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from raykv.base.errors import RayKVError
from raykv.lab.bench import client, fetch, gpu
from raykv.lab.bench.command import BENCHMARKS, Benchmark, UnderWay, only_json, unseen
from raykv.lab.bench.copy import least_of_memcpy
from raykv.lab.bench.report import Options, Result, Verdict, short


def ratio(case: str, one: str, other: str) -> Callable[[Result], float]:
    """Of two subjects in a case."""
    return lambda result: result.row(case, one).ratio_to(result.row(case, other))


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
        "4,096 tokens loaded on an H200, by vLLM's native offloading",
        "gpu",
        ratio(gpu.length_case(4096), gpu.RAYKV, gpu.NATIVE),
        bar=1.35,
        published=1.27,
        date="2026-11-27",
    ),
)
"""A bar leaves room for the noise of a machine, and no more."""


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


def run_claims(
    options: Options,
    json_path: str | None,
    claims: Sequence[PublishedClaim] = CLAIMS,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    under_way: UnderWay = unseen,
) -> int:
    """Measure claims again and show them; the command's exit code.

    `under_way` is entered for each benchmark while it measures.
    """
    found: dict[str, Result | str] = {}
    with only_json() if json_path == "-" else nullcontext():
        for name in dict.fromkeys(claim.benchmark for claim in claims):
            try:
                with under_way(name):
                    found[name] = benchmarks[name].run(options)
            except RayKVError as error:
                found[name] = str(error)
    judged = judge(claims, found)
    if json_path is not None:
        told = [
            {"claim": each.claim.text, "measured": each.measured, "holds": each.holds}
            for each in judged
        ]
        text = json.dumps(told, indent=2) + "\n"
        sys.stdout.write(text) if json_path == "-" else Path(json_path).write_text(text)
    Console(stderr=json_path == "-").print(show(judged))
    return 0 if all(each.holds for each in judged) else 1


def show(judged: Sequence[Judged]) -> Table:
    """A table for people."""
    columns = ("claim", "benchmark", "bar", "measured on", "then", "now", "")
    table = Table(*columns, box=SIMPLE_HEAD)
    for each in judged:
        claim = each.claim
        now = "" if each.measured is None else short(each.measured)
        sign = "holds" if each.holds else "[bold red]DOES NOT HOLD"
        bar = f"at {'most' if claim.is_most else 'least'} {short(claim.bar)}"
        cells = (claim.text, claim.benchmark, bar, claim.date, short(claim.published), now)
        table.add_row(*cells, f"not measured: {each.why}" if each.measured is None else sign)
    return table
