"""Sizes of the overlays: memory of a worker's container, and what its pool holds.

The rules are those of `raykv plan` and of the NodeActor. `python deploy/sizes.py` prints the table
of deploy/README.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raykv.base.geometry import aligned
from raykv.client.capacity import (
    GroupShape,
    KVShape,
    Plan,
    PoolWishes,
    StoredPrompt,
    make_plan,
)
from raykv.memory.room import MEMORY_USAGE_THRESHOLD, RESERVE_BYTES, human_bytes

MIB = 1 << 20
GIB = 1 << 30

VLLM_QUEUES_BYTES = 400 * MIB
"""vLLM's own queues in `/dev/shm`, at most."""

RAY_BYTES = 2 * GIB
"""Ray's processes on a node and RayKV's actors, without the pool and the object store. On an idle
node 0.5 GiB were seen; work that others give to Ray comes on top."""


def _full_attention(
    model: str, layers: int, kv_heads: int, head_size: int, max_model_len: int, chunk_tokens: int
) -> KVShape:
    """Of a model with nothing but full attention in bfloat16, and an engine of one rank."""
    chunk_bytes = layers * 2 * kv_heads * head_size * 2 * chunk_tokens
    return KVShape(
        model=model,
        dtype="bfloat16",
        layers=layers,
        max_model_len=max_model_len,
        slot_bytes=aligned(chunk_bytes),
        node_bytes=aligned(chunk_bytes),
        num_nodes=1,
        num_ranks=1,
        num_parts=1,
        groups=(
            GroupShape(
                kind="full attention",
                layers=layers,
                tokens_per_chunk=chunk_tokens,
                chunk_bytes=chunk_bytes,
            ),
        ),
    )


SMOLLM2_135M = _full_attention("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 3, 64, 4096, 128)
QWEN3_8B = _full_attention("Qwen/Qwen3-8B", 36, 8, 128, 32768, 16)


@dataclass(frozen=True)
class ContainerMemory:
    """What counts against the memory limit of a container with a Ray node and an engine.

    `engine_bytes` is vLLM's memory on the host: on the CPU build weights and KV cache as well.
    `shm_bytes` is the size limit of `/dev/shm`; Ray's object store is a part of it, so it does not
    count again.

    Invariant: `least_limit_bytes` is the smallest limit, in whole GiB, at which
    `raykv.memory.room.objection` has nothing against the pool when all else is there already.
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
        return math.ceil((used + RESERVE_BYTES) / MEMORY_USAGE_THRESHOLD / GIB) * GIB

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


@dataclass(frozen=True)
class Sizes:
    """Of a worker: its container, and the model that it serves."""

    container: ContainerMemory
    shape: KVShape

    @property
    def plan(self) -> Plan:
        """What `raykv plan` says of it: every whole chunk of the longest prompt is stored."""
        tokens = self.shape.max_model_len
        chunks = [tokens // each.tokens_per_chunk for each in self.shape.groups]
        return make_plan(
            self.shape,
            [StoredPrompt(tokens=tokens, chunks=chunks, default_chunks=chunks)],
            PoolWishes(self.container.pool_bytes, staging_bytes=None),
        )


CPU_TRIAL = Sizes(ContainerMemory(2 * GIB, 6 * GIB, 256 * MIB, 768 * MIB), SMOLLM2_135M)
ONE_NODE = Sizes(ContainerMemory(64 * GIB, 16 * GIB, GIB, 2 * GIB), QWEN3_8B)
SEVERAL_NODES = Sizes(ContainerMemory(128 * GIB, 16 * GIB, 8 * GIB, 9 * GIB), QWEN3_8B)

OVERLAYS = {
    "cpu-trial": CPU_TRIAL,
    "one-node-gpu": ONE_NODE,
    "multi-node": SEVERAL_NODES,
    "serve-cpu-trial": CPU_TRIAL,
    "serve-one-node-gpu": ONE_NODE,
    "serve-disaggregated": SEVERAL_NODES,
}
"""Each worker of deploy/kuberay/overlays/; a test compares."""


def table() -> str:
    """The sizes of the overlays, as a table in Markdown; those that are alike share a row."""
    heads = ["overlay", "pool", "holds", "engine", "`/dev/shm`", "of it object store"]
    heads += ["Ray", "memory limit"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for sizes in dict.fromkeys(OVERLAYS.values()):
        names = [name for name, others in OVERLAYS.items() if others == sizes]
        memory = sizes.container
        cells = (
            ", ".join(f"`{name}`" for name in names),
            human_bytes(memory.pool_bytes),
            f"{sizes.plan.pool.tokens:,} tokens",
            human_bytes(memory.engine_bytes),
            human_bytes(memory.shm_bytes),
            human_bytes(memory.object_store_bytes),
            human_bytes(memory.ray_bytes),
            human_bytes(memory.least_limit_bytes),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
