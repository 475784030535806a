"""vLLM's block hashes of a prompt's tokens, and RayKV's keys, as an engine computes them.

A block's hash is one of its parent's hash, its tokens, and what else separates requests: the LoRA
adapter in every block, by content too, the cache salt in the first. The parent of the first block
is a root that follows from a seed. Source: vLLM 0.32, `vllm/v1/core/kv_cache_utils.py`, and of the
adapter's content `raykv/vllm/identity/adapters.py`; the tests compare both. Images, sound
and prompts given as embeddings are not hashed here.

A hash costs some 2 microseconds for blocks of 16 tokens; no vLLM is needed.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.extras import load
from raykv.base.ids import Key

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's, where `PYTHONHASHSEED` is not set and the hash is a cryptographic one."""

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""Those of vLLM."""

RANDOM = "random"
"""What the traits of a namespace have instead of a digest if no other process has the seed."""


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How an engine hashes: vLLM's name of the algorithm, the seed, and the tokens of a block."""

    algorithm: str
    seed: str
    tokens_per_hash: int


@dataclass(frozen=True, slots=True)
class PromptTraits:
    """What separates a prompt from others with the same tokens.

    An adapter has the name and the path that its engine was given, and the digest of its files; see
    `raykv.prompts.adapters`. Nothing is stored with an adapter that has no digest.
    """

    cache_salt: str = ""
    lora_name: str = ""
    lora_path: str = ""
    lora_digest: str = ""


PLAIN = PromptTraits()


def seed_digest(seed: str) -> str:
    """What others may know of a seed, which may be a secret."""
    return hashlib.sha256(json.dumps(seed).encode()).hexdigest()[:12]


def block_hashes(
    tokens: Sequence[int],
    scheme: HashScheme,
    traits: PromptTraits = PLAIN,
    parent: bytes | None = None,
) -> list[bytes]:
    """Hashes of all full blocks of a prompt, or of what follows its block with the hash `parent`.

    Raises:
        SettingError: the algorithm is unknown, or its package is not installed.
    """
    digest = _digest_of(scheme.algorithm)
    lora = ("lora", traits.lora_name, path_with_digest(traits.lora_path, traits.lora_digest))
    every = (lora,) if traits.lora_name else ()
    first = (*every, ("cache_salt", traits.cache_salt)) if traits.cache_salt else every
    size = scheme.tokens_per_hash
    # NumPy's numbers would be written in another way than Python's.
    whole = tuple(map(int, tokens))
    extras = (first if parent is None else every) or None
    parent = digest(scheme.seed) if parent is None else parent
    found = []
    for start in range(0, len(whole) - size + 1, size):
        parent = digest((parent, whole[start : start + size], extras))
        found.append(parent)
        extras = every or None
    return found


def path_with_digest(path: str, digest: str) -> str:
    """What stands for an adapter's path in hashes: it may have other content at other times."""
    return f"{path}\n{digest}" if digest else path


def chunk_keys(hashes: Sequence[bytes], hashes_per_chunk: int, group: int) -> list[Key]:
    """Keys of all full chunks of a KV group: a chunk is called by its last block."""
    suffix = group.to_bytes(4, "big")
    last_ones = hashes[hashes_per_chunk - 1 :: hashes_per_chunk]
    return [Key(block_hash + suffix) for block_hash in last_ones]


def _digest_of(algorithm: str) -> Callable[[Any], bytes]:
    """vLLM's hash function of that name."""
    name, _, form = algorithm.partition("_")
    if algorithm not in ALGORITHMS:
        raise SettingError(
            f"the hash algorithm {algorithm!r} is not one that RayKV knows: "
            f"{', '.join(ALGORITHMS)} are"
        )
    written = _cbor if form else _pickled
    if name == "sha256":
        sha256 = hashlib.sha256
        return lambda value: sha256(written(value)).digest()
    import xxhash

    return lambda value: xxhash.xxh3_128_digest(written(value))


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    written: bytes = load("cbor2", "hashing as the engines do").dumps(value, canonical=True)
    return written
