"""What is stored of prompts and found again, by models with windows: small cases by hand."""

from __future__ import annotations

import pytest

from raykv.lab.bench.report import Options
from raykv.lab.bench.windows import CHUNK, KINDS, UnlimitedPool, run

DOCUMENT = [*range(40)]
GEMMA, MISTRAL, STATES = KINDS["Gemma 3, 27B"], KINDS["Mistral 7B"], KINDS["Qwen3-Next"]


def question(number: int, length: int = 3) -> list[int]:
    return [*DOCUMENT, *(1000 * number + at for at in range(length))]


def test_second_question_finds_the_document_with_the_tail_and_not_by_default() -> None:
    for share, found in ((0.0, 0), (0.25, 40 * CHUNK)):
        pool = UnlimitedPool(GEMMA, share)
        assert pool.serve(question(1, 2)) == 0
        assert pool.serve(question(2, 2)) == found


def test_third_question_finds_what_the_second_has_parted_from() -> None:
    pool = UnlimitedPool(GEMMA, 0.001)
    assert [pool.serve(question(number, 10)) for number in range(1, 4)] == [0, 0, 40 * CHUNK]


def test_same_prompt_is_found_whole_by_all() -> None:
    for kind in KINDS.values():
        pool = UnlimitedPool(kind, 0.0)
        pool.serve(DOCUMENT)
        assert pool.serve(DOCUMENT) == 40 * CHUNK


def test_chunks_of_windows_are_counted_beside_full_attention() -> None:
    pool = UnlimitedPool(GEMMA, 0.0)
    pool.serve(DOCUMENT)
    assert pool.ratio == 6 * 2 / 40
    everything = UnlimitedPool(GEMMA, 0.0, keeps_all=True)
    everything.serve(DOCUMENT)
    assert everything.ratio == 6


def test_chunks_of_windows_alone_are_counted_beside_all_chunks() -> None:
    pool = UnlimitedPool(MISTRAL, 0.0)
    pool.serve(DOCUMENT)
    assert pool.ratio == 8 / 40


def test_states_are_where_steps_end_and_before_the_prompts_end() -> None:
    pool = UnlimitedPool(STATES, 0.25)
    pool.serve([*DOCUMENT, *range(100, 110)])
    assert pool.serve([*DOCUMENT, *range(200, 210)]) == 32 * CHUNK
    assert pool.serve([*DOCUMENT, *range(300, 310)]) == 40 * CHUNK


@pytest.mark.timeout(60)
def test_benchmark_has_a_row_for_each_subject_and_meets_its_budget() -> None:
    result = run(Options(quick=True))
    assert {row.subject for row in result.rows} >= {"vLLM's default", "window_share=0.25"}
    assert all(verdict.is_met for verdict in result.verdicts)
