"""Sessions of requests, which say in `kv_transfer_params` to which they belong: session ls, show,
over, pause, prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import raykv
from raykv.base import deadlines
from raykv.base.ids import short_namespace
from raykv.cli.base import (
    Address,
    AsJson,
    OnlyNamespace,
    Timeout,
    ago,
    answer,
    answer_if_any,
    console,
    counted,
    parse_duration,
    say,
    table_of,
)
from raykv.cli.transfers import counting, report

if TYPE_CHECKING:
    from raykv.protocol.sessions import SessionStatus


def _checked_name(name: str) -> str:
    from raykv.client.sessions import check_session

    check_session(name)
    return name


Name = Annotated[
    str,
    typer.Argument(help="As raykv_session in the requests has it.", callback=_checked_name),
]


def ls(*, namespace: OnlyNamespace = "", as_json: AsJson = False, address: Address = None) -> None:
    """List the sessions that were used last, the latest first.

    Exit code 1 if there are no sessions.

    Example: raykv session ls
    """
    with raykv.connect(address) as cluster:
        found = cluster.sessions(namespace=namespace)
    nothing = "no sessions: requests name theirs with raykv_session, where client_hints allows it"
    answer_if_any(found, _print_sessions, nothing, as_json=as_json)


def _print_sessions(found: Sequence[SessionStatus]) -> None:
    rows = table_of(
        found,
        {
            "session": lambda each: each.session,
            "namespace": lambda each: short_namespace(each.namespace),
            "stage": _stage,
            "chunks": lambda each: f"{each.chunks:,}",
            "private": lambda each: f"{each.private_chunks:,}",
            "requests": lambda each: f"{each.requests:,}",
            "unused for": lambda each: ago(each.idle_s),
            "node": lambda each: each.node_id[:12],
        },
    )
    console().print(rows)


def _stage(known: SessionStatus) -> str:
    return f"paused, {ago(known.left_s)} left" if known.left_s else str(known.stage)


def show(
    name: Name, *, namespace: OnlyNamespace = "", as_json: AsJson = False, address: Address = None
) -> None:
    """Show a session, and where its chunks are.

    Example: raykv session show agent-7
    """
    with raykv.connect(address) as cluster:
        known = cluster.session(name, namespace=namespace).status()
    answer(known, _print_session, as_json=as_json)


def over(
    name: Name, *, namespace: OnlyNamespace = "", as_json: AsJson = False, address: Address = None
) -> None:
    """Say that a session is over: what no other session has used is evicted next.

    Example: raykv session over agent-7
    """
    with raykv.connect(address) as cluster:
        known = cluster.session(name, namespace=namespace).over()
    answer(known, _print_session, as_json=as_json)


def pause(
    name: Name,
    duration: Annotated[str, typer.Argument(help="How long it pauses, about: 90s or 15m.")],
    *,
    priority: Annotated[
        int | None,
        typer.Option(help="1 to 9, among all that is kept by preference.", min=1, max=9),
    ] = None,
    namespace: OnlyNamespace = "",
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Keep a session's chunks by preference for a time; give it up if it has not gone on by then.

    Example: raykv session pause agent-7 15m
    """
    from raykv.client.sessions import check_pause

    seconds = parse_duration("the pause", duration)
    check_pause(seconds, priority)
    with raykv.connect(address) as cluster:
        known = cluster.session(name, namespace=namespace).pause(seconds, priority=priority)
    answer(known, _print_session, as_json=as_json)


def prefetch(
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="A node by Ray's id, or an engine, or the beginning of it. Default: the node of "
            "the session's latest request.",
        ),
    ] = "",
    namespace: OnlyNamespace = "",
    timeout: Timeout = deadlines.TRANSFER_S,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Bring a session's chunks to a node's RAM before it goes on there, from other pools or disks.

    Exit code 1 if some of them are not there at the end.

    Example: raykv session prefetch agent-7 --to 3f9a
    """
    with raykv.connect(address) as cluster, counting("prefetch", as_json=as_json) as watch:
        session = cluster.session(name, namespace=namespace)
        found = session.prefetch(to, deadline_s=timeout, watch=watch)
    report(found, as_json=as_json)


def _print_session(known: SessionStatus) -> None:
    say(
        f"session {known.session}: {_stage(known)}; {counted(known.chunks, 'chunk')}, of which "
        f"{known.private_chunks:,} are of no other session; "
        f"{counted(known.requests, 'request')}, unused for {ago(known.idle_s)}"
    )
    for where, counts in (("pool", known.in_pools), ("disk", known.on_disks)):
        for node_id, count in sorted(counts.items()):
            say(f"node {node_id[:12]}: {count:,} of them in its {where}")
