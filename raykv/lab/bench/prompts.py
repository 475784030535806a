"""Prompts of token ids for benchmarks, chaos runs and tests. Pure."""

from __future__ import annotations

import random

VOCABULARY = 500
"""Token ids below it are in every model here."""


def prompt(seed: int, length: int) -> list[int]:
    """Draw tokens. The same arguments give the same ones; other seeds differ from the start."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
