"""What nodes tell of their listings, taken into the directory; pure.

Each node is believed about itself alone, in one life of its listing, in the order of its numbers.
A listing that begins anew is a node that was lost and comes back with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.known.holdings import Holdings
from raykv.protocol.listing import ListingPart, Position, Reason, Where

READY_AT = {each: each & ~Where.COMING for each in map(Where, range(8))}
"""What is coming is nowhere yet."""


class MovedChunk(NamedTuple):
    """A chunk is elsewhere on its node than before."""

    namespace: Namespace
    key: Key
    before: Where
    after: Where
    reason: Reason


@dataclass
class TakenPart:
    """What a part has changed. `begins`: all that the node had was gone before."""

    begins: bool = False
    moved: list[MovedChunk] = field(default_factory=list)


class Intake:
    """See the module's docstring. Only of members: what comes of others late is theirs to refuse
    who know the members.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._positions: dict[NodeId, Position] = {}

    def position(self, node_id: NodeId) -> Position:
        """How far the node's listing has been read, as the answer to each report says."""
        return self._positions.get(node_id, Position())

    def take(self, node_id: NodeId, part: ListingPart) -> TakenPart:
        """Take in the next part of a node's listing; any other changes nothing."""
        taken = TakenPart()
        if not part.follows(self.position(node_id)):
            return taken
        if part.begins:
            taken.begins = self.lose(node_id)
            self._holdings.join(node_id)
        for row in part.rows:
            after = READY_AT[row.where]
            before = self._holdings.put(node_id, row.namespace, row.key, after)
            if before != after:
                taken.moved.append(MovedChunk(row.namespace, row.key, before, after, row.reason))
        self._positions[node_id] = part.end
        return taken

    def lose(self, node_id: NodeId) -> bool:
        """A node is gone, with all that it had; False if it was not there."""
        if self._positions.pop(node_id, None) is None:
            return False
        self._holdings.lose(node_id)
        return True
