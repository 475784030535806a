"""Whatever listens in a small cluster is in the table of deploy/security.md; no engine."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from deploy.listeners import At, table
from raykv.client.cluster import Cluster
from raykv.cluster.processes import argument, command_lines, group_of, is_raylet
from raykv.protocol.events import PublisherSettings
from tests.fixtures.listeners import Found, at_of, listeners, role_of, rows_of
from tests.fixtures.one_node import actors_of_one_node
from tests.fixtures.waiting import wait_until
from tests.house import ROOT

pytestmark = pytest.mark.integration

POOL_BYTES = 64 << 20
ALL_OF_ONE_NODE = {
    "NodeActor",
    "SchedulerActor",
    "PublisherActor",
    "gcs_server",
    "raylet",
    "Ray's dashboard agent",
    "Ray's runtime environments",
}


def pids_of(ray_address: str) -> set[int]:
    """Ray's processes of the cluster, actors among them."""
    (raylet,) = (
        process
        for process, arguments in command_lines()
        if is_raylet(arguments) and argument(arguments, "gcs-address") == ray_address
    )
    group = group_of(raylet.pid)
    together = {process.pid for process, _ in command_lines() if group_of(process.pid) == group}
    return together | {child.pid for child in raylet.children(recursive=True)}


@pytest.fixture(scope="module")
def found(cluster: Cluster) -> Iterator[list[Found]]:
    """What listens while the actors run and events are published."""
    with actors_of_one_node(cluster, POOL_BYTES):
        cluster.publish(PublisherSettings("tcp://*:0", "tcp://*:0"))
        wait_until(
            lambda: (status := cluster.publisher()) is not None and not status.error,
            30.0,
            "events are published",
        )
        yield listeners(pids_of(cluster.address))


@pytest.fixture(scope="module")
def on_loopback(cluster: Cluster) -> bool:
    """Whether that is the node's address, as on a machine without a network."""
    return at_of(cluster.address.rpartition(":")[0]) is At.LOOPBACK


def test_table_of_the_page_is_this_one() -> None:
    page = (ROOT / "deploy" / "security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == table().splitlines(), "run: python deploy/listeners.py"


def test_every_socket_that_listens_is_in_the_table(found: list[Found], on_loopback: bool) -> None:
    assert {each.role for each in found} >= ALL_OF_ONE_NODE
    unknown = [each for each in found if not rows_of(each, on_loopback=on_loopback)]
    assert not unknown, f"bind them to loopback, or explain them in deploy/listeners.py: {unknown}"


def test_metrics_and_events_are_at_the_nodes_address_alone(
    found: list[Found], on_loopback: bool
) -> None:
    """And Ray's calls of each actor where Ray has them."""
    all_of_node = At.LOOPBACK if on_loopback else At.ALL
    node = At.LOOPBACK if on_loopback else At.NODE
    assert {
        role: Counter(each.at for each in found if each.role == role)
        for role in ("NodeActor", "SchedulerActor", "PublisherActor")
    } == {
        "NodeActor": Counter([all_of_node, node, At.ABSTRACT]),
        "SchedulerActor": Counter([all_of_node, node]),
        "PublisherActor": Counter([all_of_node, node, node]),
    }


def test_socket_that_is_not_in_the_table_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as stranger:
        port = stranger.getsockname()[1]
        (mine,) = [each for each in listeners([os.getpid()]) if each.port == port]
    assert mine.at is At.ALL
    assert not rows_of(mine._replace(role="Serve's controller"), on_loopback=False)
    metrics = mine._replace(role="SchedulerActor", at=At.NODE)
    assert [row.what for row in rows_of(metrics, on_loopback=False)] == ["metrics"]
    assert not rows_of(metrics._replace(at=At.FILE), on_loopback=False)


@pytest.mark.parametrize(
    ("address", "at"),
    [
        ("0.0.0.0", At.ALL),
        ("::", At.ALL),
        ("127.0.0.2", At.LOOPBACK),
        ("::ffff:127.0.0.1", At.LOOPBACK),
        ("::1", At.LOOPBACK),
        ("::ffff:10.0.0.1", At.NODE),
        ("10.0.0.1", At.NODE),
    ],
)
def test_address_says_who_can_connect(address: str, at: At) -> None:
    assert at_of(address) is at


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("ray::NodeActor.fetch", "NodeActor"),
        ("ray::IDLE", "a Ray worker"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("/x/bin/python3.11 -P -m raykv.vllm.command serve m", "vLLM's API server"),
        ("/x/bin/python /x/bin/raykv status", "a client of Ray"),
    ],
)
def test_role_is_told_by_the_command_line(command_line: str, role: str) -> None:
    assert role_of(command_line) == role
