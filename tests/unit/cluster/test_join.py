"""Which cluster is joined, and what is printed of what Ray says; no Ray is started."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raykv.base.errors import ClusterError
from raykv.cluster import join as cluster
from raykv.cluster.join import Raylet, log_errors, successor
from tests.fixtures.ports import free_port


@pytest.fixture(autouse=True)
def _no_named_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def running(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    monkeypatch.setattr(cluster, "running_clusters", lambda: list(addresses))


def test_setting_wins_over_variable_and_variable_over_host(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch)
    assert cluster.find_cluster(None) is None
    running(monkeypatch, "host:1")
    assert cluster.find_cluster(None) == "host:1"
    assert cluster.find_cluster("auto") == "host:1"
    monkeypatch.setenv("RAY_ADDRESS", "variable:2")
    assert cluster.find_cluster(None) == "variable:2"
    assert cluster.find_cluster("setting:3") == "setting:3"


def test_several_clusters_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "host:1", "host:2")
    with pytest.raises(ClusterError, match=r"2 Ray clusters .*host:1, host:2.*ray_address"):
        cluster.find_cluster(None)


def test_unreachable_cluster_is_refused_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"no Ray cluster can be reached at '{address}'"):
        cluster.check_reachable(address)


@pytest.mark.parametrize("address", ["somewhere", "ray://host:10001", "host:port"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match="no Ray cluster can be reached"):
        cluster.check_reachable(address)


def test_fresh_randomness_is_that_of_no_other_process_and_leaves_the_seeded_one_as_it_was() -> None:
    random.seed(0)
    seeded = [random.random() for _ in range(4)]
    random.seed(0)
    with cluster._fresh_randomness():
        fresh = [random.random() for _ in range(4)]
    assert fresh != seeded
    assert [random.random() for _ in range(4)] == seeded


@pytest.mark.parametrize(
    ("named", "before", "left"),
    [
        ("own:1", "", ""),
        ("own:1", "other:2", "other:2"),
        ("own:1", "ended:3", ""),
        ("newer:4", "other:2", "newer:4"),
        ("own:1", "own:1", "own:1"),
    ],
)
def test_other_programs_join_what_they_joined_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, before: str, left: str
) -> None:
    there = [Raylet("own", "own:1", 1.0), Raylet("other", "other:2", 2.0)]
    monkeypatch.setattr(cluster, "everybodys_raylets", lambda: there)
    (tmp_path / "ray_current_cluster").write_text(named)
    cluster.withdraw("own:1", before, str(tmp_path))
    assert cluster.joined_by_others(str(tmp_path)) == left


def test_a_link_in_the_place_of_the_address_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("own:1")
    (tmp_path / "ray_current_cluster").symlink_to(victim)
    monkeypatch.setattr(cluster, "raylets", lambda: [Raylet("other", "other:2", 2.0)])
    cluster.withdraw("own:1", "other:2", str(tmp_path))
    assert victim.read_text() == "own:1"


SPEAKING = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
while sys.argv[2] == "speaks" or sys.stdin.read():
    listener.accept()[0].sendall(b"settings")
"""


@contextmanager
def speaking(program: str, host: str, *more: str) -> Iterator[int]:
    """A process that a scan finds as `program`, and where it listens."""
    command = [program, "-c", SPEAKING, host, *more]
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_raylet_is_asked_at_its_own_address_where_the_head_is_on_another() -> None:
    with speaking("gcs_server", "127.0.0.1", "speaks") as port:
        address = f"127.0.0.1:{port}"
        with speaking("raylet", "127.0.0.2", "speaks", f"--gcs-address={address}"):
            cluster.check_answers(address)
        with (
            speaking("raylet", "127.0.0.2", "is silent", f"--gcs-address={address}"),
            pytest.raises(ClusterError, match="the raylet of this host"),
        ):
            cluster.check_answers(address)


ERROR = {"lines": ["a raylet's error"], "pid": "raylet", "is_err": False}


OUTPUT = {"lines": ["a worker's line"], "pid": 17, "ip": "10.0.0.1", "job": "01", "is_err": False}


def test_errors_are_logged_once_and_not_printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    log_errors()
    log_errors()
    with caplog.at_level("INFO", "raykv.ray"):
        worker.print_to_stdstream(ERROR, ignore_prefix=False)
        worker.print_to_stdstream(OUTPUT, ignore_prefix=True)
    assert caplog.messages == ["Ray says: a raylet's error"]
    assert capsys.readouterr().out.strip() == "a worker's line"


GONE = Raylet("gone", "head:1", 20.0)


@pytest.mark.parametrize(
    "there",
    [
        [],
        [Raylet("older", "head:1", 10.0)],
        [Raylet("of-another-cluster", "head:2", 30.0)],
        [GONE],
    ],
)
def test_ray_node_has_no_successor_until_one_of_its_cluster_begins(there: list[Raylet]) -> None:
    assert successor(GONE, there) is None


def test_latest_ray_node_of_the_cluster_succeeds_one_that_is_gone() -> None:
    second, third = Raylet("second", "head:1", 30.0), Raylet("third", "head:1", 40.0)
    there = [third, Raylet("older", "head:1", 10.0), second, Raylet("other", "head:2", 50.0)]
    assert successor(GONE, there) == third


LEFT_OVER = """
import ray
from raykv.base.errors import ClusterError
from raykv.cluster.join import join

def init(*_, **__):
    raise SystemExit("Ray connects by itself")

try:
    join("127.0.0.1:1")
except ClusterError:
    pass
ray.init = init
for call in (lambda: ray.get_actor("scheduler"), ray.nodes, ray.remote(init).remote):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
"""


def test_left_over_call_joins_no_cluster() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OVER], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) == 3, ended.stdout


def test_cluster_that_is_slow_to_be_joined_is_waited_for_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("check_reachable", "check_answers"):
        monkeypatch.setattr(cluster, name, lambda _: None)
    monkeypatch.setattr("raykv.base.deadlines.CLIENT_S", 0.05)
    monkeypatch.setattr(cluster, "join", lambda _: time.sleep(0.3))
    with caplog.at_level("WARNING", "raykv"):
        cluster.join_within("127.0.0.1:1", 5.0)
    assert "joining Ray at 127.0.0.1:1 takes long: it is given 5 s" in caplog.text
    with pytest.raises(ClusterError, match=r"does not answer within 0\.1 s"):
        cluster.join_within("127.0.0.1:1", 0.1)
