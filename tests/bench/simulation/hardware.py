"""Durations of steps and transfers: one model on one kind of GPU, from published numbers.

The model is Qwen2.5-7B-Instruct-1M, since agents' prompts have up to 900,000 tokens: 7.6 billion
parameters, 28 layers, 28 heads and 4 KV heads of 128 (its `config.json`), so that a token has
2 x 28 x 4 x 128 x 2 bytes = 57,344 bytes of KV. The GPU is an H100 SXM: 989 TFLOP/s in bfloat16 of
which half are reached, 3.35 TB/s of memory of which four fifths are, 80 GB (NVIDIA's data sheet).
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = 512
"""Of a chunk, as in the published traces."""

_FLOPS = 0.5 * 989e12
_MEMORY_BYTES_PER_S = 0.8 * 3.35e12
_PARAMETERS = 7.6e9
_KV_BYTES = 2 * 28 * 4 * 128 * 2


@dataclass(frozen=True)
class Hardware:
    """Of a replica with one GPU, and of a node; times in seconds."""

    max_tokens: int = 262_144
    """Of a request: `max_model_len`, so that a replica's KV memory has room for three at least."""
    step_s: float = 0.002 + 2 * _PARAMETERS / _MEMORY_BYTES_PER_S
    """Of any step: it reads all weights; 2 ms are the scheduler's and the launches'."""
    token_s: float = 2 * _PARAMETERS / _FLOPS
    """For each token of a prompt: two operations for each parameter."""
    attention_s: float = 4 * 28 * 28 * 128 / _FLOPS
    """For each token of a prompt, for each token before it."""
    read_s: float = _KV_BYTES / _MEMORY_BYTES_PER_S
    """For each token of context of a sequence that gets its next token."""
    decode_s: float = 20e-6
    """For each such sequence: sampling and its share of the operations."""
    step_tokens: int = 8192
    """vLLM's `max_num_batched_tokens` for its server on an H100."""
    max_sequences: int = 256
    """vLLM's `max_num_seqs`, as before it was raised for this GPU."""
    cache_chunks: int = 1800
    """90 % of 80 GB less weights and activations, 53 GB."""

    replicas_per_node: int = 4
    """Half a DGX H100: one socket and its GPUs."""
    pool_chunks: int = 8700
    """RayKV's default, a quarter of the memory: 256 GB of 1 TB."""
    disk_chunks: int = 68_000
    """2 TB."""
    load_s: float = TOKENS * _KV_BYTES / 50e9
    """A chunk from the pool into the GPU: PCIe 5 x16, of 64 GB/s."""
    fetch_s: float = TOKENS * _KV_BYTES / 5e9
    """A chunk from another node's pool: object refs reach less than half of 100 Gbit/s."""
    disk_s: float = TOKENS * _KV_BYTES / 6e9
    """A chunk from the node's disk: an NVMe drive of PCIe 4."""

    def prefill_s(self, begin: int, num_tokens: int) -> float:
        """Return the time to compute tokens of a prompt behind its first `begin` ones."""
        before = begin + num_tokens / 2
        return num_tokens * (self.token_s + self.attention_s * before)

    def decoding_s(self, num_sequences: int, context: float) -> float:
        """Return the time that the next tokens of sequences add to a step; `context` is the sum of
        their tokens.
        """
        return num_sequences * self.decode_s + context * self.read_s
