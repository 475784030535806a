"""One stream of published events: what its subscribers believe, and its numbers.

Several nodes and namespaces may share a stream, and subscribers know a block once only: it is
stored with its first copy and removed with its last.

Invariants:
1. A block is counted once for each chunk, and node that has it, that is held; what is not counted
   has been removed on the wire.
2. Numbers rise by one from `first_seq` on, and begin above those of all earlier lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raykv.base.ids import Key, Namespace, NodeId, group_of
from raykv.protocol.descriptions import Description
from raykv.stream.format import WireFormat, bare

ChunkId = tuple[Namespace, Key]

MAX_REMOVED = 1024
"""Hashes in one `BlockRemoved`."""


@dataclass(slots=True)
class Holding:
    """A chunk of the stream, and the nodes that have it; described unless nothing is known."""

    description: Description | None
    nodes: set[NodeId] = field(default_factory=set)


class Stream:
    """See the module's docstring.

    Args:
        topic: the stream's name on the wire.
        form: how events look.
        first_seq: number of its first message.
    """

    def __init__(self, topic: str, form: WireFormat, first_seq: int) -> None:
        self.topic = topic
        self._form = form
        self.first_seq = self.next_seq = first_seq
        # The oldest number that is kept for those who missed it.
        self.first_kept = first_seq
        self.held: dict[ChunkId, Holding] = {}
        # By block hash with its KV group behind, as in a key.
        self._counts: Counter[bytes] = Counter()
        # Subscribers may remember an earlier life.
        self.events: list[Any] = [form.cleared()]

    def add(self, name: ChunkId, node_id: NodeId, description: Description | None) -> None:
        """A node has a chunk; a description that comes later replaces none."""
        holding = self.held.get(name)
        if holding is None:
            holding = self.held[name] = Holding(description)
        elif holding.description is None and description is not None:
            self._describe(name, holding, description)
        if node_id in holding.nodes:
            return
        holding.nodes.add(node_id)
        blocks = blocks_of(name, holding.description)
        is_new = any(block not in self._counts for block in blocks)
        self._counts.update(blocks)
        if is_new:
            self.events.append(self._stored(name, holding))

    def _describe(self, name: ChunkId, holding: Holding, description: Description) -> None:
        """Count its other blocks too, and tell all of it."""
        holding.description = description
        for block in blocks_of(name, description)[:-1]:
            self._counts[block] += len(holding.nodes)
        self.events.append(self._stored(name, holding))

    def _stored(self, name: ChunkId, holding: Holding) -> Any:
        return self._form.stored(holding.description or bare(name[1]))

    def remove(self, name: ChunkId, node_id: NodeId) -> Holding | None:
        """A node has lost a chunk; returns the chunk if no node has it any more."""
        holding = self.held.get(name)
        if holding is None or node_id not in holding.nodes:
            return None
        holding.nodes.discard(node_id)
        gone: list[bytes] = []
        for block in blocks_of(name, holding.description):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                gone.append(block)
        self._tell_removed(gone)
        if holding.nodes:
            return None
        return self.held.pop(name)

    def clear(self) -> None:
        """Nothing is held any more; published both in single blocks and as a whole.

        Some subscribers take no notice of `AllBlocksCleared`.
        """
        self._tell_removed(self._counts)
        self.held.clear()
        self._counts.clear()
        self.events.append(self._form.cleared())

    def _tell_removed(self, blocks: Iterable[bytes]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for block in blocks:
            by_group.setdefault(group_of(Key(block)), []).append(block[:-4])
        for group, hashes in by_group.items():
            for first in range(0, len(hashes), MAX_REMOVED):
                page = hashes[first : first + MAX_REMOVED]
                self.events.append(self._form.removed(group, page))

    def take_events(self) -> list[Any]:
        """Take the events to publish."""
        events, self.events = self.events, []
        return events

    def number(self) -> int:
        """The next message's."""
        self.next_seq += 1
        return self.next_seq - 1

    def picture(self) -> Iterator[Any]:
        """Events that give all that is held to a reader that knows nothing, or something wrong."""
        yield self._form.cleared()
        for name in in_order({name: each.description for name, each in self.held.items()}):
            yield self._stored(name, self.held[name])

    def check(self) -> None:
        """Assert the invariants; for tests."""
        counts: Counter[bytes] = Counter()
        for name, holding in self.held.items():
            assert holding.nodes, name
            for block in blocks_of(name, holding.description):
                counts[block] += len(holding.nodes)
        assert counts == self._counts, (counts, self._counts)


def blocks_of(name: ChunkId, description: Description | None) -> list[bytes]:
    """A chunk's blocks, each with the KV group behind; the last one alone if no more is known."""
    group = name[1][-4:]
    return [each + group for each in (description or bare(name[1])).block_hashes]


def parent_of(name: ChunkId, description: Description | None) -> ChunkId | None:
    """The chunk before, in the same namespace and KV group."""
    if description is None or description.parent is None:
        return None
    return name[0], Key(description.parent + name[1][-4:])


def in_order(chunks: dict[ChunkId, Description | None]) -> Iterator[ChunkId]:
    """All of them, each after the one before it in its prompt: subscribers refuse orphans."""
    done: set[ChunkId] = set()
    for name in chunks:
        chain: list[ChunkId] = []
        each: ChunkId | None = name
        while each is not None and each in chunks and each not in done:
            done.add(each)
            chain.append(each)
            each = parent_of(each, chunks[each])
        yield from reversed(chain)
