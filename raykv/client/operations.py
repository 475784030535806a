"""What operators do to the cache: the part of `Cluster` that orders, beside the one that looks."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import ray

from raykv.base.deadlines import (
    CLIENT_S,
    FETCH_GRACE_S,
    TRANSFER_DEMOTE_S,
    TRANSFER_EARLY_S,
    TRANSFER_LOOK_S,
    TRANSFER_S,
    UP_S,
)
from raykv.base.errors import ClusterError, RayKVError, SettingError, cause_of, first_line
from raykv.base.ids import Refusal
from raykv.base.settings import load_settings
from raykv.client import pools as deployment
from raykv.client.ship import Shipping, raw_keys, with_rows
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.cluster.ask import HERE, NODE_ACTOR, SCHEDULER
from raykv.directory.launch import scheduler_actor
from raykv.node.wishes import usual_nodes
from raykv.protocol.columns import LostReplicas, Replicas
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive
from raykv.protocol.node import Demotions
from raykv.protocol.operator import (
    MAX_ORDERED,
    MAX_PIN_S,
    MAX_PRIORITY,
    NodeUp,
    PinAnswer,
    Pinned,
    PinOrder,
    PinStatus,
    PoolWish,
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
"""Of a transfer, in one go: progress is told after each."""

PIN_S = 3600.0
"""How long a pin lasts if nobody says it."""

Watch = Callable[[TransferResult], None]


class Operations(Shipping):
    """Methods of `Cluster`; `_scheduler` and `_full_namespace` are its own."""

    address: str

    def _scheduler(self) -> Any:
        raise NotImplementedError

    def _full_namespace(self, beginning: str) -> str:
        raise NotImplementedError

    # Pins

    def pin(
        self,
        keys: Sequence[bytes | str],
        *,
        namespace: str = "",
        ttl_s: float = PIN_S,
        priority: int | None = None,
        pin_id: str | None = None,
    ) -> PinStatus:
        """Keep chunks in the cache, wherever they are and come to; those too that are not stored
        yet. All of them or, with an error, none.

        Args:
            keys: offload keys of the chunks, as bytes or hex, the prefix's first ones first. Those
                of a prompt are `cluster.lookup(text=…).keys`.
            namespace: as `status` shows it, or the beginning of it; may be left out if there is
                one only.
            ttl_s: for so many seconds, at most 30 days.
            priority: None: no eviction takes them. 1 to 9: evictions take them only when nothing
                without a priority, or with a lower one, is left.
            pin_id: a name for the pin, in the place of an earlier one of that name; else a new one.

        Raises:
            ClusterError: RayKV does not run here, or does not answer; pins may not take so much.
            SettingError: an argument is not allowed.
        """
        if not 0 < ttl_s <= MAX_PIN_S:
            raise SettingError(f"ttl_s={ttl_s} must be above 0, at most {MAX_PIN_S:.0f}")
        if priority is not None and not 1 <= priority <= MAX_PRIORITY:
            raise SettingError(f"priority={priority} must be from 1 to {MAX_PRIORITY}")
        order = PinOrder(
            version=PROTOCOL_VERSION,
            pin_id=pin_id or uuid.uuid4().hex[:8],
            namespace=self._namespace(namespace),
            keys=_ordered(keys),
            ttl_s=ttl_s,
            priority=priority,
        )
        answer = receive(self._ask("pin", encode(order)), PinAnswer, SCHEDULER, HERE)
        if answer.pin is None:
            raise ClusterError(f"nothing was pinned: {answer.error}")
        return answer.pin

    def unpin(self, pin_id: str) -> None:
        """End a pin; its chunks are evicted in their turn again.

        Raises:
            ClusterError: RayKV does not run here, or does not answer, or there is no such pin.
        """
        if not self._ask("unpin", pin_id):
            known = ", ".join(sorted(pin.pin_id for pin in self.pins().pins))
            raise ClusterError(f"there is no pin {pin_id!r}; there are {known or 'none'}")

    def pins(self) -> Pinned:
        """All pins, and what they take of each node.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return receive(self._ask("pins"), Pinned, SCHEDULER, HERE)

    # Transfers

    def prefetch(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        *,
        namespace: str = "",
        deadline_s: float = TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> TransferResult:
        """Bring chunks to a node's pool, from whoever has them, before a request needs them there:
        from other pools, or from disks what is in none.

        The first chunks come first. What does not come is no error: the result counts it.

        Args:
            keys: as for `pin`.
            node_id: Ray's, or the beginning of it.
            namespace: as for `pin`.
            deadline_s: for all of them.
            watch: called after every page with the result so far.

        Raises:
            ClusterError: RayKV does not run here, or does not answer; the node has no pool, or
                nothing can be lent there now.
        """
        target = self._node(node_id)
        asked, space = _ordered(keys), self._namespace(namespace)
        return self._prefetch(asked, target, space, time.monotonic() + deadline_s, watch)

    def move(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        *,
        namespace: str = "",
        deadline_s: float = TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> TransferResult:
        """`prefetch`, then give up the replicas that other nodes have of what is there now.

        A replica stays that is pinned where it is, unless it is pinned on the node too, and what is
        on disks stays there.

        Raises:
            ClusterError: as for `prefetch`.
        """
        target = self._node(node_id)
        asked, space = _ordered(keys), self._namespace(namespace)
        give_up_at = time.monotonic() + deadline_s
        result = self._prefetch(asked, target, space, give_up_at, watch)
        wanted = result.came + result.there
        order = ReleaseOrder(PROTOCOL_VERSION, space, target, asked)
        dropped = 0
        while True:
            answer = self._ask("release", encode(order))
            released = receive(answer, Released, SCHEDULER, HERE)
            dropped += released.dropped
            is_known = len(asked) - released.absent >= wanted
            if is_known or time.monotonic() > give_up_at:
                return msgspec.structs.replace(result, dropped=dropped, kept=released.kept)
            # What has come is reported by its NodeActor within milliseconds.
            time.sleep(TRANSFER_LOOK_S)

    def _prefetch(
        self, keys: list[bytes], node_id: str, namespace: str, give_up_at: float, watch: Watch
    ) -> TransferResult:
        began = time.monotonic()
        result = TransferResult(asked=len(keys))
        series_id = uuid.uuid4().hex
        for page in _pages(keys):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                refusals = Counter(result.refusals)
                refusals[Refusal.TOO_LATE.name] += len(page)
                result = msgspec.structs.replace(result, refusals=dict(refusals))
                continue
            order = TransferOrder(
                version=PROTOCOL_VERSION,
                transfer_id=uuid.uuid4().hex,
                namespace=namespace,
                node_id=node_id,
                keys=page,
                series_id=series_id,
            )
            result = self._fetch_lent(order, Replicas(), min(left_s, TRANSFER_S), result)
            result = msgspec.structs.replace(result, seconds=time.monotonic() - began)
            watch(result)
        return result

    def _fetch_lent(
        self, order: TransferOrder, sources: Replicas, deadline_s: float, so_far: TransferResult
    ) -> TransferResult:
        """Have slots lent and chunks fetched into them, from `sources` or who is said to have them.

        Raises:
            ClusterError: nothing is lent now.
        """
        began = time.monotonic()
        give_up_at = began + min(deadline_s, TRANSFER_EARLY_S)
        grant = receive(self._ask("lend", encode(order)), TransferGrant, SCHEDULER, HERE)
        while grant.is_early and time.monotonic() < give_up_at:
            time.sleep(TRANSFER_LOOK_S)
            grant = receive(self._ask("lend", encode(order)), TransferGrant, SCHEDULER, HERE)
        if grant.error:
            raise ClusterError(f"nothing more was fetched: {grant.error}")
        grant = msgspec.structs.replace(grant, sources=with_rows(sources, grant))
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
        self._end_transfer(order.transfer_id, order.namespace, fetched)
        return msgspec.structs.replace(
            so_far,
            came=so_far.came + came,
            num_bytes=so_far.num_bytes + (0 if fetched is None else fetched.num_bytes),
            there=so_far.there + grant.there,
            nowhere=so_far.nowhere + grant.nowhere,
            no_room=so_far.no_room + grant.no_room,
            refusals=dict(refusals),
        )

    def _end_transfer(self, transfer_id: str, namespace: str, fetched: FetchResult | None) -> None:
        came: list[int] = []
        lost = LostReplicas()
        if fetched is not None:
            columns = zip(fetched.refusals, fetched.slots, strict=True)
            came = [slot for refusal, slot in columns if refusal == Refusal.NONE]
            lost = fetched.lost
        message = TransferEnd(PROTOCOL_VERSION, transfer_id, namespace, came, lost)
        self._ask("end_transfer", encode(message))

    # Pools

    def up(
        self,
        *,
        on: str | None = None,
        node_ids: Sequence[str] = (),
        pool_bytes: int | None = None,
        pool_path: str | None = None,
        slab_bytes: int | None = None,
        deadline_s: float = UP_S,
        watch: deployment.Watch = lambda _: None,
    ) -> list[NodeUp]:
        """Have a pool on every node that matches, prefaulted, before an engine starts; nodes that
        match and join later get one too. What is there already stays as it is.

        Args:
            on: "all", a Ray resource like "GPU", or a label like "pool=kv". Default: the nodes
                with a GPU if there are any, else all.
            node_ids: these instead, by Ray's ids.
            pool_bytes: default: the setting, else a quarter of what each node has free.
            pool_path: a file for the pools; default: the setting.
            slab_bytes: the largest chunk that a pool can hold. Default: 64 MiB, or an eighth of a
                pool that is smaller than 512 MiB.
            deadline_s: for all of it.
            watch: called several times a second with how far each node is.

        Raises:
            ClusterError: no node matches, or Ray does not answer.
            SettingError: a setting is malformed.
        """
        give_up_at = time.monotonic() + deadline_s
        settings = load_settings({})
        wish = PoolWish(
            version=PROTOCOL_VERSION,
            on=on or usual_nodes(deployment.live_nodes()),
            node_ids=[cluster.resolve_node_id(node_id) for node_id in node_ids],
            pool_bytes=pool_bytes or settings.pool_bytes,
            pool_path=settings.pool_path if pool_path is None else pool_path,
            slab_bytes=slab_bytes,
            metrics=(settings.metrics_port, settings.metrics_address, settings.metrics_sd_path),
            disk=(settings.disk_path, settings.disk_bytes, settings.disk_free_bytes),
        )
        scheduler = scheduler_actor(
            self.address, settings.eviction_policy, settings.pin_share, settings.metrics_place
        )
        found = deployment.bring_up(self.address, wish, deadline_s, watch)
        # At its first start on a machine the scheduler actor compiles for a quarter of a minute.
        left_s = max(CLIENT_S, give_up_at - time.monotonic())
        try:
            ask.answer(scheduler, "wish", encode(wish), timeout_s=left_s)
        except ClusterError as error:
            raise ClusterError(f"{error}; nodes that join later get no pool") from error
        return found

    # Questions

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ask.answer(self._scheduler(), method, *arguments, timeout_s=CLIENT_S)

    def _namespace(self, beginning: str) -> str:
        return self._full_namespace(beginning)

    def _node(self, beginning: str) -> str:
        """The one node with a pool whose id begins so."""
        known = [node.node_id for node in ask.status(self._scheduler(), CLIENT_S).nodes]
        found = [node_id for node_id in known if node_id.startswith(beginning)]
        if len(found) != 1:
            what = "no node with a pool" if not found else f"{len(found)} nodes with a pool"
            ids = ", ".join(node_id[:12] for node_id in known)
            raise ClusterError(f"the id of {what} begins with {beginning!r}; there are {ids}")
        return found[0]


def _demote(demoted: Demotions, node_id: str, deadline_s: float) -> None:
    """Have chunks copied for a node's disk; that it does not work is logged only."""
    actor = ask.find_node_actor(node_id)
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
    actor = ask.find_node_actor(node_id)
    if actor is None:
        raise ClusterError(f"node {node_id[:12]} has no NodeActor any more")
    raw = ray.get(actor.fetch.remote(encode(request)), timeout=deadline_s + FETCH_GRACE_S)
    return receive(raw, FetchResult, NODE_ACTOR, HERE)


def _ordered(keys: Sequence[bytes | str]) -> list[bytes]:
    """Offload keys of one order, each once.

    Raises:
        SettingError: one is none, or there are none, or too many.
    """
    raw = raw_keys(keys)
    if not 0 < len(raw) <= MAX_ORDERED:
        raise SettingError(f"{len(raw)} keys: give 1 to {MAX_ORDERED:,} at a time")
    return list(dict.fromkeys(raw))


def _pages(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), PAGE_CHUNKS):
        yield keys[start : start + PAGE_CHUNKS]
