"""An engine's stock of leases: what is in it, how much it asks for, what it lends to fetches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from raykv.base.ids import EngineId, Epoch, Key, Lookup, Refusal
from raykv.engine.remote import FetchOrder
from raykv.engine.requests import RequestOptions
from raykv.engine.stock import LeaseStock
from raykv.engine.view import EngineView
from raykv.protocol.columns import MAX_KEYS, Handles, Keys, Leases, Numbers, Replicas, Source
from raykv.protocol.engine import EngineAttached, SyncReply
from raykv.protocol.peer import FetchResult
from tests.fixtures.engine.views import EPOCH, NODE_EPOCH, apply, handle, take


def leases(*rows: tuple[int, int, int]) -> Leases:
    """Columns out of (group, slot, generation)."""
    return Leases([g for g, _, _ in rows], [slot for _, slot, _ in rows], [gen for *_, gen in rows])


def stock_of(*rows: tuple[int, int, int], most: int = 8, capacity: int = 1000) -> LeaseStock:
    """Groups 0 and 1; each of them may have a quarter of the pool."""
    stock = LeaseStock([0, 1], most)
    stock.set_shares(0.5, 0.0)
    stock.capacity.update({0: capacity, 1: capacity})
    stock.add(leases(*rows), {})
    return stock


def many(count: int, group: int = 0) -> list[tuple[int, int, int]]:
    return [(group, number, number + 1) for number in range(count)]


# What is in it


def test_leases_are_taken_oldest_first() -> None:
    stock = stock_of((0, 5, 10), (0, 4, 11))
    stock.add(leases((0, 3, 12)), {})
    taken = [stock.take(0) for _ in range(4)]
    assert taken == [handle(5, 10), handle(4, 11), handle(3, 12), None]


def test_leases_of_a_group_are_not_taken_for_another() -> None:
    stock = stock_of((1, 5, 10))
    assert stock.take(0) is None
    assert stock.take(1) == handle(5, 10)


def test_rows_are_all_leases_with_their_groups() -> None:
    stock = stock_of((1, 5, 10), (0, 4, 11), (1, 6, 12))
    assert stock.rows() == [(0, handle(4, 11)), (1, handle(5, 10)), (1, handle(6, 12))]
    stock.take(1)
    assert stock.rows() == [(0, handle(4, 11)), (1, handle(6, 12))]


def test_cleared_stock_has_no_leases_and_takes_new_ones() -> None:
    stock = stock_of((0, 5, 10), (1, 4, 11))
    stock.clear()
    assert stock.rows() == []
    stock.add(leases((1, 4, 20)), {})
    assert stock.take(1) == handle(4, 20)


def test_leases_that_are_not_kept_are_void_and_the_others_stay_in_order() -> None:
    stock = stock_of((0, 1, 10), (0, 2, 11), (0, 3, 12), (1, 4, 13))
    stock.keep([handle(3, 12), handle(1, 10), handle(2, 99), handle(8, 8)])
    assert stock.rows() == [(0, handle(1, 10)), (0, handle(3, 12))]


# What it asks for


@pytest.mark.parametrize(
    ("most", "capacity", "expected"), [(8, 1000, 8), (8, 20, 5), (8, 23, 5), (8, 3, 1), (8, 0, 1)]
)
def test_target_is_a_quarter_of_the_pool_within_its_bounds(
    most: int, capacity: int, expected: int
) -> None:
    stock = stock_of(most=most, capacity=capacity)
    assert stock.target(0) == expected
    assert stock.wanted(Counter()) == {0: expected, 1: expected}


def test_target_before_the_capacity_is_known_is_one() -> None:
    assert LeaseStock([3], 8).wanted(Counter()) == {3: 1}


@pytest.mark.parametrize(
    ("step", "step_share", "expected"),
    [(4, 1.0, 5), (8, 1.0, 8), (9, 1.0, 8), (8, 0.5, 7), (8, 0.1, 5), (8, 0.0, 5)],
)
def test_target_is_what_a_step_may_take_within_the_part_of_the_pool_for_it(
    step: int, step_share: float, expected: int
) -> None:
    """Two groups of a pool of 30."""
    stock = LeaseStock([0, 1], 8, {0: step, 1: step})
    stock.capacity.update({0: 30, 1: 30})
    stock.set_shares(0.37, step_share)
    assert [stock.target(0), stock.target(1)] == [expected, expected]


def test_what_a_step_may_take_is_held_until_the_pool_was_filled_and_then_what_steps_take() -> None:
    """A pool of 100, of which a quarter is the engine's, and steps that could take 50."""
    stock = LeaseStock([0], 1000, {0: 50})
    stock.capacity[0] = 100
    numbers = itertools.count(1)

    def step(count: int) -> int:
        """Takes so many and gets an answer: what is held from then on."""
        for _ in range(count):
            stock.take(0)
        wanted = stock.wanted(Counter())
        granted = [next(numbers) for _ in range(wanted.get(0, 0))]
        stock.add(Leases([0] * len(granted), granted, granted), wanted or {0: 0})
        stock.set_shares(0.25, 0.5)
        stock.take_surplus()
        return len(stock.rows())

    stock.set_shares(0.25, 0.5)
    assert [step(count) for count in (0, 30, 30, 30)] == [50] * 4
    assert [step(count) for count in (10, 10)] == [30, 30]
    assert [step(10) for _ in range(12)][-1] == 25
    # The first time that it is more, it finds no slot for all.
    assert step(26) == 25
    assert stock.is_low(Counter())
    assert step(0) == 50


