"""Commands about pins: pin add, rm, ls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import raykv
from raykv.base.ids import short_namespace
from raykv.cli.base import (
    Address,
    AsJson,
    Namespace,
    answer,
    console,
    counted,
    done,
    done_each,
    parse_duration,
    table_of,
)
from raykv.cli.chunks import Keys, all_keys, read_keys
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from raykv.protocol.operator import Pinned


def add(
    keys: Keys,
    *,
    ttl: Annotated[str, typer.Option(help="How long, like 90s, 15m, 8h or 7d.")] = "1h",
    priority: Annotated[
        int | None,
        typer.Option(
            help="1 to 9: evict them only when nothing of lower priority is left. Default: never.",
            min=1,
            max=9,
        ),
    ] = None,
    pin_id: Annotated[
        str | None, typer.Option("--id", help="A name for the pin. Default: a new one.")
    ] = None,
    namespace: Namespace = "",
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Keep chunks from being evicted; those not stored yet are kept once they are.

    RayKV refuses the whole pin if it would exceed a node's share for pins (pin_share).

    Example: raykv pin add text:@system-prompt.txt --ttl 8h --id system
    """
    from raykv.client.pins import check_pin

    ttl_s = parse_duration("--ttl", ttl)
    check_pin(ttl_s, priority)
    given = read_keys(keys)
    with raykv.connect(address) as cluster:
        made = cluster.pin(
            all_keys(cluster, given, namespace),
            namespace=namespace,
            ttl_s=ttl_s,
            priority=priority,
            pin_id=pin_id,
        )
    sentence = (
        f"pin {made.pin_id}: {made.held_chunks} of {made.chunks} chunks are stored and kept "
        f"({human_bytes(made.kept_bytes)}), for {ttl}"
    )
    done(made, sentence, as_json=as_json)


def rm(
    pin_ids: Annotated[list[str], typer.Argument(help="As `raykv pin ls` shows them.")],
    *,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """End pins: their chunks can be evicted again.

    Example: raykv pin rm system
    """
    with raykv.connect(address) as cluster:
        done_each(pin_ids, cluster.unpin, "unpinned", as_json=as_json)


def ls(*, as_json: AsJson = False, address: Address = None) -> None:
    """Show all pins, and how much of each node's pool they keep.

    Example: raykv pin ls --json
    """
    with raykv.connect(address) as cluster:
        answer(cluster.pins(), _print_pins, as_json=as_json)


def _print_pins(known: Pinned) -> None:
    printed = console()
    rows = table_of(
        known.pins,
        {
            "pin": lambda pin: pin.pin_id,
            "namespace": lambda pin: short_namespace(pin.namespace),
            "chunks": lambda pin: str(pin.chunks),
            "kept": lambda pin: str(pin.held_chunks),
            "bytes": lambda pin: human_bytes(pin.kept_bytes),
            "waiting": lambda pin: str(pin.waiting_chunks),
            "priority": lambda pin: "firm" if pin.priority is None else str(pin.priority),
            "left": lambda pin: f"{pin.left_s:,.0f} s",
        },
    )
    printed.print(rows)
    nodes = table_of(
        known.nodes,
        {
            "node": lambda node: node.node_id[:12],
            "kept": lambda node: str(node.kept_chunks),
            "bytes": lambda node: human_bytes(node.kept_bytes),
            "of": lambda node: human_bytes(node.quota_bytes),
            "requests'": lambda node: human_bytes(node.client_bytes),
            "waiting": lambda node: str(node.waiting_chunks),
        },
    )
    printed.print(nodes)
    if known.client_chunks or known.hints_refused:
        printed.print(
            f"requests keep {counted(known.client_chunks, 'chunk')}; there was no "
            f"room for {known.hints_refused} more"
        )
