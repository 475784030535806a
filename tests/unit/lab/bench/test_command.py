"""`raykv bench --json FILE`: what a run leaves that is cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raykv.lab.bench.command import run_benchmarks
from raykv.lab.bench.registry import BENCHMARKS, Benchmark
from raykv.lab.bench.report import Options, Result, Row


class Parts(Benchmark):
    """Measures part after part, as many as it has a number for, and fails at the end of them."""

    numbers: tuple[float, ...] = ()
    is_cut_short = False

    def run(self, options: Options) -> Result:
        result = Result(self.name, self.summary)
        for number in self.numbers:
            result.rows.append(Row(f"part {number}", "it", "s", (number,)))
            options.keep(result)
        if self.is_cut_short:
            raise KeyboardInterrupt
        return result


class CutShort(Parts):
    numbers = (1.0, 2.0)
    is_cut_short = True


class Finished(Parts):
    numbers = (3.0,)


def told(path: Path) -> list[Any]:
    found: list[Any] = json.loads(path.read_text())["results"]
    return found


def test_run_that_is_cut_short_leaves_its_parts_and_the_benchmarks_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BENCHMARKS, "finished", Finished("finished", ""))
    monkeypatch.setitem(BENCHMARKS, "cut", CutShort("cut", ""))
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run_benchmarks(["finished", "cut"], Options(), str(path))
    finished, cut = told(path)
    assert [row["median"] for row in finished["rows"]] == [3.0]
    assert [row["median"] for row in cut["rows"]] == [1.0, 2.0]
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_whole_run_has_each_benchmark_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "finished", Finished("finished", ""))
    path = tmp_path / "results.json"
    run_benchmarks(["finished"], Options(), str(path))
    assert [result["benchmark"] for result in told(path)] == ["finished"]
