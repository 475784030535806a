"""The scheduler actor of a cluster, as this process asks it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from raykv.base.deadlines import CLIENT_S, READER_PAUSE_S
from raykv.base.errors import ClusterError, NotFoundError
from raykv.cluster import ask
from raykv.protocol.framing import S, receive
from raykv.protocol.node import NodeDescription
from raykv.protocol.status import ClusterStatus


@dataclass(frozen=True)
class Scheduler:
    """Looked up anew for every question: it may have a new life.

    All methods raise a `ClusterError` if RayKV does not run at `address`, or does not answer.
    """

    address: str

    def find(self) -> Any:
        """The actor's handle."""
        actor = ask.ask_ray(ask.find_scheduler_actor)
        if actor is None:
            raise ClusterError(
                f"RayKV does not run in the Ray cluster at {self.address}: no engine with "
                "RayKVConnector has started there"
            )
        return actor

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the actor returns."""
        return ask.answer(self.find(), method, *arguments, timeout_s=CLIENT_S)

    def ask_for(self, kind: type[S], method: str, *arguments: Any) -> S:
        """That, as a struct."""
        return receive(self.ask(method, *arguments), kind, ask.SCHEDULER, ask.HERE)

    def status(self) -> ClusterStatus:
        """What it knows."""
        return ask.status(self.find(), CLIENT_S)

    def log(self, node_id: str, *, follow: bool) -> Iterator[bytes]:
        """The log of a node's NodeActor, or of the scheduler actor, piece by piece."""
        actor, who = self.find(), ask.SCHEDULER
        if node_id:
            who = ask.NODE_ACTOR
            actor = ask.find_node_actor(self.node(node_id))
            if actor is None:
                raise NotFoundError(f"node {node_id} has no NodeActor any more")
        place = None
        while True:
            place, piece = ask.answer(actor, "log", place, timeout_s=CLIENT_S, who=who)
            if piece or not follow:
                yield piece
            if not follow:
                return
            if not piece:
                time.sleep(READER_PAUSE_S)

    def node(self, beginning: str) -> str:
        """The one node with a pool whose id begins so."""
        known = [node.node_id for node in self.status().nodes]
        found = [node_id for node_id in known if node_id.startswith(beginning)]
        if len(found) != 1:
            what = "no node with a pool" if not found else f"{len(found)} nodes with a pool"
            ids = ", ".join(node_id[:12] for node_id in known) or "none"
            raise (ClusterError if found else NotFoundError)(
                f"the id of {what} begins with {beginning!r}; there are {ids}"
            )
        return found[0]


def with_answers(
    known: ClusterStatus, answers: Mapping[str, NodeDescription | str]
) -> ClusterStatus:
    """What the scheduler actor knows, with what NodeActors have just told, or why they have not."""
    there = {node.node_id for node in known.nodes}
    told = {n: each for n, each in answers.items() if isinstance(each, NodeDescription)}
    # All counters of a node, so that they are of one moment.
    fresh = {n: msgspec.structs.asdict(each.stats) for n, each in told.items() if not each.refusal}
    return msgspec.structs.replace(
        known,
        nodes=[msgspec.structs.replace(n, **fresh.get(n.node_id, {})) for n in known.nodes],
        refused={n: each.refusal for n, each in told.items() if n not in there and each.refusal},
        silent={n: each for n, each in answers.items() if isinstance(each, str)},
    )
