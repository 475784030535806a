"""Readers of the event stream who ask for what is not there, and answers that are none.

A question ends: with events, with `EventsMissed`, or with an error that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv
from raykv.base.errors import ClusterError, MessageError, VersionError
from raykv.base.ids import SLOT_ALIGNMENT, EventKind
from raykv.directory.actor import SchedulerActor
from raykv.protocol.columns import Keys
from raykv.protocol.events import EventPage, EventsMissed, SnapshotPage
from raykv.protocol.framing import PROTOCOL_VERSION, encode
from raykv.protocol.node import Inventory, NodeReport
from raykv.stream import readers
from raykv.stream.readers import read_events, take_snapshot
from raykv.stream.replay import Replay

PAGE = SLOT_ALIGNMENT
replace = msgspec.structs.replace


class Remote:
    """A method as a caller of a Ray actor sees it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


class Handle:
    """An actor as its caller sees it, in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Remote:
        return Remote(getattr(self._actor, name))


class Answers:
    """A scheduler actor that answers what a test wants; an event stream of so many pages."""

    def __init__(self, *pages: Any) -> None:
        self._pages = list(pages)
        self.num_asked = 0

    def events(self, _epoch: int, _after: int) -> Any:
        return self._next()

    def snapshot(self, _cursor: int) -> Any:
        return self._next()

    def _next(self) -> Any:
        self.num_asked += 1
        assert self.num_asked < 100, "it asks for ever"
        return self._pages[min(self.num_asked, len(self._pages)) - 1]

    def ping(self) -> str:
        return "9.9"


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(readers, "READER_PATIENCE_S", 0.0)


@pytest.fixture(scope="module")
def actor() -> SchedulerActor:
    """Of which the first events are forgotten."""
    made = SchedulerActor("here", "lru")
    made._manager._log._most = 50
    for seq in range(1, 41):
        stored = Inventory(
            ["model"], [0, 0], Keys.of([b"a%d" % seq, b"b%d" % seq]), [0, 1], [seq] * 2, [PAGE] * 2
        )
        made.report(
            encode(NodeReport(PROTOCOL_VERSION, "node", 7, seq, 8 * PAGE, 4 * PAGE, 0, 0, stored))
        )
    log = made._manager._log
    assert 1 < log.first_seq < log.last_seq
    return made


def read(actor: Any, since: Any) -> list[Any]:
    return list(islice(read_events(lambda: Handle(actor), since, follow=False), 10_000))


@settings(max_examples=200, deadline=None)
@given(
    epoch=st.one_of(st.none(), st.integers(0, (1 << 63) - 1)),
    offset=st.integers(-200, 200),
    huge=st.sampled_from([0, 1 << 40, (1 << 63) - 1]),
)
def test_every_place_is_answered_with_what_follows_or_with_missed_events(
    actor: SchedulerActor, epoch: int | None, offset: int, huge: int
) -> None:
    log = actor._manager._log
    number = huge or max(0, log.last_seq + offset)
    since = number if epoch is None else (epoch, number)
    found = read(actor, since)
    is_known = epoch is None or epoch == log.epoch
    if is_known and log.first_seq - 1 <= number <= log.last_seq:
        assert [event.seq for event in found] == list(range(number + 1, log.last_seq + 1))
        return
    assert isinstance(found[0], EventsMissed)
    assert (found[0].epoch, found[0].seq) == (log.epoch, log.first_seq)
    expected = log.first_seq - number - 1 if is_known and number < log.first_seq else None
    assert found[0].missed == expected
    assert [event.seq for event in found[1:]] == list(range(log.first_seq, log.last_seq + 1))


@pytest.mark.parametrize(
    "since", [-1, (1, -1), 1.5, "1", (1,), (1, 2, 3), (None, 1), 1 << 64, [1, 2], {}, (1, "x")]
)
def test_what_is_no_place_is_refused_at_once(actor: SchedulerActor, since: Any) -> None:
    with pytest.raises(ClusterError, match="give the number of an event"):
        read(actor, since)


# Answers that are none

GOOD = EventPage(
    PROTOCOL_VERSION,
    epoch=5,
    first_seq=1,
    last_seq=2,
    nodes=["", "node"],
    namespaces=["", "model"],
    kinds=[int(EventKind.EPOCH_BEGAN), int(EventKind.BLOCK_STORED)],
    node_index=[0, 1],
    namespace_index=[0, 1],
    keys=[b"", b"key1"],
    slots=[0, 3],
    generations=[0, 9],
)
WRONG = {
    "empty though there is more": EventPage(PROTOCOL_VERSION, 5, 1, 2),
    "unknown kind": replace(GOOD, kinds=[0, 77]),
    "ragged": replace(GOOD, slots=[1]),
    "node that is not there": replace(GOOD, node_index=[0, 9]),
    "not what was asked for": replace(GOOD, first_seq=9, kinds=[1, 1]),
}


def test_page_that_is_right_is_read() -> None:
    assert [event.seq for event in read(Answers(encode(GOOD)), (5, 0))] == [1, 2]


@pytest.mark.parametrize("case", WRONG)
def test_page_that_can_not_be_meant_is_an_error(case: str) -> None:
    actor = Answers(encode(WRONG[case]))
    with pytest.raises(MessageError):
        read(actor, (5, 0))
    assert actor.num_asked == 1


def test_stream_that_goes_round_in_circles_ends() -> None:
    same = encode(replace(GOOD, last_seq=99, kinds=[1, 1], keys=[b"key1"] * 2))
    with pytest.raises(MessageError):
        read(Answers(same), (5, 0))


def test_scheduler_actor_of_another_version_is_named_with_both_versions() -> None:
    with pytest.raises(VersionError) as caught:
        read(Answers(encode(replace(GOOD, version=PROTOCOL_VERSION + 1))), (5, 0))
    assert f"protocol {PROTOCOL_VERSION + 1}" in str(caught.value)
    assert f"this process {PROTOCOL_VERSION}" in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", encode(Inventory())])
def test_answer_that_can_not_be_read_names_both_versions(raw: bytes) -> None:
    for ask in (lambda: read(Answers(raw), (5, 0)), lambda: snapshot(raw)):
        with pytest.raises(VersionError) as caught:
            ask()
        assert f"runs RayKV 9.9, this process {raykv.__version__}" in str(caught.value)


def snapshot(*pages: bytes) -> Replay:
    return take_snapshot(lambda: Handle(Answers(*pages)))


@pytest.mark.parametrize(
    "chunks",
    [
        Inventory(["model"], [0], Keys.of([b"key1"]), [], [], []),
        Inventory(["model"], [3], Keys.of([b"key1"]), [1], [1], [1]),
    ],
)
def test_snapshot_that_can_not_be_meant_is_an_error(chunks: Inventory) -> None:
    page = SnapshotPage(PROTOCOL_VERSION, 5, 1, 1 << 40, "node", 7, chunks)
    with pytest.raises(MessageError):
        snapshot(encode(page))


def test_snapshot_that_goes_round_in_circles_ends() -> None:
    page = SnapshotPage(PROTOCOL_VERSION, 5, 1, 1 << 40, "node", 7)
    with pytest.raises(MessageError, match="again and again"):
        snapshot(encode(page), encode(page))


def test_snapshot_is_read_from_an_actor(actor: SchedulerActor) -> None:
    found = take_snapshot(lambda: Handle(actor))
    assert found.place == (actor._manager.epoch, actor._manager.last_event)
