"""Circuit breakers against a model that keeps every call and recomputes what may be from them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.cluster.breaker import Breakers, BreakerState, Pauses
from tests.fixtures.breakers import failures_of

PEERS = ("scheduler", "node:a", "node:b")
FIRST_S, LONGEST_S, TRIAL_S = 2, 9, 20


@dataclass
class Call:
    """A call under way; `is_trial`: it alone may tell whether its peer is back."""

    peer: str
    number: int
    lot: int
    is_trial: bool


@dataclass
class Peer:
    """What happened to a peer: `lot` counts its changes for better or worse."""

    is_bad: bool = False
    failures: int = 0
    left_alone_until: int = 0
    trial: Call | None = None
    trial_until: int = 0
    lot: int = 0


class BreakerMachine(RuleBasedStateMachine):
    """Times are whole seconds, so that nothing depends on rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.breakers = Breakers(Pauses(FIRST_S, LONGEST_S, TRIAL_S))
        self.model = {peer: Peer() for peer in PEERS}
        self.calls: list[Call] = []
        self.opened = self.failed = self.refused = 0

    def may_begin(self, peer: Peer) -> bool:
        if not peer.is_bad:
            return True
        if peer.trial is not None:
            return self.now >= peer.trial_until
        return self.now >= peer.left_alone_until

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(PEERS))
    def begin(self, name: str) -> None:
        peer = self.model[name]
        number = self.breakers.begin(name, self.now)
        assert (number is not None) == self.may_begin(peer)
        if number is None:
            self.refused += 1
            return
        call = Call(name, number, peer.lot, peer.is_bad)
        if peer.is_bad:
            peer.trial, peer.trial_until = call, self.now + TRIAL_S
        self.calls.append(call)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        call = self.take(data)
        peer = self.model[call.peer]
        self.failed += 1
        counts = call is peer.trial if peer.is_bad else call.lot == peer.lot
        told = self.breakers.failed(call.peer, call.number, self.now, "dead")
        assert told == (counts and not peer.is_bad)
        if not counts:
            return
        self.opened += not peer.is_bad
        peer.lot += not peer.is_bad
        peer.is_bad, peer.trial = True, None
        peer.failures += 1
        pause = FIRST_S
        for _ in range(peer.failures - 1):
            pause = min(LONGEST_S, pause * 2)
        peer.left_alone_until = self.now + pause

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        call = self.take(data)
        peer = self.model[call.peer]
        assert self.breakers.worked(call.peer) == peer.is_bad
        if peer.is_bad:
            self.model[call.peer] = Peer(lot=peer.lot + 1)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        call = self.take(data)
        peer = self.model[call.peer]
        self.breakers.forget(call.peer, call.number, self.now)
        if peer.is_bad and call is peer.trial:
            peer.trial, peer.left_alone_until = None, self.now

    def take(self, data: st.DataObject) -> Call:
        return self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))

    @invariant()
    def holds(self) -> None:
        self.breakers.check()
        for name, peer in self.model.items():
            state = self.breakers.state_of(name)
            assert (state is not BreakerState.CLOSED) == peer.is_bad
            assert (state is BreakerState.HALF_OPEN) == (peer.trial is not None)
            assert failures_of(self.breakers, name) == peer.failures
            assert (self.breakers.wait_s(name, self.now) == 0) == self.may_begin(peer)

    @invariant()
    def is_told(self) -> None:
        report = self.breakers.report(self.now)
        bad = {name for name, peer in self.model.items() if peer.is_bad}
        assert {row.peer for row in report.rows} == bad
        assert (report.opened, report.failed, report.refused) == (
            self.opened,
            self.failed,
            self.refused,
        )


TestBreakers = BreakerMachine.TestCase
