"""The view over an engine's places: what a lookup says, and what is stored."""

from __future__ import annotations

from typing import Any

import pytest

import raykv.engine.found
from raykv.base.ids import (
    Blocks,
    Key,
    Lookup,
    MissReason,
    Namespace,
    NodeId,
    Refusal,
    Stamp,
    in_group,
    part_of,
)
from raykv.engine.announcements import News
from raykv.engine.found import TOUCH_S
from raykv.engine.listed import SILENT_S, EnginePlace
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Numbers, Source, SourceKind, SourceRows
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import AskAnswer, ChangesAnswer, EngineHello, PlaceFacts
from raykv.protocol.listing import (
    ListedRow,
    ListedRows,
    ListingPart,
    Reason,
    Where,
)
from tests.fixtures.engine.views import HERE, ORDERS, OURS, STORE_S, made, reason, row

HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY
BESIDE, FAR = NodeId("beside"), NodeId("far")
A, B, C, D = (in_group(Key(bytes([number]) * 8), 0) for number in range(4))
OTHER_GROUP = in_group(A, 1)


@pytest.fixture
def view() -> EngineView:
    return made(HERE)[0]


def test_chunk_is_a_hit_once_its_place_says_so_and_a_miss_once_it_is_gone() -> None:
    view, (node,) = made(HERE)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.NEVER_STORED
    node.says(row(A))
    assert view.lookup("r", A, 0.0) is HIT
    assert A in view.loadable
    node.says(row(A, Where.NOWHERE, Reason.EVICTED))
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.EVICTED
    view.check()


def test_nothing_is_loadable_before_the_workers_and_the_listing_name_one_life() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    view.set_line(0, node.life + 1, 0.0)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.NODE_LOST
    assert not view.loadable
    assert view.prepare_store("r", [B]) == []
    view.set_line(0, node.life, 0.0)
    assert view.lookup("r", A, 0.0) is HIT


def test_silent_place_has_nothing_until_it_is_heard_of_again() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    view.look(SILENT_S)
    assert view.lookup("r", A, SILENT_S) is MISS
    node.now = SILENT_S + 1
    node.says()
    assert view.lookup("r", A, node.now) is HIT


def test_store_is_pending_until_its_result_and_then_what_the_place_says() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    assert view.prepare_store("r", [A, B, C]) == [B, C]
    assert view.lookup("r", B, 0.0) is PENDING
    assert view.prepare_store("r", [B]) == [], "it is on its way"
    stored = node.result(row(B), failed={1: Refusal.COPY_FAILED})
    view.end_store(0, "r", [B, C], stored, 0.0)
    view.complete_store([B, C])
    assert view.lookup("r", B, 0.0) is HIT
    assert view.lookup("r", C, 0.0) is MISS
    assert reason(view) is MissReason.STORE_FAILED
    assert view.counters["chunks_stored"] == 1
    view.check()


def test_pending_chunk_is_waited_for_until_the_deadline_of_the_request() -> None:
    view, _ = made(HERE)
    view.prepare_store("r", [A])
    assert view.lookup("r", A, 1.0) is PENDING
    assert view.lookup("r", A, 0.9 + STORE_S) is PENDING
    assert view.lookup("r", A, 1.0 + STORE_S) is MISS
    assert reason(view) is MissReason.PENDING_TOO_LONG


def test_chunk_that_another_engine_of_the_place_stores_is_waited_for_and_not_offered() -> None:
    view, (node,) = made(HERE)
    node.says(row(A, Where.COMING, Reason.COMING))
    assert view.lookup("r", A, 0.0) is PENDING
    assert view.prepare_store("r", [A, B]) == [B]
    node.says(row(A, Where.NOWHERE, Reason.FAILED))
    assert view.prepare_store("r", [A, B]) == [A]


def test_refused_load_bars_the_chunk_for_its_request_alone_unless_it_is_gone() -> None:
    view, (node,) = made(HERE)
    node.says(row(A), row(B))
    view.start_request("s", RequestOptions())
    late = node.result(row(B, Where.NOWHERE, Reason.EVICTED), failed={0: Refusal.TOO_LATE})
    view.end_load(0, "r", [A, B], late, 0.0)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.LOAD_FAILED
    assert "r" not in view.plain_requests
    assert view.lookup("s", A, 0.0) is HIT
    assert view.lookup("s", B, 0.0) is MISS


