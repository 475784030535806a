"""Requests of traces and of synthetic agents: the same for the same seed, in order, at a load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.lab.bench.simulation.hardware import TOKENS, Hardware
from raykv.lab.bench.simulation.workload import Workload, agents, from_trace

LIMIT = 100_000


def row(at: int, chunks: list[int], **fields: object) -> str:
    tokens = len(chunks) * TOKENS
    base = {"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": chunks}
    return json.dumps(base | fields)


def write(folder: Path, *lines: str) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def seen(workload: Workload) -> list[object]:
    return [(e.at, e.num_tokens, e.output_tokens, e.follows, *e.chunks) for e in workload.requests]


def test_request_follows_the_one_whose_prompt_it_continues(tmp_path: Path) -> None:
    lines = [row(0, [1, 2, 3]), row(10, [1, 7, 8]), row(20, [1, 2, 9, 10]), row(30, [4])]
    made = from_trace(write(tmp_path, *lines), 10, 1, 0, LIMIT)
    assert [each.follows for each in made.requests] == [None, None, 0, None]
    # A chunk in which the last token is has to be computed.
    assert [len(each.chunks) for each in made.requests] == [2, 2, 3, 0]


def test_sessions_of_a_trace_are_copied_with_chunks_of_their_own(tmp_path: Path) -> None:
    lines = [row(at, [0] * n, session="a") for n, at in enumerate((0, 5000, 9000), 2)]
    made = from_trace(write(tmp_path, *lines), 60, 1, 3, LIMIT)
    assert [each.at for each in made.requests] == sorted(each.at for each in made.requests)
    firsts = [int(each.chunks[0]) for each in made.requests if each.follows is None]
    assert len(firsts) == len(set(firsts)) >= 20
    for each in made.requests:
        if each.follows is not None:
            before = made.requests[each.follows]
            assert before.chunks[0] == each.chunks[0]
            assert round(each.at - before.at, 6) in (5.0, 4.0)


def test_prompt_that_the_model_does_not_take_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, row(0, [1, 2]), row(9, [3] * 300), row(11, [4]))
    assert len(from_trace(path, 10, 1, 0, LIMIT).requests) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1: is not JSON"),
        ('{"hash_ids": [1]}', "line 1: must have `hash_ids`, a list, and the numbers"),
        ("3", "line 1: must have `hash_ids`, a list, and the numbers"),
        (row(0, [1], input_length="x"), "line 1: must have `hash_ids`, a list, and the numbers"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        from_trace(write(tmp_path, line), 10, 1, 0, LIMIT)


def test_agents_are_the_same_for_the_same_seed_only() -> None:
    first, again, other = agents(200, 2, 1), agents(200, 2, 1), agents(200, 2, 2)
    assert seen(first) == seen(again) != seen(other)
    assert all(e.follows is None or e.follows < n for n, e in enumerate(first.requests))
    assert max(int(e.chunks.max()) for e in first.requests) < first.num_chunks


def test_load_is_the_share_of_all_replicas_time_that_the_work_takes() -> None:
    hardware = Hardware()
    made = agents(200, 2, 1)
    moved = made.at_load(0.5, 2, hardware)
    assert moved.requests[-1].at == pytest.approx(made.work_s(2, hardware))
    assert made.at_load(1.0, 2, hardware).requests[-1].at == pytest.approx(
        moved.requests[-1].at / 2
    )


def test_trace_without_a_request_that_fits_is_refused(tmp_path: Path) -> None:
    line = json.dumps({"hash_ids": [1], "input_length": 9, "output_length": 1, "timestamp": 0})
    with pytest.raises(SettingError, match="no request in it has 9 tokens or fewer"):
        from_trace(write(tmp_path, line), 10, 1, 0, 9)
    with pytest.raises(SettingError, match="can't be read"):
        from_trace(str(tmp_path / "nowhere"), 10, 1, 0, 9)
