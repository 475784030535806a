"""The notebooks as a reader runs them: each with a server of its own, begun by its own commands.

They compare and count by themselves: a policy that learns with two engines has the tokens that it
has without a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raykv.client.cluster import Cluster
from raykv.serve.models import ModelUnavailableError, smollm2
from tests.fixtures.ports import free_port
from tests.house import CHILDREN, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_something_on_a_server_that_has_just_begun(
    path: Path, cluster: Cluster, tmp_path: Path
) -> None:
    pytest.importorskip("nbclient")
    try:
        smollm2()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    cluster.down()
    environment = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{free_port()}/v1",
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": cluster.address,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(CHILDREN / "notebook.py"), "--serve", str(path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) >= 2, done.stdout
