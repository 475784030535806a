"""How many different keys were seen, in 16 KiB: a HyperLogLog sketch.

A register holds the longest run of zero bits, plus one, that the hashes which chose it began with.
Two sketches of the same keys are equal, and the maximum of two is the sketch of both sets.

The estimate is the "improved raw" one of O. Ertl, New cardinality estimation algorithms for
HyperLogLog sketches (2017): without bias from one key to 2**50, relative standard error
1.04 / sqrt(2**14) = 0.8 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raykv.protocol.measures import KeySketch

BITS = 14
NUM_REGISTERS = 1 << BITS
_RANK_BITS = 64 - BITS
MAX_RANK = _RANK_BITS + 1

_KEY_BYTES = 40
"""Bytes of a key that count; vLLM's longest has 36."""

Words = np.ndarray[Any, np.dtype[np.uint64]]
Registers = np.ndarray[Any, np.dtype[np.uint8]]


def hashes(keys: Sequence[bytes]) -> Words:
    """64 well mixed bits of each key."""
    texts = np.array(keys, dtype=f"S{_KEY_BYTES}")
    words: Words = texts.view("<u8").reshape(len(keys), -1)
    mixed = np.zeros(len(keys), np.uint64)
    for column in range(words.shape[1]):
        mixed = _mixed(mixed ^ words[:, column])
    return mixed


def _mixed(words: Words) -> Words:
    """The finalizer of splitmix64: every bit of the input changes half of the output's."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class HyperLogLog:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.registers: Registers = np.zeros(NUM_REGISTERS, np.uint8)

    def add(self, keys: Sequence[bytes]) -> None:
        """See keys, known ones or new ones."""
        if not keys:
            return
        words = hashes(keys)
        chosen = (words >> np.uint64(_RANK_BITS)).astype(np.int64)
        rest = (words & np.uint64((1 << _RANK_BITS) - 1)).astype(np.float64)
        # Exact: a float64 has 53 bits, and its exponent is the length of the number in bits.
        ranks = (MAX_RANK - np.frexp(rest)[1]).astype(np.uint8)
        np.maximum.at(self.registers, chosen, ranks)

    def merge(self, sketch: KeySketch) -> None:
        """Take in registers of another sketch; those that can't be are left out."""
        ranks = np.frombuffer(sketch.ranks, np.uint8)
        if len(sketch.registers) != 2 * len(ranks):
            return
        chosen = np.frombuffer(sketch.registers, "<u2").astype(np.int64)
        sane = (chosen < NUM_REGISTERS) & (ranks <= MAX_RANK)
        np.maximum.at(self.registers, chosen[sane], ranks[sane])

    def changed_since(self, known: Registers, most: int) -> KeySketch:
        """Up to `most` registers that are higher than in `known`, which is brought up to them."""
        chosen = np.flatnonzero(self.registers > known)[:most]
        known[chosen] = self.registers[chosen]
        return KeySketch(chosen.astype("<u2").tobytes(), self.registers[chosen].tobytes())

    def estimate(self) -> float:
        """How many different keys were added, to all that were merged."""
        counts = np.bincount(self.registers, minlength=MAX_RANK + 1)[: MAX_RANK + 1].tolist()
        total = NUM_REGISTERS * _tau(1.0 - counts[MAX_RANK] / NUM_REGISTERS)
        for rank in range(MAX_RANK - 1, 0, -1):
            total = 0.5 * (total + counts[rank])
        total += NUM_REGISTERS * _sigma(counts[0] / NUM_REGISTERS)
        return NUM_REGISTERS**2 / (2.0 * math.log(2.0) * total)


def _sigma(x: float) -> float:
    """Algorithm 5 of Ertl's, for the share of registers that nothing chose."""
    if x == 1.0:
        return math.inf
    power, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * power
        power += power
    return total


def _tau(x: float) -> float:
    """Algorithm 6 of Ertl's, for the share of registers that are not full."""
    if x in (0.0, 1.0):
        return 0.0
    power, total, before = 1.0, 1.0 - x, -1.0
    while total != before:
        x = math.sqrt(x)
        before = total
        power *= 0.5
        total -= (1.0 - x) ** 2 * power
    return total / 3.0
