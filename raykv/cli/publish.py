"""`raykv publish`: the cluster's events for routers that read vLLM's."""

from __future__ import annotations

from typing import Annotated

import typer

import raykv
from raykv.base import parsing
from raykv.base.errors import SettingError
from raykv.cli.base import Address, AsJson, ExitCode, answer, answer_if_any, done, say
from raykv.cli.base import app as main_app
from raykv.protocol.events import PublisherSettings, PublisherStatus

app = typer.Typer(
    help="Publish the cluster's events in vLLM's format (ZMQ), for routers that index KV caches.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

main_app.add_typer(app, name="publish")

NOT_PUBLISHED = "no events are published in this cluster"


@app.command()
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
    ray_address: Address = None,
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
    with raykv.connect(ray_address) as cluster:
        answer(cluster.publish(settings), _show, as_json=as_json)


@app.command()
def status(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Show what the publisher does; exit code 1 if there is no publisher.

    Example: raykv publish status
    """
    with raykv.connect(ray_address) as cluster:
        found = cluster.publisher()
    answer_if_any(found, _show, NOT_PUBLISHED, as_json=as_json)


@app.command()
def stop(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """End the publisher; exit code 1 if there was no publisher.

    Example: raykv publish stop
    """
    with raykv.connect(ray_address) as cluster:
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
        f"{status.held} chunks published in {status.streams} streams, {status.waiting} waiting, "
        f"{status.undescribed} published as bare hashes, {status.skipped} skipped"
    )
    say(
        f"{status.messages} messages, {status.dropped} of them not to every subscriber, "
        f"{status.replays} replays, {status.restarts} restarts"
    )
    if status.error:
        say(f"not published: {status.error}", style="red")
