"""The public API for people and programs beside the engines: look into the cache, switch it.

import raykv
cluster = raykv.connect()
print(cluster.status())
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec
import ray

from raykv.actors import cluster
from raykv.errors import ClusterError
from raykv.messages import ClusterStatus, NodeStatus

DEADLINE_S = 10.0
"""For one answer of an actor."""


class Cluster:
    """RayKV in a Ray cluster. Use as a context manager, or `close` it."""

    def __init__(self, address: str, joined_here: bool) -> None:
        self.address = address
        self._joined_here = joined_here

    def status(self) -> ClusterStatus:
        """Nodes, engines and what they hold, as of now.

        Raises:
            ClusterError: RayKV does not run in this cluster, or does not answer.
        """
        known = cluster.status(self._scheduler(), DEADLINE_S)
        return msgspec.structs.replace(known, nodes=[_fresh(node) for node in known.nodes])

    def pause(self) -> None:
        """Switch the cache off: engines see misses and store nothing within about a second."""
        ray.get(self._scheduler().set_paused.remote(True), timeout=DEADLINE_S)

    def resume(self) -> None:
        """Switch the cache on again; what it holds is still there."""
        ray.get(self._scheduler().set_paused.remote(False), timeout=DEADLINE_S)

    def clear(self, namespace: str | None = None) -> None:
        """Empty the cache, of one model's namespace or of all."""
        ray.get(self._scheduler().clear.remote(namespace), timeout=DEADLINE_S)

    def down(self) -> int:
        """End all of RayKV's actors and free their pools; returns how many there were.

        Engines that still run go on without the cache, and start the actors again.
        """
        return cluster.stop_actors(DEADLINE_S)

    def close(self) -> None:
        """Leave the cluster, if `connect` joined it."""
        if self._joined_here:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _scheduler(self) -> Any:
        actor = cluster.find_scheduler_actor()
        if actor is None:
            raise ClusterError(
                f"RayKV does not run in the Ray cluster at {self.address}: no engine with "
                "RayKVConnector has started there"
            )
        return actor


def connect(ray_address: str | None = None) -> Cluster:
    """Join the cluster that is named, else the one on this host.

    Raises:
        ClusterError: there is none, there are several, or it can't be reached.
    """
    if ray.is_initialized():
        return Cluster(cluster.current_address(), joined_here=False)
    address = cluster.find_cluster(ray_address)
    if address is None:
        raise ClusterError("no Ray cluster runs on this host; name one with --ray-address")
    cluster.join(address)
    return Cluster(cluster.current_address(), joined_here=True)


def _fresh(node: NodeStatus) -> NodeStatus:
    """`node` with counters from its NodeActor, where it answers."""
    actor = cluster.find_node_actor(node.node_id)
    if actor is None:
        return node
    try:
        stats = cluster.describe(actor, DEADLINE_S).stats
    except ClusterError:
        return node
    return msgspec.structs.replace(
        node,
        prefaulted_bytes=stats.prefaulted_bytes,
        used_bytes=stats.used_bytes,
        bytes_stored=stats.bytes_stored,
        bytes_loaded=stats.bytes_loaded,
        chunks_refused=stats.chunks_refused,
        num_workers=stats.num_workers,
    )
