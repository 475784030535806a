"""Bring chunks to a node's pool before a request needs them there."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import msgspec
import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, RayKVError, cause_of, first_line
from raykv.base.ids import Blocks, Key, Refusal, group_of
from raykv.client import pins
from raykv.client.scheduler import Scheduler
from raykv.cluster import ask
from raykv.protocol import copies, framing, listing, operator, reader
from raykv.protocol.columns import Keys, Numbers, Source, SourceRows

PAGE_CHUNKS = 256
"""Chunks of a transfer that go at once: progress is reported after each page."""

MOST_TRIED = 16
"""Chunks of a KV group that are looked for, until one says how large they are."""

OPERATOR = 0
"""The life of who orders a fetch and is no engine."""

Watch = Callable[[operator.TransferResult], None]

SourcesOf = Mapping[bytes, Sequence[Source]]


def prefetch(
    scheduler: Scheduler,
    keys: Sequence[bytes | str],
    node_id: str,
    *,
    namespace: str = "",
    deadline_s: float = deadlines.TRANSFER_S,
    watch: Watch = lambda _: None,
) -> operator.TransferResult:
    """Bring chunks to a node's pool before a request needs them there: from other pools, or from
    disks if no pool has them.

    They come in the order of the keys. Chunks that do not come are no error: the result counts
    them.

    Args:
        keys: as for `pin`.
        node_id: Ray's, or the beginning of it.
        namespace: as for `pin`.
        deadline_s: for all of them.
        watch: called after every page with the result so far.

    Raises:
        ClusterError: RayKV does not run here, or does not answer; the node has no pool.
    """
    target = scheduler.node(node_id)
    asked, space = pins.ordered(keys), scheduler.full_namespace(namespace, is_whole=True)
    return bring(scheduler, asked, target, space, time.monotonic() + deadline_s, watch).result


def move(
    scheduler: Scheduler,
    keys: Sequence[bytes | str],
    node_id: str,
    *,
    namespace: str = "",
    deadline_s: float = deadlines.TRANSFER_S,
    watch: Watch = lambda _: None,
) -> operator.TransferResult:
    """Bring chunks to a node as `prefetch` does, then drop the copies in other nodes' pools.

    A copy stays if it is pinned there and not on the target too, or if it has more blocks. Copies
    on disks stay.

    Raises:
        ClusterError: as for `prefetch`.
    """
    target = scheduler.node(node_id)
    asked, space = pins.ordered(keys), scheduler.full_namespace(namespace, is_whole=True)
    transfer = bring(scheduler, asked, target, space, time.monotonic() + deadline_s, watch)
    dropped, kept = _drop(scheduler, transfer, transfer.there)
    if kept:
        pinned = pins.pinned_on(scheduler, target, space)
        there = {key: transfer.there[key] for key in pinned & transfer.there.keys()}
        also, _ = _drop(scheduler, transfer, there, with_pinned=True)
        dropped, kept = dropped + also, kept - also
    return msgspec.structs.replace(transfer.result, dropped=dropped, kept=kept)


def bring(
    scheduler: Scheduler,
    keys: list[bytes],
    node_id: str,
    namespace: str,
    give_up_at: float,
    watch: Watch,
) -> Transfer:
    """Bring chunks to a node's pool, as `prefetch` does; all names are whole ones."""
    transfer = Transfer(node_id, namespace, give_up_at, watch, asked=len(keys))
    sizes: dict[int, int] = {}
    silent: set[str] = set()
    if not all(scheduler.sources_of(transfer.namespace, keys)):
        # What was just stored is reported within milliseconds.
        time.sleep(deadlines.LOOK_S)
    for start in range(0, len(keys), PAGE_CHUNKS):
        page = keys[start : start + PAGE_CHUNKS]
        found = scheduler.sources_of(transfer.namespace, page)
        known = {
            key: sorted(sources, key=lambda each: each.is_disk)
            for key, sources in zip(page, found, strict=True)
            if sources
        }
        for group in {group_of(Key(key)) for key in known} - sizes.keys():
            some = {key: known[key] for key in known if group_of(Key(key)) == group}
            sizes |= _size_of(transfer.namespace, group, some, silent)
        wanted = {key: sizes[group] for key in known if (group := group_of(Key(key))) in sizes}
        here = {key for key, sources in known.items() if Source(transfer.node_id) in sources}
        transfer.counts["nowhere"] += len(page) - len(known)
        transfer.refusals[Refusal.NOT_HERE.name] += len(known) - len(wanted)
        transfer.fetch(wanted, known, here)
    return transfer


def _drop(
    scheduler: Scheduler,
    transfer: Transfer,
    there: Mapping[bytes, Blocks],
    *,
    with_pinned: bool = False,
) -> tuple[int, int]:
    """Drop other pools' copies of chunks that the target has with these blocks; returns how many
    copies were dropped, and how many were not.
    """
    asked = list(there)
    elsewhere: dict[str, list[bytes]] = {}
    found = scheduler.sources_of(transfer.namespace, asked)
    for key, sources in zip(asked, found, strict=True):
        for source in sources:
            if source.node_id != transfer.node_id and not source.is_disk:
                elsewhere.setdefault(source.node_id, []).append(key)

    def question(node_id: str, actor: Any) -> Any:
        keys = elsewhere[node_id]
        order = operator.DropOrder(
            transfer.namespace,
            Keys.of(keys),
            Numbers.of(there[key].first for key in keys),
            Numbers.of(there[key].length for key in keys),
            with_pinned,
        )
        return actor.ask.remote("drop", framing.encode(order))

    released = ask.ask_each(operator.Released, question, elsewhere).values() if elsewhere else ()
    return sum(each.dropped for each in released), sum(each.kept for each in released)


