"""Prompts of token ids for benchmarks, chaos runs and tests. Pure."""

from __future__ import annotations

import random

VOCABULARY = 500
"""Token ids that every model here has."""


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, the same for the same arguments; other seeds differ from the first ones on."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
