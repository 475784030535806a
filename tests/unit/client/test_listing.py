"""Chunks of all nodes, page by page: each once, in the order that is asked for."""

from __future__ import annotations

import pytest

from raykv.base.errors import ClusterError, MessageError
from raykv.base.ids import Key
from raykv.client import listing
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import Where
from raykv.protocol.reader import (
    DISK,
    RAM,
    ChunkPage,
    ChunkQuery,
    ListedChunk,
)
from raykv.protocol.status import NamespaceStatus
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_cluster import play, status, where_page
from tests.fixtures.statuses import node

SPACE = "model"
PAGE = 3

Held = dict[int, Where]


class PlayedPools:
    """Nodes that list chunks by number, of as many hits as their number says."""

    def __init__(self, patches: pytest.MonkeyPatch, **held: Held) -> None:
        self.held = held
        self.asked: list[ChunkQuery] = []
        nodes = {
            name: {"chunks": lambda raw, name=name: encode(self._page(raw, name))} for name in held
        }
        self.scheduler = play(patches, {"where": self._where, "status": self._status}, nodes)

    def _status(self) -> bytes:
        nodes = [node(0, node_id=name) for name in self.held]
        spaces = [NamespaceStatus(SPACE, "tiny")]
        return encode(status(nodes=nodes, namespaces={SPACE: 1}, spaces=spaces))

    def _page(self, raw: bytes, name: str) -> ChunkPage:
        query = decode(raw, ChunkQuery)
        self.asked.append(query)
        first = int(query.cursor or 0)
        rows = list(self.held[name].items())[first : first + PAGE]
        is_last = first + PAGE >= len(self.held[name])
        rows = [(at, where) for at, where in rows if key(at).startswith(query.key)]
        chunks = [
            ListedChunk(SPACE, key(at), where, 4096, 1.0, 1.0, at, "others") for at, where in rows
        ]
        return ChunkPage(chunks, cursor="" if is_last else str(first + PAGE))

    def _where(self, raw: bytes) -> bytes:
        places: dict[Key, list[Source]] = {}
        for name, held in self.held.items():
            for number, where in held.items():
                pool = [Source(name)] if where & Where.RAM else []
                disk = [Source(name, SourceKind.DISK)] if where & Where.DISK else []
                places.setdefault(key(number), []).extend(pool + disk)
        return where_page(raw, places)


BOTH = Where.RAM | Where.DISK


def test_chunk_is_listed_once_for_each_pool_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Held = dict.fromkeys(range(7), Where.RAM)
    two: Held = {7: BOTH, 8: Where.DISK, 0: Where.RAM}
    found = list(listing.chunks(PlayedPools(monkeypatch, one=one, two=two).scheduler))
    places = sorted((each.key, each.node_id, each.tier) for each in found)
    expected = [(key(at), "one", RAM) for at in range(7)]
    expected += [(key(7), "two", RAM), (key(7), "two", DISK)]
    expected += [(key(8), "two", DISK), (key(0), "two", RAM)]
    assert places == sorted(expected)
    copied = {(each.key, each.tier) for each in found if each.is_replicated}
    assert copied == {(key(0), RAM), (key(7), DISK)}
    assert {each.model for each in found} == {"tiny"}


def test_first_ones_in_an_order_are_those_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Held = dict.fromkeys(range(0, 20, 2), Where.RAM)
    two: Held = dict.fromkeys(range(1, 20, 2), Where.RAM)
    played = PlayedPools(monkeypatch, one=one, two=two)
    found = list(listing.chunks(played.scheduler, order="hits", limit=3))
    assert [each.hits for each in found] == [19, 18, 17]
    assert {(query.order, query.limit) for query in played.asked} == {("hits", 3)}
    assert len(list(listing.chunks(played.scheduler, limit=4))) == 4
    assert played.asked[-1].limit == 4
    # A limit is of the places that are looked at, too.
    for filters in ({"namespace": SPACE}, {"group": 0}, {"tier": RAM}):
        list(listing.chunks(played.scheduler, limit=1, **filters))
        assert played.asked[-1].limit == ChunkQuery().limit


def test_only_a_node_that_is_named_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPools(monkeypatch, one={1: Where.RAM}, two={2: Where.RAM})
    assert [each.key for each in listing.chunks(played.scheduler, node="tw")] == [key(2)]
    assert len(played.asked) == 1


def test_whole_key_is_asked_of_the_nodes_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPools(
        monkeypatch, one={1: Where.RAM}, two={2: Where.RAM}, three={1: BOTH, 3: Where.RAM}
    )
    found = listing.chunk(played.scheduler, key(1).hex())
    assert {(each.node_id, each.tier) for each in found} >= {("one", RAM), ("three", RAM)}
    assert {query.key for query in played.asked} == {key(1)}
    with pytest.raises(ClusterError, match="3 chunks have keys that begin with"):
        listing.chunk(played.scheduler, "")


def test_page_that_leads_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPools(monkeypatch, one=dict.fromkeys(range(9), Where.RAM))
    page = played._page(encode(ChunkQuery()), "one")
    monkeypatch.setattr(played, "_page", lambda *_: page)
    with pytest.raises(MessageError, match="again and again"):
        list(listing.chunks(played.scheduler))
