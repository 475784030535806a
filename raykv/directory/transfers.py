"""Transfers that operators order: slots lent to a node for chunks that others have.

            lend                           end, or its time is over
   (none) ────────► lent, being fetched ───────────────────────────► (none), unused slots are free

An engine fetches into its own leases; here there is no engine. The client that ordered the transfer
has the NodeActor fetch into what was lent, from a disk what is in no pool; what arrives is reported
and held like any other store. What was evicted for it goes to the node's disk first, if it has one:
the slots are stored into at once, and not some time later as with an engine's.

Invariants:
1. A lease that a transfer has is its own until the transfer is over or the chunk has come.
2. A replica is given up only while the node that is to keep the chunk has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raykv.base.ids import (
    SLOT_ALIGNMENT,
    EngineId,
    Epoch,
    Generation,
    Key,
    Namespace,
    NodeId,
    Slot,
    group_of,
)
from raykv.directory.disks import Disks
from raykv.directory.inventory import drop_lost
from raykv.directory.leases import Generations
from raykv.directory.members import Node
from raykv.directory.pins import Pins
from raykv.directory.table.protocol import ChunkTable, Found, Lease, Name
from raykv.protocol.columns import Handles, Keys, Numbers, Replicas, Source
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import (
    Released,
    ReleaseOrder,
    TransferEnd,
    TransferGrant,
    TransferOrder,
)

OWNER = EngineId("transfers")
"""The holder of the leases of all transfers."""

MAX_TRANSFERS = 64
"""Transfers at a time; each is a page."""

MAX_SOURCES = 2
"""Replicas named per chunk: one to fetch from, and one for when that fails."""

_MAX_SERIES = 1 << 20
"""Chunks of one whole that are kept from each other."""

_MAX_FOUND = 65_536
"""Replicas that are looked for in one go."""


@dataclass(slots=True)
class _Transfer:
    node_id: NodeId
    node_epoch: Epoch
    until: float
    grant: TransferGrant
    leases: list[tuple[Slot, Generation]] = field(default_factory=list)


@dataclass(slots=True)
class _Series:
    """What the pages of one whole have brought, or were lent slots for, or found there."""

    until: float
    pinned_at: float
    keys: dict[Key, None] = field(default_factory=dict)
    latest: list[Key] = field(default_factory=list)

    def add(self, keys: list[Key]) -> None:
        """Note the keys of a page; a series that is longer than any pool should be is cut off."""
        self.latest = keys
        if len(self.keys) < _MAX_SERIES:
            self.keys.update(dict.fromkeys(keys))


@dataclass(slots=True)
class _Missing:
    """A chunk that the node lacks, its slot size, and its rows among the replicas found in pools.

    `index` is that of its key.
    """

    index: int
    key: Key
    slot_bytes: int
    rows: list[int] = field(default_factory=list)
    is_on_disk: bool = False


class Transfers:
    """See the module's docstring.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        table: of all their chunks.
        disks: which of them has what is in no pool.
        pins: whose replicas stay.
        generations: those of the present epoch.
        lease_s: after so long a transfer is over.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        table: Callable[[], ChunkTable],
        disks: Disks,
        pins: Pins,
        generations: Callable[[], Generations],
        lease_s: float,
    ) -> None:
        self._nodes = nodes
        self._table = table
        self._disks = disks
        self._pins = pins
        self._generations = generations
        self._lease_s = lease_s
        self._transfers: dict[str, _Transfer] = {}
        self._series: dict[str, _Series] = {}

    def lend(self, order: TransferOrder, now: float, *, paused: bool) -> TransferGrant:
        """Lease slots of a node for chunks that it lacks and others have.

        The first chunks get what there is, since a prefix is worth nothing without them. An order
        that comes again gets the same answer.
        """
        known = self._transfers.get(order.transfer_id)
        if known is not None:
            return known.grant
        self._forget_settled()
        node = self._nodes.get(NodeId(order.node_id))
        if node is None or (error := self._objection(node, now, paused=paused)):
            error = f"node {order.node_id[:12]} has no pool" if node is None else error
            is_early = node is not None and not paused and self._is_early(node, now)
            return TransferGrant(PROTOCOL_VERSION, error=error, is_early=is_early)
        until = now + self._lease_s
        keys = [Key(key) for key in dict.fromkeys(order.keys)]
        namespace = Namespace(order.namespace)
        # What is there must not be evicted for what is to come, and sources must stay.
        found = self._table().ask(
            namespace, keys, tuple(self._nodes), [node.node_id], MAX_SOURCES, until
        )
        self._keep_series(order, node, now)
        missing, nowhere = list(self._brought(order, namespace, node)), 0
        if not order.slot_bytes:
            on_disks = list(self._on_disks(namespace, keys, found))
            elsewhere = [*self._missing(namespace, keys, found, node), *on_disks]
            missing = sorted(elsewhere, key=lambda each: each.index)
            nowhere = len(found.missing) - len(on_disks)
        transfer = _Transfer(node.node_id, node.epoch, until, TransferGrant(PROTOCOL_VERSION))
        num_demoted = self._disks.num_demoted(node.node_id)
        lent = self._lend_slots(node, missing, transfer, now)
        transfer.grant = TransferGrant(
            version=PROTOCOL_VERSION,
            node_epoch=node.epoch,
            handles=Handles(
                Keys.of([each.key for each in lent]),
                [slot for slot, _ in transfer.leases],
                [generation for _, generation in transfer.leases],
            ),
            slot_bytes=[each.slot_bytes for each in lent],
            sources=self._sources(namespace, found, lent, node.node_id),
            there=len(keys) - len(missing) - nowhere,
            nowhere=nowhere,
            no_room=len(missing) - len(lent),
            demoted=self._disks.take_demoted(node.node_id, num_demoted),
        )
        self._transfers[order.transfer_id] = transfer
        if order.series_id:
            absent = {keys[index] for index in found.missing} | {each.key for each in missing}
            absent -= {each.key for each in lent}
            self._series[order.series_id].add([key for key in keys if key not in absent])
        return transfer.grant

    def _keep_series(self, order: TransferOrder, node: Node, now: float) -> None:
        """What earlier pages have brought must not be evicted for what is still to come.

        Of a long series all is pinned now and then, and with each page what the one before brought.
        """
        if not order.series_id:
            return
        known = self._series.pop(order.series_id, None) or _Series(now, now)
        if len(self._series) >= MAX_TRANSFERS:
            # The one that was not used for longest.
            del self._series[next(iter(self._series))]
        self._series[order.series_id] = known
        is_due = now - known.pinned_at > self._lease_s / 4
        wanted = list(known.keys) if is_due else known.latest
        if is_due:
            known.pinned_at = now
        known.until = now + self._lease_s
        node.book.table.pin(Namespace(order.namespace), wanted, known.until)

    def _objection(self, node: Node, now: float, *, paused: bool) -> str:
        if paused:
            return "the cache is paused: `raykv resume` switches it on again"
        if self._is_early(node, now):
            return f"node {node.node_id[:12]} has just begun to report: try again in some seconds"
        if len(self._transfers) >= MAX_TRANSFERS:
            return f"{MAX_TRANSFERS} transfers are under way, the most allowed: try again later"
        return ""

    @staticmethod
    def _is_early(node: Node, now: float) -> bool:
        """Whether it is still unknown what the node has, and which engines have leases there."""
        return not node.inventory_complete or now < node.settled_at

    def _missing(
        self, namespace: Namespace, keys: Sequence[Key], found: Found, node: Node
    ) -> Iterator[_Missing]:
        """The chunks that others have and the node lacks, in order."""
        rows: dict[int, list[int]] = {}
        for row, index in enumerate(found.key_index):
            rows.setdefault(index, []).append(row)
        for index, own in rows.items():
            source = found.nodes[found.node_index[own[0]]]
            chunk = self._nodes[source].book.find(namespace, keys[index])
            if source != node.node_id and chunk is not None:
                yield _Missing(index, keys[index], chunk.slot_bytes, own)

    def _on_disks(
        self, namespace: Namespace, keys: Sequence[Key], found: Found
    ) -> Iterator[_Missing]:
        """The chunks that are in no pool but on some disk, in order, without those whose reported
        size fits no slot.
        """
        for index in found.missing:
            told = [each.num_bytes for each in self._disks.find(namespace, keys[index])]
            for size in [each for each in told if each > 0 and each % SLOT_ALIGNMENT == 0][:1]:
                yield _Missing(index, keys[index], size, is_on_disk=True)

    def _brought(
        self, order: TransferOrder, namespace: Namespace, node: Node
    ) -> Iterator[_Missing]:
        """The chunks that the node lacks of those that come from outside, in order."""
        keys = dict.fromkeys(order.keys) if order.slot_bytes else {}
        for index, (key, size) in enumerate(zip(keys, order.slot_bytes, strict=True)):
            if node.book.find(namespace, Key(key)) is None:
                yield _Missing(index, Key(key), size)

    def _lend_slots(
        self, node: Node, missing: Sequence[_Missing], transfer: _Transfer, now: float
    ) -> list[_Missing]:
        """Lease a slot to each of the first chunks; returns those that have one, in order."""
        stock: dict[int, list[tuple[Slot, Generation]]] = {}
        for size in dict.fromkeys(each.slot_bytes for each in missing):
            group = group_of(next(each.key for each in missing if each.slot_bytes == size))
            count = sum(each.slot_bytes == size for each in missing)
            stock[size] = self._lend_of(node, size, count, group, now)
        lent = []
        for each in missing:
            if stock[each.slot_bytes]:
                lent.append(each)
                transfer.leases.append(stock[each.slot_bytes].pop(0))
        return lent

    def _lend_of(
        self, node: Node, slot_bytes: int, count: int, group: int, now: float
    ) -> list[tuple[Slot, Generation]]:
        if not node.book.geometry.slots_per_slab(slot_bytes):
            return []
        node.book.make_room(slot_bytes, count, now)
        generations = self._generations()
        first = generations.next
        slots = node.book.table.lend(slot_bytes, count, OWNER, group, first)
        generations.skip(len(slots))
        return [(slot, Generation(first + number)) for number, slot in enumerate(slots)]

    def _sources(
        self, namespace: Namespace, found: Found, lent: Sequence[_Missing], own: NodeId
    ) -> Replicas:
        rows = [(number, row) for number, each in enumerate(lent) for row in each.rows]
        sources = Replicas(
            sources=[Source(node_id) for node_id in found.nodes],
            node_epochs=[int(self._nodes[node_id].epoch) for node_id in found.nodes],
            key_index=Numbers.of(number for number, _ in rows),
            source_index=_rows_of(found.node_index, rows),
            slots=_rows_of(found.slots, rows),
            generations=_rows_of(found.generations, rows),
        )
        on_disks = [
            (number, (namespace, each.key)) for number, each in enumerate(lent) if each.is_on_disk
        ]
        return self._disks.with_sources(sources, on_disks, own, MAX_SOURCES)

    def end(self, message: TransferEnd) -> None:
        """A transfer is over; nothing happens if it is unknown, or over already."""
        namespace = Namespace(message.namespace)
        drop_lost(self._nodes, namespace, message.lost)
        self._disks.drop_lost(namespace, message.lost)
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:
            self._free(transfer, but=set(message.came))
            self._forget_settled()

    def _free(self, transfer: _Transfer, but: Collection[int] = ()) -> None:
        """End the leases that a transfer still has, except those of some slots."""
        for slot, lease in self._leases_of(transfer):
            if slot not in but:
                self._nodes[transfer.node_id].book.end_lease(slot, lease)

    def _leases_of(self, transfer: _Transfer) -> list[tuple[Slot, Lease]]:
        """A transfer's leases that are not over: its chunk has not come, and the node is still
        there.
        """
        node = self._nodes.get(transfer.node_id)
        if node is None or node.epoch != transfer.node_epoch:
            return []
        found = [(slot, node.book.lease_at(slot, at)) for slot, at in transfer.leases]
        return [(slot, lease) for slot, lease in found if lease and lease.engine_id == OWNER]

    def _forget_settled(self) -> None:
        """Transfers of which no lease is left are over."""
        for transfer_id, transfer in list(self._transfers.items()):
            if not self._leases_of(transfer):
                del self._transfers[transfer_id]

    def expire(self, now: float) -> None:
        """End transfers whose time is over."""
        for transfer_id, transfer in list(self._transfers.items()):
            if transfer.until <= now:
                self._free(transfer)
                del self._transfers[transfer_id]
        for series_id, known in list(self._series.items()):
            if known.until <= now:
                del self._series[series_id]

    def release(self, order: ReleaseOrder) -> Released:
        """Give up replicas elsewhere; those stay that are pinned where they are, while the one on
        the node is not.
        """
        node = self._nodes.get(NodeId(order.node_id))
        namespace = Namespace(order.namespace)
        keys = [Key(key) for key in dict.fromkeys(order.keys)]
        there = [key for key in keys if node and node.book.find(namespace, key) is not None]
        dropped = kept = 0
        step = max(1, _MAX_FOUND // max(1, len(self._nodes)))
        for start in range(0, len(there), step):
            part = there[start : start + step]
            every = tuple(self._nodes)
            found = self._table().ask(namespace, part, every, (), len(every), 0.0)
            for index, number in zip(found.key_index, found.node_index, strict=True):
                source = found.nodes[number]
                if source == order.node_id:
                    continue
                if self._may_go(source, NodeId(order.node_id), (namespace, part[index])):
                    self._nodes[source].book.drop(namespace, part[index])
                    dropped += 1
                else:
                    kept += 1
        return Released(PROTOCOL_VERSION, dropped, kept, absent=len(keys) - len(there))

    def _may_go(self, source: NodeId, target: NodeId, name: Name) -> bool:
        return not self._pins.is_firm(source, name) or self._pins.is_firm(target, name)

    @property
    def num_lent(self) -> int:
        """Transfers under way."""
        return len(self._transfers)


def _rows_of(column: Sequence[int], rows: Iterable[tuple[int, int]]) -> Numbers:
    """The numbers in the second of each pair's rows."""
    numbers = list(column)
    return Numbers.of(numbers[row] for _, row in rows)
