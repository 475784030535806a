"""What `gpu` says of its rows: cases, subjects, verdicts and notes. Pure.

Rows may be missing, since an engine may not have started, or has not been measured yet: what can't
be judged is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raykv.lab.bench.report import Result, Row, Verdict, short
from raykv.lab.bench.serving import PREFIX_HIT, RECOMPUTE

PLAIN, NATIVE, RAYKV, BY_LAYER = (
    "vLLM alone",
    "vLLM's native offloading",
    "RayKV",
    "RayKV, layerwise_loads",
)
START = "engine's start"
PREFILL, DECODE = "nothing is reused, long prompts", "nothing is reused, long answers"
REUSE = "documents are reused"
PER_TOKEN = "time per output token, nothing is reused"
ALONE = "time per output token, nothing beside"
BESIDE = "time per output token, known prompts beside"
NEW = "time per output token, new prompts beside"
P50, P99 = "p50", "p99"

MOST_OF_NATIVE = 1.0
LEAST_OF_NATIVE = 1.0
LEAST_OF_PLAIN = 0.98


def length_case(length: int) -> str:
    """The case of a prompt of so many tokens."""
    return f"{length:,} tokens"


def first_time(subject: str) -> str:
    """The subject of a prompt that nobody knew, in an engine with a connector."""
    return f"{subject}, first time (stores)"


def gap_case(case: str, percentile: str) -> str:
    """The case of a percentile of the times between two tokens of an answer in another one."""
    return f"{case}, {percentile}"


def busy_case(case: str) -> str:
    """The case of how busy the GPU was in another one."""
    return f"GPU busy, {case}"


Name = tuple[str, str]
"""Of a row: its case and its subject."""


def pair(result: Result, one: Name, other: Name) -> tuple[Row, Row] | None:
    """Two rows; None if one has not been measured."""
    try:
        return result.row(*one), result.row(*other)
    except KeyError:
        return None


def ratio(result: Result, one: Name, other: Name) -> float | None:
    """A row's values by another's; None if one has not been measured, or not as often."""
    rows = pair(result, one, other)
    if rows is None or len(rows[0].values) != len(rows[1].values):
        return None
    return rows[0].ratio_to(rows[1])


def judge(result: Result, lengths: Iterable[int]) -> None:
    """Set the verdicts of all that has been measured so far."""
    result.verdicts = list(_verdicts(result, list(lengths)))


def _verdicts(result: Result, lengths: list[int]) -> Iterator[Verdict]:
    for subject in (RAYKV, BY_LAYER):
        for length in lengths:
            case = length_case(length)
            measured = ratio(result, (case, subject), (case, NATIVE))
            if measured is not None:
                yield Verdict(
                    f"{case}: {subject}: no slower than {NATIVE}", measured, MOST_OF_NATIVE
                )
    for case, other, limit in (
        (PREFILL, PLAIN, LEAST_OF_PLAIN),
        (DECODE, PLAIN, LEAST_OF_PLAIN),
        (REUSE, NATIVE, LEAST_OF_NATIVE),
    ):
        measured = ratio(result, (case, RAYKV), (case, other))
        if measured is not None:
            unit = result.row(case, RAYKV).unit
            budget = f"{case}: at least {limit:g} x the {unit} of {other}"
            yield Verdict(budget, measured, limit, is_most=False)


def remarks(result: Result, lengths: Iterable[int]) -> list[str]:
    """Ratios that have no budget."""
    return [
        *_beside_prefix_hits(result, list(lengths)),
        *_per_token(result),
        *_beside_known_prompts(result),
        *_behind_copies(result),
    ]


def _beside_prefix_hits(result: Result, lengths: list[int]) -> Iterator[str]:
    for subject in (RAYKV, BY_LAYER, NATIVE):
        for other in (PREFIX_HIT, RECOMPUTE):
            found = _listed(result, lengths, subject, other)
            if found:
                yield f"{subject}, by {other}: {found}."


def _listed(result: Result, lengths: list[int], subject: str, other: str) -> str:
    """Medians by medians: a prompt is computed once, and loaded again and again."""
    found = []
    for length in lengths:
        case = length_case(length)
        rows = pair(result, (case, subject), (case, other))
        if rows is not None:
            found.append(f"{short(rows[0].median / rows[1].median)} with {case}")
    return ", ".join(found)


def _per_token(result: Result) -> Iterator[str]:
    for subject in (RAYKV, NATIVE):
        measured = ratio(result, (PER_TOKEN, subject), (PER_TOKEN, PLAIN))
        if measured is not None:
            yield (
                f"{subject}: while its stores run, an output token takes {measured:.3f} x as long "
                f"as with {PLAIN}."
            )


def _beside_known_prompts(result: Result) -> Iterator[str]:
    for subject in (PLAIN, NATIVE, RAYKV):
        measured = ratio(result, (BESIDE, subject), (ALONE, subject))
        if measured is not None:
            yield (
                f"{subject}: while known prompts arrive, an output token takes "
                f"{measured:.3f} x as long as with nothing beside."
            )


def _behind_copies(result: Result) -> Iterator[str]:
    """Sampled tokens are copied from the GPU by what copies KV, too."""
    for subject in (RAYKV, NATIVE):
        for percentile in (P50, P99):
            case = gap_case(NEW, percentile)
            measured = ratio(result, (case, subject), (case, PLAIN))
            if measured is not None:
                yield (
                    f"{subject}: while new prompts are computed and stored, the {percentile} of "
                    f"the time from token to token is {measured:.3f} x that of {PLAIN}."
                )
