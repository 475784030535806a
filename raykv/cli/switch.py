"""Commands that change what engines do: pause, resume, clear, engine weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import raykv
from raykv.base import deadlines
from raykv.base.errors import SettingError
from raykv.base.ids import family_of, short_namespace
from raykv.cli.base import Address, AsJson, Yes, asks, confirm, counted, done

if TYPE_CHECKING:
    from raykv.protocol.status import ClusterStatus


def pause(*, as_json: AsJson = False, address: Address = None) -> None:
    """Switch the cache off without a restart: engines compute everything themselves.

    Example: raykv pause
    """
    with raykv.connect(address) as cluster:
        cluster.pause()
    done({"paused": True}, "paused: engines load and store nothing any more", as_json=as_json)


def resume(*, as_json: AsJson = False, address: Address = None) -> None:
    """Switch the cache on again; what it holds is still there.

    Example: raykv resume
    """
    with raykv.connect(address) as cluster:
        cluster.resume()
    done({"paused": False}, "resumed", as_json=as_json)


def clear(
    namespace: Annotated[
        str, typer.Argument(help="As `raykv status` shows it, or its beginning.")
    ] = "",
    *,
    everything: Annotated[bool, typer.Option("--all", help="Clear all namespaces.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Empty the cache: one namespace, or all of it.

    On a terminal it says what goes and asks first, also if neither a namespace nor --all is given.

    Example: raykv clear 5f0c9a
    """
    if namespace and everything:
        raise SettingError("give a namespace or --all, not both")
    if not (namespace or everything or asks(yes=yes)):
        raise SettingError("this would clear everything: name a namespace, or give --all")
    with raykv.connect(address) as cluster:
        if asks(yes=yes):
            confirm(_cleared(cluster.status(), namespace))
        cluster.clear(namespace or None, watch=_tell_silent)
    done({"cleared": namespace or "all"}, "cleared", as_json=as_json)


def weights(
    engine: Annotated[
        str, typer.Argument(help="Its id as `raykv status` shows it, or the beginning of it.")
    ],
    version: Annotated[str, typer.Argument(help="A name for the weights that it has now.")],
    *,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Name an engine's weights, where RayKV can't tell them by their content.

    Example: raykv engine weights 3f2a step-200
    """
    if not version:
        raise SettingError("the version is an empty text: give the weights a name")
    with raykv.connect(address) as cluster:
        told = cluster.set_weights_version(engine, version)
    sentence = f"the weights of {', '.join(told)} are called {version} from the next request on"
    done({"engines": told, "version": version}, sentence, as_json=as_json)


def _cleared(known: ClusterStatus, beginning: str) -> str:
    """What a clearing takes."""
    family = family_of(beginning)
    spaces = [each for each in known.spaces if each.namespace.startswith(family)]
    on_disks = sum(count for name, count in known.disk_chunks.items() if name.startswith(beginning))
    named = ", ".join(f"{short_namespace(each.namespace)} ({each.model or '?'})" for each in spaces)
    return (
        f"this takes {counted(sum(each.chunks for each in spaces), 'chunk')} out of pools and "
        f"{on_disks:,} from disks, of {named or 'no namespace that is known now'}; engines compute "
        "those prompts anew"
    )


def _tell_silent(nodes: list[str]) -> None:
    ids = ", ".join(node[:12] for node in nodes)
    patience = f"{deadlines.CLIENT_S:.0f} s at most"
    typer.echo(f"cleared; waiting for the NodeActor of {ids}, {patience}", err=True)
