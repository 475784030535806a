"""Each benchmark that needs engines or Ray runs, on tiny sizes; its numbers are not tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raykv.lab.bench.gpu import BY_LAYER, PLAIN, RAYKV

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.extended]

RAYKV_BENCH = [str(Path(sys.executable).with_name("raykv")), "bench"]
DESIGN = [sys.executable, "-m", "tests.bench"]


def run(command: list[str], path: Path) -> list[dict[str, Any]]:
    """The results of a benchmark on tiny sizes, which must end well."""
    pytest.importorskip("vllm")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--quick", "--repeats", "1", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return results


@pytest.mark.parametrize("names", [["step"], ["ttft", "throughput"]])
def test_benchmarks_of_the_design_run_and_tell_rows_and_budgets(
    names: list[str], tmp_path: Path
) -> None:
    results = run([*DESIGN, *names], tmp_path / "results.json")
    assert [result["benchmark"] for result in results] == names
    for result in results:
        assert result["rows"], result
        assert result["budgets"], result


def test_fetch_runs_and_tells_rows_and_budgets(tmp_path: Path) -> None:
    (told,) = run([*RAYKV_BENCH, "fetch"], tmp_path / "fetch.json")
    assert {row["subject"] for row in told["rows"]} >= {"RayKV fetch", "bare Ray pull"}
    assert all(value > 0 for row in told["rows"] for value in row["values"])
    assert len(told["budgets"]) == 2


def test_benchmark_for_gpus_runs_on_a_cpu_too(tmp_path: Path) -> None:
    (told,) = run([*RAYKV_BENCH, "gpu"], tmp_path / "gpu.json")
    assert not [note for note in told["notes"] if "failed" in note], told["notes"]
    assert not [note for note in told["notes"] if "only" in note], told["notes"]
    started = {row["subject"] for row in told["rows"] if row["case"] == "engine's start"}
    assert started >= {RAYKV, PLAIN, BY_LAYER}
    assert len(told["budgets"]) >= 2
    assert all(value > 0 for row in told["rows"] for value in row["values"])


def test_client_of_vllm_is_played_against_it_alone_and_raykv(tmp_path: Path) -> None:
    logs, trace = tmp_path / "logs", tmp_path / "trace.jsonl"
    # Four prompts of 7 blocks, which do not fit into the KV memory together, twice; their lengths
    # are divided by 64.
    requests = [
        {
            "timestamp": 4000 * number,
            "input_length": 58 * 1024,
            "output_length": 512,
            "hash_ids": [1000 * (number % 4) + chunk for chunk in range(116)],
        }
        for number in range(8)
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in requests))
    command = [*RAYKV_BENCH, "client", "--system", "plain", "--system", "raykv"]
    command += ["--trace", str(trace)]
    (told,) = run([*command, "--logs", str(logs)], tmp_path / "client.json")
    rows = {(row["case"], row["subject"], row["unit"]): row["median"] for row in told["rows"]}
    assert len(rows) == 3 * 2 * 6
    budgets = {each["budget"]: each for each in told["budgets"]}
    for load in ("prefix_repetition", "random", "timed_trace"):
        for subject in ("vLLM alone", "RayKV"):
            assert rows[load, subject, "failed"] == 0
            assert rows[load, subject, "TTFT mean, ms"] > 0
        assert budgets[f"{load}: texts that differ from those of vLLM alone"]["met"], budgets
    log = (logs / "sweep.log").read_text()
    loaded = re.findall(r"External prefix cache hit rate: ([\d.]+)%", log)
    assert max(map(float, loaded), default=0.0) > 0, "RayKV has loaded nothing"
