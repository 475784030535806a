"""Published numbers that are measured again: which hold, which do not, and which can't be tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from raykv.lab.bench.claims import PublishedClaim, judge, ratio, run_claims, show
from raykv.lab.bench.command import BENCHMARKS, Benchmark
from raykv.lab.bench.report import Options, Result, Row
from tests.bench import scale
from tests.bench.__main__ import HERE
from tests.bench.claims import CLAIMS

OURS, THEIRS = Row("case", "ours", "s", (2.0, 4.0)), Row("case", "theirs", "s", (4.0, 4.0))
ROWS = Result("it", "", [OURS, THEIRS])


def claim(bar: float, *, is_most: bool = True) -> PublishedClaim:
    return PublishedClaim(
        "half as long", "it", ratio("case", "ours", "theirs"), bar, 0.5, "today", is_most
    )


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        (claim(0.75), True),
        (claim(0.74), False),
        (claim(0.75, is_most=False), True),
        (claim(0.76, is_most=False), False),
    ],
)
def test_claim_holds_within_its_bar(given: PublishedClaim, holds: bool) -> None:
    (judged,) = judge([given], {"it": ROWS})
    assert (judged.measured, judged.holds) == (0.75, holds)


@pytest.mark.parametrize("found", ["there is no GPU", Result("it")])
def test_claim_that_can_not_be_measured_does_not_count(found: Result | str) -> None:
    (judged,) = judge([claim(0.1)], {"it": found})
    assert judged.holds
    assert judged.measured is None
    assert judged.why


def test_table_names_what_does_not_hold_and_the_command() -> None:
    judged = [*judge([claim(0.1)], {"it": ROWS}), *judge([claim(1)], {"it": "no GPU"})]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show(judged))
    text = capture.get()
    assert "DOES NOT HOLD" in text
    assert "not measured: no GPU" in text


def test_every_claim_is_within_its_bar_as_published_and_names_a_benchmark() -> None:
    for each in CLAIMS:
        assert each.benchmark in {**BENCHMARKS, **HERE}
        is_met = each.published <= each.bar if each.is_most else each.published >= each.bar
        assert is_met, each.text


class Measured(Benchmark):
    """It has one row."""

    def run(self, options: Options) -> Result:
        return ROWS


@pytest.mark.parametrize(("bar", "code"), [(0.75, 0), (0.7, 1)])
def test_command_fails_if_a_claim_does_not_hold(tmp_path: Path, bar: float, code: int) -> None:
    path = tmp_path / "claims.json"
    found = run_claims(Options(), str(path), [claim(bar)], {"it": Measured("it", "")})
    assert found == code
    (told,) = json.loads(path.read_text())
    assert told == {"claim": "half as long", "measured": 0.75, "holds": not code}


def test_claims_of_a_clone_find_the_rows_that_its_benchmarks_make() -> None:
    busy = [("calls/s", 1.0), ("% busy", 96.0)]
    rows = [Row("2000 nodes", "scheduler actor", unit, (value,)) for unit, value in busy]
    assert max(scale.NODES) == 2000
    some = [each for each in CLAIMS if each.benchmark == "scale"]
    (found,) = judge(some, {"scale": Result("scale", "", rows)})
    assert found.measured == 96.0
