"""On which Ray node an engine's ranks run: they share the pool of one NodeActor.

Where vLLM starts the ranks itself they run on EngineCore's host. A Ray executor puts them where
the bundles of its placement group are, which may be another node, or several:

    bundles of the ranks ──► node whose pool is used ──► compared with where each rank says it is
      (EngineCore, before anything is started)             (the handshake at the engine's start)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from raykv.base.errors import SettingError

BUNDLES_CHOSEN = "VLLM_RAY_BUNDLE_INDICES"
"""Where the user tells vLLM which bundles to take, by number: "2,3"."""


@dataclass
class RankPlace(KVConnectorHandshakeMetadata):
    """What a rank that is a Ray actor reports to EngineCore: the node that it runs on."""

    node_id: str


def place_of_rank() -> RankPlace | None:
    """Where this process is; None if vLLM started it on EngineCore's host."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return RankPlace(str(ray.get_runtime_context().get_node_id()))


def refuse_several_hosts(parallel_config: Any) -> None:
    """A chunk would exist only where every node of the engine has its part.

    Raises:
        SettingError: the configuration spreads the ranks of the engine over several nodes.
    """
    if parallel_config.nnodes_within_dp > 1:
        raise SettingError(_several(f"{parallel_config.nnodes_within_dp} nodes"))
    backend, world_size = parallel_config.distributed_executor_backend, parallel_config.world_size
    if backend == "external_launcher" and world_size > 1:
        raise SettingError(
            f"distributed_executor_backend={backend!r} makes {world_size} engines of "
            f"{world_size} ranks, none of which has a whole chunk: RayKV does not support it yet"
        )


def node_of_ranks(parallel_config: Any, device: str) -> str:
    """The Ray node of the bundles that the ranks are in; empty if that is left to the handshake.

    Args:
        parallel_config: vLLM's, once its executor has started the ranks.
        device: what Ray calls the devices of the ranks, like "GPU"; empty if it has no name.

    Raises:
        SettingError: they are on several nodes.
    """
    group = parallel_config.placement_group
    if group is None:
        return ""
    chosen = [int(number) for number in os.environ.get(BUNDLES_CHOSEN, "").split(",") if number]
    specs = enumerate(group.bundle_specs)
    bundles = chosen or [n for n, bundle in specs if not device or bundle.get(device)]
    node_ids: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    nodes = {node_ids[number] for number in bundles}
    if len(nodes) == 1:
        return nodes.pop()
    # With more bundles than ranks it is vLLM's choice which of them are taken.
    if len(bundles) == parallel_config.world_size:
        refuse_several_nodes(nodes)
    return ""


def refuse_ranks_elsewhere(places: Sequence[RankPlace], node_id: str) -> None:
    """Refuse ranks that can't reach the NodeActor of `node_id`, the engine's.

    Raises:
        SettingError: the ranks are on several nodes, or all on another one.
    """
    nodes = {place.node_id for place in places}
    refuse_several_nodes(nodes)
    for other in nodes - {node_id}:
        raise SettingError(
            f"the ranks of this engine run on Ray node {other[:12]} and RayKV was to use the pool "
            f"of node {node_id[:12]}: set node_id to {other!r}, or leave it out and let vLLM run "
            "where its ranks are"
        )


def refuse_several_nodes(nodes: Collection[str]) -> None:
    """A chunk would exist only where every node of the engine has its part.

    Raises:
        SettingError: there are several.
    """
    if len(nodes) > 1:
        listed = ", ".join(sorted(node[:12] for node in nodes))
        raise SettingError(_several(f"{len(nodes)} Ray nodes ({listed})"))


def _several(nodes: str) -> str:
    return (
        f"the ranks of this engine span {nodes}, which RayKV does not support yet: only engines "
        "on one node are, so let tensor_parallel_size fit a node"
    )
