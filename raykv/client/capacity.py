"""How much of a model's KV cache a pool holds, and whether settings fit to it: the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from raykv.base.geometry import PoolGeometry, aligned
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.memory.room import human_bytes

LEAST_SHARE = 8
"""An engine should lease at most one of so many slots: leased ones hold nothing."""

MOST_LEASE_SLOTS = 1024

COMPARED = (8 << 30, 32 << 30, 128 << 30, 512 << 30)
"""Pools that are usual."""


@dataclass(frozen=True)
class PoolWishes:
    """Settings, as far as sizes follow from them; `objection`: why the machine can't give it.

    `staging_bytes` is None where nothing is staged.
    """

    pool_bytes: int
    blocks_per_chunk: int
    lease_slots: int
    staging_bytes: int | None
    objection: str = ""


def make_plan(shape: KVShape, wishes: PoolWishes) -> Plan:
    """Sizes, and what is wrong with them."""
    token_bytes = shape.layers * shape.layer_bytes
    chunk_tokens = shape.tokens_per_block * wishes.blocks_per_chunk
    slot_bytes = aligned(token_bytes * chunk_tokens)
    pool = _pool_size(shape, chunk_tokens, slot_bytes, wishes.pool_bytes)
    sensible = max(1, min(MOST_LEASE_SLOTS, pool.chunks // LEAST_SHARE))
    problems = _problems(slot_bytes, wishes, shape.num_ranks)
    hints = []
    if not problems and pool.longest_prompts < 1:
        whole = human_bytes(token_bytes * shape.max_model_len)
        hints.append(
            f"a prompt of {shape.max_model_len:,} tokens takes {whole}, more than the pool: it "
            "pushes its own beginning out"
        )
    if not problems and wishes.lease_slots > max(1, pool.chunks // 2):
        hints.append(
            f"lease_slots={wishes.lease_slots} is more than half of the pool's {pool.chunks:,} "
            f"slots, and leased slots hold nothing: {sensible} would do"
        )
    if shape.window_tokens is not None:
        hints.append(
            f"attention looks back {shape.window_tokens:,} tokens only: of a prompt no more than "
            "the last of that is loaded"
        )
    return Plan(
        shape=shape,
        bytes_per_token=token_bytes,
        tokens_per_chunk=chunk_tokens,
        slot_bytes=slot_bytes,
        pool=pool,
        pools=[_pool_size(shape, chunk_tokens, slot_bytes, size) for size in COMPARED],
        lease_slots=wishes.lease_slots,
        sensible_lease_slots=sensible,
        problems=problems,
        hints=hints,
    )


def _problems(slot_bytes: int, wishes: PoolWishes, num_ranks: int) -> list[str]:
    found = []
    if wishes.pool_bytes < slot_bytes:
        found.append(
            f"a pool of {human_bytes(wishes.pool_bytes)} has no room for a chunk of "
            f"{human_bytes(slot_bytes)}: set a larger pool_bytes, or a smaller blocks_per_chunk"
        )
    elif wishes.objection:
        found.append(wishes.objection)
    part = slot_bytes // num_ranks
    if wishes.staging_bytes is not None and wishes.staging_bytes < part:
        found.append(
            f"staging_bytes={wishes.staging_bytes} has no room for a rank's part of a chunk, "
            f"{human_bytes(part)}: set a larger one"
        )
    return found


def _pool_size(shape: KVShape, chunk_tokens: int, slot_bytes: int, pool_bytes: int) -> PoolSize:
    chunks = 0
    if pool_bytes >= max(slot_bytes, SLOT_ALIGNMENT):
        chunks = PoolGeometry.for_pool(pool_bytes, slot_bytes).capacity(slot_bytes)
    tokens = chunks * chunk_tokens
    return PoolSize(
        pool_bytes=pool_bytes,
        chunks=chunks,
        tokens=tokens,
        longest_prompts=round(tokens / max(1, shape.max_model_len), 1),
    )


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's KV cache as one engine has it: all layers in one KV group.

    Attributes:
        layer_bytes: of a token in one layer, all ranks together.
        is_latent: the layers share one latent vector for all heads (MLA).
        window_tokens: how far attention looks back; None: to the beginning.
        tokens_per_block: vLLM's.
        num_ranks: of the engine.
    """

    model: str
    dtype: str
    layers: int
    layer_bytes: int
    is_latent: bool
    window_tokens: int | None
    max_model_len: int
    tokens_per_block: int
    num_ranks: int


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool of `pool_bytes` holds: chunks, tokens, and prompts of the longest length."""

    pool_bytes: int
    chunks: int
    tokens: int
    longest_prompts: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that follow from a model and settings; nothing was started for it.

    Attributes:
        slot_bytes: a chunk's, rounded up to whole pages.
        pool: the one that the settings ask for, or the default on this machine.
        pools: others to compare it with.
        lease_slots: as it is set; `sensible_lease_slots` is an eighth of the pool's at most.
        problems: what would stop the start, or keep chunks from being stored.
        hints: what may be meant, and is worth a look.
    """

    shape: KVShape
    bytes_per_token: int
    tokens_per_chunk: int
    slot_bytes: int
    pool: PoolSize
    pools: list[PoolSize]
    lease_slots: int
    sensible_lease_slots: int
    problems: list[str]
    hints: list[str]
