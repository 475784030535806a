"""`raykv doctor` where there is nothing to look at."""

from __future__ import annotations

import subprocess
import sys


def test_doctor_ends_with_2_when_no_cluster_can_be_reached() -> None:
    # Port 1 of this host: nobody listens there.
    code = "import sys; from raykv.cli import main; sys.argv = ['raykv', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--ray-address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 2, done
    assert "no Ray cluster can be reached at '127.0.0.1:1'" in done.stderr
