"""RayKV's actors on this process's node, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from raykv.base.ids import Epoch, Generation, make_generation
from raykv.client.cluster import Cluster
from raykv.cluster import join as actors
from tests.waiting import wait_until

START_S = 90.0


@contextmanager
def actors_of_one_node(cluster: Cluster, pool_bytes: int) -> Iterator[str]:
    """Both actors, new; the node's id. They are ended afterwards."""
    cluster.down()
    node_id = actors.resolve_node_id("")
    scheduler = actors.scheduler_actor(cluster.address, "lru")
    node = actors.node_actor(cluster.address, node_id, pool_bytes, 1 << 20, "")
    # On a busy machine that takes longer than a question may.
    ray.get([actor.__ray_ready__.remote() for actor in (scheduler, node)], timeout=START_S)
    wait_until(lambda: bool(cluster.status().nodes), 60.0, "the NodeActor reports")
    yield node_id
    cluster.down()


def granted(number: int) -> Generation:
    """One that the scheduler actor of now could have granted: none that was cleared before it."""
    status = actors.status(actors.find_scheduler_actor(), 10.0)
    return make_generation(Epoch(status.epoch), number)