def test_narrow_chunk_is_offered_again_and_loadable_once_it_was_replaced() -> None:
    """Other blocks were wanted than are there: as it is nobody can use it, and nobody mends it."""
    view, (node,) = made(HERE)
    narrow = ListedRow(OURS, A, Where.RAM, Blocks(2, 2), Reason.STORED)
    node.says(narrow)
    view.end_load(0, "r", [A], node.result(narrow, failed={0: Refusal.PARTIAL}), 0.0)
    view.start_request("s", RequestOptions())
    assert view.lookup("s", A, 0.0) is MISS
    assert view.prepare_store("s", [A]) == [A]
    view.end_store(0, "s", [A], node.result(row(A)), 0.0)
    view.complete_store([A])
    assert view.lookup("s", A, 0.0) is HIT


def test_chunk_that_was_replaced_stays_when_another_rank_says_late_that_it_was_narrow() -> None:
    view, (node,) = made(HERE)
    narrow = ListedRow(OURS, A, Where.RAM, Blocks(2, 2), Reason.STORED)
    node.says(narrow)
    refused = [node.result(narrow, failed={0: Refusal.PARTIAL}) for _ in range(2)]
    view.end_load(0, "r", [A], refused[0], 0.0)
    node.says(row(A))
    view.end_load(0, "r", [A], refused[1], 0.0)
    view.start_request("s", RequestOptions())
    assert view.lookup("s", A, 0.0) is HIT


def test_nothing_is_offered_behind_a_chunk_that_found_no_room_unless_it_comes() -> None:
    view, (node,) = made(HERE)
    assert view.prepare_store("r", [A]) == [A]
    view.end_store(0, "r", [A], node.result(failed={0: Refusal.NO_ROOM}), 0.0)
    view.complete_store([A])
    assert view.prepare_store("r", [B, OTHER_GROUP]) == [OTHER_GROUP], "others have their own room"
    assert view.counters["stores_without_room"] == 1
    for key in (A, B):
        assert view.lookup("r", key, 0.0) is MISS
        assert reason(view) is MissReason.POOL_FULL
    view.start_request("s", RequestOptions())
    assert view.prepare_store("s", [B]) == [B]
    node.says(row(A))
    assert view.prepare_store("r", [C]) == [C]


def test_what_is_found_or_stored_behind_is_told_with_whose_it_is() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    view.start_request("t", RequestOptions(tenant="team"))
    view.prepare_load([A], "r")
    view.prepare_store("t", [A, B])
    found = view.found.take()
    assert list(found.keys) == [A, A]
    assert list(found.tenants) == ["", "team"]
    assert not view.found


def test_what_a_request_finds_is_told_before_it_is_loaded() -> None:
    """Its own fetch, or stores of others, could take the head of its prompt meanwhile."""
    view, (node,) = made(HERE)
    node.says(row(A), row(OTHER_GROUP))
    view.start_request("t", RequestOptions(tenant="team"))
    view.ask("t", [A, B])
    view.ask("t", [OTHER_GROUP])
    found = view.found.take()
    assert (list(found.keys), list(found.tenants)) == ([A, OTHER_GROUP], ["team"] * 2)
    node.says(row(B))
    view.prepare_load([A, B, OTHER_GROUP], "t")
    assert list(view.found.take().keys) == [B], "of the others it is the same use"


def test_what_a_request_finds_is_told_again_while_it_waits() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    view.ask("r", [A, B])
    view.found.take()
    node.says(row(B))
    view.touch("r", TOUCH_S / 2)
    view.touch("stranger", TOUCH_S)
    assert not view.found
    view.touch("r", TOUCH_S)
    assert list(view.found.take().keys) == [A, B]
    view.touch("r", 1.5 * TOUCH_S)
    assert not view.found
    view.reset()
    view.touch("r", 2 * TOUCH_S)
    assert not view.found


