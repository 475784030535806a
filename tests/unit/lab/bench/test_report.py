"""What a benchmark has measured: ratios, budgets, a table, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from raykv.lab.bench.report import Options, Result, Row, Verdict, alternate, document, short


def result() -> Result:
    made = Result("copy", "how fast")
    made.rows = [
        Row("4 KiB", "ours", "GB/s", (1.0, 3.0, 2.0)),
        Row("4 KiB", "memcpy", "GB/s", (2.0, 4.0, 8.0)),
    ]
    made.verdicts = [Verdict("at least 0.6 of memcpy", 0.5, 0.6, is_most=False)]
    made.notes = ["The rest is page faults."]
    return made


def shown(made: Result) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(made.to_table())
    return capture.get()


def test_ratio_is_the_median_of_the_ratios_within_each_repeat() -> None:
    made = result()
    assert made.row("4 KiB", "ours").ratio_to(made.row("4 KiB", "memcpy")) == 0.5
    assert made.row("4 KiB", "ours").median == 2.0
    with pytest.raises(KeyError):
        made.row("4 KiB", "nobody")


def test_values_come_into_one_row_behind_those_of_its_case() -> None:
    made = Result("copy")
    for case, subject in (("a", "ours"), ("b", "ours"), ("a", "theirs"), ("a", "ours")):
        made.add(case, subject, "s", 1.0, 2.0)
    made.add("a", "ours", "MB", 3.0)
    rows = [(row.case, row.subject, row.unit, len(row.values)) for row in made.rows]
    assert rows == [
        ("a", "ours", "s", 4),
        ("a", "theirs", "s", 2),
        ("a", "ours", "MB", 1),
        ("b", "ours", "s", 2),
    ]
    assert made.row("a", "ours", "MB").values == (3.0,)


@pytest.mark.parametrize(
    ("measured", "is_most", "is_met"),
    [(1.0, True, True), (1.1, True, False), (1.0, False, True), (0.9, False, False)],
)
def test_budget_is_a_highest_or_a_lowest_value(
    measured: float, is_most: bool, is_met: bool
) -> None:
    assert Verdict("budget", measured, 1.0, is_most).is_met is is_met


def test_table_shows_rows_verdicts_and_notes() -> None:
    text = shown(result())
    assert "memcpy" in text
    assert "NOT MET: at least 0.6 of memcpy (measured 0.5)" in text
    assert "The rest is page faults." in text


def test_json_has_every_repeat_and_the_machine() -> None:
    data = json.loads(json.dumps(document([result()], "1.0", "2026-11-27")))
    assert (data["raykv"], data["date"]) == ("1.0", "2026-11-27")
    assert data["machine"]["cpus"] >= 1
    (told,) = data["results"]
    assert told["rows"][0]["values"] == [1.0, 3.0, 2.0]
    assert told["budgets"] == [
        {"budget": "at least 0.6 of memcpy", "measured": 0.5, "limit": 0.6, "met": False}
    ]


def test_subjects_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    rows = alternate("case", "s", {n: lambda n=n: measure(n) for n in "ab"}, repeats=2)  # type: ignore[misc]
    assert order == ["a", "b"] * 3
    assert [row.values for row in rows] == [(3.0, 5.0), (4.0, 6.0)]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.01234, "0.0123"), (123.4, "123"), (1234567, "1,234,567")]
)
def test_numbers_are_shown_with_the_digits_that_matter(number: float, text: str) -> None:
    assert short(number) == text


def test_logs_are_kept_where_they_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("said")
    Options().keep_logs(tmp_path)
    Options(logs=tmp_path / "kept" / "here").keep_logs(tmp_path)
    assert (tmp_path / "kept" / "here" / "0.log").read_text() == "said"


def test_repeats_are_the_users_else_few_when_quick() -> None:
    assert Options(repeats=4).repeats_or(9) == 4
    assert Options(quick=True).repeats_or(9) == 2
    assert Options().repeats_or(9) == 9
