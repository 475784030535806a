"""Chunks of other nodes in the engine's view: asked for, waited for, fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

import raykv.engine.view
from raykv.base.ids import EngineId, Epoch, Key, Lookup, MissReason, NodeId, Refusal
from raykv.engine.cost import FetchCost, Rates
from raykv.engine.remote import ChunkSize, FetchOrder, RemoteChunks, RemoteSettings
from raykv.engine.requests import PREFILLED_REPEATS, RequestOptions, Tier
from raykv.engine.view import EngineView
from raykv.protocol.columns import (
    MAX_KEYS,
    Handles,
    Keys,
    Leases,
    LostReplicas,
    Numbers,
    Replica,
    Replicas,
    Source,
    SourceKind,
)
from raykv.protocol.engine import EngineAttached, SyncRequest
from raykv.protocol.peer import FetchResult
from tests.fixtures.engine.views import EPOCH, NODE_EPOCH, apply, grant, handle, keys, look, take
from tests.fixtures.keys import named_key as key

HIT, MISS, HIT_PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY
QUERY_S, PENDING_S, STORE_S, FETCH_S = 1.0, 2.0, 4.0, 10.0
CAPACITY = {0: 40}
SIZE = ChunkSize(num_bytes=1000, num_tokens=16)
LEASES = ((0, 10), (1, 11), (2, 12), (3, 13))


def handles(names: str, slots: list[int], generations: list[int]) -> Handles:
    return Handles(Keys.of([*keys(names)]), slots, generations)


def told(request: SyncRequest, where: str = "", pending: str = "") -> Replicas:
    """An answer, `where` "a:one,two/disk b:own": the key a is on two nodes, b on one.

    The other nodes are in their life 80; slot and generation follow from the letter.
    """
    sources = dict(word.split(":") for word in where.split())
    waiting: list[int] = []
    rows: list[tuple[int, int, str]] = []
    for position, raw in enumerate(request.asked):
        letter = raw[:-4].decode()
        if letter in pending:
            waiting.append(position)
        nodes = filter(None, sources.get(letter, "").split(","))
        rows += [(position, ord(letter), node) for node in nodes]
    return Replicas(
        [source(node) for _, _, node in rows],
        [NODE_EPOCH if node == "own" else 80 for _, _, node in rows],
        Numbers.of(position for position, _, _ in rows),
        Numbers.of(range(len(rows))),
        Numbers.of(place for _, place, _ in rows),
        Numbers.of(place + 1000 for _, place, _ in rows),
        waiting,
    )


def source(text: str) -> Source:
    node, _, disk = text.partition("/")
    return Source(node, SourceKind.DISK if disk else SourceKind.POOL)


def replica(letter: str, node: str = "one") -> Replica:
    return Replica(source(node), Epoch(80), handle(ord(letter), ord(letter) + 1000))


@pytest.fixture
def view() -> Iterator[EngineView]:
    """Attached, with peers, leases and the request "r"."""
    settings = RemoteSettings(QUERY_S, FETCH_S, PENDING_S, {0: SIZE})
    remote = RemoteChunks(settings, FetchCost())
    made = EngineView(EngineId("engine"), [0], STORE_S, 4, remote, node_id=NodeId("own"))
    made.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY))
    apply(made, granted=grant(*LEASES))
    start(made, "r")
    yield made
    made.check()


def asked(request: SyncRequest) -> str:
    return "".join(raw[:-4].decode() for raw in request.asked)


def start(view: EngineView, *requests: str) -> None:
    for request in requests:
        view.start_request(request, RequestOptions())


def learn(view: EngineView, names: str, request: str = "r", **fields: Any) -> None:
    """A request asks for what is on the node "one", and is told so."""
    view.ask(request, keys(names))
    question = view.take_request(Epoch(EPOCH), may_grow=True, may_want=False)
    where = " ".join(f"{name}:one" for name in names)
    apply(view, question, replicas=told(question, where), **fields)


def order_all(view: EngineView, names: str, now: float = 0.0) -> list[FetchOrder]:
    """Fetches that are under way, of what is on the node "one"."""
    learn(view, names)
    assert look(view, names, now) == [HIT_PENDING] * len(names)
    return view.remote.take_orders()


def result(orders: Sequence[FetchOrder], refused: str = "") -> FetchResult:
    """All chunks arrived where they should, except for the letters `refused`."""
    letters = [order.key[:-4].decode() for order in orders]
    return FetchResult(
        node_epoch=NODE_EPOCH,
        refusals=[int(Refusal.STALE if x in refused else Refusal.NONE) for x in letters],
        slots=[order.handle.slot for order in orders],
        generations=[order.handle.generation for order in orders],
        num_bytes=sum(order.num_bytes for order in orders),
        seconds=0.5,
    )


def finish(view: EngineView, orders: Sequence[FetchOrder], refused: str = "") -> None:
    view.finish_fetch(orders, result(orders, refused))
    view.check()


def released(view: EngineView) -> list[tuple[int, int]]:
    leases = take(view).released
    return list(zip(leases.slots, leases.generations, strict=True))


# The life of a fetched chunk


def test_chunk_of_another_node_is_asked_for_fetched_and_hit(view: EngineView) -> None:
    view.ask("r", keys("a"))
    assert view.has_news
    question = take(view)
    assert asked(question) == "a"
    assert look(view, "a") == [RETRY]
    apply(view, question, replicas=told(question, "a:one,two"))
    assert view.remote.take_orders() == [], "nothing is fetched before somebody wants it"
    assert look(view, "a") == [HIT_PENDING]
    (order,) = view.remote.take_orders()
    assert order == FetchOrder(
        key("a"), handle(0, 10), SIZE.num_bytes, (replica("a", "one"), replica("a", "two"))
    )
    assert look(view, "a") == [HIT_PENDING]
    assert view.remote.take_orders() == []
    finish(view, [order])
    assert look(view, "a") == [HIT]
    assert view.prepare_load(keys("a")) == [handle(0, 10)]
    assert released(view) == []
    counters = view.counter_values()
    assert (counters["chunks_asked"], counters["chunks_fetched"]) == (1, 1)
    assert (counters["bytes_fetched"], counters["fetches_failed"]) == (SIZE.num_bytes, 0)


@pytest.mark.parametrize(
    ("tier", "fetched"),
    [
        (Tier(is_disk=False, is_remote=True), "one"),
        (Tier(is_disk=True, is_remote=False), "own/disk"),
        (Tier(is_disk=True, is_remote=True), "two/disk"),
    ],
    ids=str,
)
def test_chunk_is_fetched_from_where_its_request_allows_alone(
    view: EngineView, tier: Tier, fetched: str
) -> None:
    view.start_request("r", RequestOptions(tiers=frozenset({tier})))
    view.start_request("none", RequestOptions(tiers=frozenset()))
    for request in ("r", "none"):
        view.ask(request, keys("a"))
    question = take(view)
    apply(view, question, replicas=told(question, "a:one,own/disk,two/disk"))
    assert look(view, "a", request="none") == [MISS]
    missed = view.requests.take_miss("none")
    assert missed is not None
    assert missed.reason is MissReason.OPTED_OUT
    assert look(view, "a") == [HIT_PENDING]
    (order,) = view.remote.take_orders()
    assert order.replicas == (replica("a", fetched),)
    finish(view, [order])
    assert look(view, "a", request="none") == [HIT], "it is in the own pool now"


def test_lookup_asks_what_was_not_asked_before(view: EngineView) -> None:
    assert look(view, "a") == [RETRY]
    assert asked(take(view)) == "a"
    assert look(view, "a") == [RETRY]
    assert asked(take(view)) == ""


def test_key_that_nobody_has_is_a_miss_for_the_request_and_is_not_asked_again(
    view: EngineView,
) -> None:
    look(view, "a")
    question = take(view)
    apply(view, question, replicas=told(question))
    assert look(view, "a") == [MISS]
    assert asked(take(view)) == ""
    start(view, "later")
    assert look(view, "a", request="later") == [RETRY]
    assert asked(take(view)) == "a"


# Prompts that another engine has just computed


def prefilled(view: EngineView, names: str, request: str = "p") -> SyncRequest:
    """A request whose prompt was computed elsewhere asks for its chunks."""
    view.start_request(request, RequestOptions(prefilled=True))
    view.ask(request, keys(names))
    return take(view)


def test_prefilled_request_waits_for_an_announcement_that_is_late(view: EngineView) -> None:
    question = prefilled(view, "ab")
    apply(view, question, replicas=told(question, "a:one"))
    assert look(view, "ab", request="p") == [HIT_PENDING, RETRY]
    assert view.remote.has_repeats
    question = take(view)
    assert asked(question) == "b"
    apply(view, question, replicas=told(question, pending="b"))
    assert look(view, "b", request="p") == [HIT_PENDING]
    question = take(view)
    apply(view, question, replicas=told(question, "b:one"))
    assert look(view, "b", request="p") == [HIT_PENDING]
    assert [order.key for order in view.remote.take_orders()] == keys("ab")
    assert not view.remote.has_repeats


def test_prefilled_request_believes_in_the_end_that_nobody_has_its_chunks(
    view: EngineView,
) -> None:
    question = prefilled(view, "ab")
    for _ in range(PREFILLED_REPEATS):
        assert asked(question) == "ab"
        apply(view, question, replicas=told(question))
        assert look(view, "ab", request="p") == [RETRY, RETRY]
        question = take(view)
    apply(view, question, replicas=told(question))
    assert look(view, "ab", request="p") == [MISS, MISS]
    assert asked(take(view)) == ""


def test_prefilled_request_asks_although_no_peers_are_known(view: EngineView) -> None:
    apply(view, has_peers=False)
    assert asked(prefilled(view, "a")) == "a"


def test_prefilled_request_believes_that_its_own_node_has_a_chunk(view: EngineView) -> None:
    question = prefilled(view, "a")
    apply(view, question, replicas=told(question, "a:own"))
    assert look(view, "a", request="p") == [HIT]
    assert not view.remote.has_repeats


def test_prefilled_request_does_not_outwait_the_deadline_for_answers(view: EngineView) -> None:
    question = prefilled(view, "a")
    assert look(view, "a", 0.0, "p") == [RETRY]
    apply(view, question, replicas=told(question))
    assert look(view, "a", QUERY_S - 0.1, "p") == [RETRY]
    assert look(view, "a", QUERY_S, "p") == [MISS]


def test_other_requests_do_not_doubt_an_answer(view: EngineView) -> None:
    view.ask("r", keys("a"))
    question = prefilled(view, "a")
    apply(view, question, replicas=told(question))
    assert look(view, "a", request="r") == [MISS]
    assert look(view, "a", request="p") == [RETRY]
    view.finish_request("p")
    assert asked(take(view)) == ""


def test_chunk_of_a_prefilled_request_whose_store_failed_is_asked_for_again(
    view: EngineView,
) -> None:
    question = prefilled(view, "a")
    apply(view, question, replicas=told(question, pending="a"))
    question = take(view)
    apply(view, question, replicas=told(question))
    assert look(view, "a", request="p") == [RETRY]
    assert asked(take(view)) == "a"


def test_prefilled_prompt_is_fetched_although_computing_is_faster(view: EngineView) -> None:
    view.remote.cost = FetchCost(Rates(fetch_bytes_per_s=1.0, prefill_tokens_per_s=1e9))
    question = prefilled(view, "a")
    view.ask("r", keys("b"))
    apply(view, question, replicas=told(question, "a:one"))
    question = take(view)
    apply(view, question, replicas=told(question, "b:one"))
    assert look(view, "b", request="r") == [MISS]
    assert look(view, "a", request="p") == [HIT_PENDING]


# Asking


def test_nobody_is_asked_and_nothing_is_announced_without_peers(view: EngineView) -> None:
    apply(view, has_peers=False)
    view.ask("r", keys("ab"))
    assert look(view, "a") == [MISS]
    view.prepare_store("r", keys("c"))
    request = take(view)
    assert (request.asked, request.announced) == (Keys(), Handles())
    assert view.counter_values()["chunks_asked"] == 0
    apply(view)
    assert look(view, "a") == [RETRY], "somebody has come"


def test_only_what_the_own_node_lacks_is_asked_for(view: EngineView) -> None:
    apply(view, stored=handles("ac", [5, 6], [7, 8]))
    view.prepare_store("r", keys("d"))
    view.ask("r", keys("abcde"))
    assert asked(take(view)) == "be"


def test_prefix_that_is_all_here_asks_nobody(view: EngineView) -> None:
    apply(view, stored=handles("abc", [5, 6, 7], [7, 8, 9]))
    view.ask("r", keys("abc"))
    assert look(view, "abc") == [HIT] * 3
    assert not view.remote.has_questions
    assert asked(take(view)) == ""


def test_request_that_does_not_load_or_is_unknown_or_a_paused_view_asks_nobody(
    view: EngineView,
) -> None:
    view.start_request("no", RequestOptions(load=False))
    view.ask("no", keys("a"))
    view.ask("unheard of", keys("a"))
    apply(view, paused=True)
    view.ask("r", keys("a"))
    assert look(view, "a") == [MISS]
    assert asked(take(view)) == ""


def test_key_is_asked_for_once_by_a_request_before_and_after_the_answer(view: EngineView) -> None:
    view.ask("r", keys("ab"))
    view.ask("r", keys("bc"))
    question = take(view)
    assert asked(question) == "abc"
    apply(view, question, replicas=told(question, "a:one"))
    view.ask("r", keys("abc"))
    assert asked(take(view)) == ""
    assert view.counter_values()["chunks_asked"] == 3


def test_requests_ask_together_and_all_get_the_answer(view: EngineView) -> None:
    start(view, "other", "late")
    view.ask("r", keys("ab"))
    view.ask("other", keys("bc"))
    question = take(view)
    assert asked(question) == "abc"
    view.ask("late", keys("a"))
    assert asked(take(view)) == ""
    apply(view, question, replicas=told(question))
    assert look(view, "ab") == [MISS, MISS]
    assert look(view, "bc", request="other") == [MISS, MISS]
    assert look(view, "a", request="late") == [MISS]
    assert view.counter_values()["chunks_asked"] == 3


def test_questions_go_out_page_by_page_and_no_request_begins_with_too_many(
    view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.view, "MAX_ASKED", 10)
    view.ask("r", keys("abcdefghijklm"))
    start(view, "other")
    view.ask("other", keys("nopqr"))
    assert [asked(take(view)) for _ in range(3)] == ["abcdefghij", "nopqr", ""]


def test_answer_deadline_counts_from_the_first_lookup_and_is_one_for_all_keys(
    view: EngineView,
) -> None:
    view.ask("r", keys("ab"))
    assert look(view, "a", now=100.0) == [RETRY]
    assert look(view, "ab", now=100.0 + QUERY_S - 0.01) == [RETRY, RETRY]
    assert look(view, "b", now=100.0 + QUERY_S) == [MISS]
    assert look(view, "c", now=100.0 + QUERY_S) == [MISS]
    start(view, "other")
    assert look(view, "a", now=100.0 + QUERY_S, request="other") == [RETRY]
    assert view.counter_values()["waits_timed_out"] == 2


def test_lost_answers_are_asked_for_again_once_the_engine_has_attached_anew(
    view: EngineView,
) -> None:
    look(view, "ab")
    question = take(view)
    view.declared_leases()
    view.attached(EngineAttached(EPOCH + 1, NODE_EPOCH, CAPACITY))
    apply(view, question, replicas=told(question, "a:one"))
    assert look(view, "ab") == [RETRY, RETRY], "that was an answer of the old epoch"
    assert asked(take(view)) == "ab"
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY))
    question = take(view)
    apply(view, question, replicas=told(question))
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY))
    assert asked(take(view)) == "", "these were answered"


def test_what_was_found_before_a_clearing_is_not_fetched_once_the_engine_has_attached_anew(
    view: EngineView,
) -> None:
    start(view, "other")
    learn(view, "ba")
    learn(view, "c", request="other")
    view.declared_leases()
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY, cleared=ord("a") + 1000))
    assert look(view, "ba") == [HIT_PENDING, MISS]
    view.declared_leases()
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY, cleared=ord("c") + 1000))
    assert look(view, "c", request="other") == [MISS]


def test_request_that_finishes_while_it_asks_leaves_nothing_behind(view: EngineView) -> None:
    start(view, "other")
    view.ask("r", keys("ab"))
    view.ask("other", keys("b"))
    question = take(view)
    view.finish_request("r")
    view.declared_leases()
    view.attached(EngineAttached(EPOCH, NODE_EPOCH, CAPACITY))
    assert asked(take(view)) == "b"
    apply(view, question, replicas=told(question, "b:one", pending="a"))
    assert not view.remote.has_repeats
    assert look(view, "b", request="other") == [HIT_PENDING]
    start(view, "r")
    assert look(view, "a") == [RETRY]
    assert asked(take(view)) == "a"


def test_lookup_of_a_request_that_was_never_started_does_not_wait_for_ever(
    view: EngineView,
) -> None:
    look(view, "a", now=100.0, request="unheard of")
    assert look(view, "a", now=100.0 + 2 * QUERY_S, request="unheard of") == [MISS]


def test_answer_that_comes_with_an_earlier_life_of_the_node_ends_the_question(
    view: EngineView,
) -> None:
    look(view, "a")
    question = take(view)
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    apply(view, question, replicas=told(question, "a:one"))
    start(view, "later")
    assert look(view, "a", request="later") == [RETRY]
    assert asked(take(view)) == "a"


# Chunks that are being stored elsewhere


def test_chunk_that_is_being_stored_elsewhere_is_waited_for_and_asked_for_again(
    view: EngineView,
) -> None:
    look(view, "ab")
    question = take(view)
    apply(view, question, replicas=told(question, pending="a"))
    assert look(view, "ab") == [HIT_PENDING, MISS]
    assert view.remote.has_repeats
    assert not view.has_news
    assert asked(take(view, may_repeat=False)) == ""
    again = take(view)
    assert asked(again) == "a"
    apply(view, again, replicas=told(again, pending="a"))
    last = take(view)
    assert asked(last) == "a"
    apply(view, last, replicas=told(last, "a:one"))
    assert not view.remote.has_repeats
    assert look(view, "a") == [HIT_PENDING]
    assert [order.key for order in view.remote.take_orders()] == keys("a")


def test_store_elsewhere_that_came_to_nothing_is_a_miss(view: EngineView) -> None:
    look(view, "a")
    for pending in ("a", ""):
        question = take(view)
        apply(view, question, replicas=told(question, pending=pending))
    assert look(view, "a") == [MISS]
    assert asked(take(view)) == ""


def test_request_waits_for_a_store_elsewhere_until_its_deadline(view: EngineView) -> None:
    look(view, "a", now=50.0)
    question = take(view)
    apply(view, question, replicas=told(question, pending="a"))
    assert look(view, "a", now=100.0) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + PENDING_S - 0.01) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + PENDING_S) == [MISS]


def test_chunk_is_no_longer_asked_for_when_nobody_waits_for_its_store(view: EngineView) -> None:
    start(view, "other")
    look(view, "a")
    look(view, "a", request="other")
    question = take(view)
    apply(view, question, replicas=told(question, pending="a"))
    view.finish_request("r")
    assert asked(take(view)) == "a"
    view.finish_request("other")
    assert asked(take(view)) == ""
    assert not view.remote.has_repeats


def test_repeated_questions_come_after_new_ones_and_fit_into_the_page(
    view: EngineView,
) -> None:
    look(view, "ab")
    question = take(view)
    apply(view, question, replicas=told(question, pending="ab"))
    look(view, "c")
    assert [raw[:-4] for raw in view.remote.take_questions(2, may_repeat=True)] == [b"c", b"a"]


def test_own_stores_are_announced_once(view: EngineView) -> None:
    view.prepare_store("r", keys("ab"))
    assert view.has_news
    assert take(view).announced == handles("ab", [0, 1], [10, 11])
    assert take(view).announced == Handles()
    view.prepare_store("r", keys("c"))
    view.reset()
    assert take(view).announced == Handles(), "its lease has ended"


# The own node


def test_chunk_that_is_on_the_own_node_after_all_is_hit(view: EngineView) -> None:
    look(view, "ab")
    question = take(view)
    apply(view, question, replicas=told(question, "a:own,one b:own"))
    assert look(view, "ab") == [HIT, HIT]
    assert view.prepare_load(keys("a")) == [handle(ord("a"), ord("a") + 1000)]
    assert view.remote.take_orders() == []


def test_own_node_is_no_source(view: EngineView) -> None:
    look(view, "a")
    question = take(view)
    apply(view, question, replicas=told(question, "a:own,one"))
    apply(view, removed=handles("a", [ord("a")], [ord("a") + 1000]))
    assert look(view, "a") == [HIT_PENDING]
    assert view.remote.take_orders()[0].replicas == (replica("a"),)


def test_other_node_is_not_taken_for_the_own_one_because_its_life_has_the_same_number(
    view: EngineView,
) -> None:
    look(view, "a")
    question = take(view)
    answer = told(question, "a:one")
    answer.node_epochs[0] = NODE_EPOCH
    apply(view, question, replicas=answer)
    assert look(view, "a") == [HIT_PENDING]


def test_another_life_of_the_own_node_is_neither_here_nor_a_source(view: EngineView) -> None:
    look(view, "a")
    question = take(view)
    answer = told(question, "a:own")
    answer.node_epochs[0] = NODE_EPOCH - 1
    apply(view, question, replicas=answer)
    assert look(view, "a") == [MISS]


# Fetches


def test_request_joins_a_fetch_of_another_one(view: EngineView) -> None:
    orders = order_all(view, "a")
    start(view, "other")
    assert look(view, "a", request="other") == [HIT_PENDING]
    assert asked(take(view)) == ""
    assert view.remote.take_orders() == []
    finish(view, orders)
    assert look(view, "a", request="other") == [HIT]


def test_fetch_is_waited_for_until_the_requests_deadline(view: EngineView) -> None:
    orders = order_all(view, "a", now=100.0)
    assert look(view, "a", now=100.0 + FETCH_S - 0.01) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + FETCH_S) == [MISS]
    start(view, "other")
    assert look(view, "a", now=100.0 + FETCH_S, request="other") == [HIT_PENDING]
    finish(view, orders)
    assert look(view, "a", now=200.0) == [HIT]


def test_fetch_does_not_begin_after_the_requests_deadline(view: EngineView) -> None:
    order_all(view, "a", now=100.0)
    learn(view, "b")
    assert look(view, "b", now=100.0 + FETCH_S) == [MISS]
    assert view.remote.take_orders() == []


@pytest.mark.parametrize("is_answered", [True, False])
def test_failed_fetch_is_a_miss_for_those_that_knew_and_a_later_request_asks_anew(
    view: EngineView, is_answered: bool
) -> None:
    start(view, "other", "later")
    learn(view, "ab", request="other")
    orders = order_all(view, "ab")
    view.finish_fetch(orders, result(orders, refused="a") if is_answered else None)
    expected = [MISS, HIT] if is_answered else [MISS, MISS]
    assert look(view, "ab") == expected
    assert look(view, "ab", request="other") == expected
    assert look(view, "a", request="later") == [RETRY]
    assert asked(take(view)) == "a"
    assert view.counters.fetches_failed == expected.count(MISS)


def test_chunk_that_is_being_fetched_is_not_stored_as_well(view: EngineView) -> None:
    order_all(view, "a")
    plan = view.prepare_store("r", keys("ab"))
    assert plan is not None
    assert plan.keys == keys("b")
    assert take(view).touched == keys("a")


def test_other_chunks_that_a_request_knows_of_can_be_fetched_after_one_has_failed(
    view: EngineView,
) -> None:
    learn(view, "b")
    finish(view, order_all(view, "a"), refused="a")
    assert look(view, "ab") == [MISS, HIT_PENDING]


def test_chunk_that_arrived_in_a_later_life_of_the_node_is_not_loaded_before_it_is_known(
    view: EngineView,
) -> None:
    orders = order_all(view, "a")
    view.finish_fetch(orders, replace(result(orders), node_epoch=NODE_EPOCH + 1))
    assert view.num_ready == 0


def test_sources_that_have_lost_chunks_are_reported_once(view: EngineView) -> None:
    orders = order_all(view, "a")
    lost = LostReplicas([Source("one")], Keys.of([key("a")]), [1097])
    view.finish_fetch(orders, replace(result(orders), lost=lost))
    assert view.has_news
    assert take(view).lost == lost
    assert take(view).lost == LostReplicas()
    assert not view.has_news


def test_announcements_and_lost_replicas_go_out_page_by_page(view: EngineView) -> None:
    names = [Key(b"%08d" % number + bytes(4)) for number in range(MAX_KEYS)]
    for number, name in enumerate(names):
        view.remote.announce(name, handle(number, number))
    count = len(names)
    lost = LostReplicas([Source("one")] * count, Keys.of([*names]), list(range(count)))
    view.finish_fetch([], replace(result([]), lost=lost))
    pages = [take(view) for _ in range(4)]
    assert [len(page.announced) for page in pages] == [count // 2, count // 2, 0, 0]
    assert [len(page.lost.keys) for page in pages] == [count // 4] * 4
    assert [raw for page in pages for raw in page.announced.keys] == names
    assert [raw for page in pages for raw in page.lost.keys] == names


# After a reset


def test_answers_from_before_a_reset_find_nothing(view: EngineView) -> None:
    look(view, "a")
    question = take(view)
    view.reset()
    apply(view, question, replicas=told(question, "a:one,own"))
    assert look(view, "a") == [MISS]
    apply(view, cleared=1)
    assert look(view, "a") == [MISS]
    start(view, "later")
    assert look(view, "a", request="later") == [RETRY]


def test_chunks_that_were_found_before_a_reset_are_a_miss(view: EngineView) -> None:
    learn(view, "a")
    view.reset()
    apply(view, cleared=1, granted=grant((5, 30)))
    assert look(view, "a") == [MISS]


def test_answer_with_an_earlier_life_of_the_node_finds_nothing_from_before_a_reset(
    view: EngineView,
) -> None:
    look(view, "a")
    question = take(view)
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    view.reset()
    apply(view, question, replicas=told(question, "a:one"))
    apply(view, cleared=1, node_epoch=NODE_EPOCH + 1, granted=grant((5, 30)))
    assert look(view, "a") == [MISS]


def test_answer_with_an_earlier_life_of_the_node_holds_until_somebody_clears_the_namespace(
    view: EngineView,
) -> None:
    look(view, "a")
    question = take(view)
    view.node_restarted(Epoch(NODE_EPOCH + 1))
    apply(view, question, replicas=told(question, "a:one"))
    apply(view, void=True)
    apply(view, node_epoch=NODE_EPOCH + 1, granted=grant((5, 30)))
    assert look(view, "a") == [MISS]


@pytest.fixture
def mixed() -> EngineView:
    """A group of full attention and one with a window of two chunks."""
    sizes = {0: SIZE, 1: ChunkSize(num_bytes=1000, num_tokens=16, window=2)}
    settings = RemoteSettings(QUERY_S, FETCH_S, PENDING_S, sizes)
    cost = FetchCost(Rates(fetch_bytes_per_s=1000, prefill_tokens_per_s=9))
    remote = RemoteChunks(settings, cost)
    made = EngineView(EngineId("engine"), [0, 1], STORE_S, 4, remote, node_id=NodeId("own"))
    made.attached(EngineAttached(EPOCH, NODE_EPOCH, {0: 400, 1: 400}))
    apply(made, granted=Leases([0] * 4 + [1] * 4, [*range(8)], [*range(10, 18)]))
    return made


def in_window(names: str) -> list[Key]:
    """The same chunks in the group with the window."""
    return [Key(each[:-4] + b"\0\0\0\1") for each in keys(names)]


def learn_mixed(view: EngineView, full: str, window: str) -> None:
    """A request asks for the chunks "abcd"; another node has some of each group."""
    start(view, "r")
    view.ask("r", keys("abcd"))
    view.ask("r", in_window("abcd"))
    question = take(view)
    rows = [
        (position, ord(raw[:-4]))
        for position, raw in enumerate(question.asked)
        if raw[:-4].decode() in (full if raw[-1] == 0 else window)
    ]
    answer = Replicas(
        [Source("one")],
        [80],
        Numbers.of(position for position, _ in rows),
        Numbers.of([0] * len(rows)),
        Numbers.of(place for _, place in rows),
        Numbers.of(place + 1000 for _, place in rows),
    )
    apply(view, question, replicas=answer)


def test_prefix_without_a_window_is_not_fetched(mixed: EngineView) -> None:
    learn_mixed(mixed, full="abcd", window="")
    assert look(mixed, "abcd") == [MISS] * 4
    miss = mixed.requests.take_miss("r")
    assert miss is not None
    assert miss.reason is MissReason.WINDOW_MISSING
    assert not mixed.remote.take_orders()


def test_chunks_behind_what_vllm_has_itself_are_fetched_though_no_pool_has_their_beginning(
    mixed: EngineView,
) -> None:
    """vLLM asks from the end of its own hit on."""
    learn_mixed(mixed, full="bcd", window="cd")
    assert look(mixed, "bcd") == [HIT_PENDING] * 3
    assert len(mixed.remote.take_orders()) == 3


def test_beginning_that_another_node_has_too_is_not_counted_if_vllm_has_it(
    mixed: EngineView,
) -> None:
    """Two chunks and two of the window take 4 s, computing 32 tokens 3.6; all six would take 6, and
    64 tokens 7.1.
    """
    learn_mixed(mixed, full="abcd", window="cd")
    assert look(mixed, "c") == [MISS]
    assert not mixed.remote.take_orders()


def test_prefix_is_fetched_as_far_as_a_window_reaches(mixed: EngineView) -> None:
    learn_mixed(mixed, full="abcd", window="bc")
    assert look(mixed, "abc") == [HIT_PENDING] * 3
    assert [mixed.lookup("r", each, 0.0) for each in in_window("cb")] == [HIT_PENDING] * 2


def test_time_of_a_fetch_counts_what_is_needed_of_the_windows_only(mixed: EngineView) -> None:
    """Four chunks and two of the window take 6 s, computing 64 tokens 7; all eight would take 8."""
    learn_mixed(mixed, full="abcd", window="abcd")
    assert look(mixed, "a") == [HIT_PENDING]
