"""What a transfer displaces goes to the node's disk first, within the caller's time."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import ray

from raykv.base.ids import Epoch, Generation, Refusal, Slot
from raykv.client import transfers
from raykv.client.import_source import GENERATION
from raykv.client.listing import Reader
from raykv.client.scheduler import Scheduler
from raykv.client.transfers import Moving
from raykv.cluster import ask
from raykv.protocol.columns import Handle, Handles, Keys, Replica, Replicas, Source, SourceKind
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Demotions
from raykv.protocol.operator import TransferGrant, TransferOrder, TransferResult
from raykv.protocol.peer import FetchResult

GRANT = TransferGrant(
    PROTOCOL_VERSION,
    handles=Handles(Keys.of([b"k"]), [0], [5]),
    slot_bytes=[4096],
    demoted=Demotions(["model"], [0], [b"old"], [0], [3]),
)


class Played:
    """A scheduler actor and a NodeActor, whose calls take no time but move the clock."""

    def __init__(self, patches: pytest.MonkeyPatch, demote_s: float, *, is_copied: bool) -> None:
        self.now = 100.0
        self.demote_s, self.is_copied = demote_s, is_copied
        self.deadlines: dict[str, float] = {}
        patches.setattr(transfers, "time", self)
        patches.setattr(ask, "find_node_actor", lambda _: self)
        patches.setattr(transfers, "_fetch", self._fetched)
        patches.setattr(ray, "get", lambda answer, timeout: answer)

    def monotonic(self) -> float:
        return self.now

    @property
    def demote(self) -> Any:
        return self

    def remote(self, _raw: bytes, deadline_s: float) -> bool:
        self.deadlines["demote"] = deadline_s
        self.now += self.demote_s
        return self.is_copied

    def ask(self, method: str, *_arguments: Any) -> Any:
        return encode(GRANT) if method == "lend" else None

    def _fetched(self, *arguments: Any) -> FetchResult:
        self.deadlines["fetch"] = arguments[-1]
        return FetchResult(0, [int(Refusal.NONE)], [0], [5], 4096)

    def bring(self, deadline_s: float) -> TransferResult:
        order = TransferOrder(PROTOCOL_VERSION, "t", "model", "node", [b"k"])
        made = Moving(cast("Scheduler", self), cast("Reader", None))
        return made.fetch_lent(order, Replicas(), deadline_s, TransferResult(asked=1))


def test_fetch_has_the_time_that_the_disk_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, 4.0, is_copied=True)
    assert played.bring(30.0).came == 1
    assert played.deadlines == {"demote": 5.0, "fetch": 26.0}


def test_disk_has_no_more_time_than_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, 2.0, is_copied=True)
    assert played.bring(2.0).refusals == {"TOO_LATE": 1}
    assert played.deadlines == {"demote": 2.0}


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_did_not_get_to_the_disk_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_copied: bool
) -> None:
    with caplog.at_level(logging.WARNING, "raykv"):
        assert Played(monkeypatch, 1.0, is_copied=is_copied).bring(30.0).came == 1
    assert ("not all of 1 evicted chunks" in caplog.text) is not is_copied


def test_chunks_of_one_source_are_fetched_from_it_row_by_row() -> None:
    source = Source("import", SourceKind.IMPORT)
    grant = TransferGrant(
        PROTOCOL_VERSION,
        handles=Handles(Keys.of([b"a", b"b"]), [0, 1], [5, 6]),
        slot_bytes=[4096, 4096],
        sources=Replicas([Source("node")], [7]),
    )
    rows = decode(encode(transfers._with_rows(Replicas([source], [1]), grant)), Replicas).rows()
    handle = Handle(Slot(0), Generation(GENERATION))
    assert list(rows) == [(at, Replica(source, Epoch(1), handle)) for at in (0, 1)]
    assert transfers._with_rows(Replicas(), grant) is grant.sources