def test_few_chunks_are_told_again_however_many_requests_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.engine.found, "MAX_ASKED", 3)
    view, (node,) = made(HERE)
    node.says(row(A), row(B))
    view.start_request("s", RequestOptions())
    for request in ("r", "s"):
        view.ask(request, [A, B])
    view.found.take()
    for request in ("r", "s"):
        view.touch(request, TOUCH_S)
    assert list(view.found.take().keys) == [A, B, A]
    view.touch("s", 2 * TOUCH_S)
    assert list(view.found.take().keys) == [A, B]


def test_touches_that_nobody_takes_are_bounded_and_the_latest_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.engine.found, "MAX_TOUCHES", 4)
    view, (node,) = made(HERE)
    many = [in_group(Key(bytes([number]) * 8), 0) for number in range(6)]
    node.says(*map(row, many))
    view.ask("r", many)
    assert list(view.found.take().keys) == many[2:]


def test_fetch_is_waited_for_as_long_as_fetches_are_though_the_place_says_it_comes() -> None:
    view, (node,) = made(HERE)
    node.has_peers = True
    node.says()
    view.ask("r", [A])
    answered(view, {A: SourceKind.POOL})
    assert view.lookup("r", A, 0.0) is PENDING
    node.says(row(A, Where.COMING, Reason.COMING))
    settings = view.settings
    assert settings.lookup_s < settings.request_deadline_s
    assert view.lookup("r", A, settings.request_deadline_s - 0.1) is PENDING
    assert view.lookup("r", A, settings.request_deadline_s) is MISS
    assert reason(view) is MissReason.FETCH_FAILED


def test_late_answer_to_an_earlier_reset_does_not_count_for_a_later_one(view: EngineView) -> None:
    view.reset()
    first = view.wanted_clear
    view.reset()
    view.cleared(first, ORDERS, 0.0)
    assert view.wanted_clear == first + 1
    assert view.is_clearing


def test_clearing_is_ordered_anew_where_the_place_has_moved(view: EngineView) -> None:
    """The orders may be those of a cluster that is gone: no place would ever show them."""
    view.reset()
    view.cleared(view.wanted_clear, ORDERS._replace(number=99), 0.0)
    assert not view.wanted_clear
    view.move(0, BESIDE, 1.0)
    assert view.wanted_clear
    assert view.is_clearing
    view.cleared(view.wanted_clear, Stamp(0, 0), 1.0)
    assert not view.is_clearing


def test_after_a_reset_nothing_is_found_or_stored_until_every_place_has_shown_its_orders() -> None:
    view, nodes = made(HERE, BESIDE)
    for node in nodes:
        node.says(row(A))
    view.reset()
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.CLEARING
    assert view.prepare_store("r", [B]) == []
    cleared = Stamp(1, 6)
    view.cleared(view.wanted_clear, cleared, 0.0)
    assert not view.wanted_clear
    nodes[0].orders = cleared
    nodes[0].says(row(A, Where.NOWHERE, Reason.CLEARED))
    assert view.is_clearing
    nodes[1].orders = cleared
    nodes[1].says(row(A, Where.NOWHERE, Reason.CLEARED))
    assert not view.is_clearing
    assert view.prepare_store("r", [B]) == [B]
    view.check()


def test_store_from_before_a_reset_is_not_waited_for(view: EngineView) -> None:
    view.prepare_store("r", [A])
    view.reset()
    view.cleared(view.wanted_clear, ORDERS, 0.0)
    assert not view.is_clearing
    assert view.lookup("r", A, 0.0) is MISS
    view.complete_store([A])
    assert view.counters["chunks_stored"] == 0


def test_every_place_has_to_have_a_chunk() -> None:
    view, (first, second) = made(HERE, BESIDE)
    first.says(row(A), row(B))
    second.says(row(A))
    assert [view.lookup("r", key, 0.0) for key in (A, B)] == [HIT, MISS]
    assert view.prepare_store("r", [A, B]) == [B], "a place that has its part says so"
    second.says(row(A, Where.NOWHERE, Reason.EVICTED), row(B))
    assert [view.lookup("r", key, 0.0) for key in (A, B)] == [MISS, HIT]
    view.check()


