"""Rows, budgets and notes from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raykv.lab.bench.client.figures import Figures, num_different
from raykv.lab.bench.client.systems import LMCACHE, NATIVE, PLAIN, RAYKV, SUBJECTS
from raykv.lab.bench.report import Row, Verdict

MEAN, MEDIAN, P99, GAP = "TTFT mean, ms", "median, ms", "p99, ms", "between tokens, ms"
RATE, FOUND, CPU, FAILED = "output tokens/s", "tokens found", "CPU s", "failed"

MOST_OF_PLAIN = 1.02
LEAST_FOUND = 0.98
"""Of the tokens that a cache which forgets nothing would find."""


@dataclass(frozen=True)
class Played:
    """One client against one server: what it saw, and what the server found and spent.

    `most_found`: what a cache that forgets nothing would find, where that is known.
    """

    figures: Figures
    tokens_found: float
    cpu_s: float
    most_found: int | None


Plays = Mapping[str, Mapping[str, Sequence[Played]]]
"""By workload and system, one for each repeat."""


def rows(runs: Plays) -> list[Row]:
    """One line of the table for each workload and system."""
    made = []
    for workload, by_system in runs.items():
        for system, some in by_system.items():
            columns = {
                MEAN: [run.figures.mean_ms for run in some],
                MEDIAN: [run.figures.median_ms for run in some],
                P99: [run.figures.p99_ms for run in some],
                GAP: [run.figures.gap_ms for run in some],
                RATE: [run.figures.output_rate for run in some],
                FOUND: [run.tokens_found for run in some],
                CPU: [run.cpu_s for run in some],
                FAILED: [float(run.figures.num_failed) for run in some],
            }
            for unit, values in columns.items():
                made.append(Row(workload, SUBJECTS[system], unit, tuple(values)))
    return made


def verdicts(runs: Plays, reused: Sequence[str]) -> list[Verdict]:
    """Budgets of RayKV, where it was measured, beside those that were measured too.

    Args:
        runs: all.
        reused: workloads whose prompts come again.
    """
    made = []
    table = {(row.case, row.subject, row.unit): row for row in rows(runs)}
    for workload, by_system in runs.items():
        if RAYKV not in by_system:
            continue
        for other, unit, limit in _bars(workload in reused):
            if other in by_system:
                mine = table[workload, SUBJECTS[RAYKV], unit]
                ratio = mine.ratio_to(table[workload, SUBJECTS[other], unit])
                budget = f"{workload}: {unit}, at most {limit:g} x {SUBJECTS[other]}"
                made.append(Verdict(budget, ratio, limit))
        made += _others(workload, by_system)
    return made


def _bars(is_reused: bool) -> list[tuple[str, str, float]]:
    bars = [(PLAIN, unit, MOST_OF_PLAIN) for unit in (MEAN, MEDIAN, GAP)]
    if is_reused:
        bars += [(peer, unit, 1.0) for peer in (NATIVE, LMCACHE) for unit in (MEAN, MEDIAN)]
    return bars


def _others(workload: str, by_system: Mapping[str, Sequence[Played]]) -> list[Verdict]:
    """That nothing failed, that texts are equal, and that what is known was found."""
    mine = by_system[RAYKV]
    failed = float(sum(run.figures.num_failed for run in mine))
    made = [Verdict(f"{workload}: no request fails", failed, 0.0)]
    if PLAIN in by_system:
        texts = [
            num_different(run.figures.texts, other.figures.texts)
            for run, other in zip(mine, by_system[PLAIN], strict=True)
        ]
        budget = f"{workload}: texts that differ from those of {SUBJECTS[PLAIN]}"
        made.append(Verdict(budget, float(sum(texts)), 0.0))
    shares = [run.tokens_found / run.most_found for run in mine if run.most_found]
    if shares:
        budget = f"{workload}: finds at least 0.98 of the tokens that were there"
        made.append(Verdict(budget, min(shares), LEAST_FOUND, is_most=False))
    return made
