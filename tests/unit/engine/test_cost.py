"""Fetch or compute: what is measured, and which of the two it speaks for."""

from __future__ import annotations

from functools import partial

import pytest

from raykv.base.ids import Key, Lookup, Refusal, TokenSource
from raykv.base.settings import Settings
from raykv.engine.cost import EXPLORE_EVERY, MIN_FETCH_BYTES, MIN_PREFILL_TOKENS, FetchCost
from raykv.engine.remote import ChunkSize, RemoteChunks
from raykv.engine.requests import RequestOptions, RequestState
from raykv.protocol.columns import Source
from tests.fixtures.engine.views import measured
from tests.fixtures.keys import named_key as key

MB = 1 << 20
NODE, DISK = TokenSource.OTHER_NODE, TokenSource.DISK
TOKENS = 100


def rates(cost: FetchCost) -> tuple[float | None, float | None]:
    return cost.bytes_per_s.get(NODE), cost.prefill_tokens_per_s


# What is preferred


def test_fetch_is_tried_while_a_rate_is_unknown() -> None:
    huge, tiny = 1 << 50, 1
    cost = FetchCost()
    assert cost.prefers_fetch({NODE: huge}, tiny, queued_bytes=huge)
    cost.fetched(NODE, MB, 1.0)
    assert cost.prefers_fetch({NODE: huge}, tiny, queued_bytes=huge)
    cost = FetchCost()
    cost.computed(1000, 1.0)
    assert cost.prefers_fetch({NODE: huge}, tiny, queued_bytes=huge)


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens", "is_fetched"),
    [
        (10 * MB, 101, True),
        (10 * MB, 100, True),
        (10 * MB, 99, False),
        (10 * MB + 1, 100, False),
        (20 * MB, 200, True),
    ],
)
def test_faster_way_is_preferred_and_of_equal_ones_the_fetch(
    num_bytes: int, num_tokens: int, is_fetched: bool
) -> None:
    cost = measured(bytes_per_s=MB, tokens_per_s=10)
    assert cost.prefers_fetch({NODE: num_bytes}, num_tokens, queued_bytes=0) == is_fetched


def test_fetches_that_are_under_way_count_against_another_one() -> None:
    cost = measured(bytes_per_s=MB, tokens_per_s=10)
    assert cost.prefers_fetch({NODE: 6 * MB}, TOKENS, queued_bytes=4 * MB)
    assert not cost.prefers_fetch({NODE: 6 * MB}, TOKENS, queued_bytes=5 * MB)


def test_every_so_many_refusals_one_fetch_is_tried_all_the_same() -> None:
    cost = measured(bytes_per_s=MB, tokens_per_s=10)
    answers = []
    for _ in range(3 * EXPLORE_EVERY):
        assert cost.prefers_fetch({NODE: MB}, TOKENS, queued_bytes=0), "that counts for no refusal"
        answers.append(cost.prefers_fetch({NODE: 100 * MB}, 1, queued_bytes=0))
    assert [number for number, fetches in enumerate(answers, start=1) if fetches] == [32, 64, 96]


# What is measured


def test_later_measurements_move_the_rate_by_a_fifth() -> None:
    cost = measured(bytes_per_s=10 * MB, tokens_per_s=1000)
    assert rates(cost) == (10 * MB, 1000), "the first one is the rate"
    cost.fetched(NODE, 20 * MB, 1.0)
    cost.computed(2000, 1.0)
    assert cost.bytes_per_s[NODE] == pytest.approx(12 * MB)
    assert cost.prefill_tokens_per_s == pytest.approx(1200)
    cost.fetched(NODE, 2 * MB, 1.0)
    assert cost.bytes_per_s[NODE] == pytest.approx(10 * MB)


@pytest.mark.parametrize(
    ("amount", "seconds"), [(-1, 1.0), (MB, 0.0), (MB, -1.0), (None, 1.0)], ids=str
)
def test_what_is_small_or_took_no_time_is_not_measured(amount: int | None, seconds: float) -> None:
    """`amount`: more than the least that is measured; None: nothing."""
    cost = FetchCost()
    for measure, least in (
        (partial(cost.fetched, NODE), MIN_FETCH_BYTES),
        (cost.computed, MIN_PREFILL_TOKENS),
        (partial(cost.fetched, DISK), MIN_FETCH_BYTES),
    ):
        measure(0 if amount is None else least + amount, seconds)
    assert (cost.bytes_per_s, cost.prefill_tokens_per_s) == ({}, None)
    cost.fetched(NODE, MIN_FETCH_BYTES, 1.0)
    cost.computed(MIN_PREFILL_TOKENS, 1.0)
    assert rates(cost) == (MIN_FETCH_BYTES, MIN_PREFILL_TOKENS)


# Who is asked: the chunks that a request has found


