"""The command `raykv`: thin faces of the client, a module for each topic.

`COMMANDS` has all of them, as `raykv --help` shows them. A new one is a function with an example in
its docstring, in the module of its topic, and a line there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

import raykv
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
from raykv.cli import (
    chunks,
    events,
    measure,
    pins,
    plan,
    pools,
    quota,
    serve,
    sessions,
    status,
    switch,
    top,
    transfers,
    trouble,
)
from raykv.cli.base import EXIT_CODES, ExitCode, print_json
from raykv.cluster.logs import set_up_logging
from raykv.lab.bench.command import MOVED

UsageError: Any = typer.BadParameter.__base__
"""The base class of all wrong uses that the parser finds; typer exports a subclass alone."""

__all__ = ["app", "main"]

Command = Callable[..., None]


class Group(NamedTuple):
    """Commands about one thing, behind its name; those of `gone` only say where they are now."""

    help: str
    commands: Mapping[str, Command]
    gone: Mapping[str, Command] = MappingProxyType({})


COMMANDS: dict[str, dict[str, Command | Group]] = {
    "Run": {
        "serve": serve.serve,
        "up": pools.up,
        "down": pools.down,
        "plan": plan.plan,
        "files": serve.files,
    },
    "Observe": {
        "status": status.status,
        "top": top.top,
        "doctor": trouble.doctor,
        "explain": trouble.explain,
        "logs": trouble.logs,
        "events": events.events,
        "settings": plan.settings,
        "chunk": Group(
            "Look at chunks, and at what is cached of a prompt.",
            {"ls": chunks.ls, "show": chunks.show, "lookup": chunks.lookup},
        ),
    },
    "Control": {
        "pause": switch.pause,
        "resume": switch.resume,
        "clear": switch.clear,
        "pin": Group(
            "Keep chunks from being evicted.", {"add": pins.add, "rm": pins.rm, "ls": pins.ls}
        ),
        "quota": Group(
            "Set, list and remove tenants' shares of pools and disks.",
            {"set": quota.set_quota, "rm": quota.rm, "ls": quota.ls},
        ),
        "session": Group(
            "Look at sessions of requests, and say what becomes of their chunks.",
            {
                "ls": sessions.ls,
                "show": sessions.show,
                "over": sessions.over,
                "pause": sessions.pause,
                "prefetch": sessions.prefetch,
            },
        ),
        "engine": Group("Act on one engine.", {"weights": switch.weights}),
        "publish": Group(
            "Publish the cluster's events in vLLM's format (ZMQ), for routers that index KV "
            "caches.",
            {"start": events.start, "status": events.publisher_status, "stop": events.stop},
        ),
    },
    "Move data": {
        "prefetch": transfers.prefetch,
        "move": transfers.move,
        "export": transfers.export_chunks,
        "import": transfers.import_chunks,
    },
    "Try and measure": {
        "demo": measure.demo,
        "chaos": measure.chaos,
        "bench": Group(
            "Measure RayKV, compared with its alternatives and with what the machine can do.",
            {
                "copy": measure.copy,
                "fetch": measure.fetch,
                "disk": measure.disk,
                "routing": measure.routing,
                "policy": measure.policy,
                "client": measure.client,
                "gpu": measure.gpu,
                "claims": measure.claims,
            },
            gone=dict.fromkeys(MOVED, measure.moved),
        ),
    },
}
"""All commands by their panel."""

OLD_NAMES = {
    "ls": "chunk ls",
    "show": "chunk show",
    "lookup": "chunk lookup",
    "pin": "pin add",
    "unpin": "pin rm",
    "pins": "pin ls",
    "quota remove": "quota rm",
    "quota list": "quota ls",
    "set-weights-version": "engine weights",
    "why-miss": "explain",
    "version": "--version",
}
"""Commands that had another name, which works until the next release."""

OLD_ADDRESS = "--ray-address"
"""What `--address` was called; it works until the next release."""


def renamed(words: Sequence[str], today: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Replace old names in a command line; returns its words, and a sentence for each old name."""
    found, sentences = list(words), []
    command = today.get(found[0]) if found else None
    inner = {"--help", *getattr(command, "commands", ())}
    is_group = len(inner) > 1
    # `pin` is a group, and was a command whose first words are keys and options.
    is_of_today = command is not None and (not is_group or set(found[1:2]) <= inner)
    for old, new in OLD_NAMES.items():
        before = old.split()
        if not is_of_today and found[: len(before)] == before:
            found = [*new.split(), *found[len(before) :]]
            sentences.append(f"`raykv {old}` is now `raykv {new}`")
            break
    for at, word in enumerate(found):
        name, equals, value = word.partition("=")
        if name == OLD_ADDRESS:
            found[at] = f"--address{equals}{value}"
            sentences.append(f"{OLD_ADDRESS} is now --address")
    return found, sentences


class _Commands(TyperGroup):
    """All commands; also by their old names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, sentences = renamed(args, self.commands)
        for sentence in sentences if not ctx.resilient_parsing else ():
            typer.echo(f"raykv: {sentence}; the old name goes with the next release", err=True)
        return super().parse_args(ctx, words)


app = typer.Typer(
    cls=_Commands,
    help="RayKV: vLLM's KV cache in the RAM of a Ray cluster.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
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


TAKES_ALL = {"allow_extra_args": True, "ignore_unknown_options": True}


def _add(
    to: typer.Typer, name: str, command: Command, panel: str | None = None, *, hidden: bool = False
) -> None:
    """Its docstring is its help: paragraphs that wrap as the terminal is wide, without markup."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    to.command(
        name,
        help=escape(text),
        rich_help_panel=panel,
        context_settings=TAKES_ALL if hidden or command is serve.serve else None,
        hidden=hidden,
    )(command)


def _group(group: Group) -> typer.Typer:
    made = typer.Typer(help=group.help, no_args_is_help=True, rich_markup_mode="rich")
    for name, command in group.commands.items():
        _add(made, name, command)
    for name, command in group.gone.items():
        _add(made, name, command, hidden=True)
    return made


for panel, named in COMMANDS.items():
    for name, each in named.items():
        if isinstance(each, Group):
            app.add_typer(_group(each), name=name, rich_help_panel=panel)
        else:
            _add(app, name, each, panel)


@cache
def parser() -> Any:
    """All commands, as click knows them; to build them takes a tenth of a second."""
    return get_command(app)


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
    command = parser()
    for word in renamed(words, command.commands)[0]:
        command = getattr(command, "commands", {}).get(word, command)
    switches = [each for each in command.params if getattr(each, "is_flag", False)]
    return "--json" in words and any("--json" in each.opts for each in switches)


def _run() -> int:
    try:
        log_level("WARNING")
        set_up_logging("WARNING")
        # A number is an exit code; commands that end well return nothing.
        return parser()(standalone_mode=False) or ExitCode.OK
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
