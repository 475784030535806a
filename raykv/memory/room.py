"""Whether a pool fits into what limits its node: control groups, the machine, Ray, a disk.

Invariants:
1. A pool that is not there yet must leave `RESERVE_BYTES` of every limit that it counts against.
2. Pages that it has already count once: they are part of what is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raykv.base.errors import SettingError
from raykv.protocol.findings import MemoryLimit

RESERVE_BYTES = 256 << 20
"""What a pool leaves free: for the actors, for page tables, and for whatever else grows while the
pool's pages are touched one after another."""

NEAR_BYTES = RESERVE_BYTES // 2
"""No further page is touched once so little is left."""

MEMORY_USAGE_THRESHOLD = 0.95
"""Ray's default for RAY_memory_usage_threshold."""

_MIB = 1 << 20


@dataclass(frozen=True)
class PoolNeeds:
    """What a pool will take when all its pages are touched.

    `present_bytes` of it are there already. Pages that are `in_memory` can't be dropped or written
    back, unlike those of a file on a disk.
    """

    pool_bytes: int
    present_bytes: int = 0
    in_memory: bool = True

    @property
    def left_bytes(self) -> int:
        """Still to be had."""
        return max(0, self.pool_bytes - self.present_bytes)


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return default


def monitor_limit(
    environment: Mapping[str, str], used_bytes: int, total_bytes: int, of_what: str
) -> MemoryLimit | None:
    """Where Ray begins to kill workers, as the environment of a raylet, or of its children, sets
    it; None where it never does. A value that Ray would not take counts as its default.

    As `GetMemoryThreshold` in Ray's `memory_monitor_utils.cc`: of the two ways to set a threshold
    the higher one counts.
    """
    if _number(environment.get("RAY_memory_monitor_refresh_ms"), 250) <= 0:
        return None
    share = _number(environment.get("RAY_memory_usage_threshold"), MEMORY_USAGE_THRESHOLD)
    if not 0 <= share <= 1:
        share = MEMORY_USAGE_THRESHOLD
    threshold, name = int(total_bytes * share), f"RAY_memory_usage_threshold={share:g}"
    min_free_bytes = int(_number(environment.get("RAY_min_memory_free_bytes"), -1))
    if min_free_bytes >= 0 and total_bytes - min_free_bytes > threshold:
        threshold = total_bytes - min_free_bytes
        name = f"RAY_min_memory_free_bytes={min_free_bytes}"
    source = f"Ray's memory monitor ({name} of {of_what})"
    return MemoryLimit(max(0, threshold - used_bytes), threshold, source)


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """The limit that leaves least."""
    return min(limits, key=lambda limit: limit.free_bytes)


def objection(needs: PoolNeeds, limits: Sequence[MemoryLimit], disk: MemoryLimit | None) -> str:
    """Why a pool can't be, in a sentence: which limit, how much is free, what would fit.

    Args:
        needs: what the pool takes.
        limits: those of memory.
        disk: room of the file system that the pool's file is in; None for anonymous memory.

    Returns:
        An empty text if the pool fits.
    """
    counted = [_objection(needs, limit, RESERVE_BYTES) for limit in limits if needs.in_memory]
    if disk is not None:
        counted.append(_objection(needs, disk, 0))
    if not needs.in_memory:
        # Its pages can be written back, but a pool that is never all in memory waits for a disk.
        counted += [_objection_to_size(needs, limit) for limit in limits]
    objections = [each for each in counted if each is not None]
    return min(objections, key=lambda each: each.fitting_bytes).text if objections else ""


@dataclass(frozen=True)
class _Objection:
    fitting_bytes: int
    text: str


def _objection(needs: PoolNeeds, limit: MemoryLimit, reserve: int) -> _Objection | None:
    if needs.left_bytes + reserve <= limit.free_bytes or not needs.left_bytes:
        return None
    fitting = needs.present_bytes + max(0, limit.free_bytes - reserve)
    kept = f", of which {human_bytes(reserve)} must stay free" if reserve else ""
    return _refused(needs, limit, fitting, kept)


def _objection_to_size(needs: PoolNeeds, limit: MemoryLimit) -> _Objection | None:
    if needs.pool_bytes <= limit.total_bytes:
        return None
    never = ", and a larger pool file is never wholly in memory"
    return _refused(needs, limit, limit.total_bytes, never)


def _refused(needs: PoolNeeds, limit: MemoryLimit, fitting: int, why: str) -> _Objection:
    there = f" ({human_bytes(needs.present_bytes)} of it are there)" if needs.present_bytes else ""
    return _Objection(
        fitting,
        f"pool_bytes={needs.pool_bytes} ({human_bytes(needs.pool_bytes)}){there} does not fit: "
        f"{limit.source} allows {human_bytes(limit.total_bytes)} and has "
        f"{human_bytes(limit.free_bytes)} free{why}; {_advice(fitting)}",
    )


def _advice(fitting_bytes: int) -> str:
    if fitting_bytes < _MIB:
        return "no pool fits now: free some memory, or raise the limit"
    return f"pool_bytes='{fitting_bytes // _MIB}MiB' would fit"


def human_bytes(num_bytes: float) -> str:
    """Bytes as people read them: "8.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def check_pool_bytes(pool_bytes: int, chunk_bytes: int, free_bytes: int, limit: str) -> None:
    """Refuse a pool that cannot be.

    Args:
        pool_bytes: size asked for.
        chunk_bytes: largest slot of the model that is served.
        free_bytes: what can still be had.
        limit: names what limits `free_bytes`.

    Raises:
        SettingError: with the size and what is allowed.
    """
    if pool_bytes < chunk_bytes:
        raise SettingError(
            f"pool_bytes={pool_bytes} is smaller than one chunk of this model ({chunk_bytes} "
            f"bytes): set pool_bytes to at least {chunk_bytes}"
        )
    if pool_bytes > free_bytes:
        raise SettingError(
            f"pool_bytes={pool_bytes} is more than {limit} can give: at most {free_bytes} bytes "
            "are free"
        )


def default_pool_bytes(free_bytes: int) -> int:
    """A quarter of the memory that is free."""
    return free_bytes // 4
