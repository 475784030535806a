"""What `python -m tests.bench` refuses, in a sentence and without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
def test_what_does_not_fit_is_refused(arguments: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
