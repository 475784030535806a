"""What `raykv bench routing` measures of a placement, and what it simulates instead."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from raykv.base.errors import SettingError
from raykv.cli import app
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import ClusterOptions, Options
from raykv.lab.bench.routing_simulation import MEASURES, ROUTERS

SMALL = ClusterOptions(replicas=(2,), loads=(60.0,))


def test_placing_is_measured_for_new_and_for_known_prompts() -> None:
    made = BENCHMARKS["routing"].run(Options(quick=True, repeats=1))
    assert {row.subject for row in made.rows} == {
        "remembered",
        "directory asked",
        "the answer for 32 nodes",
    }
    assert len(made.verdicts) == 2
    assert all(value > 0 for row in made.rows for value in row.values)


def test_simulation_has_a_row_for_each_router_and_measure() -> None:
    made = BENCHMARKS["routing"].run(Options(quick=True, cluster=SMALL))
    cases = ["2, 60 %, 5 ms", "2, 60 %, churn"]
    subjects = [f"{router}: {measure}" for router in ROUTERS for measure in MEASURES]
    assert [(row.case, row.subject) for row in made.rows] == [
        (case, subject) for case in cases for subject in subjects
    ]
    assert len(made.verdicts) == len(cases) * len(MEASURES)


def test_options_that_are_given_take_the_place_of_the_usual_ones() -> None:
    usual = ClusterOptions()
    assert usual.given(None, None, None, 1) == usual
    assert usual.given([8, 64], [90.0], [0.0], 3) == ClusterOptions((8, 64), (90.0,), (0.0,), 3)


@pytest.mark.parametrize("wrong", [([0], None, None), (None, [-1.0], None), (None, None, [-1.0])])
def test_cluster_that_cannot_be_is_refused(
    wrong: tuple[list[int] | None, list[float] | None, list[float] | None],
) -> None:
    with pytest.raises(SettingError, match="--"):
        ClusterOptions().given(*wrong, 1)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["policy", "--simulate"], "--simulate is for `raykv bench routing` alone"),
        (["routing", "--load", "80"], "describe what --simulate simulates"),
    ],
)
def test_options_of_a_simulation_are_refused_beside_anything_else(
    command: list[str], why: str
) -> None:
    done = CliRunner().invoke(app, ["bench", *command])
    assert isinstance(done.exception, SettingError)
    assert why in str(done.exception)
