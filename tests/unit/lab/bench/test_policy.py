"""The replay of traces: hit rates by hand, optimum included, and what is wrong with a trace."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from raykv.base.errors import SettingError
from raykv.inspect import traces
from raykv.inspect.orders import DEFAULT_POLICY, LRU, POLICIES
from raykv.inspect.trace_files import Request, read_trace
from raykv.lab.bench.policy import (
    GAP,
    LEAST_OF_LRU,
    UNIT,
    num_distinct,
    optimal_rate,
    replay,
    run,
    unlimited_rate,
)
from raykv.lab.bench.report import Options
from tests.bench.simulation.workload import from_trace
from tests.fixtures.traces import synthetic


def lru_rate(requests: list[Request], capacity: int) -> float:
    return replay(requests, LRU(), capacity)


# Three prompts of two chunks each, in turn: LRU never has what comes next.
TURNS = [[1, 2], [3, 4], [5, 6]] * 3


@pytest.mark.parametrize(
    ("requests", "capacity", "hits"),
    [
        (TURNS, 6, 12),
        (TURNS, 4, 0),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 4, 5),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 3, 4),
        ([[1, 2, 3], [4], [1, 2, 3]], 3, 2),
        ([[1, 2, 3], [1, 2, 3], [4], [1, 2, 3]], 3, 5),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2, 2),
    ],
    ids=[
        "all have room",
        "each comes back when it has just gone",
        "a fork",
        "the tail that was not used goes",
        "the tail goes first of what was never used again",
        "the tail goes first of what was used",
        "the head is stored of what has no room",
    ],
)
def test_replay_counts_the_prefix_that_is_held(
    requests: list[Request], capacity: int, hits: int
) -> None:
    assert lru_rate(requests, capacity) == hits / sum(map(len, requests))


def test_replay_counts_no_chunk_after_a_gap() -> None:
    # 2 and 3 are held, 1 is not.
    assert lru_rate([[2, 3], [1, 2, 3]], 3) == 0
    assert unlimited_rate([[2, 3], [1, 2, 3]]) == 0


def test_replay_keeps_what_a_request_has_while_it_is_stored() -> None:
    # 5 takes the place of 4, not of 1 or 2, which are older before they are touched.
    assert lru_rate([[1, 2], [4], [1, 2, 5], [1, 2, 5]], 3) == 5 / 9


def test_optimum_keeps_what_comes_next() -> None:
    # Two of three prompts have room: of the visits after the first of each, at 1, 3, 1 and 5 the
    # prompt is there, at the other two it is not.
    assert optimal_rate(TURNS, 4) == 8 / 18
    assert optimal_rate(TURNS, 6) == unlimited_rate(TURNS) == 12 / 18


def best_by_trying(requests: list[Request], capacity: int) -> float:
    """The most hits of all ways to keep chunks."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            gaps = [number for number, chunk in enumerate(request) if chunk not in held]
            found = hits + (gaps[0] if gaps else len(request))
            there = held | set(request)
            for kept in combinations(sorted(there), min(capacity, len(there))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), found)
        reached = following
    return max(reached.values()) / sum(map(len, requests))


@pytest.mark.parametrize("seed", range(20))
def test_optimum_is_the_best_of_all_ways_to_keep_chunks(seed: int) -> None:
    random = Random(seed)
    paths = [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7, 8], [6, 9]]
    requests = [random.choice(paths) for _ in range(7)]
    capacity = random.randint(1, 5)
    assert optimal_rate(requests, capacity) == best_by_trying(requests, capacity)


@pytest.mark.parametrize("kind", list(synthetic(50)))
def test_no_policy_beats_the_optimum_and_all_are_equal_with_room_for_all(kind: str) -> None:
    requests = synthetic(50)[kind]
    for name, make in POLICIES.items():
        assert 0 <= replay(requests, make(), 40) <= optimal_rate(requests, 40), name
        assert replay(requests, make(), 10**6) == unlimited_rate(requests), name


TRAFFIC = synthetic(1000)
COMES_ONCE = ("documents", "one-off prompts", "loops")
"""Much of this traffic does."""


@pytest.mark.parametrize("percent", [5, 20])
@pytest.mark.parametrize("kind", TRAFFIC)
def test_default_finds_what_lru_finds_and_more_where_much_comes_once(
    kind: str, percent: int
) -> None:
    requests = TRAFFIC[kind]
    capacity = num_distinct(requests) * percent // 100
    ours, lru = (replay(requests, POLICIES[name](), capacity) for name in (DEFAULT_POLICY, "lru"))
    least = 1.1 if kind in COMES_ONCE and percent == 5 else LEAST_OF_LRU
    assert ours >= least * lru


