"""Sessions against a model: what each has used, where it is, and what its end lets go first.

The model knows nothing of the bookkeeping. Whatever is stored: as long as a chunk of an ended
session is there that nobody else has used since, no chunk is evicted that was not let go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raykv.directory.sessions import LATE_S
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.sessions import SessionOrder, SessionQuery, SessionWord
from tests.fixtures.directory.pinned import SPACE, Cluster
from tests.fixtures.directory.tables import TABLES, use_table

SLOTS = 8
CHUNKS = range(14)
SESSIONS = ("x", "y", "z")

some_chunks = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4, unique=True)
sessions = st.sampled_from(SESSIONS)
pauses = st.sampled_from((2.0, 20.0))


@dataclass
class Known:
    """A session: what it has used, and until when it pauses."""

    chunks: set[int] = field(default_factory=set)
    stage: str = "active"
    until: float = 0.0
    ended_at: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.stage in ("over", "given up")


class SessionsMachine(RuleBasedStateMachine):
    """One node of eight slots, of which requests may pin two."""

    cluster: Cluster

    @initialize()
    def begin(self) -> None:
        self.cluster = Cluster(slots=SLOTS)
        self.cluster.add("a")
        self.known: dict[str, Known] = {}
        # Chunks that are the next to go, by what is certain of them.
        self.free: set[int] = set()
        # Chunks that came when a session that has them had ended: they may be let go, too.
        self.late: set[int] = set()

    def held(self) -> set[int]:
        return set(self.cluster.held("a", *CHUNKS))

    def private(self, session: str) -> set[int]:
        others = [known.chunks for name, known in self.known.items() if name != session]
        return self.known[session].chunks.difference(*others)

    def ended(self, session: str, stage: str) -> None:
        known = self.known[session]
        known.stage, known.ended_at = stage, self.cluster.now
        self.free |= self.private(session) & self.held()

    @rule(numbers=some_chunks)
    def store(self, numbers: list[int]) -> None:
        before = self.held()
        new = [number for number in numbers if number not in before]
        free = self.free & before
        self.cluster.store("a", *new)
        gone = before - self.held()
        assert free <= gone or gone <= free | self.late, (gone, free, self.late)
        self.free -= gone | set(new)
        ended = [known.chunks for known in self.known.values() if known.has_ended]
        self.late = (self.late - gone) | (set(new) & set().union(*ended))

    @rule(session=sessions, numbers=some_chunks)
    def use(self, session: str, numbers: list[int]) -> None:
        """A request comes and ends."""
        known = self.known.setdefault(session, Known())
        self.free -= known.chunks | set(numbers)
        known.stage = "active"
        known.chunks |= set(numbers)
        self.cluster.say("a", session, SessionWord.CAME)
        self.cluster.say("a", session, SessionWord.USED, *numbers)

    @rule(session=sessions, numbers=some_chunks)
    def end(self, session: str, numbers: list[int]) -> None:
        known = self.known.setdefault(session, Known())
        self.free -= set(numbers) - known.chunks
        known.chunks |= set(numbers)
        self.cluster.say("a", session, SessionWord.OVER, *numbers)
        self.ended(session, "over")

    @rule(session=sessions, numbers=some_chunks, pause_s=pauses)
    def pause(self, session: str, numbers: list[int], pause_s: float) -> None:
        known = self.known.setdefault(session, Known())
        known.chunks |= set(numbers)
        self.free -= known.chunks
        known.stage, known.until = "paused", self.cluster.now + pause_s
        self.cluster.say("a", session, SessionWord.PAUSED, *numbers, pause_s=pause_s)

    @rule(session=sessions)
    def operator_ends(self, session: str) -> None:
        order = SessionOrder(PROTOCOL_VERSION, SPACE, session, SessionWord.OVER)
        answer = self.cluster.manager.sessions.order(order, self.cluster.now)
        assert (answer.session is None) == (session not in self.known)
        if answer.session is not None:
            self.ended(session, "over")

    @rule(seconds=st.sampled_from((1.0, 5.0, LATE_S + 1)))
    def wait(self, seconds: float) -> None:
        self.cluster.wait(seconds)
        for session, known in self.known.items():
            if known.stage == "paused" and known.until <= self.cluster.now:
                self.ended(session, "given up")

    @rule()
    def clear(self) -> None:
        self.cluster.manager.clear(SPACE)
        self.cluster.sync("a")
        self.free.clear()
        self.late.clear()

    @invariant()
    def what_is_told_is_so(self) -> None:
        page = self.cluster.manager.sessions.page(
            SessionQuery(PROTOCOL_VERSION, SPACE), self.cluster.now
        )
        told = {each.session: each for each in page.sessions}
        assert told.keys() == self.known.keys()
        for session, known in self.known.items():
            status = told[session]
            counts = (status.chunks, status.private_chunks, str(status.stage))
            assert counts == (len(known.chunks), len(self.private(session)), known.stage)

    @invariant()
    def books_are_right(self) -> None:
        self.cluster.manager.check()


@pytest.mark.parametrize("kind", TABLES)
def test_sessions_let_go_what_nobody_else_has_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    use_table(monkeypatch, kind)
    run_state_machine_as_test(
        SessionsMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
