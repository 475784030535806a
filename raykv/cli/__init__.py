"""The command `raykv`: thin faces of the client, a module for each topic.

A topic is one more module here, whose commands say `@app.command()`, and its name in the import.
`raykv.lab` has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.main import get_command

from raykv.base.errors import (
    ClusterError,
    NotFoundError,
    RayKVError,
    SettingError,
    cause_of,
    first_line,
)
from raykv.base.extras import complaint
from raykv.base.settings import log_level
from raykv.cli import (  # noqa: F401 - each adds its commands to `app`
    chunks,
    events,
    operate,
    plan,
    publish,
    quota,
    serve,
    sessions,
    ship,
    status,
    switch,
    top,
    trouble,
)
from raykv.cli.base import ExitCode, app, print_json
from raykv.cluster.logs import set_up_logging
from raykv.lab import commands

for command in (commands.demo, commands.bench, commands.chaos):
    app.command()(command)

UsageError: Any = typer.BadParameter.__base__
"""Of all wrong uses that the parser finds; typer shows it by its child alone."""

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line: errors that RayKV expects are one sentence on standard error, and with
    `--json` a document on standard output too.
    """
    try:
        sys.exit(_run())
    except RayKVError as error:
        sentence = f"raykv: {error}"
        console = Console(stderr=True)
        console.print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
        is_answer = isinstance(error, NotFoundError)
        _fail(ExitCode.NOT_WELL if is_answer else ExitCode.FAILED, str(error))
    except UsageError as error:
        error.show()
        _fail(ExitCode.FAILED, error.format_message())
    except typer.Abort:
        typer.echo("raykv: nothing was done", err=True)
        sys.exit(ExitCode.NOT_WELL)


def _fail(code: ExitCode, sentence: str) -> NoReturn:
    if _wants_json(sys.argv[1:]):
        print_json({"error": sentence, "exit_code": int(code)})
    sys.exit(code)


def _wants_json(words: Sequence[str]) -> bool:
    """Whether standard output is for JSON; some commands write theirs to a file."""
    command: Any = get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    switches = [each for each in command.params if getattr(each, "is_flag", False)]
    return "--json" in words and any("--json" in each.opts for each in switches)


def _run() -> int:
    try:
        log_level("WARNING")
        set_up_logging("WARNING")
        # A number is an exit code; commands that end well return nothing.
        return app(standalone_mode=False) or ExitCode.OK
    except ModuleNotFoundError as error:
        sentence = complaint(error, "this command")
        if not sentence:
            raise
        raise SettingError(sentence) from error
    except Exception as error:
        # Most questions have a sentence of their own for it.
        ray = sys.modules.get("ray")
        if ray is None or not isinstance(error, ray.exceptions.RayError):
            raise
        raise ClusterError(f"Ray does not answer: {first_line(cause_of(error))}") from error
