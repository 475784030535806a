"""Readers of the event stream who ask for what is not there, and answers that are none.

A question ends: with events, with `EventsMissed`, or with an error that says why.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import msgspec
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

import raykv
from raykv.base.errors import ClusterError, MessageError, VersionError
from raykv.base.ids import EventKind
from raykv.directory.actor import SchedulerActor
from raykv.protocol.columns import Keys, Numbers, Texts
from raykv.protocol.events import KEYLESS, EventPage, EventsMissed, ListingQuery
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.listing import ALL_READ, ListedRows, ListingPart, Position, Where
from raykv.stream import readers
from raykv.stream.readers import read_events, take_snapshot
from raykv.stream.replay import Replay
from tests.fixtures.directory.reporting import SPACE, ReportingNode, key_of, row_of
from tests.fixtures.played_cluster import PlayedActor, play


class Answers:
    """A scheduler actor that answers what a test wants; an event stream of so many pages."""

    def __init__(self, *pages: Any) -> None:
        self._pages = list(pages)
        self.num_asked = 0

    def events(self, _life: int, _after: int) -> Any:
        self.num_asked += 1
        assert self.num_asked < 100, "it asks for ever"
        return self._pages[min(self.num_asked, len(self._pages)) - 1]

    def ping(self) -> str:
        return "9.9"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is played answers at once, and nobody waits for a scheduler actor that fails."""
    play(monkeypatch, {})
    monkeypatch.setattr(readers, "READER_PATIENCE_S", 0.0)


def played(scheduler: SchedulerActor | Answers) -> PlayedActor:
    names = ("events", "status") if isinstance(scheduler, SchedulerActor) else ("events", "ping")
    return PlayedActor({name: getattr(scheduler, name) for name in names})


@pytest.fixture(scope="module")
def actor() -> SchedulerActor:
    """Of which the first events are forgotten."""
    made = SchedulerActor("here")
    made._directory.events._most = 50
    node = ReportingNode(made._directory, "node")
    for number in range(40):
        node.report(0.0, row_of(2 * number), row_of(2 * number + 1))
    for name in ("one", "two", "gone"):
        ReportingNode(made._directory, name).report(0.0)
    made._expires_at = math.inf
    log = made._directory.events
    assert 1 < log.first_seq < log.last_seq
    return made


def read(scheduler: SchedulerActor | Answers, since: Any) -> list[Any]:
    return list(islice(read_events(lambda: played(scheduler), since, follow=False), 10_000))


@settings(max_examples=200, deadline=None)
@given(
    life=st.one_of(st.none(), st.integers(0, (1 << 63) - 1)),
    offset=st.integers(-200, 200),
    huge=st.sampled_from([0, 1 << 40, (1 << 63) - 1]),
)
def test_every_place_is_answered_with_what_follows_or_with_missed_events(
    actor: SchedulerActor, life: int | None, offset: int, huge: int
) -> None:
    log, here = actor._directory.events, actor._directory.life
    number = huge or max(0, log.last_seq + offset)
    since = number if life is None else (life, number)
    found = read(actor, since)
    is_known = life is None or life == here
    if is_known and log.first_seq - 1 <= number <= log.last_seq:
        assert [event.seq for event in found] == list(range(number + 1, log.last_seq + 1))
        return
    assert isinstance(found[0], EventsMissed)
    assert (found[0].life, found[0].seq) == (here, log.first_seq)
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

GOOD: dict[str, Any] = {
    "version": PROTOCOL_VERSION,
    "life": 5,
    "first_seq": 1,
    "last_seq": 2,
    "nodes": Texts.of(["", "node"]),
    "namespaces": Texts.of(["", "model"]),
    "kinds": bytes([EventKind.LIFE_BEGAN, EventKind.BLOCK_STORED]),
    "keys": Keys.of([KEYLESS, b"key1"]),
    "lives": Numbers.of([0, 3]),
    "numbers": Numbers.of([0, 9]),
}
EMPTY: dict[str, Any] = {
    "version": PROTOCOL_VERSION,
    "life": 5,
    "first_seq": 1,
    "last_seq": 2,
}
UNREADABLE: dict[str, dict[str, Any]] = {
    "unknown kind": GOOD | {"kinds": bytes([0, 77])},
    "ragged": GOOD | {"lives": Numbers.of([1])},
    "node that is not there": GOOD | {"nodes": (["", "node"], Numbers.of([0, 9]))},
    "numbers that nobody has": GOOD | {"first_seq": -1},
}
WRONG: dict[str, dict[str, Any]] = {
    "empty though there is more": EMPTY,
    "not what was asked for": GOOD | {"first_seq": 9, "kinds": b"\1\1"},
}


