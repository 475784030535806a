"""An engine whose Ray node has ended, while the one that it is connected to lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raykv.base.errors import ClusterError
from raykv.base.ids import SLOT_ALIGNMENT, NodeId
from raykv.base.settings import Settings
from raykv.client.cluster import Cluster
from raykv.engine.listed import EnginePlace
from raykv.engine.runtime import EngineRuntime, new_life
from raykv.engine.view import EngineView
from raykv.lab.hosts.local_nodes import add_local_node
from raykv.protocol.engine import EngineHello
from raykv.protocol.findings import Severity
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

LONG_S = 90.0

JOINED_FIRST = """
import sys
import ray
from raykv.base.errors import ClusterError
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.base.settings import Settings
from raykv.engine.runtime import EngineRuntime, new_life
from raykv.engine.view import EngineView
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.engine import EngineHello

def node_of_ranks():
    print("connected:", ray.is_initialized())
    raise ClusterError("enough")

try:
    EngineRuntime(
        Settings(ray_address=sys.argv[1], pool_bytes=64 * SLOT_ALIGNMENT),
        EngineView(Settings(request_deadline_s=50.0)),
        EngineHello(
            PROTOCOL_VERSION, "e", new_life(), "ns", "tiny", slot_bytes={0: SLOT_ALIGNMENT}
        ),
        node_of_ranks=node_of_ranks,
    )
except ClusterError as error:
    print(error)
"""


def test_ranks_are_looked_for_once_the_cluster_is_joined(cluster: Cluster) -> None:
    """Before, a call to Ray would start a cluster of its own, or join a stranger's."""
    told = subprocess.run(
        [sys.executable, "-c", JOINED_FIRST, cluster.address],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    assert told.stdout.splitlines()[-2:] == ["connected: True", "enough"]


def test_engine_whose_ranks_are_in_another_cluster_says_so(cluster: Cluster) -> None:
    settings = Settings(ray_address=cluster.address, pool_bytes=64 * SLOT_ALIGNMENT)
    hello = EngineHello("engine", new_life(), "ns", "tiny", slot_bytes={0: SLOT_ALIGNMENT})
    runtime = EngineRuntime(settings, EngineView(settings), hello, node_of_ranks=lambda: None)
    try:
        here, strange = EnginePlace(NodeId(runtime.node_id)), EnginePlace(NodeId("f" * 56))
        said = (
            "Ray node ffffffffffff, which is no live node of the cluster at .* `ray start --head`"
        )
        with pytest.raises(ClusterError, match=said):
            runtime.settle([here, strange])
        runtime.settle([here])
    finally:
        runtime.stop()


@pytest.mark.extended
def test_engine_waits_for_the_next_ray_node_of_its_host_and_goes_on_there(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.down()
    second = add_local_node(cluster.address)
    settings = Settings(
        ray_address=cluster.address, node_id=second.node_id, pool_bytes=64 * SLOT_ALIGNMENT
    )
    sizes = {0: SLOT_ALIGNMENT}
    hello = EngineHello("engine", new_life(), "ns", "tiny", slot_bytes=sizes)
    view = EngineView(Settings(request_deadline_s=50.0))
    runtime = EngineRuntime(settings, view, hello)
    third = None
    try:
        runtime.start()
        wait_until(
            lambda: [each.node_id for each in cluster.status().engines] == [second.node_id],
            LONG_S,
            "it is attached",
        )
        second.stop()
        wait_until(
            lambda: cluster.status().waiting == {"engine": second.node_id}, LONG_S, "it waits"
        )
        (finding,) = [
            each
            for each in cluster.doctor()
            if each.severity is Severity.FAIL and "engine engine" in each.what
        ]
        assert "its Ray node" in finding.what
        assert "is gone" in finding.what
        assert runtime.node_id == second.node_id
        third = add_local_node(cluster.address)
        wait_until(lambda: runtime.node_id == third.node_id, LONG_S, "it is at the next node")
        wait_until(
            lambda: [each.node_id for each in cluster.status().engines] == [third.node_id],
            LONG_S,
            "it is attached there",
        )
        assert cluster.status().waiting == {}
        runtime.session.drain()
        assert view.node_ids == [third.node_id]
        assert runtime.node is not None
        assert runtime.node.node_id == third.node_id
        assert caplog.text.count("of this engine is gone, and with it the cache") == 1
    finally:
        runtime.stop()
        cluster.down()
        for node in (second, third):
            if node is not None:
                node.stop()
