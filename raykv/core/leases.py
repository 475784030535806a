"""Leases: granting free slots to engines, and which of those to believe that an engine declares
when it attaches again.
"""

from __future__ import annotations

from collections.abc import Iterator

from raykv.core.book import Chunk, Lease
from raykv.core.members import Engine, Node
from raykv.messages import MAX_KEYS, Leases
from raykv.types import Epoch, Generation, Slot, make_generation


class Generations:
    """Gives every grant of one epoch a generation above all earlier ones."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._counter = 0

    @property
    def last(self) -> Generation:
        """The last one that was given."""
        return make_generation(self.epoch, self._counter)

    def next(self) -> Generation:
        """One that was never given before."""
        self._counter += 1
        return self.last


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
    budget = MAX_KEYS
    for group, count in wanted.items():
        size = engine.slot_bytes.get(group)
        if size is None:
            continue
        for free in node.book.take_slots(size, min(count, budget), now):
            generation = generations.next()
            node.book.leases[free] = Lease(engine.engine_id, group, generation, size)
            granted.groups.append(group)
            granted.slots.append(free)
            granted.generations.append(generation)
            budget -= 1
    return granted


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
    for slot, lease in list(node.book.leases.items()):
        if lease.engine_id == engine.engine_id and declared.get(slot) != lease.generation:
            node.book.end_lease(slot)
    claimed = list(_plausible(engine, node, leases, highest))
    node.book.drop_overwritten(chunk for _, chunk in claimed)
    for group, chunk in claimed:
        if node.book.claim_place(chunk):
            lease = Lease(engine.engine_id, group, chunk.generation, chunk.slot_bytes)
            node.book.leases[chunk.slot] = lease


def _plausible(
    engine: Engine, node: Node, leases: Leases, highest: Generation
) -> Iterator[tuple[int, Chunk]]:
    """KV group and place of declared leases that may have been granted and are nobody's."""
    columns = zip(leases.groups, leases.slots, leases.generations, strict=True)
    for group, slot, generation in columns:
        size = engine.slot_bytes.get(group)
        if size is None or generation > highest or Slot(slot) in node.book.leases:
            continue
        chunk = Chunk(Slot(slot), Generation(generation), size)
        if node.book.may_come(chunk):
            yield group, chunk