class Transfer:
    """Chunks of a namespace that a node fetches, page by page.

    `there`: the chunks that the node has said that it has in its pool, and with which blocks.
    `refusals`: how often a fetch failed for which reason.

    Args:
        node_id: of the node.
        namespace: of all chunks.
        give_up_at: on this process's monotonic clock.
        watch: is called after every page with the result so far.
        counts: of the result, to begin with.
    """

    def __init__(
        self, node_id: str, namespace: str, give_up_at: float, watch: Watch, **counts: int
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.counts = Counter(counts)
        self.refusals: Counter[str] = Counter()
        self.there: dict[bytes, Blocks] = {}
        self._give_up_at = give_up_at
        self._watch = watch
        self._began_at = time.monotonic()
        self._seconds = 0.0
        self._series = uuid.uuid4().hex
        self._numbers = count(1)

    @property
    def result(self) -> operator.TransferResult:
        """Return the result so far."""
        refusals = dict(+self.refusals)
        return operator.TransferResult(**self.counts, refusals=refusals, seconds=self._seconds)

    def fetch(
        self, sizes: Mapping[bytes, int], sources: SourcesOf, here: Collection[bytes]
    ) -> None:
        """Order a fetch of chunks of these sizes, each from one of its sources.

        `here`: those that the node is believed to have already.
        """
        left_s = min(self._give_up_at - time.monotonic(), deadlines.TRANSFER_S)
        if sizes and left_s <= 0:
            self.refusals[Refusal.TOO_LATE.name] += len(sizes)
        elif sizes:
            try:
                self._take(list(sizes), here, self._ordered(sizes, sources, left_s))
            except (RayKVError, ray.exceptions.RayError) as error:
                self.refusals[first_line(cause_of(error))] += len(sizes)
        self._seconds = time.monotonic() - self._began_at
        self._watch(self.result)

    def fetch_from(self, source: Source, sizes: Mapping[bytes, int], scheduler: Scheduler) -> None:
        """Order a fetch of chunks of these sizes from a source that the directory does not know."""
        known = zip(sizes, scheduler.sources_of(self.namespace, list(sizes)), strict=True)
        here = {key for key, sources in known if Source(self.node_id) in sources}
        self.fetch(sizes, dict.fromkeys(sizes, (source,)), here)

    def _ordered(
        self, sizes: Mapping[bytes, int], sources: SourcesOf, deadline_s: float
    ) -> copies.CopyResult:
        order = copies.Fetch(
            next(self._numbers),
            OPERATOR,
            self.namespace,
            Keys.of(sizes),
            Numbers.of(sizes.values()),
            SourceRows.of(sources[key] for key in sizes),
            deadline_s=deadline_s,
            series=self._series,
        )
        actor = ask.ask_ray(ask.find_node_actor, self.node_id)
        if actor is None:
            raise ClusterError(f"node {self.node_id[:12]} has no NodeActor any more")
        raw = ray.get(
            actor.fetch.remote(framing.encode(order)), timeout=deadline_s + deadlines.GRACE_S
        )
        return framing.receive(raw, copies.CopyResult, ask.NODE_ACTOR, ask.HERE)

    def _take(self, keys: list[bytes], here: Collection[bytes], fetched: copies.CopyResult) -> None:
        failed = dict(zip(fetched.failed_chunks, map(Refusal, fetched.refusals), strict=True))
        refused = Counter(failed.values())
        no_room = refused.pop(Refusal.NO_ROOM, 0)
        self.refusals.update({refusal.name: times for refusal, times in refused.items()})
        there = sum(key in here for at, key in enumerate(keys) if at not in failed)
        came = len(keys) - len(failed) - there
        self.counts.update(came=came, there=there, no_room=no_room, num_bytes=fetched.num_bytes)
        self.there |= {row.key: row.blocks for row in fetched.rows if row.where & listing.Where.RAM}


def _size_of(namespace: str, group: int, sources: SourcesOf, silent: set[str]) -> Mapping[int, int]:
    """Bytes of a chunk of a KV group, by the group: all its chunks have the same, so that any will
    do; nothing if none is where it was. Nodes that do not answer are `silent` from then on.
    """
    for key, some in islice(sources.items(), MOST_TRIED):
        query = reader.ChunkQuery(namespace, key)
        question = ask.asking("chunks", framing.encode(query))
        of = {source.node_id for source in some} - silent
        found, lost = ask.ask_nodes(reader.ChunkPage, question, of, deadlines.CLIENT_S)
        ask.warn_of(lost)
        silent |= lost.keys()
        for row in chain.from_iterable(page.chunks for page in found.values()):
            return {group: row.num_bytes}
    return {}
