"""Whether an engine can be served at all: its version, and whether its chunks fit into the pool."""

from __future__ import annotations

from collections.abc import Mapping

from raykv.base.geometry import PoolGeometry
from raykv.protocol.framing import PROTOCOL_VERSION


def version_objection(version: int) -> str:
    """Why an engine that speaks that version is refused; empty if it is not."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"the engine speaks protocol {version} of RayKV, "
        f"the scheduler actor {PROTOCOL_VERSION}: install the same version on both"
    )


def size_objection(slot_bytes: Mapping[int, int], geometry: PoolGeometry) -> str:
    """Why a pool can't take chunks of those sizes, by KV group; empty if it can."""
    for group, size in slot_bytes.items():
        if not geometry.slots_per_slab(size):
            return (
                f"a chunk of KV group {group} takes {size} bytes, more than a slab of "
                f"the pool ({geometry.slab_bytes} bytes); set a larger pool_bytes, or a "
                "smaller blocks_per_chunk"
            )
    return ""
