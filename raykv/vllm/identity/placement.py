"""On which Ray nodes an engine's ranks run, and which part of its chunks each node has.

Where vLLM starts the ranks itself they run on EngineCore's host, or on the hosts that the user has
started it on. A Ray executor puts them where the bundles of its placement group are.

    one node, one pipeline stage ──► it is known before anything is started: one place
    else ──► each rank says where it is (the handshake at the engine's start) ──► places

A place has the ranks of one pipeline stage on one node, whose pages are alike: two stages on a node
are two places.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from raykv.base import geometry
from raykv.base.errors import SettingError, ThreadError
from raykv.base.ids import NodeId, shape_name
from raykv.base.threads import begun
from raykv.cluster.join import Raylet, raylets, successor
from raykv.engine.listed import EnginePlace
from raykv.engine.runtime import new_life
from raykv.memory.limits import worker_limits
from raykv.memory.room import tightest

# Between two looks at the host's processes, while a rank has no line to its NodeActor.
LOOK_AGAIN_S = 1.0

BUNDLES_CHOSEN = "VLLM_RAY_BUNDLE_INDICES"
"""Where the user tells vLLM which bundles to take, by number: "2,3"."""


@dataclass
class RankPlace(KVConnectorHandshakeMetadata):
    """What a rank reports to EngineCore: the node that it runs on, and what it has of a chunk.

    `node_id` is empty on EngineCore's host, and `why` says why where no node can be named.
    `part_bytes`: of its part of a chunk of any KV group. `layers`: digest of the names of its
    layers, by KV group. `free_bytes` are left to a pool there.
    """

    node_id: str
    why: str = ""
    rank: int = 0
    stage: int = 0
    part_bytes: int = 0
    layers: str = ""
    groups: list[int] = field(default_factory=list)
    lacks: list[int] = field(default_factory=list)
    free_bytes: int = 0


def place_of_rank(
    spec: Any, parallel_config: Any, host: HostNode | None = None
) -> RankPlace | None:
    """Where this process is, of whose chunks `spec` knows the sizes. None where that is certain:
    what `MultiConnector` hands over is the first connector's that says something.

    `host`: this one, where vLLM has started ranks on several.
    """
    is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if not is_actor and has_one_place(parallel_config, ()):
        return None
    place = rank_of(spec)
    if is_actor:
        place.node_id = str(ray.get_runtime_context().get_node_id())
    elif host is not None:
        place.node_id, place.why = host.node_id, host.why
    return place


def rank_of(spec: Any) -> RankPlace:
    """What the rank of `spec` has of a chunk."""
    config = spec.config
    names = {str(each.group_id): list(each.layer_names) for each in config.groups}
    return RankPlace(
        "",
        rank=config.parallel.rank,
        stage=config.parallel.rank * config.parallel.pp_size // config.parallel.world_size,
        part_bytes=config.worker_kv_bytes_per_block * spec.blocks_per_chunk,
        layers=_digest(names),
        groups=spec.group_ids,
        lacks=[each.group_id for each in config.groups if not each.layer_names],
        free_bytes=tightest(worker_limits()).free_bytes,
    )


class HostNode:
    """The Ray node of this host, for ranks that live on when it ends, as those of `--nnodes` do.

    `why`: why none can be named; else empty. After the start a thread of its own reads the host's
    processes, one look at a time: that may take long.

    Args:
        address: of the cluster; empty: the only one of this host.
    """

    def __init__(self, address: str) -> None:
        there = [r for r in raylets() if r.is_own and address in ("", "auto", r.address)]
        self._raylet = there[0] if len(there) == 1 else None
        self.why, host = "", socket.gethostname()
        if not there:
            self.why = f"no Ray node of this user runs on host {host}: start Ray there first"
        elif self._raylet is None:
            self.why = (
                f"{len(there)} Ray nodes run on host {host}: set ray_address to the cluster's"
            )
        self._look: Future[list[Raylet]] | None = None
        self._look_at = 0.0

    @property
    def node_id(self) -> str:
        """Its id, as it was found last, or empty."""
        return "" if self._raylet is None else self._raylet.node_id

    def now(self) -> str:
        """`node_id`, and begin to look for the next one. Never waits."""
        if self._raylet is None:
            return ""
        look, now = self._look, time.monotonic()
        if look is not None and look.done():
            self._look = None
            there: list[Raylet] = []
            with suppress(Exception):
                there = look.result(timeout=0)
            if not any(each.node_id == self._raylet.node_id for each in there):
                self._raylet = successor(self._raylet, there) or self._raylet
        if self._look is None and now >= self._look_at:
            self._look_at = now + LOOK_AGAIN_S
            with suppress(ThreadError):
                self._look = begun(raylets)
        return self._raylet.node_id


def refuse_launcher(parallel_config: Any) -> None:
    """Each rank would be an engine that has no whole chunk; or what some ranks say of their copies
    does not reach the engine.

    Raises:
        SettingError: of the executor.
    """
    backend, world_size = parallel_config.distributed_executor_backend, parallel_config.world_size
    if backend == "external_launcher" and world_size > 1:
        raise SettingError(
            f"distributed_executor_backend={backend!r} makes {world_size} engines of "
            f"{world_size} ranks, none of which has a whole chunk: RayKV does not support it yet"
        )
    is_first_ray = not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    if backend == "ray" and is_first_ray and parallel_config.pipeline_parallel_size > 1:
        raise SettingError(
            "vLLM's first Ray executor hands over what the last pipeline stage says alone, so that "
            "no copy of the others would ever end: leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND at 1"
        )


def nodes_of_ranks(parallel_config: Any, device: str) -> set[str] | None:
    """The Ray nodes of the bundles that the ranks are in; none where vLLM starts them itself, and
    None if that is vLLM's choice.

    Args:
        parallel_config: vLLM's, once its executor has started the ranks.
        device: what Ray calls the devices of the ranks, like "GPU"; empty if it has no name.
    """
    group = parallel_config.placement_group
    if group is None:
        return set()
    chosen = [int(number) for number in os.environ.get(BUNDLES_CHOSEN, "").split(",") if number]
    specs = enumerate(group.bundle_specs)
    bundles = chosen or [n for n, bundle in specs if not device or bundle.get(device)]
    node_ids: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    nodes = {node_ids[number] for number in bundles}
    # With more bundles than ranks it is vLLM's choice which of them are taken.
    is_certain = len(nodes) == 1 or len(bundles) == parallel_config.world_size
    return nodes if is_certain else None


def has_one_place(parallel_config: Any, nodes: Collection[str] | None) -> bool:
    """Whether it is known before the ranks have said so that all are at one place."""
    is_one_stage = parallel_config.pipeline_parallel_size == 1
    return (
        is_one_stage
        and parallel_config.nnodes_within_dp == 1
        and nodes is not None
        and len(nodes) <= 1
    )


def refuse_ranks_elsewhere(places: Sequence[RankPlace], node_id: str) -> None:
    """Refuse ranks that can't reach the NodeActor of `node_id`, the engine's only one.

    Raises:
        SettingError: some are on another node.
    """
    for other in {place.node_id for place in places if place.node_id} - {node_id}:
        raise SettingError(
            f"the ranks of this engine run on Ray node {other[:12]} and RayKV was to use the pool "
            f"of node {node_id[:12]}: set node_id to {other!r}, or leave it out and let vLLM run "
            "where its ranks are"
        )


def places_of(ranks: Sequence[RankPlace], world_size: int, own: str) -> list[EnginePlace]:
    """The places of an engine, whose ranks have said where they are; `own`: EngineCore's node.

    Raises:
        SettingError: not all have, or what they have can't be kept.
    """
    known = {each.rank: each for each in ranks}
    if known.keys() != set(range(world_size)):
        raise SettingError(
            f"{world_size - len(known)} of {world_size} ranks of this engine have not said on "
            "which node they run: RayKV can't be beside another connector that has a handshake of "
            "its own, nor with prefill_context_parallel_size above 1, where ranks are on several "
            "nodes, or in several pipeline stages"
        )
    together: dict[tuple[str, int], list[RankPlace]] = {}
    for _, each in sorted(known.items()):
        if each.why:
            raise SettingError(each.why)
        if each.lacks:
            raise SettingError(
                f"pipeline stage {each.stage} has no layers of KV group {each.lacks[0]} of this "
                "model: RayKV does not support such stages yet"
            )
        together.setdefault((each.node_id or own, each.stage), []).append(each)
    # Stages may be cut differently, and ranks spread otherwise: such engines share no part.
    stages = [
        [stage, [r.rank for r in some], some[0].layers] for (_, stage), some in together.items()
    ]
    shape = shape_name(len(together), _digest(stages))
    return [
        _place(node_id, "" if len(together) == 1 else f"{stage}.{_named(some)}.{shape}", some)
        for (node_id, stage), some in together.items()
    ]


def _named(ranks: Sequence[RankPlace]) -> str:
    """The first rank of a place, and the last; no other place of the stage begins with that one."""
    first, last = ranks[0].rank, ranks[-1].rank
    return f"{first}-{last}" if first < last else str(first)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def refuse_spread(places: Sequence[EnginePlace], spec: Any, connector: str) -> None:
    """What needs all ranks at one place; nothing is refused of an engine that has one.

    Raises:
        SettingError: naming the setting.
    """
    if len(places) == 1:
        return
    where = f"the ranks of this engine are at {len(places)} places (nodes or pipeline stages)"
    if spec.config.canonical_layout:
        raise SettingError(
            f"{where}, none of which has whole canonical pages: leave out canonical_layout"
        )
    if connector == "RayKVHiddenStatesConnector":
        raise SettingError(f"{where}: hidden states are captured at one only; use RayKVConnector")


def _place(node_id: str, part: str, ranks: Sequence[RankPlace]) -> EnginePlace:
    numbers = tuple(each.rank for each in ranks)
    size = geometry.aligned(max(each.part_bytes for each in ranks) * len(ranks))
    groups = dict.fromkeys(ranks[0].groups, size)
    free_bytes = min(each.free_bytes for each in ranks)
    if not part:
        return EnginePlace(NodeId(node_id), free_bytes=free_bytes)
    return EnginePlace(NodeId(node_id), part, new_life(), numbers, groups, free_bytes)
