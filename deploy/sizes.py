"""Sizes of the overlays: memory of a worker's container, and what its pool holds.

The rules are those of `raykv plan` and of the NodeActor. `python deploy/sizes.py` prints the table
of deploy/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from raykv.client.capacity import MOST_LEASE_SLOTS, KVShape, Plan, PoolWishes, make_plan
from raykv.memory.container import ContainerMemory
from raykv.memory.room import human_bytes

MIB = 1 << 20
GIB = 1 << 30

SMOLLM2_135M = KVShape(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    dtype="bfloat16",
    layers=30,
    layer_bytes=2 * 3 * 64 * 2,
    is_latent=False,
    window_tokens=None,
    max_model_len=4096,
    tokens_per_block=128,
    num_ranks=1,
)
QWEN3_8B = KVShape(
    model="Qwen/Qwen3-8B",
    dtype="bfloat16",
    layers=36,
    layer_bytes=2 * 8 * 128 * 2,
    is_latent=False,
    window_tokens=None,
    max_model_len=32768,
    tokens_per_block=16,
    num_ranks=1,
)


@dataclass(frozen=True)
class Sizes:
    """Of a worker: its container, the model that it serves, and the setting `lease_slots`."""

    container: ContainerMemory
    shape: KVShape
    lease_slots: int = MOST_LEASE_SLOTS

    @property
    def plan(self) -> Plan:
        """What `raykv plan` says of it."""
        return make_plan(
            self.shape,
            PoolWishes(
                self.container.pool_bytes,
                blocks_per_chunk=1,
                lease_slots=self.lease_slots,
                staging_bytes=None,
            ),
        )


CPU_TRIAL = Sizes(ContainerMemory(2 * GIB, 6 * GIB, 256 * MIB, 768 * MIB), SMOLLM2_135M, 64)
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
