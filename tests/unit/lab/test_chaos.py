"""What a chaos run does and says, without a cluster: `tests/e2e/test_chaos.py` has one."""

from __future__ import annotations

from itertools import islice

import pytest

from raykv.base.errors import SettingError
from raykv.lab.chaos.plan import BLOCK, FaultKind, batches, faults, probe, prompts
from raykv.lab.chaos.report import (
    MORE_BYTES,
    MORE_FDS,
    ChaosAnswer,
    ChaosReport,
    FaultSeen,
    Process,
)
from raykv.lab.chaos.run import kinds_named
from raykv.lab.chaos.watch import ChaosWatch, Stored

KINDS = tuple(FaultKind)


def test_same_seed_gives_same_faults_and_same_load() -> None:
    first, again = (list(islice(faults(7, 3, KINDS), 40)) for _ in range(2))
    assert first == again
    assert first != list(islice(faults(8, 3, KINDS), 40))
    asked, once_more = (list(islice(batches(7, 0, 36), 20)) for _ in range(2))
    assert asked == once_more
    assert asked != list(islice(batches(7, 1, 36), 20))
    assert prompts(7) == prompts(7)
    assert prompts(7) != prompts(8)


def test_every_kind_of_fault_happens_in_every_round_and_none_kills_the_heads_raylet() -> None:
    drawn = list(islice(faults(3, 2, KINDS), 10 * len(KINDS)))
    for start in range(0, len(drawn), len(KINDS)):
        assert {fault.kind for fault in drawn[start : start + len(KINDS)]} == set(KINDS)
    of_the_node = (FaultKind.RAYLET_KILLED, FaultKind.HOST_LOST)
    assert all(fault.node == 1 for fault in drawn if fault.kind in of_the_node)
    assert all((fault.lasts_s > 0) == fault.kind.lasts for fault in drawn)


def test_prompts_share_beginnings_and_probes_share_none() -> None:
    texts = prompts(1)
    assert len(texts) == 36
    assert len({tuple(text[: 4 * BLOCK]) for text in texts}) == 12
    assert len({tuple(probe(number)[:BLOCK]) for number in range(50)}) == 50


def answer(
    tokens: list[int], logprobs: list[float], gaps: list[float] | None = None
) -> ChaosAnswer:
    return ChaosAnswer("length", tokens, logprobs, gaps or [1.0] * 3)


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        (answer([1, 2, 3], [-0.1, -0.2, -0.3]), True),
        (answer([1, 2], [-0.1, -0.2]), True),
        (answer([1, 2, 3], [-0.1, -0.2001, -0.3]), True),
        (answer([1, 2, 4], [-0.1, -0.2, -0.3]), False),
        (answer([1, 2, 3], [-0.1, -0.25, -0.3]), False),
    ],
)
def test_answer_agrees_if_tokens_and_certainty_are_those_of_the_reference(
    given: ChaosAnswer, agrees: bool
) -> None:
    assert given.agrees(answer([1, 2, 3], [-0.1, -0.2, -0.3])) == agrees


def test_answer_may_differ_after_a_token_that_rounding_decides() -> None:
    reference = answer([1, 2, 3], [-0.1, -0.7, -0.3], [1.0, 0.001, 1.0])
    assert answer([1, 9, 8], [-0.1, -0.7005, -5.0]).agrees(reference)
    assert not answer([9, 2, 3], [-0.1, -0.7, -0.3]).agrees(reference)


def report(**changes: object) -> ChaosReport:
    made = ChaosReport(0, 2, requests=10)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def mended(**changes: object) -> FaultSeen:
    seen = FaultSeen(0, "NodeActor killed", 0, 0.0, 1.0, waited=True)
    seen.loads_again_s, seen.fetches_again_s = 1.0, 2.0
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (report(), None),
        (report(faults=[mended()]), None),
        (report(requests=0), "no request was served"),
        (report(failed=["x"]), "failed request: x"),
        (report(wrong=["x"]), "wrong answer: x"),
        (report(left_over=["x"]), "left over: x"),
        (
            report(faults=[mended(fetches_again_s=None)]),
            "fault 0 (NodeActor killed): offloading did not work again",
        ),
        (report(faults=[mended(fetches_again_s=None, waited=False)]), None),
        (
            report(
                before=[Process("engine", 1, 0, 10)],
                after=[Process("engine", 2, 0, 11 + MORE_FDS)],
            ),
            f"engine (2) has {MORE_FDS + 1} more file descriptors",
        ),
        (
            report(
                before=[Process("engine", 1, 0, 10)],
                after=[Process("engine", 2, MORE_BYTES + (1 << 20), 10)],
            ),
            f"engine (2) has {(MORE_BYTES >> 20) + 1} MiB more",
        ),
    ],
)
def test_report_fails_with_a_sentence_for_each_problem(
    made: ChaosReport, problem: str | None
) -> None:
    assert made.problems == ([] if problem is None else [problem])
    assert made.exit_code == (problem is not None)


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        (
            mended(fetches_again_s=None),
            "     1 s    0  NodeActor killed, node 0, loads again after 1.0 s, fetches never",
        ),
        (
            mended(waited=False, lasts_s=2.5, note="it was gone"),
            "     1 s    0  NodeActor killed, node 0, 2.5 s, it was gone",
        ),
    ],
)
def test_line_of_a_fault_says_what_became_of_it(seen: FaultSeen, line: str) -> None:
    assert seen.line() == line


def test_watch_is_over_when_all_engines_have_loaded_and_fetched() -> None:
    watch = ChaosWatch(2)
    nothing = answer([1, 2, 3], [0.0] * 3)
    watch.loaded(Stored(5, 0, nothing))
    assert watch.loads_again_s is None
    assert watch.to_fetch(0) is None, "it is its own"
    wanted = watch.to_fetch(1)
    assert wanted is not None
    assert wanted.number == 5
    assert watch.to_fetch(1) is None, "asked twice it would be there already"
    watch.fetched(1)
    watch.loaded(Stored(6, 1, nothing))
    assert watch.loads_again_s is not None
    assert not watch.wait(0.0)
    watch.fetched(0)
    assert watch.wait(0.0)


def test_kinds_are_named_as_on_the_command_line() -> None:
    assert kinds_named([]) == ()
    assert kinds_named(["gcs-frozen"]) == (FaultKind.GCS_FROZEN,)
    with pytest.raises(SettingError, match=r"'gcs-melted'.*node-actor-killed"):
        kinds_named(["gcs-melted"])
