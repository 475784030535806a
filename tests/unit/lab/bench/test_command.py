"""`raykv bench`: which benchmarks run, what is refused, and what is left of a run cut short."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raykv.base.errors import SettingError
from raykv.cli import app, parser
from raykv.lab.bench import gpu
from raykv.lab.bench.claims import PublishedClaim, run_claims
from raykv.lab.bench.command import BENCHMARKS, Benchmark, chosen, run_benchmarks
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


def test_run_that_is_cut_short_leaves_its_parts_and_the_benchmarks_before(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run_benchmarks([Finished("finished", ""), CutShort("cut", "")], Options(), str(path))
    finished, cut = told(path)
    assert [row["median"] for row in finished["rows"]] == [3.0]
    assert [row["median"] for row in cut["rows"]] == [1.0, 2.0]
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


class Said(Parts):
    """Says that it runs."""

    def run(self, options: Options) -> Result:
        sys.stdout.write("it runs\n")
        return super().run(options)


@contextmanager
def said_around(name: str) -> Iterator[None]:
    sys.stdout.write(f"{name} is under way\n")
    yield
    sys.stdout.write("it has ended\n")


def test_benchmark_is_under_way_until_its_results_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asking for it imports torch.
    monkeypatch.setattr(gpu, "card_name", str)
    run_benchmarks([Said("said", "")], Options(), None, said_around)
    during = "said is under way\nit runs\nit has ended\n"
    assert capsys.readouterr().out.startswith(f"{during}said: ")
    claim = PublishedClaim("a claim", "said", lambda _: 1.0, 1.0, 1.0, "2026-11-23")
    run_claims(Options(), None, [claim], {"said": Said("said", "")}, said_around)
    printed = capsys.readouterr().out
    assert printed.startswith(during)
    assert "a claim" in printed.removeprefix(during)


def test_json_alone_goes_to_standard_output() -> None:
    output = CliRunner().invoke(app, ["bench", "routing", "--quick", "--json", "-"]).stdout
    (found,) = json.loads(output)["results"]
    assert found["benchmark"] == "routing"
    assert {row["subject"] for row in found["rows"]} == {"remembered", "directory asked"}
    assert all(value > 0 for row in found["rows"] for value in row["values"])
    assert len(found["budgets"]) == 2


def test_every_benchmark_is_a_command() -> None:
    bench = parser().commands["bench"]
    shown = [name for name, command in bench.commands.items() if not command.hidden]
    assert shown == [*BENCHMARKS, "claims"]


def test_without_a_name_run_those_that_need_nothing() -> None:
    assert [each.name for each in chosen([])] == ["copy", "fetch", "disk", "routing"]
    assert [each.name for each in chosen(["gpu"])] == ["gpu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["feed", "--quick"], "run `python -m tests.bench feed` there"),
        (["gpu", "--system", "lmcache", "--quick"], "`gpu` has raykv, native, plain, layerwise"),
        (["client", "--system", "lmcache"], "`client` has plain, native, raykv"),
        (["copy", "--json", "/nowhere/x"], "there is no folder /nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, SettingError)
    assert words in str(done.exception)
