"""Commands that make pools and end them: up, down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

import raykv
from raykv.base.errors import ClusterError, SettingError
from raykv.base.parsing import parse_size
from raykv.cli.base import (
    Address,
    AsJson,
    ShowBars,
    Timeout,
    Yes,
    answer,
    asks,
    bars,
    confirm,
    console,
    counted,
    done,
)
from raykv.memory.room import human_bytes
from raykv.protocol.node import Kept

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster
    from raykv.protocol.operator import NodeUp


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
            "--pool-bytes",
            help='Size of each pool, like "8GiB". Default: a quarter of what is free.',
        ),
    ] = None,
    slab_bytes: Annotated[
        str | None,
        typer.Option("--slab-bytes", help="The largest chunk that fits. Default: 64 MiB, or less."),
    ] = None,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Make the pools of all matching nodes before the first engine starts, and wait for them.

    Nodes that match and join later get one too, until `raykv down`. A second call changes nothing.
    Starts a local Ray if there is none. Exit code 1 if a node has no pool at the end.

    Example: raykv up --on GPU --pool-bytes 64GiB
    """
    from raykv.base.settings import load_settings
    from raykv.cluster.join import ensure_cluster

    # An invalid size is refused before Ray is started.
    load_settings({} if address is None else {"ray_address": address})
    pool = None if pool_bytes is None else parse_size("--pool-bytes", pool_bytes)
    slab = None if slab_bytes is None else parse_size("--slab-bytes", slab_bytes)
    joined = ensure_cluster(address)
    if joined.started:
        Console(stderr=True).print(
            f"started a local Ray cluster at {joined.address}, which stays: "
            "`raykv down --with-ray` stops it",
            soft_wrap=True,
        )
    with raykv.connect(joined.address) as cluster, bars(as_json=as_json, in_bytes=True) as show:
        show({"waiting for the actors": (0, 0)})
        found = cluster.up(
            on=on,
            node_ids=nodes or (),
            pool_bytes=pool,
            slab_bytes=slab,
            deadline_s=timeout,
            watch=lambda nodes: _show_nodes(show, nodes),
        )
    answer(found, _print_nodes, as_json=as_json)
    raise typer.Exit(any(node.error for node in found))


def _show_nodes(show: ShowBars, nodes: Sequence[NodeUp]) -> None:
    show(
        {
            f"{node.hostname} {node.node_id[:12]}": (node.prefaulted_bytes, node.pool_bytes)
            for node in nodes
        }
    )


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


def down(
    *,
    with_ray: Annotated[
        bool, typer.Option("--with-ray", help="Stop the local Ray cluster as well.")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="First write all that the pools hold to disk_path, where the next `raykv up` or "
            "engine finds it. Nothing is ended if a node has no such place.",
        ),
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="With --with-ray: remove what RayKV and that Ray cluster leave behind on this "
            "host, too. Chunks on disks and in pool files stay.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """End RayKV's actors and free their pools.

    On a terminal it says what goes, and asks.

    Example: raykv down --keep
    """
    from raykv.cluster.join import stop_started

    if purge and not with_ray:
        raise SettingError("--purge removes what a local Ray cluster needs: give --with-ray too")
    left = _leftovers() if purge else []
    kept: list[Kept] = []
    count = 0
    try:
        with raykv.connect(address) as cluster:
            # Once more: Ray's session has a folder that only a member of the cluster knows.
            left = _leftovers() if purge else []
            if asks(yes=yes):
                confirm(_ended(cluster, left, with_ray=with_ray))
            if keep:
                with bars(as_json=as_json) as show:
                    show({"writing what the pools hold": (0, 0)})
                    kept = cluster.keep()
                refuse_without_place(kept)
            stopped = cluster.address if with_ray else None
            count = cluster.down()
    except ClusterError as error:
        if keep or not with_ray:
            raise
        stopped = _half_dead(address, error, yes=yes)
    if stopped is not None:
        stop_started(stopped)
    removed = [str(path) for path in left if _remove(path)]
    sentence = f"ended {counted(count, 'actor')}"
    sentence += "".join(map(_place, kept))
    if stopped is not None:
        sentence += f"\nstopped the Ray cluster at {stopped}"
    sentence += "".join(f"\nremoved {path}" for path in removed)
    facts: dict[str, object] = {"ended_actors": count, "stopped_ray": stopped}
    if purge:
        facts["removed"] = removed
    if keep:
        facts["kept"] = [msgspec.structs.asdict(each) for each in kept]
    done(facts, sentence, as_json=as_json)


def _place(kept: Kept) -> str:
    """A line that says where a node's chunks are."""
    line = f"\nnode {kept.node_id[:12]}: {kept.kept:,} chunks are in {kept.place}"
    if kept.left:
        line += f", {kept.left:,} are not ({kept.problem or 'there was no room or no time'})"
    return line


def _half_dead(named: str | None, error: ClusterError, *, yes: bool) -> str:
    """Find a cluster on this host that no longer answers, but whose processes can be ended.

    Raises:
        ClusterError: `error`; there is no such cluster.
    """
    from raykv.cluster.join import find_cluster, running_clusters

    address = find_cluster(named)
    if address is None or address not in running_clusters():
        raise error
    typer.echo(f"RayKV's actors end with their Ray nodes: {error}", err=True)
    if asks(yes=yes):
        confirm(f"this ends the Ray cluster at {address}, which does not answer")
    return address


def _ended(cluster: Cluster, left: Sequence[Path], *, with_ray: bool) -> str:
    """What ends with `down`, as far as the scheduler actor answers."""
    try:
        known = cluster.status()
    except ClusterError as error:
        sentence = f"this ends RayKV's actors; nothing more is known of them ({error})"
    else:
        pools = sum(node.pool_bytes for node in known.nodes)
        chunks = sum(each.chunks for each in known.spaces)
        sentence = (
            f"this ends RayKV at {known.address}: {counted(len(known.nodes), 'pool')} of "
            f"{human_bytes(pools)} with {counted(chunks, 'chunk')}; engines "
            f"({len(known.engines)}) go on without the cache, and start the actors again"
        )
    if with_ray:
        sentence += f". It stops the Ray cluster at {cluster.address}, and all that runs in it"
    if left:
        sentence += f". It removes {', '.join(map(str, left))}"
    return sentence


def _leftovers() -> list[Path]:
    """What a local cluster leaves behind on this host that is no cache: settings name those."""
    from raykv.cluster.join import start_lock
    from raykv.metrics.discovery import session_folder
    from raykv.node.states.file import problems_folder
    from raykv.serve.models import cache_root

    found = [session_folder(), start_lock(), problems_folder(), cache_root()]
    return [path for path in found if path is not None and path.exists()]


def _remove(path: Path) -> bool:
    """Remove a file or folder of this user; whether it is gone."""
    if path.lstat().st_uid == os.getuid() and not path.is_symlink():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return not path.exists()


def refuse_without_place(kept: list[Kept]) -> None:
    """Raise a SettingError if a node would lose what it has."""
    for each in kept:
        is_lost = each.left and not each.place
        if is_lost or each.problem:
            why = each.problem or "it has neither disk_path nor pool_path"
            raise SettingError(f"nothing was ended, since node {each.node_id} keeps nothing: {why}")
