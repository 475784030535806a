"""Offers: what is held for another node is not overwritten, and nobody is told otherwise."""

from __future__ import annotations

import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import ChunkName, Refusal
from raykv.node.nixl.offers import Offers
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.peer import ReadRequest
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import LONG_S, NAMESPACE, PAGE, Node, overwritten


def question(source: Node, *names: ChunkName) -> ReadRequest:
    handles = Handles(
        Keys.of([name.key for name in names]),
        [name.slot for name in names],
        [name.generation for name in names],
    )
    sizes = [name.slot_bytes for name in names]
    return ReadRequest(PROTOCOL_VERSION, NAMESPACE, source.epoch, handles, sizes)


def may_overwrite(source: Node, name: ChunkName) -> bool:
    """Whether a store gets the slot of a chunk now."""
    lease = source.lease(slot=name.slot)
    later = ChunkName(NAMESPACE, key(99), lease.slot, lease.generation, PAGE)
    refusal = source.keeper.begin_store(later, 0, 1, 0.0, LONG_S)
    if refusal is Refusal.NONE:
        source.keeper.end_store(later, 0, ok=False)
    return refusal is Refusal.NONE


def test_chunk_is_not_overwritten_until_its_offer_has_ended(source: Node) -> None:
    offers = Offers(source.reader)
    names = [source.store(key(number)) for number in range(3)]
    offer = offers.begin(question(source, *names))
    reply, data = source.reader.read(question(source, *names))
    assert offer.reply == reply
    assert len(data) == 3 * PAGE
    assert not may_overwrite(source, names[1])
    assert offers.end(offer.number)
    assert may_overwrite(source, names[1])


def test_offer_ends_once(source: Node) -> None:
    offers = Offers(source.reader)
    offer = offers.begin(question(source, source.store(key(0))))
    assert [offers.end(offer.number), offers.end(offer.number), offers.end(77)] == [
        True,
        False,
        False,
    ]


def test_offer_that_is_too_old_lets_its_chunks_go_and_says_so(source: Node) -> None:
    offers = Offers(source.reader, offer_s=0.0)
    name = source.store(key(0))
    offer = offers.begin(question(source, name))
    assert not may_overwrite(source, name)
    offers.expire()
    assert len(offers) == 0
    assert may_overwrite(source, name)
    assert not offers.end(offer.number)


def test_offer_stays_until_it_is_too_old(source: Node) -> None:
    offers = Offers(source.reader, offer_s=LONG_S)
    offer = offers.begin(question(source, source.store(key(0))))
    offers.expire()
    assert offers.end(offer.number)


def test_two_offers_of_a_chunk_both_hold_it(source: Node) -> None:
    offers = Offers(source.reader)
    name = source.store(key(0))
    first, second = (offers.begin(question(source, name)) for _ in range(2))
    assert offers.end(first.number)
    assert not may_overwrite(source, name)
    assert offers.end(second.number)
    assert may_overwrite(source, name)


def test_chunk_that_is_refused_is_not_held(source: Node) -> None:
    offers = Offers(source.reader)
    gone = source.store(key(0))
    overwritten(source, gone)
    kept = source.store(key(1))
    offer = offers.begin(question(source, gone, kept))
    assert offer.reply.refusals == [Refusal.STALE, Refusal.NONE]
    assert len(offer.reply.checksums) == 1
    assert may_overwrite(source, gone)
    assert source.reader.bytes_sent == PAGE
    assert offers.end(offer.number)


def test_invalid_question_holds_nothing(source: Node) -> None:
    offers = Offers(source.reader)
    name = source.store(key(0))
    asked = question(source, name)
    asked.slot_bytes.append(PAGE)
    with pytest.raises(MessageError):
        offers.begin(asked)
    assert len(offers) == 0
    assert may_overwrite(source, name)
