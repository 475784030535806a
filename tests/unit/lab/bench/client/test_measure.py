"""What is chosen, and what is refused before anything is started."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from raykv.base.errors import SettingError
from raykv.lab.bench.client import run
from raykv.lab.bench.client.measure import (
    USUAL,
    asked_sizes,
    chosen_systems,
    chosen_workloads,
    environment,
    in_turn,
)
from raykv.lab.bench.client.systems import Site
from raykv.lab.bench.client.workloads import SCRIPT
from raykv.lab.bench.report import ClientOptions, Options

NOTHING = ClientOptions()


def names(asked: ClientOptions, trace: str | None = None) -> list[str]:
    return [load.name for load in chosen_workloads(asked, USUAL, trace)]


def trace_in(folder: Path, **changed: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [1, 2], **changed}
    path = folder / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return str(path)


def test_workloads_are_all_whose_files_are_given(tmp_path: Path) -> None:
    assert names(NOTHING) == ["prefix_repetition", "random"]
    assert names(NOTHING, trace_in(tmp_path)) == ["timed_trace", "prefix_repetition", "random"]
    (tmp_path / SCRIPT).touch()
    asked = ClientOptions(multi_turn=tmp_path)
    assert names(asked) == ["prefix_repetition", "random", "multi_turn"]
    assert names(replace(asked, workloads=("multi_turn",))) == ["multi_turn"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (ClientOptions(workloads=("sharegpt",)), "--workload sharegpt: there are timed_trace"),
        (ClientOptions(workloads=("timed_trace",)), "name the trace with --trace"),
        (ClientOptions(workloads=("multi_turn",)), "with --multi-turn"),
        (ClientOptions(workloads=("multi_turn",), multi_turn=Path("/nowhere")), SCRIPT),
        (ClientOptions(systems=("mooncake",)), "--system mooncake: there are plain"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(
    asked: ClientOptions, said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        run(Options(client=asked))


def test_lmcache_alone_is_refused_where_it_is_not_installed() -> None:
    asked = ClientOptions(systems=("lmcache",), lmcache_python="/no/python")
    with pytest.raises(SettingError, match="/no/python does not have it"):
        run(Options(client=asked))


def test_trace_without_times_is_refused(tmp_path: Path) -> None:
    path = trace_in(tmp_path, timestamp=None)
    with pytest.raises(SettingError, match="line 1: must have"):
        run(Options(traces=(path,)))


def test_trace_of_requests_that_are_all_too_long_is_refused(tmp_path: Path) -> None:
    path = trace_in(tmp_path, input_length=200_000)
    with pytest.raises(SettingError, match="short enough"):
        run(Options(traces=(path,)))


def test_systems_are_all_unless_some_are_named() -> None:
    assert chosen_systems(NOTHING) == ["plain", "native", "lmcache", "raykv"]
    assert chosen_systems(ClientOptions(systems=("raykv", "plain"))) == ["plain", "raykv"]


def test_sizes_are_the_usual_ones_unless_they_are_given() -> None:
    assert asked_sizes(NOTHING, quick=False) == USUAL
    asked = ClientOptions(num_requests=5, rate=0.5, divisor=1, kv_blocks=1025)
    assert asked_sizes(asked, quick=True).max_tokens == 131_072
    assert asked_sizes(asked, quick=False) == asked_sizes(asked, quick=True)


def test_kv_memory_that_does_not_hold_the_longest_request_is_refused() -> None:
    assert asked_sizes(ClientOptions(kv_blocks=33), quick=False).kv_blocks == 33
    with pytest.raises(SettingError, match="a request of 4,096 tokens needs 33"):
        asked_sizes(ClientOptions(kv_blocks=32), quick=False)


def test_each_repeat_begins_with_another_system() -> None:
    assert in_turn(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert in_turn(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_all_servers_on_a_cpu_have_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    site = Site("model", 1, 4096, 48, 1 << 30, is_cpu=True)
    cores = sorted(os.sched_getaffinity(0))
    bound = environment(site)["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert bound == [str(core) for core in cores[:-1] or cores]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(replace(site, is_cpu=False))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert environment(site)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
