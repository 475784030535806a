"""Chunks that a node is to fetch: what is ordered, and what is counted of the answer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raykv.base.ids import Blocks, Key, Namespace, Refusal
from raykv.client import pins, transfers
from raykv.client.scheduler import Scheduler
from raykv.client.transfers import Transfer
from raykv.protocol.columns import Numbers, Source, SourceKind
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ListedRow, ListedRows, Reason, Where
from raykv.protocol.operator import DropOrder, Released, TransferResult
from raykv.protocol.reader import ChunkPage, ChunkQuery, ListedChunk
from tests.fixtures.played_cluster import Methods, play, silent, status, where_page
from tests.fixtures.statuses import node

SPACE = "model"
A, B, C, D = (name * 32 + bytes(4) for name in (b"a", b"b", b"c", b"d"))
NAMES = {A: "a", B: "b", C: "c", D: "d"}
FAR, TARGET, DISK = Source("far"), Source("target"), Source("far", SourceKind.DISK)


class PlayedNodes:
    """A directory and two nodes; `refusals`: of the target's fetch, by key."""

    def __init__(
        self, patches: pytest.MonkeyPatch, places: dict[bytes, list[Source]], **refusals: Refusal
    ) -> None:
        self.places, self.refusals = places, refusals
        self.orders: list[Fetch] = []
        self.dropped: list[bytes] = []
        self.drops: list[DropOrder] = []
        self.pinned: set[bytes] = set()
        self.gone: set[bytes] = set()
        target = {"fetch": self._fetch, "chunks": self._chunks}
        self.far: Methods = {"chunks": self._chunks, "drop": self._drop}
        nodes = [node(0, node_id=name) for name in ("target", "far")]
        known = status(nodes=nodes, namespaces={SPACE: 1})
        self.scheduler = play(
            patches,
            {
                "where": lambda raw: where_page(raw, self.places),
                "status": lambda: encode(known),
            },
            {"target": target, "far": self.far},
        )

    def _chunks(self, raw: bytes) -> bytes:
        key = decode(raw, ChunkQuery).key
        if key in self.gone:
            return encode(ChunkPage())
        row = ListedChunk(SPACE, key, Where.RAM, 4096)
        return encode(ChunkPage([row]))

    def _fetch(self, raw: bytes) -> bytes:
        order = decode(raw, Fetch)
        self.orders.append(order)
        keys = list(order.keys)
        why = {at: self.refusals.get(NAMES[key]) for at, key in enumerate(keys)}
        failed = {at: refusal for at, refusal in why.items() if refusal}
        rows = [
            ListedRow(Namespace(SPACE), Key(key), Where.RAM, Blocks(0, 1), Reason.STORED)
            for at, key in enumerate(keys)
            if at not in failed
        ]
        listed, refused = ListedRows.of(rows), (Numbers.of(failed), bytes(failed.values()))
        return encode(CopyResult(order.number, 1, 1, listed, *refused, 4096 * len(rows)))

    def _drop(self, raw: bytes) -> bytes:
        order = decode(raw, DropOrder)
        self.drops.append(order)
        gone = [key for key in order.keys if order.with_pinned or key not in self.pinned]
        self.dropped += gone
        return encode(Released(len(gone), len(order.keys) - len(gone)))

    def prefetch(self, *keys: bytes, deadline_s: float = 5.0, watch: Any = print) -> TransferResult:
        return transfers.prefetch(
            self.scheduler,
            list(keys),
            "target",
            namespace=SPACE,
            deadline_s=deadline_s,
            watch=watch,
        )


