"""Commands that change the cache: pause, resume, clear, set-weights-version, down."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from raykv.base.errors import ClusterError, SettingError
from raykv.cli.base import Address, AsJson, app, connected, print_json, say
from raykv.protocol.node import Kept


@app.command()
def pause(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Switch the cache off without a restart: engines compute everything themselves.

    Example: raykv pause
    """
    with connected(ray_address) as cluster:
        cluster.pause()
    _done(
        {"paused": True},
        "paused: engines stop loading and storing within about a second",
        as_json=as_json,
    )


@app.command()
def resume(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Switch the cache on again; what it holds is still there.

    Example: raykv resume
    """
    with connected(ray_address) as cluster:
        cluster.resume()
    _done({"paused": False}, "resumed", as_json=as_json)


@app.command()
def clear(
    namespace: Annotated[
        str | None, typer.Argument(help="As `raykv status` shows it. Default: all.")
    ] = None,
    *,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Empty the cache, for one namespace or for all.

    Example: raykv clear 5f0c9a
    """
    with connected(ray_address) as cluster:
        cluster.clear(namespace, watch=_tell_silent)
    _done({"cleared": namespace or "all"}, "cleared", as_json=as_json)


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
    with connected(ray_address) as cluster:
        told = cluster.set_weights_version(engine, version)
    sentence = f"the weights of {', '.join(told)} are called {version} from the next request on"
    _done({"engines": told, "version": version}, sentence, as_json=as_json)


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
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """End RayKV's actors and free their pools.

    Example: raykv down --keep
    """
    from raykv.cluster.join import find_cluster, running_clusters, stop_started

    kept: list[Kept] = []
    count = 0
    try:
        with connected(ray_address) as cluster:
            if keep:
                kept = cluster.keep()
                refuse_without_place(kept)
            stopped = cluster.address if with_ray else None
            count = cluster.down()
    except ClusterError as error:
        # A head that is dead, or hangs, ends nothing any more; its processes can be ended.
        stopped = find_cluster(ray_address) if with_ray and not keep else None
        if stopped is None or stopped not in running_clusters():
            raise
        typer.echo(f"RayKV's actors end with their Ray nodes: {error}", err=True)
    if stopped is not None:
        stop_started(stopped)
    sentence = f"ended {count} actors"
    for each in kept:
        sentence += f"\nnode {each.node_id[:12]}: {each.kept:,} chunks are in {each.place}"
        if each.left:
            sentence += (
                f", {each.left:,} are not ({each.problem or 'there was no room or no time'})"
            )
    if stopped is not None:
        sentence += f"\nstopped the Ray cluster at {stopped}"
    facts: dict[str, object] = {"ended_actors": count, "stopped_ray": stopped}
    if keep:
        facts["kept"] = [msgspec.structs.asdict(each) for each in kept]
    _done(facts, sentence, as_json=as_json)


def refuse_without_place(kept: list[Kept]) -> None:
    """Raise a SettingError if a node would lose what it has."""
    for each in kept:
        is_lost = each.left and not each.place
        if is_lost or each.problem:
            why = each.problem or "it has neither disk_path nor pool_path"
            raise SettingError(f"nothing was ended, since node {each.node_id} keeps nothing: {why}")


def _tell_silent(nodes: list[str]) -> None:
    ids = ", ".join(node[:12] for node in nodes)
    typer.echo(f"cleared; waiting for the NodeActor of {ids}, 15 s at most", err=True)


def _done(facts: dict[str, object], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        say(sentence)
