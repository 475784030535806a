"""Offers: what is held for another node is not overwritten, and nobody is told otherwise."""

from __future__ import annotations

import msgspec
import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import Refusal
from raykv.node.nixl.offers import Offers
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.columns import Numbers
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import PAGE, Node, question


def may_overwrite(source: Node, record: ChunkRecord) -> bool:
    """Whether a store gets the slot of a chunk, which goes."""
    source.evict(record)
    later = source.begin_store(key(99), record.slot_bytes)
    is_same = later.slot == record.slot
    source.keeper.landed(later, ok=False)
    return is_same


def test_chunk_is_not_overwritten_until_all_its_offers_have_ended(source: Node) -> None:
    offers = Offers(source.reader)
    records = [source.store(key(number)) for number in range(3)]
    offer, second = (offers.begin(question(*records)) for _ in range(2))
    reply, data = source.reader.read(question(*records))
    assert offer.reply == reply
    assert list(offer.addresses) == [source.keeper.address_of(record) for record in records]
    assert len(data) == 3 * PAGE
    offers.expire()
    assert not may_overwrite(source, records[1])
    assert [offers.end(number) for number in (offer.number, offer.number, 77)] == [True] + [
        False
    ] * 2
    assert not may_overwrite(source, records[1])
    assert offers.end(second.number)
    assert may_overwrite(source, records[1])


def test_offer_that_is_too_old_lets_its_chunks_go_and_says_so(source: Node) -> None:
    offers = Offers(source.reader, offer_s=0.0)
    record = source.store(key(0))
    offer = offers.begin(question(record))
    assert not may_overwrite(source, record)
    offers.expire()
    assert len(offers) == 0
    assert may_overwrite(source, record)
    assert not offers.end(offer.number)


def test_chunk_that_is_refused_is_not_held(source: Node) -> None:
    offers = Offers(source.reader)
    gone = source.store(key(0))
    source.evict(gone)
    kept = source.store(key(1))
    offer = offers.begin(question(gone, kept))
    assert offer.reply.refusals == bytes([Refusal.NOT_HERE, Refusal.NONE])
    assert len(offer.reply.checksums) == 1
    assert (gone.readers, kept.readers) == (0, 1)
    assert source.reader.bytes_sent == PAGE
    assert offers.end(offer.number)


def test_invalid_question_holds_nothing(source: Node) -> None:
    offers = Offers(source.reader)
    record = source.store(key(0))
    asked = msgspec.structs.replace(question(record), slot_bytes=Numbers.of([0]))
    with pytest.raises(MessageError):
        offers.begin(asked)
    assert len(offers) == 0
    assert record.readers == 0
