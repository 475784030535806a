"""Which engines are at a node, and when storing does not pay for them any more."""

from __future__ import annotations

import pytest

from raykv.engine.requests import RequestOptions, StoreSampler
from raykv.node.pool.engines import (
    LEAST_REUSE,
    MIN_SAMPLE,
    PROBE_LOADS,
    PROBE_SAMPLE,
    SOME,
    ReuseGauge,
)
from raykv.protocol.descriptions import parse_groups


@pytest.mark.parametrize("capacity", [0, 10 * MIN_SAMPLE])
def test_all_is_stored_before_the_sample_is_as_large_as_the_pool(capacity: int) -> None:
    gauge = ReuseGauge(capacity)
    gauge.count(max(capacity, MIN_SAMPLE) - 1, 0)
    assert gauge.store_share == 1
    gauge.count(1, 0)
    assert gauge.store_share == SOME


def test_few_loads_are_enough() -> None:
    gauge = ReuseGauge()
    gauge.count(MIN_SAMPLE, int(LEAST_REUSE * MIN_SAMPLE) + 1)
    assert gauge.store_share == 1


def test_storing_begins_again_as_soon_as_the_few_that_are_stored_are_loaded() -> None:
    gauge = ReuseGauge()
    gauge.count(MIN_SAMPLE, 0)
    assert gauge.store_share == SOME
    gauge.capacity = 1 << 30
    gauge.count(PROBE_SAMPLE - 1, PROBE_LOADS - 1)
    assert gauge.store_share == SOME
    gauge.count(0, 1)
    assert gauge.store_share == 1


def test_few_are_stored_for_as_long_as_few_of_those_are_loaded() -> None:
    gauge = ReuseGauge()
    gauge.count(100 * MIN_SAMPLE, 0)
    for _ in range(3):
        gauge.count(PROBE_SAMPLE, int(LEAST_REUSE * PROBE_SAMPLE) - 1)
        assert gauge.store_share == SOME
    gauge.count(0, PROBE_LOADS)
    assert gauge.store_share == SOME, "far less than what was stored in vain"


def test_reuse_that_ends_is_noticed_although_there_was_much() -> None:
    gauge = ReuseGauge()
    gauge.count(MIN_SAMPLE, MIN_SAMPLE)
    samples = 0
    while gauge.store_share == 1:
        gauge.count(MIN_SAMPLE, 0)
        samples += 1
    assert 1 < samples < 10


def test_loads_of_windows_are_worth_all_that_they_save() -> None:
    groups = parse_groups("0:16/8 1:16/8")
    space = ReuseGauge(groups=groups)
    space.count(MIN_SAMPLE - 1, 0)
    # What was told first may be of long ago.
    space.told({}, {"chunks_loaded": 10**6, "loaded_tokens": 10**9})
    space.told({"loaded_tokens": 100}, {})
    assert space.loaded == 0
    # Two loads of eight chunks of each group, at the ends of prefixes of 1,600 tokens.
    before, after = {"loaded_tokens": 10}, {"loaded_tokens": 3210, "chunks_loaded": 32}
    space.told(before, after)
    assert space.loaded == 400
    space.count(1, 0)
    assert space.store_share == 1
    unknown = ReuseGauge()
    unknown.told(before, after)
    assert unknown.loaded == 32


def test_counts_that_fall_since_an_engine_began_anew_are_ignored() -> None:
    gauge = ReuseGauge()
    gauge.count(-5, -5)
    assert (gauge.stored, gauge.loaded) == (0.0, 0.0)


def test_one_request_of_so_many_stores() -> None:
    sampler = StoreSampler(is_on=True)
    sampler.share = 4
    chosen = [sampler.limit(RequestOptions()).store for _ in range(12)]
    assert chosen == [False, False, False, True] * 3
    assert sampler.num_left_out == 9
    assert sampler.is_sampling


def test_all_requests_store_when_there_is_no_choice() -> None:
    off, on = StoreSampler(is_on=False), StoreSampler(is_on=True)
    off.share = SOME
    for sampler in (off, on):
        assert all(sampler.limit(RequestOptions()).store for _ in range(20))
        assert not sampler.is_sampling
        assert sampler.num_left_out == 0


def test_request_that_must_not_store_is_none_of_those_chosen() -> None:
    sampler = StoreSampler(is_on=True)
    sampler.share = 2
    unwilling = RequestOptions(store=False)
    limits = [sampler.limit(each) for each in (RequestOptions(), unwilling, RequestOptions())]
    assert [each.store for each in limits] == [False, False, True]
