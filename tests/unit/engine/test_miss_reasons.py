"""Why a lookup is a MISS: one test for each reason that the engine's view can give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.base.ids import EngineId, Epoch, Generation, Key, Lookup, MissReason, NodeId, Refusal
from raykv.engine.cost import FetchCost, Rates
from raykv.engine.remote import ChunkSize, FetchOrder, RemoteChunks, RemoteSettings
from raykv.engine.requests import FailedLoad, RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handles, Keys, Leases, Numbers, Replicas, Source
from raykv.protocol.engine import EngineAttached
from raykv.protocol.peer import FetchResult
from tests.fixtures.engine.views import EPOCH, NODE_EPOCH, apply, take
from tests.fixtures.keys import named_key as key

QUERY_S, PENDING_S, STORE_S, FETCH_S = 1.0, 2.0, 4.0, 10.0
SLOT, GENERATION = 5, 7


A, B, C = key("a"), key("b"), key("c")


def new_view(rates: Rates | None = None) -> EngineView:
    settings = RemoteSettings(QUERY_S, FETCH_S, PENDING_S, {0: ChunkSize(1000, 16)})
    remote = RemoteChunks(settings, FetchCost(rates or Rates()))
    made = EngineView(EngineId("engine"), [0], STORE_S, 4, remote, node_id=NodeId("own"))
    made.start_request("r", RequestOptions())
    return made


def attach(view: EngineView, leases: int = 2) -> None:
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 40}))
    rows = list(range(leases))
    apply(view, granted=Leases([0] * leases, rows, [10 + row for row in rows]))


@pytest.fixture
def view() -> Iterator[EngineView]:
    """Attached, with two leases and the request "r"; it has peers."""
    made = new_view()
    attach(made)
    yield made
    made.check()


def here(*keys: Key) -> Handles:
    """Chunks on the engine's own node."""
    return Handles(
        Keys.of([*keys]), [SLOT + at for at, _ in enumerate(keys)], [GENERATION] * len(keys)
    )


def look(view: EngineView, name: Key, now: float = 0.0, request: str = "r") -> Lookup:
    return view.lookup(request, name, now)


def learn(view: EngineView, *, is_there: bool = True, is_pending: bool = False) -> None:
    """The request asks for A, and is told that the node "one" has it, stores it, or nobody."""
    view.ask("r", [A])
    question = take(view, may_want=False)
    place = (
        Replicas(
            [Source("one")],
            [80],
            Numbers.of([0]),
            Numbers.of([0]),
            Numbers.of([97]),
            Numbers.of([1097]),
        )
        if is_there
        else Replicas()
    )
    apply(view, question, replicas=Replicas(pending=[0]) if is_pending else place)


def why(view: EngineView, name: Key, now: float = 0.0, request: str = "r") -> MissReason:
    """The reason that is kept for a lookup which is a MISS."""
    view.requests.take_miss(request)
    assert look(view, name, now, request) is Lookup.MISS
    miss = view.requests.take_miss(request)
    assert miss is not None
    assert miss.key == name
    return miss.reason


def finished(view: EngineView, refusal: Refusal | None) -> list[FetchOrder]:
    """The fetch of A ends so; None: without an answer."""
    learn(view)
    assert look(view, A) is Lookup.HIT_PENDING
    orders = view.remote.take_orders()
    result = None if refusal is None else FetchResult(NODE_EPOCH, [int(refusal)], [0], [0])
    view.finish_fetch(orders, result)
    return orders


def test_hit_leaves_no_miss_behind(view: EngineView) -> None:
    apply(view, stored=here(A))
    assert look(view, A) is Lookup.HIT
    assert view.requests.take_miss("r") is None


def test_latest_miss_is_kept_until_it_is_taken(view: EngineView) -> None:
    apply(view, stored=here(A), has_peers=False)
    view.fail_load(FailedLoad("r", A, Generation(GENERATION), Epoch(NODE_EPOCH), is_gone=False))
    assert [look(view, name) for name in (A, B)] == [Lookup.MISS] * 2
    miss = view.requests.take_miss("r")
    assert miss is not None
    assert (miss.key, miss.reason) == (B, MissReason.NEVER_STORED)
    assert view.requests.take_miss("r") is None


def test_opted_out(view: EngineView) -> None:
    apply(view, stored=here(A))
    view.start_request("other", RequestOptions(load=False))
    assert why(view, A, request="other") is MissReason.OPTED_OUT


