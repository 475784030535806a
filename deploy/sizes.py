"""Memory of a worker's container: what is in it, and the least limit that bears it.

`python deploy/sizes.py` prints the table of deploy/README.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raykv.core.room import MEMORY_USAGE_THRESHOLD, RESERVE_BYTES

MIB = 1 << 20
GIB = 1 << 30

VLLM_QUEUES_BYTES = 400 * MIB
"""vLLM's own queues in `/dev/shm`, at most."""

RAY_BYTES = 2 * GIB
"""Ray's processes on a node and RayKV's actors, without the pool and the object store. On an idle
node 0.5 GiB were seen; work that others give to Ray comes on top."""


@dataclass(frozen=True)
class WorkerMemory:
    """What counts against the memory limit of a worker's container.

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
    def least_limit_bytes(self) -> int:
        """The least memory limit with which RayKV gives the pool, in whole GiB.

        Ray begins to kill processes at a share of the limit, not at the limit, and RayKV leaves
        `RESERVE_BYTES` of that share free: see `raykv/core/room.py`.
        """
        used = self.pool_bytes + self.engine_bytes + self.shm_bytes + self.ray_bytes
        return math.ceil((used + RESERVE_BYTES) / MEMORY_USAGE_THRESHOLD / GIB) * GIB

    def objections(self, limit_bytes: int, requested_bytes: int) -> list[str]:
        """Why a container with this memory limit and request will not do; empty if it will."""
        found = []
        shm_needs = self.object_store_bytes + VLLM_QUEUES_BYTES
        if self.shm_bytes < shm_needs:
            found.append(
                f"/dev/shm has {_gib(self.shm_bytes)}: the object store of "
                f"{_gib(self.object_store_bytes)} and vLLM's queues take {_gib(shm_needs)}"
            )
        if limit_bytes < self.least_limit_bytes:
            found.append(
                f"the memory limit is {_gib(limit_bytes)}: raise it to "
                f"{_gib(self.least_limit_bytes)}, or make the pool smaller"
            )
        if requested_bytes < limit_bytes:
            found.append(
                f"{_gib(requested_bytes)} of {_gib(limit_bytes)} are requested: the pool fills the "
                "rest for good, so request all of it"
            )
        return found


OVERLAYS = {
    "cpu-trial": WorkerMemory(2 * GIB, 6 * GIB, 256 * MIB, 768 * MIB),
    "one-node-gpu": WorkerMemory(64 * GIB, 16 * GIB, GIB, 2 * GIB),
    "multi-node": WorkerMemory(128 * GIB, 16 * GIB, 8 * GIB, 9 * GIB),
}
"""What deploy/kuberay/overlays/ have; a test compares."""


def table() -> str:
    """The sizes of the overlays, as a table in Markdown."""
    lines = [
        "| overlay | pool | engine | `/dev/shm` | of it object store | Ray | memory limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, memory in OVERLAYS.items():
        sizes = (
            memory.pool_bytes,
            memory.engine_bytes,
            memory.shm_bytes,
            memory.object_store_bytes,
            memory.ray_bytes,
            memory.least_limit_bytes,
        )
        lines.append(f"| `{name}` | {' | '.join(map(_gib, sizes))} |")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:g} GiB"


if __name__ == "__main__":
    print(table())
