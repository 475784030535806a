"""The notebook about weights that change: a small loop of reinforcement learning on Ray."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raykv.client.cluster import Cluster
from tests.house import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

NOTEBOOK = ROOT / "notebooks/05-weights-that-change.ipynb"


@pytest.mark.timeout(420)
def test_policy_learns_with_two_engines_whose_tokens_are_those_without_a_cache(
    cluster: Cluster,
) -> None:
    """The notebook itself compares tokens and counts what was loaded."""
    pytest.importorskip("nbclient")
    cluster.down()
    environment = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": cluster.address,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(ROOT / "tests/children/notebook.py"), str(NOTEBOOK)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 images" in done.stdout
