"""What `raykv status` shows of nodes and engines."""

from __future__ import annotations

import msgspec

from raykv.cluster.breaker import aged, without
from raykv.directory.members import Engine, Node
from raykv.directory.pins import Pins
from raykv.protocol.measures import OWN_NODE, BreakerReport
from raykv.protocol.status import EngineStatus, NodeStatus

NEWS_S = 3.0
"""A node that has reported within it is up to date: it reports every second."""


def _breakers(engine: Engine, node: Node | None, now: float) -> BreakerReport:
    """The breakers that an engine reported, without lines that have come back since.

    Workers speak with the engine's steps only: while it has no requests it does not learn that a
    line is there again, but the node does.
    """
    told = aged(engine.breakers, now - engine.last_seen)
    if node is None or now - node.last_report > NEWS_S:
        return told
    is_back = node.stats.ranks.get(engine.engine_id, 0) >= engine.num_ranks
    return without(told, OWN_NODE) if is_back else told


def node_status(node: Node, now: float, pins: Pins) -> NodeStatus:
    """A summary of a node for people."""
    pinned = pins.on_node(node)
    reported = msgspec.structs.asdict(node.stats)
    reported["breakers"] = aged(node.stats.breakers, now - node.last_report)
    return NodeStatus(
        **reported,
        node_id=node.node_id,
        epoch=node.epoch,
        hostname=node.hostname,
        pid=node.pid,
        free_slots=node.book.num_free,
        leased_slots=node.book.table.num_leases,
        chunks=node.book.num_chunks,
        age_s=now - node.last_report,
        raykv_version=node.raykv_version,
        pinned_chunks=pinned.kept_chunks,
        pinned_bytes=pinned.kept_bytes,
        metrics=node.stats.metrics_address or node.stats.metrics_problem,
        slab_bytes=node.book.geometry.slab_bytes,
    )


def engine_status(engine: Engine, node: Node | None, now: float) -> EngineStatus:
    """A summary of an engine for people."""
    leases = [] if node is None else node.book.leases().values()
    return EngineStatus(
        engine_id=engine.engine_id,
        node_id=engine.node_id,
        namespace=engine.namespace,
        model=engine.model,
        num_ranks=engine.num_ranks,
        leased_slots=sum(lease.engine_id == engine.engine_id for lease in leases),
        age_s=now - engine.attached_at,
        versions=engine.versions,
        counters=engine.counters,
        traits=engine.traits,
        breakers=_breakers(engine, node, now),
    )
