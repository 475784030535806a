"""RayKV's actors on this process's node, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raykv.actors import cluster as actors
from raykv.client import Cluster
from tests.waiting import wait_until


@contextmanager
def actors_of_one_node(cluster: Cluster, pool_bytes: int) -> Iterator[str]:
    """Both actors, new; the node's id. They are ended afterwards."""
    cluster.down()
    node_id = actors.resolve_node_id("")
    actors.scheduler_actor(cluster.address, "lru")
    actors.node_actor(cluster.address, node_id, pool_bytes, 1 << 20, "")
    wait_until(lambda: bool(cluster.status().nodes), 60.0, "the NodeActor reports")
    yield node_id
    cluster.down()
