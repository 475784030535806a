"""Which nodes have which chunk, in RAM or on disk: all that the directory knows of chunks; pure.

Each node is believed about itself alone, in one life of its listing, in the order of its numbers.
A listing that begins anew is a node that was lost and comes back with nothing.

A key has the number of a set of places, and equal sets have one number: there are far fewer sets
than keys. Rows of a listing that change alike go together, and cost a step in a dictionary each. A
node that is gone is taken out of the sets, so that all of its chunks are void at once, however many
there are; keys that are nowhere any more are swept away in pieces.

Invariants:
1. A key is where the node said last, in this life of its, and nowhere else.
2. No set has a node that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar, cast

from raykv.base.ids import Key, Namespace, NodeId
from raykv.protocol.listing import ListedRows, ListingPart, Position, Reason, Where

Name = tuple[Namespace, Key]
T = TypeVar("T")
G = TypeVar("G", bound=Hashable)

IN_RAM = frozenset({Where.RAM, Where.RAM | Where.DISK})
"""Looked at often: `where & Where.RAM` takes several times as long."""

READY_AT = {int(each): each & ~Where.COMING for each in map(Where, range(8))}
"""What is coming is nowhere yet."""


class HeldAt(NamedTuple):
    """A node that has a chunk, and where."""

    node_id: NodeId
    where: Where


Held = tuple[HeldAt, ...]


class MovedChunks(NamedTuple):
    """Chunks that are elsewhere on a node than before, all in the same way, and each once.

    `held`: the nodes that have them now.
    """

    namespace: Namespace
    keys: Sequence[Key]
    before: Where
    after: Where
    reason: Reason
    held: Held


@dataclass
class TakenPart:
    """What a part has changed. `begins`: all that the node had was gone before."""

    begins: bool = False
    moved: list[MovedChunks] = field(default_factory=list)


class Holdings:
    """See the module's docstring. Only of members: what comes of others late is theirs to refuse
    who know the members.
    """

    def __init__(self) -> None:
        # How far the listing of each node has been read.
        self._positions: dict[NodeId, Position] = {}
        self._keys: dict[Namespace, dict[Key, int]] = {}
        # By number; the first is of what is nowhere. Sets of nodes that are gone have become equal
        # to others.
        self._sets: list[Held] = [()]
        self._numbers: dict[Held, int] = {(): 0}
        # By number, how many keys have that set; and numbers that no key has.
        self._num_keys = [0]
        self._free: list[int] = []
        # What is left to be swept: keys as they were when their nodes went.
        self._sweeping: Iterator[Name] = iter(())
        self._to_sweep = False

    # Listings

    def position(self, node_id: NodeId) -> Position:
        """How far the node's listing has been read, as the answer to each report says."""
        return self._positions.get(node_id, Position())

    def take(self, node_id: NodeId, part: ListingPart) -> TakenPart:
        """Take in the next part of a node's listing; any other changes nothing."""
        taken = TakenPart()
        if not part.follows(self.position(node_id)):
            return taken
        taken.begins = part.begins and self.lose(node_id)
        for namespace, after, reason, keys in _states(part.rows):
            taken.moved += self._move(node_id, namespace, keys, after, reason)
        self._positions[node_id] = part.end
        return taken

    def lose(self, node_id: NodeId) -> bool:
        """A node is gone with all that it had, False if it was not there; as long as there are
        sets, not chunks.
        """
        if self._positions.pop(node_id, None) is None:
            return False
        for number, held in enumerate(self._sets):
            if any(each.node_id == node_id for each in held):
                left = tuple(each for each in held if each.node_id != node_id)
                self._sets[number] = left
                self._numbers.pop(held, None)
                self._numbers.setdefault(left, number)
        self._to_sweep = True
        return True

    def _move(
        self, node_id: NodeId, namespace: Namespace, keys: Sequence[Key], where: Where, why: Reason
    ) -> Iterator[MovedChunks]:
        """A node says where it has chunks; what was there before is left out."""
        known = self._keys.setdefault(namespace, {})
        for number, some in grouped(keys, [known.get(key, 0) for key in keys]).items():
            held = self._sets[number]
            before = next((each.where for each in held if each.node_id == node_id), Where.NOWHERE)
            if before is not where:
                places = [each for each in held if each.node_id != node_id]
                if where:
                    places.append(HeldAt(node_id, where))
                after = self._intern(tuple(sorted(places)))
                self._change(known, some, number, after)
                yield MovedChunks(namespace, some, before, where, why, self._sets[after])
        if not known:
            del self._keys[namespace]

    def _change(self, known: dict[Key, int], keys: Sequence[Key], before: int, after: int) -> None:
        """Keys have another set; a set that no key has any more is forgotten."""
        if after:
            known.update(dict.fromkeys(keys, after))
            self._num_keys[after] += len(keys)
        else:
            for key in keys:
                del known[key]
        if before:
            self._num_keys[before] -= len(keys)
            if not self._num_keys[before]:
                held, self._sets[before] = self._sets[before], ()
                if self._numbers.get(held) == before and held:
                    del self._numbers[held]
                self._free.append(before)

    def _intern(self, held: Held) -> int:
        number = self._numbers.get(held)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self._sets[number] = held
        else:
            number = len(self._sets)
            self._sets.append(held)
            self._num_keys.append(0)
        self._numbers[held] = number
        return number

    # Questions

    def ask(self, namespace: Namespace, keys: Sequence[Key]) -> list[Held]:
        """For each key, the nodes that have it. Keys in the same places have the same object."""
        known, sets = self._keys.get(namespace, {}), self._sets
        return [sets[known.get(key, 0)] for key in keys]

    @property
    def namespaces(self) -> KeysView[Namespace]:
        """Those that have keys."""
        return self._keys.keys()

    # Time

    def sweep(self, most: int) -> bool:
        """Look at up to `most` keys, and forget those that are nowhere any more; False if there is
        nothing left to do.
        """
        num_seen = 0
        for namespace, key in islice(self._sweeping, most):
            num_seen += 1
            known = self._keys.get(namespace, {})
            number = known.get(key, 0)
            if number and not self._sets[number]:
                self._change(known, [key], number, 0)
                if not known:
                    del self._keys[namespace]
        if num_seen == most:
            return True
        if self._to_sweep:
            self._to_sweep = False
            names = list(self._keys)
            self._sweeping = ((name, key) for name in names for key in [*self._keys.get(name, ())])
            return True
        return False

    def check(self) -> None:
        """Assert the invariants; for tests."""
        counts = Counter(number for keys in self._keys.values() for number in keys.values())
        for number, held in enumerate(self._sets):
            assert self._num_keys[number] == counts[number], number
            assert bool(number and not counts[number]) == (number in self._free), number
            assert list(held) == sorted({each.node_id: each for each in held}.values()), held
            assert all(each.node_id in self._positions and each.where for each in held), held
            assert self._sets[self._numbers.get(held, number)] == held, number
        assert len(set(self._free)) == len(self._free), self._free
        for namespace, keys in self._keys.items():
            assert keys, namespace
            assert 0 not in keys.values(), namespace


def grouped(items: Sequence[T], by: Sequence[G]) -> Mapping[G, Sequence[T]]:
    """Items grouped by the value at the same position in `by`, in their order."""
    groups: dict[G, list[T]] = {each: [] for each in dict.fromkeys(by)}
    if len(groups) == 1:
        return dict.fromkeys(groups, items)
    for item, each in zip(items, by, strict=True):
        groups[each].append(item)
    return groups


def _states(rows: ListedRows) -> Iterator[tuple[Namespace, Where, Reason, Sequence[Key]]]:
    """Keys in the same state; of one that is there twice the last row counts."""
    keys_of = cast("Iterable[Key]", rows.keys)
    named = list(zip(keys_of, zip(rows.where, rows.reasons, strict=True), strict=True))
    for namespace, some in grouped(named, list(rows.namespaces)).items():
        last = dict(some)
        for (where, reason), keys in grouped(list(last), list(last.values())).items():
            yield Namespace(namespace), READY_AT[where], Reason(reason), keys
