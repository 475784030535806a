"""RayKV's own local Ray beside other Ray programs of the same user and host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raykv.client.cluster import Cluster
from raykv.cluster.join import joined_by_others, stop_started

pytestmark = pytest.mark.integration

ADDRESS = re.compile(r"local Ray cluster at ([\d.]+:\d+)")


@dataclass
class Account:
    """A user who has no token of Ray."""

    home: Path
    address: str = ""

    def run(
        self, *command: str, code: int | None = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        surroundings = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        }
        done = subprocess.run(
            command,
            env={**surroundings, "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def raykv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(
            sys.executable, "-c", "from raykv.cli import main; main()", *arguments,
            RAY_ADDRESS=self.address or "local",
        )  # fmt: skip


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    made = Account(tmp_path)
    yield made
    if made.address:
        stop_started(made.address)


@pytest.mark.extended
def test_other_programs_neither_join_it_nor_wait_for_it_nor_find_a_token(account: Account) -> None:
    others = joined_by_others()
    (account.address,) = ADDRESS.findall(account.raykv("up", "--pool-bytes", "64MiB").stderr)
    assert joined_by_others() == others
    assert not (account.home / ".ray").exists()
    (node,) = json.loads(account.raykv("status", "--json").stdout)["nodes"]
    assert node["pool_bytes"] == 64 << 20
    stranger = f"import ray; ray.init('{account.address}')"
    refused = account.run(sys.executable, "-c", stranger, code=1).stderr
    assert "oken" in refused, refused
    account.raykv("down", "--with-ray")
    assert joined_by_others() == others
    plain = "import ray; print(ray.init(address='local' if {!r} else None).address_info)"
    account.run(sys.executable, "-c", plain.format(others))


def test_pool_that_was_refused_takes_the_newest_size(cluster: Cluster) -> None:
    cluster.down()
    try:
        (refused,) = cluster.up(pool_bytes=500 << 30)
        assert "pool_bytes" in refused.error, refused
        (found,) = cluster.up(pool_bytes=64 << 20)
        assert (found.error, found.pool_bytes) == ("", 64 << 20)
        (kept,) = cluster.up(pool_bytes=500 << 30)
        assert (kept.error, kept.is_new, kept.pool_bytes) == ("", False, 64 << 20)
    finally:
        cluster.down()
