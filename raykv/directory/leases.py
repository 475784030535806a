"""Leases: granting free slots to engines, and which of those to believe that an engine declares
when it attaches again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from raykv.base.ids import GENERATIONS_PER_EPOCH, Epoch, Generation, Slot, make_generation
from raykv.directory.members import Engine, Node
from raykv.directory.table.protocol import Lease, TableChunk
from raykv.protocol.columns import MAX_KEYS, Leases
from raykv.protocol.engine import LEASE_SHARE, STEP_SHARE

RECENT = 4096
"""Chunks that an engine has stored count for less once those of its node are so many more."""


def lease_shares(engine: Engine, engines: Iterable[Engine]) -> tuple[float, float]:
    """Shares of the pool for the leases of one of a node's engines: half of `LEASE_SHARE` in equal
    parts, half of it by what each has stored lately; and what of `STEP_SHARE` it may have for what
    one step stores.
    """
    stored = {each.engine_id: each.stored_lately for each in engines}
    part = 1 / len(stored)
    if total := sum(stored.values()):
        part = (part + stored[engine.engine_id] / total) / 2
    return LEASE_SHARE * part, STEP_SHARE / len(stored)


def count_stored(engine: Engine, counters: Mapping[str, int], engines: Iterable[Engine]) -> None:
    """An engine says how many chunks it has offered since its start; `engines` are its node's."""
    offered = counters.get("chunks_offered", 0)
    engine.stored_lately += max(0, offered - engine.counters.get("chunks_offered", 0))
    every = list(engines)
    if sum(each.stored_lately for each in every) > RECENT:
        for each in every:
            each.stored_lately //= 2


class Generations:
    """Gives every grant a generation above all earlier ones.

    When an epoch has given `per_epoch` generations the next one begins: long before the counter is
    full, so that those of one grant always are of one epoch. That epoch is only in generations: the
    scheduler actor goes by the name of the one that it began with.
    """

    def __init__(self, epoch: Epoch, per_epoch: int = GENERATIONS_PER_EPOCH) -> None:
        self.epoch = epoch
        self._per_epoch = per_epoch
        self._counter = 0

    @property
    def last(self) -> Generation:
        """The last one that was given."""
        return make_generation(self.epoch, self._counter)

    @property
    def next(self) -> Generation:
        """The first that was never given."""
        return make_generation(self.epoch, self._counter + 1)

    def skip(self, count: int) -> None:
        """So many, from `next` on, are given."""
        self._counter += count
        if self._counter >= self._per_epoch:
            self.epoch, self._counter = Epoch(self.epoch + 1), 0


def grant(
    engine: Engine, node: Node, wanted: dict[int, int], generations: Generations, now: float
) -> Leases:
    """Lease slots to an engine, as many as there are, at most `MAX_KEYS`.

    Args:
        engine: who gets them.
        node: whose slots they are.
        wanted: how many, by KV group index.
        generations: each slot gets a new one.
        now: pins that run later are respected.
    """
    granted = Leases([], [], [])
    known = {group: count for group, count in wanted.items() if group in engine.slot_bytes}
    fitting = split(known, MAX_KEYS)
    for size in dict.fromkeys(engine.slot_bytes[group] for group in fitting):
        counts = {group: n for group, n in fitting.items() if engine.slot_bytes[group] == size}
        node.book.make_room(size, sum(counts.values()), now)
        for group, count in split(counts, node.book.table.num_free(size)).items():
            first = generations.next
            slots = node.book.table.lend(size, count, engine.engine_id, group, first)
            generations.skip(len(slots))
            granted.groups.extend([group] * len(slots))
            granted.slots.extend(slots)
            granted.generations.extend(range(first, first + len(slots)))
    return granted


def split(wanted: Mapping[int, int], most: int) -> dict[int, int]:
    """Give each group what it wants, or all the same part of it if that is more than `most`.

    What is left over by rounding goes to those that have least.
    """
    total = sum(wanted.values())
    if total <= most:
        return dict(wanted)
    parts = {group: count * most // total for group, count in wanted.items()}
    left = most - sum(parts.values())
    for group in sorted(parts, key=lambda group: (parts[group], group))[:left]:
        parts[group] += 1
    return parts


def take_declared(
    engine: Engine, node: Node, leases: Leases, cleared: Generation, highest: Generation
) -> None:
    """Believe an engine's leases where the slot is free or holds an older chunk, which was evicted
    for them; drop what it no longer claims.

    None of them is believed when the namespace was cleared since: the engine has missed it.

    Args:
        engine: who declares.
        node: where it runs.
        leases: what it declares.
        cleared: generation up to which its namespace was cleared.
        highest: the last generation that was granted.
    """
    if any(generation <= cleared for generation in leases.generations):
        engine.void = True
        leases = Leases()
    declared = dict(zip(leases.slots, leases.generations, strict=True))
    for slot, lease in node.book.leases().items():
        if lease.engine_id == engine.engine_id and declared.get(slot) != lease.generation:
            node.book.end_lease(slot, lease)
    claimed = list(_plausible(engine, node, leases, highest))
    node.book.drop_overwritten(chunk for _, chunk in claimed)
    for group, chunk in claimed:
        if node.book.claim_place(chunk):
            lease = Lease(engine.engine_id, group, chunk.generation, chunk.slot_bytes)
            node.book.table.lend_at(chunk.slot, lease)


def _plausible(
    engine: Engine, node: Node, leases: Leases, highest: Generation
) -> Iterator[tuple[int, TableChunk]]:
    """KV group and place of declared leases that may have been granted and are nobody's."""
    columns = zip(leases.groups, leases.slots, leases.generations, strict=True)
    for group, slot, generation in columns:
        size = engine.slot_bytes.get(group)
        if size is None or generation > highest or node.book.table.lease_of(Slot(slot)):
            continue
        chunk = TableChunk(Slot(slot), Generation(generation), size)
        if node.book.may_come(chunk):
            yield group, chunk
