"""`raykv chaos --hosts` as a user runs it, for a short while."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.extended]

FAULTS = ("host-cut-off", "host-half-open", "host-slow", "host-frozen", "host-lost")


@pytest.mark.timeout(900)
def test_hosts_that_are_cut_off_slow_frozen_and_lost_fail_no_request(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    command = [str(Path(sys.executable).with_name("raykv")), "chaos", "--hosts", "2"]
    command += ["--minutes", "1", "--seed", "5", "--json", str(path), "--keep-head"]
    for fault in FAULTS:
        command += ["--fault", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["problems"] == []
    assert report["requests"] > 10
    assert report["bytes_fetched"] > 0
    assert any(fault["waited"] for fault in report["faults"])


def test_hosts_are_refused_without_root_in_one_sentence() -> None:
    """Played: nobody else may be allowed to read the sources."""
    program = "import os; os.geteuid = lambda: 65534; from raykv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "chaos", "--hosts", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--hosts 2: hosts are namespaces, which only root may make" in done.stderr
