"""Circuit breakers by example; `stateful/test_breaker_machine.py` has the rest."""

from __future__ import annotations

import pytest

import raykv.cluster.breaker
from raykv.cluster.breaker import Breakers, BreakerState, Pauses, aged, joined, sentences
from raykv.protocol.engine import Tell
from raykv.protocol.framing import decode, encode
from raykv.protocol.measures import MAX_BREAKERS, MAX_REASON, BreakerReport
from raykv.protocol.node import NodeStats
from raykv.protocol.status import EngineStatus, NodeStatus
from tests.fixtures.breakers import failures_of

PEER = "node:a"
PAUSES = Pauses(1.0, 5.0, trial_s=10.0)


@pytest.fixture
def breakers() -> Breakers:
    return Breakers(PAUSES)


def begin(breakers: Breakers, now: float, peer: str = PEER) -> int:
    call = breakers.begin(peer, now)
    assert call is not None
    return call


def fail(breakers: Breakers, now: float, peer: str = PEER) -> bool:
    """A call that fails at once."""
    return breakers.failed(peer, begin(breakers, now, peer), now, "it is dead")


def test_stranger_may_be_called(breakers: Breakers) -> None:
    assert breakers.state_of(PEER) is BreakerState.CLOSED
    assert [begin(breakers, 0.0), begin(breakers, 0.0)]
    assert breakers.report(0.0) == BreakerReport()


def test_failure_opens_and_refuses_calls_until_the_pause_is_over(breakers: Breakers) -> None:
    assert fail(breakers, 100.0)
    assert breakers.state_of(PEER) is BreakerState.OPEN
    assert breakers.begin(PEER, 100.999) is None
    assert breakers.begin(PEER, 101.0) is not None
    assert breakers.num_refused == 1


def test_other_peers_are_not_concerned(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    assert breakers.begin("node:b", 0.0) is not None


def test_one_trial_is_under_way_at_a_time(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    begin(breakers, 1.0)
    assert breakers.state_of(PEER) is BreakerState.HALF_OPEN
    assert breakers.begin(PEER, 1.0) is None
    assert breakers.begin(PEER, 10.9) is None


def test_trial_that_never_ends_is_followed_by_another(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    lost = begin(breakers, 1.0)
    assert begin(breakers, 11.0) != lost
    assert not breakers.failed(PEER, lost, 11.5, "late")
    assert breakers.state_of(PEER) is BreakerState.HALF_OPEN


def test_answer_to_the_trial_closes_and_is_told_once(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    begin(breakers, 1.0)
    assert breakers.worked(PEER)
    assert not breakers.worked(PEER)
    assert breakers.state_of(PEER) is BreakerState.CLOSED
    assert failures_of(breakers, PEER) == 0


def test_failed_trials_double_the_pause_up_to_the_longest_and_open_it_no_second_time(
    breakers: Breakers,
) -> None:
    assert fail(breakers, 0.0)
    now, pauses = 0.0, []
    for _ in range(5):
        pauses.append(breakers.wait_s(PEER, now))
        now += pauses[-1]
        assert not fail(breakers, now)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert (breakers.num_opened, breakers.num_failed) == (1, 6)


def test_pause_is_short_again_after_an_answer(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    fail(breakers, 1.0)
    breakers.worked(PEER)
    assert fail(breakers, 50.0)
    assert breakers.wait_s(PEER, 50.0) == 1.0
    assert breakers.num_opened == 2


def test_calls_that_fail_together_count_as_one_death(breakers: Breakers) -> None:
    calls = [begin(breakers, 0.0) for _ in range(3)]
    assert [breakers.failed(PEER, call, 0.5, "dead") for call in calls] == [True, False, False]
    assert failures_of(breakers, PEER) == 1
    assert breakers.num_failed == 3


def test_failure_from_before_the_answer_opens_nothing(breakers: Breakers) -> None:
    old = begin(breakers, 0.0)
    fail(breakers, 0.0)
    begin(breakers, 1.0)
    breakers.worked(PEER)
    assert not breakers.failed(PEER, old, 2.0, "dead")
    assert breakers.state_of(PEER) is BreakerState.CLOSED


def test_late_answer_closes(breakers: Breakers) -> None:
    begin(breakers, 0.0)
    fail(breakers, 0.0)
    assert breakers.worked(PEER)
    assert breakers.begin(PEER, 0.0) is not None


def test_trial_that_says_nothing_may_be_made_again_at_once(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    trial = begin(breakers, 1.0)
    breakers.forget(PEER, trial, 2.0)
    assert breakers.state_of(PEER) is BreakerState.OPEN
    assert begin(breakers, 2.0) != trial
    assert failures_of(breakers, PEER) == 1


def test_forgetting_an_older_call_does_not_end_the_trial(breakers: Breakers) -> None:
    old = begin(breakers, 0.0)
    fail(breakers, 0.0)
    begin(breakers, 1.0)
    breakers.forget(PEER, old, 1.0)
    assert breakers.begin(PEER, 1.0) is None


def test_report_names_the_worst_and_counts_all(breakers: Breakers) -> None:
    for number in range(MAX_BREAKERS + 3):
        fail(breakers, 10.0, f"node:{number}")
    breakers.failed("node:7", begin(breakers, 11.0, "node:7"), 11.0, "x" * 1000)
    report = breakers.report(14.0)
    assert report.peers[0] == "node:7"
    assert report.failures[0] == 2
    assert report.seconds[0] == 4.0
    assert len(report.reasons[0]) == MAX_REASON
    assert {len(column) for column in (report.peers, report.states, report.seconds)} == {
        MAX_BREAKERS
    }
    assert (report.opened, report.failed) == (MAX_BREAKERS + 3, MAX_BREAKERS + 4)


def test_peers_that_are_remembered_are_bounded_and_bad_ones_stay(
    breakers: Breakers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.cluster.breaker, "MAX_PEERS", 3)
    fail(breakers, 0.0)
    for number in range(10):
        begin(breakers, 0.0, f"node:{number}")
        breakers.check()
    assert breakers.state_of(PEER) is BreakerState.OPEN


def test_joined_reports_keep_rows_and_add_sums(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    other = Breakers(PAUSES)
    fail(other, 1.0, "scheduler")
    whole = joined([breakers.report(2.0), other.report(2.0)])
    assert whole.peers == [PEER, "scheduler"]
    assert whole.seconds == [2.0, 1.0]
    assert (whole.opened, whole.failed, whole.refused) == (2, 2, 0)


def test_age_of_a_report_grows_and_nothing_else(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    older = aged(breakers.report(1.0), 2.5)
    assert older == breakers.report(3.5)


def test_sentences_say_who_since_when_and_why(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    [sentence] = sentences(breakers.report(3.0))
    assert sentence == "node:a is open for 3 s, 1 failures in a row: it is dead"


@pytest.mark.parametrize(
    "message",
    [
        NodeStats(breakers=BreakerReport(["scheduler"], ["open"], [2], [1.5], ["dead"], 1, 2, 3)),
        Tell(1, 1, "ns", breakers=BreakerReport(opened=4)),
    ],
    ids=["node", "engine"],
)
def test_report_crosses_processes(message: NodeStats | Tell) -> None:
    assert decode(encode(message), type(message)) == message


def test_status_of_nodes_and_engines_has_breakers() -> None:
    assert BreakerReport() in NodeStatus.__struct_defaults__
    assert BreakerReport() in EngineStatus.__struct_defaults__
