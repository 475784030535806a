"""Chunks of other nodes in the engine's view: asked for, waited for, fetched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raykv.base.ids import Key, Lookup, MissReason, NodeId, Refusal, Stamp, in_group
from raykv.engine.remote import (
    MAX_WONDERED,
    ChunkSize,
    FetchOrder,
)
from raykv.engine.requests import PREFILLED_REPEATS, RequestOptions, Tier
from raykv.engine.view import EngineView
from raykv.protocol.listing import Where
from tests.fixtures.engine.views import (
    HERE,
    STORE_S,
    HeardPlace,
    asked,
    keys,
    look,
    made,
    measured,
    reason,
    row,
    source_of,
    told,
)
from tests.fixtures.keys import named_key as key

HIT, MISS, HIT_PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY
QUERY_S, PENDING_S, FETCH_S = 1.0, STORE_S, 10.0
SIZE = ChunkSize(num_bytes=1000, num_tokens=16)
A, B, C = keys("abc")


@pytest.fixture
def place() -> HeardPlace:
    """It has peers; its view has the request "r"."""
    _, (place,) = made(HERE, sizes={0: SIZE})
    place.has_peers = True
    place.says()
    return place


@pytest.fixture
def view(place: HeardPlace) -> EngineView:
    return place.view


def start(view: EngineView, *requests: str) -> None:
    for request in requests:
        view.start_request(request, RequestOptions())


def answer(view: EngineView, where: str = "", coming: str = "") -> str:
    """What is asked for is answered, `where` "a:one b:one,two/disk"; the letters that it was."""
    question = asked(view)
    pairs = (word.split(":") for word in where.split())
    places = {key(letter): nodes.replace(",", " ") for letter, nodes in pairs}
    told(view, question, places, [each for each in keys(coming) if each in question])
    view.check()
    return letters(question)


def letters(some: Sequence[bytes]) -> str:
    return "".join(each[:-4].decode() for each in some)


def learn(view: EngineView, names: str, request: str = "r") -> None:
    """A request asks for what is on the node "one", and is told so."""
    view.ask(request, keys(names))
    answer(view, " ".join(f"{name}:one" for name in names))


def order_all(view: EngineView, names: str, now: float = 0.0) -> list[FetchOrder]:
    """Fetches that are under way, of what is on the node "one"."""
    learn(view, names)
    assert look(view, names, now) == [HIT_PENDING] * len(names)
    return view.remote.take_orders()


def finish(place: HeardPlace, orders: Sequence[FetchOrder], refused: str = "") -> None:
    """All chunks arrived, except for the letters `refused`."""
    missing = {
        at: Refusal.NOT_HERE for at, each in enumerate(orders) if letters([each.key]) in refused
    }
    came = [row(each.key) for at, each in enumerate(orders) if at not in missing]
    place.view.finish_fetch(orders, [place.result(*came, failed=missing)], 0.0)
    place.view.check()


# The life of a fetched chunk


def test_chunk_of_another_node_is_asked_for_fetched_and_hit(
    place: HeardPlace, view: EngineView
) -> None:
    view.start_request("r", RequestOptions(tenant="team"))
    view.ask("r", keys("a"))
    assert view.remote.has_news
    assert look(view, "a") == [RETRY]
    assert answer(view, "a:one,two") == "a"
    assert view.remote.take_orders() == [], "nothing is fetched before somebody wants it"
    assert look(view, "a") == [HIT_PENDING]
    (order,) = view.remote.take_orders()
    assert order == FetchOrder(A, SIZE.num_bytes, ((source_of("one"), source_of("two")),), "team")
    assert look(view, "a") == [HIT_PENDING]
    assert view.remote.take_orders() == []
    finish(place, [order])
    assert look(view, "a") == [HIT]
    counters = view.counter_values()
    assert (counters["chunks_asked"], counters["chunks_fetched"]) == (1, 1)
    assert counters["fetches_failed"] == 0


@pytest.mark.parametrize(
    ("tier", "fetched"),
    [
        (Tier(is_disk=False, is_remote=True), "one"),
        (Tier(is_disk=True, is_remote=True), "two/disk"),
    ],
    ids=str,
)
def test_chunk_is_fetched_from_where_its_request_allows_alone(
    place: HeardPlace, view: EngineView, tier: Tier, fetched: str
) -> None:
    view.start_request("r", RequestOptions(tiers=frozenset({tier})))
    view.start_request("none", RequestOptions(tiers=frozenset()))
    for request in ("r", "none"):
        view.ask(request, keys("a"))
    answer(view, "a:one,two/disk")
    assert look(view, "a", request="none") == [MISS]
    assert reason(view, "none") is MissReason.OPTED_OUT
    assert look(view, "a") == [HIT_PENDING]
    (order,) = view.remote.take_orders()
    assert order.sources == ((source_of(fetched),),)
    finish(place, [order])
    assert look(view, "a", request="none") == [HIT], "it is in the own pool now"


@pytest.mark.parametrize(("is_remote", "found"), [(False, HIT_PENDING), (True, MISS)])
def test_own_disk_is_a_tier(
    place: HeardPlace, view: EngineView, is_remote: bool, found: Lookup
) -> None:
    tier = Tier(is_disk=True, is_remote=is_remote)
    place.has_peers = False
    place.says(row(A, Where.DISK))
    view.start_request("r", RequestOptions(tiers=frozenset({tier})))
    assert look(view, "a") == [found]


def test_lookup_asks_what_was_not_asked_before_by_its_request(view: EngineView) -> None:
    assert look(view, "a") == [RETRY]
    assert asked(view) == [A]
    assert look(view, "a") == [RETRY]
    assert answer(view) == ""
    told(view, [A], {})
    assert look(view, "a") == [MISS]
    assert asked(view) == []
    start(view, "later")
    assert look(view, "a", request="later") == [RETRY]
    assert asked(view) == [A]


# Prompts that another engine has just computed


def prefilled(view: EngineView, names: str, request: str = "p") -> None:
    """A request whose prompt was computed elsewhere asks for its chunks."""
    view.start_request(request, RequestOptions(prefilled=True))
    view.ask(request, keys(names))


def test_prefilled_request_waits_for_an_announcement_that_is_late(view: EngineView) -> None:
    prefilled(view, "ab")
    answer(view, "a:one")
    assert look(view, "ab", request="p") == [HIT_PENDING, RETRY]
    assert view.remote.has_repeats
    assert answer(view, coming="b") == "b"
    assert look(view, "b", request="p") == [HIT_PENDING]
    answer(view)
    assert look(view, "b", request="p") == [RETRY], "its store has failed"
    answer(view, "b:one")
    assert look(view, "b", request="p") == [HIT_PENDING]
    assert [order.key for order in view.remote.take_orders()] == keys("ab")
    assert not view.remote.has_repeats


def test_prefilled_request_believes_in_the_end_that_nobody_has_its_chunks(
    view: EngineView,
) -> None:
    prefilled(view, "ab")
    for _ in range(PREFILLED_REPEATS):
        assert answer(view) == "ab"
        assert look(view, "ab", request="p") == [RETRY, RETRY]
    answer(view)
    assert look(view, "ab", request="p") == [MISS, MISS]
    assert asked(view) == []


def test_prefilled_request_asks_although_no_peers_are_known(
    place: HeardPlace, view: EngineView
) -> None:
    place.has_peers = False
    place.says()
    prefilled(view, "a")
    assert asked(view) == [A]


def test_prefilled_request_does_not_outwait_the_deadline_for_answers(view: EngineView) -> None:
    prefilled(view, "a")
    assert look(view, "a", 0.0, "p") == [RETRY]
    answer(view)
    assert look(view, "a", QUERY_S - 0.1, "p") == [RETRY]
    assert look(view, "a", QUERY_S, "p") == [MISS]


def test_other_requests_do_not_doubt_an_answer(view: EngineView) -> None:
    view.ask("r", keys("a"))
    prefilled(view, "a")
    answer(view)
    assert look(view, "a", request="r") == [MISS]
    assert look(view, "a", request="p") == [RETRY]
    view.finish_request("p")
    assert asked(view) == []


def test_prefilled_prompt_is_fetched_although_computing_is_faster(view: EngineView) -> None:
    view.remote.cost = measured(1.0, 1e9)
    prefilled(view, "a")
    view.ask("r", keys("b"))
    answer(view, "a:one b:one")
    assert look(view, "b", request="r") == [MISS]
    assert reason(view) is MissReason.FETCH_SLOWER
    assert look(view, "a", request="p") == [HIT_PENDING]


# Asking


def test_reasons_are_asked_for_of_few_chunks_only(place: HeardPlace, view: EngineView) -> None:
    place.has_peers = False
    place.says()
    many = [in_group(Key(bytes([number]) * 8), 0) for number in range(MAX_WONDERED + 10)]
    for name in many:
        assert view.lookup("r", name, 0.0) is MISS
        assert view.lookup("stranger", name, 0.0) is MISS
    assert asked(view) == many[:MAX_WONDERED]


def test_nobody_is_asked_and_nothing_is_announced_without_peers(
    place: HeardPlace, view: EngineView
) -> None:
    place.has_peers = False
    place.says()
    view.ask("r", keys("ab"))
    assert not view.remote.has_news
    assert look(view, "a") == [MISS]
    assert (asked(view), asked(view)) == ([A], []), "for the reason alone"
    view.prepare_store("r", keys("c"))
    assert view.remote.take_announced(10) == []
    assert view.counter_values()["chunks_asked"] == 0
    place.has_peers = True
    place.says()
    assert look(view, "a") == [RETRY], "somebody has come"


def test_only_what_the_own_node_lacks_is_asked_for(place: HeardPlace, view: EngineView) -> None:
    place.says(row(A), row(C), row(key("f"), Where.DISK))
    view.ask("r", [A, C])
    assert not view.remote.has_questions
    view.prepare_store("r", keys("d"))
    view.ask("r", keys("abcdef"))
    assert letters(asked(view)) == "be"


def test_request_that_does_not_load_or_is_unknown_or_a_paused_view_asks_nobody(
    place: HeardPlace, view: EngineView
) -> None:
    view.start_request("no", RequestOptions(load=False))
    view.ask("no", keys("a"))
    assert look(view, "a", request="no") == [MISS]
    assert reason(view, "no") is MissReason.OPTED_OUT
    view.ask("unheard of", keys("a"))
    place.says(is_paused=True)
    view.ask("r", keys("a"))
    assert look(view, "a") == [MISS]
    assert asked(view) == []


def test_key_is_asked_for_once_by_a_request_before_and_after_the_answer(view: EngineView) -> None:
    view.ask("r", keys("ab"))
    view.ask("r", keys("bc"))
    assert answer(view, "a:one") == "abc"
    view.ask("r", keys("abc"))
    assert asked(view) == []
    assert view.counter_values()["chunks_asked"] == 3


def test_requests_ask_together_and_all_get_the_answer(view: EngineView) -> None:
    start(view, "other", "late")
    view.ask("r", keys("ab"))
    view.ask("other", keys("bc"))
    question = asked(view)
    assert letters(question) == "abc"
    view.ask("late", keys("a"))
    assert asked(view) == []
    told(view, question, {})
    assert look(view, "ab") == [MISS, MISS]
    assert look(view, "bc", request="other") == [MISS, MISS]
    assert look(view, "a", request="late") == [MISS]
    assert view.counter_values()["chunks_asked"] == 3


def test_no_request_begins_with_too_many_questions(
    view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.engine.remote.MAX_ASKED", 10)
    view.ask("r", keys("abcdefghijklm"))
    start(view, "other")
    view.ask("other", keys("nopqr"))
    pages = [view.remote.take_questions(10, may_repeat=True) for _ in range(3)]
    assert [*map(letters, pages)] == ["abcdefghij", "nopqr", ""]


def test_answer_deadline_counts_from_the_first_lookup_and_is_one_for_all_keys(
    view: EngineView,
) -> None:
    view.ask("r", keys("ab"))
    assert look(view, "a", now=100.0) == [RETRY]
    assert look(view, "ab", now=100.0 + QUERY_S - 0.01) == [RETRY, RETRY]
    assert look(view, "b", now=100.0 + QUERY_S) == [MISS]
    assert reason(view) is MissReason.UNANSWERED
    assert look(view, "c", now=100.0 + QUERY_S) == [MISS]
    start(view, "other")
    assert look(view, "a", now=100.0 + QUERY_S, request="other") == [RETRY]
    assert view.counter_values()["waits_timed_out"] == 2


def test_request_that_finishes_while_it_asks_leaves_nothing_behind(view: EngineView) -> None:
    start(view, "other")
    view.ask("r", keys("ab"))
    view.ask("other", keys("b"))
    question = asked(view)
    view.finish_request("r")
    told(view, question, {B: "one"}, [A])
    assert not view.remote.has_repeats
    assert look(view, "b", request="other") == [HIT_PENDING]
    start(view, "r")
    assert look(view, "a") == [RETRY]
    assert asked(view) == [A]


def test_lookup_of_a_request_that_was_never_started_does_not_wait_for_ever(
    view: EngineView,
) -> None:
    look(view, "a", now=100.0, request="unheard of")
    assert look(view, "a", now=100.0 + 2 * QUERY_S, request="unheard of") == [MISS]


# Chunks that are being stored elsewhere


def test_chunk_that_is_being_stored_elsewhere_is_waited_for_and_asked_for_again(
    view: EngineView,
) -> None:
    look(view, "ab")
    answer(view, coming="a")
    assert look(view, "ab") == [HIT_PENDING, MISS]
    assert view.remote.has_repeats
    assert not view.remote.has_news
    assert asked(view, may_repeat=False) == []
    assert answer(view, coming="a") == "a"
    assert answer(view, "a:one") == "a"
    assert not view.remote.has_repeats
    assert look(view, "a") == [HIT_PENDING]
    assert [order.key for order in view.remote.take_orders()] == [A]


def test_store_elsewhere_that_came_to_nothing_is_a_miss(view: EngineView) -> None:
    look(view, "a")
    for coming in ("a", ""):
        answer(view, coming=coming)
    assert look(view, "a") == [MISS]
    assert asked(view) == []


def test_chunk_is_no_longer_asked_for_when_nobody_waits_for_its_store(view: EngineView) -> None:
    start(view, "other")
    for request in ("r", "other"):
        look(view, "a", request=request)
    answer(view, coming="a")
    for request, repeated in (("r", [A]), ("other", [])):
        view.finish_request(request)
        assert asked(view) == repeated
    assert not view.remote.has_repeats


def test_request_waits_for_a_store_elsewhere_until_its_deadline(view: EngineView) -> None:
    look(view, "a", now=50.0)
    answer(view, coming="a")
    assert look(view, "a", now=100.0) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + PENDING_S - 0.01) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + PENDING_S) == [MISS]
    assert reason(view) is MissReason.PENDING_TOO_LONG


def test_repeated_questions_come_after_new_ones_and_fit_into_the_page(
    view: EngineView,
) -> None:
    look(view, "ab")
    answer(view, coming="ab")
    look(view, "c")
    assert letters(view.remote.take_questions(2, may_repeat=True)) == "ca"


def test_own_stores_are_announced_once_and_page_by_page(view: EngineView) -> None:
    view.prepare_store("r", keys("ab"))
    assert view.remote.has_news
    assert [view.remote.take_announced(1) for _ in range(3)] == [[A], [B], []]
    view.prepare_store("r", keys("c"))
    view.reset()
    assert view.remote.take_announced(10) == [], "it is void"


# Fetches


def test_fetch_is_waited_for_until_the_requests_deadline(
    place: HeardPlace, view: EngineView
) -> None:
    orders = order_all(view, "a", now=100.0)
    assert look(view, "a", now=100.0 + FETCH_S - 0.01) == [HIT_PENDING]
    assert look(view, "a", now=100.0 + FETCH_S) == [MISS]
    assert reason(view) is MissReason.FETCH_FAILED
    start(view, "other")
    assert look(view, "a", now=100.0 + FETCH_S, request="other") == [HIT_PENDING], "it joins"
    assert (asked(view), view.remote.take_orders()) == ([], [])
    finish(place, orders)
    assert look(view, "a", request="other") == [HIT]
    assert look(view, "a", now=200.0) == [HIT]


def test_fetch_does_not_begin_after_the_requests_deadline(view: EngineView) -> None:
    order_all(view, "a", now=100.0)
    learn(view, "b")
    assert look(view, "b", now=100.0 + FETCH_S) == [MISS]
    assert reason(view) is MissReason.FETCH_FAILED
    assert view.remote.take_orders() == []


@pytest.mark.parametrize("is_answered", [True, False])
def test_failed_fetch_is_a_miss_for_those_that_knew_and_a_later_request_asks_anew(
    place: HeardPlace, view: EngineView, is_answered: bool
) -> None:
    start(view, "other", "later")
    learn(view, "ab", request="other")
    orders = order_all(view, "ab")
    if is_answered:
        finish(place, orders, refused="a")
    else:
        view.finish_fetch(orders, [None], 0.0)
    expected = [MISS, HIT] if is_answered else [MISS, MISS]
    assert look(view, "ab") == expected
    assert look(view, "ab", request="other") == expected
    assert look(view, "a", request="later") == [RETRY]
    assert asked(view) == [A]
    assert view.counters["fetches_failed"] == expected.count(MISS)


def test_chunk_that_is_being_fetched_is_not_stored_as_well(view: EngineView) -> None:
    order_all(view, "a")
    assert view.prepare_store("r", keys("ab")) == [B]
    assert [*view.found.take().keys] == [A]


def test_other_chunks_that_a_request_knows_of_can_be_fetched_after_one_has_failed(
    place: HeardPlace, view: EngineView
) -> None:
    learn(view, "b")
    finish(place, order_all(view, "a"), refused="a")
    assert look(view, "ab") == [MISS, HIT_PENDING]


def test_late_end_of_a_fetch_that_was_forgotten_does_not_end_the_next_one(
    place: HeardPlace, view: EngineView
) -> None:
    orders = order_all(view, "a")
    view.move(0, HERE, 0.0)
    place.says()
    view.set_line(0, place.life, 0.0)
    start(view, "later")
    view.ask("later", [A])
    answer(view, "a:one")
    assert look(view, "a", request="later") == [HIT_PENDING]
    view.finish_fetch(orders, [place.result(failed={0: Refusal.CORRUPT})], 0.0)
    assert look(view, "a", request="later") == [HIT_PENDING]


# After a reset


def test_chunks_that_were_found_before_a_reset_are_a_miss(
    place: HeardPlace, view: EngineView
) -> None:
    learn(view, "a")
    view.reset()
    assert look(view, "a") == [MISS]
    place.orders = Stamp(1, 6)
    view.cleared(view.wanted_clear, place.orders, 0.0)
    place.says()
    assert not view.is_clearing
    assert look(view, "a") == [MISS]
    start(view, "later")
    assert look(view, "a", request="later") == [RETRY]


# Windows


@pytest.fixture
def mixed() -> EngineView:
    """A group of full attention and one with a window of two chunks."""
    sizes = {0: SIZE, 1: ChunkSize(num_bytes=1000, num_tokens=16, window=2)}
    own = NodeId("own")
    view, (place,) = made(own, sizes=sizes)
    view.remote.cost = measured(1000, 9)
    place.has_peers = True
    place.says()
    return view


def in_window(names: str) -> list[Key]:
    """The same chunks in the group with the window."""
    return keys(names, 1)


def learn_mixed(view: EngineView, full: str, window: str) -> None:
    """A request asks for the chunks "abcd"; another node has some of each group."""
    start(view, "r")
    view.ask("r", keys("abcd"))
    view.ask("r", in_window("abcd"))
    told(view, asked(view), dict.fromkeys([*keys(full), *in_window(window)], "one"))


@pytest.mark.parametrize(
    ("full", "window", "wanted", "expected"),
    [
        ("bcd", "cd", "bcd", HIT_PENDING),
        ("abcd", "cd", "c", MISS),
        ("abcd", "bc", "abc", HIT_PENDING),
        ("abcd", "abcd", "a", HIT_PENDING),
    ],
    ids=["behind vLLM's own", "slower behind vLLM's own", "as far as a window", "needed alone"],
)
def test_fetch_counts_what_is_needed_of_windows_behind_what_vllm_has_itself(
    mixed: EngineView, full: str, window: str, wanted: str, expected: Lookup
) -> None:
    """vLLM asks from the end of its own hit on. A chunk takes 1 s, computing its 16 tokens 1.8:
    for two chunks and two of the window it would be 4 s instead of 3.6, for four and two 6 instead
    of 7.1, and for four and four 8.
    """
    learn_mixed(mixed, full, window)
    assert look(mixed, wanted) == [expected] * len(wanted)
    num_orders = len(wanted) if expected is HIT_PENDING else 0
    assert len(mixed.remote.take_orders()) == num_orders


def test_window_of_a_prefix_is_fetched_with_it(mixed: EngineView) -> None:
    learn_mixed(mixed, full="abcd", window="bc")
    look(mixed, "abc")
    assert [mixed.lookup("r", each, 0.0) for each in in_window("cb")] == [HIT_PENDING] * 2


def test_prefix_without_a_window_is_not_fetched(mixed: EngineView) -> None:
    learn_mixed(mixed, full="abcd", window="")
    assert look(mixed, "abcd") == [MISS] * 4
    assert reason(mixed) is MissReason.WINDOW_MISSING
    assert not mixed.remote.take_orders()
