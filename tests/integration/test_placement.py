"""Where an engine's ranks are, by vLLM's own placement code and real actors on two Ray nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raykv.base.errors import SettingError
from raykv.client.cluster import Cluster
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node

pytest.importorskip("vllm")

pytestmark = pytest.mark.integration

DEVICE = "CPU"
"""Stands for GPUs: both Ray nodes have as many."""


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture
def per_node(second: LocalNode) -> int:
    """Devices of each node."""
    return int(ray.cluster_resources()[DEVICE]) // 2


@pytest.fixture
def vllm_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's executors place ranks where this is."""
    from vllm.v1.executor import ray_utils

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(type(ray_utils.current_platform), "ray_device_key", DEVICE)


def parallel_config(world_size: int, group: Any = None) -> Any:
    return SimpleNamespace(
        world_size=world_size,
        placement_group=group,
        tensor_parallel_size=world_size,
        ray_runtime_env=None,
    )


def places(group: Any, bundles: list[int]) -> list[Any]:
    """What ranks in these bundles say at the engine's start."""
    from raykv.vllm.identity.placement import place_of_rank

    asked = [
        ray.remote(Rank)
        .options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )
        .remote(place_of_rank)
        for bundle in bundles
    ]
    return ray.get([rank.place.remote() for rank in asked], timeout=60)


class Rank:
    """An actor where vLLM's Ray executors have theirs."""

    def __init__(self, place_of_rank: Any) -> None:
        self._place_of_rank = place_of_rank

    def place(self) -> Any:
        """See `place_of_rank`."""
        return self._place_of_rank()


def test_ranks_that_vllm_places_on_one_node_share_its_pool(
    per_node: int, vllm_device: None
) -> None:
    from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node, initialize_ray_cluster

    from raykv.vllm.identity.placement import node_of_ranks, place_of_rank, refuse_ranks_elsewhere

    config = parallel_config(per_node)
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    try:
        node_id = node_of_ranks(config, DEVICE)
        taken = get_bundles_sorted_by_node(config.placement_group)
        assert [node for _, node, _ in taken] == [node_id] * per_node
        told = places(config.placement_group, [0])
        assert [place.node_id for place in told] == [node_id]
        refuse_ranks_elsewhere(told, node_id)
        # This process is no rank: vLLM's own ones are on EngineCore's host.
        assert place_of_rank() is None
    finally:
        remove_placement_group(config.placement_group)


def test_ranks_that_vllm_places_on_two_nodes_are_refused_before_anything_starts(
    per_node: int, vllm_device: None
) -> None:
    from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node, initialize_ray_cluster

    from raykv.vllm.identity.placement import node_of_ranks, refuse_ranks_elsewhere

    config = parallel_config(per_node + 1)
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    try:
        with pytest.raises(SettingError, match="span 2 Ray nodes"):
            node_of_ranks(config, DEVICE)
        taken = get_bundles_sorted_by_node(config.placement_group)
        told = places(config.placement_group, [taken[0][0], taken[-1][0]])
        with pytest.raises(SettingError, match="span 2 Ray nodes"):
            refuse_ranks_elsewhere(told, told[0].node_id)
    finally:
        remove_placement_group(config.placement_group)


def test_group_with_bundles_to_spare_is_left_to_vllm_or_to_the_user(
    per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an application of Ray Serve has them, for several engines."""
    from raykv.vllm.identity.placement import node_of_ranks

    bundles = [{"memory": 1.0}, *[{DEVICE: 1.0}] * (per_node + 1)]
    group = placement_group(bundles, "PACK")
    ray.get(group.ready(), timeout=60)
    try:
        where = ray.util.placement_group_table(group)["bundles_to_node_id"]
        # Ray may put more than one on the second node.
        fullest = Counter(where[n] for n in where if n).most_common(1)[0][0]
        together = [n for n in where if n and where[n] == fullest][:2]
        alone = next(n for n in where if n and where[n] != fullest)
        assert node_of_ranks(parallel_config(2, group), DEVICE) == ""
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", ",".join(map(str, together)))
        assert node_of_ranks(parallel_config(2, group), DEVICE) == where[together[0]]
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", f"{alone},{together[0]}")
        with pytest.raises(SettingError, match="span 2 Ray nodes"):
            node_of_ranks(parallel_config(2, group), DEVICE)
    finally:
        remove_placement_group(group)


def test_engine_without_a_placement_group_uses_the_node_of_its_raylet(cluster: Cluster) -> None:
    from raykv.vllm.identity.placement import node_of_ranks

    assert node_of_ranks(parallel_config(2), DEVICE) == ""