@pytest.mark.parametrize(("held", "wanted"), [(0, 8), (3, 5), (4, 4), (5, 3), (8, None), (9, None)])
def test_every_message_asks_for_what_a_group_lacks_to_its_target(
    held: int, wanted: int | None
) -> None:
    stock = stock_of(*many(held), *many(8, group=1))
    assert stock.wanted(Counter()) == ({} if wanted is None else {0: wanted})


@pytest.mark.parametrize(("held", "is_low"), [(0, True), (4, True), (5, False), (8, False)])
def test_group_that_is_down_to_half_of_its_target_does_not_wait_for_a_message(
    held: int, is_low: bool
) -> None:
    assert stock_of(*many(held), *many(8, group=1)).is_low(Counter()) is is_low


@pytest.mark.parametrize(("held", "wanted"), [(0, 11), (3, 8), (5, 6), (8, 3), (9, 3)])
def test_what_is_wanted_beyond_it_comes_on_top_and_does_not_wait(held: int, wanted: int) -> None:
    stock = stock_of(*many(held), *many(8, group=1))
    assert stock.is_low(Counter({0: 3}))
    assert stock.wanted(Counter({0: 3})) == {0: wanted}


# Dryness


def test_group_is_dry_when_it_got_less_than_it_wanted() -> None:
    stock = stock_of()
    assert not stock.is_dry(0)
    stock.add(leases((0, 1, 10), (1, 2, 11)), {0: 2, 1: 1})
    assert stock.is_dry(0)
    assert not stock.is_dry(1)


def test_group_is_dry_until_it_gets_all_that_it_wants() -> None:
    stock = stock_of()
    stock.add(leases(), {0: 1})
    stock.add(leases((0, 1, 10)), {0: 2})
    assert stock.is_dry(0)
    stock.add(leases((0, 2, 11), (0, 3, 12)), {0: 2})
    assert not stock.is_dry(0)


def test_answer_to_a_message_that_wanted_nothing_says_nothing_about_dryness() -> None:
    stock = stock_of()
    stock.add(leases(), {0: 1})
    stock.add(leases(), {})
    assert stock.is_dry(0)


def test_group_is_not_dry_when_one_page_of_leases_was_granted_of_several() -> None:
    stock = stock_of()
    stock.add(leases(*many(MAX_KEYS)), {0: MAX_KEYS + 1})
    assert not stock.is_dry(0)


# Leases for what was found on other nodes

A, B, C = (Key(name + bytes(4)) for name in (b"a", b"b", b"c"))
HIT_PENDING, RETRY, MISS = Lookup.HIT_PENDING, Lookup.RETRY, Lookup.MISS


def view_that_found(*found: Key, held: Leases) -> EngineView:
    """With the request "r", which was told that chunks are on another node."""
    view = EngineView(EngineId("engine"), [0], lookup_deadline_s=2.0, lease_slots=4)
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 40}))
    apply(view, granted=held)
    view.start_request("r", RequestOptions())
    view.ask("r", found)
    count = len(found)
    told = Replicas(
        [Source("one")],
        [80],
        Numbers.of(list(range(count))),
        Numbers.of([0] * count),
        Numbers.of([7] * count),
        Numbers.of([8] * count),
    )
    apply(view, take(view, may_want=False), replicas=told)
    return view


