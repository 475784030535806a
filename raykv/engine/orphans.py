"""Stores that a view has forgotten while they were under way: their ends mean nothing to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from raykv.base.ids import Key


@dataclass
class Orphans:
    """How many ends are still to come, by key; jobs of one key end in order."""

    _left: Counter[Key] = field(default_factory=Counter)

    def add(self, keys: Iterable[Key]) -> None:
        """Stores are forgotten now."""
        self._left.update(list(keys))

    def end(self, key: Key) -> bool:
        """A store of the key has ended; returns whether it was a forgotten one."""
        left = self._left.pop(key, 0)
        if left > 1:
            self._left[key] = left - 1
        return left > 0

    def clear(self) -> None:
        """None of their ends will come."""
        self._left.clear()
