"""An engine's session: what it tells the view of its own troubles."""

from __future__ import annotations

from raykv.base.ids import EngineId, Key
from raykv.engine.requests import RequestOptions
from raykv.engine.session import MAX_INBOX, Session, SessionSettings
from raykv.engine.view import EngineView
from raykv.metrics.reach import Reach
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import decode, encode
from tests.fixtures.waiting import wait_until

DEADLINE_S = 10.0


class PlayedScheduler:
    """Answers, or not."""

    def __init__(self) -> None:
        self.answers = True
        self.has_peers = True
        self.cleared = 0
        self.requests: list[SyncRequest] = []

    @property
    def full(self) -> list[SyncRequest]:
        """Messages that are more than a heartbeat."""
        return [request for request in self.requests if not request.idle]

    def attach(self, raw: bytes) -> bytes:
        assert self.answers, "it does not answer"
        decode(raw, AttachEngine)
        return encode(EngineAttached(epoch=1, node_epoch=7, capacity={0: 40}))

    def sync(self, raw: bytes) -> bytes:
        assert self.answers, "it does not answer"
        request = decode(raw, SyncRequest)
        self.requests.append(request)
        self.cleared = max(self.cleared, request.clear)
        return encode(
            SyncReply(1, request.seq, node_epoch=7, has_peers=self.has_peers, cleared=self.cleared)
        )

    def detach(self, engine_id: str) -> None:
        pass


def attached(scheduler: PlayedScheduler, heartbeat_s: float) -> tuple[EngineView, Session]:
    """An engine, before its background exchange begins."""
    view = EngineView(EngineId("engine"), [0], 1.0, 4)
    settings = SessionSettings(
        "engine", "node", "ns", "model", 1, {0: 4096}, heartbeat_s=heartbeat_s
    )
    session = Session(view, scheduler, settings)
    session.attach(DEADLINE_S)
    return view, session


def test_view_knows_whether_the_scheduler_actor_answers() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.02)
    assert not view.remote.is_cut_off
    session.start()
    try:
        scheduler.answers = False
        wait_until(lambda: view.remote.is_cut_off, DEADLINE_S, "the view hears of the failure")
        scheduler.answers = True
        wait_until(lambda: not view.remote.is_cut_off, DEADLINE_S, "the view hears that it is over")
    finally:
        session.stop(DEADLINE_S)


def test_what_requests_want_and_how_long_answers_take_is_told() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.02)
    first = scheduler.requests[0]
    assert (first.counters["wanted_chunks"], first.wanted_keys.ranks) == (0, b"")
    assert not sum(first.latencies["lookup"].counts)
    view.start_request("r", RequestOptions())
    keys = [Key(bytes([number]) * 32 + bytes(4)) for number in range(5)]
    view.ask("r", keys)
    session.note_wanted(keys)
    session.start()
    try:

        def is_timed() -> bool:
            session.drain()
            return any(each.latencies["lookup"].total for each in scheduler.full[:-2])

        wait_until(is_timed, DEADLINE_S, "the answer was timed, and some exchanges went by")
    finally:
        session.stop(DEADLINE_S)
    told = scheduler.full[1:]
    assert sum(bool(request.asked) for request in told) == 1
    assert sum(told[-1].latencies["lookup"].counts) == 1
    assert told[-1].counters["wanted_chunks"] == 5
    reach = Reach()
    for request in told:
        reach.add(0, request.wanted_keys)
    reach.num_wanted = 5
    assert round(reach.num_distinct) == 5


def test_engine_that_had_nothing_to_do_knows_what_is_so_now() -> None:
    """Its peers came while it read no answers; its first request is to ask them."""
    scheduler = PlayedScheduler()
    scheduler.has_peers = False
    view, session = attached(scheduler, heartbeat_s=0.01)
    session.start()
    try:
        wait_until(
            lambda: any(request.idle for request in scheduler.requests), DEADLINE_S, "it is idle"
        )
        scheduler.has_peers = True
        told = len(scheduler.requests)
        wait_until(lambda: len(scheduler.requests) > told + 2, DEADLINE_S, "it is told")
        assert not view.remote.has_peers
        session.drain()
        assert view.remote.has_peers
    finally:
        session.stop(DEADLINE_S)


def test_engine_that_has_nothing_to_do_hoards_no_answers() -> None:
    """Not after a reset either, which every later answer confirms."""
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.001)
    view.reset()
    session.start()
    try:
        wait_until(lambda: len(scheduler.requests) > 20, DEADLINE_S, "many heartbeats")
        assert len(session._inbox) <= MAX_INBOX
        assert scheduler.cleared == 1
    finally:
        session.stop(DEADLINE_S)
