"""`raykv demo --tiny` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raykv.client.cluster import Cluster
from raykv.cluster.names import RAY_NAMESPACE
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.e2e

KEYS = [
    "ttft_recompute_s",
    "ttft_prefix_hit_s",
    "ttft_raykv_s",
    "ttft_remote_s",
    "tokens_equal",
    "bytes_stored",
    "bytes_loaded",
    "bytes_fetched",
    "hit_tokens",
]


def demo(cluster: Cluster, path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a demo that must end well."""
    pytest.importorskip("vllm")
    cluster.down()
    command = [str(Path(sys.executable).with_name("raykv")), "demo", "--tiny", "--rounds", "2"]
    command += ["--json", str(path), "--address", cluster.address, "--pool-bytes", "256MiB"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_tiny_demo_loads_fetches_and_ends_the_second_node(cluster: Cluster, tmp_path: Path) -> None:
    raylets, nodes = raylets_of(cluster.address), alive_nodes()
    assert raylets
    data, output = demo(cluster, tmp_path / "demo.json", "--nodes", "2")
    assert all(key in data for key in KEYS)
    assert data["tokens_equal"] is True
    assert data["hit_tokens"] > 0
    assert data["bytes_loaded"] > 0
    assert data["ttft_remote_s"] > 0
    assert data["bytes_fetched"] > 0
    asks = [ask for ask in data["asks"] if ask["phase"] == "remote"]
    assert len(asks) == 2
    assert all(ask["sources"]["raykv"] > 1000 and ask["bytes_fetched"] > 0 for ask in asks)
    assert "RayKV, other node" in output
    assert raylets_of(cluster.address) == raylets
    wait_until(lambda: alive_nodes() == nodes, 10.0, "Ray knows that the second node has ended")
    assert not actors()


def raylets_of(address: str) -> set[int]:
    """Processes of this host."""
    wanted = {f"--gcs-address={address}", f"--gcs_address={address}"}
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (command := process.info["cmdline"])
        and Path(command[0]).name == "raylet"
        and wanted.intersection(command)
    }


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def actors() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == RAY_NAMESPACE]
