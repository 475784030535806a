"""`directory`: the scheduler actor's directory under load, through its messages.

A node reports that many chunks; then they are asked for, go, and others come, in batches of 512.
Each size has a process of its own, so that its memory can be measured alone. Times are CPU time:
the actor has one thread. "messages" are decoding and encoding alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import psutil

from raykv.lab.bench.report import Options, Result

LOOKUPS_PER_S = 4e5
CHANGES_PER_S = 5e4
"""Stores, and evictions."""

MOST_BYTES = 250.0
"""Of memory for a chunk, in all."""

PREFIX_MS = 5.0
"""To say where 2048 chunks are."""

MOST_GROWTH = 3.0
"""Of a lookup's time from the smallest size to the largest: what caches make of it."""

SIZES = {"10 k": 10_000, "100 k": 100_000, "1 M": 1_000_000, "10 M": 10_000_000}
QUICK_SIZES = {"2 k": 2_048, "4 k": 4_096}
BYTES_NEEDED = 400
"""Of free memory per chunk, before a size is tried."""

CORE, MESSAGES = "RayKV", "messages"

UNITS = {
    "lookups": "1/s",
    "stores": "1/s",
    "evictions": "1/s",
    "prefix of 2048": "ms",
    "memory": "B/chunk",
}


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("directory")
    sizes = QUICK_SIZES if options.quick else SIZES
    measured: dict[str, dict[str, dict[str, list[float]]]] = {}
    for label, size in sizes.items():
        if psutil.virtual_memory().available < size * BYTES_NEEDED:
            result.notes.append(f"{label} chunks: not enough free memory, left out.")
            continue
        measured[label] = load(size, options.repeats_or(5))
    for what, unit in UNITS.items():
        for label, values in measured.items():
            for subject, some in values[what].items():
                result.add(f"{what}, {label} chunks", subject, unit, *some)
    _judge(result, list(measured))
    return result


def load(size: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Values by what is measured and subject, of a process of its own."""
    arguments = [str(size), str(repeats)]
    command = [sys.executable, "-m", "tests.bench.directory_load", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def _judge(result: Result, labels: list[str]) -> None:
    """The budgets, at the largest size that was measured."""
    smallest, largest = labels[0], labels[-1]
    at_largest = f"at {largest} chunks"

    def ours(what: str, label: str = largest) -> float:
        return result.row(f"{what}, {label} chunks", CORE).median

    lookups = ours("lookups")
    result.at_least(LOOKUPS_PER_S, lookups, f"400,000 lookups/s in the core {at_largest}")
    for what in ("stores", "evictions"):
        result.at_least(CHANGES_PER_S, ours(what), f"50,000 {what}/s in the core {at_largest}")
    result.at_most(PREFIX_MS, ours("prefix of 2048"), f"2048 chunks under 5 ms {at_largest}")
    result.at_most(MOST_BYTES, ours("memory"), f"at most 250 bytes a chunk {at_largest}")
    growth = ours("lookups", smallest) / lookups
    budget = f"a lookup {at_largest} at most {MOST_GROWTH:.0f} times one at {smallest}"
    result.at_most(MOST_GROWTH, growth, budget)
