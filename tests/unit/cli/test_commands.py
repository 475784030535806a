"""What holds for all commands: help with an example, JSON, exit codes, plain text on a pipe."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import raykv
from raykv import cli
from raykv.base.errors import ClusterError
from raykv.cli import COMMANDS, OLD_NAMES, app, base, main, parser
from raykv.cli.base import EXIT_CODES, ago, bars, counted
from tests.fixtures.commands import AnsweringCluster, run


def all_commands(group: Any, before: str = "") -> dict[str, Any]:
    """By name; those of a group have its name in front."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        if not command.hidden:
            found |= all_commands(command, f"{name} ") if is_group else {before + name: command}
    return found


BY_NAME = all_commands(parser())

PRINTS_NO_JSON = {"serve"}
"""It is vLLM's server. `demo`, `bench` and `chaos` write their JSON to a file, or to "-"."""

ASKS_NO_CLUSTER = {"files", "chaos", *(each for each in BY_NAME if each.startswith("bench "))}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_help_of_every_command_shows_an_example_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    *_, example = inspect.cleandoc(BY_NAME[name].callback.__doc__).splitlines()
    assert example.startswith(f"Example: raykv {name}")
    assert example in run(*name.split(), "--help")


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_command_has_the_options_that_all_have(name: str) -> None:
    options = {option: each for each in BY_NAME[name].params for option in each.opts}
    assert ("--json" in options) == (name not in PRINTS_NO_JSON)
    assert ("--address" in options) == (name not in ASKS_NO_CLUSTER)
    if address := options.get("--address"):
        assert address.opts == ["--address"]
        assert address.help.startswith("The Ray cluster. Default: RAY_ADDRESS, else this user's")


def test_help_has_panels_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = run("--help")
    assert re.findall(r"^╭─ ([\w ]+) ─", shown, re.MULTILINE) == ["Options", *COMMANDS]
    assert EXIT_CODES in shown


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_name_is_the_new_one_and_says_so(old: str) -> None:
    new = OLD_NAMES[old]
    shown = CliRunner().invoke(app, [*old.split(), "KEY", "--help"])
    assert (shown.exit_code, shown.stdout) == (0, run(*new.split(), "KEY", "--help"))
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"raykv: `raykv {old}` is now `raykv {new}`; ")


@pytest.mark.parametrize("option", [["--ray-address", "a:1"], ["--ray-address=a:1"]])
def test_old_option_of_the_address_is_the_new_one_and_says_so(
    option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    def connect(address: str) -> AnsweringCluster:
        named.append(address)
        return AnsweringCluster()

    monkeypatch.setattr(raykv, "connect", connect)
    shown = CliRunner().invoke(app, ["status", *option])
    assert named == ["a:1"]
    assert shown.stderr.startswith("raykv: --ray-address is now --address")


def test_pin_with_a_key_is_pin_add_and_with_a_command_itself(cluster: AnsweringCluster) -> None:
    cluster.answers["unpin"] = None
    shown = CliRunner().invoke(app, ["pin", "--ttl", "soon", "ab12"])
    assert "--ttl='soon' is invalid" in str(shown.exception)
    assert "`raykv pin` is now `raykv pin add`" in shown.stderr
    assert CliRunner().invoke(app, ["pin", "rm", "ab12"]).stderr == ""
    assert "Usage" in CliRunner().invoke(app, ["pin"]).output


def test_version_is_an_option() -> None:
    assert run("--version") == f"{raykv.__version__}\n"


def test_every_topic_has_commands() -> None:
    topics = {f"{cli.__name__}.{each.name}" for each in pkgutil.iter_modules(cli.__path__)}
    owners = {command.callback.__module__ for command in BY_NAME.values()}
    assert topics - {base.__name__} == owners


@pytest.mark.parametrize("words", ["status", "status --json", "events --json", "top --once"])
def test_failure_is_a_sentence_on_standard_error_and_code_2(
    words: str,
    cluster: AnsweringCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.answers |= dict.fromkeys(("events", "status"), ClusterError("nobody [there] answers"))
    monkeypatch.setattr(sys, "argv", ["raykv", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    said = json.dumps({"error": "nobody [there] answers", "exit_code": 2}, indent=2) + "\n"
    assert printed.out == (said if "--json" in words else "")
    assert printed.err == "raykv: nobody [there] answers\n"


def test_status_and_top_are_plain_text_on_a_pipe(cluster: AnsweringCluster) -> None:
    text = run("status")
    assert "\x1b" not in text
    assert "tiny" in text
    # It ends although nobody said --once.
    text = run("top", "--interval", "0.1")
    assert "loaded by RayKV" in text
    assert "\x1b" not in text
    assert json.loads(run("top", "--json", "--interval", "0.1"))["progress"]["seconds"] > 0


@pytest.mark.parametrize(
    ("on_terminal", "as_json", "is_shown"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["terminal", "json", "pipe"],
)
def test_bars_are_for_people_at_a_terminal(
    on_terminal: bool,
    as_json: bool,
    is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = partial(Console, force_terminal=on_terminal, force_interactive=on_terminal, width=100)
    monkeypatch.setattr(base, "Console", console)
    with bars(as_json=as_json) as show:
        show({"finding": (0, 0)})
        show({"node a": (3, 7), "node b": (0, 7)})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("node a" in printed.err and "3/7" in printed.err) == is_shown
    *_, last = printed.err.split("finding")
    assert ("node b" in last) == is_shown


def test_one_thing_is_named_in_the_singular() -> None:
    assert [counted(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]


def test_times_are_short_words() -> None:
    times = [ago(seconds) for seconds in (0.4, 119, 120, 7300, 200_000)]
    assert times == ["0 s", "119 s", "2 min", "2.0 h", "2.3 d"]
