"""Commands that do something to the cache: pools ahead of time, pins, transfers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn

import raykv
from raykv.base.errors import SettingError
from raykv.base.parsing import parse_size
from raykv.cli.base import Address, AsJson, answer, app, console, done, print_json, say, table_of
from raykv.cli.chunks import Form, read_prompt
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster
    from raykv.protocol.operator import NodeUp, Pinned, TransferResult

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...",
        help="Keys of chunks in hexadecimal, a prefix's first chunks first; @FILE reads them from "
        "a file, split by white space; - from standard input. Or a prompt, as for `raykv lookup`: "
        "text:PROMPT, text:@FILE, tokens:1,2,3 or chat:@FILE.",
    ),
]
Namespace = Annotated[
    str,
    typer.Option(help="As `raykv status` shows it, or its beginning. Default: the only namespace."),
]
To = Annotated[str, typer.Option("--to", help="The node's Ray id, or the beginning of it.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for all of it.", min=0.1)]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command()
def up(
    *,
    on: Annotated[
        str | None,
        typer.Option(
            help='Nodes: "all", a Ray resource like GPU, or a label like pool=kv. Default: those '
            "with a GPU if there are any, else all."
        ),
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--node", help="Only this node, by its Ray id; repeatable.")
    ] = None,
    pool_bytes: Annotated[
        str | None,
        typer.Option(
            "--pool-bytes", help='Of each pool, like "8GiB". Default: a quarter of what is free.'
        ),
    ] = None,
    slab_bytes: Annotated[
        str | None,
        typer.Option("--slab-bytes", help="The largest chunk that fits. Default: 64 MiB, or less."),
    ] = None,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Make the pools of all matching nodes before the first engine starts, and wait for them.

    Nodes that match and join later get one too, until `raykv down`. A second call changes nothing.
    Starts a local Ray if there is none. Exit code 1 if a node has no pool at the end.

    Example: raykv up --on GPU --pool-bytes 64GiB
    """
    from raykv.base.settings import load_settings
    from raykv.cluster.join import ensure_cluster

    # An invalid size is refused before Ray is started.
    load_settings({} if ray_address is None else {"ray_address": ray_address})
    pool = None if pool_bytes is None else parse_size("--pool-bytes", pool_bytes)
    slab = None if slab_bytes is None else parse_size("--slab-bytes", slab_bytes)
    joined = ensure_cluster(ray_address)
    if joined.started:
        Console(stderr=True).print(
            f"started a local Ray cluster at {joined.address}, which stays: "
            "`raykv down --with-ray` stops it",
            soft_wrap=True,
        )
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
    with raykv.connect(joined.address) as cluster, _bars(*columns) as bars:
        if not bars.disable:
            bars.console.print("waiting for the actors")
        found = cluster.up(
            on=on,
            node_ids=nodes or (),
            pool_bytes=pool,
            slab_bytes=slab,
            deadline_s=timeout,
            watch=lambda nodes: _show_nodes(bars, nodes),
        )
    answer(found, _print_nodes, as_json=as_json)
    raise typer.Exit(any(node.error for node in found))


def _bars(*columns: ProgressColumn) -> Progress:
    """Bars on standard error, if that is a terminal; no columns: rich's usual ones."""
    errors = Console(stderr=True)
    return Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True)


def _show_nodes(bars: Progress, nodes: Sequence[NodeUp]) -> None:
    known = {task.description: task.id for task in bars.tasks}
    for node in nodes:
        name = f"{node.hostname} {node.node_id[:12]}"
        task = known.get(name)
        if task is None:
            task = bars.add_task(name, total=None)
        bars.update(task, completed=node.prefaulted_bytes, total=node.pool_bytes or None)


def _print_nodes(nodes: Sequence[NodeUp]) -> None:
    printed = console()
    for node in nodes:
        name = f"node {node.node_id[:12]} ({node.hostname})"
        if node.error:
            printed.print(f"{name}: no pool: {node.error}", style="red")
            continue
        state = "made" if node.is_new else "was there already"
        size = human_bytes(node.pool_bytes)
        note = f"; {node.note}" if node.note else ""
        printed.print(f"{name}: pool of {size} {state}, all prefaulted{note}")


@app.command()
def pin(
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
    ray_address: Address = None,
) -> None:
    """Keep chunks from being evicted; those not stored yet are kept once they are.

    RayKV refuses the whole pin if it would exceed a node's share for pins (pin_share).

    Example: raykv pin text:@system-prompt.txt --ttl 8h --id system
    """
    from raykv.client.pins import check_pin

    ttl_s = parse_duration("--ttl", ttl)
    check_pin(ttl_s, priority)
    given = read_keys(keys)
    with raykv.connect(ray_address) as cluster:
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


