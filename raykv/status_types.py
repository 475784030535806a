"""The state of a cluster, for people and programs: what `raykv status` shows."""

from __future__ import annotations

import msgspec

from raykv.breaker_types import BreakerReport


class NodeStatus(msgspec.Struct, frozen=True):
    """One node as the scheduler actor and its NodeActor see it; sizes in bytes.

    `metrics`: where Prometheus finds its metrics ("host:port"), or why nowhere.
    """

    node_id: str
    epoch: int
    hostname: str
    pid: int
    pool_bytes: int
    prefaulted_bytes: int
    used_bytes: int
    free_slots: int
    leased_slots: int
    chunks: int
    bytes_stored: int
    bytes_loaded: int
    chunks_refused: int
    num_workers: int
    age_s: float
    raykv_version: str = ""
    bytes_fetched: int = 0
    bytes_sent: int = 0
    quarantined: int = 0
    breakers: BreakerReport = BreakerReport()
    metrics: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """One attached engine; `counters` are its own, since its start."""

    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    leased_slots: int
    age_s: float
    versions: str = ""
    counters: dict[str, int] = {}
    traits: dict[str, str] = {}
    breakers: BreakerReport = BreakerReport()


class ClusterStatus(msgspec.Struct, frozen=True):
    """What `raykv status` shows; `refused` has, by node, why a NodeActor has no pool.

    `metrics`: where the scheduler actor shows its metrics and writes which targets there are.
    """

    address: str
    epoch: int
    raykv_version: str
    paused: bool
    nodes: list[NodeStatus] = []
    engines: list[EngineStatus] = []
    namespaces: dict[str, int] = {}
    refused: dict[str, str] = {}
    metrics: str = ""
