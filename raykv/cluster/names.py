"""What RayKV's actors and sockets are called."""

from __future__ import annotations

import hashlib

RAY_NAMESPACE = "raykv"
"""The Ray namespace of all actors; always passed explicitly."""

NODE_PREFIX = "node:"
"""Of the names of all NodeActors; the node's id follows."""

SCHEDULER = "scheduler"
"""The SchedulerActor."""

PUBLISHER = "events"
"""The PublisherActor, where events are published."""

IMPORT_PREFIX = "import:"
"""Of the names of actors that serve files of chunks while they are imported."""

OWN_NODE_FETCHES = "own node (fetches)"
"""How an engine calls its NodeActor in reports of its breakers, when it asks it for fetches."""

BEQUESTS = b"raykv"
"""The namespace of Ray's internal key-value store for what a scheduler actor leaves behind."""

HEAD_RESOURCE = "node:__internal_head__"
"""What Ray gives the head node alone, 1.0 of it."""

SHARE_OF_HEAD = 0.001


def node_actor(node_id: str) -> str:
    """Name of a node's NodeActor; a source of fetches that is no node is an actor of that name."""
    return node_id if node_id.startswith(IMPORT_PREFIX) else f"{NODE_PREFIX}{node_id}"


def node_socket(cluster_address: str, node_id: str) -> str:
    """Abstract Unix socket name of a node's NodeActor; the same over its restarts."""
    cluster = hashlib.sha256(cluster_address.encode()).hexdigest()[:12]
    return f"raykv/{cluster}/{node_id}"
