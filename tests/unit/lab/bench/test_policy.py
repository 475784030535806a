"""The replay of traces: hit rates by hand, optimum included, and what is wrong with a trace."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from raykv.base.errors import SettingError
from raykv.directory.table.policies import DEFAULT_POLICY, LRU
from raykv.inspect.hits import replay
from raykv.inspect.trace_files import Request, read_trace, synthetic
from raykv.lab.bench.policy import COMPARED, optimal_rate, run, unlimited_rate
from raykv.lab.bench.report import Options


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
        ([[1, 2, 3], [4], [1, 2, 3]], 3, 0),
        ([[1, 2, 3], [1, 2, 3], [4], [1, 2, 3]], 3, 5),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2, 2),
    ],
    ids=[
        "all have room",
        "each comes back when it has just gone",
        "a fork",
        "the tail that was not used goes",
        "the head of what was never used again goes first",
        "the tail goes first of what was used",
        "the head is stored of what has no room",
    ],
)
def test_replay_counts_the_prefix_that_is_held(
    requests: list[Request], capacity: int, hits: int
) -> None:
    assert lru_rate(requests, capacity) == hits / sum(map(len, requests))


def test_replay_counts_no_chunk_after_a_gap() -> None:
    # 2 and 3 are held when 1 has gone.
    assert lru_rate([[1, 2, 3], [4], [1, 2, 3]], 3) == 0
    assert unlimited_rate([[2, 3], [1, 2, 3]]) == 0


def test_replay_keeps_what_a_request_has_while_it_is_stored() -> None:
    # 5 takes the place of 4, not of 1 or 2, which are older before they are touched.
    assert lru_rate([[1, 2], [4], [1, 2, 5], [1, 2, 5]], 3) == 5 / 9


def test_optimum_keeps_what_comes_next() -> None:
    # Two of three prompts have room: of the visits after the first of each, at 1, 3, 1 and 5 the
    # prompt is there, at the other two it is not.
    assert optimal_rate(TURNS, 4) == 8 / 18
    assert optimal_rate(TURNS, 6) == unlimited_rate(TURNS) == 12 / 18


def test_optimum_does_not_keep_what_never_comes_back() -> None:
    assert optimal_rate([[1, 2], [3], [4], [1, 2]], 2) == 2 / 6
    assert lru_rate([[1, 2], [3], [4], [1, 2]], 2) == 0


def test_optimum_keeps_the_head_if_not_all_have_room() -> None:
    assert optimal_rate([[1, 2, 3], [1, 2, 3]], 2) == 2 / 6


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
    for name, make in COMPARED.items():
        assert 0 <= replay(requests, make(), 40) <= optimal_rate(requests, 40), name
        assert replay(requests, make(), 10**6) == unlimited_rate(requests), name


def test_synthetic_traces_are_the_same_each_time() -> None:
    assert synthetic(50) == synthetic(50)


@pytest.mark.parametrize("kind", list(synthetic(50)))
def test_synthetic_chunk_has_one_prefix_only(kind: str) -> None:
    parents: dict[int, int | None] = {}
    for request in synthetic(50)[kind]:
        for parent, chunk in zip([None, *request], request, strict=False):
            assert parents.setdefault(chunk, parent) == parent


def test_run_has_every_policy_and_both_budgets_at_each_capacity(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n\n{"hash_ids": ["a", 2]}\n' * 20)
    result = run(Options(trace=str(path)))
    assert {row.subject for row in result.rows} == {*COMPARED, "optimum", "unlimited"}
    assert [row.case for row in result.rows if row.subject == "lru"] == [
        f"{percent} %" for percent in (1, 2, 5, 10, 20, 40)
    ]
    assert all(len(row.values) == 1 and row.unit == "hit rate" for row in result.rows)
    assert sum(f"{DEFAULT_POLICY} at least" in each.budget for each in result.verdicts) == 6


def test_run_without_a_trace_takes_synthetic_ones() -> None:
    result = run(Options(quick=True))
    assert {row.case.partition(",")[0] for row in result.rows} == set(synthetic(50))
    assert any("of the gap" in each.budget for each in result.verdicts)


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
