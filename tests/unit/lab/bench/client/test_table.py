"""Rows and budgets that are made of the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raykv.lab.bench.client.figures import Figures
from raykv.lab.bench.client.systems import LMCACHE, NATIVE, PLAIN, RAYKV
from raykv.lab.bench.client.table import FOUND, MEAN, Played, rows, verdicts

TEXTS = {"0": "one", "1": "two"}


def measured(
    mean_ms: float, *, found: float = 0.0, texts: Mapping[str, str] = TEXTS, **more: Any
) -> Played:
    given: dict[str, Any] = {"gap_ms": 20.0, "num_failed": 0, **more}
    most_found = given.pop("most_found", None)
    figures = Figures(mean_ms, mean_ms / 2, 3 * mean_ms, output_rate=9.0, texts=texts, **given)
    return Played(figures, found, 5.0, most_found)


def judged(runs: Mapping[str, Mapping[str, list[Played]]], *reused: str) -> dict[str, bool]:
    return {verdict.budget: verdict.is_met for verdict in verdicts(runs, reused)}


def test_rows_have_a_column_for_each_figure_and_a_value_for_each_repeat() -> None:
    made = rows({"random": {PLAIN: [measured(100.0), measured(300.0, found=256.0)]}})
    by_unit = {row.unit: row for row in made}
    assert len(by_unit) == len(made) == 8
    assert {(row.case, row.subject) for row in made} == {("random", "vLLM alone")}
    assert by_unit[MEAN].values == (100.0, 300.0)
    assert by_unit[FOUND].values == (0.0, 256.0)


def test_raykv_may_be_two_per_cent_slower_than_vllm_alone() -> None:
    for mean_ms, is_met in ((101.9, True), (102.1, False)):
        runs = {"random": {PLAIN: [measured(100.0)], RAYKV: [measured(mean_ms)]}}
        found = judged(runs)
        assert found["random: TTFT mean, ms, at most 1.02 x vLLM alone"] is is_met
        assert found["random: median, ms, at most 1.02 x vLLM alone"] is is_met
        assert found["random: between tokens, ms, at most 1.02 x vLLM alone"]


def test_raykv_must_be_ahead_of_other_caches_where_prompts_come_again() -> None:
    some = {
        PLAIN: [measured(200.0)],
        NATIVE: [measured(110.0)],
        LMCACHE: [measured(90.0)],
        RAYKV: [measured(100.0)],
    }
    found = judged({"timed_trace": some, "random": some}, "timed_trace")
    assert found["timed_trace: TTFT mean, ms, at most 1 x native offloader"]
    assert not found["timed_trace: TTFT mean, ms, at most 1 x LMCache"]
    assert not any("random" in budget and "LMCache" in budget for budget in found)


def test_texts_that_differ_and_requests_that_fail_miss_a_budget() -> None:
    runs = {
        "random": {
            PLAIN: [measured(100.0)],
            RAYKV: [measured(100.0, texts={"0": "one", "1": "else"}, num_failed=1)],
        }
    }
    found = judged(runs)
    assert not found["random: texts that differ from those of vLLM alone"]
    assert not found["random: no request fails"]


def test_tokens_that_were_there_must_be_found_where_their_number_is_known() -> None:
    for found_tokens, is_met in ((980.0, True), (970.0, False)):
        runs = {"timed_trace": {RAYKV: [measured(1.0, found=found_tokens, most_found=1000)]}}
        (share,) = (v for v in verdicts(runs, ()) if "that were there" in v.budget)
        assert share.is_met is is_met


def test_nothing_is_judged_without_raykv() -> None:
    assert not verdicts({"random": {PLAIN: [measured(1.0)], NATIVE: [measured(2.0)]}}, ())
