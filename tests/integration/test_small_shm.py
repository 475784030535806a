"""A container's /dev/shm of 64 MiB: pools and fetches work, the doctor mentions it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.children.shm import OBJECT_BYTES
from tests.house import ROOT

pytestmark = pytest.mark.integration

MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
IN_NAMESPACE = ["unshare", "-rm", "sh", "-c"]


def may_unshare() -> bool:
    """Whether this machine lets us have a /dev/shm of our own."""
    if shutil.which("unshare") is None:
        return False
    command = [*IN_NAMESPACE, MOUNT]
    return subprocess.run(command, capture_output=True, timeout=30.0, check=False).returncode == 0


@pytest.mark.extended
def test_pools_and_fetches_work_with_a_small_shm() -> None:
    if not may_unshare():
        pytest.skip("no mount namespaces here")
    command = [*IN_NAMESPACE, f"{MOUNT} && exec {sys.executable} -m tests.children.shm"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray too may print a line there when it ends.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(line)
    assert seen["shm_bytes"] == 64 << 20
    assert seen["fetched"] == OBJECT_BYTES
    wrong = [finding for finding in seen["findings"] if finding[1] != "ok"]
    assert wrong
    assert {(check, severity) for check, severity, _ in wrong} == {("shm", "warn")}, wrong
    assert "64.0 MiB" in wrong[0][2]
