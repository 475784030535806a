"""What a reader of the event stream asks the scheduler actor and NodeActors."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import ray

from raykv.base.ids import Key
from raykv.cluster import ask
from raykv.directory.answers import event_page
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.descriptions import Description, Descriptions
from raykv.protocol.events import BlockEvent
from raykv.protocol.framing import encode
from raykv.stream.format import WireFormat
from raykv.stream.publication import Publication
from raykv.stream.readers import Insides, read_events, whole_reports
from tests.fixtures.directory.reporting import SPACE, ReportingNode, key_of, row_of
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_cluster import Methods, play
from tests.fixtures.wire_index import WireIndex


def row(number: int, num_tokens: int = 2) -> Description:
    return Description("b", key(number), None, b"", bytes(4 * num_tokens), num_tokens)


class PlayedInsides:
    """Nodes that describe chunks, `most` in one answer, and one that does not answer."""

    def __init__(
        self, patches: pytest.MonkeyPatch, *described: list[Description], most: int = 100
    ) -> None:
        self.asked: list[int] = []
        self.num_silent = 0
        nodes: dict[str, Methods] = {"silent": {"descriptions": self._silent}}
        for at, rows in enumerate(described):
            nodes[f"node {at}"] = {"descriptions": partial(self._describe, rows, most)}
        play(patches, {}, nodes)
        self.insides = Insides(ask.node_actors)

    def _describe(self, rows: list[Description], most: int, keys: list[bytes], _: object) -> bytes:
        self.asked.append(len(keys))
        return encode(Descriptions([each for each in rows if each.key in keys][:most]))

    def _silent(self, *_: Any) -> bytes:
        self.num_silent += 1
        raise ray.exceptions.GetTimeoutError("Get timed out")

    def describe(self, *numbers: int) -> list[bytes]:
        return list(self.insides.describe(map(key, numbers), "b"))


def test_node_that_does_not_answer_is_left_alone_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = PlayedInsides(monkeypatch, [row(number) for number in range(3)])
    for number in range(3):
        assert played.describe(number) == [key(number)]
    assert (played.asked, played.num_silent) == ([1, 1, 1], 1)
    assert caplog.text.count("what node silent knows of chunks' insides is left out") == 1


def test_what_any_node_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedInsides(monkeypatch, [row(0), row(1)], [row(1), row(2)])
    assert sorted(played.describe(*range(4))) == [key(number) for number in range(3)]


def test_many_chunks_are_asked_for_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedInsides(monkeypatch, [row(0), row(MAX_KEYS)])
    assert played.describe(*range(MAX_KEYS + 1), 0) == [key(0), key(MAX_KEYS)]
    assert played.asked == [MAX_KEYS, 1]


def test_answer_that_was_cut_off_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(number, 150_000) for number in range(3)]
    assert len(PlayedInsides(monkeypatch, rows, most=1).describe(*range(6))) == 3


def test_invalid_description_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    invalid = msgspec.structs.replace(row(7), block_size=0)
    assert PlayedInsides(monkeypatch, [invalid, row(1)]).describe(1, 7) == [key(1)]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 100])
def test_chunk_is_published_after_the_one_before_it_however_many_events_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    directory = Directory(1, Orders(None, 1, 0.0))
    one, two = ReportingNode(directory, "one"), ReportingNode(directory, "two")
    one.report(0.0, row_of(1))
    two.report(0.0, row_of(7), row_of(1), row_of(2))
    methods = {"events": lambda life, after: encode(event_page(directory, life, after, 0.0))}
    play(monkeypatch, methods)
    log = list(read_events(ask.find_scheduler_actor, 0, follow=False))
    keys = [each.key for each in log if isinstance(each, BlockEvent)]
    assert keys == [key_of(number) for number in (1, 7, 2, 1)], "a later chunk comes first"

    publication = Publication(WireFormat(), "{node}", 1, msgspec.msgpack.encode)
    index = WireIndex()
    while publication.place[1] < directory.events.last_seq:
        following = read_events(ask.find_scheduler_actor, publication.place, follow=False)
        for event in whole_reports(following, most):
            publication.apply(event, 0.0)
        asked = publication.questions(10.0, MAX_KEYS)
        publication.answer(asked, {(SPACE, Key(row.key)): row for row in prompt()}, 10.0)
        for message in publication.take_messages(0.0):
            index.take(message.topic, message.seq, message.payload)
    assert len(index.blocks["two"]) == 3
    assert not index.orphans


def prompt() -> list[Description]:
    """Chunk 7 stands alone; chunk 2 follows on chunk 1."""
    parents = {7: None, 1: None, 2: key_of(1)[:-4]}
    return [
        Description(SPACE, key_of(number), parent, b"", bytes(8), 2, "tiny")
        for number, parent in parents.items()
    ]
