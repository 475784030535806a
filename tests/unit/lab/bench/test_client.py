"""What servers and clients are started with, and what is made of the files that they write."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raykv.base.errors import ClusterError, SettingError
from raykv.lab.bench import client
from raykv.lab.bench.client import (
    GAP,
    MEAN,
    ON_CPU,
    PREFIX_REPETITION,
    QUICK,
    RANDOM,
    TIMED_TRACE,
    TRACED_TOKENS,
    environment,
    loads,
    played,
    run_sweep,
    scaled,
    server,
    summed,
    sweep,
    systems_here,
    whole_conversations,
)
from raykv.lab.bench.report import Options


def requests(path: Path, *tokens: int) -> str:
    """A trace of requests with so many tokens; two and two of them begin with the same chunk."""
    rows = [
        {
            "timestamp": 1000 * number,
            "input_length": length,
            "output_length": 64,
            "hash_ids": [number // 2, 100 + number],
        }
        for number, length in enumerate(tokens)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_each_load_and_repeat_has_prompts_of_its_own_the_same_for_all_servers(
    tmp_path: Path,
) -> None:
    traced = played(requests(tmp_path / "trace.jsonl", 1024, 1024), ON_CPU, 2)
    plays = loads(tmp_path, ON_CPU, 2, traced)
    kinds = (PREFIX_REPETITION, RANDOM, TIMED_TRACE)
    assert list(plays) == ["warm-up-0", *(f"{name}-{n}" for n in range(2) for name in kinds)]
    seeds = [flags["seed"] for flags in plays.values()]
    assert len(set(seeds)) == len(seeds)
    chunks = [
        {
            name
            for line in Path(path).read_text().splitlines()
            for name in json.loads(line)["hash_ids"]
        }
        for path in (plays[f"timed_trace-{n}"]["dataset-path"] for n in range(2))
    ]
    assert [len(each) for each in chunks] == [3, 3]
    assert not chunks[0] & chunks[1]
    assert "timed_trace-0" not in loads(tmp_path, ON_CPU, 1, [])


def test_trace_is_played_with_lengths_divided_at_the_rate_without_what_is_too_long(
    tmp_path: Path,
) -> None:
    path = requests(tmp_path / "trace.jsonl", 1024, 2048, 1024, 200_000, 512, 3200)
    (rows,) = played(path, ON_CPU, 1)
    assert [row["input_length"] for row in rows] == [32, 64, 32, 16, 100]
    assert {row["output_length"] for row in rows} == {2}
    assert [row["timestamp"] for row in rows] == pytest.approx([0, 2, 4, 8, 10])
    flags = loads(tmp_path, ON_CPU, 1, [rows])["timed_trace-0"]
    assert (flags["num-prompts"], flags["timed-trace-chunk-hash-size"]) == (5, 16)
    assert flags["timed-trace-sec-multiplier"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ('{"hash_ids": [1]}', "line 1: must have `hash_ids`, a list, and the numbers"),
        (
            '{"hash_ids": [1], "timestamp": 0, "input_length": 200000, "output_length": 1}',
            "at most 131,072 tokens",
        ),
    ],
)
def test_trace_that_can_not_be_played_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(client, "require", lambda *_: None)
    monkeypatch.setattr(client, "find_model", pytest.fail)
    with pytest.raises(SettingError, match=words):
        client.run(Options(traces=(str(path),)))


@pytest.mark.parametrize("sizes", [ON_CPU, QUICK])
def test_prefixes_that_come_again_do_not_fit_into_the_kv_memory(sizes: Any, tmp_path: Path) -> None:
    flags = loads(tmp_path, sizes, 1, [])["prefix_repetition-0"]
    num_prefixes = flags["prefix-repetition-num-prefixes"]
    tokens = num_prefixes * flags["prefix-repetition-prefix-len"]
    assert tokens > 1.4 * sizes.kv_blocks * 128
    assert flags["num-prompts"] >= 2 * num_prefixes
    assert sizes.max_tokens < sizes.kv_blocks * 128


def test_servers_differ_by_their_cache_alone(tmp_path: Path) -> None:
    servers = {name: server(name, "1.2.3.4:5", ON_CPU) for name in ("plain", "native", "raykv")}
    assert servers["plain"] == {}
    assert servers["native"] == {"kv-offloading-backend": "native", "kv-offloading-size": 2.0}
    connector = servers["raykv"]["kv-transfer-config"]
    assert connector["kv_connector"] == "RayKVConnector"
    assert connector["kv_connector_extra_config"]["ray_address"] == "1.2.3.4:5"
    command = sweep(tmp_path, "a model", ON_CPU, servers, {}, is_cpu=True)
    serve = shlex.split(command[command.index("--serve-cmd") + 1])
    assert serve[serve.index("serve") + 1] == "a model"
    assert json.loads((tmp_path / "servers.json").read_text()) == servers


def test_native_offloading_is_left_out_on_a_cpu_and_refused_if_it_is_named() -> None:
    assert systems_here(Options(), is_cpu=True) == ["plain", "raykv"]
    assert systems_here(Options(), is_cpu=False) == ["plain", "native", "raykv"]
    with pytest.raises(SettingError, match="needs a GPU"):
        systems_here(Options(systems=("native",)), is_cpu=True)


def test_all_servers_on_a_cpu_have_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    bound = environment("model", is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert bound == [str(core) for core in cores[:-1] or cores]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment("model", is_cpu=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert environment("model", is_cpu=True)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_clients_make_the_same_prompts_of_a_trace_for_all_servers() -> None:
    hashed = [sys.executable, "-c", "print(hash('0-7:512'))"]
    variables = environment("model", is_cpu=True)
    first, second = (subprocess.check_output(hashed, env=variables) for _ in range(2))
    assert first == second


def test_client_that_fails_says_so_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('refused')"]
    logs = tmp_path / "logs"
    with pytest.raises(ClusterError, match=r"(?s)status 1.*refused"):
        run_sweep(command, os.environ, tmp_path / "sweep.log", 30.0, Options(logs=logs))
    assert "refused" in (logs / "sweep.log").read_text()


def test_client_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(ClusterError, match=r"timed out after 0\."):
        run_sweep(command, os.environ, tmp_path / "sweep.log", 0.2, Options())


def write(folder: Path, system: str, load: str, repeat: int, **told: Any) -> None:
    place = folder / "runs" / f"SERVE--{system}-BENCH--{load}-{repeat}"
    place.mkdir(parents=True)
    run = {
        "mean_ttft_ms": 100.0,
        "median_ttft_ms": 90.0,
        "p99_ttft_ms": 200.0,
        "mean_itl_ms": 10.0,
        "output_throughput": 20.0,
        "failed": 0,
        "generated_texts": ["a", "b"],
    }
    (place / "run=0.json").write_text(json.dumps({**run, **told}))


def test_rows_and_budgets_are_those_of_the_files(tmp_path: Path) -> None:
    for repeat in range(2):
        write(tmp_path, "plain", RANDOM, repeat)
        write(tmp_path, "plain", PREFIX_REPETITION, repeat)
        write(tmp_path, "native", PREFIX_REPETITION, repeat, mean_ttft_ms=60.0)
        write(tmp_path, "native", RANDOM, repeat)
        write(tmp_path, "raykv", PREFIX_REPETITION, repeat, mean_ttft_ms=50.0)
        write(tmp_path, "raykv", RANDOM, repeat, mean_itl_ms=11.0, generated_texts=["a", "c"])
    names = ["warm-up", PREFIX_REPETITION, RANDOM]
    result = summed(tmp_path, ["plain", "native", "raykv"], names, 2)
    assert len(result.rows) == 2 * 3 * 6
    budgets = {each.budget: each for each in result.verdicts}
    assert budgets[f"{PREFIX_REPETITION}: {MEAN}, at most 1 x native offloading"].is_met
    assert budgets[f"{PREFIX_REPETITION}: {MEAN}, at most 1.02 x vLLM alone"].measured == 0.5
    assert not budgets[f"{RANDOM}: {GAP}, at most 1.02 x vLLM alone"].is_met
    assert budgets[f"{RANDOM}: texts that differ from those of vLLM alone"].measured == 2
    assert budgets[f"{PREFIX_REPETITION}: texts that differ from those of vLLM alone"].is_met
    assert budgets[f"{RANDOM}: no request fails"].is_met
    assert not [each for each in budgets if each.startswith(f"{RANDOM}: {MEAN}, at most 1 x")]


# Traces


def request(at: int, tokens: int, *names: int, answer: int = 32) -> dict[str, Any]:
    return {
        "timestamp": at,
        "input_length": tokens,
        "output_length": answer,
        "hash_ids": list(names),
    }


TRACE = [
    request(0, 1000, 0, 1),
    request(10, 1500, 0, 2, 3),
    request(20, 600, 0, 4),
    request(30, 2500, 0, 1, 5, 6, 7),
    request(40, 700, 0, 8),
    request(50, 2000, 0, 2, 3, 9),
]
"""Two conversations of two turns and two of one; all begin with the chunk 0."""


def test_conversations_are_whole_and_in_order_of_time() -> None:
    for seed in range(8):
        picked = whole_conversations(TRACE, 3, 100_000, seed)
        assert len(picked) in (3, 4)
        assert picked == sorted(picked, key=lambda row: row["timestamp"])
        firsts = [row["hash_ids"][1] for row in picked]
        assert all(firsts.count(name) == 2 for name in (1, 2) if name in firsts)


def test_conversations_are_left_out_if_one_request_is_too_long() -> None:
    picked = whole_conversations(TRACE, 100, 2400, seed=1)
    assert [row["timestamp"] for row in picked] == [10, 20, 40, 50]


def test_conversations_are_the_same_for_the_same_seed() -> None:
    assert whole_conversations(TRACE, 2, 9999, 3) == whole_conversations(TRACE, 2, 9999, 3)
    assert len({str(whole_conversations(TRACE, 1, 9999, seed)) for seed in range(20)}) > 1


def test_chunks_of_scaled_requests_hold_all_their_tokens() -> None:
    for row in scaled(TRACE, 32, 1.0, 0):
        assert row["input_length"] <= TRACED_TOKENS // 32 * len(row["hash_ids"])
