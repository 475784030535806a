"""The command `events`: what happens to the directory."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import raykv
from raykv.base.errors import SettingError
from raykv.cli.base import Address, app, print_json_line, say

if TYPE_CHECKING:
    from raykv.protocol.events import Event


@app.command()
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
    ray_address: Address = None,
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
    with raykv.connect(ray_address) as cluster, contextlib.suppress(KeyboardInterrupt):
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
