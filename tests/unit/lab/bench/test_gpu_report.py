"""The verdicts of the benchmark `gpu`: each is seen met and not met, and left out without rows."""

from __future__ import annotations

import pytest

from raykv.lab.bench.gpu_report import (
    ALONE,
    BESIDE,
    BY_LAYER,
    DECODE,
    NATIVE,
    NEW,
    P50,
    P99,
    PER_TOKEN,
    PLAIN,
    PREFILL,
    RAYKV,
    REUSE,
    gap_case,
    judge,
    length_case,
    ratio,
    remarks,
)
from raykv.lab.bench.report import Result, Row
from raykv.lab.bench.serving import PREFIX_HIT, RECOMPUTE

LENGTHS = (1024, 65536)


def result_of(*rows: Row) -> Result:
    made = Result("gpu", "")
    made.rows = list(rows)
    judge(made, LENGTHS)
    return made


@pytest.mark.parametrize("subject", [RAYKV, BY_LAYER])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("seconds", "is_met"), [(0.1, True), (0.099, True), (0.101, False)])
def test_time_to_first_token_is_no_longer_than_the_native_connectors(
    subject: str, length: int, seconds: float, is_met: bool
) -> None:
    case = length_case(length)
    made = result_of(
        Row(case, subject, "s", (seconds, seconds)), Row(case, NATIVE, "s", (0.1, 0.1))
    )
    (verdict,) = made.verdicts
    assert verdict.is_met is is_met
    assert case in verdict.budget
    assert subject in verdict.budget


def test_one_length_that_is_slower_spoils_only_its_own_verdict() -> None:
    rows = [
        Row(length_case(length), subject, "s", (seconds,))
        for length, subject, seconds in (
            (1024, RAYKV, 0.2),
            (1024, NATIVE, 0.1),
            (65536, RAYKV, 0.2),
            (65536, NATIVE, 0.3),
        )
    ]
    assert [verdict.is_met for verdict in result_of(*rows).verdicts] == [False, True]


@pytest.mark.parametrize(("case", "unit"), [(PREFILL, "requests/s"), (DECODE, "output tokens/s")])
@pytest.mark.parametrize(("share", "is_met"), [(0.98, True), (1.1, True), (0.979, False)])
def test_without_reuse_at_least_98_per_cent_of_vllm_alone(
    case: str, unit: str, share: float, is_met: bool
) -> None:
    made = result_of(Row(case, RAYKV, unit, (share * 100,)), Row(case, PLAIN, unit, (100.0,)))
    (verdict,) = made.verdicts
    assert verdict.is_met is is_met
    assert unit in verdict.budget


@pytest.mark.parametrize(("share", "is_met"), [(1.0, True), (0.99, False)])
def test_with_reuse_as_many_requests_as_the_native_connector(share: float, is_met: bool) -> None:
    unit = "requests/s"
    made = result_of(Row(REUSE, RAYKV, unit, (share * 8,)), Row(REUSE, NATIVE, unit, (8.0,)))
    (verdict,) = made.verdicts
    assert verdict.is_met is is_met


def test_nothing_is_judged_without_both_rows_or_as_many_values() -> None:
    case = length_case(1024)
    assert not result_of().verdicts
    assert not result_of(Row(case, RAYKV, "s", (1.0,)), Row(PREFILL, PLAIN, "", (1.0,))).verdicts
    cut_short = result_of(Row(case, RAYKV, "s", (1.0, 1.0)), Row(case, NATIVE, "s", (1.0,)))
    assert not cut_short.verdicts
    assert ratio(cut_short, (case, RAYKV), (case, NATIVE)) is None


def test_remarks_tell_ratios_that_have_no_budget() -> None:
    case = length_case(1024)
    made = result_of(
        Row(case, RAYKV, "s", (0.3, 0.2, 0.1)),
        Row(case, PREFIX_HIT, "s", (0.4,)),
        Row(case, RECOMPUTE, "s", (2.0,)),
        Row(PER_TOKEN, RAYKV, "ms", (11.0,)),
        Row(PER_TOKEN, PLAIN, "ms", (10.0,)),
        Row(ALONE, NATIVE, "ms", (10.0,)),
        Row(BESIDE, NATIVE, "ms", (12.0,)),
        Row(ALONE, RAYKV, "ms", (10.0,)),
        Row(gap_case(NEW, P50), PLAIN, "ms", (10.0,)),
        Row(gap_case(NEW, P99), PLAIN, "ms", (100.0,)),
        Row(gap_case(NEW, P50), RAYKV, "ms", (10.5,)),
        Row(gap_case(NEW, P99), NATIVE, "ms", (130.0,)),
    )
    stored = "while new prompts are computed and stored, the"
    beside = f"{NATIVE}: while known prompts arrive, an output token takes 1.200 x as long as with"
    assert remarks(made, LENGTHS) == [
        f"{RAYKV}, by {PREFIX_HIT}: 0.5 with 1,024 tokens.",
        f"{RAYKV}, by {RECOMPUTE}: 0.1 with 1,024 tokens.",
        f"{RAYKV}: while its stores run, an output token takes 1.100 x as long as with {PLAIN}.",
        f"{beside} nothing beside.",
        f"{RAYKV}: {stored} p50 of the time from token to token is 1.050 x that of {PLAIN}.",
        f"{NATIVE}: {stored} p99 of the time from token to token is 1.300 x that of {PLAIN}.",
    ]
    assert not remarks(result_of(), LENGTHS)
