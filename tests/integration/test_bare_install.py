"""RayKV's wheel and nothing else: no vLLM, no torch, none of the extras."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raykv.cluster.join import stop_started
from tests.fixtures.bare import bare_surroundings, build_wheel, make_environment
from tests.house import CHILDREN

pytest.importorskip("hatchling", reason="the extra dev is not installed")

pytestmark = pytest.mark.integration

CHILD = CHILDREN / "bare.py"
STATES = [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]


@dataclass
class Bare:
    """A bare environment, and the folder in which its commands run."""

    python: Path
    folder: Path
    address: str = ""

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, in the cluster that has been started or in a new one."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env={**bare_surroundings(self.folder), "RAY_ADDRESS": self.address or "local"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def raykv(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """The same of the installed command `raykv`."""
        return self.run(str(self.python.with_name("raykv")), *arguments, code=code)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    folder = tmp_path_factory.mktemp("bare")
    made = Bare(make_environment(folder / "venv", build_wheel(folder)), folder)
    yield made
    if made.address:
        stop_started(made.address)


def test_core_works_where_only_the_wheel_and_its_dependencies_are(bare: Bare) -> None:
    """Pools, an engine's chunks and hidden states on a node that computes nothing."""
    assert "doctor" in bare.raykv("--help").stdout
    assert "needs vllm" in bare.raykv("bench", "client", "--quick", code=2).stderr
    started = bare.raykv("up", "--pool-bytes", "64MiB").stderr
    (bare.address,) = re.findall(r"local Ray cluster at ([\d.]+:\d+)", started)
    child = json.loads(bare.run(str(CHILD), bare.address, str(bare.folder)).stdout)
    assert Path(child["package"]).is_relative_to(bare.python.parents[1])
    assert child["missing"] == ["torch", "vllm"]
    assert child["copied"] is True
    numbers = ["numpy", "float32", STATES]
    assert child["states"] == {"bfloat16": numbers, "float32": numbers}
    status = json.loads(bare.raykv("status", "--json").stdout)
    assert [node["pool_bytes"] for node in status["nodes"]] == [64 << 20]
    assert status["namespaces"] == {"bare": 4}
    assert "no breaker is open" in bare.raykv("doctor").stdout
    exported = json.loads(bare.raykv("export", "chunks.safetensors", "--json").stdout)
    assert exported["chunks"] == 4
    imported = json.loads(bare.raykv("import", "chunks.safetensors", "--json").stdout)
    assert imported["there"] == 4
    bare.raykv("down", "--with-ray")
    bare.address = ""