def test_place_that_is_paused_or_leaves_is_not_stored_to() -> None:
    view, (node,) = made(HERE)
    node.says(row(A), is_leaving=True)
    assert view.prepare_store("r", [B]) == []
    assert view.lookup("r", A, 0.0) is HIT
    node.says(is_paused=True)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.PAUSED


def test_other_weights_begin_with_nothing_and_the_old_results_count_for_nothing() -> None:
    view, (node,) = made(HERE)
    node.says(row(A))
    view.prepare_store("r", [B])
    late = node.result(row(B))
    view.leave(0.0)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.WEIGHTS_CHANGED
    view.enter(Namespace("theirs"), 0.0)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.NOT_ATTACHED
    assert not view.loadable
    assert view.is_new
    assert view.query(0).namespace == "theirs"
    assert view.query(0).position.life == 0
    node.says()
    view.end_store(0, "r", [B], late, 0.0)
    view.complete_store([B])
    assert not view.loadable
    view.check()


def answered(view: EngineView, on: dict[Key, SourceKind] | None = None, **answer: Any) -> None:
    """What is asked for is answered; `on`: it is on another node."""
    keys = [Key(each) for each in view.remote.take_questions(100, may_repeat=True)]
    there = on or {}
    sources = SourceRows.of([Source(FAR, there[key])] if key in there else [] for key in keys)
    said = [AskAnswer(1, sources, **answer)] * len(view.node_ids)
    view.take_answers(view.questions(keys, []), said)


def test_chunk_on_the_disk_of_the_own_place_is_fetched_without_a_question() -> None:
    view, (node,) = made(HERE)
    node.has_peers = True
    node.says(row(A, Where.DISK))
    view.ask("r", [A])
    assert not view.remote.has_questions
    assert view.reach("r", [A, B]) == 1
    assert view.lookup("r", A, 0.0) is PENDING
    (order,) = view.remote.take_orders()
    assert order.sources == ((Source(HERE, SourceKind.DISK),),)
    view.finish_fetch([order], [node.result(failed={0: Refusal.CORRUPT})], 0.0)
    assert view.lookup("r", A, 0.0) is RETRY, "others are asked now"
    answered(view)
    assert view.lookup("r", A, 0.0) is MISS
    assert reason(view) is MissReason.FETCH_FAILED
    view.start_request("s", RequestOptions())
    assert view.lookup("s", A, 0.0) is PENDING


@pytest.mark.parametrize("has_peers", [False, True])
def test_all_of_a_prompt_on_the_own_disk_is_known_before_the_first_lookup(
    *, has_peers: bool
) -> None:
    """Windows are looked up from the last chunk on, and none is fetched that does not complete."""
    view, (node,) = made(HERE)
    node.has_peers = has_peers
    node.says(row(A, Where.DISK), row(B, Where.DISK))
    view.ask("r", [A, B])
    assert view.reach("r", [A, B, C]) == 2


def test_chunks_that_come_and_go_are_announced_once_per_stay() -> None:
    view, (node,) = made(HERE)
    assert view.announcements is not None
    assert view.prepare_store("r", [A, B]) == [A, B]
    view.end_store(0, "r", [A, B], node.result(row(A), failed={1: Refusal.NO_ROOM}), 0.0)
    view.complete_store([A, B])
    node.says(row(A), row(C))
    assert view.announcements.take() == News([A], [], [B])
    view.prepare_load([A, C], "r")
    assert view.announcements.take() == News([C], [], [])
    node.says(row(A, Where.NOWHERE, Reason.EVICTED))
    assert view.announcements.take() == News([], [A], [])
    view.enter(Namespace("theirs"), 0.0)
    assert view.announcements.take() == News([], [C], [])


def test_chunk_that_did_not_come_to_every_place_is_a_miss() -> None:
    view, nodes = made(HERE, BESIDE)
    for node in nodes:
        node.has_peers = True
    node.says()
    view.ask("r", [A])
    answered(view, {A: SourceKind.POOL})
    view.lookup("r", A, 0.0)
    came = nodes[0].result(row(A))
    view.finish_fetch(view.remote.take_orders(), [came, None], 0.0)
    assert view.lookup("r", A, 0.0) is MISS
    assert view.counters["fetches_failed"] == 1


