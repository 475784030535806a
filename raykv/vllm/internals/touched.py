"""A row of the table of vLLM's names, and the parts of RayKV that can't do without some."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER, WORKER, LAYERWISE, SERVE = "scheduler", "worker", "layerwise", "serve"
"""Parts of RayKV that can't do without some names: the two sides of the connector, layer-wise
loads, and vLLM's server inside of Ray Serve."""


def numbers_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; zeros if it has none."""
    numbers = version.partition("+")[0].split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (ValueError, IndexError):
        return 0, 0


@dataclass(frozen=True)
class Touched:
    """Names of one owner, a module or a class in it ("module:Class"), by spaces.

    `use` says what they are for and `without` what happens if one is missing. `needed_by` is the
    part that then refuses to start, see `require`; empty: RayKV finds out when it gets there.
    `since` is the first version that has them, `until` the first that has them no more.
    """

    owner: str
    names: str
    use: str
    without: str
    needed_by: str = ""
    since: str = ""
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Whether that version should have them."""
        found = numbers_of(version)
        is_late = bool(self.until) and found >= numbers_of(self.until)
        return found >= numbers_of(self.since) and not is_late
