"""How much of a model's KV cache a pool holds, and whether settings fit to it: the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.memory.room import human_bytes

COMPARED = (8 << 30, 32 << 30, 128 << 30, 512 << 30)
"""Usual sizes of pools."""

STATE = "recurrent state"
"""The kind of layers that keep one state instead of something for each token."""


@dataclass(frozen=True)
class PoolWishes:
    """Settings that sizes follow from; `objection`: why the machine can't give such a pool.

    `staging_bytes` is None where nothing is staged.
    """

    pool_bytes: int
    staging_bytes: int | None
    objection: str = ""


def make_plan(
    shape: KVShape, stored: Sequence[StoredPrompt], wishes: PoolWishes, note: str = ""
) -> Plan:
    """Compute sizes, and say what is wrong with them.

    Args:
        shape: the model's.
        stored: what is stored of prompts of some lengths, the last one of the longest prompt.
        wishes: settings.
        note: a hint that is known already.
    """
    prompts = [_prompt_size(shape, each) for each in stored]
    pool = _pool_size(shape, prompts, wishes.pool_bytes)
    problems = _problems(shape, wishes)
    hints = [] if problems else _hints(shape, prompts[-1], pool)
    return Plan(
        shape=shape,
        bytes_per_token=shape.bytes_per_token,
        window_bytes=shape.window_bytes,
        prompts=prompts,
        pool=pool,
        pools=[_pool_size(shape, prompts, size) for size in COMPARED],
        problems=problems,
        hints=[*hints, *([note] if note else [])],
    )


def _prompt_size(shape: KVShape, stored: StoredPrompt) -> PromptSize:
    num_bytes = sum(stored.chunks) * shape.slot_bytes
    default_bytes = sum(stored.default_chunks) * shape.slot_bytes
    return PromptSize(
        tokens=stored.tokens,
        chunks=stored.chunks,
        num_bytes=num_bytes,
        bytes_per_token=round(num_bytes / max(1, stored.tokens)),
        default_bytes=default_bytes,
        default_share=round(default_bytes / num_bytes, 3) if num_bytes else 1.0,
    )


def _problems(shape: KVShape, wishes: PoolWishes) -> list[str]:
    found = []
    if wishes.pool_bytes < shape.node_bytes:
        found.append(
            f"a pool of {human_bytes(wishes.pool_bytes)} has no room for a chunk of "
            f"{human_bytes(shape.node_bytes)}: set a larger pool_bytes, or a smaller "
            "blocks_per_chunk"
        )
    elif wishes.objection:
        found.append(wishes.objection)
    part = shape.slot_bytes // shape.num_parts
    if wishes.staging_bytes is not None and wishes.staging_bytes < part:
        found.append(
            f"staging_bytes={wishes.staging_bytes} has no room for a rank's part of a chunk, "
            f"{human_bytes(part)}: set a larger one"
        )
    return found


def _hints(shape: KVShape, longest: PromptSize, pool: PoolSize) -> list[str]:
    found = []
    if longest.num_bytes > pool.chunks * shape.slot_bytes:
        found.append(
            f"a prompt of {longest.tokens:,} tokens takes {human_bytes(longest.num_bytes)}, more "
            "than the pool: it pushes its own beginning out"
        )
    windows = [each.window_tokens for each in shape.groups if each.window_tokens is not None]
    if len(windows) == len(shape.groups):
        found.append(
            f"attention looks back {max(windows):,} tokens only: of a prompt no more than the last "
            "of that is loaded"
        )
    return found


def _pool_size(shape: KVShape, prompts: Sequence[PromptSize], pool_bytes: int) -> PoolSize:
    chunks = 0
    if pool_bytes >= max(shape.node_bytes, SLOT_ALIGNMENT):
        geometry = PoolGeometry.for_pool(pool_bytes, shape.node_bytes)
        chunks = geometry.capacity(shape.node_bytes)
    counts = [sum(each.chunks) for each in prompts]
    # Tokens at a prompt's end that fill no chunk are not held.
    step = lcm(*(each.tokens_per_chunk for each in shape.groups))
    whole = prompts[-1].tokens // step * step
    return PoolSize(
        pool_bytes=pool_bytes,
        chunks=chunks,
        tokens=chunks * whole // counts[-1] if counts[-1] else 0,
        prompts=[round(chunks / count, 1) if count else 0.0 for count in counts],
    )


class GroupShape(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV vLLM keeps in the same blocks, and RayKV in the same chunks.

    Attributes:
        kind: of its layers, in words.
        layers: how many.
        tokens_per_chunk: from one chunk to the next.
        chunk_bytes: what a chunk has of KV; the rest of `slot_bytes` is empty.
        window_tokens: how far attention looks back; None: to the beginning, or there is a state.
        window_chunks: how many of its last chunks a prefix needs; None: all.
    """

    kind: str
    layers: int
    tokens_per_chunk: int
    chunk_bytes: int
    window_tokens: int | None = None
    window_chunks: int | None = None


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's KV cache as one engine has it.

    Attributes:
        slot_bytes: of a chunk of any KV group, all ranks together, rounded up to whole pages.
        node_bytes: what the node keeps of it that keeps most, of `num_nodes` with ranks.
        num_ranks: of the engine.
        num_parts: of a chunk: one for each rank, or one where all ranks have the same bytes.
    """

    model: str
    dtype: str
    layers: int
    max_model_len: int
    slot_bytes: int
    node_bytes: int
    num_nodes: int
    num_ranks: int
    num_parts: int
    groups: tuple[GroupShape, ...]

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in layers that look back to the beginning."""
        whole = [each for each in self.groups if each.window_chunks is None]
        return sum(each.chunk_bytes // each.tokens_per_chunk for each in whole)

    @property
    def window_bytes(self) -> int:
        """What a prefix needs of windows and states in addition."""
        return sum(each.window_chunks or 0 for each in self.groups) * self.slot_bytes


class StoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """How many chunks of each KV group are stored of a prompt; `default_chunks`: by vLLM alone."""

    tokens: int
    chunks: list[int]
    default_chunks: list[int]


class PromptSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt of `tokens` takes of a pool, if nothing of it was stored before.

    Attributes:
        chunks: by KV group.
        default_bytes: what vLLM alone, with `window_share=0`, would store of it.
        default_share: the same, as a share of `num_bytes`.
    """

    tokens: int
    chunks: list[int]
    num_bytes: int
    bytes_per_token: int
    default_bytes: int
    default_share: float


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """What pools of `pool_bytes` hold, one on each node with ranks.

    Attributes:
        chunks: of any KV group.
        tokens: of prompts of the longest length that have nothing in common.
        prompts: of each length in `Plan.prompts`, likewise.
    """

    pool_bytes: int
    chunks: int
    tokens: int
    prompts: list[float]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that follow from a model and settings; nothing was started for it.

    Attributes:
        bytes_per_token: of the layers that look back to the beginning.
        window_bytes: what a prefix needs of windows and states in addition.
        prompts: what is stored of prompts of some lengths; the last one is the longest.
        pool: the one that the settings ask for, or the default on this machine.
        pools: others to compare it with.
        problems: what would stop the start, or keep chunks from being stored.
        hints: what may be meant, and is worth a look.
    """

    shape: KVShape
    bytes_per_token: int
    window_bytes: int
    prompts: list[PromptSize]
    pool: PoolSize
    pools: list[PoolSize]
    problems: list[str]
    hints: list[str]
