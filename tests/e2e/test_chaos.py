"""`raykv chaos` as a user runs it, for a short while."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

FAULTS = ("node-actor-killed", "node-actor-frozen", "scheduler-actor-killed")


@pytest.mark.timeout(400)
@pytest.mark.extended
@pytest.mark.parametrize("minutes", ["0.1", "0.2"])
def test_short_chaos_run_fails_no_request_and_gives_no_wrong_token(
    minutes: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "chaos.json"
    command = [str(Path(sys.executable).with_name("raykv")), "chaos", "--minutes", minutes]
    command += ["--seed", "4", "--json", str(path), "--logs", str(tmp_path / "logs")]
    for fault in FAULTS:
        command += ["--fault", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["problems"] == []
    assert report["requests"] > 10
    assert report["preemptions"] + report["aborted"] > 0
    assert report["bytes_fetched"] > 0
    assert {fault["kind"] for fault in report["faults"]} <= {
        "NodeActor killed",
        "NodeActor frozen",
        "SchedulerActor killed",
    }
    assert any(fault["waited"] for fault in report["faults"])


def test_impossible_options_are_refused_in_one_sentence() -> None:
    command = [str(Path(sys.executable).with_name("raykv")), "chaos", "--fault", "gcs-melted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no fault is called 'gcs-melted'" in done.stderr
