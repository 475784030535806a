"""The engine's view: what a lookup says, what is stored where, and what an exchange carries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from raykv.base.ids import NO_GENERATION, EngineId, Epoch, Generation, Key, Lookup, NodeId
from raykv.engine.requests import FailedLoad, RequestOptions, StoreSampler
from raykv.engine.view import EngineView
from raykv.protocol.columns import MAX_KEYS, Handle, Handles, Keys, Leases
from raykv.protocol.engine import EngineAttached, Owned, SyncReply
from tests.fixtures.engine.views import EPOCH, NODE_EPOCH, grant, handle, keys, look, take
from tests.fixtures.keys import named_key as key

HIT, MISS, HIT_PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING
DEADLINE_S = 2.0
CAPACITY = 40
LEASE_SLOTS = 8


def handles(*rows: tuple[Key, int, int]) -> Handles:
    """Columns out of (key, slot, generation)."""
    return Handles(
        Keys.of([name for name, _, _ in rows]),
        [slot for _, slot, _ in rows],
        [gen for _, _, gen in rows],
    )


def reply(
    stored: Handles = Handles(),  # noqa: B008
    removed: Handles = Handles(),  # noqa: B008
    granted: Leases = Leases(),  # noqa: B008
    **fields: Any,
) -> SyncReply:
    values = {"epoch": EPOCH, "seq": 1, "node_epoch": NODE_EPOCH, **fields}
    return SyncReply(stored=stored, removed=removed, granted=granted, **values)


def new_view(sampler: StoreSampler | None = None) -> EngineView:
    """Attached, with the leases (slot, generation) (0, 10) to (3, 13) and one request."""
    made = EngineView(EngineId("engine"), [0, 1], DEADLINE_S, LEASE_SLOTS, sampler=sampler)
    capacity = {0: CAPACITY, 1: CAPACITY}
    made.attached(EngineAttached(EPOCH, NODE_EPOCH, capacity, lease_share=0.5))
    made.apply(reply(granted=grant((0, 10), (1, 11), (2, 12), (3, 13))))
    made.start_request("r", RequestOptions())
    return made


@pytest.fixture
def view() -> Iterator[EngineView]:
    made = new_view()
    yield made
    made.check()


def store(view: EngineView, names: str) -> list[Handle]:
    """Store a chunk for each letter; all are READY then."""
    plan = view.prepare_store("r", keys(names))
    assert plan is not None
    view.complete_store(plan.keys)
    view.check()
    return plan.handles


def changes(view: EngineView, call: Callable[[], Any]) -> bool:
    """Whether the call changed what the view acts on; what is for people does not count, nor that
    leases were short.
    """

    def picture() -> dict[str, Any]:
        parts = {**vars(view), **vars(view.remote), **vars(view._stock)}
        for_people = ("counters", "accounts", "_departures", "num_timed_out")
        left_out = (*for_people, "_short", "remote", "settings", "cost", "_stock")
        return copy.deepcopy({k: v for k, v in parts.items() if k not in left_out})

    before = picture()
    call()
    return picture() != before


def attach(view: EngineView, epoch: int = EPOCH, node_epoch: int = NODE_EPOCH) -> None:
    view.declared_leases()
    view.attached(EngineAttached(epoch, node_epoch, {0: CAPACITY, 1: CAPACITY}))


def free_slots(view: EngineView) -> list[int]:
    return view.declared_leases()[1].slots


# Lookups


def test_lookup_misses_what_was_never_seen(view: EngineView) -> None:
    assert look(view, "a") == [MISS]
    assert view.counters.misses == 1


def test_lookup_hits_what_the_scheduler_actor_reported(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    assert look(view, "ab") == [HIT, MISS]
    assert view.prepare_load(keys("a")) == [handle(5, 7)]
    assert view.counter_values()["hits"] == 1


def test_lookup_hits_what_this_engine_has_stored(view: EngineView) -> None:
    store(view, "a")
    assert look(view, "a") == [HIT]
    assert view.num_ready == 1


def test_lookup_misses_what_was_removed(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7), (key("b"), 6, 8))))
    view.apply(reply(removed=handles((key("a"), 5, 7))))
    assert look(view, "ab") == [MISS, HIT]


def test_removal_of_an_older_chunk_leaves_the_newer_one(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 9))))
    view.apply(reply(removed=handles((key("a"), 6, 8))))
    assert look(view, "a") == [HIT]


def test_report_of_an_older_chunk_does_not_replace_the_newer_one(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 9))))
    view.apply(reply(handles((key("a"), 6, 8))))
    assert view.prepare_load(keys("a")) == [handle(5, 9)]
    view.apply(reply(handles((key("a"), 7, 20))))
    assert view.prepare_load(keys("a")) == [handle(7, 20)]


def test_removals_of_a_reply_come_before_its_chunks(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 9))))
    view.apply(reply(handles((key("a"), 6, 8)), removed=handles((key("a"), 5, 9))))
    assert view.prepare_load(keys("a")) == [handle(6, 8)]


def test_lookup_keeps_groups_apart(view: EngineView) -> None:
    view.apply(reply(handles((key("a", 1), 5, 9))))
    assert view.lookup("r", key("a", 0), 0.0) is MISS
    assert view.lookup("r", key("a", 1), 0.0) is HIT


def test_load_of_a_chunk_that_is_not_there_gets_a_handle_that_is_refused(view: EngineView) -> None:
    assert view.prepare_load(keys("a")) == [handle(0, NO_GENERATION)]


# Waiting for a store of this engine


def test_lookup_waits_for_a_pending_chunk_until_the_requests_deadline(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    assert look(view, "a", now=100.0) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + DEADLINE_S - 0.01) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + DEADLINE_S) == [MISS]
    assert view.counters.lookups_timed_out == 1
    view.complete_store(keys("a"))
    assert look(view, "a", now=200.0) == [HIT]


def test_deadline_is_one_for_all_keys_of_a_request(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    assert look(view, "a", now=100.0) == [HIT_PENDING]
    view.prepare_store("r", keys("b"))
    assert look(view, "b", now=100.0 + DEADLINE_S) == [MISS]


def test_deadline_of_one_request_is_not_that_of_another(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.start_request("other", RequestOptions())
    assert look(view, "a", now=100.0) == [HIT_PENDING]
    late = 100.0 + DEADLINE_S
    assert look(view, "a", now=late, request="other") == [HIT_PENDING]
    assert look(view, "a", now=late) == [MISS]


def test_deadline_begins_anew_when_a_request_id_is_used_again(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    look(view, "a", now=100.0)
    view.finish_request("r")
    view.start_request("r", RequestOptions())
    assert look(view, "a", now=200.0) == [HIT_PENDING]


# What a request allows


def test_lookup_misses_when_the_request_does_not_load(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    view.start_request("no", RequestOptions(load=False))
    assert look(view, "ab", request="no") == [MISS, MISS]
    assert look(view, "ab") == [HIT, HIT_PENDING]


def test_store_takes_nothing_when_the_request_does_not_store(view: EngineView) -> None:
    view.start_request("no", RequestOptions(store=False))
    plan = view.prepare_store("no", keys("a"))
    assert plan is not None
    assert plan.keys == []
    assert free_slots(view) == [0, 1, 2, 3]
    assert look(view, "a", request="no") == [MISS]


def test_few_requests_store_when_the_scheduler_actor_says_so() -> None:
    view = new_view(StoreSampler(is_on=True))
    view.apply(reply(store_share=3))
    stored = []
    for number in range(6):
        view.start_request(str(number), RequestOptions())
        plan = view.prepare_store(str(number), [key(str(number))])
        stored.append(plan is not None and len(plan.keys) == 1)
    assert stored == [False, False, True] * 2
    assert take(view).counters["requests_not_stored"] == 4
    view.apply(reply())
    view.start_request("next", RequestOptions())
    assert view.prepare_store("next", [key("n")]) is not None


def test_request_that_is_started_again_has_nothing_of_an_earlier_one(view: EngineView) -> None:
    store(view, "a")
    view.start_request("no", RequestOptions())
    view.start_request("no", RequestOptions(load=False))
    assert look(view, "a", request="no") == [MISS]
    view.start_request("no", RequestOptions())
    assert look(view, "a", request="no") == [HIT]


def test_request_that_was_never_started_may_load_and_store(view: EngineView) -> None:
    store(view, "a")
    assert look(view, "a", request="unheard of") == [HIT]
    plan = view.prepare_store("unheard of", keys("b"))
    assert plan is not None
    assert plan.keys == keys("b")


# Stores


def test_store_takes_a_lease_for_each_new_key_in_order(view: EngineView) -> None:
    plan = view.prepare_store("r", keys("ab"))
    assert plan is not None
    assert plan.keys == keys("ab")
    assert plan.handles == [handle(0, 10), handle(1, 11)]
    assert view.pending_handle(key("b")) == handle(1, 11)
    assert view.counters.chunks_offered == 2


def test_store_skips_what_is_ready_or_pending(view: EngineView) -> None:
    store(view, "b")
    view.prepare_store("r", keys("c"))
    plan = view.prepare_store("r", keys("abcd"))
    assert plan is not None
    assert plan.keys == keys("ad")
    assert plan.handles == [handle(2, 12), handle(3, 13)]


def test_store_takes_the_longest_prefix_when_leases_are_short(view: EngineView) -> None:
    store(view, "b")
    plan = view.prepare_store("r", keys("abcdef"))
    assert plan is not None
    assert plan.keys == keys("acd")
    assert view.counters.stores_without_lease == 1
    assert look(view, "ef") == [MISS, MISS]


def test_store_takes_a_prefix_of_each_group_for_itself(view: EngineView) -> None:
    view.apply(reply(granted=grant((9, 20), group=1)))
    offered = [key("a", 1), key("a"), key("b", 1), key("b"), key("c", 1)]
    plan = view.prepare_store("r", offered)
    assert plan is not None
    assert plan.keys == [key("a", 1), key("a"), key("b")]
    assert plan.handles == [handle(9, 20), handle(0, 10), handle(1, 11)]


def test_store_is_none_and_changes_nothing_when_no_new_key_has_a_lease(view: EngineView) -> None:
    store(view, "abcd")
    take(view)
    assert not changes(view, lambda: view.prepare_store("r", keys("abe")))
    assert view.prepare_store("r", keys("abe")) is None


def test_store_is_empty_when_all_keys_are_cached(view: EngineView) -> None:
    store(view, "abcd")
    plan = view.prepare_store("r", keys("abcd"))
    assert plan is not None
    assert plan.keys == []
    assert view.counters.stores_without_lease == 0


def test_failed_store_is_not_ready_and_gives_its_slot_back(view: EngineView) -> None:
    view.prepare_store("r", keys("ab"))
    view.fail_store(key("a"), Generation(10))
    view.complete_store(keys("ab"))
    assert look(view, "ab") == [MISS, HIT]
    assert take(view).released == grant((0, 10))
    assert view.counters.stores_failed == 1
    assert view.counters.chunks_stored == 1


def test_failed_store_is_offered_again_under_another_lease(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.fail_store(key("a"), Generation(10))
    view.complete_store(keys("a"))
    plan = view.prepare_store("r", keys("a"))
    assert plan is not None
    assert plan.handles == [handle(1, 11)]
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]


def test_failure_of_another_generation_does_not_fail_a_store(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.fail_store(key("a"), Generation(9))
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]
    assert take(view).released == Leases()


def test_failed_store_gives_its_slot_back_once_when_two_ranks_report_it(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.fail_store(key("a"), Generation(10))
    view.fail_store(key("a"), Generation(10))
    view.complete_store(keys("a"))
    assert take(view).released == grant((0, 10))


def test_slot_that_was_given_back_is_not_declared(view: EngineView) -> None:
    view.prepare_store("r", keys("ab"))
    view.fail_store(key("a"), Generation(10))
    assert set(free_slots(view)) == {1, 2, 3}


def test_chunk_that_was_removed_before_its_store_ended_is_not_ready(view: EngineView) -> None:
    view.prepare_store("r", keys("ab"))
    view.apply(reply(removed=handles((key("a"), 0, 10))))
    view.complete_store(keys("ab"))
    assert look(view, "ab") == [MISS, HIT]


def test_report_of_a_pending_chunk_leaves_it_pending(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.apply(reply(handles((key("a"), 0, 10))))
    assert look(view, "a") == [HIT_PENDING]
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]


def test_completion_of_an_unknown_store_changes_nothing(view: EngineView) -> None:
    assert not changes(view, lambda: view.complete_store(keys("xyz")))


# Failed loads


def fail_load(view: EngineView, name: str, generation: int, gone: bool = True) -> None:
    view.fail_load(
        FailedLoad("r", key(name), Generation(generation), view.node_epoch, is_gone=gone)
    )
    view.check()


def test_failed_load_bars_the_key_for_its_request_for_good(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    fail_load(view, "a", 7)
    view.apply(reply(handles((key("a"), 6, 9))))
    assert look(view, "a") == [MISS]
    assert look(view, "a", request="other") == [HIT]


def test_failed_load_bars_the_key_for_others_until_a_newer_generation(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7), (key("b"), 6, 7))))
    fail_load(view, "a", 7)
    for generation in (6, 7):
        view.apply(reply(handles((key("a"), 5, generation))))
        assert look(view, "ab", request="other") == [MISS, HIT]
    view.apply(reply(handles((key("a"), 5, 8))))
    assert look(view, "a", request="other") == [HIT]


def test_failed_load_of_an_older_generation_leaves_the_newer_one_to_others(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 9))))
    fail_load(view, "a", 7)
    assert look(view, "a") == [MISS]
    assert look(view, "a", request="other") == [HIT]
    assert take(view).dropped == Handles()


def test_failed_load_names_the_chunk_to_the_scheduler_actor_only_if_it_is_gone(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 7), (key("b"), 6, 8))))
    fail_load(view, "a", 7, gone=True)
    fail_load(view, "b", 8, gone=False)
    assert view.has_news
    assert take(view).dropped == handles((key("a"), 5, 7))
    assert take(view).dropped == Handles()
    assert look(view, "ab", request="other") == [MISS, MISS]


def test_failed_load_of_a_finished_request_still_bars_the_generation(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    view.finish_request("r")
    fail_load(view, "a", 7)
    assert look(view, "a", request="other") == [MISS]
    assert view.counters.loads_failed == 1


def test_chunk_that_outlived_its_node_actor_is_found_again_after_failed_load(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    fail_load(view, "a", 7)
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    view.apply(reply(handles((key("a"), 5, 7)), node_epoch=NODE_EPOCH + 1))
    assert look(view, "a", request="other") == [HIT]
    assert look(view, "a") == [MISS]


def test_failed_load_of_earlier_life_of_node_actor_bars_its_request_only(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    view.fail_load(FailedLoad("r", key("a"), Generation(7), Epoch(NODE_EPOCH - 1), is_gone=True))
    assert look(view, "a", request="other") == [HIT]
    assert look(view, "a") == [MISS]
    assert not take(view).dropped.keys


def test_key_whose_load_failed_is_stored_again(view: EngineView) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    fail_load(view, "a", 7)
    store(view, "a")
    assert look(view, "a", request="other") == [HIT]
    assert look(view, "a") == [MISS]


# The outbox


def test_request_pins_what_is_about_to_be_loaded_and_touches_the_tail_first(
    view: EngineView,
) -> None:
    view.apply(reply(handles(*((name, i, 7 + i) for i, name in enumerate(keys("abc"))))))
    view.prepare_load(keys("abc"))
    assert view.has_news
    request = take(view)
    assert request.pinned == keys("abc")
    assert request.touched == keys("cba")
    again = take(view)
    assert (again.pinned, again.touched) == (Keys(), Keys())
    assert not view.has_news


def test_request_touches_cached_chunks_that_were_offered_again_tail_first(
    view: EngineView,
) -> None:
    store(view, "ab")
    take(view)
    view.prepare_store("r", keys("abc"))
    assert take(view).touched == keys("ba")


def test_requests_count_up_and_name_engine_and_epoch(view: EngineView) -> None:
    first, second = take(view), take(view)
    assert second.seq == first.seq + 1
    assert (first.engine_id, first.epoch) == ("engine", EPOCH)
    assert first.counters["chunks_stored"] == 0


def test_request_is_a_bare_heartbeat_and_the_outbox_stays_when_it_may_not_grow(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 7))))
    view.prepare_load(keys("a"))
    quiet = take(view, may_grow=False)
    assert quiet.idle
    assert (quiet.pinned, quiet.touched, quiet.wanted) == (Keys(), Keys(), {})
    assert take(view).pinned == keys("a")


def test_requests_carry_one_page_of_the_outbox_each(view: EngineView) -> None:
    names = [Key(b"%08d" % i + bytes(4)) for i in range(MAX_KEYS)]
    rows = [(name, i, i + 1) for i, name in enumerate(names)]
    view.apply(reply(handles(*rows)))
    view.prepare_load(names)
    first, second, third = take(view), take(view), take(view)
    assert [*first.pinned, *second.pinned] == names
    assert [*first.touched, *second.touched] == names[::-1]
    assert (third.pinned, third.touched) == (Keys(), Keys())
    sizes = [len(request.pinned) + len(request.touched) for request in (first, second)]
    assert max(sizes) <= MAX_KEYS


def test_leases_are_worth_a_message_once_half_of_them_are_used(view: EngineView) -> None:
    target = view._stock.target(0)
    assert target == LEASE_SLOTS
    view.apply(reply(granted=grant((4, 14), group=0)))
    view.apply(reply(granted=grant(*((20 + i, 20 + i) for i in range(8)), group=1)))
    assert not view.wants_leases
    assert take(view).wanted == {0: 3}
    view.prepare_store("r", keys("a"))
    assert view.wants_leases
    assert take(view).wanted == {0: 4}


def test_request_asks_for_no_leases_when_it_may_not(view: EngineView) -> None:
    assert take(view, may_want=False).wanted == {}
    assert take(view).wanted == {0: 4, 1: 8}


@pytest.mark.parametrize(("capacity", "target"), [(0, 1), (3, 1), (16, 4), (400, 8)])
def test_lease_target_is_the_group_s_part_of_the_share_within_bounds(
    view: EngineView, capacity: int, target: int
) -> None:
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: capacity}, lease_share=0.5))
    assert view._stock.target(0) == target
    view.apply(reply(lease_share=0.25))
    assert view._stock.target(0) == min(LEASE_SLOTS, max(1, capacity // 8))


# Attaching, pausing, the line


def test_answer_of_another_epoch_changes_nothing(view: EngineView) -> None:
    for epoch in (EPOCH - 1, EPOCH + 1):
        stale = reply(handles((key("a"), 5, 7)), granted=grant((9, 20)), epoch=epoch)
        assert not changes(view, lambda stale=stale: view.apply(stale))  # type: ignore[misc]


def test_leases_and_chunks_stay_when_the_scheduler_actor_begins_a_new_life(
    view: EngineView,
) -> None:
    store(view, "a")
    attach(view, EPOCH + 1)
    assert look(view, "a") == [HIT]
    assert free_slots(view) == [1, 2, 3]
    view.apply(reply(handles((key("b"), 7, 7)), epoch=EPOCH + 1, reset=True))
    assert look(view, "ab") == [MISS, HIT]
    assert free_slots(view) == [1, 2, 3]


def test_declared_leases_are_the_free_ones_and_those_in_flight(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.apply(reply(granted=grant((9, 20), group=1)))
    life, declared = view.declared_leases()
    assert life == NODE_EPOCH
    rows = set(zip(declared.groups, declared.slots, declared.generations, strict=True))
    assert rows == {(0, 0, 10), (0, 1, 11), (0, 2, 12), (0, 3, 13), (1, 9, 20)}


def test_everything_misses_and_nothing_is_stored_while_the_cache_is_paused(
    view: EngineView,
) -> None:
    store(view, "a")
    view.apply(reply(paused=True))
    assert look(view, "a") == [MISS]
    plan = view.prepare_store("r", keys("b"))
    assert plan is not None
    assert plan.keys == []
    assert take(view).wanted == {}
    view.apply(reply())
    assert look(view, "a") == [HIT]


def test_everything_misses_and_nothing_is_stored_while_the_line_is_down(view: EngineView) -> None:
    store(view, "a")
    view.set_link(False)
    assert look(view, "a") == [MISS]
    plan = view.prepare_store("r", keys("b"))
    assert plan is not None
    assert plan.keys == []
    view.set_link(True)
    assert look(view, "a") == [HIT]


# A new life of the NodeActor


def test_view_knows_nothing_of_the_last_node_when_the_engine_is_at_another_one(
    view: EngineView,
) -> None:
    store(view, "a")
    fail_load(view, "a", 10)
    store(view, "b")
    view.prepare_store("r", keys("c"))
    view.declared_leases()
    view.move(NodeId("other"))
    assert view.node_id == "other"
    assert look(view, "abc", request="new") == [MISS, MISS, MISS]
    assert free_slots(view) == []
    told = take(view)
    assert (told.touched, told.pinned) == (Keys(), Keys())
    assert (told.released, told.dropped) == (Leases(), Handles())
    # Its NodeActor may have begun earlier, and may have the same chunks.
    attach(view, node_epoch=NODE_EPOCH - 5)
    view.apply(reply(handles((key("a"), 5, 10)), node_epoch=NODE_EPOCH - 5))
    assert look(view, "a", request="new") == [HIT]


def test_store_of_the_last_node_that_ends_late_is_no_chunk_of_the_next_one(
    view: EngineView,
) -> None:
    view.prepare_store("r", keys("a"))
    view.move(NodeId("other"))
    view.complete_store(keys("a"))
    assert look(view, "a", request="new") == [MISS]


def restarted_by_workers(view: EngineView) -> None:
    view.node_restarted(Epoch(NODE_EPOCH + 1))


def restarted_by_reply(view: EngineView) -> None:
    view.apply(reply(node_epoch=NODE_EPOCH + 1))


def restarted_by_attaching(view: EngineView) -> None:
    attach(view, node_epoch=NODE_EPOCH + 1)


@pytest.mark.parametrize(
    "restart", [restarted_by_workers, restarted_by_reply, restarted_by_attaching]
)
def test_chunks_and_leases_are_gone_when_the_node_has_restarted(
    view: EngineView, restart: Callable[[EngineView], None]
) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    restart(view)
    assert look(view, "ab") == [MISS, MISS]
    assert free_slots(view) == []
    assert view.node_epoch == NODE_EPOCH + 1
    view.complete_store(keys("b"))
    assert look(view, "b") == [MISS]


@pytest.mark.parametrize("epoch", [NODE_EPOCH - 1, NODE_EPOCH])
def test_news_of_the_same_or_an_older_life_of_the_node_change_nothing(
    view: EngineView, epoch: int
) -> None:
    store(view, "a")
    assert not changes(view, lambda: view.node_restarted(Epoch(epoch)))


def test_answer_about_an_older_life_of_the_node_is_not_taken_in(view: EngineView) -> None:
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    view.apply(reply(handles((key("a"), 5, 7)), granted=grant((9, 20))))
    assert look(view, "a") == [MISS]
    assert free_slots(view) == []


@pytest.mark.parametrize(
    "restart", [restarted_by_workers, restarted_by_reply, restarted_by_attaching]
)
def test_leases_of_an_older_life_of_the_node_are_neither_declared_nor_given_back(
    view: EngineView, restart: Callable[[EngineView], None]
) -> None:
    view.prepare_store("r", keys("a"))
    restart(view)
    assert view.declared_leases() == (NODE_EPOCH + 1, Leases())
    assert take(view).released == Leases()


def test_leases_are_declared_as_those_of_the_life_they_began_in(
    view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange thread declares; the engine's may hear of a restart in the middle of it."""
    rows = view._lease_rows

    def heard_meanwhile() -> list[tuple[int, Handle]]:
        view.node_restarted(Epoch(NODE_EPOCH + 1))
        return rows()

    monkeypatch.setattr(view, "_lease_rows", heard_meanwhile)
    assert view.declared_leases()[0] == NODE_EPOCH


