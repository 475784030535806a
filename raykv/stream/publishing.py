"""The cluster's publisher of events: start it, ask it, end it."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, first_line
from raykv.base.extras import with_extra
from raykv.base.settings import Settings
from raykv.cluster import ask, names
from raykv.protocol.events import PublisherSettings, PublisherStatus
from raykv.protocol.framing import receive

logger = logging.getLogger("raykv.publisher")


def publisher_actor(settings: PublisherSettings) -> Any:
    """The publisher, created on Ray's head node if there is none; its settings stay as they are.

    It is as nice to others as Ray's workers are: the scheduler actor beside it goes first.

    Raises:
        ClusterError: pyzmq is not installed.
    """
    try:
        from raykv.stream.publisher import PublisherActor
    except ImportError as error:
        raise ClusterError(f"{error}: publishing needs pyzmq: {with_extra('events')}") from error
    kind = ray.remote(PublisherActor)
    made = ask.detached(kind, names.PUBLISHER, {}, resources=names.ON_HEAD)
    return made.remote(settings)


def ensure_publisher(settings: Settings) -> None:
    """Have the publisher that an engine's settings want; the engine does not depend on it."""
    if not settings.events_endpoint:
        return
    try:
        publisher_actor(PublisherSettings(settings.events_endpoint))
    except Exception as error:
        logger.warning("no events are published: %s", first_line(error))


def find_publisher() -> Any | None:
    return ask.find(names.PUBLISHER)


def publisher_status() -> PublisherStatus | None:
    """The publisher's status, or None if there is no publisher.

    Raises:
        ClusterError: it does not answer.
    """
    actor = ask.ask_ray(find_publisher)
    if actor is None:
        return None
    raw = ask.answer(actor, "status", timeout_s=deadlines.CLIENT_S, who="the publisher")
    return receive(raw, PublisherStatus, "the publisher", ask.HERE)


def publish(settings: PublisherSettings) -> PublisherStatus:
    """Have events published; waits until the sockets are bound.

    Raises:
        ClusterError: they can't be, or a publisher runs that was set up in another way.
    """
    running = publisher_status()
    wanted = (settings.topic, settings.form, settings.hashes)
    if running is not None and (running.topic, running.format, running.hashes) != wanted:
        raise ClusterError(
            f"a publisher runs already, at {running.endpoint} with the topic {running.topic!r}: "
            "`raykv publish stop` ends it"
        )
    publisher_actor(settings)
    give_up_at = time.monotonic() + deadlines.ANSWER_S + deadlines.CLIENT_S
    while True:
        status = publisher_status()
        if status is not None and not status.error:
            return status
        if time.monotonic() > give_up_at:
            why = "it has ended" if status is None else status.error
            raise ClusterError(f"events can't be published at {settings.endpoint}: {why}")
        time.sleep(deadlines.LOOK_S)


def stop_publisher() -> bool:
    """End the publisher; False: there was none."""
    actor = ask.ask_ray(find_publisher)
    if actor is not None:
        ray.kill(actor, no_restart=True)  # bounded: Ray's own deadline; for a person
    return actor is not None
