"""What crosses processes about hidden states; `node/states/file.py` says what becomes of them."""

from __future__ import annotations

import msgspec


class Capture(msgspec.Struct, frozen=True, array_like=True):
    """Have a request's hidden states copied out of its KV blocks, and kept by the NodeActor.

    It goes with a `CopyJob` whose blocks hold the states, in the layer of that place in their KV
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


class CaptureStats(msgspec.Struct, frozen=True):
    """Counters of a NodeActor since its start, and the bytes of states that are in its memory."""

    num_bytes: int = 0
    captured: int = 0
    bytes_captured: int = 0
    failed: int = 0
    files_written: int = 0
    files_failed: int = 0
