"""What is asked before something goes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from raykv.base.errors import SettingError
from raykv.cli import app, pools, switch
from tests.fixtures.commands import AnsweringCluster, run


@pytest.fixture
def cluster(cluster: AnsweringCluster) -> AnsweringCluster:
    """It can be cleared, and ended."""
    cluster.answers |= {"clear": None, "down": 3}
    return cluster


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is at the terminal."""
    for module in (switch, pools):
        monkeypatch.setattr(module, "asks", lambda *, yes: not yes)


@pytest.mark.usefixtures("person")
@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("command", ["clear", "clear --all", "clear 5f0c", "down"])
def test_person_is_asked_before_something_goes(
    cluster: AnsweringCluster, command: str, answer: str
) -> None:
    shown = CliRunner().invoke(app, command.split(), input=f"{answer}\n")
    assert "2 chunks" in shown.stderr
    assert ("of 5f0c (tiny); engines compute" in shown.stderr) == (command != "down")
    assert "Go on? [y/N]" in shown.stderr
    assert shown.exit_code == (0 if answer == "y" else 1)
    asked = [method for method, *_ in cluster.asked]
    assert asked == ["status", command.split(maxsplit=1)[0]][: 1 + (answer == "y")]


@pytest.mark.usefixtures("person")
@pytest.mark.parametrize("command", ["clear --all --yes", "clear 5f0c -y", "down --yes"])
def test_person_who_says_yes_is_not_asked(cluster: AnsweringCluster, command: str) -> None:
    shown = CliRunner().invoke(app, command.split())
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert len(cluster.asked) == 1


@pytest.mark.parametrize(("arguments", "gone"), [(["--all"], None), (["5f0c"], "5f0c")])
def test_script_says_what_is_cleared(
    cluster: AnsweringCluster, arguments: list[str], gone: str | None
) -> None:
    assert run("clear", *arguments) == "cleared\n"
    assert json.loads(run("clear", *arguments, "--json")) == {"cleared": gone or "all"}
    assert [cleared for _, cleared, _ in cluster.asked] == [(gone,), (gone,)]


@pytest.mark.parametrize("arguments", [[], [""], ["--yes"], ["5f0c", "--all"]])
def test_script_that_does_not_say_what_is_cleared_is_refused(
    cluster: AnsweringCluster, arguments: list[str]
) -> None:
    with pytest.raises(SettingError, match="--all"):
        run("clear", *arguments)
    assert cluster.asked == []
