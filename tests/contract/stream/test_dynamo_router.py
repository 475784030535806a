"""A router that was made for vLLM's events reads ours: Dynamo's, where it is installed.

`pip install --no-deps ai-dynamo-runtime==1.6.1` brings it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from raykv.base.ids import Namespace, NodeId
from raykv.protocol.descriptions import Description, pack_tokens
from raykv.protocol.events import (
    BlockRemoved,
    BlockStored,
    LifeBegan,
    NodeJoined,
    PublisherSettings,
)
from raykv.stream.format import WireFormat
from raykv.stream.publication import NodePlace, Publication
from raykv.stream.publisher import Sockets, first_number
from tests.fixtures.waiting import wait_until

dynamo: Any = pytest.importorskip("dynamo._core")

BLOCK = 16
TOKENS = list(range(1, 8 * BLOCK + 1))
MODEL = Namespace("tiny")
SEEN_S = 10.0


def block_hash(number: int) -> bytes:
    return b"hash %27d" % number


def description(number: int) -> Description:
    return Description(
        namespace=MODEL,
        key=block_hash(number) + bytes(4),
        parent=block_hash(number - 1) if number else None,
        inner=b"",
        tokens=pack_tokens(TOKENS[number * BLOCK : (number + 1) * BLOCK]),
        block_size=BLOCK,
        model="tiny",
        kind="full_attention",
    )


class Source:
    """A publication and its sockets, without a cluster."""

    def __init__(self, form: str) -> None:
        self.publication = Publication(
            WireFormat(form), "all", first_number(time.time()), msgspec.msgpack.encode
        )
        self.publication.nodes = {NodeId("a"): NodePlace("1.1.1.1", "a")}
        self.sockets = Sockets(
            PublisherSettings("tcp://*:0", "tcp://127.0.0.1:*"),
            "127.0.0.1",
            lambda start, topic: self.publication.replay(start, topic, 0.0),
        )
        self.sockets.start()
        wait_until(lambda: not self.sockets.error, 5.0, "the sockets are bound")
        self._seq = 0

    def event(self, kind: Any, **fields: Any) -> None:
        self._seq += 1
        self.publication.apply(kind(life=1, seq=self._seq, **fields), 0.0)

    def hold(self, kind: Any, *numbers: int) -> None:
        if "a" not in self.publication._replay.nodes:
            self.event(NodeJoined, node_id="a", node_life=1, number=0)
        for number in numbers:
            key = block_hash(number) + bytes(4)
            self.event(kind, node_id="a", namespace=MODEL, key=key, node_life=1, number=1)

    def publish(self, *, is_lost: bool = False) -> None:
        while asked := self.publication.questions(0.0, 100):
            rows = {name: description(int(name[1][4:32])) for name in asked}
            self.publication.answer(asked, rows, 0.0)
        for message in self.publication.take_messages(0.0):
            if not is_lost:
                self.sockets.publish(message)


async def until_seen(service: Any, num_blocks: int, again: Callable[[], None]) -> None:
    """Until the router knows so many blocks of the prompt in the worker's host memory."""
    give_up_at = time.monotonic() + SEEN_S
    seen = None
    while seen != num_blocks:
        assert time.monotonic() < give_up_at, (seen, num_blocks)
        again()
        await asyncio.sleep(0.1)
        found = await service.overlap_scores({"model_name": "tiny", "token_ids": TOKENS})
        seen = found["workers"][0]["host_pinned_blocks"]


async def play(source: Source) -> None:
    service = dynamo.SelectionService(indexer_threads=1)
    await service.upsert_worker(
        {
            "worker_id": 1,
            "model_name": "tiny",
            "block_size": BLOCK,
            "endpoint": "http://nowhere:1",
            "kv_events_endpoints": {0: source.sockets.endpoint},
            "replay_endpoint": source.sockets.replay_endpoint,
        }
    )

    def nothing() -> None:
        """The router needs no more than time."""

    def other() -> None:
        """Something else happens, so that a router that came late sees a number."""
        for kind in (BlockStored, BlockRemoved):
            source.hold(kind, 7)
            source.publish()

    source.hold(BlockStored, 3, 1, 0, 2, 4, 5)
    source.publish()
    await until_seen(service, 6, other)
    source.hold(BlockRemoved, 5, 4)
    source.publish()
    await until_seen(service, 4, nothing)
    source.hold(BlockStored, 4, 5)
    source.publish(is_lost=True)
    source.hold(BlockStored, 6)
    source.publish()
    await until_seen(service, 7, nothing)
    assert source.sockets.num_replays >= 1
    source.event(LifeBegan)
    source.publish()
    await until_seen(service, 0, nothing)
    source.hold(BlockStored, 0, 1)
    source.publish()
    await until_seen(service, 2, nothing)
    service.shutdown()


@pytest.mark.parametrize("form", ["map", "array"])
def test_dynamo_knows_what_is_held_also_after_it_has_missed_something(form: str) -> None:
    source = Source(form)
    try:
        asyncio.run(play(source))
    finally:
        source.sockets.stop(5.0)
