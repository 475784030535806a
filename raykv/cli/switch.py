"""Commands that change the cache: pause, resume, clear, down."""

from __future__ import annotations

from typing import Annotated

import typer

from raykv.cli.base import Address, AsJson, app, connected, print_json, say


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
    """Empty the cache, of one model's namespace or of all.

    Example: raykv clear 5f0c9a
    """
    with connected(ray_address) as cluster:
        cluster.clear(namespace)
    _done({"cleared": namespace or "all"}, "cleared", as_json=as_json)


@app.command()
def down(
    *,
    with_ray: Annotated[
        bool, typer.Option("--with-ray", help="Stop the local Ray cluster as well.")
    ] = False,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """End RayKV's actors and free their pools.

    Example: raykv down --with-ray
    """
    from raykv.actors.cluster import stop_started

    with connected(ray_address) as cluster:
        count = cluster.down()
        address = cluster.address
    stopped = address if with_ray else None
    if stopped is not None:
        stop_started(stopped)
    sentence = f"ended {count} actors"
    if stopped is not None:
        sentence += f"\nstopped the Ray cluster at {stopped}"
    _done({"ended_actors": count, "stopped_ray": stopped}, sentence, as_json=as_json)


def _done(facts: dict[str, object], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        say(sentence)
