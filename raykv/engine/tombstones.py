"""What could not be loaded, and up to which generation it is not to be believed in again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from raykv.base.ids import NO_GENERATION, Generation, Key

MAX_TOMBSTONES = 65_536
"""Keys that are remembered; the oldest are forgotten first (it costs one refused load)."""


@dataclass
class Tombstones:
    """Keys of failed loads, bounded."""

    _generations: OrderedDict[Key, Generation] = field(default_factory=OrderedDict)

    def bury(self, key: Key, generation: Generation) -> None:
        """A chunk was not there at a generation."""
        self._generations[key] = generation
        self._generations.move_to_end(key)
        if len(self._generations) > MAX_TOMBSTONES:
            self._generations.popitem(last=False)

    def lift(self, key: Key) -> None:
        """A chunk has come that is there for certain."""
        self._generations.pop(key, None)

    def covers(self, key: Key, generation: Generation) -> bool:
        """Whether a chunk at that generation is not to be believed in."""
        return generation <= self._generations.get(key, NO_GENERATION)

    def clear(self) -> None:
        """All was of an earlier life."""
        self._generations.clear()
