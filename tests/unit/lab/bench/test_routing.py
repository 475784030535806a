"""What `raykv bench routing` measures of a placement."""

from __future__ import annotations

from raykv.lab.bench.command import BENCHMARKS
from raykv.lab.bench.report import Options


def test_placing_is_measured_for_new_and_for_known_prompts() -> None:
    made = BENCHMARKS["routing"].run(Options(quick=True, repeats=1))
    assert [row.subject for row in made.rows] == ["remembered", "directory asked"]
    assert len(made.verdicts) == 2
    assert all(value > 0 for row in made.rows for value in row.values)
