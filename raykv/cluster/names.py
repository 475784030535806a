"""What RayKV's actors and sockets are called."""

from __future__ import annotations

import hashlib

from raykv.protocol.columns import Source, SourceKind

RAY_NAMESPACE = "raykv"
"""The Ray namespace of all actors; always passed explicitly."""

NODE_PREFIX = "node:"
"""How the names of all NodeActors begin; the node's id follows."""

SCHEDULER = "scheduler"
"""The SchedulerActor."""

PUBLISHER = "events"
"""The PublisherActor, where events are published."""

IMPORT_PREFIX = "import:"
"""How the names begin of actors that serve files of chunks while they are imported."""

BEQUESTS = b"raykv"
"""The namespace of Ray's internal key-value store for what a scheduler actor leaves behind."""

ON_HEAD = {"node:__internal_head__": 0.001}
"""What an actor needs that is to be on Ray's head node: Ray gives 1.0 of it to that node alone. One
that needs nothing goes to any node, whatever affinity it has.
"""


def node_actor(node_id: str) -> str:
    return f"{NODE_PREFIX}{node_id}"


def source_actor(source: Source) -> str:
    """Name of the actor that chunks of a source are asked of."""
    is_import = source.kind is SourceKind.IMPORT
    return f"{IMPORT_PREFIX}{source.node_id}" if is_import else node_actor(source.node_id)


def source_name(source: Source) -> str:
    """How people call a source; a node's pool and its disk have different names."""
    return source_actor(source) + ("/disk" if source.is_disk else "")


def node_socket(cluster_address: str, node_id: str) -> str:
    """Abstract Unix socket name of a node's NodeActor, the same after restarts."""
    cluster = hashlib.sha256(cluster_address.encode()).hexdigest()[:12]
    return f"raykv/{cluster}/{node_id}"
