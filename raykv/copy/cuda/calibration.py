"""Which way small pages take, by what was measured on a model of GPU with a version of its driver.

A batch copies each run by itself (DMA); a gather copies the runs into one buffer of the device by
a kernel, and from there in one piece. What that kernel costs the model, with which it takes turns,
is not in the table: `raykv bench copy --device cuda` measures it.

To decide is pure; the measured table is kept in the user's cache folder, one file per model and
driver version, and one that can't be read is measured anew.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from raykv.base.ids import Direction
from raykv.copy.cuda.driver import DeviceName

logger = logging.getLogger("raykv.copy")

VERSION = 3
"""Version of the file. What other code has measured is not valid for this one: count up."""

WORTH_IT = 1.1
"""A gather takes multiprocessors away from the model: it must be so many times as fast."""

USUAL_BELOW_BYTES = 28 << 10
USUAL_RUNS = 16
"""Until it is measured, loads of smaller pages are scattered by a kernel if there are as many: what
vLLM found for an H100. Stores are not: they were as fast by DMA."""

MAX_POINTS = 1000
MAX_FILE_BYTES = 1 << 20


class Route(Enum):
    """A way that a batch of runs takes."""

    BATCH = "batch"
    GATHER = "gather"


@dataclass(frozen=True)
class Point:
    """Bytes per second of both ways, at a page size and a number of runs."""

    direction: Direction
    page_bytes: int
    num_runs: int
    batch_rate: float
    gather_rate: float

    @property
    def route(self) -> Route:
        """The better one."""
        is_worth_it = self.gather_rate > WORTH_IT * self.batch_rate
        return Route.GATHER if is_worth_it else Route.BATCH


@dataclass(frozen=True)
class Table:
    """What was measured; without points, what is usual."""

    points: tuple[Point, ...] = ()

    def route(self, direction: Direction, num_bytes: int, num_runs: int) -> Route:
        """The way for so many runs of so many bytes together.

        That of the measured point next to them, by ratio; pages larger than any that was measured
        are not gathered.
        """
        page_bytes = num_bytes / num_runs
        places = self._by_direction.get(direction)
        if places is None:
            is_usual = page_bytes < USUAL_BELOW_BYTES and num_runs >= USUAL_RUNS
            is_load = direction is Direction.LOAD
            return Route.GATHER if is_usual and is_load else Route.BATCH
        pages, runs = math.log2(page_bytes), math.log2(num_runs)
        if pages > places[-1][0]:
            return Route.BATCH
        return min(places, key=lambda at: (abs(at[0] - pages), abs(at[1] - runs)))[2]

    @cached_property
    def _by_direction(self) -> dict[Direction, list[tuple[float, float, Route]]]:
        """Where the points are, small pages first: logarithms of page and runs, and the way."""
        found: dict[Direction, list[tuple[float, float, Route]]] = {}
        for point in sorted(self.points, key=lambda point: point.page_bytes):
            place = math.log2(point.page_bytes), math.log2(point.num_runs), point.route
            found.setdefault(point.direction, []).append(place)
        return found


USUAL = Table()


def always(route: Route) -> Table:
    """A table with one way for everything, to measure it."""
    rates = (2.0, 1.0) if route is Route.BATCH else (1.0, 2.0)
    return Table(tuple(Point(direction, 1 << 40, 1, *rates) for direction in Direction))


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where RayKV keeps what it may lose."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "raykv"


def file_of(folder: Path, name: DeviceName, mover: str) -> Path:
    """The file of one model, driver version and kernel."""
    words = f"{name.model}-{name.driver_version}-{mover}"
    return folder / f"cuda-copy-{re.sub(r'[^A-Za-z0-9.]+', '-', words)}.json"


def load(path: Path, name: DeviceName, mover: str) -> Table | None:
    """The table in a file; None if there is none, or none that is valid, which is logged."""
    try:
        with path.open("rb") as file:
            return _read(file.read(MAX_FILE_BYTES + 1), name, mover)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        logger.warning(
            "the calibration in %s is ignored and measured again: %s: %s",
            path,
            type(error).__name__,
            error,
        )
        return None


def _read(content: bytes, name: DeviceName, mover: str) -> Table:
    """Read a file; an invalid one, or another device's, is a ValueError, KeyError or TypeError."""
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    found, head = json.loads(content), _head(name, mover)
    if not isinstance(found, dict):
        raise TypeError("no JSON object")
    if (theirs := {key: found.get(key) for key in head}) != head:
        raise ValueError(f"it is for {theirs}, not for {head}")
    return _table(found["points"])


def save(path: Path, name: DeviceName, mover: str, table: Table) -> None:
    """Replace the file at once, so that nobody reads half of it; a failure is logged."""
    document = {**_head(name, mover), "points": [asdict(point) for point in table.points]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(file.name).unlink()
                raise
    except OSError as error:
        logger.warning(
            "the calibration of %s can't be kept in %s (%s): it is measured again at each start",
            name.model,
            path,
            error,
        )


def _head(name: DeviceName, mover: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "model": name.model,
        "driver_version": name.driver_version,
        "mover": mover,
    }


def _table(points: Any) -> Table:
    """Read points; an invalid number is a ValueError, another form a TypeError or KeyError."""
    if not isinstance(points, list) or not 0 < len(points) <= MAX_POINTS:
        raise ValueError("no list of points")
    return Table(tuple(_point(**point) for point in points))


def _point(
    direction: int, page_bytes: int, num_runs: int, batch_rate: float, gather_rate: float
) -> Point:
    counts, rates = (page_bytes, num_runs), (batch_rate, gather_rate)
    if not all(type(each) is int and 0 < each < 1 << 46 for each in counts):
        raise ValueError(f"no counts: {counts}")
    if not all(type(each) in (int, float) and 0 < each < math.inf for each in rates):
        raise ValueError(f"no rates: {rates}")
    if type(direction) is not int:
        raise ValueError(f"no direction: {direction}")
    return Point(Direction(direction), page_bytes, num_runs, float(batch_rate), float(gather_rate))