def test_paused(view: EngineView) -> None:
    apply(view, stored=here(A), paused=True)
    assert why(view, A) is MissReason.PAUSED


def test_node_lost_while_the_workers_do_not_reach_it(view: EngineView) -> None:
    apply(view, stored=here(A))
    view.set_link(False)
    assert why(view, A) is MissReason.NODE_LOST
    view.set_link(True)
    assert look(view, A) is Lookup.HIT


def test_node_lost_with_all_that_it_had(view: EngineView) -> None:
    apply(view, stored=here(A), has_peers=False)
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    assert why(view, A) is MissReason.NODE_LOST
    assert why(view, B) is MissReason.NEVER_STORED


def test_not_attached() -> None:
    view = new_view()
    assert why(view, A) is MissReason.NOT_ATTACHED
    assert view.prepare_store("r", [B]) is None
    assert why(view, B) is MissReason.NOT_ATTACHED


def test_never_stored(view: EngineView) -> None:
    learn(view, is_there=False)
    assert why(view, A) is MissReason.NEVER_STORED


def test_stores_off_for_what_a_request_did_not_store(view: EngineView) -> None:
    apply(view, has_peers=False)
    view.start_request("other", RequestOptions(store=False))
    plan = view.prepare_store("other", [A])
    assert plan is not None
    assert not plan.keys
    assert why(view, A) is MissReason.STORES_OFF
    assert why(view, B) is MissReason.NEVER_STORED


def test_store_failed(view: EngineView) -> None:
    apply(view, has_peers=False)
    plan = view.prepare_store("r", [A])
    assert plan is not None
    view.fail_store(A, plan.handles[0].generation)
    view.complete_store([A])
    assert why(view, A) is MissReason.STORE_FAILED


@pytest.mark.parametrize(
    ("is_dry", "reason"), [(True, MissReason.POOL_FULL), (False, MissReason.NO_LEASE)]
)
def test_no_slot_for_what_was_computed_tells_a_full_pool_from_a_short_stock(
    view: EngineView, is_dry: bool, reason: MissReason
) -> None:
    apply(view, take(view) if is_dry else None, has_peers=False)
    plan = view.prepare_store("r", [A, B, C])
    assert plan is not None
    assert plan.keys == [A, B]
    assert why(view, C) is reason


def test_pool_full_for_what_finds_no_slot_to_be_fetched_into() -> None:
    view = new_view()
    attach(view, leases=0)
    learn(view)
    assert look(view, A, now=0.0) is Lookup.RETRY
    apply(view, take(view))
    assert why(view, A, now=0.1) is MissReason.POOL_FULL


def test_no_lease_for_what_was_to_be_fetched_and_got_none_in_time() -> None:
    view = new_view()
    attach(view, leases=0)
    learn(view)
    assert look(view, A, now=0.0) is Lookup.RETRY
    assert why(view, A, now=QUERY_S) is MissReason.NO_LEASE


@pytest.mark.parametrize("how", ["removed", "left out of a snapshot", "refused as gone"])
def test_evicted(view: EngineView, how: str) -> None:
    apply(view, stored=here(A), has_peers=False)
    if how == "removed":
        apply(view, removed=here(A), has_peers=False)
    elif how == "left out of a snapshot":
        apply(view, reset=True, has_peers=False)
    else:
        view.start_request("other", RequestOptions())
        failed = FailedLoad("other", A, Generation(GENERATION), Epoch(NODE_EPOCH), is_gone=True)
        view.fail_load(failed)
        assert why(view, A, request="other") is MissReason.LOAD_FAILED
    assert why(view, A) is MissReason.EVICTED
    assert why(view, B) is MissReason.NEVER_STORED


@pytest.mark.parametrize("by_this_engine", [True, False])
def test_cleared(view: EngineView, by_this_engine: bool) -> None:
    apply(view, stored=here(A), has_peers=False)
    if by_this_engine:
        view.reset()
    else:
        apply(view, void=True, reset=True, has_peers=False)
    assert why(view, A) is MissReason.CLEARED


def test_pending_too_long_here(view: EngineView) -> None:
    view.prepare_store("r", [A])
    assert look(view, A, now=0.0) is Lookup.HIT_PENDING
    assert why(view, A, now=STORE_S) is MissReason.PENDING_TOO_LONG


