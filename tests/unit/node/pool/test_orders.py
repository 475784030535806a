"""What a node does with the document of orders."""

from __future__ import annotations

import pytest

from raykv.base.ids import EVERY_NAMESPACE, Namespace, Refusal, Stamp, part_of
from raykv.node.pool import claims, room
from raykv.node.pool.floors import MAX_HISTORIES
from raykv.node.pool.records import Standing
from raykv.protocol.engine import NOTHING_ORDERED
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.node.owned_pool import (
    HISTORY,
    PAGE,
    A,
    B,
    OwnedPool,
    begun,
    document,
    key,
    pin,
    share,
    stamp,
)


@pytest.fixture
def roomy() -> OwnedPool:
    """All of it may be pinned."""
    made = OwnedPool(pin_share=1.0)
    made.hello()
    made.store(1, 2, 3)
    return made


def test_document_counts_if_its_number_is_later(pool: OwnedPool) -> None:
    assert pool.node.orders.stamp == NOTHING_ORDERED
    pool.order(5, is_paused=True)
    for number in (5, 4):
        pool.order(number)
        assert pool.changes(pool.query()).facts.is_paused
    pool.node.take_orders(OrdersDocument(Stamp(HISTORY - 1, 99)), pool.now)
    assert (pool.node.orders.stamp, pool.changes(pool.query()).facts.is_paused) == (stamp(5), True)
    pool.node.take_orders(OrdersDocument(Stamp(HISTORY + 1, 1)), pool.now)
    assert pool.node.orders.stamp == Stamp(HISTORY + 1, 1)
    assert not pool.changes(pool.query()).facts.is_paused


def test_clear_drops_what_was_stored_before_it_and_what_comes_late(pool: OwnedPool) -> None:
    pool.hello(2, B)
    pool.order(1)
    pool.store(1, 2, orders=stamp(1))
    pool.store(1, orders=stamp(1), namespace=B, life=2)
    (job,) = pool.admit(pool.storing(3, orders=stamp(1)))
    pool.order(2, floors={A: 2})
    assert (pool.held(), pool.held(B)) == ([], [1])
    assert pool.end(job).refusals == bytes([Refusal.CLEARED])
    assert pool.store(4, orders=stamp(1)) == [Refusal.CLEARED]
    assert pool.store(4, orders=stamp(2)) == [Refusal.NONE]
    pool.order(3, floors={A: 2, EVERY_NAMESPACE: 3})
    assert pool.held() == pool.held(B) == []


def test_reader_of_a_chunk_that_is_cleared_ends_undisturbed(pool: OwnedPool) -> None:
    pool.store(1)
    (job,) = pool.admit(pool.loading(1))
    pool.order(1, floors={A: 1})
    assert list(pool.node.index.places) == [begun(job.chunks[0])]
    assert not pool.end(job).failed_chunks
    assert not list(pool.node.index.places)


def test_histories_that_are_forgotten_leave_no_chunk_behind(pool: OwnedPool) -> None:
    pool.store(1, orders=Stamp(0, 0))
    pool.order(1)
    assert pool.held() == [1]
    for history in range(HISTORY + 1, HISTORY + MAX_HISTORIES):
        assert pool.held() == [1]
        pool.node.take_orders(OrdersDocument(Stamp(history, 1)), pool.now)
        pool.node.check()
    assert pool.held() == []


def test_shares_are_tenants_by_their_labels(pool: OwnedPool) -> None:
    pool.store(*range(8), tenant="t")
    pool.store(*range(10, 18), tenant="other")
    pool.order(1, shares={"t": share(0.5), "bad\nlabel": share(0.0, 0.1)})
    for number in range(20, 60):
        pool.store(number)
        pool.now += 10
    pool.wait(10)
    assert pool.held()[:8] == list(range(8))
    assert len(pool.held()) == 16
    assert pool.report().tenant_bytes == {"t": 8 * PAGE}


def test_what_is_above_a_greatest_share_goes(pool: OwnedPool) -> None:
    pool.store(*range(8), tenant="t")
    pool.order(1, shares={"t": share(0.9, 0.25)})
    pool.wait(10)
    assert pool.held() == [0, 1, 2, 3]


def test_others_may_have_a_share_too(pool: OwnedPool) -> None:
    pool.store(*range(8))
    pool.order(1, shares={"": share(0.5), "t": share()})
    pool.wait(10)
    pool.hello()
    for number in range(20, 40):
        pool.store(number, tenant="t")
    assert pool.held()[:8] == list(range(8))


def test_pin_holds_its_chunks_once_its_keys_are_known(roomy: OwnedPool) -> None:
    roomy.order(1, pins={"p": pin(b"d"), "q": pin(b"d", priority=3), "r": pin(b"e")})
    assert roomy.node.orders.wanted() == [b"d", b"e"]
    roomy.node.orders.pin_keys(b"d", A, [key(1), key(9)])
    roomy.node.orders.pin_keys(b"x", A, [key(2)])
    assert roomy.node.orders.wanted() == [b"e"]
    assert roomy.standings(1, 2, 3) == [Standing.PINNED, Standing.NORMAL, Standing.NORMAL]
    assert roomy.report().pinned_bytes == PAGE
    # It is there for what comes, and ends with its order.
    roomy.store(9)
    assert roomy.standing(9) is Standing.PINNED
    roomy.order(2, pins={"q": pin(b"d", priority=3)})
    assert roomy.standings(1, 9) == [Standing.KEPT_3] * 2
    roomy.order(3)
    assert roomy.standings(1, 9) == [Standing.NORMAL] * 2
    assert roomy.node.orders.wanted() == []


