"""Token ids for the tests, seeded and far from each other."""

from __future__ import annotations

import random


def prompt(seed: int, length: int, vocabulary: int = 500) -> list[int]:
    """`length` token ids; prompts of other seeds differ from the first tokens on."""
    source = random.Random(seed)
    return [source.randrange(3, vocabulary) for _ in range(length)]
