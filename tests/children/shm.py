"""A Ray cluster of two nodes with RayKV's actors and a large object; prints its observations.

Prints one line of JSON: bytes of /dev/shm, findings of the doctor, bytes that came over.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as clusters
from raykv.directory.actor import scheduler_actor
from raykv.lab.hosts.local_nodes import add_local_node
from raykv.node.launch import node_actor
from tests.fixtures.waiting import wait_until

POOL_BYTES = 256 << 20
OBJECT_BYTES = 128 << 20
"""Both more than the /dev/shm that this is run with."""


def main() -> None:
    """Start, look, stop."""
    joined = clusters.ensure_cluster("local")
    try:
        clusters.join(joined.address)
        second = add_local_node(joined.address)
        try:
            print(json.dumps(look(Cluster(joined.address, joined_here=True), second.node_id)))
        finally:
            second.stop()
    finally:
        clusters.stop_started(joined.address)


def look(cluster: Cluster, second: str) -> dict[str, Any]:
    """Touch both nodes' pools and fetch an object, then ask the doctor."""
    scheduler = scheduler_actor(cluster.address)
    ray.get(scheduler.__ray_ready__.remote(), timeout=90.0)
    for node_id in (clusters.resolve_node_id(""), second):
        node_actor(cluster.address, node_id, POOL_BYTES, 1 << 20, "")
    wait_until(
        lambda: (
            sum(node.prefaulted_bytes == POOL_BYTES for node in cluster.status().nodes) == 2
            if ask.find_scheduler_actor()
            else False
        ),
        60.0,
        "both pools are touched",
    )

    def length(data: bytes) -> int:
        return len(data)

    there = NodeAffinitySchedulingStrategy(second, soft=False)
    task = ray.remote(num_cpus=0, scheduling_strategy=there)(length)
    fetched = ray.get(task.remote(ray.put(bytes(OBJECT_BYTES))), timeout=60.0)
    shm = os.statvfs("/dev/shm")
    return {
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "fetched": fetched,
        "findings": [[each.check, str(each.severity), each.what] for each in cluster.doctor()],
    }


if __name__ == "__main__":
    main()
