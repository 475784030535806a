"""Commands that change the cache: pause, resume, clear, set-weights-version, down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import raykv
from raykv.base.errors import ClusterError, SettingError
from raykv.cli.base import Address, AsJson, Yes, app, asks, confirm, done
from raykv.memory.room import human_bytes
from raykv.protocol.node import Kept

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster
    from raykv.protocol.status import ClusterStatus


@app.command()
def pause(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Switch the cache off without a restart: engines compute everything themselves.

    Example: raykv pause
    """
    with raykv.connect(ray_address) as cluster:
        cluster.pause()
    done({"paused": True}, "paused: engines load and store nothing any more", as_json=as_json)


@app.command()
def resume(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Switch the cache on again; what it holds is still there.

    Example: raykv resume
    """
    with raykv.connect(ray_address) as cluster:
        cluster.resume()
    done({"paused": False}, "resumed", as_json=as_json)


@app.command()
def clear(
    namespace: Annotated[
        str | None, typer.Argument(help="As `raykv status` shows it. Default: all.")
    ] = None,
    *,
    yes: Yes = False,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Empty the cache, for one namespace or for all.

    On a terminal it says what goes, and asks.

    Example: raykv clear 5f0c9a
    """
    with raykv.connect(ray_address) as cluster:
        if asks(yes=yes):
            confirm(_cleared(cluster.status(), namespace or ""))
        cluster.clear(namespace, watch=_tell_silent)
    done({"cleared": namespace or "all"}, "cleared", as_json=as_json)


@app.command()
def set_weights_version(
    engine: Annotated[
        str, typer.Argument(help="Its id as `raykv status` shows it, or the beginning of it.")
    ],
    version: Annotated[str, typer.Argument(help="A name for the weights that it has now.")],
    *,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Name an engine's weights, where RayKV can't tell them by their content.

    Example: raykv set-weights-version 3f2a step-200
    """
    if not version:
        raise SettingError("the version is an empty text: give the weights a name")
    with raykv.connect(ray_address) as cluster:
        told = cluster.set_weights_version(engine, version)
    sentence = f"the weights of {', '.join(told)} are called {version} from the next request on"
    done({"engines": told, "version": version}, sentence, as_json=as_json)


@app.command()
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
    ray_address: Address = None,
) -> None:
    """End RayKV's actors and free their pools.

    On a terminal it says what goes, and asks.

    Example: raykv down --keep
    """
    from raykv.cluster.join import stop_started

    if purge and not with_ray:
        raise SettingError("--purge removes what a local Ray cluster needs: give --with-ray too")
    left = leftovers() if purge else []
    kept: list[Kept] = []
    count = 0
    try:
        with raykv.connect(ray_address) as cluster:
            # Once more: Ray's session has a folder that only a member of the cluster knows.
            left = leftovers() if purge else []
            if asks(yes=yes):
                confirm(_ended(cluster, left, with_ray=with_ray))
            if keep:
                kept = cluster.keep()
                refuse_without_place(kept)
            stopped = cluster.address if with_ray else None
            count = cluster.down()
    except ClusterError as error:
        if keep or not with_ray:
            raise
        stopped = _half_dead(ray_address, error, yes=yes)
    if stopped is not None:
        stop_started(stopped)
    removed = [str(path) for path in left if remove(path)]
    sentence = f"ended {count} actors"
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


def _half_dead(ray_address: str | None, error: ClusterError, *, yes: bool) -> str:
    """A cluster of this host that answers nothing any more, but whose processes can be ended.

    Raises:
        ClusterError: `error`; there is no such cluster.
    """
    from raykv.cluster.join import find_cluster, running_clusters

    address = find_cluster(ray_address)
    if address is None or address not in running_clusters():
        raise error
    typer.echo(f"RayKV's actors end with their Ray nodes: {error}", err=True)
    if asks(yes=yes):
        confirm(f"this ends the Ray cluster at {address}, which does not answer")
    return address


def _cleared(known: ClusterStatus, beginning: str) -> str:
    """What a clearing takes."""
    spaces = [each for each in known.spaces if each.namespace.startswith(beginning)]
    on_disks = sum(count for name, count in known.disk_chunks.items() if name.startswith(beginning))
    named = ", ".join(f"{each.namespace[:12]} ({each.model or '?'})" for each in spaces)
    return (
        f"this takes {sum(each.chunks for each in spaces):,} chunks out of pools and "
        f"{on_disks:,} from disks, of {named or 'no namespace that is known now'}; engines compute "
        "those prompts anew"
    )


def _ended(cluster: Cluster, left: Sequence[Path], *, with_ray: bool) -> str:
    """What ends with `down`, as far as the scheduler actor answers."""
    try:
        known = cluster.status()
    except ClusterError as error:
        sentence = f"this ends RayKV's actors, of which nothing more is known ({error})"
    else:
        pools = sum(node.pool_bytes for node in known.nodes)
        sentence = (
            f"this ends RayKV at {known.address}: {len(known.nodes)} pools of "
            f"{human_bytes(pools)} with {sum(each.chunks for each in known.spaces):,} chunks; "
            f"{len(known.engines)} engines go on without the cache, and start the actors again"
        )
    if with_ray:
        sentence += f". It stops the Ray cluster at {cluster.address}, and all that runs in it"
    if left:
        sentence += f". It removes {', '.join(map(str, left))}"
    return sentence


def leftovers() -> list[Path]:
    """What a local cluster leaves behind on this host that is no cache: settings name those."""
    from raykv.cluster.join import start_lock
    from raykv.metrics.discovery import session_folder
    from raykv.node.states.file import problems_folder
    from raykv.serve.models import cache_root

    found = [session_folder(), start_lock(), problems_folder(), cache_root()]
    return [path for path in found if path is not None and path.exists()]


def remove(path: Path) -> bool:
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


def _tell_silent(nodes: list[str]) -> None:
    ids = ", ".join(node[:12] for node in nodes)
    typer.echo(f"cleared; waiting for the NodeActor of {ids}, 8 s at most", err=True)
