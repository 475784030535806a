"""`raykv bench claims`: some of the published numbers, each with its bar, measured again.

A claim holds if the measured number is within its bar. It does not hold if its benchmark fails.
Claims that this machine can't measure are listed but do not count. A clone of the repository has
more of them: `python -m tests.bench claims`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raykv.base.errors import RayKVError, SettingError
from raykv.lab.bench import gpu
from raykv.lab.bench.command import BENCHMARKS, Benchmark, UnderWay, only_json
from raykv.lab.bench.report import Options, Result, Verdict, short
from raykv.lab.json_file import json_file, json_text, write_json


def ratio(case: str, one: str, other: str) -> Callable[[Result], float]:
    """Compare two subjects in a case."""
    return lambda result: result.ratio(case, one, other)


@dataclass(frozen=True)
class PublishedClaim:
    """A number that was published on a date, and the bar that a new measurement has to pass.

    `where` is a part of the name of the GPU that the number is for; other GPUs can't measure it.
    """

    text: str
    benchmark: str
    value: Callable[[Result], float]
    bar: float
    published: float
    date: str
    is_most: bool = True
    where: str = ""


CLAIMS = (
    PublishedClaim(
        "pages from 64 KiB, copied, by the best memcpy of a thread",
        "copy",
        lambda result: result.verdicts[0].measured,
        bar=0.85,
        published=0.88,
        date="2026-11-23",
        is_most=False,
    ),
    PublishedClaim(
        "4,096 tokens loaded, by vLLM's native offloading",
        "gpu",
        ratio(gpu.length_case(4096), gpu.RAYKV, gpu.NATIVE),
        bar=1.35,
        published=1.27,
        date="2026-11-27",
        where="H200",
    ),
    PublishedClaim(
        "32,768 tokens loaded, by vLLM's native offloading",
        "gpu",
        ratio(gpu.length_case(32_768), gpu.RAYKV, gpu.NATIVE),
        bar=1.5,
        published=1.41,
        date="2026-11-27",
        where="H200",
    ),
    PublishedClaim(
        "nothing reused, long answers: output tokens/s, by vLLM alone",
        "gpu",
        ratio(gpu.DECODE, gpu.RAYKV, gpu.PLAIN),
        bar=0.81,
        published=0.86,
        date="2026-11-27",
        is_most=False,
        where="H200",
    ),
)
"""A bar leaves room for a machine's noise only."""


@dataclass(frozen=True)
class Judged:
    """A claim and what was measured now, or else why nothing was.

    `holds` is None if this machine can't measure it.
    """

    claim: PublishedClaim
    holds: bool | None
    measured: float | None = None
    why: str = ""

    @property
    def told(self) -> str:
        """The verdict in words."""
        if self.holds is None:
            return f"not measured here: {self.why}"
        return "holds" if self.holds else "DOES NOT HOLD" + (self.why and f": {self.why}")


def judge(
    claims: Sequence[PublishedClaim],
    found: Mapping[str, Result | RayKVError],
    card: str = "",
) -> list[Judged]:
    """Judge each claim by its benchmark's result, or by the error that ended the benchmark.

    A SettingError means that this machine can't measure the claim. `card` is the GPU's name.
    """
    return [
        Judged(each, None, why=f"it is of a {each.where}")
        if each.where not in card
        else _judged(each, found[each.benchmark])
        for each in claims
    ]


def _judged(claim: PublishedClaim, found: Result | RayKVError) -> Judged:
    if isinstance(found, RayKVError):
        return Judged(claim, None if isinstance(found, SettingError) else False, why=str(found))
    try:
        measured = claim.value(found)
    except (LookupError, ValueError):
        why = " ".join(["it has no such row, or a part of it", *found.notes])
        return Judged(claim, holds=False, why=why)
    return Judged(claim, Verdict("", measured, claim.bar, claim.is_most).is_met, measured)


def run_claims(
    options: Options,
    json_path: str | None,
    claims: Sequence[PublishedClaim] = CLAIMS,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    under_way: UnderWay = nullcontext,
) -> int:
    """Measure claims again, show them, and return the command's exit code.

    `under_way` is entered for each benchmark while it measures.

    Raises:
        SettingError: the file can't be written; nothing was measured.
    """
    path = json_file(json_path)
    card = gpu.card_name()
    found: dict[str, Result | RayKVError] = {}
    with only_json() if json_path == "-" else nullcontext():
        for name in dict.fromkeys(each.benchmark for each in claims if each.where in card):
            try:
                with under_way(name):
                    found[name] = benchmarks[name].run(options)
            except RayKVError as error:
                found[name] = error
    judged = judge(claims, found, card)
    told = [
        {
            "claim": each.claim.text,
            "measured": each.measured,
            "holds": each.holds,
            "why": each.why,
        }
        for each in judged
    ]
    write_json(path, told)
    if json_path == "-":
        sys.stdout.write(json_text(told))
    Console(stderr=json_path == "-").print(show(judged))
    return 1 if any(each.holds is False for each in judged) else 0


def show(judged: Sequence[Judged]) -> Table:
    """Format the claims as a table."""
    columns = ("claim", "benchmark", "bar", "measured on", "then", "now", "")
    table = Table(*columns, box=SIMPLE_HEAD)
    for each in judged:
        claim = each.claim
        now = "" if each.measured is None else short(each.measured)
        text = f"{claim.text}, {claim.where}" if claim.where else claim.text
        bar = f"at {'most' if claim.is_most else 'least'} {short(claim.bar)}"
        style = "bold red" if each.holds is False else ""
        cells = (text, claim.benchmark, bar, claim.date, short(claim.published), now)
        table.add_row(*cells, Text(each.told, style))
    return table
