"""Published numbers that benchmarks of the design measure again: `python -m tests.bench claims`."""

from __future__ import annotations

from collections.abc import Callable

from raykv.lab.bench import claims
from raykv.lab.bench.claims import PublishedClaim, ratio
from raykv.lab.bench.report import Result
from tests.bench import footprint, throughput
from tests.bench.serving import PREFIX_HIT, RAYKV, RECOMPUTE, REMOTE


def median(case: str, subject: str, unit: str = "") -> Callable[[Result], float]:
    """Of a subject in a case; `unit`, where it has several."""
    return lambda result: result.row(case, subject, unit).median


def _scheduler_mb(result: Result) -> float:
    memory = f"{footprint.IDLE}, memory"
    return median(memory, footprint.SCHEDULER)(result) - median(memory, footprint.BARE)(result)


def _million_mb(result: Result) -> float:
    names = (footprint.SCHEDULER, footprint.NODE, footprint.ENGINE)
    return sum(result.row(footprint.CHUNKS, name).median for name in names)


CLAIMS = (
    *claims.CLAIMS,
    PublishedClaim(
        "time to first token, 4,096 tokens of the same node, by vLLM's own prefix hit",
        "ttft",
        ratio("4096 tokens", RAYKV, PREFIX_HIT),
        bar=1.0,
        published=0.41,
        date="2026-11-25",
    ),
    PublishedClaim(
        "4,096 tokens of another node: times as fast as computing",
        "ttft",
        ratio("4096 tokens", RECOMPUTE, REMOTE),
        bar=5.0,
        published=14.5,
        date="2026-11-25",
        is_most=False,
    ),
    PublishedClaim(
        "documents that are asked about again: requests/s, by vLLM alone",
        "throughput",
        ratio(throughput.REUSE, throughput.WITH, throughput.WITHOUT),
        bar=2.0,
        published=2.4,
        date="2026-11-23",
        is_most=False,
    ),
    PublishedClaim(
        "MB of an idle scheduler actor beyond a bare Ray actor",
        "footprint",
        _scheduler_mb,
        bar=30.0,
        published=-1.0,
        date="2026-11-27",
    ),
    PublishedClaim(
        "MB for a million chunks, in all processes",
        "footprint",
        _million_mb,
        bar=1000.0,
        published=811.0,
        date="2026-11-27",
    ),
    PublishedClaim(
        "% of a core that 2,000 nodes take of the scheduler actor",
        "scale",
        median("2000 nodes", "scheduler actor", "% busy"),
        bar=120.0,
        published=96.0,
        date="2026-11-27",
    ),
)
"""Those of the wheel, and these."""