def test_synthetic_traces_are_the_same_each_time() -> None:
    assert synthetic(50) == synthetic(50)


@pytest.mark.parametrize("kind", list(synthetic(50)))
def test_synthetic_chunk_has_one_prefix_only(kind: str) -> None:
    parents: dict[int, int | None] = {}
    for request in synthetic(50)[kind]:
        for parent, chunk in zip([None, *request], request, strict=False):
            assert parents.setdefault(chunk, parent) == parent


def test_run_has_all_traces_sizes_and_policies_in_one_table(tmp_path: Path) -> None:
    first, second = tmp_path / "chats_trace.jsonl", tmp_path / "agents.jsonl"
    first.write_text('{"hash_ids": [1, 2]}\n\n{"hash_ids": ["a", 2]}\n' * 20)
    second.write_text('{"session": "s", "hash_ids": [1, 2]}\n' * 20)
    result = run(Options(traces=(str(first), str(second))))
    expected = {*POLICIES, "optimum", "unlimited"}
    for name in ("chats", "agents"):
        for percent in (1, 2, 5, 10, 20):
            rows = [row for row in result.rows if row.case == f"{name}, {percent} %"]
            assert {row.subject for row in rows} == expected
            assert {row.unit for row in rows} == {UNIT, GAP}
    assert len([each for each in result.verdicts if "what lru finds" in each.budget]) == 10
    console = Console(width=200, record=True)
    console.print(result.to_table())
    text = console.export_text()
    assert [UNIT in line for line in text.splitlines() if GAP in line] == [True]


def test_session_trace_with_only_new_chunks_has_whole_prompts(tmp_path: Path) -> None:
    """20 sessions of 5 turns, in the form of a published trace of agents."""
    lines = []
    for session in range(20):
        for turn in range(5):
            new = [f"{session}.{turn}.{n}" for n in range(6)]
            when = {"delay": 1000} if turn else {"timestamp": 10 * session}
            ids = [*(["system"] if turn == 0 else []), *new]
            row = {"session_id": f"s{session}", "hash_ids": ids, **when}
            lines.append(json.dumps({**row, "input_length": 512 * len(ids), "output_length": 9}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    requests = read_trace(str(path))
    assert [len(each) for each in requests[::20]] == [7, 13, 19, 25, 31]
    first, second = requests[3], requests[23]
    assert second[:7] == first
    found, whole = 19 + 20 * (7 + 13 + 19 + 25), 20 * (7 + 13 + 19 + 25 + 31)
    assert unlimited_rate(requests) == pytest.approx(found / whole)
    made = from_trace(str(path), 100, 1, 0, 100_000)
    assert max(len(each.chunks) for each in made.requests) == 30
    assert traces.read_trace(str(path), 512).num_lookups == whole


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"hash_ids": [1], "delay": 5}', "line 1: has a `delay` and no `session_id`"),
        ('{"hash_ids": [1], "session_id": [2]}', "line 1: a session must be a number or a string"),
        (
            '{"session_id": 1, "hash_ids": [1]}\n{"session_id": 1, "hash_ids": [2]}\n{"a": 1}',
            "line 3: must have `hash_ids`",
        ),
    ],
)
def test_session_trace_that_is_unclear_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SettingError, match=complaint):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"hash_ids": [1]}\n{"hash_ids": [', "line 2: is not JSON"),
        ('{"hashes": [1]}', "line 1: must have `hash_ids`"),
        ("[1]", "line 1: must have `hash_ids`"),
        ('{"hash_ids": 1}', "line 1: must have `hash_ids`"),
        ('{"hash_ids": [[1]]}', "line 1: must have `hash_ids`"),
        ("\n", "no requests"),
        ('{"hash_ids": []}', "no requests"),
    ],
)
def test_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SettingError, match=complaint):
        read_trace(str(path))


def test_missing_trace_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "nothing.jsonl"
    with pytest.raises(SettingError, match=r"nothing\.jsonl: can't be read"):
        read_trace(str(path))


def test_trace_has_a_repeated_chunk_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [7, 8, 7]}\n{"hash_ids": [7]}')
    assert read_trace(str(path)) == [[0, 1], [0]]
