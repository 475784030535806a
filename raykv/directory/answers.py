"""Answers of the directory to people, routers and readers of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from raykv.base.ids import Key, Namespace
from raykv.base.tenants import OTHERS
from raykv.cluster.breaker import aged, without
from raykv.directory.known.directory import Directory
from raykv.directory.known.events import KnownEvent
from raykv.directory.known.holdings import IN_RAM, Held
from raykv.directory.known.members import ReportedNode
from raykv.prompts.prefixes import loadable_of
from raykv.protocol.columns import Keys, Numbers, Source, SourceKind, SourceRows, Texts
from raykv.protocol.descriptions import parse_groups
from raykv.protocol.events import KEYLESS, MOST_EVENTS, EventPage
from raykv.protocol.listing import Where
from raykv.protocol.measures import OWN_NODE, BreakerReport
from raykv.protocol.node import ReportedEngine
from raykv.protocol.operator import OrderedShare, OrdersDocument, TenantStatus
from raykv.protocol.reader import PrefixPage, PrefixQuery, SpacePage, WherePage, WhereQuery
from raykv.protocol.status import ClusterStatus, EngineStatus, NamespaceStatus, NodeStatus

NEWS_S = 3.0
"""A node that has reported within it is up to date: it reports every second at least."""

MOST_COPIES = 16_384
"""Rows of one answer to where chunks are."""


def event_page(directory: Directory, life: int, after: int, now: float) -> EventPage:
    """What follows a place of the event log; of another life, or of none, its beginning."""
    is_here = life == directory.life
    found, is_gap = directory.events.after(after if is_here else 0, MOST_EVENTS)
    began_at = directory.began_at if directory.began_at is not None else now
    return EventPage(
        directory.life,
        found[0].seq if found else after + 1,
        directory.events.last_seq,
        is_gap,
        Texts.of(each.node_id for each in found),
        Texts.of(each.namespace for each in found),
        bytes(each.kind for each in found),
        Keys.of(each.key or KEYLESS for each in found),
        Numbers.of(each.life for each in found),
        Numbers.of(each.number for each in found),
        Numbers.of(_age_ms(each, began_at, now) for each in found),
    )


def _age_ms(event: KnownEvent, began_at: float, now: float) -> int:
    return int(1000 * max(0.0, now - (event.at or began_at)))


def where_page(directory: Directory, query: WhereQuery) -> WherePage:
    """Which nodes have chunks, in RAM or on disk; of as many keys as an answer has room for."""
    keys = query.keys[: max(1, MOST_COPIES // (2 * len(directory.members) or 1))]
    found = directory.where(Namespace(query.namespace), [Key(key) for key in keys])
    return WherePage(len(keys), SourceRows.of(map(_copies, found)))


def _copies(held: Held) -> list[Source]:
    pools = [Source(each.node_id) for each in held if each.where in IN_RAM]
    disks = [each.node_id for each in held if each.where & Where.DISK]
    return pools + [Source(node_id, SourceKind.DISK) for node_id in disks]


# Prompts

ANYWHERE = ""
"""Has what any node has."""


def prefix_page(directory: Directory, query: PrefixQuery) -> PrefixPage:
    """How much of prompts each node has: a number for each prompt and node instead of a row for
    each chunk and copy.
    """
    found = directory.where(Namespace(query.namespace), list(map(Key, query.keys)))
    groups = parse_groups(query.chunks)
    by_prompt: list[list[dict[str, int]]] = []
    first = 0
    for at in range(0, len(query.counts), len(groups)):
        parts = []
        for count in query.counts[at : at + len(groups)]:
            parts.append(_bits(found[first : first + count]))
            first += count
        by_prompt.append(parts)
    nodes = sorted({name for parts in by_prompt for part in parts for name in part} - {ANYWHERE})
    rows = [
        [loadable_of(groups, [part.get(name, 0) for part in parts]) for name in (*nodes, ANYWHERE)]
        for parts in by_prompt
    ]
    return PrefixPage(
        nodes,
        [tokens for row in rows for tokens in row[:-1]],
        [row[-1] for row in rows],
    )


def _bits(found: Sequence[Held]) -> dict[str, int]:
    """Which chunks each node has, and any: the bits of a number, the first chunk's the lowest.

    Keys in the same places have the same object.
    """
    bits: dict[str, int] = {}
    at = 0
    for _, same in groupby(found, key=id):
        run = list(same)
        for name in {*(each.node_id for each in run[0]), *([ANYWHERE] if run[0] else [])}:
            bits[name] = bits.get(name, 0) | (1 << len(run)) - 1 << at
        at += len(run)
    return bits


# Sums


def chunk_counts(members: Iterable[ReportedNode]) -> Counter[tuple[Namespace, Where]]:
    """Chunks by namespace and tier, RAM or DISK; every node's copy counts."""
    counts: Counter[tuple[Namespace, Where]] = Counter()
    for member in members:
        counts.update(member.chunks)
    return +counts


