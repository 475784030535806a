"""Memory of a container with a Ray node and an engine: what is in it, and which limit bears it.

Invariant: `ContainerMemory.least_limit_bytes` is the smallest one, in whole GiB, at which
`raykv.memory.room.objection` has nothing against the pool when all else is there already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raykv.memory.room import MEMORY_USAGE_THRESHOLD, RESERVE_BYTES, human_bytes

_MIB = 1 << 20
_GIB = 1 << 30

VLLM_QUEUES_BYTES = 400 * _MIB
"""vLLM's own queues in `/dev/shm`, at most."""

RAY_BYTES = 2 * _GIB
"""Ray's processes on a node and RayKV's actors, without the pool and the object store. On an idle
node 0.5 GiB were seen; work that others give to Ray comes on top."""


@dataclass(frozen=True)
class ContainerMemory:
    """What counts against the memory limit of the container.

    `engine_bytes` is vLLM's memory on the host: on the CPU build weights and KV cache as well.
    `shm_bytes` is the size limit of `/dev/shm`; Ray's object store is a part of it, so it does not
    count again.
    """

    pool_bytes: int
    engine_bytes: int
    object_store_bytes: int
    shm_bytes: int
    ray_bytes: int = RAY_BYTES

    @property
    def other_bytes(self) -> int:
        """All but the pool."""
        return self.engine_bytes + self.shm_bytes + self.ray_bytes

    @property
    def least_limit_bytes(self) -> int:
        """The least memory limit with which RayKV gives the pool, in whole GiB."""
        used = self.pool_bytes + self.other_bytes
        return math.ceil((used + RESERVE_BYTES) / MEMORY_USAGE_THRESHOLD / _GIB) * _GIB

    def objections(self, limit_bytes: int, requested_bytes: int) -> list[str]:
        """Why a container with this memory limit and request will not do; empty if it will."""
        found = []
        shm_needs = self.object_store_bytes + VLLM_QUEUES_BYTES
        if self.shm_bytes < shm_needs:
            found.append(
                f"/dev/shm has {human_bytes(self.shm_bytes)}: the object store of "
                f"{human_bytes(self.object_store_bytes)} and vLLM's queues take "
                f"{human_bytes(shm_needs)}"
            )
        if limit_bytes < self.least_limit_bytes:
            found.append(
                f"the memory limit is {human_bytes(limit_bytes)}: raise it to "
                f"{human_bytes(self.least_limit_bytes)}, or make the pool smaller"
            )
        if requested_bytes < limit_bytes:
            found.append(
                f"{human_bytes(requested_bytes)} of {human_bytes(limit_bytes)} are requested: the "
                "pool fills the rest for good, so request all of it"
            )
        return found
