"""How an engine finds out where elements are in a page: with kernels of several kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from raykv.protocol.worker import ElementOrder, KVForm
from raykv.vllm.internals.engine import cpu_writer
from raykv.vllm.kv_form import WriteBlock, kv_form_of, measured

HEADS, TOKENS, DIMS = 2, 32, 64


def plain(keys: Any, values: Any) -> Any:
    """[K or V, heads, tokens, dims]"""
    return np.stack([keys.transpose(1, 0, 2), values.transpose(1, 0, 2)])


def by_token(keys: Any, values: Any) -> Any:
    """[tokens, heads, K and V]"""
    return np.concatenate([keys, values], axis=2)


def in_pairs(keys: Any, values: Any) -> Any:
    """Two dimensions of a token beside each other, as tiles of 16-bit numbers have them."""
    packed = keys.reshape(TOKENS, HEADS, DIMS // 2, 2).transpose(1, 2, 0, 3)
    return np.stack([packed.reshape(HEADS, -1), values.transpose(1, 0, 2).reshape(HEADS, -1)], 1)


def vllms(dtype: str) -> WriteBlock:
    import torch

    kind = getattr(torch, dtype)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=kind),
    )
    return cpu_writer(config, SimpleNamespace(block_size=TOKENS, head_size=DIMS, dtype=kind))


def picked(page: Any, order: ElementOrder) -> Any:
    heads, tokens, dims = (np.array(side) for side in (order.heads, order.tokens, order.dims))
    return page.reshape(-1)[tokens[:, None, None] + heads[:, None] + dims]


@pytest.mark.parametrize(
    "write",
    [plain, by_token, in_pairs, vllms("float32"), vllms("bfloat16")],
    ids=["plain", "by token", "in pairs", "vLLM float32", "vLLM bfloat16"],
)
def test_what_was_written_is_found_at_the_measured_places(write: WriteBlock) -> None:
    keys, values = measured(write, HEADS, TOKENS, DIMS)
    random = np.random.default_rng(0)
    shape = (TOKENS, HEADS, DIMS)
    # Exact in bfloat16.
    k, v = (random.integers(-100, 100, shape).astype(np.float32) for _ in range(2))
    page = np.asarray(write(k, v))
    assert np.array_equal(picked(page, keys), k)
    assert np.array_equal(picked(page, values), v)


def lossy(keys: Any, values: Any) -> Any:
    return plain(keys, values) * (np.arange(DIMS) > 0)


def shuffled(keys: Any, values: Any) -> Any:
    order = np.random.default_rng(0).permutation(2 * keys.size)
    return plain(keys, values).reshape(-1)[order]


def padded(keys: Any, values: Any) -> Any:
    return np.pad(plain(keys, values).reshape(-1), 5)


@pytest.mark.parametrize("write", [lossy, shuffled, padded])
def test_order_that_can_not_be_told_is_refused(write: WriteBlock) -> None:
    with pytest.raises(ValueError, match=r"element"):
        measured(write, HEADS, TOKENS, DIMS)


def test_engine_that_can_not_say_starts_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = SimpleNamespace()
    assert kv_form_of(nothing, nothing, nothing) == KVForm()
    assert "can't be inspected" in caplog.text