@app.command()
def unpin(
    pin_ids: Annotated[list[str], typer.Argument(help="As `raykv pins` shows them.")],
    *,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """End pins: their chunks can be evicted again.

    Example: raykv unpin system
    """
    with raykv.connect(ray_address) as cluster:
        for pin_id in pin_ids:
            cluster.unpin(pin_id)
            if not as_json:
                typer.echo(f"unpinned {pin_id}")
    if as_json:
        print_json({"unpinned": pin_ids})


@app.command()
def pins(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Show all pins, and how much of each node's pool they keep.

    Example: raykv pins --json
    """
    with raykv.connect(ray_address) as cluster:
        answer(cluster.pins(), _print_pins, as_json=as_json)


def _print_pins(known: Pinned) -> None:
    printed = console()
    rows = table_of(
        known.pins,
        {
            "pin": lambda pin: pin.pin_id,
            "namespace": lambda pin: pin.namespace[:12],
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
            f"requests keep {known.client_chunks} chunks; there was no "
            f"room for {known.hints_refused} more"
        )


@app.command()
def prefetch(
    keys: Keys,
    *,
    to: To,
    namespace: Namespace = "",
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Bring chunks to a node's RAM before a request needs them, from other pools or from disks.

    Exit code 1 if some of them are not there at the end.

    Example: raykv prefetch text:@system-prompt.txt --to 3f9a
    """
    found = _transferred("prefetch", keys, to, namespace, timeout, ray_address)
    report(found, as_json=as_json)


@app.command()
def move(
    keys: Keys,
    *,
    to: To,
    namespace: Namespace = "",
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Bring chunks to a node's RAM, then give up those that other nodes have in theirs.

    Exit code 1 if some of them are not there at the end; those stay where they are.

    Example: raykv move @session.keys --to 3f9a
    """
    found = _transferred("move", keys, to, namespace, timeout, ray_address)
    report(found, as_json=as_json)


def _transferred(
    how: str, keys: Sequence[str], to: str, namespace: str, timeout_s: float, address: str | None
) -> TransferResult:
    """What became of a `prefetch` or a `move`."""
    given = read_keys(keys)
    with raykv.connect(address) as cluster, counting(how) as watch:
        order = cluster.move if how == "move" else cluster.prefetch
        wanted = all_keys(cluster, given, namespace)
        return order(wanted, to, namespace=namespace, deadline_s=timeout_s, watch=watch)


@contextmanager
def counting(what: str) -> Iterator[Callable[[TransferResult], None]]:
    """A bar on a terminal, in chunks."""
    with _bars() as progress:
        task = progress.add_task(what, total=None)

        def watch(so_far: TransferResult) -> None:
            looked_at = so_far.came + so_far.there + so_far.nowhere + so_far.no_room
            done = looked_at + sum(so_far.refusals.values())
            progress.update(task, total=so_far.asked, completed=done)

        yield watch


def report(found: TransferResult, *, as_json: bool, which: str = "") -> None:
    """What became of a transfer; ends the command, with exit code 1 if not all chunks are there.

    `which` says, behind a comma, which chunks came if there was no room for all.
    """
    if as_json:
        print_json({**msgspec.to_builtins(found), "failed": found.failed})
    else:
        _print_transfer(found, which)
    raise typer.Exit(found.failed > 0)


def _print_transfer(found: TransferResult, which: str) -> None:
    """The sums in a line, then a line for each reason why chunks did not come."""
    speed = f"{human_bytes(found.num_bytes)} in {found.seconds:.1f} s"
    parts = [
        f"{found.came:,} of {found.asked:,} chunks came ({speed})",
        f"{found.there:,} were there already",
        f"{found.failed:,} did not come",
    ]
    if found.dropped:
        parts.append(f"{found.dropped:,} copies were given up elsewhere")
    if found.kept:
        parts.append(f"{found.kept:,} copies stay, because they are pinned there")
    say(", ".join(parts))
    if found.nowhere:
        say(f"{found.nowhere:,} are stored nowhere", "red")
    for reason, count in sorted(found.refusals.items()):
        say(f"{count:,} failed: {reason}", "red")
    if found.no_room:
        say(f"there was no room for {found.no_room:,}: the pool can give up no more{which}", "red")


def parse_duration(name: str, value: str) -> float:
    """Seconds out of a text like "90", "90s", "15m", "8h" or "7d".

    Raises:
        SettingError: the duration is invalid.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value, re.ASCII)
    if match is None:
        raise SettingError(f"{name}={value!r} is invalid: write a duration like 90s, 15m, 8h or 7d")
    return float(match[1]) * UNITS[match[2] or "s"]


def read_keys(arguments: Sequence[str]) -> list[bytes | dict[str, Any]]:
    """The keys that were given, and prompts as arguments of `Cluster.lookup`.

    Raises:
        SettingError: a key is invalid; or a file, or a prompt, can't be read.
    """
    from raykv.client.pins import raw_keys

    given: list[bytes | dict[str, Any]] = []
    for argument in arguments:
        form, colon, prompt = argument.partition(":")
        if argument == "-":
            given += raw_keys(sys.stdin.read().split())
        elif argument.startswith("@"):
            try:
                given += raw_keys(Path(argument[1:]).read_text().split())
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(f"the keys in {argument[1:]} can't be read: {error}") from error
        elif colon and form in set(Form):
            given.append(read_prompt(prompt, Form(form)))
        else:
            given += raw_keys([argument])
    return given


def all_keys(
    cluster: Cluster, given: Sequence[bytes | dict[str, Any]], namespace: str
) -> list[bytes | str]:
    """The keys among what was given, and the keys of the prompts.

    Raises:
        ClusterError: as for `Cluster.lookup`.
    """
    keys: list[bytes | str] = []
    for each in given:
        if isinstance(each, bytes):
            keys.append(each)
        else:
            keys += cluster.lookup(**each, namespace=namespace or None).keys
    return keys
