"""The scheduler actor of a cluster, as this process asks it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from raykv.base import deadlines, errors
from raykv.base.ids import PART_MARK, family_of
from raykv.cluster import ask
from raykv.protocol import framing, operator, reader
from raykv.protocol.columns import MAX_KEYS, Source
from raykv.protocol.node import NodeDescription
from raykv.protocol.status import ClusterStatus

logger = logging.getLogger("raykv")

WatchNodes = Callable[[list[str]], None]
"""Called with the ids of the nodes that are waited for."""


@dataclass(frozen=True)
class Scheduler:
    """Looks the actor up for every question: it may have a new life.

    All methods raise a `ClusterError` if RayKV does not run at `address`, or does not answer.
    """

    address: str

    def find(self) -> Any:
        """Return the actor's handle."""
        actor = ask.ask_ray(ask.find_scheduler_actor)
        if actor is None:
            raise errors.ClusterError(
                f"RayKV does not run in the Ray cluster at {self.address}: no engine with "
                "RayKVConnector has started there"
            )
        return actor

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, and return its answer."""
        return ask.answer(
            self.find(), method, *arguments, timeout_s=deadlines.CLIENT_S, watch=_tell_silent
        )

    def ask_for(self, kind: type[framing.S], method: str, *arguments: Any) -> framing.S:
        """Call a method that answers with a struct."""
        return ask.received(kind, self.ask(method, *arguments))

    def status(self) -> ClusterStatus:
        """Return the cluster's status as the actor knows it."""
        return self.ask_for(ClusterStatus, "status")

    def order(
        self,
        order: operator.OperatorOrder,
        watch: WatchNodes = lambda _: None,
        refused: str = "it was not done",
    ) -> list[str]:
        """Give an order, and wait until it is kept and each node that reports follows it.

        Args:
            order: repeating the same one changes nothing.
            watch: called once, after a second, with the nodes that do not follow it yet, if any.
            refused: how the error begins if the order is refused.

        Returns:
            The ids of the engines whose weights it names; none for other orders.

        Raises:
            ClusterError: it is refused, or it is not done in time; nodes that are behind are named.
        """
        answer = self.ask_for(operator.OrderAnswer, "order", framing.encode(order))
        if answer.error:
            raise errors.ClusterError(f"{refused}: {answer.error}")
        began, is_told = time.monotonic(), False
        while True:
            state = self.ask_for(operator.OrderState, "order_state", order.order_id)
            if state.error:
                raise errors.ClusterError(f"{refused}: {state.error}")
            if not state.is_known:
                # The scheduler actor has begun anew meanwhile.
                answer = self.ask_for(operator.OrderAnswer, "order", framing.encode(order))
            elif state.orders is not None and not state.behind:
                return state.told
            passed = time.monotonic() - began
            if passed > deadlines.CLIENT_S:
                raise errors.ClusterError(_not_done(state))
            if state.behind and passed > deadlines.SILENCE_S and not is_told:
                is_told = True
                watch(state.behind)
            time.sleep(deadlines.LOOK_S)

    def log(self, node_id: str = "", *, follow: bool = False) -> Iterator[bytes]:
        """Yield the end of a NodeActor's log, or the scheduler actor's; `follow`: wait for more."""
        actor, who = self.find(), ask.SCHEDULER
        if node_id:
            who = ask.NODE_ACTOR
            actor = ask.ask_ray(ask.find_node_actor, self.node(node_id))
            if actor is None:
                raise errors.NotFoundError(f"node {node_id} has no NodeActor any more")
        place = None
        while True:
            place, piece = ask.answer(actor, "log", place, timeout_s=deadlines.CLIENT_S, who=who)
            if piece or not follow:
                yield piece
            if not follow:
                return
            if not piece:
                time.sleep(deadlines.IDLE_LOOK_S)

    def node(self, beginning: str) -> str:
        """Return the id of the one node with a pool whose id begins like this."""
        known = [node.node_id for node in self.status().nodes]
        return _the_one("ids of nodes with a pool", known, beginning)

    def full_namespace(self, beginning: str, *, is_whole: bool = False) -> str:
        """Return the one namespace whose name begins like this.

        `is_whole`: its chunks are to be moved, which takes the names that they have.

        Raises:
            ClusterError: there is not exactly one; or it is to be whole, and lies in parts.
        """
        known = self.status()
        found = namespace_of(known, beginning)
        if is_whole:
            refuse_parts(found, known)
        return found

    def sources_of(self, namespace: str, keys: Sequence[bytes]) -> list[Collection[Source]]:
        """Return the pools and disks that have each key."""
        found: list[Collection[Source]] = []
        while len(found) < len(keys):
            some = list(keys[len(found) : len(found) + MAX_KEYS])
            query = reader.WhereQuery(namespace, some)
            page = self.ask_for(reader.WherePage, "where", framing.encode(query))
            found += page.sources(query)
        return found


