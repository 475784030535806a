"""Chunks into a node's pool, before a request needs them there."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import ray

from raykv.base.deadlines import (
    FETCH_GRACE_S,
    TRANSFER_DEMOTE_S,
    TRANSFER_EARLY_S,
    TRANSFER_LOOK_S,
    TRANSFER_S,
)
from raykv.base.errors import ClusterError, RayKVError, cause_of, first_line
from raykv.base.ids import Refusal
from raykv.client.import_source import GENERATION
from raykv.client.listing import Reader
from raykv.client.pins import ordered
from raykv.client.scheduler import Scheduler
from raykv.cluster import ask
from raykv.cluster.ask import HERE, NODE_ACTOR, SCHEDULER
from raykv.protocol.columns import LostReplicas, Numbers, Replicas
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive
from raykv.protocol.node import Demotions
from raykv.protocol.operator import (
    Released,
    ReleaseOrder,
    TransferEnd,
    TransferGrant,
    TransferOrder,
    TransferResult,
)
from raykv.protocol.peer import FetchRequest, FetchResult

logger = logging.getLogger("raykv")

PAGE_CHUNKS = 256
"""Chunks of a transfer that go at once: progress is reported after each page."""

Watch = Callable[[TransferResult], None]


@dataclass(frozen=True)
class Moving:
    """Has slots lent in a node's pool, and chunks fetched into them."""

    scheduler: Scheduler
    reader: Reader

    def prefetch(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        namespace: str,
        deadline_s: float,
        watch: Watch,
    ) -> TransferResult:
        target = self.scheduler.node(node_id)
        asked, space = ordered(keys), self.reader.full_namespace(namespace)
        return self.bring(asked, target, space, time.monotonic() + deadline_s, watch)

    def move(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        namespace: str,
        deadline_s: float,
        watch: Watch,
    ) -> TransferResult:
        target = self.scheduler.node(node_id)
        asked, space = ordered(keys), self.reader.full_namespace(namespace)
        give_up_at = time.monotonic() + deadline_s
        result = self.bring(asked, target, space, give_up_at, watch)
        wanted = result.came + result.there
        order = ReleaseOrder(PROTOCOL_VERSION, space, target, asked)
        dropped = 0
        while True:
            answer = self.scheduler.ask("release", encode(order))
            released = receive(answer, Released, SCHEDULER, HERE)
            dropped += released.dropped
            is_known = len(asked) - released.absent >= wanted
            if is_known or time.monotonic() > give_up_at:
                return msgspec.structs.replace(result, dropped=dropped, kept=released.kept)
            # What has come is reported by its NodeActor within milliseconds.
            time.sleep(TRANSFER_LOOK_S)

    def bring(
        self, keys: list[bytes], node_id: str, namespace: str, give_up_at: float, watch: Watch
    ) -> TransferResult:
        """Chunks into the pool of a node, all names being whole ones; as for `prefetch`."""
        began = time.monotonic()
        result = TransferResult(asked=len(keys))
        series_id = uuid.uuid4().hex
        for page in _pages(keys):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                result = too_late(result, len(page))
                continue
            order = TransferOrder(
                version=PROTOCOL_VERSION,
                transfer_id=uuid.uuid4().hex,
                namespace=namespace,
                node_id=node_id,
                keys=page,
                series_id=series_id,
            )
            result = self.fetch_lent(order, Replicas(), min(left_s, TRANSFER_S), result)
            result = msgspec.structs.replace(result, seconds=time.monotonic() - began)
            watch(result)
        return result

    def fetch_lent(
        self, order: TransferOrder, sources: Replicas, deadline_s: float, so_far: TransferResult
    ) -> TransferResult:
        """Have slots lent and chunks fetched into them, from `sources` or who is said to have them.

        Raises:
            ClusterError: nothing is lent now.
        """
        began = time.monotonic()
        give_up_at = began + min(deadline_s, TRANSFER_EARLY_S)
        grant = receive(self.scheduler.ask("lend", encode(order)), TransferGrant, SCHEDULER, HERE)
        while grant.is_early and time.monotonic() < give_up_at:
            time.sleep(TRANSFER_LOOK_S)
            grant = receive(
                self.scheduler.ask("lend", encode(order)), TransferGrant, SCHEDULER, HERE
            )
        if grant.error:
            raise ClusterError(f"nothing more was fetched: {grant.error}")
        grant = msgspec.structs.replace(grant, sources=_with_rows(sources, grant))
        fetched: FetchResult | None = None
        refusals = Counter(so_far.refusals)
        try:
            if len(grant.demoted):
                _demote(grant.demoted, order.node_id, deadline_s - (time.monotonic() - began))
            left_s = deadline_s - (time.monotonic() - began)
            if len(grant.handles) and left_s <= 0:
                refusals[Refusal.TOO_LATE.name] += len(grant.handles)
            elif len(grant.handles):
                fetched = _fetch(grant, order.node_id, order.namespace, left_s)
                refusals.update(Refusal(each).name for each in fetched.refusals if each)
        except (RayKVError, ray.exceptions.RayError) as error:
            refusals[first_line(cause_of(error))] += len(grant.handles)
        came = 0 if fetched is None else fetched.refusals.count(int(Refusal.NONE))
        self._end(order.transfer_id, order.namespace, fetched)
        return msgspec.structs.replace(
            so_far,
            came=so_far.came + came,
            num_bytes=so_far.num_bytes + (0 if fetched is None else fetched.num_bytes),
            there=so_far.there + grant.there,
            nowhere=so_far.nowhere + grant.nowhere,
            no_room=so_far.no_room + grant.no_room,
            refusals=dict(refusals),
        )

    def _lend(self, order: TransferOrder) -> TransferGrant:
        raw = self.scheduler.ask("lend", encode(order))
        return receive(raw, TransferGrant, SCHEDULER, HERE)

    def _end(self, transfer_id: str, namespace: str, fetched: FetchResult | None) -> None:
        came: list[int] = []
        lost = LostReplicas()
        if fetched is not None:
            columns = zip(fetched.refusals, fetched.slots, strict=True)
            came = [slot for refusal, slot in columns if refusal == Refusal.NONE]
            lost = fetched.lost
        message = TransferEnd(PROTOCOL_VERSION, transfer_id, namespace, came, lost)
        self.scheduler.ask("end_transfer", encode(message))


