"""How a node's NodeActor is made: pinned to the node, named, restarted for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.base import deadlines
from raykv.base.errors import ClusterError, first_line
from raykv.base.settings import USUAL_OPTIONS, DiskPlace, MetricsPlace, NodeOptions
from raykv.cluster import ask, names
from raykv.memory.room import default_pool_bytes, tightest
from raykv.node.actor import CONCURRENCY, NodeActor
from raykv.node.wishes import RayNode, geometry_of
from raykv.protocol.operator import PoolWish

KEEP_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def node_actor(
    address: str,
    node_id: str,
    pool_bytes: int,
    slab_bytes: int,
    pool_path: str,
    extra: NodeOptions = USUAL_OPTIONS,
) -> Any:
    """The NodeActor of a node, created there if there is none."""
    made = ask.detached(
        ray.remote(concurrency_groups=CONCURRENCY)(NodeActor),
        names.node_actor(node_id),
        # It asks for no GPU and yet serves all of them: Ray must not hide them.
        {"RAY_worker_niceness": "0", KEEP_GPUS: "1"},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    socket_name = names.node_socket(address, node_id)
    return made.remote(node_id, socket_name, pool_bytes, slab_bytes, pool_path, extra)


def facts_of(node: Mapping[str, Any]) -> RayNode:
    """What `ray.nodes` says of a node."""
    return RayNode(
        node_id=str(node["NodeID"]),
        hostname=str(node.get("NodeManagerHostname", "")),
        resources=dict(node.get("Resources") or {}),
        labels=dict(node.get("Labels") or {}),
    )


def make_node_actor(address: str, node_id: str, wish: PoolWish) -> Any:
    """A node's NodeActor, made as the wish says if there is none. Takes seconds if the wish leaves
    the size of the pool to the node.

    Raises:
        ClusterError: the node does not say how much memory it has.
    """
    found = ask.find_node_actor(node_id)
    if found is not None:
        return found
    pool_bytes = wish.pool_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes(_free_bytes_on(node_id))
    geometry = geometry_of(wish, pool_bytes)
    return node_actor(
        address,
        node_id,
        geometry.pool_bytes,
        geometry.slab_bytes,
        wish.pool_path,
        NodeOptions(
            MetricsPlace(*wish.metrics), DiskPlace(*wish.disk), wish.transport, wish.pin_share
        ),
    )


def _free_bytes_on(node_id: str) -> int:
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_free_bytes).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)
    try:
        return int(ray.get(task.remote(), timeout=deadlines.JOIN_S))
    except Exception as error:
        raise ClusterError(
            f"node {node_id[:12]} does not say how much memory it has free "
            f"({first_line(error)}): set pool_bytes"
        ) from error


def _free_bytes() -> int:
    """What memory limits leave on a node; called in a worker process there."""
    from raykv.memory.limits import worker_limits

    return tightest(worker_limits()).free_bytes
