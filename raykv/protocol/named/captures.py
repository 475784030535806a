"""Hidden states that a worker has a NodeActor take out of its KV blocks."""

from __future__ import annotations

import math

import msgspec

from raykv.protocol.columns import MAX_NAME

STATE_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each type that hidden states may have."""


class Capture(msgspec.Struct, frozen=True, array_like=True):
    """Have a request's hidden states copied out of its KV blocks, and kept by the NodeActor.

    It goes with a job whose blocks hold the states, in the layer of that place in their KV
    group: vLLM may have put it together with the model's own layers. A block has `block_tokens`
    tokens; `strides` are the elements from one token of a block to the next, from one state to the
    next, and from one number of a state to the next. `token_ids` are int64, little endian: as many
    tokens are wanted, from the request's beginning. `path`: the file that they become, none if
    empty; `has_lock`: its lock comes along as a descriptor. `most_bytes` of states are kept on this
    node, for `ttl_s` each.
    """

    request_id: str
    token_ids: bytes
    num_states: int
    hidden_size: int
    dtype: str
    block_tokens: int
    strides: list[int]
    most_bytes: int
    ttl_s: float
    layer: int = 0
    path: str = ""
    has_lock: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are wanted."""
        return len(self.token_ids) // 8


def capture_objection(capture: Capture, num_blocks: int, page_bytes: int) -> str:
    """Why a capture is invalid, in a few words; empty if it is valid.

    Args:
        capture: what a worker asks for.
        num_blocks: KV blocks that hold the states.
        page_bytes: of one of them.
    """
    width = STATE_WIDTHS.get(capture.dtype)
    if width is None:
        return f"states of {capture.dtype[:40]!r}"
    sizes = (capture.block_tokens, capture.num_states, capture.hidden_size)
    if min(sizes) < 1 or len(capture.strides) != len(sizes) or min(capture.strides) < 1:
        return f"states of {sizes} with strides {capture.strides[:9]}"
    steps = zip(sizes, capture.strides, strict=True)
    if (sum((size - 1) * stride for size, stride in steps) + 1) * width > page_bytes:
        return f"states of {sizes} with strides {capture.strides} in a page of {page_bytes} bytes"
    num_tokens = capture.num_tokens
    if len(capture.token_ids) % 8 or not 0 < num_tokens <= num_blocks * capture.block_tokens:
        return f"{num_tokens} tokens in {num_blocks} blocks of {capture.block_tokens}"
    if not capture.request_id or max(len(capture.request_id), len(capture.path)) > MAX_NAME:
        return "a name or path that is empty or too long"
    if capture.most_bytes < 0 or not (capture.ttl_s > 0 and math.isfinite(capture.ttl_s)):
        return f"states that are kept for {capture.ttl_s} s"
    return ""
