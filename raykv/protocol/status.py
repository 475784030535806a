"""The state of a cluster, for people and programs: what `raykv status` shows."""

from __future__ import annotations

import msgspec

from raykv.base.ids import Stamp
from raykv.protocol import measures, node, operator


class NodeStatus(node.NodeStats, frozen=True, kw_only=True):
    """One node as its NodeActor reports it and as the scheduler actor sees it; sizes in bytes.

    `pinned_bytes` are of the `pinned_chunks` that are kept from eviction, `locked_bytes` of the
    pool that a GPU may copy from and to directly; `slab_bytes` has each of its slabs. `orders`: the
    number of the operators' orders that it has shown. `metrics`: where Prometheus finds its metrics
    ("host:port"), or why nowhere. `disk`: its disk tier; a node without one has an empty path
    there.
    """

    node_id: str
    life: int
    hostname: str
    pid: int
    chunks: int
    age_s: float
    raykv_version: str = ""
    pinned_bytes: int = 0
    pinned_chunks: int = 0
    metrics: str = ""
    slab_bytes: int = 0
    orders: Stamp = Stamp(0, 0)
    is_leaving: bool = False


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine that a node introduces; `counters` are its own, since its start, and `age_s` is
    since the node has reported.

    An engine that has several places is introduced at each, `place` of `num_places`, with the ranks
    there; the first one has its counters.
    """

    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    age_s: float
    versions: str = ""
    counters: dict[str, int] = {}
    traits: dict[str, str] = {}
    breakers: measures.BreakerReport = measures.BreakerReport()
    place: int = 1
    num_places: int = 1


class NamespaceStatus(msgspec.Struct, frozen=True):
    """What engines share that can use each other's chunks.

    `chunks` and `num_bytes` count every copy; `num_bytes` is None, and `model` and `traits` are
    empty, until this scheduler actor has heard of an engine of the namespace. `traits` say what its
    engines have in common.
    """

    namespace: str
    model: str = ""
    chunks: int = 0
    num_bytes: int | None = None
    engines: int = 0
    traits: dict[str, str] = {}


class ClusterStatus(msgspec.Struct, frozen=True):
    """What `raykv status` shows; `refused` has, by node, why a NodeActor has no pool, and `silent`
    why one does not answer the question of now.

    `metrics`: where the scheduler actor shows its metrics and writes which targets there are.
    `disk_chunks`: by namespace, the chunks on the disks of all nodes. `waiting` engines ask, but
    no node introduces them: by id, the node that each is at, which may be gone. `tenants`: as
    `raykv quota ls`. `orders`: the number of the operators' orders that are in force.
    """

    address: str
    life: int
    raykv_version: str
    paused: bool
    nodes: list[NodeStatus] = []
    engines: list[EngineStatus] = []
    namespaces: dict[str, int] = {}
    refused: dict[str, str] = {}
    spaces: list[NamespaceStatus] = []
    metrics: str = ""
    disk_chunks: dict[str, int] = {}
    waiting: dict[str, str] = {}
    tenants: list[operator.TenantStatus] = []
    silent: dict[str, str] = {}
    orders: Stamp = Stamp(0, 0)


class MoreRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What more room in each pool would have saved in the last `window_s` seconds, an hour at most.

    `prompt_tokens` of requests that have ended since, of which `computed_tokens` were computed.
    With `more_bytes` more in each of the `nodes` pools, `saved_tokens` of these would have been
    loaded. Of sizes above `reach_bytes` less is known, and they save at least so much; None: all
    is known.
    """

    window_s: float
    nodes: int
    pool_bytes: int
    prompt_tokens: int
    computed_tokens: int
    more_bytes: list[int]
    saved_tokens: list[int]
    reach_bytes: int | None = None

    def per_hour(self, tokens: int) -> int:
        """Tokens of the window as a rate."""
        return round(tokens * 3600 / self.window_s) if self.window_s > 0 else 0
