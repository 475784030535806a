"""`raykv bench claims`: some of the published numbers, each with its bar, measured again.

A claim holds if what is measured now is within its bar; it does not if its benchmark fails. Those
that this machine can't measure are named, and do not count. A clone of the repository has more:
`python -m tests.bench claims`.
"""

from __future__ import annotations

import json
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
from raykv.lab.bench.command import BENCHMARKS, Benchmark, UnderWay, json_file, only_json, unseen
from raykv.lab.bench.copy import least_of_memcpy
from raykv.lab.bench.report import Options, Result, Verdict, short


def ratio(case: str, one: str, other: str) -> Callable[[Result], float]:
    """Of two subjects in a case."""
    return lambda result: result.ratio(case, one, other)


@dataclass(frozen=True)
class PublishedClaim:
    """A published number: `published` was measured on `date`; `bar` is what still counts.

    `where`: a part of the name of the GPU that it was published for; other GPUs can't measure it.
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
        lambda result: least_of_memcpy(result).ratio,
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
"""A bar leaves room for the noise of a machine, and no more."""


@dataclass(frozen=True)
class Judged:
    """A claim, and what was measured now; None: nothing was, and `why`.

    `can_be`: it can be measured on this machine.
    """

    claim: PublishedClaim
    measured: float | None
    why: str = ""
    can_be: bool = True

    @property
    def holds(self) -> bool | None:
        """None: nobody can say here."""
        claim = self.claim
        if self.measured is not None:
            return Verdict("", self.measured, claim.bar, claim.is_most).is_met
        return False if self.can_be else None

    @property
    def told(self) -> str:
        """In words."""
        if self.measured is None and not self.can_be:
            return f"not measured here: {self.why}"
        return "holds" if self.holds else "DOES NOT HOLD" + (self.why and f": {self.why}")


def judge(
    claims: Sequence[PublishedClaim],
    found: Mapping[str, Result | RayKVError],
    card: str = "",
) -> list[Judged]:
    """Each claim by its benchmark's rows, or by the error that it has ended with.

    Only a SettingError says that a machine can't measure it. `card` is the GPU's name.
    """
    return [
        Judged(each, None, f"it is of a {each.where}", can_be=False)
        if each.where not in card
        else _judged(each, found[each.benchmark])
        for each in claims
    ]


def _judged(claim: PublishedClaim, found: Result | RayKVError) -> Judged:
    if isinstance(found, RayKVError):
        return Judged(claim, None, str(found), can_be=not isinstance(found, SettingError))
    try:
        return Judged(claim, claim.value(found))
    except (KeyError, StopIteration, ValueError):
        return Judged(claim, None, " ".join(["it has no such row, or a part of it", *found.notes]))


def run_claims(
    options: Options,
    json_path: str | None,
    claims: Sequence[PublishedClaim] = CLAIMS,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    under_way: UnderWay = unseen,
    card: str | None = None,
) -> int:
    """Measure claims again and show them; the command's exit code.

    `under_way` is entered for each benchmark while it measures. `card`: see `judge`.

    Raises:
        SettingError: the file can't be written; nothing was measured.
    """
    path = json_file(json_path)
    card = gpu.card_name() if card is None else card
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
    text = json.dumps(told, indent=2) + "\n"
    if path is not None:
        path.write_text(text)
    elif json_path is not None:
        sys.stdout.write(text)
    Console(stderr=json_path == "-").print(show(judged))
    return 1 if any(each.holds is False for each in judged) else 0


def show(judged: Sequence[Judged]) -> Table:
    """A table for people."""
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
