"""How the scheduler actor is made: on Ray's head node, named, restarted for ever."""

from __future__ import annotations

from typing import Any

import ray

from raykv.base.ids import Stamp
from raykv.base.settings import ANY_PORT, MetricsPlace
from raykv.cluster import ask, bequest, names
from raykv.directory.actor import SchedulerActor
from raykv.protocol.operator import OrdersDocument


def scheduler_actor(address: str, metrics: MetricsPlace = ANY_PORT) -> Any:
    """The scheduler actor, created if there is none; creators that race get the same one.

    It lives on Ray's head node, without which there is no cluster, and on its successor: the loss
    of any other node does not cost the directory.
    """
    # An actor that needs nothing goes to any node, whatever affinity it has.
    head = {names.HEAD_RESOURCE: names.SHARE_OF_HEAD}
    kind, environment = ray.remote(SchedulerActor), {"RAY_worker_niceness": "0"}
    return ask.detached(kind, names.SCHEDULER, environment, resources=head).remote(address, metrics)


def forget_wish() -> None:
    """Have no later life make NodeActors. It waits for Ray's head node as long as Ray does."""
    bequest.delete(bequest.WISH)


def forget_orders() -> None:
    """Leave nothing of what operators have ordered to later lives, but what they have cleared.

    Once there is no scheduler actor any more: what that orders meanwhile would get the same number
    as what is left. It waits for Ray's head node as long as Ray does.
    """
    kept = bequest.orders()
    if kept is not None:
        bequest.put_orders(_with_floors_alone(kept))
    for name, _ in bequest.entries():
        if name not in (bequest.LIFE, bequest.ORDERS):
            bequest.delete(name)


def _with_floors_alone(document: OrdersDocument) -> OrdersDocument:
    bare = OrdersDocument(document.stamp, document.floors)
    if document == bare:
        return document
    stamp = Stamp(document.stamp.history, document.stamp.number + 1)
    return OrdersDocument(stamp, document.floors)
