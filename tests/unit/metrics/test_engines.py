"""Engines' own numbers, added up over engines that come, repeat themselves, and go."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import MissReason, TokenSource
from raykv.metrics.engines import MAX_ENGINES, EngineTally
from raykv.metrics.reach import DistinctKeys
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS
from raykv.protocol.engine import Tell
from raykv.protocol.measures import BreakerReport, HistogramData


def message(engine: int, seq: int, **counters: int) -> Tell:
    return Tell(engine, seq, "ns", counters={"hits": 0, **counters})


def test_tokens_are_told_apart_by_source_and_add_up_to_the_prompt() -> None:
    tally = EngineTally()
    tally.take("ns", message(1, 1))
    # Series are there before anything has happened.
    assert tally.tokens == {("ns", str(source)): 0 for source in TokenSource}
    assert tally.missed() == {("ns", str(reason)): 0 for reason in MissReason}
    told = {"own_cache_tokens": 10, "loaded_tokens": 60, "fetched_tokens": 25}
    tally.take("ns", message(1, 2, prompt_tokens=100, **told))
    found = {source: count for (_, source), count in tally.tokens.items()}
    expected = {"computed": 30, "own_cache": 10, "same_node": 35, "other_node": 25, "disk": 0}
    assert found == expected


def test_engine_that_was_there_before_adds_nothing_of_the_past() -> None:
    tally = EngineTally()
    tally.take("ns", message(2, 7, prompt_tokens=1000))
    tally.take("ns", message(2, 8, prompt_tokens=1001))
    assert tally.tokens.total() == 1


def test_repetition_and_message_without_numbers_change_nothing() -> None:
    tally = EngineTally()
    assert tally.take("ns", message(1, 1))
    assert tally.take("ns", message(1, 2, prompt_tokens=5, missed_tokens_evicted=5))
    assert not tally.take("ns", message(1, 2, prompt_tokens=5, missed_tokens_evicted=5))
    assert not tally.take("ns", message(1, 1))
    assert not tally.take("ns", Tell(1, 3, "ns"))
    assert tally.take("ns", message(1, 4, prompt_tokens=6, missed_tokens_evicted=6))
    assert tally.tokens.total() == tally.missed().total() == 6


def test_reason_that_is_corrected_stands_still_until_it_is_made_up_for() -> None:
    tally = EngineTally()
    never, evicted = ("ns", str(MissReason.NEVER_STORED)), ("ns", str(MissReason.EVICTED))
    shown = []
    for seq, (one, other) in enumerate([(0, 0), (50, 0), (20, 30), (40, 30), (60, 30)], start=1):
        told = {"missed_tokens_never_stored": one, "missed_tokens_evicted": other}
        tally.take("ns", message(1, seq, **told))
        missed = tally.missed()
        shown.append((missed[never], missed[evicted]))
    assert shown == [(0, 0), (50, 0), (50, 30), (50, 30), (60, 30)]


def test_memory_of_engines_is_bounded_and_keeps_those_that_were_heard_of_last() -> None:
    tally = EngineTally()
    tally.take("ns", message(3, 1))
    for number in range(MAX_ENGINES + 5):
        tally.take("ns", message(10 + number, 1))
        if number == MAX_ENGINES // 2:
            tally.take("ns", message(3, 2))
    assert len(tally._told) == MAX_ENGINES
    tally.take("ns", message(3, 3, prompt_tokens=4))
    assert tally.tokens.total() == 4


def test_latencies_breakers_and_keys_come_from_the_same_message() -> None:
    tally = EngineTally()
    sketch = DistinctKeys()
    sketch.add([b"one", b"two"])
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    told = Tell(
        1,
        2,
        "ns",
        counters={"wanted_chunks": 8, "waits_timed_out": 3},
        latencies={LOOKUPS: HistogramData([2, *counts[1:]], 0.1)},
        breakers=BreakerReport(opened=1, failed=5, refused=7),
        wanted_keys=sketch.smallest.tobytes(),
    )
    tally.take("ns", message(1, 1))
    tally.take("ns", told)
    assert tally.reach["ns"].num_wanted == 8
    assert round(tally.reach["ns"].num_distinct) == 2
    assert tally.reach["ns"].hit_ratio > 0.7
    assert tally.lookups["ns"].data().counts[0] == 2
    assert tally.breakers == {"opened": 1, "failed": 5, "refused": 7}
    assert tally.plain["raykv_timed_out_waits_total"]["ns",] == 3


NAMES = [
    "prompt_tokens",
    "own_cache_tokens",
    "loaded_tokens",
    "fetched_tokens",
    "missed_tokens_evicted",
    "missed_tokens_never_stored",
    "missed_tokens_nonsense",
    "wanted_chunks",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2]),
            st.integers(0, 6),
            st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50)),
        ),
        max_size=12,
    )
)
def test_no_sum_ever_falls_whatever_engines_tell(told: list[tuple[int, int, Any]]) -> None:
    tally = EngineTally()
    before: Counter[Any] = Counter()
    for engine, seq, counters in told:
        tally.take("ns", message(engine, seq, **counters))
        now: Counter[Any] = Counter(tally.tokens) + Counter(tally.missed())
        now["wanted"] = tally.reach["ns"].num_wanted
        assert all(now[name] >= count for name, count in before.items()), (before, now)
        before = now