def test_leases_that_came_after_they_were_declared_are_not_used(view: EngineView) -> None:
    view.declared_leases()
    view.apply(reply(granted=grant((7, 20), (8, 21))))
    view.attached(EngineAttached(EPOCH + 1, NODE_EPOCH, {0: CAPACITY}))
    assert free_slots(view) == [0, 1, 2, 3]


def test_store_into_a_lease_that_came_after_they_were_declared_is_not_ready(
    view: EngineView,
) -> None:
    store(view, "abcd")
    view.declared_leases()
    view.apply(reply(granted=grant((7, 20))))
    view.prepare_store("r", keys("e"))
    view.attached(EngineAttached(EPOCH + 1, NODE_EPOCH, {0: CAPACITY}))
    assert free_slots(view) == []
    view.complete_store(keys("e"))
    assert look(view, "ae") == [HIT, MISS]


def test_store_that_outlived_its_node_does_not_make_a_later_one_ready(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    view.apply(reply(granted=grant((0, 30)), node_epoch=NODE_EPOCH + 1))
    view.prepare_store("r", keys("a"))
    view.fail_store(key("a"), Generation(10))
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT_PENDING]
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]


def test_stores_that_outlived_two_lives_of_their_node_are_not_ready(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    for life in (1, 2):
        view.node_restarted(Epoch(NODE_EPOCH + life))
        leases = grant((0, 30 + life))
        view.apply(reply(granted=leases, node_epoch=NODE_EPOCH + life))
        view.prepare_store("r", keys("a"))
    for _ in range(2):
        view.complete_store(keys("a"))
        assert look(view, "a") == [HIT_PENDING]
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]


