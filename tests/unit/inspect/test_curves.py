"""What the plots show, computed: against counting by hand and by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pandas")

from raykv import inspect
from raykv.base.errors import SettingError
from raykv.inspect.curves import stack_distances
from raykv.inspect.frames import frame
from raykv.inspect.orders import POLICIES
from raykv.inspect.traces import Trace

# Requests


def request(name: str, chunks: Sequence[str], tokens: int, **more: Any) -> dict[str, Any]:
    row = {"namespace": "space", "node_id": "node", "chunk_tokens": 32}
    return {**row, "request_id": name, "chunks": tuple(chunks), "prompt_tokens": tokens, **more}


def test_trace_numbers_chunks_and_knows_which_are_looked_up() -> None:
    rows = [request("a", ["x", "y"], 70), request("b", ["x", "z", "w"], 90), request("c", [], 9)]
    trace = inspect.trace(frame("requests", rows))
    # The third chunk of "b" is of generated tokens.
    assert trace == Trace([[0, 1], [0, 2, 3]], [2, 2], 32)
    assert (trace.num_lookups, trace.num_distinct, len(trace)) == (4, 4, 2)


def test_trace_is_of_one_namespace_and_of_those_nodes_that_are_named() -> None:
    rows = [
        request("a", ["x"], 32),
        request("b", ["x"], 32, namespace="other"),
        request("c", ["y"], 32, node_id="far"),
    ]
    known = frame("requests", rows)
    with pytest.raises(SettingError, match="2 namespaces"):
        inspect.trace(known)
    assert len(inspect.trace(known, namespace="sp")) == 2
    assert len(inspect.trace(known, namespace="sp", node="far")) == 1
    with pytest.raises(SettingError, match="0 namespaces"):
        inspect.trace(known, namespace="none")


def test_saved_trace_is_read_as_it_was(tmp_path: Path) -> None:
    trace = Trace([[0, 1], [0, 2, 3]], [2, 2], 32)
    trace.save(str(tmp_path / "trace"))
    assert inspect.read_trace(str(tmp_path / "trace"), chunk_tokens=32) == trace


@pytest.mark.parametrize("name", POLICIES)
def test_chunk_that_a_prompt_has_twice_takes_one_place(name: str) -> None:
    trace = Trace([[0, 0, 1], [2, 3, 4], [5, 6, 7], [0, 0, 1]], [3] * 4, 32)
    small, whole, unlimited = inspect.sizing(trace, 1, [3, 8], [name]).hit_tokens
    assert (small, whole) == (0, unlimited)


# Distances


def counted(uses: Sequence[int]) -> list[int]:
    found = []
    for place, chunk in enumerate(uses):
        before = [at for at in range(place) if uses[at] == chunk]
        found.append(len(set(uses[before[-1] + 1 : place])) if before else -1)
    return found


@given(uses=st.lists(st.integers(0, 12), max_size=60))
def test_stack_distances_are_those_counted_one_by_one(uses: list[int]) -> None:
    assert stack_distances(uses).tolist() == counted(uses)


def test_reuse_distances_leave_first_uses_out() -> None:
    known = inspect.reuse_distances(Trace([[0, 1], [0, 2], [1]], [2, 2, 1], 32), chunk_bytes=10)
    assert known["distance_chunks"].tolist() == [1, 2]
    assert known["distance_bytes"].tolist() == [10, 20]
    assert known["uses"].tolist() == [1, 1]
    assert known["share"].tolist() == [0.2, 0.4]


def test_prefix_tree_has_parents_before_children() -> None:
    tree = inspect.prefix_tree(Trace([[0, 1], [0, 2, 3], [4]], [2, 2, 1], 32))
    assert tree["chunk"].tolist() == [0, 1, 2, 4]
    assert tree["parent"].tolist()[1:3] == [0, 0]
    assert tree["parent"].isna().tolist() == [True, False, False, True]
    assert tree["uses"].tolist() == [2, 1, 1, 1]
    assert tree["depth"].tolist() == [0, 1, 1, 0]


# Sizes

LOOP = Trace([[chunk] for _ in range(4) for chunk in range(8)], [1] * 32, 16)
"""Eight chunks in turn: LRU finds none of them unless all have room."""


def test_sizing_says_what_pools_of_other_sizes_would_have_found() -> None:
    known = inspect.sizing(LOOP, 100, [700, 800], policies=["lru"])
    assert known["hit_rate"].tolist() == [0.0, 0.75, 0.75]
    assert known["hit_tokens"].tolist() == [0, 24 * 16, 24 * 16]
    assert known["policy"].tolist() == ["lru", "lru", "unlimited"]
    assert known["pool_bytes"].tolist() == [700, 800, 800]
    assert len(inspect.sizing(LOOP, 100, [700, 800], policies=[*POLICIES])) == 2 * len(POLICIES) + 1
    # Sizes are chosen up to where all have room.
    chosen = inspect.sizing(LOOP, 100)
    assert (chosen["pool_bytes"].min(), chosen["pool_bytes"].max()) == (100, 800)
    assert chosen["hit_rate"].is_monotonic_increasing
    # What is generated is stored and not asked for; the second prompt holds it.
    generated = inspect.sizing(Trace([[0, 1], [0, 1], [0, 1]], [1, 2, 1], 16), 1, [2])
    assert generated["hit_rate"].tolist() == [3 / 4, 3 / 4]


@pytest.mark.parametrize(
    ("chunk_bytes", "pool_bytes", "policy", "what"),
    [
        (100, [50], "lru", "no room for a chunk"),
        (0, [50], "lru", "no room for a chunk"),
        (100, [100], "best", "unknown eviction policy 'best'"),
    ],
)
def test_impossible_sizes_and_policies_are_refused(
    chunk_bytes: int, pool_bytes: list[int], policy: str, what: str
) -> None:
    with pytest.raises(SettingError, match=what):
        inspect.sizing(LOOP, chunk_bytes, pool_bytes, policies=[policy])


# Events


def event(seq: int, kind: str, node: str = "", key: str = "", **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"life": 1, "seq": seq, "event": kind, "node_id": node or None}
    if key:
        row |= {"namespace": "space", "key": key, "node_life": 1, "number": seq}
    return {**row, **more}


def test_occupancy_follows_every_kind_of_event() -> None:
    rows = [
        event(1, "LifeBegan"),
        event(2, "NodeJoined", "n"),
        event(3, "BlockStored", "n", "a"),
        event(4, "BlockStored", "m", "a"),
        event(5, "BlockStored", "n", "b"),
        event(6, "BlockStored", "n", "a"),
        event(7, "BlockRemoved", "n", "b"),
        event(8, "CacheCleared", namespace="space", history=1, floor=5),
        event(9, "BlockRemoved", "m", "a"),
        event(10, "BlockRemoved", "m", "b"),
        event(11, "NodeLost", "n"),
    ]
    known = inspect.occupancy(frame("events", rows))
    found = list(known[["seq", "node_id", "chunks"]].itertuples(index=False, name=None))
    before = [(2, "n", 0), (3, "n", 1), (4, "m", 1), (5, "n", 2), (6, "n", 2), (7, "n", 1)]
    # What is void goes when its node says so.
    assert found == [*before, (9, "m", 0), (11, "n", 0)]


def test_occupancy_begins_with_what_was_there() -> None:
    start = {"node_id": "n", "namespace": "space", "key": "a"}
    rows = [event(5, "BlockStored", "n", "b"), event(6, "LifeBegan")]
    known = inspect.occupancy(frame("events", rows), frame("chunks", [start]))
    assert known["chunks"].tolist() == [2, 0]


def test_ages_are_of_chunks_that_were_seen_to_come_and_go() -> None:
    rows = [
        event(1, "BlockRemoved", "n", "old", time_s=1.0),
        event(2, "BlockStored", "n", "a", time_s=1.5),
        event(3, "BlockStored", "n", "b", time_s=2.0),
        event(4, "BlockRemoved", "n", "b", time_s=4.0),
        event(5, "BlockRemoved", "n", "a", time_s=9.5),
        event(6, "BlockStored", "n", "c", time_s=9.5),
    ]
    known = inspect.ages_at_eviction(frame("events", rows))
    assert known["key"].tolist() == ["b", "a"]
    assert known["age_s"].tolist() == [2.0, 8.0]
    assert known["age_events"].tolist() == [1, 3]
    assert known["share"].tolist() == [0.5, 1.0]
    without_times = [{**row, "time_s": None} for row in rows]
    known = inspect.ages_at_eviction(frame("events", without_times))
    assert known["age_s"].isna().all()
    assert known["age_events"].tolist() == [1, 3]


@pytest.mark.parametrize(("cleared", "left"), [("space", []), ("", []), ("other", ["a"])])
def test_chunks_that_were_cleared_have_no_age(cleared: str, left: list[str]) -> None:
    rows = [
        event(1, "BlockStored", "n", "a", time_s=1.0),
        event(2, "CacheCleared", namespace=cleared, history=1, floor=5, time_s=2.0),
        event(3, "BlockStored", "n", "b", time_s=3.0),
        event(4, "BlockRemoved", "n", "a", time_s=4.0),
        event(5, "BlockRemoved", "n", "b", time_s=5.0),
    ]
    known = inspect.ages_at_eviction(frame("events", rows))
    assert known["key"].tolist() == ["b", *left]


def test_transfer_rates_are_between_samples_of_a_node() -> None:
    samples = [(1.0, "n", 10), (1.0, "m", 7), (3.0, "n", 30), (4.0, "n", 5), (5.0, "n", 6)]
    still = {"bytes_loaded": 0, "bytes_fetched": 0, "bytes_sent": 0}
    rows = [
        {"time_s": at, "node_id": node, "bytes_stored": stored, **still}
        for at, node, stored in samples
    ]
    known = inspect.transfer_rates(frame("transfers", rows))
    assert known["time_s"].tolist() == [3.0, 5.0]
    assert known["bytes_stored"].tolist() == [10.0, 1.0]
