"""What `raykv plan` says: sizes of a model's KV cache, and of a pool for it."""

from __future__ import annotations

import msgspec


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
