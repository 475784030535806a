"""Circuit breakers: a peer that does not answer is left alone for a while, then asked once.

               failed                 the pause is over, begin
   CLOSED ───────────────► OPEN ────────────────────────────────► HALF_OPEN
     ▲ ▲                    │ ▲                                    │    │
     │ └────────────────────┘ └───────── failed (longer pause) ────┘    │
     │    worked (a late answer)                                        │
     └────────────────────────────────── worked ────────────────────────┘

Every call begins with `begin`, whose number says what its outcome is about, and ends with one of
`worked`, `failed` and `forget`. Not thread-safe: the caller locks.

Invariants:
1. A breaker is CLOSED if and only if its last call that counted has not failed.
2. While a breaker is OPEN no call begins before its pause is over; then one does, the trial, and no
   other until that has ended or its time is up.
3. The outcome of a call that began before the breaker's last change counts, but opens nothing; an
   answer always closes.
4. `opened` <= `failed`: nothing opens without a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count

import msgspec

from raykv.protocol.measures import MAX_BREAKERS, MAX_REASON, BreakerReport, OpenBreaker

MAX_PEERS = 1024
"""Peers that are remembered; beyond it the longest known ones that are CLOSED are forgotten."""

_MOST_DOUBLINGS = 30


class BreakerState(Enum):
    """See the module's diagram."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class Pauses:
    """How long a peer is left alone: `first_s` after its first failure, twice as long after each
    further one, up to `longest_s`.

    A trial without a known end is over after `trial_s`, and another one may begin.
    """

    first_s: float
    longest_s: float
    trial_s: float = 60.0

    def after(self, num_failures: int) -> float:
        """How long a peer is left alone after this many failures in a row."""
        doublings = min(num_failures - 1, _MOST_DOUBLINGS)
        return float(min(self.longest_s, self.first_s * 2**doublings))


@dataclass(slots=True)
class _Breaker:
    """`round` is the number of calls that begin now: another one after each change of state."""

    round: int
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    since: float = 0.0
    next_at: float = 0.0
    reason: str = ""


class Breakers:
    """One breaker per peer; see the module's docstring. All times are of one monotonic clock."""

    def __init__(self, pauses: Pauses) -> None:
        self.pauses = pauses
        self.num_opened = 0
        self.num_failed = 0
        self.num_refused = 0
        self._rounds = count(1)
        self._by_peer: dict[str, _Breaker] = {}

    # Calls

    def begin(self, peer: str, now: float) -> int | None:
        """A call is about to be made: its number, or None if it must not be."""
        if self.refuses(peer, now):
            return None
        breaker = self._known(peer)
        if breaker.state is not BreakerState.CLOSED:
            self._change(breaker, BreakerState.HALF_OPEN)
            breaker.next_at = now + self.pauses.trial_s
        return breaker.round

    def refuses(self, peer: str, now: float) -> bool:
        """Whether no call may begin now; that counts as a refusal."""
        is_refused = self.wait_s(peer, now) > 0
        self.num_refused += is_refused
        return is_refused

    def worked(self, peer: str) -> bool:
        """A call was answered. True: the peer had not answered before, and does again."""
        breaker = self._known(peer)
        if breaker.state is BreakerState.CLOSED:
            return False
        self._change(breaker, BreakerState.CLOSED)
        breaker.failures = 0
        return True

    def failed(self, peer: str, number: int, now: float, reason: str) -> bool:
        """A call was not answered, or wrongly. True: its peer is left alone from now on."""
        self.num_failed += 1
        breaker = self._known(peer)
        if number != breaker.round:
            return False
        was_closed = breaker.state is BreakerState.CLOSED
        if was_closed:
            self.num_opened += 1
            breaker.since = now
        self._change(breaker, BreakerState.OPEN)
        breaker.failures += 1
        breaker.next_at = now + self.pauses.after(breaker.failures)
        breaker.reason = reason[:MAX_REASON]
        return was_closed

    def forget(self, peer: str, number: int, now: float) -> None:
        """A call has ended without saying anything about its peer: another trial may begin."""
        breaker = self._known(peer)
        if number == breaker.round and breaker.state is BreakerState.HALF_OPEN:
            self._change(breaker, BreakerState.OPEN)
            breaker.next_at = now

    def _known(self, peer: str) -> _Breaker:
        breaker = self._by_peer.get(peer)
        if breaker is None:
            self._make_room()
            breaker = self._by_peer[peer] = _Breaker(next(self._rounds))
        return breaker

    def _make_room(self) -> None:
        if len(self._by_peer) >= MAX_PEERS:
            closed = [p for p, b in self._by_peer.items() if b.state is BreakerState.CLOSED]
            oldest = closed[0] if closed else next(iter(self._by_peer))
            del self._by_peer[oldest]

    def _change(self, breaker: _Breaker, state: BreakerState) -> None:
        breaker.state = state
        breaker.round = next(self._rounds)

    # Looking

    def state_of(self, peer: str) -> BreakerState:
        """CLOSED for strangers."""
        breaker = self._by_peer.get(peer)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def is_closed(self, peer: str) -> bool:
        """Whether calls may be made as one likes."""
        return self.state_of(peer) is BreakerState.CLOSED

    def wait_s(self, peer: str, now: float) -> float:
        """How long no call may begin; 0 if one may now."""
        breaker = self._by_peer.get(peer)
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return 0.0
        return max(0.0, breaker.next_at - now)

    def report(self, now: float, but: str | None = None) -> BreakerReport:
        """What is not closed, most failures first; rows of peers whose names begin with `but`,
        which are never asked again, are left out.
        """
        known = [(p, b) for p, b in self._by_peer.items() if but is None or not p.startswith(but)]
        bad = [(p, b) for p, b in known if b.state is not BreakerState.CLOSED]
        rows = [
            OpenBreaker(peer, each.state.value, each.failures, now - each.since, each.reason)
            for peer, each in sorted(bad, key=lambda row: -row[1].failures)
        ]
        sums = self.num_opened, self.num_failed, self.num_refused
        return BreakerReport(rows[:MAX_BREAKERS], *sums)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert len(self._by_peer) <= MAX_PEERS, len(self._by_peer)
        assert self.num_opened <= self.num_failed, (self.num_opened, self.num_failed)
        for peer, breaker in self._by_peer.items():
            is_closed = breaker.state is BreakerState.CLOSED
            assert is_closed == (breaker.failures == 0), (peer, breaker)


def joined(reports: Iterable[BreakerReport]) -> BreakerReport:
    """One report of several."""
    reports = list(reports)
    rows = [row for each in reports for row in each.rows]
    return BreakerReport(
        rows[:MAX_BREAKERS],
        opened=sum(each.opened for each in reports),
        failed=sum(each.failed for each in reports),
        refused=sum(each.refused for each in reports),
    )


def aged(report: BreakerReport, seconds: float) -> BreakerReport:
    """A report as it would be so much later, had nothing happened."""
    replace = msgspec.structs.replace
    return replace(report, rows=[replace(r, seconds=r.seconds + seconds) for r in report.rows])


def without(report: BreakerReport, peer: str) -> BreakerReport:
    """A report without the rows of one peer; the sums stay."""
    rows = [row for row in report.rows if row.peer != peer]
    return msgspec.structs.replace(report, rows=rows)
