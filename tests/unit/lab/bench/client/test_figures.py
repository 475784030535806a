"""What is read in the files of clients and the metrics of servers."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.lab.bench.client.figures import (
    NothingAnsweredError,
    counter,
    num_different,
    of_bench_serve,
    of_multi_turn,
)

RESULT = {
    "completed": 2,
    "failed": 1,
    "mean_ttft_ms": 300.0,
    "median_ttft_ms": 200.0,
    "p99_ttft_ms": 900.0,
    "mean_itl_ms": 25.0,
    "output_throughput": 12.5,
    "generated_texts": ["one", "two", ""],
    "errors": ["", "", "Traceback: refused"],
}


def answered(ttft_ms: float, start_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "ttft_ms": ttft_ms,
        "tpot_ms": 20.0,
        "latency_ms": 500.0,
        "start_time_ms": start_ms,
        "output_num_tokens": 16,
        **more,
    }


LOG = """
Client 1 is done (num_successes=2, num_failures=1)\x1b[0m
Client 0 is done (num_successes=1, num_failures=2)\x1b[0m
"""

CONVERSATIONS = [
    {
        "id": "CONV_ID_0",
        "messages": [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "answer"},
        ],
    }
]


def test_file_of_bench_serve_is_read() -> None:
    figures = of_bench_serve(RESULT)
    assert (figures.mean_ms, figures.median_ms, figures.p99_ms) == (300.0, 200.0, 900.0)
    assert (figures.gap_ms, figures.output_rate, figures.num_failed) == (25.0, 12.5, 1)
    assert figures.texts == {"0": "one", "1": "two", "2": ""}


def test_file_of_bench_serve_without_answers_is_an_error_that_says_why() -> None:
    with pytest.raises(NothingAnsweredError, match="refused"):
        of_bench_serve({**RESULT, "completed": 0})


def test_files_of_the_multi_turn_benchmark_are_read() -> None:
    stats = [answered(100.0, 1000.0), answered(300.0, 2000.0), answered(800.0, 4500.0)]
    figures = of_multi_turn(stats, CONVERSATIONS, LOG)
    assert (figures.mean_ms, figures.median_ms, figures.p99_ms) == (400.0, 300.0, 800.0)
    assert (figures.gap_ms, figures.num_failed) == (20.0, 3)
    assert figures.output_rate == 48 / 4.0
    assert figures.texts == {"CONV_ID_0 1": "answer"}


def test_turns_that_the_multi_turn_benchmark_does_not_ask_have_not_failed() -> None:
    log = "Client 0 is done (num_successes=1, num_failures=0)"
    figures = of_multi_turn([answered(100.0, 1000.0)], CONVERSATIONS, log)
    assert figures.num_failed == 0


def test_multi_turn_benchmark_without_answers_is_an_error() -> None:
    with pytest.raises(NothingAnsweredError):
        of_multi_turn([], [], LOG)


def test_multi_turn_benchmark_that_did_not_come_to_its_end_is_an_error() -> None:
    with pytest.raises(NothingAnsweredError):
        of_multi_turn([answered(100.0, 1000.0)], CONVERSATIONS, "Traceback")


def test_texts_differ_where_both_have_one_and_not_the_same() -> None:
    """Which of its conversations the multi-turn benchmark gets to is a matter of time."""
    texts = {"0": "one", "1": "two"}
    assert num_different(texts, texts) == 0
    assert num_different(texts, {"0": "one", "1": "three", "2": "four"}) == 1
    assert num_different(texts, {"2": "four"}) == 3


def test_counter_is_summed_over_its_labels_and_no_other_name() -> None:
    text = """# TYPE vllm:prompt_tokens_cached counter
vllm:prompt_tokens_cached_total{engine="0",model_name="model"} 384.0
vllm:prompt_tokens_cached_total{engine="1",model_name="model"} 128.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 99.0
vllm:prompt_tokens_cached_total_more 7.0
"""
    assert counter(text, "vllm:prompt_tokens_cached_total") == 512.0
    assert counter(text, "vllm:nothing_total") == 0.0