def space_page(directory: Directory) -> SpacePage:
    """All namespaces, and where their engines are."""
    spaces = _spaces(directory)
    nodes: dict[str, set[str]] = {space.namespace: set() for space in spaces}
    for member in directory.members.values():
        for namespace in member.namespaces:
            nodes[namespace].add(member.report.node_id)
    return SpacePage(spaces, [sorted(nodes[each.namespace]) for each in spaces])


def _spaces(directory: Directory) -> list[NamespaceStatus]:
    """Namespaces with chunks, even if only on disks, or with engines."""
    counts = chunk_counts(directory.members.values())
    engines = Counter(
        Namespace(each.hello.namespace)
        for member in directory.members.values()
        for each in member.engines.values()
    )
    return [
        _space(directory, namespace, counts[namespace, Where.RAM], engines[namespace])
        for namespace in sorted({*engines, *(namespace for namespace, _ in counts)})
    ]


def _space(directory: Directory, name: Namespace, chunks: int, engines: int) -> NamespaceStatus:
    hello = directory.introduced.get(name)
    if hello is None:
        return NamespaceStatus(name, chunks=chunks, engines=engines)
    num_bytes = chunks * max(hello.slot_bytes.values(), default=0)
    return NamespaceStatus(name, hello.model, chunks, num_bytes, engines, hello.traits)


def tenants(members: Iterable[ReportedNode], document: OrdersDocument | None) -> list[TenantStatus]:
    """Tenants with a quota, and others that have chunks; requests without a tenant come first."""
    shares = document.shares if document is not None else {}
    in_pools: Counter[str] = Counter()
    on_disks: Counter[str] = Counter()
    for member in members:
        in_pools.update(member.report.tenant_bytes)
        on_disks.update(member.report.stats.disk.tenant_bytes)
    if not (shares or in_pools.keys() - {""} or on_disks.keys() - {""}):
        return []
    found = []
    for label in sorted({"", *shares, *in_pools, *on_disks}):
        share = shares.get(label) or OrderedShare(label or OTHERS)
        sizes, bounds = (in_pools[label], on_disks[label]), (share.guaranteed, share.most)
        found.append(TenantStatus(share.name, label, *sizes, label in shares, *bounds))
    return found


def cluster_status(
    directory: Directory, document: OrdersDocument | None, base: ClusterStatus, now: float
) -> ClusterStatus:
    """`base` with all that the directory knows."""
    members = list(directory.members.values())
    counts = chunk_counts(members)
    return msgspec.structs.replace(
        base,
        life=directory.life,
        paused=document is not None and document.is_paused,
        orders=document.stamp if document is not None else base.orders,
        nodes=[_node_status(member, now) for member in members],
        engines=[
            _engine_status(engine, member, now)
            for member in members
            for engine in member.engines.values()
        ],
        namespaces={str(name): num for (name, tier), num in counts.items() if tier == Where.RAM},
        spaces=_spaces(directory),
        disk_chunks={str(name): num for (name, tier), num in counts.items() if tier == Where.DISK},
        waiting=directory.waiting(now),
        tenants=tenants(members, document),
    )


def _node_status(member: ReportedNode, now: float) -> NodeStatus:
    report, age_s = member.report, now - member.heard_at
    facts = msgspec.structs.asdict(report) | msgspec.structs.asdict(report.stats)
    facts |= {
        "age_s": age_s,
        "breakers": aged(report.stats.breakers, age_s),
        "chunks": sum(num for (_, tier), num in member.chunks.items() if tier == Where.RAM),
        "metrics": report.stats.metrics_address or report.stats.metrics_problem,
    }
    return msgspec.convert(facts, NodeStatus)


def _engine_status(engine: ReportedEngine, member: ReportedNode, now: float) -> EngineStatus:
    age_s = now - member.heard_at
    facts = msgspec.structs.asdict(engine.hello) | {
        "node_id": member.report.node_id,
        "age_s": age_s,
        "counters": engine.counters,
        "breakers": _breakers(engine, member, age_s),
    }
    return msgspec.convert(facts, EngineStatus)


def _breakers(engine: ReportedEngine, member: ReportedNode, age_s: float) -> BreakerReport:
    """The breakers that an engine reported, without lines that have come back since.

    Workers speak with the engine's steps only: while it has no requests it does not learn that a
    line is there again, but the node does.
    """
    told = aged(engine.breakers, age_s)
    ranks = member.report.stats.ranks.get(engine.hello.engine_id, 0)
    is_back = age_s <= NEWS_S and ranks >= engine.hello.num_ranks
    return without(told, OWN_NODE) if is_back else told
