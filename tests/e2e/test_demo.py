"""`raykv demo --tiny` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raykv.client import Cluster

pytestmark = pytest.mark.e2e

KEYS = [
    "ttft_recompute_s",
    "ttft_prefix_hit_s",
    "ttft_raykv_s",
    "tokens_equal",
    "bytes_stored",
    "bytes_loaded",
    "hit_tokens",
]


@pytest.mark.timeout(400)
def test_tiny_demo_loads_and_gives_equal_answers(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    cluster.down()
    path = tmp_path / "demo.json"
    command = [str(Path(sys.executable).with_name("raykv")), "demo", "--tiny", "--rounds", "2"]
    command += ["--json", str(path), "--ray-address", cluster.address, "--pool-bytes", "256MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(path.read_text())
    assert all(key in data for key in KEYS)
    assert data["tokens_equal"] is True
    assert data["hit_tokens"] > 0
    assert data["bytes_loaded"] > 0
    assert "RayKV" in done.stdout
