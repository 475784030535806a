"""Which copies are spare, since another node keeps one; pure.

Of the members that have a chunk in RAM and stay, one is its keeper; the copies of all others are
spare. Who that is follows from who has the chunk, so that nothing is kept of a chunk here: each
node has a number, each chunk another, and the node whose number is nearest is the keeper. It
changes only when the keeper goes, or when a better one comes.

                        another node keeps it                the keeper has gone
  a chunk comes ─► kept ──────────────────────► told spare ──────────────────────► told kept
                    ▲                                                                  │
                    └──────────────────────────────────────────────────────────────────┘

Nodes are told what changes: a name waits, and what is said of it is what holds when it is sent. An
answer's marks have a number, and are said again until the node has heard of it. Once a keeper goes
with all that it has, its chunks are not walked: who may have been told that a copy is spare for its
sake forgets all marks. That costs a worse order of eviction, and no chunk.

Invariants:
1. Once all is heard, no keeper takes its copy for spare.
2. A node that takes a copy for spare has in `spared_by` the keeper of that chunk.
3. At most `MOST_WAITING` names wait for a node: spare ones are lost first, and if others are too
   many, the node forgets all marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from zlib import crc32

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.known.holdings import IN_RAM, HeldAt, Holdings, MovedChunks, Name
from raykv.protocol.columns import MAX_NUMBER, NamedKeys
from raykv.protocol.node import Marks

MOST_WAITING = 16_384

MOST_SENT = 1024
"""Names in one answer."""

PLACE_BYTES = 7
"""Numbers of nodes and of chunks are below 2**56: places on one line."""

MOST_SHOWN = MAX_NUMBER >> 1
"""Larger numbers are invalid."""


class Numbering:
    """Numbers messages to nodes, each once; nodes report the last number that they have heard.

    A node shows the last number that it has taken, and may show one of an earlier life of the
    directory until it has heard of this one: so an answer's number is above all that were shown
    before.

    Args:
        life: of the directory; lives are mostly further apart than their numbers.
    """

    def __init__(self, life: int) -> None:
        self._last = min(life, MOST_SHOWN)

    def next(self, count: int = 1) -> int:
        """The last one of the next `count` numbers."""
        self._last += count
        return self._last

    def see(self, shown: int) -> None:
        """A node shows a number."""
        if self._last < shown <= MOST_SHOWN:
            self._last = shown


@dataclass(slots=True)
class _Marked:
    """Marks for one node: names that wait, and those in its answers, with their number.

    `forgets`: the node must forget all earlier marks; `is_told_to`: the answer says so.
    """

    spare: dict[Name, None] = field(default_factory=dict)
    kept: dict[Name, None] = field(default_factory=dict)
    out: list[Name] = field(default_factory=list)
    number: int = 0
    forgets: bool = True
    is_told_to: bool = False
    spared_by: set[NodeId] = field(default_factory=set)


class SpareMarks:
    """See the module's docstring.

    Args:
        holdings: which nodes have which chunks.
        is_staying: whether a member does not leave.
        numbering: of the answers.
    """

    def __init__(
        self, holdings: Holdings, is_staying: Callable[[NodeId], bool], numbering: Numbering
    ) -> None:
        self._holdings = holdings
        self._is_staying = is_staying
        self._numbering = numbering
        self._marked: dict[NodeId, _Marked] = {}
        self._place_of: dict[NodeId, int] = {}
        self._at_place: dict[int, NodeId] = {}

    # Members

    def join(self, node_id: NodeId) -> None:
        """A member has nothing yet; it forgets what it was told before."""
        assert node_id not in self._marked, node_id
        place = _place_of_node(node_id)
        while place in self._at_place:
            place += 1
        self._marked[node_id] = _Marked()
        self._place_of[node_id], self._at_place[place] = place, node_id

    def lose(self, node_id: NodeId) -> None:
        """A member is gone with all that it had."""
        del self._marked[node_id]
        del self._at_place[self._place_of.pop(node_id)]
        self._forget_for(node_id)

    def turn(self, node_id: NodeId) -> None:
        """A member has begun to leave, and keeps nothing for others; or it stays after all."""
        if not self._is_staying(node_id):
            self._forget_for(node_id)
            return
        # It is a keeper of chunks at once, and others may take theirs for spare.
        _forget(self._marked[node_id])
        for other, marked in self._marked.items():
            if other != node_id:
                marked.spared_by.add(node_id)

    def _forget_for(self, keeper: NodeId) -> None:
        for marked in self._marked.values():
            if keeper in marked.spared_by:
                _forget(marked)

    # Chunks

    def moved(self, node_id: NodeId, moved: MovedChunks) -> None:
        """Chunks are elsewhere on a member than before."""
        has_it = moved.after in IN_RAM
        if has_it == (moved.before in IN_RAM):
            return
        places = self._staying(moved.held, but=node_id)
        if places or len(moved.held) > has_it:
            for key in moved.keys:
                name = moved.namespace, key
                self._turned(node_id, name, moved.held, places, has_it=has_it)

    def _turned(
        self,
        node_id: NodeId,
        name: Name,
        held: Iterable[HeldAt],
        places: Iterable[int],
        *,
        has_it: bool,
    ) -> None:
        """A member has a chunk in RAM, and had it not, or the other way round; `places` are those
        of others that have it and stay.
        """
        best = self._nearest(name[1], places)
        if not self._is_nearer(node_id, best, name[1]):
            # It is, and was, no keeper.
            if has_it and best is not None:
                self._wait(node_id, name, spare=True)
            return
        # The keeper was the other one before, or is it now.
        keeper = node_id if has_it else best
        if best is not None:
            self._wait(best, name, spare=has_it)
        for other in _in_ram(held):
            if other in (node_id, best):
                continue
            if best is None:
                # They leave, and there was none before, or there is none now.
                self._wait(other, name, spare=has_it)
            if keeper is not None:
                self._marked[other].spared_by.add(keeper)

    def _staying(self, held: Iterable[HeldAt], but: NodeId | None = None) -> list[int]:
        """Places of the staying members that have a chunk in RAM."""
        return [
            self._place_of[node_id]
            for node_id in _in_ram(held)
            if node_id != but and self._is_staying(node_id)
        ]

    def _nearest(self, key: Key, places: Iterable[int]) -> NodeId | None:
        """The keeper of a chunk, given the places of the staying members that have it."""
        nearest = min(places, key=_place_of_key(key).__xor__, default=None)
        return None if nearest is None else self._at_place[nearest]

    def _is_nearer(self, node_id: NodeId, other: NodeId | None, key: Key) -> bool:
        """Whether a node comes before another one, if it stays."""
        if not self._is_staying(node_id):
            return False
        if other is None:
            return True
        own = _place_of_key(key)
        return self._place_of[node_id] ^ own < self._place_of[other] ^ own

    def _wait(self, node_id: NodeId, name: Name, *, spare: bool) -> None:
        """Queue a chunk's name for a member."""
        marked = self._marked[node_id]
        marked.spare.pop(name, None)
        marked.kept.pop(name, None)
        (marked.spare if spare else marked.kept)[name] = None
        if len(marked.spare) + len(marked.kept) > MOST_WAITING:
            if marked.spare:
                del marked.spare[next(iter(marked.spare))]
            else:
                _forget(marked)

    # Answers

    def marks(self, node_id: NodeId, known: int) -> Marks:
        """What an answer says to a member whose listing has been read up to number `known`."""
        marked = self._marked[node_id]
        if not marked.number:
            self._take_next(marked)
        if not marked.number:
            return Marks()
        spare, kept = self._split(node_id, marked)
        if not (spare or kept or marked.is_told_to):
            # Nothing of it holds any more; what holds instead waits.
            marked.out, marked.number = [], 0
            return Marks()
        return Marks(
            marked.number, known, NamedKeys.of(spare), NamedKeys.of(kept), marked.is_told_to
        )

    def _take_next(self, marked: _Marked) -> None:
        for waiting in (marked.kept, marked.spare):
            names = list(islice(waiting, MOST_SENT - len(marked.out)))
            for name in names:
                del waiting[name]
            marked.out += names
        if marked.out or marked.forgets:
            marked.number = self._numbering.next()
            marked.is_told_to, marked.forgets = marked.forgets, False

    def _split(self, node_id: NodeId, marked: _Marked) -> tuple[list[Name], list[Name]]:
        """Split the names in the answer into copies that are spare now, and kept ones."""
        by_namespace: dict[Namespace, list[Key]] = {}
        for namespace, key in marked.out:
            by_namespace.setdefault(namespace, []).append(key)
        spare: list[Name] = []
        kept: list[Name] = []
        for namespace, keys in by_namespace.items():
            found = self._holdings.ask(namespace, keys)
            # What the same nodes have is looked at once.
            places = {
                number: self._staying(held)
                for number, held in {id(held): held for held in found}.items()
                if node_id in _in_ram(held)
            }
            for key, held in zip(keys, found, strict=True):
                if id(held) not in places:
                    continue
                keeper = self._nearest(key, places[id(held)])
                if keeper is None or keeper == node_id:
                    kept.append((namespace, key))
                else:
                    spare.append((namespace, key))
                    marked.spared_by.add(keeper)
        return spare, kept

    def hear(self, node_id: NodeId, number: int) -> None:
        """A member shows the number of the marks that it has taken last."""
        marked = self._marked[node_id]
        if number == marked.number:
            marked.out, marked.number, marked.is_told_to = [], 0, False

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._marked.keys() == self._place_of.keys() == set(self._at_place.values())
        for node_id, marked in self._marked.items():
            assert not marked.spare.keys() & marked.kept.keys(), node_id
            assert len(marked.spare) + len(marked.kept) <= MOST_WAITING, node_id
            assert len(marked.out) <= MOST_SENT, node_id
            assert node_id not in marked.spared_by, node_id
            assert marked.spared_by <= self._marked.keys(), node_id
            assert marked.number or not (marked.out or marked.is_told_to), node_id


def _forget(marked: _Marked) -> None:
    """Make a node forget all marks: the names in its answer, and kept ones that wait, are void."""
    marked.kept.clear()
    marked.out, marked.number, marked.is_told_to = [], 0, False
    marked.forgets = True
    marked.spared_by.clear()


def _in_ram(held: Iterable[HeldAt]) -> list[NodeId]:
    return [each.node_id for each in held if each.where in IN_RAM]


def _place_of_node(node_id: NodeId) -> int:
    return int.from_bytes(blake2b(node_id.encode(), digest_size=PLACE_BYTES).digest(), "big")


def _place_of_key(key: Key) -> int:
    return crc32(key) << (8 * PLACE_BYTES - 32)
