"""What separates requests in the cache is in vLLM's block hashes, and so in RayKV's keys."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.base.ids import Key, group_of

pytest.importorskip("vllm")

BLOCK = 16
TOKENS = list(range(1, 4 * BLOCK + 1))


@pytest.fixture(scope="module")
def hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def keys(hasher: Any, salt: str | None = None, adapter: str | None = None) -> list[Key]:
    """Offload keys of a request, as vLLM makes them."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    lora = None if adapter is None else LoRARequest(adapter, 1, "/nowhere")
    request = Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        lora_request=lora,
        block_hasher=hasher,
    )
    return [Key(make_offload_key(block_hash, 3)) for block_hash in request.block_hashes]


def test_same_request_has_same_keys(hasher: Any) -> None:
    assert keys(hasher) == keys(hasher)
    assert len(keys(hasher)) == 4
    assert {group_of(key) for key in keys(hasher)} == {3}


@pytest.mark.parametrize(
    "other", [{"salt": "tenant"}, {"adapter": "french"}, {"salt": "tenant", "adapter": "french"}]
)
def test_salt_and_adapter_separate_every_key(hasher: Any, other: dict[str, str]) -> None:
    assert not set(keys(hasher)) & set(keys(hasher, **other))
    assert keys(hasher, **other) == keys(hasher, **other)


def test_two_adapters_share_no_key(hasher: Any) -> None:
    assert not set(keys(hasher, adapter="french")) & set(keys(hasher, adapter="german"))
