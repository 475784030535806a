"""The command `status`: nodes, pools, namespaces, engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from raykv.cli.base import Address, AsJson, ago, app, connected, console, print_json, table
from raykv.cli.quota import tenant_table
from raykv.cli.rates import TokenSources, token_sources
from raykv.cluster.breaker import sentences
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from raykv.protocol.status import ClusterStatus, EngineStatus


@app.command()
def status(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Show nodes, pools, namespaces and engines.

    Counters are those since the start of each engine and NodeActor.

    Example: raykv status --json | jq .nodes[].used_bytes
    """
    with connected(ray_address) as cluster:
        known = cluster.status()
    if as_json:
        print_json(known)
        return
    print_status(known, console())


def print_status(known: ClusterStatus, console: Console) -> None:
    """Print the whole status for people."""
    for part in [*overview(known), *troubles(known)]:
        console.print(part)


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
    # Pools are locked in memory for GPUs only.
    has_locked = any(node.locked_bytes for node in known.nodes)
    nodes = table(
        "node",
        "host",
        "pool",
        "prefaulted",
        *["locked"] * has_locked,
        "used",
        "chunks",
        "stored",
        "loaded",
        "fetched",
        "sent",
    )
    for node in known.nodes:
        share = 100 * node.prefaulted_bytes / max(1, node.pool_bytes)
        nodes.add_row(
            node.node_id[:12],
            node.hostname,
            human_bytes(node.pool_bytes),
            f"{share:.0f} %",
            *[f"{100 * node.locked_bytes / max(1, node.pool_bytes):.0f} %"] * has_locked,
            human_bytes(node.used_bytes),
            f"{node.chunks:,}",
            human_bytes(node.bytes_stored),
            human_bytes(node.bytes_loaded),
            human_bytes(node.bytes_fetched),
            human_bytes(node.bytes_sent),
        )
    return nodes


def _disks(known: ClusterStatus) -> Table:
    disks = table("node", "disk", "limit", "used", "files", "chunks", "written", "read", "evicted")
    for node in known.nodes:
        disk = node.disk
        if disk.path:
            disks.add_row(
                node.node_id[:12],
                disk.path,
                human_bytes(disk.most_bytes),
                human_bytes(disk.used_bytes),
                f"{disk.num_files:,}",
                f"{disk.num_chunks:,}",
                human_bytes(disk.bytes_written),
                human_bytes(disk.bytes_read),
                f"{disk.files_evicted:,}",
            )
    return disks


def _namespaces(known: ClusterStatus) -> Table:
    namespaces = table(
        "namespace", "model", "engines", "chunks", "bytes", "prompt tokens", "vLLM's", "RayKV's"
    )
    for space in known.spaces:
        engines = [each for each in known.engines if each.namespace == space.namespace]
        tokens = token_sources(engines)
        namespaces.add_row(
            space.namespace[:12],
            space.model or "?",
            str(space.engines),
            f"{space.chunks:,}",
            "?" if space.num_bytes is None else human_bytes(space.num_bytes),
            f"{tokens.prompt:,}",
            percent(tokens, tokens.own),
            percent(tokens, tokens.loaded),
        )
    return namespaces


def percent(sources: TokenSources, tokens: int) -> str:
    """A share of all tokens, for people."""
    share = sources.share(tokens)
    return "-" if share is None else f"{100 * share:.0f} %"


def _engines(known: ClusterStatus) -> Table:
    engines = table(
        "engine", "node", "namespace", "ranks", "failed", "fetch", "prefill", "versions"
    )
    for engine in known.engines:
        counters = engine.counters
        engines.add_row(
            engine.engine_id[:12],
            engine.node_id[:12],
            engine.namespace[:12],
            str(engine.num_ranks),
            str(counters.get("loads_failed", 0)),
            _rate(counters.get("fetch_bytes_per_s", 0), "B/s"),
            _rate(counters.get("prefill_tokens_per_s", 0), "tokens/s"),
            engine.versions,
        )
    return engines


def _rate(measured: int, unit: str) -> str:
    """A rate for people; empty while it is unknown."""
    if not measured:
        return "-"
    return f"{human_bytes(measured)}/s" if unit == "B/s" else f"{measured:,} {unit}"


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
            what = f"{disk.files_damaged} files and {disk.chunks_damaged} chunks on the disk"
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
                "its weights have changed and can't be told from others: it neither loads nor "
                "stores until they have a name (`raykv set-weights-version`)"
            )
            yield Text(f"engine {engine.engine_id[:12]}: {what}", "red")
        yield from _ignored(engine)
    for owner, breakers in [
        *((f"node {node.node_id[:12]}", node.breakers) for node in known.nodes),
        *((f"engine {engine.engine_id[:12]}", engine.breakers) for engine in known.engines),
    ]:
        for sentence in sentences(breakers):
            yield Text(f"breaker of {owner}: {sentence}", "red")
        if breakers.opened:
            yield Text(
                f"breakers of {owner}: opened {breakers.opened} times, {breakers.failed} calls "
                f"failed, {breakers.refused} not made"
            )


def _ignored(engine: EngineStatus) -> Iterator[Text]:
    """What requests ask for, and do not get."""
    if count := engine.counters.get("hints_ignored"):
        what = f"ignored {count:,} keys of requests: `raykv why-miss` says which, and why"
        yield Text(f"engine {engine.engine_id[:12]}: {what}", "yellow")
