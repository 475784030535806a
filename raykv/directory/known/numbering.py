"""Numbers of what is said to nodes, which say which ones they have heard; pure.

A node shows the last number that it has taken, and may show one of an earlier life of the
directory until it has heard of this one: so an answer's number is above all that were shown before.
"""

from __future__ import annotations

from raykv.protocol.columns import MAX_NUMBER

MOST_SHOWN = MAX_NUMBER >> 1
"""What is above that is no number of anybody."""


class Numbering:
    """Each number is given once.

    Args:
        life: of the directory; lives are mostly further apart than their numbers.
    """

    def __init__(self, life: int) -> None:
        self._last = min(life, MOST_SHOWN)

    def next(self, count: int = 1) -> int:
        """The last one of so many numbers that follow each other."""
        self._last += count
        return self._last

    def see(self, shown: int) -> None:
        """A node shows a number."""
        if self._last < shown <= MOST_SHOWN:
            self._last = shown
