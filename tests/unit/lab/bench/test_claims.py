"""Published numbers that are measured again: which hold, which do not, and which can't be tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from raykv.base.errors import ClusterError, RayKVError, SettingError
from raykv.lab.bench import gpu
from raykv.lab.bench.claims import PublishedClaim, judge, ratio, run_claims, show
from raykv.lab.bench.command import BENCHMARKS, Benchmark
from raykv.lab.bench.engine import EngineError
from raykv.lab.bench.report import Options, Result, Row
from tests.bench import footprint, scale
from tests.bench.__main__ import HERE
from tests.bench.claims import CLAIMS


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for it imports torch."""
    monkeypatch.setattr(gpu, "card_name", str)


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


def test_claim_that_can_not_be_measured_here_does_not_count() -> None:
    (judged,) = judge([claim(0.1)], {"it": SettingError("there is no GPU")})
    assert (judged.measured, judged.holds, judged.why) == (None, None, "there is no GPU")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ClusterError("no answer"), "no answer"),
        (EngineError("it has ended"), "it has ended"),
        (Result("it"), "it has no such row"),
        (Result("it", notes=["RayKV, start: failed: out of memory"]), "out of memory"),
        (Result("it", rows=[THEIRS]), "it has no such row"),
        (Result("it", rows=[replace(OURS, values=(2.0,)), THEIRS]), "or a part of it"),
    ],
)
def test_claim_whose_benchmark_fails_does_not_hold(found: Result | RayKVError, why: str) -> None:
    (judged,) = judge([claim(0.1)], {"it": found})
    assert (judged.measured, judged.holds) == (None, False)
    assert why in judged.why


@pytest.mark.parametrize(
    ("card", "holds"), [("NVIDIA H200", False), ("NVIDIA H100 80GB HBM3", None), ("", None)]
)
def test_claim_of_a_card_is_judged_on_that_card_alone(
    monkeypatch: pytest.MonkeyPatch, card: str, holds: bool | None
) -> None:
    monkeypatch.setattr(gpu, "card_name", lambda: card)
    of_card = replace(claim(0.1), where="H200")
    (judged,) = judge([of_card], {"it": ROWS}, card)
    assert judged.holds is holds
    code = run_claims(Options(), None, [of_card], {"it": Measured("it", "")})
    assert code == (holds is False)


def test_table_names_what_does_not_hold_and_the_command() -> None:
    judged = [
        *judge([claim(0.1)], {"it": ROWS}),
        *judge([claim(1)], {"it": SettingError("no GPU")}),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show(judged))
    text = capture.get()
    assert "DOES NOT HOLD" in text
    assert "not measured here: no GPU" in text


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
    assert told == {"claim": "half as long", "measured": 0.75, "holds": not code, "why": ""}


class Failing(Benchmark):
    """It raises its summary."""

    def run(self, options: Options) -> Result:
        raise (ClusterError if self.needs else SettingError)(self.summary)


@pytest.mark.parametrize(("breaks", "holds"), [("it breaks", False), ("", None)])
def test_command_fails_if_a_benchmark_does_and_says_why(
    tmp_path: Path, breaks: str, holds: bool | None
) -> None:
    path = tmp_path / "claims.json"
    code = run_claims(Options(), str(path), [claim(1)], {"it": Failing("it", "why", needs=breaks)})
    assert code == (holds is False)
    (told,) = json.loads(path.read_text())
    assert told == {"claim": "half as long", "measured": None, "holds": holds, "why": "why"}


def test_file_that_can_not_be_written_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(SettingError, match="there is no folder /nowhere"):
        run_claims(Options(), "/nowhere/x", [claim(1)], {})


def test_memory_of_a_million_chunks_is_that_of_all_three_processes() -> None:
    (claimed,) = [each for each in CLAIMS if "million chunks" in each.text]
    names = (footprint.SCHEDULER, footprint.NODE, footprint.ENGINE)
    rows = [Row(footprint.CHUNKS, name, "MB", (100.0,)) for name in names]
    (whole,) = judge([claimed], {"footprint": Result("footprint", "", rows)})
    (part,) = judge([claimed], {"footprint": Result("footprint", "", rows[1:])})
    assert (whole.measured, part.measured, part.holds) == (300.0, None, False)


def test_claims_of_a_clone_find_the_rows_that_its_benchmarks_make() -> None:
    busy = [("calls/s", 1.0), ("% busy", 96.0)]
    rows = [Row("2000 nodes", "scheduler actor", unit, (value,)) for unit, value in busy]
    assert max(scale.NODES) == 2000
    some = [each for each in CLAIMS if each.benchmark == "scale"]
    (found,) = judge(some, {"scale": Result("scale", "", rows)})
    assert found.measured == 96.0