def test_pending_too_long_elsewhere(view: EngineView) -> None:
    learn(view, is_pending=True)
    assert look(view, A, now=0.0) is Lookup.HIT_PENDING
    assert why(view, A, now=PENDING_S) is MissReason.PENDING_TOO_LONG


def test_unanswered(view: EngineView) -> None:
    assert look(view, A, now=0.0) is Lookup.RETRY
    assert why(view, A, now=QUERY_S) is MissReason.UNANSWERED


def test_breaker_open_while_the_scheduler_actor_is_left_alone(view: EngineView) -> None:
    view.remote.is_cut_off = True
    assert look(view, A, now=0.0) is Lookup.RETRY
    assert why(view, A, now=QUERY_S) is MissReason.BREAKER_OPEN
    apply(view, has_peers=False)
    view.prepare_store("r", [A, B, C])
    assert why(view, C) is MissReason.BREAKER_OPEN


def test_fetch_slower() -> None:
    view = new_view(Rates(fetch_bytes_per_s=1.0, prefill_tokens_per_s=1e9))
    attach(view)
    learn(view)
    assert why(view, A) is MissReason.FETCH_SLOWER


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (None, MissReason.FETCH_FAILED),
        (Refusal.CORRUPT, MissReason.FETCH_FAILED),
        (Refusal.TOO_LATE, MissReason.FETCH_FAILED),
        (Refusal.STALE, MissReason.EVICTED),
        (Refusal.CLEARED, MissReason.CLEARED),
        (Refusal.NODE_LOST, MissReason.NODE_LOST),
        (Refusal.BAD_HANDLE, MissReason.NODE_LOST),
    ],
)
def test_fetch_failed_or_what_its_source_said(
    view: EngineView, refusal: Refusal | None, expected: MissReason
) -> None:
    finished(view, refusal)
    assert why(view, A) is expected


def test_fetch_failed_when_it_takes_too_long(view: EngineView) -> None:
    learn(view)
    assert look(view, A, now=0.0) is Lookup.HIT_PENDING
    assert why(view, A, now=FETCH_S) is MissReason.FETCH_FAILED


def test_fetch_failed_when_the_time_is_up_before_it_begins(view: EngineView) -> None:
    view.prepare_store("r", [B])
    assert look(view, B, now=0.0) is Lookup.HIT_PENDING
    learn(view)
    assert why(view, A, now=FETCH_S) is MissReason.FETCH_FAILED


def test_failed_fetch_is_no_reason_for_who_did_not_know_of_it(view: EngineView) -> None:
    finished(view, Refusal.CORRUPT)
    apply(view, has_peers=False)
    view.start_request("other", RequestOptions())
    assert why(view, A, request="other") is MissReason.NEVER_STORED


def test_load_failed(view: EngineView) -> None:
    apply(view, stored=here(A), has_peers=False)
    view.fail_load(FailedLoad("r", A, Generation(GENERATION), Epoch(NODE_EPOCH), is_gone=False))
    assert why(view, A) is MissReason.LOAD_FAILED
    view.start_request("other", RequestOptions())
    assert why(view, A, request="other") is MissReason.LOAD_FAILED


def test_chunk_that_came_back_is_a_hit_whatever_is_remembered(view: EngineView) -> None:
    apply(view, stored=here(A), has_peers=False)
    apply(view, removed=here(A), has_peers=False)
    apply(view, stored=Handles(Keys.of([A]), [SLOT], [GENERATION + 1]), has_peers=False)
    assert look(view, A) is Lookup.HIT


def test_unknown_request_keeps_no_miss(view: EngineView) -> None:
    assert look(view, A, request="stranger") is Lookup.MISS
    assert view.requests.take_miss("stranger") is None


def test_exchange_carries_records_and_counters_of_finished_requests(view: EngineView) -> None:
    view.accounts.open("r", 100)
    view.accounts.close("r")
    assert take(view, may_want=False).finished[0].request_id == "r"
    again = take(view, may_want=False)
    assert again.finished == []
    assert again.counters["prompt_tokens"] == 100
    assert again.counters["missed_tokens_aborted"] == 100


def test_heartbeat_that_takes_nothing_in_leaves_the_records(view: EngineView) -> None:
    view.accounts.open("r", 100)
    view.accounts.close("r")
    assert view.take_request(Epoch(EPOCH), may_grow=False, may_want=False).finished == []
    assert len(take(view, may_want=False).finished) == 1
