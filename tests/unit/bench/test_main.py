"""What `python -m tests.bench` refuses, in a sentence and without a traceback."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest

from raykv.lab.bench.engine import EngineProcess
from tests.bench import __main__ as command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("no_such_thing", "there is no benchmark no_such_thing"),
        ("policy", "name a file with --trace"),
        ("policy --trace /nowhere/a --trace b", "--trace /nowhere/a: can't be read"),
        ("claims --json /nowhere/x", "there is no folder /nowhere"),
        ("claims --keep", "claims goes with neither"),
        ("claims --trace x", "claims goes with neither"),
        ("claims --quick", "claims goes with neither"),
        ("pool claims", "claims goes with neither"),
    ],
)
def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.bench", *arguments.split()])
    monkeypatch.setattr(command, "ending_what_it_starts", nullcontext)
    # The command sets it for the rest of its process.
    monkeypatch.setattr(EngineProcess, "launch", EngineProcess.launch)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
