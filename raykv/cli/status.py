"""The command `status`: nodes, pools, namespaces, engines; and rates out of two statuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

import raykv
from raykv.base.ids import short_namespace
from raykv.cli.base import Address, AsJson, ago, answer, console, counted, table_of
from raykv.cli.quota import tenant_table
from raykv.doctor import checks
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from raykv.protocol.status import ClusterStatus, EngineStatus, NamespaceStatus, NodeStatus


def status(*, as_json: AsJson = False, address: Address = None) -> None:
    """Show nodes, pools, namespaces and engines.

    Counters are those since the start of each engine and NodeActor.

    Example: raykv status --json | jq .nodes[].used_bytes
    """
    with raykv.connect(address) as cluster:
        answer(cluster.status(), _print_status, as_json=as_json)


def _print_status(known: ClusterStatus) -> None:
    printed = console()
    for part in [*overview(known), *troubles(known)]:
        printed.print(part)


def overview(known: ClusterStatus) -> Iterator[RenderableType]:
    """Texts and tables of what there is."""
    state = "PAUSED" if known.paused else "running"
    yield Text(f"RayKV {known.raykv_version} at {known.address}: {state}", overflow="fold")
    yield _nodes(known)
    if any(node.disk.path for node in known.nodes):
        yield _disks(known)
    yield _namespaces(known)
    if known.tenants:
        yield tenant_table(known.tenants)
    yield _engines(known)


def _nodes(known: ClusterStatus) -> Table:
    def share(num_bytes: int, node: NodeStatus) -> str:
        return f"{100 * num_bytes / max(1, node.pool_bytes):.0f} %"

    # Pools are locked in memory for GPUs only.
    has_locked = any(node.locked_bytes for node in known.nodes)
    return table_of(
        known.nodes,
        {
            "node": lambda node: node.node_id[:12],
            "host": lambda node: node.hostname,
            "pool": lambda node: human_bytes(node.pool_bytes),
            "prefaulted": lambda node: share(node.prefaulted_bytes, node),
            "locked": (lambda node: share(node.locked_bytes, node)) if has_locked else None,
            "used": lambda node: human_bytes(node.used_bytes),
            "chunks": lambda node: f"{node.chunks:,}",
            "stored": lambda node: human_bytes(node.bytes_stored),
            "loaded": lambda node: human_bytes(node.bytes_loaded),
            "fetched": lambda node: human_bytes(node.bytes_fetched),
            "sent": lambda node: human_bytes(node.bytes_sent),
        },
    )


def _disks(known: ClusterStatus) -> Table:
    return table_of(
        [node for node in known.nodes if node.disk.path],
        {
            "node": lambda node: node.node_id[:12],
            "disk": lambda node: node.disk.path,
            "limit": lambda node: human_bytes(node.disk.most_bytes),
            "used": lambda node: human_bytes(node.disk.used_bytes),
            "files": lambda node: f"{node.disk.num_files:,}",
            "chunks": lambda node: f"{node.disk.num_chunks:,}",
            "written": lambda node: human_bytes(node.disk.bytes_written),
            "read": lambda node: human_bytes(node.disk.bytes_read),
            "evicted": lambda node: f"{node.disk.files_evicted:,}",
        },
    )


def _namespaces(known: ClusterStatus) -> Table:
    def tokens(space: NamespaceStatus) -> TokenSources:
        return token_sources(each for each in known.engines if each.namespace == space.namespace)

    return table_of(
        known.spaces,
        {
            "namespace": lambda space: short_namespace(space.namespace),
            "model": lambda space: space.model or "?",
            "engines": lambda space: str(space.engines),
            "chunks": lambda space: f"{space.chunks:,}",
            "bytes": lambda space: "?" if space.num_bytes is None else human_bytes(space.num_bytes),
            "prompt tokens": lambda space: f"{tokens(space).prompt:,}",
            "vLLM's": lambda space: percent(tokens(space), tokens(space).own),
            "RayKV's": lambda space: percent(tokens(space), tokens(space).loaded),
        },
    )


def percent(sources: TokenSources, tokens: int) -> str:
    """The share of all prompt tokens, for people."""
    return f"{100 * tokens / sources.prompt:.0f} %" if sources.prompt else "-"


def _ranks(engine: EngineStatus) -> str:
    if engine.num_places == 1:
        return str(engine.num_ranks)
    return f"{engine.num_ranks} (place {engine.place} of {engine.num_places})"


def _engines(known: ClusterStatus) -> Table:
    return table_of(
        known.engines,
        {
            "engine": lambda engine: engine.engine_id[:12],
            "node": lambda engine: engine.node_id[:12],
            "namespace": lambda engine: short_namespace(engine.namespace),
            "ranks": _ranks,
            "failed": lambda engine: str(engine.counters.get("loads_failed", 0)),
            "fetch": _fetch_rate,
            "prefill": _prefill_rate,
            "versions": lambda engine: engine.versions,
        },
    )


def _fetch_rate(engine: EngineStatus) -> str:
    measured = engine.counters.get("fetch_bytes_per_s")
    return f"{human_bytes(measured)}/s" if measured else "-"


def _prefill_rate(engine: EngineStatus) -> str:
    measured = engine.counters.get("prefill_tokens_per_s")
    return f"{measured:,} tokens/s" if measured else "-"


def _silent(known: ClusterStatus) -> Iterator[Text]:
    ages = {node.node_id: node.age_s for node in known.nodes}
    for node_id, why in sorted(known.silent.items()):
        known_of = f"its numbers are {ago(ages[node_id])} old" if node_id in ages else "it is lost"
        yield Text(f"node {node_id[:12]}: its NodeActor does not answer ({why}); {known_of}", "red")


def troubles(known: ClusterStatus) -> Iterator[Text]:
    """What is wrong: damaged chunks, nodes without a pool, and open breakers."""
    for node in known.nodes:
        if node.quarantined:
            what = f"{node.quarantined} damaged chunks or files were set aside"
            yield Text(f"node {node.node_id[:12]}: {what}", "red")
        disk = node.disk
        if disk.problem:
            what = f"nothing goes to disk_path {disk.path}: {disk.problem}"
            yield Text(f"node {node.node_id[:12]}: {what}", "red")
        if disk.files_damaged or disk.chunks_damaged:
            files = counted(disk.files_damaged, "file")
            what = f"{files} and {counted(disk.chunks_damaged, 'chunk')} on the disk"
            yield Text(f"node {node.node_id[:12]}: {what} were damaged and are not served", "red")
    yield from _silent(known)
    for node_id, refusal in sorted(known.refused.items()):
        yield Text(f"node {node_id[:12]} gives no pool: {refusal}", "red")
    for engine_id, node_id in sorted(known.waiting.items()):
        what = f"nothing is heard of its node {node_id[:12]}: it has no cache (`raykv doctor`)"
        yield Text(f"engine {engine_id[:12]}: {what}", "red")
    for engine in known.engines:
        if engine.counters.get("weights_changed"):
            what = (
                "its weights have changed and RayKV can't identify them: it neither loads nor "
                "stores until they have a name (`raykv engine weights`)"
            )
            yield Text(f"engine {engine.engine_id[:12]}: {what}", "red")
        yield from _ignored(engine)
    for complaint in checks.breakers(known):
        yield Text(complaint.what, "red")


def _ignored(engine: EngineStatus) -> Iterator[Text]:
    """What requests ask for, and do not get."""
    if count := engine.counters.get("hints_ignored"):
        what = f"ignored {counted(count, 'key')} of requests: `raykv explain` says which, and why"
        yield Text(f"engine {engine.engine_id[:12]}: {what}", "yellow")


# Shares and rates. Counters restart with their engine or NodeActor: one that has gone down counts
# from zero.


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Prompt tokens, and how many of them came out of vLLM's own cache and out of RayKV."""

    prompt: int = 0
    own: int = 0
    loaded: int = 0

    @property
    def computed(self) -> int:
        """The others."""
        return max(0, self.prompt - self.own - self.loaded)


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that moved: stored and loaded on the node, fetched from others and sent to them."""

    stored: int = 0
    loaded: int = 0
    fetched: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened between two looks: tokens, and bytes by node, and the seconds in between."""

    seconds: float
    tokens: TokenSources
    transfers: Mapping[str, MovedBytes]
    chunks_stored: int = 0
    chunks_loaded: int = 0

    def per_s(self, count: int) -> float:
        """`count` of them as a rate."""
        return count / self.seconds if self.seconds > 0 else 0.0


