"""Remembers why chunks are missing that were there, or could have been.

              note                     half of the bound is reached            again
   (unknown) ──────► remembered, young ───────────────────────────► old ───────────────► (unknown)

It is for people only: nothing is decided by it. What happened last to a key counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

V = TypeVar("V")

MAX_REMEMBERED = 65_536
"""Keys; at least half of them are the latest ones."""


@dataclass
class Departures(Generic[V]):
    """A value for each key: a reason, or that and more.

    `most` keys are remembered.
    """

    most: int = MAX_REMEMBERED
    _young: dict[bytes | int, V] = field(default_factory=dict)
    _old: dict[bytes | int, V] = field(default_factory=dict)

    def note(self, keys: Iterable[bytes | int], known: V) -> None:
        """These are not there (any more); of very many only the first are remembered."""
        half = self.most // 2
        if len(self._young) >= half:
            self._old, self._young = self._young, {}
        self._young.update(dict.fromkeys(islice(keys, half), known))

    def get(self, key: bytes | int) -> V | None:
        """What is known of a key."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
