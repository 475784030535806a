"""Block hashes made here are those of vLLM, for each algorithm and each trait of a request."""

from __future__ import annotations

import time
import timeit
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.errors import SettingError
from raykv.prompts.block_hashes import (
    DEFAULT_SEED,
    HashScheme,
    PromptTraits,
    block_hashes,
    chunk_keys,
    seed_digest,
)

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
TRAITS = (
    PromptTraits(),
    PromptTraits(cache_salt="tenant"),
    PromptTraits(lora_name="french", lora_path="/adapters/french"),
    PromptTraits("tenant", "french", "/adapters/french"),
)


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's root hash is a global: what it was comes back."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    yield
    hashing = pytest.importorskip("vllm.utils.hashing")
    monkeypatch.undo()
    pytest.importorskip("vllm.v1.core.kv_cache_utils").init_none_hash(hashing.sha256)


def vllm_hashes(algorithm: str, size: int, tokens: list[int], traits: PromptTraits) -> list[bytes]:
    """What vLLM gives a request with these tokens."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    lora = LoRARequest(traits.lora_name, 1, traits.lora_path) if traits.lora_name else None
    request: Any = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=traits.cache_salt or None,
        lora_request=lora,
        block_hasher=get_request_block_hasher(size, hash_function),
    )
    return list(request.block_hashes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("traits", TRAITS, ids=lambda traits: traits.cache_salt + traits.lora_name)
@pytest.mark.parametrize(("size", "count"), [(1, 3), (16, 100), (32, 96), (128, 127)])
def test_hashes_are_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, traits: PromptTraits, size: int, count: int
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    tokens = [(number * 7919) % 128_000 for number in range(count)]
    scheme = HashScheme(algorithm, "7", size)
    expected = vllm_hashes(algorithm, size, tokens, traits)
    assert len(expected) == count // size
    assert block_hashes(tokens, scheme, traits) == expected


def test_seed_that_nobody_has_set_is_that_of_vllm() -> None:
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    assert utils.DEFAULT_NONE_HASH_SEED == DEFAULT_SEED
    tokens = list(range(64))
    scheme = HashScheme("sha256", DEFAULT_SEED, 16)
    assert block_hashes(tokens, scheme) == vllm_hashes("sha256", 16, tokens, PromptTraits())


@settings(max_examples=30, deadline=None)
@given(tokens=st.lists(st.integers(0, (1 << 31) - 1), max_size=80), size=st.integers(1, 20))
def test_tokens_of_any_size_hash_as_in_vllm(tokens: list[int], size: int) -> None:
    if tokens:
        scheme = HashScheme("sha256", DEFAULT_SEED, size)
        assert block_hashes(tokens, scheme) == vllm_hashes("sha256", size, tokens, PromptTraits())


def test_numbers_of_numpy_hash_as_those_of_python_and_less_than_a_block_not_at_all() -> None:
    scheme = HashScheme("sha256", DEFAULT_SEED, 8)
    tokens = np.arange(40, dtype=np.int32)
    assert block_hashes(tokens, scheme) == block_hashes(tokens.tolist(), scheme)  # type: ignore[arg-type]
    assert block_hashes([], scheme) == block_hashes([1] * 7, scheme) == []


def test_chunk_is_called_by_its_last_block_and_its_group() -> None:
    hashes = [bytes([number]) * 32 for number in range(7)]
    assert chunk_keys(hashes, 1, 0) == [each + bytes(4) for each in hashes]
    assert chunk_keys(hashes, 3, 258) == [
        hashes[2] + b"\0\0\1\2",
        hashes[5] + b"\0\0\1\2",
    ]
    assert chunk_keys(hashes[:2], 3, 0) == []
    offloading = pytest.importorskip("vllm.v1.kv_offload.base")
    assert chunk_keys(hashes, 7, 258) == [offloading.make_offload_key(hashes[6], 258)]


@pytest.mark.parametrize("algorithm", ["md5", "sha256_json", "xxhash_", "", "cbor"])
def test_algorithm_that_is_unknown_is_refused(algorithm: str) -> None:
    with pytest.raises(SettingError, match="is not one that RayKV knows"):
        block_hashes([1, 2], HashScheme(algorithm, DEFAULT_SEED, 1))


def test_digest_of_a_seed_tells_seeds_apart_and_is_that_of_the_traits() -> None:
    assert seed_digest("1") != seed_digest("2")
    namespace = pytest.importorskip("raykv.vllm.identity.facts")
    assert namespace.traits_of({"hash_seed": "secret"}) == {"hash_seed": seed_digest("secret")}


def test_hashes_of_a_long_prompt_take_milliseconds() -> None:
    scheme = HashScheme("sha256", DEFAULT_SEED, 16)
    tokens = list(range(4096))
    took_s = timeit.repeat(
        lambda: block_hashes(tokens, scheme), timer=time.process_time, repeat=20, number=1
    )
    # 0.6 ms on a quiet machine; this one is shared.
    assert min(took_s) < 0.01
