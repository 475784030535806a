"""Which nodes have which chunk, in RAM or on disk: all that the directory knows of chunks.

A key has the number of a set of places, and equal sets have one number: there are far fewer sets
than keys. A node that is gone is taken out of the sets, so that all of its chunks are void at once,
however many there are; keys that are nowhere any more are swept away in pieces.

Invariants:
1. A key is where the node said last, in this life of its, and nowhere else.
2. No set has a node that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, KeysView, Sequence
from itertools import count, islice
from typing import NamedTuple

from raykv.base.ids import Key, Namespace, NodeId
from raykv.protocol.listing import Where

Name = tuple[Namespace, Key]

IN_RAM = frozenset({Where.RAM, Where.RAM | Where.DISK})
"""Looked at for each row: `where & Where.RAM` takes several times as long."""


class HeldAt(NamedTuple):
    """A node that has a chunk, and where."""

    node_id: NodeId
    where: Where


Set = tuple[tuple[int, Where], ...]


class Holdings:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._keys: dict[Namespace, dict[Key, int]] = {}
        # By number; the first is of what is nowhere. Sets of nodes that are gone have become equal
        # to others.
        self._sets: list[Set] = [()]
        self._numbers: dict[Set, int] = {(): 0}
        # By number, how many keys have that set; and numbers that no key has.
        self._num_keys = [0]
        self._free: list[int] = []
        # A node that comes back has another number.
        self._numbering = count()
        self._nodes: dict[int, NodeId] = {}
        self._number_of: dict[NodeId, int] = {}
        # What is left to be swept: keys as they were when their nodes went.
        self._sweeping: Iterator[tuple[Namespace, Key]] = iter(())
        self._to_sweep = False

    def join(self, node_id: NodeId) -> None:
        """A node has nothing yet; it was not there, or is gone."""
        assert node_id not in self._number_of, node_id
        number = next(self._numbering)
        self._number_of[node_id], self._nodes[number] = number, node_id

    def lose(self, node_id: NodeId) -> None:
        """A node is gone with all that it had; as long as there are sets, not chunks."""
        gone = self._number_of.pop(node_id)
        del self._nodes[gone]
        for number, places in enumerate(self._sets):
            if any(node == gone for node, _ in places):
                left = tuple(place for place in places if place[0] != gone)
                self._sets[number] = left
                self._numbers.pop(places, None)
                self._numbers.setdefault(left, number)
        self._to_sweep = True

    def put(self, node_id: NodeId, namespace: Namespace, key: Key, where: Where) -> Where:
        """A node says where it has a chunk; returns where it was there before."""
        node = self._number_of[node_id]
        number = self._keys.get(namespace, {}).get(key, 0)
        places = self._sets[number]
        before = next((each for at, each in places if at == node), Where.NOWHERE)
        if before is where:
            return before
        others = [place for place in places if place[0] != node]
        after = self._intern((*others, (node, where)) if where else tuple(others))
        self._change(namespace, key, number, after)
        return before

    def _change(self, namespace: Namespace, key: Key, before: int, after: int) -> None:
        """A key has another set; a set that no key has any more is forgotten."""
        if after:
            self._keys.setdefault(namespace, {})[key] = after
            self._num_keys[after] += 1
        else:
            keys = self._keys[namespace]
            del keys[key]
            if not keys:
                del self._keys[namespace]
        if before:
            self._num_keys[before] -= 1
            if not self._num_keys[before]:
                places, self._sets[before] = self._sets[before], ()
                if self._numbers.get(places) == before and places:
                    del self._numbers[places]
                self._free.append(before)

    def _intern(self, places: Set) -> int:
        ordered = tuple(sorted(places))
        number = self._numbers.get(ordered)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self._sets[number] = ordered
        else:
            number = len(self._sets)
            self._sets.append(ordered)
            self._num_keys.append(0)
        self._numbers[ordered] = number
        return number

    def ask(self, namespace: Namespace, keys: Sequence[Key]) -> list[tuple[HeldAt, ...]]:
        """For each key, the nodes that have it."""
        known = self._keys.get(namespace, {})
        # Most keys of a prompt are in one place.
        named: dict[int, tuple[HeldAt, ...]] = {}
        found = []
        for key in keys:
            number = known.get(key, 0)
            held = named.get(number)
            if held is None:
                held = named[number] = tuple(self._named(self._sets[number]))
            found.append(held)
        return found

    def _named(self, places: Set) -> Iterator[HeldAt]:
        for number, where in places:
            yield HeldAt(self._nodes[number], where)

    def sweep(self, most: int) -> bool:
        """Forget up to `most` keys that are nowhere any more, or look at so many; False if there is
        nothing left to do.
        """
        num_seen = 0
        for namespace, key in islice(self._sweeping, most):
            num_seen += 1
            number = self._keys.get(namespace, {}).get(key, 0)
            if number and not self._sets[number]:
                self._change(namespace, key, number, 0)
        if num_seen == most:
            return True
        if self._to_sweep:
            self._to_sweep = False
            names = list(self._keys)
            self._sweeping = ((name, key) for name in names for key in [*self._keys.get(name, ())])
            return True
        return False

    def sizes(self) -> dict[Namespace, int]:
        """Keys by namespace, those that are still to be swept included."""
        return {namespace: len(keys) for namespace, keys in self._keys.items()}

    @property
    def namespaces(self) -> KeysView[Namespace]:
        """Those that have keys."""
        return self._keys.keys()

    @property
    def num_sets(self) -> int:
        """Sets of places that keys have."""
        return len(self._sets) - len(self._free) - 1

    def check(self) -> None:
        """Assert the invariants; for tests."""
        counts = Counter(number for keys in self._keys.values() for number in keys.values())
        for number, places in enumerate(self._sets):
            assert self._num_keys[number] == counts[number], number
            assert bool(number and not counts[number]) == (number in self._free), number
            assert list(places) == sorted(places), places
            assert all(node in self._nodes and where for node, where in places), places
            assert self._sets[self._numbers.get(places, number)] == places, number
        assert len(set(self._free)) == len(self._free), self._free
        for namespace, keys in self._keys.items():
            assert keys, namespace
            assert 0 not in keys.values(), namespace
