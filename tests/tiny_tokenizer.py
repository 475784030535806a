"""The tokenizer of the benchmarks' tiny model, for tests that serve it over HTTP."""

from __future__ import annotations

from raykv.bench.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_tokenizer

__all__ = ["SPECIAL_TOKENS", "VOCAB_SIZE", "write_tiny_tokenizer"]
