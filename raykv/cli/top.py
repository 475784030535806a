"""The command `top`: what happens now, with rates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import raykv
from raykv.cli.base import Address, AsJson, console, counted, print_json, table, table_of
from raykv.cli.status import Progress, percent, progress, token_sources, troubles
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from raykv.protocol.status import ClusterStatus


def top(
    *,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600.0)
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval and end.")] = False,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Show what happens: hit rates, tokens and transfers per second; Ctrl-C ends it.

    On a pipe, and with --json, it prints one interval and ends.

    Example: raykv top --interval 1
    """
    out = console()
    with raykv.connect(address) as cluster:
        looks = _looks(cluster, interval)
        if as_json or once or not out.is_terminal:
            known, passed = next(looks)
            if as_json:
                print_json({"status": known, "progress": passed})
            else:
                out.print(screen(known, passed))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=out, screen=True) as live:
            for known, passed in looks:
                live.update(screen(known, passed), refresh=True)


def _looks(cluster: raykv.Cluster, pause_s: float) -> Iterator[tuple[ClusterStatus, Progress]]:
    """The state again and again, and what happened since the last time."""
    before, looked_at = cluster.status(), time.monotonic()
    while True:
        time.sleep(pause_s)
        after, now = cluster.status(), time.monotonic()
        yield after, progress(before, after, now - looked_at)
        before, looked_at = after, now


def screen(known: ClusterStatus, passed: Progress) -> RenderableType:
    """What `top` shows of a state, and of what has happened since the one before."""
    state = "PAUSED" if known.paused else "running"
    tokens, ever = passed.tokens, token_sources(known.engines)
    engines = {each.engine_id for each in known.engines}
    head = Text(
        f"RayKV {known.raykv_version} at {known.address}: {state}; "
        f"{counted(len(known.nodes), 'node')}, {counted(len(engines), 'engine')}, "
        f"{counted(sum(known.namespaces.values()), 'chunk')}"
    )
    sources = table("prompt tokens", "per second", "share", "share since start")
    for name, count, ever_count in (
        ("in vLLM's own cache", tokens.own, ever.own),
        ("loaded by RayKV", tokens.loaded, ever.loaded),
        ("computed", tokens.computed, ever.computed),
        ("all", tokens.prompt, ever.prompt),
    ):
        sources.add_row(
            name, f"{passed.per_s(count):,.0f}", percent(tokens, count), percent(ever, ever_count)
        )
    moved, per_s = passed.transfers, passed.per_s
    nodes = table_of(
        known.nodes,
        {
            "node": lambda node: node.node_id[:12],
            "host": lambda node: node.hostname,
            "used": lambda node: (
                f"{human_bytes(node.used_bytes)} "
                f"({100 * node.used_bytes / max(1, node.pool_bytes):.0f} %)"
            ),
            "chunks": lambda node: f"{node.chunks:,}",
            "stored/s": lambda node: human_bytes(per_s(moved[node.node_id].stored)),
            "loaded/s": lambda node: human_bytes(per_s(moved[node.node_id].loaded)),
            "fetched/s": lambda node: human_bytes(per_s(moved[node.node_id].fetched)),
            "sent/s": lambda node: human_bytes(per_s(moved[node.node_id].sent)),
        },
    )
    chunks = Text(
        f"chunks per second: {passed.per_s(passed.chunks_stored):,.1f} stored, "
        f"{passed.per_s(passed.chunks_loaded):,.1f} loaded"
    )
    return Group(head, sources, nodes, chunks, *troubles(known))
