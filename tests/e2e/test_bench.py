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
def test_benchmark_for_gpus_runs_on_a_cpu_too() -> None:
    pytest.importorskip("vllm")
    from raykv.lab.bench import ttft_cuda
    from raykv.lab.bench.report import Options

    result = ttft_cuda.measure(Options(quick=True, repeats=1), {})
    subjects = [row.subject for row in result.rows]
    assert len(subjects) == len(set(subjects)) == 4
    assert all(row.median > 0 for row in result.rows)