def test_chunk_is_found_if_each_place_has_it_or_can_get_its_part() -> None:
    view, nodes = made(HERE, BESIDE)
    for node in nodes:
        node.has_peers = True
    nodes[0].says(row(A), row(B, Where.DISK))
    nodes[1].says(row(C))
    view.ask("r", [A, B, C, D])
    asked, far = [A, B, C, D], Source("far")
    # For the first place nobody has C and D; for the other one somebody has A, B and D.
    nowhere = AskAnswer(1)
    there = AskAnswer(1, SourceRows.of([[far], [far], [], [far]]))
    view.take_answers(view.questions(asked, []), [nowhere, there])
    answers = [view.lookup("r", key, 0.0) for key in asked]
    assert answers == [PENDING, PENDING, MISS, MISS]
    own = Source(HERE, SourceKind.DISK)
    assert [order.sources for order in view.remote.take_orders()] == [
        ((), (far,)),
        ((own,), (far,)),
    ]


def test_miss_names_the_places_that_lack_what_others_have() -> None:
    view, nodes = made(HERE, BESIDE)
    nodes[0].says(row(A))
    nodes[1].says()
    for key, places in ((A, (2,)), (B, ())):
        assert view.lookup("r", key, 0.0) is MISS
        miss = view.requests.take_miss("r")
        assert miss is not None
        assert miss.places == places


def test_how_many_requests_store_the_first_place_says() -> None:
    """It has the engine's counters; to the others it seems that nothing is loaded."""
    view, nodes = made(HERE, BESIDE, stop_unused_stores=True)
    for node, share in zip(nodes, (2, 16), strict=True):
        position = view.query(node.number).position
        part = ListingPart(False, position, position, ListedRows())
        view.take(node.number, ChangesAnswer(part, PlaceFacts(ORDERS, store_share=share)), 0.0)
    assert view.sampler.share == 2


def test_place_is_asked_about_its_own_part() -> None:
    view, _ = made(HERE)
    places = [EnginePlace(node, str(at), 10 + at, (at,)) for at, node in enumerate((HERE, BESIDE))]
    view.begin(EngineHello("engine", 3, OURS), places, 0.0)
    expected = [(10, part_of(OURS, "0"), [HERE]), (11, part_of(OURS, "1"), [BESIDE])]
    asks = view.questions([A], [B])
    assert [(ask.life, ask.namespace, ask.places) for ask in asks] == expected
    queries = [view.query(at) for at in range(2)]
    assert [(query.life, query.namespace) for query in queries] == [each[:2] for each in expected]
    view.enter(Namespace("theirs"), 0.0)
    assert view.query(1).namespace == part_of("theirs", "1")


def test_answer_says_why_a_chunk_is_nowhere() -> None:
    view, (node,) = made(HERE)
    node.has_peers = True
    node.says()
    view.ask("r", [A, B, C])
    gone, cleared = Numbers.of([0]), bytes([Reason.CLEARED])
    answered(view, gone=gone, reasons=cleared, other=Numbers.of([1]), coming=Numbers())
    told = []
    for key in (A, B, C):
        assert view.lookup("r", key, 0.0) is MISS
        told.append(reason(view))
    assert told == [MissReason.CLEARED, MissReason.OTHER_NAMESPACE, MissReason.NEVER_STORED]


def test_numbers_that_are_not_there_are_passed_over(view: EngineView) -> None:
    """What a peer says may be anything."""
    far = Numbers.of([99])
    view.take_answers(
        view.questions([A], []), [AskAnswer(1, coming=far, gone=far, reasons=b"\3", other=far)]
    )
    failed = CopyResult(1, 7, 1, failed_chunks=far, refusals=bytes([Refusal.NO_ROOM]))
    view.end_store(0, "r", [A], failed, 0.0)
    view.end_load(0, "r", [A], failed, 0.0)
    assert view.lookup("r", A, 0.0) is MISS
