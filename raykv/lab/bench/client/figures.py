"""What clients say of a run in their files, and servers in their metrics. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean, median
from typing import Any

from raykv.base.errors import RayKVError

_FAILURES = re.compile(r"\bnum_failures=(\d+)")


class NothingAnsweredError(RayKVError):
    """A client has seen no answer at all."""


@dataclass(frozen=True)
class Figures:
    """One run of a client: times to the first token and between tokens, and texts by request.

    `texts` are empty where the client does not tell them.
    """

    mean_ms: float
    median_ms: float
    p99_ms: float
    gap_ms: float
    output_rate: float
    num_failed: int
    texts: Mapping[str, str]


def of_bench_serve(result: Mapping[str, Any]) -> Figures:
    """From the file of `vllm bench serve --save-result --save-detailed`.

    Raises:
        NothingAnsweredError: no request was answered.
    """
    if not result["completed"]:
        errors = [error for error in result["errors"] if error]
        raise NothingAnsweredError(f"no request was answered: {(errors or ['?'])[0][-500:]}")
    texts = result["generated_texts"]
    return Figures(
        result["mean_ttft_ms"],
        result["median_ttft_ms"],
        result["p99_ttft_ms"],
        result["mean_itl_ms"],
        result["output_throughput"],
        result["failed"],
        {str(number): text for number, text in enumerate(texts)},
    )


def of_multi_turn(
    stats: Sequence[Mapping[str, Any]],
    conversations: Sequence[Mapping[str, Any]],
    log: str,
) -> Figures:
    """From the files of vLLM's multi-turn benchmark.

    Its processes end when no conversation is left to begin, in the midst of those that they have
    begun: what was not asked has not failed.

    Args:
        stats: of each request that was answered.
        conversations: as they were in the end.
        log: what it has written; each process says there at its end what has failed.

    Raises:
        NothingAnsweredError: no request was answered, or no process has said what has failed.
    """
    failed = [int(number) for number in _FAILURES.findall(log)]
    if not stats or not failed:
        raise NothingAnsweredError("the multi-turn benchmark has seen no answer")
    first_ms = sorted(each["ttft_ms"] for each in stats)
    ends_ms = [each["start_time_ms"] + each["latency_ms"] for each in stats]
    seconds = (max(ends_ms) - min(each["start_time_ms"] for each in stats)) / 1e3
    return Figures(
        mean(first_ms),
        median(first_ms),
        first_ms[ceil(0.99 * len(first_ms)) - 1],
        mean(each["tpot_ms"] for each in stats),
        sum(each["output_num_tokens"] for each in stats) / seconds,
        sum(failed),
        {
            f"{conversation['id']} {turn}": message["content"]
            for conversation in conversations
            for turn, message in enumerate(conversation["messages"])
            if message["role"] == "assistant"
        },
    )


def num_different(texts: Mapping[str, str], others: Mapping[str, str]) -> int:
    """Requests that both have, with different texts; all if they have none in common."""
    common = texts.keys() & others.keys()
    if not common:
        return len(texts.keys() | others.keys())
    return sum(texts[name] != others[name] for name in common)


def counter(exposition: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels; 0 if it is not there."""
    found = 0.0
    for line in exposition.splitlines():
        label, _, value = line.rpartition(" ")
        if label.partition("{")[0] == name:
            found += float(value)
    return found
