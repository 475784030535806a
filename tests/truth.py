"""What the nodes of a cluster really hold, beside what the directory believes."""

from __future__ import annotations

import ray

from raykv.client.cluster import Cluster
from raykv.cluster import join as actors
from raykv.protocol.messages import Inventory, decode

Held = set[tuple[str, str, bytes, int]]
"""Node, namespace, key and generation of chunks."""


def inventories(cluster: Cluster) -> Held:
    """What the NodeActors answer; those that don't count as empty."""
    found: Held = set()
    for node in cluster.status().nodes:
        actor = actors.find_node_actor(node.node_id)
        try:
            held = decode(ray.get(actor.inventory.remote(), timeout=5.0), Inventory)  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - it is dying, or not there yet
            continue
        columns = zip(held.namespace_index, held.keys, held.generations, strict=True)
        found |= {
            (node.node_id, held.namespaces[index], key, generation)
            for index, key, generation in columns
        }
    return found


def directory_of(cluster: Cluster) -> Held:
    """What a snapshot of the directory says."""
    return {
        (str(node_id), str(namespace), bytes(key), int(generation))
        for (node_id, namespace, key), (_, generation) in cluster.snapshot().chunks.items()
    }
