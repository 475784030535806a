"""Reads through NIXL, beside what all transports have in common (`test_fetch.py`, `test_read.py`).

`SlowAgent` stands for transfers that take long: those of UCX in this process end at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

import raykv.node.nixl.transport
from raykv.base.ids import NodeId, Refusal
from raykv.node.keeper import PoolKeeper
from raykv.node.nixl.agent import NixlAgent, NixlError, Part
from raykv.node.nixl.offers import Offers
from raykv.node.nixl.transport import MOST_BUFFERS, NixlTransport
from raykv.node.peers import PeerError
from raykv.protocol.columns import Numbers, Source
from raykv.protocol.copies import Offer, Read, ReadReply
from raykv.protocol.node import NodeDescription
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.nixl import FutureCall, NixlNetwork, OtherWay, needs_nixl
from tests.fixtures.node.nixl import agent as nixl_agent
from tests.fixtures.node.peers import (
    Node,
    PendingCall,
    assert_right,
    content,
    question,
    wanted,
)
from tests.fixtures.waiting import wait_until

pytestmark = needs_nixl

NONE = Refusal.NONE


@pytest.fixture
def network() -> Iterator[NixlNetwork]:
    made = NixlNetwork()
    yield made
    made.close()


class SlowAgent(NixlAgent):
    """Its transfers copy when `finish` is called, however long nobody waits for them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.has_failed = False

    def register(self, address: int, num_bytes: int) -> None:
        pass

    def meet(self, metadata: bytes) -> str:
        return "source"

    def read(self, remote: str, parts: Sequence[Part]) -> Any:
        self.parts += parts
        return object()

    def is_done(self, handle: Any) -> bool:
        if self.has_failed:
            raise NixlError("the transfer has failed")
        return not self.parts

    def release(self, handle: Any) -> None:
        assert not self.parts

    def finish(self) -> None:
        for part in self.parts:
            ctypes.memmove(part.here, part.there, part.num_bytes)
        self.parts.clear()


@pytest.fixture
def slow(network: NixlNetwork) -> SlowAgent:
    agent = SlowAgent()
    network.transport = NixlTransport(agent, network, OtherWay(network))
    return agent


@pytest.mark.parametrize("name", ["madvise", "mmap", "munmap", "mremap", "brk", "shmat"])
def test_ucx_leaves_the_code_of_libc_alone(name: str) -> None:
    """Another thread may run it just then. A jump stands where UCX has been."""
    nixl_agent("here")
    function = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert function is not None
    assert ctypes.string_at(function, 1) != b"\xe9"


