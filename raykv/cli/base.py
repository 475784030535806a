"""What all commands share: the application, their common options, and how they print.

A command prints tables to a terminal or a pipe, or one JSON document with `--json`. Colours and
anything that moves are for terminals only. Exit codes are those of `EXIT_CODES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import raykv

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

app = typer.Typer(
    help="RayKV: vLLM's KV cache in the RAM of a Ray cluster.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(raykv.__version__)
        raise typer.Exit(ExitCode.OK)


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print RayKV's version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    del version


Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="The Ray cluster. Default: RAY_ADDRESS, else this user's one on this host.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first, on a terminal either.")]


def asks(*, yes: bool) -> bool:
    """Whether to ask before something goes: a person is there, and has not said --yes."""
    return not yes and sys.stdin.isatty()


def confirm(sentence: str) -> None:
    """Say what goes, and ask.

    Raises:
        typer.Abort: the answer is no.
    """
    typer.confirm(f"{sentence}. Go on?", abort=True, err=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output; bytes, which keys are, as hexadecimal digits."""
    typer.echo(msgspec.json.format(_json(value)).decode())


def print_json_line(value: Any) -> None:
    """One JSON document in one line of standard output."""
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
    """A row for each: its columns by their heads. None: there is no such column this time."""
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


def ago(seconds: float) -> str:
    """A time for people: "8 s", "3 min", "2.5 h", "4.0 d"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
