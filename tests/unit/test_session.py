"""An engine's session: what it tells the view of its own troubles."""

from __future__ import annotations

from raykv.actors.session import Session, SessionSettings
from raykv.core.view import EngineView
from raykv.messages import AttachEngine, EngineAttached, SyncReply, SyncRequest, decode, encode
from raykv.types import EngineId
from tests.waiting import wait_until

DEADLINE_S = 10.0


class PlayedScheduler:
    """Answers, or not."""

    def __init__(self) -> None:
        self.answers = True

    def attach(self, raw: bytes) -> bytes:
        assert self.answers, "it does not answer"
        decode(raw, AttachEngine)
        return encode(EngineAttached(epoch=1, node_epoch=7, capacity={0: 40}))

    def sync(self, raw: bytes) -> bytes:
        assert self.answers, "it does not answer"
        return encode(SyncReply(1, decode(raw, SyncRequest).seq, node_epoch=7))

    def detach(self, engine_id: str) -> None:
        pass


def test_view_knows_whether_the_scheduler_actor_answers() -> None:
    view = EngineView(EngineId("engine"), [0], 1.0, 4)
    scheduler = PlayedScheduler()
    settings = SessionSettings("engine", "node", "ns", "model", 1, {0: 4096}, heartbeat_s=0.02)
    session = Session(view, scheduler, settings)
    session.attach(DEADLINE_S)
    assert not view.remote.is_cut_off
    session.start()
    try:
        scheduler.answers = False
        wait_until(lambda: view.remote.is_cut_off, DEADLINE_S, "the view hears of the failure")
        scheduler.answers = True
        wait_until(lambda: not view.remote.is_cut_off, DEADLINE_S, "the view hears that it is over")
    finally:
        session.stop(DEADLINE_S)
