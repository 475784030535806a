"""What is told of a node to people."""

from __future__ import annotations

from raykv.base.ids import MissReason, Stamp, TokenSource
from raykv.base.tenants import OTHERS
from raykv.node.accounts.accounts import MOST_CHANGES
from raykv.node.accounts.savings import SIZES
from raykv.protocol.descriptions import Description
from raykv.protocol.engine import CHUNK_NAME_BYTES, MissRecord
from raykv.protocol.listing import Reason
from raykv.protocol.operator import OrderedShare, OrdersDocument
from raykv.protocol.sessions import SessionWord
from tests.fixtures.node.owned_pool import PAGE, A, OwnedPool, key, stamp

TOKENS = 16


def of_chunk(number: int, tenant: str = "") -> MissRecord:
    name = key(number)[:CHUNK_NAME_BYTES]
    return MissRecord("r", TOKENS, 0, 0, {"evicted": TOKENS}, chunks=name, tenant=tenant)


def follow(pool: OwnedPool) -> None:
    while pool.node.follow(pool.now):
        pass


def test_what_a_pool_evicts_and_its_requests_miss_is_followed() -> None:
    pool = OwnedPool(num_slabs=1)
    pool.hello(traits={"chunks": "0:16"})
    follow(pool)
    pool.store(1, 2, 3, 4)
    pool.now += 10.0
    pool.store(5)
    gone = set(range(1, 6)) - set(pool.held())
    assert len(gone) == 1
    pool.tell(finished=[of_chunk(gone.pop()), of_chunk(99)])
    follow(pool)
    found = pool.node.accounts.savings.told(PAGE, pool.now)
    assert (found.prompt_tokens, found.computed_tokens) == (2 * TOKENS, 2 * TOKENS)
    assert found.saved_tokens == [TOKENS] * len(SIZES)
    ages = pool.node.accounts.ages.data()
    assert (sum(ages.counts), ages.total) == (1, 10.0)


def test_engine_that_says_nonsense_of_its_chunks_counts_tokens_only() -> None:
    pool = OwnedPool()
    pool.hello(traits={"chunks": "a:b"})
    pool.tell(finished=[of_chunk(1)])
    follow(pool)
    assert pool.node.accounts.savings.told(PAGE, pool.now).prompt_tokens == TOKENS


def test_what_is_far_behind_the_listing_goes_on_where_that_is() -> None:
    pool = OwnedPool(num_slabs=1)
    pool.hello(traits={"chunks": "0:16"})
    for turn in range(3):
        pool.node.follow(pool.now)
        for number in range(MOST_CHANGES // 2):
            pool.store(1000 * turn + number)
            pool.now += 4.0
    follow(pool)
    last = pool.held()
    pool.store(90_000)
    pool.now += 4.0
    follow(pool)
    (evicted,) = set(last) - set(pool.held()) or {2 * 1000 + MOST_CHANGES // 2 - 4}
    pool.tell(finished=[of_chunk(evicted)])
    follow(pool)
    assert pool.node.accounts.savings.told(PAGE, pool.now).saved_tokens[0] == TOKENS


def test_tokens_are_counted_by_quota() -> None:
    pool = OwnedPool()
    pool.hello()
    pool.order(1, shares={"t": OrderedShare("acme")})
    pool.tell(finished=[of_chunk(1, tenant="t"), of_chunk(2, tenant="t"), of_chunk(3), of_chunk(4)])
    pool.tell(finished=[of_chunk(number, tenant=f"{number}") for number in range(9)])
    tokens = pool.node.accounts.tokens
    assert {name for name, _ in tokens} == {"acme", OTHERS}
    assert tokens["acme", TokenSource.COMPUTED] == 2 * TOKENS
    assert tokens[OTHERS, TokenSource.COMPUTED] == 11 * TOKENS


def test_chunks_count_that_go_since_their_tenant_had_more_than_its_share() -> None:
    pool = OwnedPool()
    pool.hello()
    pool.order(1, shares={"t": OrderedShare("acme")})
    pool.store(1, 2, tenant="t")
    pool.store(3, tenant="u")
    reasons = {1: Reason.QUOTA, 2: Reason.EVICTED, 3: Reason.QUOTA}
    for number, reason in reasons.items():
        pool.node.index.drop(pool.record(number), reason)
    follow(pool)
    assert pool.node.accounts.num_evicted == {"acme": 1, OTHERS: 1}
    assert sum(pool.node.accounts.ages.data().counts) == 3


def test_engines_counters_are_added_up_by_namespace() -> None:
    pool = OwnedPool()
    pool.hello()
    reason = "missed_tokens_" + MissReason.EVICTED
    for tokens in (0, 7):
        pool.tell(counters={"prompt_tokens": tokens, reason: tokens})
    tally = pool.node.accounts.tally
    assert tally.tokens[A, TokenSource.COMPUTED] == 7
    assert tally.missed()[A, MissReason.EVICTED] == 7


def test_chunk_that_went_since_its_session_was_over_says_so() -> None:
    pool = OwnedPool(num_slabs=1)
    pool.hello()
    pool.store(1, 2, 3, 4)
    pool.say(SessionWord.CAME, "s", 1)
    pool.say(SessionWord.OVER, "s")
    pool.now += 10.0
    pool.store(5)
    assert 1 not in pool.held()
    follow(pool)
    accounts = pool.node.accounts
    assert accounts.hint_on(A, key(1)) == "released: its session 's' was over"
    assert accounts.hint_on(A, key(2)) == ""


def test_what_is_inside_of_chunks_is_known_until_they_are_cleared() -> None:
    pool = OwnedPool()
    pool.hello()
    pool.order(1)
    row = Description(A, bytes(8), None, b"", bytes(8), 2)
    pool.tell(described=[row])
    bad = Description(A, bytes(8), None, b"odd", bytes(8), 2)
    pool.tell(described=[bad], orders=stamp(1))
    book = pool.node.accounts.descriptions
    assert book.find(bytes(8)) == row
    later = stamp(1).history + 1
    pool.node.take_orders(OrdersDocument(Stamp(later, 1)), pool.now)
    assert book.find(bytes(8)) == row, "another life of the scheduler actor clears nothing"
    pool.node.take_orders(OrdersDocument(Stamp(later, 2), floors={A: 2}), pool.now)
    assert book.find(bytes(8)) is None
