"""Circuit breakers by example; `stateful/test_breaker_machine.py` has the rest."""

from __future__ import annotations

import pytest

import raykv.cluster.breaker
from raykv.cluster.breaker import Breakers, BreakerState, Pauses, aged, joined
from raykv.protocol.measures import MAX_BREAKERS, MAX_REASON

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


def test_peer_that_failed_is_left_alone_and_then_tried_by_one_call(breakers: Breakers) -> None:
    assert fail(breakers, 100.0)
    assert breakers.state_of(PEER) is BreakerState.OPEN
    assert breakers.begin(PEER, 100.999) is None
    begin(breakers, 101.0)
    assert breakers.state_of(PEER) is BreakerState.HALF_OPEN
    assert breakers.begin(PEER, 101.0) is None
    assert breakers.worked(PEER)
    assert breakers.state_of(PEER) is BreakerState.CLOSED


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


def test_report_names_the_worst_and_counts_all(breakers: Breakers) -> None:
    for number in range(MAX_BREAKERS + 3):
        fail(breakers, 10.0, f"node:{number}")
    breakers.failed("node:7", begin(breakers, 11.0, "node:7"), 11.0, "x" * 1000)
    report = breakers.report(14.0)
    first = report.rows[0]
    assert (first.peer, first.failures, first.seconds) == ("node:7", 2, 4.0)
    assert len(first.reason) == MAX_REASON
    assert len(report.rows) == MAX_BREAKERS
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
    assert [(row.peer, row.seconds) for row in whole.rows] == [(PEER, 2.0), ("scheduler", 1.0)]
    assert (whole.opened, whole.failed, whole.refused) == (2, 2, 0)


def test_age_of_a_report_grows_and_nothing_else(breakers: Breakers) -> None:
    fail(breakers, 0.0)
    older = aged(breakers.report(1.0), 2.5)
    assert older == breakers.report(3.5)
