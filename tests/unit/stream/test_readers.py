"""What a reader of the event stream asks NodeActors."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raykv.cluster import ask
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.descriptions import Description, Descriptions
from raykv.protocol.framing import encode
from raykv.stream.readers import Insides
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_cluster import Methods, play


class PlayedInsides:
    """A node that describes each chunk, and one that does not answer."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.num_silent = 0
        self.nodes: dict[str, Methods] = {
            "one": {"descriptions": self._descriptions},
            "two": {"descriptions": self._silent},
        }
        play(patches, {}, self.nodes)
        self.insides = Insides(ask.node_actors)

    def _descriptions(self, keys: list[bytes], namespace: str | None) -> bytes:
        self.asked.append(len(keys))
        row = Description(namespace or "a", keys[0], None, b"", bytes(8), 2)
        return encode(Descriptions([row]))

    def _silent(self, *_: Any) -> bytes:
        self.num_silent += 1
        raise ray.exceptions.GetTimeoutError("Get timed out")


def test_node_that_does_not_answer_is_left_alone_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = PlayedInsides(monkeypatch)
    for number in range(3):
        assert list(played.insides.describe([key(number)], "b")) == [key(number)]
    assert (played.asked, played.num_silent) == ([1, 1, 1], 1)
    assert caplog.text.count("what node two knows of chunks' insides is left out") == 1


def test_many_chunks_are_asked_for_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedInsides(monkeypatch)
    found = played.insides.describe(map(key, [*range(MAX_KEYS + 1), 0]))
    assert list(found) == [key(0), key(MAX_KEYS)]
    assert played.asked == [MAX_KEYS, 1]
