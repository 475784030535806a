"""Which nodes an operator's wish applies to, and the sizes of their pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raykv.base.geometry import PoolGeometry
from raykv.protocol.operator import PoolWish

ALL = "all"

LEAST_SLAB_BYTES = 64 << 20
"""Slabs of a pool that is made before an engine says how large its chunks are: most fit."""

LEAST_SLABS = 8
"""A small pool is cut into this many all the same."""


@dataclass(frozen=True)
class RayNode:
    """A Ray node: its resources as Ray counts them, and its labels."""

    node_id: str
    hostname: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def wants(wish: PoolWish, node: RayNode) -> bool:
    """Whether a node should have a NodeActor."""
    if wish.node_ids:
        return node.node_id in wish.node_ids
    if wish.on == ALL:
        return True
    label, is_label, value = wish.on.partition("=")
    if is_label:
        return node.labels.get(label) == value
    return node.resources.get(wish.on, 0) > 0


def usual_nodes(nodes: Iterable[RayNode]) -> str:
    """Default of `PoolWish.on`: the nodes with a GPU if there are any, otherwise all."""
    return "GPU" if any(node.resources.get("GPU", 0) > 0 for node in nodes) else ALL


def geometry_of(wish: PoolWish, pool_bytes: int) -> PoolGeometry:
    """Geometry of a pool of that size."""
    slab_bytes = wish.slab_bytes or min(LEAST_SLAB_BYTES, pool_bytes // LEAST_SLABS)
    return PoolGeometry.for_pool(pool_bytes, max(1, slab_bytes))