def look(view: EngineView, *keys: Key, now: float = 100.0) -> list[Lookup]:
    return [view.lookup("r", key, now) for key in keys]


def test_found_chunks_that_no_lease_is_left_for_are_wanted_on_top() -> None:
    view = view_that_found(A, B, C, held=leases((0, 0, 10)))
    assert look(view, A, B, C) == [HIT_PENDING, RETRY, RETRY]
    assert look(view, A, B, C) == [HIT_PENDING, RETRY, RETRY]
    assert view.wants_leases
    request = take(view)
    assert request.wanted == {0: 4 + 2}
    apply(view, request, granted=leases(*((0, slot, 20 + slot) for slot in range(1, 7))))
    assert look(view, A, B, C) == [HIT_PENDING] * 3
    orders = view.remote.take_orders()
    assert [order.handle for order in orders] == [handle(0, 10), handle(1, 21), handle(2, 22)]
    assert take(view).wanted == {}


def test_leases_that_nobody_waits_for_any_more_are_wanted_once() -> None:
    view = view_that_found(A, held=leases())
    look(view, A)
    assert take(view, may_want=False).wanted == {}
    request = take(view)
    assert request.wanted == {0: 4 + 1}
    view.finish_request("r")
    apply(view, request)
    assert take(view).wanted == {0: 4}


def test_chunk_that_has_found_a_lease_is_not_wanted_on_top_any_more() -> None:
    view = view_that_found(A, held=leases())
    look(view, A)
    apply(view, granted=leases((0, 5, 20)))
    assert look(view, A) == [HIT_PENDING]
    assert take(view).wanted == {0: 4}


def test_nothing_is_wanted_on_top_after_a_reset() -> None:
    view = view_that_found(A, held=leases())
    look(view, A)
    view.reset()
    assert take(view).wanted == {0: 4}


def test_nothing_is_wanted_while_the_cache_is_paused() -> None:
    view = view_that_found(A, held=leases())
    look(view, A)
    apply(view, paused=True)
    assert not view.wants_leases
    assert take(view).wanted == {}


def test_found_chunk_is_a_miss_when_there_are_no_leases_to_be_had() -> None:
    view = view_that_found(A, held=leases())
    assert look(view, A) == [RETRY]
    apply(view, take(view))
    assert look(view, A) == [MISS]
    apply(view, take(view), granted=leases(*((0, slot, 20 + slot) for slot in range(5))))
    assert look(view, A) == [HIT_PENDING]


def test_found_chunk_waits_for_a_lease_as_long_as_for_an_answer() -> None:
    view = view_that_found(A, held=leases())
    assert look(view, A, now=100.0) == [RETRY]
    assert look(view, A, now=100.9) == [RETRY]
    assert look(view, A, now=101.0) == [MISS]


# Leases of fetches under way


def fetching() -> tuple[EngineView, list[FetchOrder]]:
    """A and B are being fetched into the slots 0 and 1; the slots 2 and 3 are free."""
    view = view_that_found(A, B, held=leases(*((0, slot, 10 + slot) for slot in range(4))))
    assert look(view, A, B) == [HIT_PENDING, HIT_PENDING]
    return view, view.remote.take_orders()


def arrive(view: EngineView, orders: list[FetchOrder], refusal: Refusal = Refusal.NONE) -> None:
    """The first chunk arrives where it should; `refusal` is that of the second one."""
    slots, generations = [0, 1], [10, 11]
    view.finish_fetch(orders, FetchResult(NODE_EPOCH, [0, refusal], slots, generations))
    view.check()


def declared(view: EngineView) -> set[int]:
    """Slots of all leases, free and in flight."""
    return set(view.declared_leases()[1].slots)


def released(view: EngineView) -> set[int]:
    return set(take(view).released.slots)


def test_lease_of_a_fetch_is_declared_until_its_chunk_is_there() -> None:
    view, orders = fetching()
    assert declared(view) == {0, 1, 2, 3}
    arrive(view, orders)
    assert declared(view) == {2, 3}
    assert released(view) == set()


@pytest.mark.parametrize("is_answered", [True, False])
def test_failed_fetch_gives_its_lease_back(is_answered: bool) -> None:
    view, orders = fetching()
    if is_answered:
        arrive(view, orders, Refusal.STALE)
    else:
        view.finish_fetch(orders, None)
    assert view.has_news
    back = {(1, 11)} if is_answered else {(0, 10), (1, 11)}
    leases = take(view).released
    assert set(zip(leases.slots, leases.generations, strict=True)) == back
    assert declared(view) == {2, 3}


