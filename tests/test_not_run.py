"""The last lines of `make test`: what none of its processes has run, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fixtures.not_run import FOLDER, UNNAMED, summary
from tests.house import ROOT

CONFTEST = """
import os
from pathlib import Path
from tests.fixtures.not_run import Noted

def pytest_configure(config):
    config.pluginmanager.register(Noted(Path(os.environ["TESTS_NOT_RUN"])))
"""

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


def test_sum_names_what_no_process_has_run_and_why(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "hosts"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_whole.py").write_text(WHOLE)
    noted = tmp_path / "noted"
    environment = {**os.environ, FOLDER: str(noted), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-c", os.devnull]
    for marks in ("not extended and not versions", "versions"):
        done = subprocess.run(
            [*command, "-W", "ignore", "-m", marks, "tests"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    files = ["tests/hosts/test_some.py", "tests/gpu/test_engines.py", "tests/test_pages.py"]
    assert summary(noted, files) == [
        f"not run here: 1 of gpu, {UNNAMED}",
        "not run here: 1 of hosts, `make test-extended` runs them",
        "not run here: 1 of hosts, needs root",
        "not run here: 1 of hosts, no such module here",
        f"not run here: 1 of tests, {UNNAMED}",
    ]
