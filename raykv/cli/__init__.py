"""The command `raykv`: thin faces of the client, a module for each topic.

A topic is one more module here, whose commands say `@app.command()`, and its name in the import.
"""

from __future__ import annotations

import sys

from rich.console import Console

from raykv.base.errors import ClusterError, RayKVError, SettingError, cause_of, first_line
from raykv.base.extras import complaint
from raykv.cli import (
    chunks,
    events,
    measure,
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
from raykv.cli.base import ExitCode, app

TOPICS = (
    status,
    top,
    chunks,
    events,
    trouble,
    switch,
    operate,
    quota,
    sessions,
    ship,
    plan,
    publish,
    serve,
    measure,
)

__all__ = ["TOPICS", "app", "main"]


def main() -> None:
    """Run the command line; errors that RayKV expects are one sentence and exit code 2."""
    try:
        _run()
    except RayKVError as error:
        sentence = f"raykv: {error}"
        console = Console(stderr=True)
        console.print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(ExitCode.FAILED)


def _run() -> None:
    try:
        app()
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
