"""A NodeActor of another RayKV on the node."""

from __future__ import annotations

import pytest
import ray

from raykv.base.errors import VersionError
from raykv.client.cluster import Cluster
from raykv.cluster import ask, names
from raykv.cluster import join as clusters
from raykv.protocol.framing import PROTOCOL_VERSION, encode
from raykv.protocol.node import NodeDescription
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration


class OldNodeActor:
    """A NodeActor of a RayKV with another protocol."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def describe(self) -> bytes:
        node = NodeDescription(
            "9.9", "node", 1, "socket", 1, 1, 1, 1, self._num_workers, version=PROTOCOL_VERSION + 1
        )
        return encode(node)


@pytest.mark.parametrize(("num_workers", "is_replaced"), [(0, True), (1, False)])
def test_node_actor_of_other_version_is_replaced_unless_in_use(
    cluster: Cluster, num_workers: int, is_replaced: bool
) -> None:
    cluster.down()
    node_id = clusters.resolve_node_id("")
    name = names.node_actor(node_id)
    actor = (
        ray.remote(OldNodeActor)
        .options(name=name, namespace=names.RAY_NAMESPACE, num_cpus=0)
        .remote(num_workers)
    )
    with pytest.raises(VersionError, match=r"9\.9") as caught:
        ask.describe(actor, 30.0)
    assert caught.value.is_mended is is_replaced
    wait_until(lambda: (ask.find_node_actor(node_id) is None) is is_replaced, 20.0, "it is gone")
    cluster.down()
