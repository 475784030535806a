"""Results of a benchmark: rows of repeats, medians, ratios, budgets; as a table or JSON."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raykv.base.errors import SettingError


def _forget(_result: Result) -> None:
    """Keep nothing."""


@dataclass(frozen=True)
class Options:
    """Options of a benchmark.

    Attributes:
        repeats: of each measurement; None for the benchmark's own number.
        quick: use small sizes, to see that the benchmark runs.
        traces: files of requests.
        systems: those that `client` and `gpu` compare; all if empty.
        model: the one that `client` serves.
        logs: a folder for the output of servers and engines.
        keep: gets the rows so far after each part of benchmarks that take minutes, since a run may
            be cut short.
    """

    repeats: int | None = None
    quick: bool = False
    traces: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    model: str | None = None
    logs: Path | None = None
    keep: Callable[[Result], None] = _forget

    @property
    def trace(self) -> str | None:
        """The trace of a benchmark that takes only one."""
        return self.traces[0] if self.traces else None

    def systems_of(self, benchmark: str, known: Iterable[str]) -> list[str]:
        """Those of a benchmark's systems that the user names, or all.

        Raises:
            SettingError: there is no such system.
        """
        known = list(known)
        for name in self.systems:
            if name not in known:
                raise SettingError(f"--system {name}: `{benchmark}` has {', '.join(known)}")
        return [name for name in known if not self.systems or name in self.systems]

    def keep_logs(self, folder: Path) -> None:
        """Copy the logs in a folder to where the user wants them, if anywhere."""
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, self.logs)

    def repeats_or(self, usual: int) -> int:
        if self.repeats is not None:
            return self.repeats
        return 2 if self.quick else usual


@dataclass(frozen=True)
class Row:
    """One subject in one case, measured again and again."""

    case: str
    subject: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def ratio_to(self, other: Row) -> float:
        """Return the median of the ratios within each repeat."""
        return median(mine / its for mine, its in zip(self.values, other.values, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A budget and whether it is met. `is_most`: the limit is the highest allowed value."""

    budget: str
    measured: float
    limit: float
    is_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.measured <= self.limit if self.is_most else self.measured >= self.limit


@dataclass
class Result:
    """Everything that one benchmark has measured.

    `notes` are sentences for people. If it `is_wide`, the table has a column for each unit.
    """

    name: str
    summary: str = ""
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_wide: bool = False

    def row(self, case: str, subject: str, unit: str = "") -> Row:
        """Find the row of a subject in a case; `unit` chooses one of several.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if (row.case, row.subject) == (case, subject) and unit in ("", row.unit):
                return row
        raise KeyError((case, subject, unit))

    def add(self, case: str, subject: str, unit: str, *values: float) -> None:
        """Append values to a row. A new row goes behind the other rows of its case."""
        of_case = [at for at, row in enumerate(self.rows) if row.case == case]
        for at in of_case:
            row = self.rows[at]
            if (row.subject, row.unit) == (subject, unit):
                self.rows[at] = replace(row, values=(*row.values, *values))
                return
        at = of_case[-1] + 1 if of_case else len(self.rows)
        self.rows.insert(at, Row(case, subject, unit, values))

    def ratio(self, case: str, one: str, other: str, unit: str = "") -> float:
        """Compare two subjects in a case; see `Row.ratio_to`."""
        return self.row(case, one, unit).ratio_to(self.row(case, other, unit))

    def at_most(self, limit: float, measured: float, budget: str) -> None:
        """Judge a number that should be low."""
        self.verdicts.append(Verdict(budget, measured, limit))

    def at_least(self, limit: float, measured: float, budget: str) -> None:
        """Judge a number that should be high."""
        self.verdicts.append(Verdict(budget, measured, limit, is_most=False))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return {
            "benchmark": self.name,
            "summary": self.summary,
            "rows": [{**asdict(row), "median": row.median} for row in self.rows],
            "budgets": [
                {
                    "budget": verdict.budget,
                    "measured": verdict.measured,
                    "limit": verdict.limit,
                    "met": verdict.is_met,
                }
                for verdict in self.verdicts
            ],
            "notes": self.notes,
        }

    def to_table(self) -> RenderableType:
        """A table for a terminal."""
        table = Table(box=SIMPLE_HEAD, title=f"{self.name}: {self.summary}", title_justify="left")
        for column in ("case", "subject"):
            table.add_column(column)
        if self.is_wide:
            self._fill_wide(table)
        else:
            self._fill(table)
        lines = [_verdict_line(verdict) for verdict in self.verdicts]
        return Group(table, *lines, *(Text(note) for note in self.notes))

    def _fill_wide(self, table: Table) -> None:
        units = list(dict.fromkeys(row.unit for row in self.rows))
        for unit in units:
            table.add_column(unit, justify="right")
        medians: dict[tuple[str, str], dict[str, str]] = {}
        for row in self.rows:
            medians.setdefault((row.case, row.subject), {})[row.unit] = short(row.median)
        last = ""
        for (case, subject), values in medians.items():
            cells = [values.get(unit, "") for unit in units]
            table.add_row(case if case != last else "", subject, *cells)
            last = case

    def _fill(self, table: Table) -> None:
        for column in ("median", "lowest", "highest"):
            table.add_column(column, justify="right")
        table.add_column("unit")
        last = ""
        for row in self.rows:
            numbers = [short(number) for number in (row.median, min(row.values), max(row.values))]
            table.add_row(row.case if row.case != last else "", row.subject, *numbers, row.unit)
            last = row.case


def _verdict_line(verdict: Verdict) -> Text:
    sign = "met" if verdict.is_met else "NOT MET"
    style = "green" if verdict.is_met else "red"
    return Text(f"{sign}: {verdict.budget} (measured {short(verdict.measured)})", style=style)


def short(number: float) -> str:
    """Format a number with three or four significant digits."""
    if number == 0 or 1000 <= abs(number) < 1e15:
        return f"{number:,.0f}"
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.3g}"


def alternate(
    case: str,
    unit: str,
    subjects: Mapping[str, Callable[[], float]],
    repeats: int,
    warm_ups: int = 1,
) -> list[Row]:
    """Let all subjects take turns.

    Args:
        case: name of the measurement.
        unit: of the values.
        subjects: each measures once and returns the value.
        repeats: rounds that count.
        warm_ups: rounds before them that don't count.
    """
    values: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(warm_ups + repeats):
        for name, measure in subjects.items():
            value = measure()
            if number >= warm_ups:
                values[name].append(value)
    return [Row(case, name, unit, tuple(some)) for name, some in values.items()]


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
    }


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def document(results: Sequence[Result], version: str, date: str) -> dict[str, Any]:
    """Return the JSON of a whole run."""
    return {
        "raykv": version,
        "date": date,
        "machine": machine(),
        "results": [result.to_json() for result in results],
    }