def landed(pool: OwnedPool, number: int, namespace: Namespace) -> None:
    pool.node.landings.landed(begun(pool.land(number, namespace=namespace)), ok=True)


def test_pin_holds_all_parts_of_a_chunk_whenever_they_come(roomy: OwnedPool) -> None:
    one, two = (part_of(A, name) for name in ("0", "1"))
    landed(roomy, 7, one)
    roomy.order(1, pins={"p": pin(b"d")})
    roomy.node.orders.pin_keys(b"d", A, [key(7)])
    landed(roomy, 7, two)
    roomy.node.expire(roomy.now)
    standings = [roomy.record(7, part).standing for part in (one, two)]
    assert standings == [Standing.PINNED] * 2


def test_clear_of_a_namespace_drops_its_parts(roomy: OwnedPool) -> None:
    part = part_of(A, "0")
    roomy.order(1)
    landed(roomy, 7, part)
    roomy.order(9, floors={A: 9})
    assert roomy.held(part) == []


def test_pin_ends_with_its_time_and_may_be_renewed(roomy: OwnedPool) -> None:
    roomy.order(1, pins={"p": pin(b"d", 20.0)})
    roomy.node.orders.pin_keys(b"d", A, [key(1)])
    roomy.wait(10)
    # The same order once more, as told later.
    roomy.order(2, pins={"p": pin(b"d", 10.2)})
    roomy.wait(9)
    assert roomy.standing(1) is Standing.PINNED
    roomy.order(3, pins={"p": pin(b"d", 20.0)})
    assert roomy.node.orders.wanted() == []
    roomy.wait(19)
    assert roomy.standing(1) is Standing.PINNED
    roomy.wait(1)
    assert roomy.standing(1) is Standing.NORMAL
    roomy.order(4, pins={"p": pin(b"d", 20.0)})
    assert roomy.node.orders.wanted() == [b"d"]
    roomy.wait(20)
    assert roomy.node.orders.wanted() == []


def test_pin_with_other_keys_holds_the_earlier_ones_until_these_are_known(roomy: OwnedPool) -> None:
    roomy.order(1, pins={"p": pin(b"d")})
    roomy.node.orders.pin_keys(b"d", A, [key(1)])
    roomy.order(2, pins={"p": pin(b"e")})
    assert roomy.standings(1, 2) == [Standing.PINNED, Standing.NORMAL]
    roomy.node.orders.pin_keys(b"e", A, [key(2)])
    roomy.node.check()
    assert roomy.standings(1, 2) == [Standing.NORMAL, Standing.PINNED]


def test_pins_find_room_beside_what_is_brought_here_and_once_others_end(
    roomy: OwnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MOST_CLAIMS", dict.fromkeys(claims.OwnerKind, 2))
    roomy.node.keep_series("import", A, [key(7), key(8), key(9)], roomy.now)
    roomy.order(1, pins={"p": pin(b"d"), "q": pin(b"e")})
    roomy.node.orders.pin_keys(b"d", A, [key(1)])
    roomy.node.orders.pin_keys(b"e", A, [key(2), key(3)])
    assert roomy.standings(1, 2, 3) == [Standing.PINNED, Standing.PINNED, Standing.NORMAL]
    roomy.order(2, pins={"q": pin(b"e")})
    roomy.wait(1)
    assert roomy.standings(1, 2, 3) == [Standing.NORMAL, Standing.PINNED, Standing.PINNED]


def test_document_is_told_on_with_the_time_that_is_left(pool: OwnedPool) -> None:
    assert pool.node.orders.told(pool.now) is None
    pool.order(1, pins={"p": pin(b"d", 20.0), "q": pin(b"e", 5.0)}, floors={A: 1})
    told = pool.node.orders.told(pool.now + 8)
    assert told == document(1, pins={"p": pin(b"d", 12.0)}, floors={A: 1})


def test_tenants_without_chunks_are_forgotten(
    pool: OwnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_TENANTS", 1)
    pool.store(1, tenant="t")
    pool.store(2, tenant="u")
    assert pool.report().tenant_bytes == {"t": PAGE}
    pool.node.reporting.give_up()
    pool.store(*range(10, 26))
    assert 1 not in pool.held()
    pool.wait(1)
    pool.store(30, tenant="u")
    assert pool.report().tenant_bytes == {"u": PAGE}


def test_share_counts_however_many_tenants_have_chunks(
    pool: OwnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_TENANTS", 2)
    for number, tenant in enumerate("tu"):
        pool.store(number, tenant=tenant)
    pool.order(1, shares={"s": share(0.1)})
    pool.store(2, tenant="s")
    pool.store(3, tenant="v")
    assert pool.report().tenant_bytes == {"t": PAGE, "u": PAGE, "s": PAGE}


def test_labels_that_nobody_may_have_are_nobodys(pool: OwnedPool) -> None:
    pool.order(1, shares={"others": share(0.1)})
    for number, tenant in enumerate(("", "others", "x" * 65, "a\nb", "a")):
        pool.store(number, tenant=tenant)
    assert pool.report().tenant_bytes == {"a": PAGE}
