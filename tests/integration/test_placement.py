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
        pipeline_parallel_size=1,
        nnodes_within_dp=1,
        ray_runtime_env=None,
    )


def said_by_a_rank(rank: int) -> Any:
    """What a rank of two says at the engine's start, in the process that calls this."""
    from raykv.vllm.identity.placement import place_of_rank

    sizes = SimpleNamespace(rank=rank, world_size=2, pp_size=1)
    group = SimpleNamespace(group_id=0, layer_names=["layer"])
    config = SimpleNamespace(parallel=sizes, groups=[group], worker_kv_bytes_per_block=4096)
    spec = SimpleNamespace(config=config, group_ids=[0], blocks_per_chunk=1)
    return place_of_rank(spec, parallel_config(2))


def places(group: Any, bundles: list[int]) -> list[Any]:
    """What ranks in these bundles say at the engine's start."""
    asked = [
        ray.remote(Rank)
        .options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )
        .remote(said_by_a_rank)
        for bundle in bundles
    ]
    return ray.get([rank.place.remote(number) for number, rank in enumerate(asked)], timeout=60)


class Rank:
    """An actor where vLLM's Ray executors have theirs."""

    def __init__(self, said_by_a_rank: Any) -> None:
        self._said_by_a_rank = said_by_a_rank

    def place(self, rank: int) -> Any:
        """See `said_by_a_rank`."""
        return self._said_by_a_rank(rank)


def test_ranks_that_vllm_places_on_one_node_share_its_pool(
    per_node: int, vllm_device: None
) -> None:
    from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node, initialize_ray_cluster

    from raykv.vllm.identity.placement import (
        has_one_place,
        nodes_of_ranks,
        refuse_ranks_elsewhere,
    )

    config = parallel_config(per_node)
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    try:
        nodes = nodes_of_ranks(config, DEVICE)
        assert has_one_place(config, nodes)
        (node_id,) = nodes or set()
        taken = get_bundles_sorted_by_node(config.placement_group)
        assert [node for _, node, _ in taken] == [node_id] * per_node
        told = places(config.placement_group, [0])
        assert [place.node_id for place in told] == [node_id]
        refuse_ranks_elsewhere(told, node_id)
        # This process is no rank: vLLM's own ones are on EngineCore's host.
        assert said_by_a_rank(0) is None
    finally:
        remove_placement_group(config.placement_group)


def test_ranks_that_vllm_places_on_two_nodes_make_two_places(
    per_node: int, vllm_device: None
) -> None:
    from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node, initialize_ray_cluster

    from raykv.vllm.identity.placement import has_one_place, nodes_of_ranks, places_of

    config = parallel_config(per_node + 1)
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    try:
        nodes = nodes_of_ranks(config, DEVICE)
        assert not has_one_place(config, nodes)
        taken = get_bundles_sorted_by_node(config.placement_group)
        assert nodes == {node for _, node, _ in taken}
        told = places(config.placement_group, [taken[0][0], taken[-1][0]])
        found = places_of(told, 2, "")
        assert [each.node_id for each in found] == [taken[0][1], taken[-1][1]]
        assert [each.ranks for each in found] == [(0,), (1,)]
    finally:
        remove_placement_group(config.placement_group)


def test_group_with_bundles_to_spare_is_left_to_vllm_or_to_the_user(
    per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an application of Ray Serve has them, for several engines."""
    from raykv.vllm.identity.placement import nodes_of_ranks

    bundles = [{"memory": 1.0}, *[{DEVICE: 1.0}] * (per_node + 1)]
    group = placement_group(bundles, "PACK")
    ray.get(group.ready(), timeout=60)
    try:
        where = ray.util.placement_group_table(group)["bundles_to_node_id"]
        # Ray may put more than one on the second node.
        fullest = Counter(where[n] for n in where if n).most_common(1)[0][0]
        together = [n for n in where if n and where[n] == fullest][:2]
        alone = next(n for n in where if n and where[n] != fullest)
        assert nodes_of_ranks(parallel_config(2, group), DEVICE) is None
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", ",".join(map(str, together)))
        assert nodes_of_ranks(parallel_config(2, group), DEVICE) == {where[together[0]]}
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", f"{alone},{together[0]}")
        both = {where[alone], where[together[0]]}
        assert nodes_of_ranks(parallel_config(2, group), DEVICE) == both
    finally:
        remove_placement_group(group)


def test_engine_without_a_placement_group_uses_the_node_of_its_raylet(cluster: Cluster) -> None:
    from raykv.vllm.identity.placement import has_one_place, nodes_of_ranks

    assert nodes_of_ranks(parallel_config(2), DEVICE) == set()
    assert has_one_place(parallel_config(2), set())
