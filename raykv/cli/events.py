"""Commands about events: events, and publish start, status, stop for routers that read vLLM's."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import raykv
from raykv.base import parsing
from raykv.base.errors import SettingError
from raykv.cli.base import (
    Address,
    AsJson,
    ExitCode,
    answer,
    answer_if_any,
    counted,
    done,
    print_json_line,
    say,
)
from raykv.protocol.events import PublisherSettings, PublisherStatus

if TYPE_CHECKING:
    from raykv.protocol.events import Event


def events(
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            help="Start after this event: its number, or LIFE:NUMBER. Default: all that are "
            "kept; with --follow only new ones."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write each event as a JSON object on one line.")
    ] = False,
    address: Address = None,
) -> None:
    """Print what happens to the directory: chunks stored and removed, nodes, clearings.

    Each event has its place, LIFE:NUMBER, from which a later call goes on without gaps. If some
    events are no longer kept, the first one is EventsMissed.

    Example: raykv events --follow --json | jq -r 'select(.event == "BlockStored").node_id'
    """
    from raykv.stream.readers import check_place

    place: int | tuple[int, int] | None = _place(since)
    check_place(place)
    if place is None and not follow:
        place = 0
    with raykv.connect(address) as cluster, contextlib.suppress(KeyboardInterrupt):
        for event in cluster.events(place, follow=follow):
            if as_json:
                print_json_line(event)
            else:
                say(_line(event))


def _place(since: str | None) -> int | tuple[int, int] | None:
    if since is None:
        return None
    first, colon, second = since.partition(":")
    try:
        return (int(first), int(second)) if colon else int(first)
    except ValueError:
        raise SettingError(
            f"--since {since!r}: give the number of an event, or LIFE:NUMBER"
        ) from None


def _line(event: Event) -> str:
    fields = msgspec.structs.asdict(event)
    place = f"{fields.pop('life')}:{fields.pop('seq')}"
    happened = datetime.fromtimestamp(fields.pop("time")).astimezone()
    moment = [f"{happened:%Y-%m-%d %H:%M:%S}"] if event.time else []
    words = [f"{name}={_short(value)}" for name, value in fields.items()]
    return " ".join((*moment, place, type(event).__name__, *words))


def _short(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


# For routers

NOT_PUBLISHED = "no events are published in this cluster"


def start(
    endpoint: Annotated[
        str,
        typer.Argument(
            help="Where, like tcp://*:5557 (the node's address; 0.0.0.0: all); with a host's name "
            "it connects."
        ),
    ],
    *,
    replay: Annotated[
        str, typer.Option(help="Where subscribers ask for events that they missed.")
    ] = "",
    topic: Annotated[
        str, typer.Option(help="May name {node}, {ip}, {host}, {model}, {namespace}.")
    ] = PublisherSettings.topic,
    form: Annotated[
        str, typer.Option("--format", help="map, or array as before June 2026.")
    ] = PublisherSettings.form,
    hashes: Annotated[
        str, typer.Option(help="int for the low 64 bits of block hashes, or bytes.")
    ] = PublisherSettings.hashes,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Publish from Ray's head node, until `stop` or `raykv down`.

    Token ids are in the events for chunks of engines with describe_chunks=true.

    Example: raykv publish start 'tcp://*:5557' --replay 'tcp://*:5558'
    """
    if not endpoint:
        raise SettingError("no endpoint is given: name one like tcp://*:5557")
    settings = PublisherSettings(
        parsing.endpoint("ENDPOINT", endpoint),
        parsing.endpoint("--replay", replay),
        parsing.topic("--topic", topic),
        parsing.one_of("map", "array")("--format", form),
        parsing.one_of("int", "bytes")("--hashes", hashes),
    )
    with raykv.connect(address) as cluster:
        answer(cluster.publish(settings), _show, as_json=as_json)


def publisher_status(*, as_json: AsJson = False, address: Address = None) -> None:
    """Show what the publisher does; exit code 1 if there is no publisher.

    Example: raykv publish status
    """
    with raykv.connect(address) as cluster:
        found = cluster.publisher()
    answer_if_any(found, _show, NOT_PUBLISHED, as_json=as_json)


def stop(*, as_json: AsJson = False, address: Address = None) -> None:
    """End the publisher; exit code 1 if there was no publisher.

    Example: raykv publish stop
    """
    with raykv.connect(address) as cluster:
        was_there = cluster.stop_publishing()
    sentence = "events are no longer published" if was_there else NOT_PUBLISHED
    done({"stopped": was_there}, sentence, as_json=as_json)
    raise typer.Exit(ExitCode.OK if was_there else ExitCode.NOT_WELL)


def _show(status: PublisherStatus) -> None:
    replay = f", missed events at {status.replay_endpoint}" if status.replay_endpoint else ""
    say(
        f"events at {status.endpoint}{replay}; topic {status.topic!r}, {status.format}, "
        f"{status.hashes} hashes"
    )
    say(
        f"{counted(status.held, 'chunk')} published in {counted(status.streams, 'stream')}, "
        f"{status.waiting} waiting, {status.undescribed} published as bare hashes, "
        f"{status.skipped} skipped"
    )
    say(
        f"{counted(status.messages, 'message')}, {status.dropped} of them not to every subscriber, "
        f"{counted(status.replays, 'replay')}, {counted(status.restarts, 'restart')}"
    )
    if status.error:
        say(f"not published: {status.error}", style="red")
