"""Published numbers that are measured again: which hold, which do not, and which can't be tried."""

from __future__ import annotations

import pytest
from rich.console import Console

from raykv.lab.bench.claims import CLAIMS, PublishedClaim, judge, median, ratio, show
from raykv.lab.bench.command import BENCHMARKS
from raykv.lab.bench.report import Result, Row
from tests.bench import footprint, scale, throughput
from tests.bench.__main__ import HERE
from tests.bench.serving import PREFIX_HIT, RAYKV, RECOMPUTE, REMOTE

ROWS = Result(
    "it", "", [Row("case", "ours", "s", (2.0, 4.0)), Row("case", "theirs", "s", (4.0, 4.0))]
)


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
    assert "python -m tests.bench it" in text
    assert "not measured: no GPU" in text


def test_every_claim_is_within_its_bar_as_published_and_names_a_benchmark() -> None:
    for each in CLAIMS:
        assert each.benchmark in {**BENCHMARKS, **HERE}
        is_met = each.published <= each.bar if each.is_most else each.published >= each.bar
        assert is_met, each.text


def test_claims_of_a_clone_find_the_rows_that_its_benchmarks_make() -> None:
    memory, million = f"{footprint.IDLE}, memory", footprint.CHUNKS
    rows = {
        "ttft": [
            Row("4096 tokens", name, "s", (number,))
            for name, number in ((RAYKV, 2.0), (PREFIX_HIT, 4.0), (RECOMPUTE, 60.0), (REMOTE, 5.0))
        ],
        "throughput": [
            Row(throughput.REUSE, throughput.WITH, "requests/s", (3.0,)),
            Row(throughput.REUSE, throughput.WITHOUT, "requests/s", (1.0,)),
        ],
        "footprint": [
            Row(memory, footprint.SCHEDULER, "MB", (90.0,)),
            Row(memory, footprint.BARE, "MB", (85.0,)),
            Row(million, footprint.SCHEDULER, "MB", (100.0,)),
            Row(million, footprint.NODE, "MB", (400.0,)),
        ],
        "scale": [
            Row(f"{max(scale.NODES)} nodes", "scheduler actor", unit, (number,))
            for unit, number in (("calls/s", 1.0), ("% busy", 96.0))
        ],
    }
    claims = [each for each in CLAIMS if each.benchmark in rows]
    found = judge(claims, {name: Result(name, "", some) for name, some in rows.items()})
    assert [each.measured for each in found] == [0.5, 12.0, 3.0, 5.0, 500.0, 96.0]


def test_median_takes_the_row_with_its_unit() -> None:
    rows = [Row("case", "it", unit, (number,)) for unit, number in (("s", 1.0), ("MB", 2.0))]
    result = Result("it", "", rows)
    assert (median("case", "it")(result), median("case", "it", "MB")(result)) == (1.0, 2.0)
