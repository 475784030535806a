"""Each benchmark that needs engines or Ray runs, on tiny sizes; its numbers are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.extended
@pytest.mark.parametrize(
    "names",
    [["step", "disk"], ["fetch", "ttft", "throughput", "restart", "sleep", "hidden_states"]],
)
def test_benchmarks_run_and_tell_rows_and_budgets(names: list[str]) -> None:
    pytest.importorskip("vllm")
    command = [
        str(Path(sys.executable).with_name("raykv")),
        "bench",
        *names,
        "--quick",
        "--repeats",
        "1",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)["results"]
    assert [result["benchmark"] for result in results] == names
    for result in results:
        assert result["rows"], result
        assert result["budgets"], result
        assert all(value >= 0 for row in result["rows"] for value in row["values"])


@pytest.mark.extended
def test_benchmark_for_gpus_runs_on_a_cpu_too(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from raykv.lab.bench.gpu_report import BY_LAYER, NATIVE, PLAIN, RAYKV

    path = tmp_path / "gpu.json"
    command = [str(Path(sys.executable).with_name("raykv")), "bench", "gpu", "--quick"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--repeats", "1", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = json.loads(path.read_text())["results"]
    assert not [note for note in told["notes"] if "failed" in note], told["notes"]
    assert not [note for note in told["notes"] if "only" in note], told["notes"]
    started = {row["subject"] for row in told["rows"] if row["case"] == "engine's start"}
    assert started == {RAYKV, NATIVE, PLAIN, BY_LAYER}
    # Two of a known prompt, two of what is not reused, one of documents.
    assert len(told["budgets"]) == 5
    assert all(value > 0 for row in told["rows"] for value in row["values"])


@pytest.mark.extended
def test_clients_of_vllm_are_played_against_it_alone_and_raykv(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    # Eight conversations of three turns take turns: together they do not fit into the KV memory.
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as lines:
        for turn in range(3):
            for conversation in range(8):
                names = [0, *(100 * conversation + number for number in range(1, 60 + 4 * turn))]
                row = {
                    "timestamp": 1000 * (8 * turn + conversation),
                    "input_length": 512 * len(names),
                    "output_length": 256,
                    "hash_ids": names,
                }
                lines.write(json.dumps(row) + "\n")
    result = tmp_path / "result.json"
    command = [str(Path(sys.executable).with_name("raykv")), "bench", "client", "--quick"]
    command += ["--repeats", "1", "--requests", "24", "--rate", "2", "--trace", str(trace)]
    command += ["--system", "plain", "--system", "raykv", "--json", str(result)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=880, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = json.loads(result.read_text())["results"]
    rows = {(row["case"], row["subject"], row["unit"]): row["median"] for row in told["rows"]}
    assert len(rows) == 3 * 2 * 8
    for workload in ("timed_trace", "prefix_repetition", "random"):
        for subject in ("vLLM alone", "RayKV"):
            assert rows[workload, subject, "failed"] == 0
            assert rows[workload, subject, "TTFT mean, ms"] > 0
    for workload in ("timed_trace", "prefix_repetition"):
        found = [rows[workload, name, "tokens found"] for name in ("vLLM alone", "RayKV")]
        assert found[0] < found[1], workload
    budgets = {each["budget"]: each for each in told["budgets"]}
    for workload in ("timed_trace", "prefix_repetition", "random"):
        assert budgets[f"{workload}: texts that differ from those of vLLM alone"]["met"], budgets