def test_source_that_has_no_nixl_is_read_the_other_way(
    network: NixlNetwork, here: Node, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(node: Node) -> NodeDescription:
        return msgspec.structs.replace(NixlNetwork.described(network, node), nixl=b"")

    monkeypatch.setattr(network, "described", described)
    for number in range(2):
        chunk = wanted(source.store(key(number)), source)
        assert here.fetch([chunk]).refusals == [NONE]
        assert_right(here, [chunk])
    assert network.calls == [("source", "describe")]
    assert network.transport.bytes_read == 0
    network.has_another_way = True


def test_nobody_waits_while_a_source_is_looked_for(
    network: NixlNetwork, here: Node, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: dict[str, bool] = {}
    call = network.call

    def seen(asked: Source, method: str, *arguments: Any) -> FutureCall:
        locked[method] = network.transport._lock.locked()
        return call(asked, method, *arguments)

    monkeypatch.setattr(network, "call", seen)
    assert here.fetch([wanted(source.store(key(0)), source)]).refusals == [NONE]
    assert here.fetch([wanted(source.store(key(1)), source)]).refusals == [NONE]
    # At the end of an offer nobody is looked for.
    assert locked == {"describe": False, "offer": False}


def test_source_that_can_not_be_read_is_read_the_other_way_next_time(
    network: NixlNetwork, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = network.offers["source"].begin

    def elsewhere(asked: Read) -> Offer:
        return msgspec.structs.replace(begin(asked), addresses=Numbers.of([1 << 40]))

    monkeypatch.setattr(network.offers["source"], "begin", elsewhere)
    record = source.store(key(0))
    read = network.transport.start_read(Source("source"), question(record))
    with pytest.raises(PeerError, match="NOT_FOUND"):
        read.wait(10.0)
    again = network.transport.start_read(Source("source"), question(record))
    assert isinstance(again, PendingCall)
    network.count_under_way(1)
    assert again.wait(10.0)[1].tobytes() == content(record)
    network.offers["source"].end(1)


def test_bytes_of_an_offer_that_was_too_old_are_refused(
    network: NixlNetwork, here: Node, source: Node, slow: SlowAgent
) -> None:
    record = source.store(key(0))
    chunk = wanted(record, source)
    fetch = here.begin_fetch([chunk])
    wait_until(lambda: bool(slow.parts), 10.0, "the transfer begins")
    assert record.readers == 1
    assert network.offers["source"].end(1)
    source.evict(record)
    assert source.store(key(99)).slot == record.slot
    slow.finish()
    assert fetch.result(10.0).refusals == [Refusal.NODE_LOST]
    assert here.ready() == set()


def test_buffer_of_an_abandoned_transfer_is_not_lent_before_it_has_ended(
    network: NixlNetwork, source: Node, slow: SlowAgent
) -> None:
    """NIXL can't take a transfer back: it may write at any time."""
    record = source.store(key(0))
    read = network.transport.start_read(Source("source"), question(record))
    with pytest.raises(PeerError, match="no answer in time"):
        read.wait(0.3)
    (part,) = slow.parts
    lent = [network.transport._buffers.take(4096) for _ in range(MOST_BUFFERS)]
    assert [each is None for each in lent] == [False] * (MOST_BUFFERS - 1) + [True]
    assert part.here not in {each.ctypes.data for each in lent if each is not None}
    del read
    slow.finish()
    wait_until(lambda: advanced(network), 10.0, "the read is over")
    again = network.transport._buffers.take(4096)
    assert again is not None
    assert again.ctypes.data == part.here


def advanced(network: NixlNetwork) -> bool:
    network.settle()
    return not network.transport._reads


def test_buffer_of_a_failed_transfer_rests_and_the_source_is_read_the_other_way(
    network: NixlNetwork,
    here: Node,
    source: Node,
    slow: SlowAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.node.nixl.transport, "NIXL_AGAIN_S", 0.5)
    slow.has_failed = True
    record = source.store(key(0))
    read = network.transport.start_read(Source("source"), question(record))
    with pytest.raises(PeerError, match="the transfer has failed"):
        read.wait(10.0)
    del read
    assert len(network.transport._buffers._free) == 0
    chunk = wanted(record, source)
    assert here.fetch([chunk]).refusals == [NONE]
    assert_right(here, [chunk])
    assert network.transport.bytes_read == 0

    def has_rested() -> bool:
        network.transport.advance()
        return len(network.transport._buffers._free) == 1

    wait_until(has_rested, 10.0, "the buffer is used again")
    slow.has_failed = False
    slow.parts.clear()
    network.has_another_way = True
    network.offers["source"].end(1)


@pytest.mark.parametrize(
    "wrong",
    [{"reply": ReadReply(7, 0, b"")}, {"addresses": Numbers()}],
    ids=["refusals", "addresses"],
)
def test_answer_about_other_chunks_is_refused(
    network: NixlNetwork,
    here: Node,
    source: Node,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
) -> None:
    record = source.store(key(0))
    begin = network.offers["source"].begin

    def shortened(asked: Read) -> Offer:
        offer = begin(asked)
        network.offers["source"].end(offer.number)
        return msgspec.structs.replace(offer, **wrong)

    monkeypatch.setattr(network.offers["source"], "begin", shortened)
    chunk = wanted(record, source)
    assert here.fetch([chunk]).refusals == [Refusal.NODE_LOST]


def test_source_that_has_begun_another_life_is_asked_anew_who_it_is(
    network: NixlNetwork, here: Node, source: Node
) -> None:
    """What is known of its memory is of the life before."""
    assert here.fetch([wanted(source.store(key(0)), source)]).refusals == [NONE]
    bytes_read = network.transport.bytes_read
    source.life = 8
    source.use(PoolKeeper(NodeId("source"), 8, source.geometry))
    source.order(1)
    nixl_agent("sources").register(source.keeper.pool.address, source.geometry.pool_bytes)
    network.offers["source"] = Offers(source.reader)
    record = source.store(key(1))
    read = network.transport.start_read(Source("source"), question(record))
    with pytest.raises(PeerError, match="has been restarted"):
        read.wait(10.0)
    network.offers["source"].end(1)
    read = network.transport.start_read(Source("source"), question(record))
    assert read.wait(10.0)[1].tobytes() == content(record)
    assert network.transport.bytes_read == bytes_read + record.slot_bytes