def test_store_that_outlived_a_clear_does_not_make_a_later_one_ready(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.apply(reply(granted=grant((0, 30)), void=True, reset=True))
    view.prepare_store("r", keys("a"))
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT_PENDING]
    view.complete_store(keys("a"))
    assert look(view, "a") == [HIT]


def test_store_from_before_a_reset_is_not_waited_for(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.reset()
    view.apply(reply(cleared=1, void=True, reset=True, granted=grant((0, 30))))
    store(view, "a")
    assert look(view, "a") == [HIT]


# Resetting


def test_reset_empties_the_view_at_once(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    view.prepare_load(keys("a"))
    view.reset()
    assert look(view, "ab") == [MISS, MISS]
    assert free_slots(view) == []
    request = take(view)
    assert request.clear == 1
    assert (request.pinned, request.touched, request.released) == (Keys(), Keys(), Leases())
    assert view.has_news


def test_reset_forgets_failures_that_were_not_told_yet(view: EngineView) -> None:
    view.apply(reply(handles((key("b"), 9, 7))))
    view.prepare_store("r", keys("a"))
    view.fail_store(key("a"), Generation(10))
    fail_load(view, "b", 7)
    view.reset()
    request = take(view)
    assert (request.released, request.dropped) == (Leases(), Handles())
    view.apply(reply(cleared=1, void=True, reset=True, granted=grant((5, 30))))
    store(view, "a")
    assert look(view, "a") == [HIT]


def test_reset_holds_until_it_is_confirmed(view: EngineView) -> None:
    view.reset()
    view.apply(reply(handles((key("a"), 5, 7)), granted=grant((9, 20))))
    assert look(view, "a") == [MISS]
    assert free_slots(view) == []
    assert take(view, may_grow=False).clear == 1
    view.apply(reply(cleared=1, void=True, reset=True, granted=grant((9, 20))))
    assert take(view).clear == 0
    assert not view.has_news
    assert free_slots(view) == [9]
    store(view, "a")
    assert look(view, "a") == [HIT]


def test_second_reset_is_not_confirmed_by_the_answer_to_the_first(view: EngineView) -> None:
    view.reset()
    assert take(view).clear == 1
    view.reset()
    view.apply(reply(handles((key("a"), 5, 7)), cleared=1, void=True, reset=True))
    assert look(view, "a") == [MISS]
    assert take(view).clear == 2
    view.apply(reply(handles((key("b"), 6, 30)), cleared=2, void=True, reset=True))
    assert look(view, "ab") == [MISS, HIT]
    assert take(view).clear == 0


def test_store_that_ends_after_a_reset_is_not_ready(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.reset()
    view.complete_store(keys("a"))
    assert look(view, "a") == [MISS]
    view.apply(reply(cleared=1, void=True, reset=True))
    assert look(view, "a") == [MISS]


def test_reset_is_asked_for_again_when_the_scheduler_actor_begins_a_new_life(
    view: EngineView,
) -> None:
    view.reset()
    take(view)
    attach(view, EPOCH + 1)
    view.apply(reply(handles((key("a"), 5, 7)), epoch=EPOCH + 1, reset=True))
    assert look(view, "a") == [MISS]
    assert take(view).clear == 1


def test_confirmed_reset_stays_confirmed_in_the_next_life_of_the_scheduler_actor(
    view: EngineView,
) -> None:
    view.reset()
    view.apply(reply(cleared=1, void=True, reset=True))
    attach(view, EPOCH + 1)
    view.apply(reply(handles((key("a"), 5, 30)), epoch=EPOCH + 1, reset=True))
    assert look(view, "a") == [HIT]
    assert take(view).clear == 0


def test_void_empties_the_view_and_its_leases(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    view.apply(reply(handles((key("c"), 6, 30)), granted=grant((9, 31)), void=True, reset=True))
    view.complete_store(keys("b"))
    assert look(view, "abc") == [MISS, MISS, HIT]
    assert free_slots(view) == [9]


def test_snapshot_replaces_the_mirror_and_spares_what_is_in_flight(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    view.apply(reply(handles((key("c"), 6, 30)), reset=True))
    assert look(view, "abc") == [MISS, HIT_PENDING, HIT]


def test_counters_are_named_as_they_travel(view: EngineView) -> None:
    store(view, "a")
    look(view, "ab")
    view.complete_load(keys("a"))
    values = view.counter_values()
    wanted: Sequence[str] = ("hits", "misses", "chunks_offered", "chunks_stored", "chunks_loaded")
    assert [values[name] for name in wanted] == [1, 1, 1, 1, 1]
    assert take(view).counters == values


def test_store_into_an_older_lease_is_found_after_a_failed_load_of_its_key(
    view: EngineView,
) -> None:
    view.apply(reply(handles((key("a"), 5, 20))))
    fail_load(view, "a", 20)
    store(view, "a")
    assert look(view, "a", request="other") == [HIT]


def test_store_into_a_slot_that_is_granted_again_is_not_ready(view: EngineView) -> None:
    plan = view.prepare_store("r", keys("ab"))
    assert plan is not None
    slot = plan.handles[0].slot
    view.apply(reply(granted=grant((slot, 30))))
    view.check()
    assert sorted(free_slots(view)) == [0, 1, 2, 3]
    view.complete_store(plan.keys)
    assert look(view, "ab") == [MISS, HIT]


def test_dropped_stores_are_given_back_and_ready_chunks_stay(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("bc"))
    view.fail_store(key("c"), view.pending_handle(key("c")).generation)  # type: ignore[union-attr]
    pending = view.pending_handle(key("b"))
    assert pending is not None
    take(view)
    view.drop_stores()
    view.check()
    assert look(view, "abc") == [HIT, MISS, MISS]
    request = take(view)
    assert request.clear == 0
    assert request.released == Leases([0], [pending.slot], [pending.generation])


def test_dropped_store_that_ended_all_the_same_is_found(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    at = view.pending_handle(key("a"))
    assert at is not None
    view.drop_stores()
    view.apply(reply(handles((key("a"), at.slot, at.generation))))
    assert look(view, "a") == [HIT]


def test_store_after_dropped_one_of_the_same_chunk_ends_with_its_own_end(view: EngineView) -> None:
    view.prepare_store("r", keys("a"))
    view.drop_stores()
    store(view, "a")
    assert look(view, "a") == [HIT]


# Leaving


def test_engine_that_leaves_finds_and_stores_nothing_and_gives_its_leases_back(
    view: EngineView,
) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    pending = view.pending_handle(key("b"))
    assert pending is not None
    free = [slot for slot in free_slots(view) if slot != pending.slot]
    assert free
    take(view)
    view.leave()
    assert look(view, "a") == [MISS]
    assert key("a") not in view.loadable
    plan = view.prepare_store("r", keys("c"))
    assert plan is not None
    assert not plan.keys
    request = take(view)
    assert request.released.slots == free
    assert request.wanted == {}
    assert request.counters["weights_changed"] == 1
    assert not view.wants_leases
    # What it was storing had been computed before.
    view.complete_store(keys("b"))
    assert view.num_ready == 2
    view.check()


def test_engine_that_has_left_stays_away_until_it_enters(view: EngineView) -> None:
    view.leave()
    view.set_link(True)
    attach(view, EPOCH + 1)
    view.apply(reply(handles((key("a"), 5, 30)), epoch=EPOCH + 1, granted=grant((9, 40))))
    assert look(view, "a") == [MISS]
    assert free_slots(view) == []
    assert take(view).released.slots[-1] == 9
    view.enter(view.namespace)
    assert look(view, "a") == [HIT]
    assert not view.is_new
    view.check()


def test_engine_that_enters_another_namespace_knows_nothing_of_it(view: EngineView) -> None:
    store(view, "a")
    view.prepare_store("r", keys("b"))
    view.leave()
    view.enter("other")
    assert (view.namespace, view.num_ready, view.is_new) == ("other", 0, True)
    # Answers to the last namespace's exchanges may still come.
    view.apply(reply(handles((key("a"), 5, 30)), granted=grant((9, 40))))
    assert view.num_ready == 0
    assert free_slots(view) == []
    attach(view)
    assert view.declared_leases() == (NODE_EPOCH, Leases())
    # A store of before ends, and is of the last namespace.
    view.complete_store(keys("b"))
    assert view.num_ready == 0
    view.apply(reply(handles((key("a"), 6, 50)), granted=grant((9, 60))))
    view.start_request("later", RequestOptions())
    assert view.lookup("later", key("a"), 0.0) is HIT
    assert view.lookup("later", key("b"), 0.0) is not HIT
    assert not view.is_new
    view.check()


def test_chunk_that_failed_in_the_last_namespace_is_another_ones_business(
    view: EngineView,
) -> None:
    store(view, "a")
    handle = view.loadable[key("a")]
    view.fail_load(FailedLoad("r", key("a"), handle.generation, view.node_epoch, is_gone=True))
    view.leave()
    view.enter("other")
    attach(view)
    # Older than the one that failed: it may be, since another engine stored it.
    view.apply(reply(handles((key("a"), 5, handle.generation - 1))))
    assert key("a") in view.loadable


def test_exchange_says_whose_leases_and_chunks_requests_use() -> None:
    view = new_view()
    view.start_request("hers", RequestOptions(tenant="hers"))
    view.start_request("his", RequestOptions(tenant="his"))
    view.prepare_store("r", keys("a"))
    view.prepare_store("hers", keys("b"))
    view.prepare_store("his", keys("c"))
    view.complete_store(keys("b"))
    view.prepare_load(keys("b"), "hers")
    view.prepare_load(keys("b"), "r")
    owned = take(view).owned
    assert owned.tenants == ["hers", "his"]
    rows = list(zip(owned.tenant_index, owned.slots, owned.generations, strict=True))
    assert rows == [(0, 1, 11), (1, 2, 12), (0, 1, 11)]
    assert take(view).owned.slots == []


def test_exchange_says_nothing_of_tenants_where_no_request_has_one() -> None:
    view = new_view()
    view.prepare_store("r", keys("a"))
    view.complete_store(keys("a"))
    view.prepare_load(keys("a"), "r")
    assert take(view).owned == Owned()