def too_late(result: TransferResult, count: int) -> TransferResult:
    """`result`, and so many chunks that there was no time for."""
    refusals = Counter(result.refusals)
    refusals[Refusal.TOO_LATE.name] += count
    return msgspec.structs.replace(result, refusals=dict(refusals))


def _demote(demoted: Demotions, node_id: str, deadline_s: float) -> None:
    """Have chunks copied for a node's disk; that it does not work is logged only."""
    actor = ask.ask_ray(ask.find_node_actor, node_id)
    deadline_s = min(deadline_s, TRANSFER_DEMOTE_S)
    if actor is None or deadline_s <= 0:
        return
    what = "it has a problem, or no room for them, or was too slow"
    try:
        waiting = actor.demote.remote(encode(demoted), deadline_s)
        if ray.get(waiting, timeout=deadline_s + FETCH_GRACE_S):
            return
    except ray.exceptions.RayError as error:
        what = first_line(cause_of(error))
    logger.warning(
        "not all of %d evicted chunks got to the disk of node %s: %s",
        len(demoted),
        node_id[:12],
        what,
    )


def _fetch(grant: TransferGrant, node_id: str, namespace: str, deadline_s: float) -> FetchResult:
    """Have a NodeActor fetch into what was lent."""
    request = FetchRequest(
        version=PROTOCOL_VERSION,
        namespace=namespace,
        node_epoch=grant.node_epoch,
        handles=grant.handles,
        slot_bytes=grant.slot_bytes,
        sources=grant.sources,
        deadline_s=deadline_s,
    )
    actor = ask.ask_ray(ask.find_node_actor, node_id)
    if actor is None:
        raise ClusterError(f"node {node_id[:12]} has no NodeActor any more")
    raw = ray.get(actor.fetch.remote(encode(request)), timeout=deadline_s + FETCH_GRACE_S)
    return receive(raw, FetchResult, NODE_ACTOR, HERE)


def _with_rows(sources: Replicas, grant: TransferGrant) -> Replicas:
    """The one source for all that was granted, or what the grant says itself."""
    if not sources.sources:
        return grant.sources
    count = len(grant.handles)
    return Replicas(
        sources.sources,
        sources.node_epochs,
        key_index=Numbers.of(range(count)),
        source_index=Numbers.of([0] * count),
        slots=Numbers.of([0] * count),
        generations=Numbers.of([GENERATION] * count),
    )


def _pages(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), PAGE_CHUNKS):
        yield keys[start : start + PAGE_CHUNKS]