def namespace_of(known: ClusterStatus, beginning: str) -> str:
    """Return the one namespace of a cluster whose name begins like this.

    Raises:
        ClusterError: there is not exactly one.
    """
    names = {*known.namespaces, *(engine.namespace for engine in known.engines)}
    if not any(name.startswith(beginning) for name in names):
        # What only lies on disks is meant when it is named.
        names |= known.disk_chunks.keys()
    if not names:
        raise errors.NotFoundError("the cache has no namespace yet: no engine has attached to it")
    if PART_MARK not in beginning:
        names = {str(family_of(name)) for name in names}
    return _the_one("namespaces of the cache", sorted(names), beginning)


def refuse_parts(namespace: str, known: ClusterStatus) -> None:
    """Refuse a namespace that has parts alone, of engines with several places: chunks are moved by
    the names that they have.

    Raises:
        ClusterError: it names the parts.
    """
    names = {*known.namespaces, *known.disk_chunks}
    parts = sorted(name for name in names if family_of(name) == namespace != name)
    if parts and namespace not in names:
        raise errors.ClusterError(
            f"the chunks of namespace {namespace[:12]} lie in parts, since its engines have "
            f"several places: name one of {', '.join(parts)}"
        )


def _the_one(whats: str, known: Sequence[str], beginning: str) -> str:
    found = [name for name in known if name.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    raise (errors.ClusterError if found else errors.NotFoundError)(
        f"{len(found) or 'no'} {whats} begin with {beginning!r}; there are "
        f"{', '.join(known) or 'none'}"
    )


def _not_done(state: operator.OrderState) -> str:
    if state.orders is None:
        return (
            "ordered, but Ray's head node has not kept it yet: should the scheduler actor end now, "
            "it is forgotten. Is the head node well?"
        )
    nodes = ", ".join(sorted(state.behind))
    return (
        f"ordered and kept, but {nodes} have not heard of it yet: `raykv status` or `raykv doctor` "
        "say why; they go by it as soon as they do"
    )


def with_answers(
    known: ClusterStatus, told: Mapping[str, NodeDescription], silent: dict[str, str]
) -> ClusterStatus:
    """Merge NodeActors' answers into the scheduler actor's status; `silent`: why there are none."""
    there = {node.node_id for node in known.nodes}
    # All counters of a node, so that they are of one moment.
    fresh = {n: msgspec.structs.asdict(each.stats) for n, each in told.items() if not each.refusal}
    return msgspec.structs.replace(
        known,
        nodes=[msgspec.structs.replace(n, **fresh.get(n.node_id, {})) for n in known.nodes],
        refused={n: each.refusal for n, each in told.items() if n not in there and each.refusal},
        silent=silent,
    )


def _tell_silent() -> None:
    logger.warning("waiting for %s, %g s at most", ask.SCHEDULER, deadlines.CLIENT_S)