def token_sources(engines: Iterable[EngineStatus]) -> TokenSources:
    """Sums since the engines' starts."""
    return _sources(_sums(engine.counters for engine in engines))


def progress(before: ClusterStatus, after: ClusterStatus, seconds: float) -> Progress:
    """What happened between two statuses."""
    old_engines = {engine.engine_id: engine.counters for engine in before.engines}
    grown = _sums(
        {
            name: _growth(old_engines.get(engine.engine_id, {}).get(name, 0), count)
            for name, count in engine.counters.items()
        }
        for engine in after.engines
        if engine.engine_id in old_engines
    )
    old_nodes = {(node.node_id, node.life): node for node in before.nodes}
    moved = {}
    for new in after.nodes:
        old = old_nodes.get((new.node_id, new.life), new)
        moved[new.node_id] = MovedBytes(
            _growth(old.bytes_stored, new.bytes_stored),
            _growth(old.bytes_loaded, new.bytes_loaded),
            _growth(old.bytes_fetched, new.bytes_fetched),
            _growth(old.bytes_sent, new.bytes_sent),
        )
    return Progress(
        seconds,
        _sources(grown),
        moved,
        chunks_stored=grown["chunks_stored"],
        chunks_loaded=grown["chunks_loaded"],
    )


def _growth(old: int, new: int) -> int:
    return new - old if new >= old else new


def _sums(many: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for counters in many:
        found.update(counters)
    return found


def _sources(counters: Counter[str]) -> TokenSources:
    return TokenSources(
        counters["prompt_tokens"], counters["own_cache_tokens"], counters["loaded_tokens"]
    )
