"""The last lines of `make test`: what none of its processes has run, and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fixtures.not_run import UNNAMED, Noted, summary

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.extended
def test_long(): pass

@pytest.mark.skipif(True, reason="needs root")
def test_as_root(): pass

@pytest.mark.versions
def test_other(): pass
"""

WHOLE = """
import pytest
pytest.importorskip("no_such_module", reason="no such module here")
"""


def test_sum_names_what_no_process_has_run_and_why(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("tests") / "hosts"
    folder.mkdir()
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_whole.py").write_text(WHOLE)
    noted = Path("noted")
    options = ["-c", os.devnull, "--rootdir", ".", "-W", "ignore", "-p", "no:cacheprovider"]
    for marks, num_skipped in (("not extended and not versions", 2), ("versions", 1)):
        done = pytester.inline_run(*options, "-m", marks, "tests", plugins=[Noted(noted)])
        done.assertoutcome(passed=1, skipped=num_skipped)
    files = ["tests/hosts/test_some.py", "tests/gpu/test_engines.py", "tests/test_pages.py"]
    assert summary(noted, files) == [
        f"not run here: 1 of gpu, {UNNAMED}",
        "not run here: 1 of hosts, `make test-extended` runs them",
        "not run here: 1 of hosts, needs root",
        "not run here: 1 of hosts, no such module here",
        f"not run here: 1 of tests, {UNNAMED}",
    ]
