"""What all commands share: their common options, how they print, bars of what takes a while.

A command prints tables to a terminal or a pipe, or one JSON document with `--json`. Colours and
anything that moves are for terminals only. Exit codes are those of `EXIT_CODES`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from raykv.base.errors import SettingError

T = TypeVar("T")


class ExitCode(IntEnum):
    """What scripts may rely on."""

    OK = 0
    NOT_WELL = 1
    """Something is wrong, or what was asked for is not there: an answer, not a failure."""
    FAILED = 2
    """Wrong usage, no cluster, or no answer from it; a sentence on standard error says which."""


EXIT_CODES = (
    "Exit codes: 0 all well; 1 something is wrong, or what was asked for is not there; 2 wrong "
    "usage, or no cluster that answers."
)

PIPE_COLUMNS = 1000
"""Used in place of a terminal's width, since programs read lines."""

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The Ray cluster. Default: RAY_ADDRESS, else this user's one on this host.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for all of it.", min=0.1)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first, even on a terminal.")]
Namespace = Annotated[
    str,
    typer.Option(help="As `raykv status` shows it, or its beginning. Default: the only namespace."),
]
OnlyNamespace = Annotated[
    str,
    typer.Option(help="As `raykv status` shows it, or its beginning. Default: any."),
]


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def asks(*, yes: bool) -> bool:
    """Whether to ask before deleting: a person is at the terminal, and has not said --yes."""
    return not yes and sys.stdin.isatty()


def confirm(sentence: str) -> None:
    """Say what will be deleted, and ask.

    Raises:
        typer.Abort: the answer is no.
    """
    typer.confirm(f"{sentence}. Go on?", abort=True, err=True)


def pairs(option: str, given: Sequence[str]) -> dict[str, str | int | bool]:
    """Split each NAME=VALUE.

    Raises:
        SettingError: it is something else.
    """
    found: dict[str, str | int | bool] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SettingError(f"{option} {each!r}: give NAME=VALUE")
        if value.lower() in ("true", "false"):
            found[name.replace("-", "_")] = value.lower() == "true"
        else:
            found[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    return found


def parse_duration(name: str, value: str) -> float:
    """Seconds out of a text like "90", "90s", "15m", "8h" or "7d".

    Raises:
        SettingError: the duration is invalid.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value, re.ASCII)
    if match is None:
        raise SettingError(f"{name}={value!r} is invalid: write a duration like 90s, 15m, 8h or 7d")
    return float(match[1]) * UNITS[match[2] or "s"]


# Printing


def print_json(value: Any) -> None:
    """Print one JSON document; bytes, such as keys, become hexadecimal digits."""
    typer.echo(msgspec.json.format(_json(value)).decode())


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line."""
    typer.echo(_json(value).decode())


def _json(value: Any) -> bytes:
    return msgspec.json.encode(_with_hex(msgspec.to_builtins(value, builtin_types=(bytes,))))


def _with_hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _with_hex(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_hex(inner) for inner in value]
    return value


def answer(found: T, show: Callable[[T], None], *, as_json: bool) -> None:
    """Print what a command has found: as JSON, or as `show` does it for people."""
    if as_json:
        print_json(found)
    else:
        show(found)


def done_each(
    names: Sequence[str], do: Callable[[str], object], what: str, *, as_json: bool
) -> None:
    """Do something to each name, and say so; `what` is a participle, like "removed"."""
    for name in names:
        do(name)
        if not as_json:
            typer.echo(f"{what} {name}")
    if as_json:
        print_json({what: names})


def answer_if_any(
    found: T | None, show: Callable[[T], None], nothing: str, *, as_json: bool
) -> NoReturn:
    """Print what a command has found, or say that there is `nothing`, which is exit code 1."""
    if found:
        answer(found, show, as_json=as_json)
        raise typer.Exit(ExitCode.OK)
    done(found, nothing, as_json=as_json)
    raise typer.Exit(ExitCode.NOT_WELL)


def done(facts: Any, sentence: str, *, as_json: bool) -> None:
    """Print what a command has done: as JSON, or as a sentence."""
    answer(facts, lambda _: say(sentence), as_json=as_json)


def table(*columns: str) -> Table:
    """An empty table that folds what does not fit."""
    made = Table(box=None, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def table_of(rows: Iterable[T], columns: Mapping[str, Callable[[T], str] | None]) -> Table:
    """Make a table with a row for each item; `columns` by their heads, left out where None."""
    cells = {head: cell for head, cell in columns.items() if cell is not None}
    made = table(*cells)
    for row in rows:
        made.add_row(*(cell(row) for cell in cells.values()))
    return made


def console() -> Console:
    """Standard output. If it is not a terminal, each row is one line, however long."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(width=PIPE_COLUMNS, highlight=False, markup=False)


def say(sentence: str, style: str | None = None) -> None:
    """Print a line on standard output, unchanged."""
    Console().print(sentence, style=style, highlight=False, markup=False, soft_wrap=True)


def counted(count: int, noun: str) -> str:
    """How many there are, for people: "1 file", "2,000 files"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def ago(seconds: float) -> str:
    """A time for people: "8 s", "3 min", "2.5 h", "4.0 d"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


# Bars

ShowBars = Callable[[Mapping[str, tuple[int, int]]], None]
"""Called with the work under way: by its name, how much is done, of how much (0: unknown)."""


@contextmanager
def bars(*, as_json: bool, in_bytes: bool = False) -> Iterator[ShowBars]:
    """Show a progress bar for each name, and remove the bars at the end.

    The bars are on standard error; there are none if that is no terminal, or with `--json`.
    """
    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = as_json or not errors.is_terminal
    with Progress(
        *columns, console=errors, disable=hidden, transient=True, redirect_stdout=False
    ) as progress:

        def show(under_way: Mapping[str, tuple[int, int]]) -> None:
            tasks = {task.description: task.id for task in progress.tasks}
            for name in tasks.keys() - under_way.keys():
                progress.remove_task(tasks[name])
            for name, (so_far, total) in under_way.items():
                task = tasks[name] if name in tasks else progress.add_task(name, total=None)
                progress.update(task, completed=so_far, total=total or None)

        yield show