def test_pools_are_asked_before_disks_and_what_is_nowhere_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedNodes(monkeypatch, {A: [DISK, FAR], B: [DISK]})
    seen: list[TransferResult] = []
    result = played.prefetch(A, B, C, watch=seen.append)
    (order,) = played.orders
    assert list(order.keys) == [A, B]
    assert list(order.slot_bytes) == [4096, 4096]
    assert order.sources.by_key(2) == {0: [FAR, DISK], 1: [DISK]}
    assert (order.life, bool(order.series)) == (0, True)
    assert (result.came, result.nowhere, result.num_bytes) == (2, 1, 8192)
    assert result.failed == 1
    assert seen == [result]


def test_size_of_a_group_is_that_of_any_chunk_that_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedNodes(monkeypatch, {key: [FAR] for key in (A, B, C, D)})
    played.gone = {A, D}
    assert played.prefetch(A, B, C, D).came == 4
    played.gone = {A, B, C, D}
    result = played.prefetch(A, B, C, D)
    assert (result.came, result.nowhere, result.refusals) == (0, 0, {"NOT_HERE": 4})


def test_silent_node_is_asked_once_for_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedNodes(monkeypatch, {A: [FAR], B: [FAR], C: [FAR], D: [TARGET]})
    asked: list[str] = []
    played.far["chunks"] = silent(asked)
    assert played.prefetch(A, B, C, D).came == 3
    assert len(asked) == 1


def test_refusals_are_told_by_what_they_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {key: [FAR] for key in (B, C, D)} | {A: [FAR, TARGET]}
    refused = {"b": Refusal.NO_ROOM, "c": Refusal.NOT_HERE}
    result = PlayedNodes(monkeypatch, places, **refused).prefetch(A, B, C, D)
    assert (result.came, result.there, result.no_room) == (1, 1, 1)
    assert result.refusals == {"NOT_HERE": 1}


def test_what_there_is_no_time_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedNodes(monkeypatch, {A: [FAR]})
    assert played.prefetch(A, deadline_s=0.0).refusals == {"TOO_LATE": 1}
    assert played.orders == []


def test_move_drops_elsewhere_only_what_the_target_says_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {A: [FAR], B: [FAR, DISK], C: [FAR], D: [DISK]}
    played = PlayedNodes(monkeypatch, places, c=Refusal.NO_ROOM)
    result = transfers.move(
        played.scheduler, [A, B, C, D], "target", namespace=SPACE, deadline_s=5.0
    )
    assert played.dropped == [A, B]
    assert list(played.drops[0].num_blocks) == [1, 1]
    assert (result.came, result.dropped) == (3, 2)


def test_move_drops_what_is_pinned_if_it_is_pinned_on_the_target_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedNodes(monkeypatch, {A: [FAR], B: [FAR], C: [FAR]})
    played.pinned = {A, B}
    asked: list[tuple[str, str]] = []

    def pinned_on(_: Scheduler, node_id: str, namespace: str) -> set[bytes]:
        asked.append((node_id, namespace))
        return {A, D}

    monkeypatch.setattr(pins, "pinned_on", pinned_on)
    result = transfers.move(played.scheduler, [A, B, C], "target", namespace=SPACE, deadline_s=5.0)
    assert asked == [("target", SPACE)]
    drops = [(list(each.keys), each.with_pinned) for each in played.drops]
    assert drops == [([A, B, C], False), ([A], True)]
    assert (result.dropped, result.kept) == (2, 1)


def test_files_are_fetched_from_their_source_in_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedNodes(monkeypatch, {})
    source = Source("import", SourceKind.IMPORT)
    began = time.monotonic()
    transfer = Transfer("target", SPACE, began + 5.0, lambda _: None, asked=2)
    for sizes in ({A: 4096}, {B: 8192}):
        transfer.fetch_from(source, sizes, played.scheduler)
    orders = [(list(each.keys), list(each.slot_bytes)) for each in played.orders]
    assert orders == [([A], [4096]), ([B], [8192])]
    series = {(*order.sources.sources, order.series) for order in played.orders}
    assert series == {(source, played.orders[0].series)}
    assert transfer.result.came == 2
    assert transfer.result.seconds <= time.monotonic() - began