def raw_of(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_page_that_is_right_is_read() -> None:
    assert decode(raw_of(GOOD), EventPage).keys == [KEYLESS, b"key1"]
    assert [event.seq for event in read(Answers(raw_of(GOOD)), (5, 0))] == [1, 2]


@pytest.mark.parametrize("case", WRONG)
def test_page_that_can_not_be_meant_is_an_error(case: str) -> None:
    actor = Answers(raw_of(WRONG[case]))
    with pytest.raises(MessageError):
        read(actor, (5, 0))
    assert actor.num_asked == 1


def test_stream_that_goes_round_in_circles_ends() -> None:
    same = raw_of(GOOD | {"last_seq": 99, "kinds": b"\1\1"})
    with pytest.raises(MessageError):
        read(Answers(same), (5, 0))


def test_scheduler_actor_of_another_version_is_named_with_both_versions() -> None:
    with pytest.raises(VersionError) as caught:
        read(Answers(raw_of(GOOD | {"version": PROTOCOL_VERSION + 1})), (5, 0))
    assert f"protocol {PROTOCOL_VERSION + 1}" in str(caught.value)
    assert f"this process {PROTOCOL_VERSION}" in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", *map(raw_of, UNREADABLE.values())])
def test_answer_that_can_not_be_read_names_both_versions(raw: bytes) -> None:
    with pytest.raises(VersionError) as caught:
        read(Answers(raw), (5, 0))
    assert f"runs RayKV 9.9, this process {raykv.__version__}" in str(caught.value)


# Snapshots


class Node:
    """A NodeActor that tells its listing in the parts that a test wants, or fails."""

    def __init__(self, *parts: Any, error: Exception | None = None) -> None:
        self._parts = list(parts)
        self._error = error
        self.num_asked = 0

    def listing(self, raw: bytes) -> bytes:
        decode(raw, ListingQuery)
        if self._error is not None:
            raise self._error
        self.num_asked += 1
        part = self._parts[min(self.num_asked, len(self._parts)) - 1]
        return part if isinstance(part, bytes) else encode(part)


def part(numbers: list[int], start: int, end: int, *, place: int = 0, **fields: Any) -> ListingPart:
    rows = ListedRows.of([row_of(number, **fields) for number in numbers])
    return ListingPart(start == 0, Position(1, start), Position(1, end, place), rows)


def snapshot(actor: SchedulerActor, **nodes: Node) -> Replay:
    return take_snapshot(
        lambda: played(actor),
        lambda: {name: PlayedActor({"listing": each.listing}) for name, each in nodes.items()},
    )


def test_snapshot_is_what_all_nodes_have_at_a_place_of_the_log(actor: SchedulerActor) -> None:
    one = Node(part([1, 2], 0, 5), part([3], 5, 6, place=ALL_READ))
    two = Node(part([1], 0, 2, place=ALL_READ))
    gone = Node(error=ray.exceptions.ActorDiedError())
    refuses = Node(error=ConnectionError("it has no pool"))
    found = snapshot(actor, one=one, two=two, gone=gone, no_member=refuses)
    assert found.place == (actor._directory.life, actor._directory.events.last_seq)
    names = {("one", 1), ("one", 2), ("one", 3), ("two", 1)}
    assert found.chunks == {(node, SPACE, key_of(number)) for node, number in names}
    assert found.nodes == {"one": 1, "two": 1}


def test_chunk_that_went_or_is_only_coming_is_in_no_snapshot(actor: SchedulerActor) -> None:
    one = Node(
        part([1, 2], 0, 5),
        part([1], 5, 6, where=Where.NOWHERE),
        part([3], 6, 7, place=ALL_READ, where=Where.COMING),
    )
    assert {key for _, _, key in snapshot(actor, one=one).chunks} == {key_of(2)}


def test_node_that_does_not_answer_is_named(actor: SchedulerActor) -> None:
    with pytest.raises(ClusterError, match=r"node one does not tell what it has: .*too busy"):
        snapshot(actor, one=Node(error=ConnectionError("too busy")))


@pytest.mark.parametrize(
    "node",
    [
        Node(b"no part"),
        Node(part([1], 0, 5), part([2], 3, 6)),
        Node(part([1], 0, 5), part([], 5, 5)),
    ],
)
def test_snapshot_that_can_not_be_meant_is_an_error(actor: SchedulerActor, node: Node) -> None:
    with pytest.raises(MessageError):
        snapshot(actor, one=node)
    assert node.num_asked < 4
