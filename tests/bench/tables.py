"""The part of RESULTS.md that is made of kept runs: `python -m tests.bench tables`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raykv.lab.bench.report import short

HERE = Path(__file__).parent
TARGET = HERE / "RESULTS.md"
RESULTS = HERE / "results"
BEGIN, END = "<!-- made of tests/bench/results -->", "<!-- end of what is made -->"


def result_path(name: str) -> Path:
    """Where the run of a benchmark is kept."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}.json"


def page() -> str:
    """RESULTS.md with the tables of all kept runs."""
    before, _, rest = TARGET.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    tables = "\n\n".join(made for run in runs for made in tables_of(run)) or "None yet."
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def tables_of(run: dict[str, Any]) -> Iterator[str]:
    """A table of each result of a run, and its budgets."""
    machine = run["machine"]
    where = f"{run['date']}, RayKV {run['raykv']}, {machine['cpus']} CPUs ({machine['cpu']})"
    for result in run["results"]:
        lines = [
            f"**`{result['benchmark']}`**: {result['summary']}. {where}.",
            "",
            "| case | subject | median | lowest | highest | unit |",
            "|---|---|---|---|---|---|",
        ]
        for row in result["rows"]:
            numbers = (row["median"], min(row["values"]), max(row["values"]))
            cells = (row["case"], row["subject"], *map(short, numbers), row["unit"])
            lines.append(f"| {' | '.join(cells)} |")
        budgets = [
            f"* {each['budget']}: {short(each['measured'])}{'' if each['met'] else ', **not met**'}"
            for each in result["budgets"]
        ]
        below = [*budgets, *(f"* {note}" for note in result["notes"])]
        yield "\n".join([*lines, *([""] if below else []), *below])