class Fetcher:
    """Chunks of other nodes. One of group 0 has 1000 bytes, one of group 1 has 50, each the KV of
    16 tokens.
    """

    def __init__(self, prefill_tokens_per_s: float, settings: Settings = Settings()) -> None:  # noqa: B008
        sizes = {0: ChunkSize(1000, 16), 1: ChunkSize(50, 16)}
        self.remote = RemoteChunks(settings, sizes)
        self.remote.cost = measured(1000, prefill_tokens_per_s)

    def found(self, *keys: Key) -> RequestState:
        """A request that has asked for chunks and was told where each is."""
        request = RequestState(RequestOptions(), asked=set(keys))
        request.found.update((key, ((Source("one"),),)) for key in keys)
        return request

    def look(self, request: RequestState, *keys: Key) -> list[Lookup]:
        return [self.remote.lookup(request, key, 0.0, lambda _: False) for key in keys]

    def finish_all(self, num_bytes: int = 0, seconds: float = 0.0) -> None:
        orders = self.remote.take_orders()
        self.remote.measure(orders, num_bytes, seconds)
        ended = list(self.remote.finish(orders, [Refusal.NONE] * len(orders)))
        assert ended == [(order, None) for order in orders]


A, B, C, OTHER_GROUP = key("a"), key("b"), key("c"), key("d", 1)
HIT_PENDING, MISS = Lookup.HIT_PENDING, Lookup.MISS


@pytest.mark.parametrize(
    ("prefill_tokens_per_s", "found", "expected"),
    [
        (17, (A, B, C), MISS),
        (16, (A, B, C), HIT_PENDING),
        # Bytes of each group, and tokens of one.
        (16, (A, OTHER_GROUP), MISS),
        (15, (A, OTHER_GROUP), HIT_PENDING),
    ],
)
def test_found_chunks_are_fetched_unless_computing_them_is_faster(
    prefill_tokens_per_s: float, found: tuple[Key, ...], expected: Lookup
) -> None:
    fetcher = Fetcher(prefill_tokens_per_s)
    assert fetcher.look(fetcher.found(*found), *found) == [expected] * len(found)
    fetched = found if expected is HIT_PENDING else ()
    assert [order.key for order in fetcher.remote.take_orders()] == [*fetched]
    assert fetcher.remote.fetching_bytes == sum(50 if at is OTHER_GROUP else 1000 for at in fetched)
    assert fetcher.remote.counters["fetches_declined"] == len(found) - len(fetched)


def test_decision_holds_for_what_the_request_finds_later() -> None:
    fetcher = Fetcher(prefill_tokens_per_s=16)
    first, second = fetcher.found(A, B), fetcher.found(C)
    assert fetcher.look(first, A) == [HIT_PENDING]
    assert fetcher.look(second, C) == [MISS], "behind the other one it is too slow"
    assert fetcher.look(first, B) == [HIT_PENDING]
    fetcher.finish_all()
    assert fetcher.look(second, C) == [MISS]


def test_request_that_would_not_begin_a_fetch_joins_one() -> None:
    fetcher = Fetcher(prefill_tokens_per_s=16)
    request = fetcher.found(A, B)
    fetcher.look(fetcher.found(A), A)
    assert fetcher.look(request, B, A) == [MISS, HIT_PENDING]


def test_fetches_that_have_ended_or_were_given_up_are_not_in_the_way_of_another_one() -> None:
    fetcher = Fetcher(prefill_tokens_per_s=16)
    fetcher.look(fetcher.found(A), A)
    fetcher.finish_all()
    assert fetcher.look(fetcher.found(B), B) == [HIT_PENDING]
    fetcher.remote.forget_all([])
    assert fetcher.look(fetcher.found(C), C) == [HIT_PENDING]
    assert fetcher.remote.fetching_bytes == 1000


def test_found_chunks_are_always_fetched_where_the_setting_says_so() -> None:
    fetcher = Fetcher(prefill_tokens_per_s=17, settings=Settings(always_fetch=True))
    assert fetcher.look(fetcher.found(A, B, C), A, B, C) == [HIT_PENDING] * 3
    assert fetcher.remote.counters["fetches_declined"] == 0


def test_fetches_are_measured() -> None:
    fetcher = Fetcher(prefill_tokens_per_s=16)
    fetcher.remote.cost = FetchCost()
    fetcher.look(fetcher.found(A), A)
    fetcher.finish_all(num_bytes=MB, seconds=0.5)
    assert fetcher.remote.cost.bytes_per_s[NODE] == 2 * MB


def test_disk_has_a_rate_of_its_own() -> None:
    cost = measured(bytes_per_s=1e12, tokens_per_s=1000)
    # Nothing was read yet: that is how the rate becomes known.
    assert cost.prefers_fetch({DISK: 1 << 30}, 10, 0)
    cost.fetched(DISK, 100 << 20, 1.0)
    assert cost.bytes_per_s[DISK] == 100 << 20
    assert cost.prefers_fetch({DISK: 90 << 20}, 1000, 0)
    assert not cost.prefers_fetch({DISK: 110 << 20}, 1000, 0)
    # What waits before it, and what comes from elsewhere, takes its time too.
    assert not cost.prefers_fetch({DISK: 90 << 20}, 1000, 20 << 20)
    assert cost.prefers_fetch({NODE: 1, DISK: 90 << 20}, 1000, 20 << 20)