def test_chunk_that_landed_in_another_slot_is_there_and_the_own_lease_goes_back() -> None:
    view, orders = fetching()
    view.finish_fetch(orders, FetchResult(NODE_EPOCH, [0, 0], [30, 1], [40, 11]))
    view.check()
    assert view.prepare_load([A, B]) == [handle(30, 40), handle(1, 11)]
    assert released(view) == {0}


def ends_by_reset(view: EngineView) -> None:
    view.reset()
    view.apply(SyncReply(EPOCH, 1, NODE_EPOCH, cleared=1, has_peers=True))


def ends_by_clearing(view: EngineView) -> None:
    view.apply(SyncReply(EPOCH, 1, NODE_EPOCH, void=True, has_peers=True))


def ends_undeclared(view: EngineView) -> None:
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 40}))


def ends_rejected(view: EngineView) -> None:
    view.declared_leases()
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 40}, rejected=[0, 1]))


def ends_by_eviction(view: EngineView) -> None:
    removed = Handles(Keys.of([A, B]), [0, 1], [10, 11])
    view.apply(SyncReply(EPOCH, 1, NODE_EPOCH, removed=removed, has_peers=True))


ENDS = (ends_by_reset, ends_by_clearing, ends_undeclared, ends_rejected, ends_by_eviction)


@pytest.mark.parametrize("end", ENDS)
def test_result_of_a_fetch_is_ignored_when_its_lease_has_ended(
    end: Callable[[EngineView], None],
) -> None:
    view, orders = fetching()
    end(view)
    assert not declared(view) & {0, 1}
    arrive(view, orders, Refusal.STALE)
    view.start_request("later", RequestOptions())
    assert [view.lookup("later", key, 0.0) for key in (A, B)] == [RETRY, RETRY]
    assert released(view) == set()
    assert (view.counters.chunks_fetched, view.counters.fetches_failed) == (0, 0)
    assert view.remote.fetching_bytes == 0


@pytest.mark.parametrize("end", [end for end in ENDS if end is not ends_by_eviction])
def test_fetch_that_was_not_begun_is_not_begun_when_its_lease_has_ended(
    end: Callable[[EngineView], None],
) -> None:
    view = view_that_found(A, B, held=leases((0, 0, 10), (0, 1, 11)))
    look(view, A, B)
    end(view)
    assert view.remote.take_orders() == []


def test_result_is_ignored_and_all_leases_are_void_when_the_node_has_a_new_life() -> None:
    view, orders = fetching()
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    arrive(view, orders)
    assert look(view, A, B) == [MISS, MISS]
    assert released(view) == set()
    assert view.declared_leases()[1].slots == []


def test_result_of_a_forgotten_fetch_is_not_that_of_the_next_one() -> None:
    view, orders = fetching()
    ends_by_reset(view)
    view.start_request("later", RequestOptions())
    view.ask("later", [A])
    told = Replicas(
        [Source("one")], [80], Numbers.of([0]), Numbers.of([0]), Numbers.of([7]), Numbers.of([8])
    )
    apply(view, take(view), granted=leases((0, 9, 30)), replicas=told, cleared=1)
    assert view.lookup("later", A, 0.0) is HIT_PENDING
    (order,) = view.remote.take_orders()
    arrive(view, orders)
    assert view.lookup("later", A, 0.0) is HIT_PENDING
    result = FetchResult(NODE_EPOCH, [0], [9], [30])
    view.finish_fetch([order], result)
    assert view.lookup("later", A, 0.0) is Lookup.HIT
    assert view.prepare_load([A]) == [handle(9, 30)]


def test_removal_at_another_generation_does_not_end_a_fetch() -> None:
    view, orders = fetching()
    view.apply(SyncReply(EPOCH, 1, NODE_EPOCH, removed=Handles(Keys.of([A]), [0], [9])))
    arrive(view, orders)
    assert look(view, A, B) == [Lookup.HIT, Lookup.HIT]


def test_fetch_whose_lease_was_believed_goes_on_when_the_engine_attaches_again() -> None:
    view, orders = fetching()
    view.declared_leases()
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 40}, rejected=[1]))
    arrive(view, orders)
    assert look(view, A) == [Lookup.HIT]
    assert view.counters.chunks_fetched == 1
    assert declared(view) == {2, 3}
