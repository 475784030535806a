"""A node's listing on its way: which chunks it has, to engines and to the directory.

A reader says where in the listing it is, and gets what comes after that: names that have changed
since, each in the state that it has now, and, until it has read all, the next page of all chunks.
A row is a name's whole state, never a difference, and may be newer than the number that it comes
with: then it comes again. Who has read all and is at a number knows what the node had then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

import msgspec

from raykv.base.ids import MAX_BLOCKS, Blocks, Key, Namespace
from raykv.protocol.columns import MAX_ROWS, Keys, Numbers, Texts, check_column

ALL_READ = -1
"""The place of a reader that has seen every page."""


class Where(IntFlag):
    """Where on a node a chunk is; of several engines one may be storing it anew."""

    NOWHERE = 0
    RAM = 1
    DISK = 2
    COMING = 4


class Reason(IntEnum):
    """Why a name has changed."""

    COMING = 0
    STORED = 1
    FAILED = 2
    """What was coming has not come."""
    EVICTED = 3
    CLEARED = 4
    DAMAGED = 5
    QUOTA = 6
    """It was evicted while its tenant had more than is guaranteed to it."""
    MOVED = 7
    """An operator has had it moved to another node."""


EVICTIONS = (Reason.EVICTED, Reason.QUOTA)

# Looked up, since there may be a million rows.
_WHERES = tuple(map(Where, range(8)))
_REASONS = {int(each): each for each in Reason}
_WHERE_BYTES, _REASON_BYTES = bytes(range(8)), bytes(_REASONS)


class ListedRow(NamedTuple):
    """The state of a name; `blocks` are the ones that the node has."""

    namespace: Namespace
    key: Key
    where: Where
    blocks: Blocks
    reason: Reason


class ListedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows in columns.

    Raises:
        ValueError: columns of different lengths, or a row that no node has. From `receive` that is
            a MessageError.
    """

    namespaces: Texts = Texts()
    keys: Keys = Keys()
    where: bytes = b""
    first_block: Numbers = Numbers()
    num_blocks: Numbers = Numbers()
    reasons: bytes = b""

    def __post_init__(self) -> None:
        columns = (self.where, self.first_block, self.num_blocks, self.reasons)
        check_column(self.keys, self.namespaces, *columns, most=MAX_ROWS)
        if self.where.translate(None, _WHERE_BYTES):
            raise ValueError(f"a chunk at {max(self.where)}")
        if self.reasons.translate(None, _REASON_BYTES):
            raise ValueError(f"reason {max(self.reasons)}")
        if self.keys and not self._has_sound_blocks():
            raise ValueError("blocks that no chunk has")

    def _has_sound_blocks(self) -> bool:
        first, last_first = self.first_block.span()
        least, most = self.num_blocks.span()
        if first >= 0 <= least and last_first + most <= MAX_BLOCKS:
            # Mostly so, and found out in a tenth of the time.
            return True
        blocks = map(Blocks, self.first_block, self.num_blocks)
        return all(not each.length or each.is_sound for each in blocks)

    @staticmethod
    def of(rows: Iterable[ListedRow]) -> ListedRows:
        """Rows as columns."""
        rows = list(rows)
        if not rows:
            return ListedRows()
        spaces, keys, where, blocks, reasons = zip(*rows, strict=True)
        first, length = map(Numbers.of, zip(*blocks, strict=True))
        columns = Keys.of(keys), bytes(where), first, length, bytes(reasons)
        return ListedRows(Texts.of(spaces), *columns)

    def __iter__(self) -> Iterator[ListedRow]:
        columns = zip(
            self.namespaces,
            self.keys,
            self.where,
            map(Blocks, self.first_block, self.num_blocks),
            self.reasons,
            strict=True,
        )
        for name, key, where, blocks, reason in columns:
            yield ListedRow(Namespace(name), Key(key), _WHERES[where], blocks, _REASONS[reason])


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far a reader has read: in which life of a listing, up to which number of its changes, and
    up to which place of its pages. Who has read nothing is in no life.

    `reader`: who that is; one who wants other namespaces is another one.
    """

    life: int = 0
    number: int = 0
    place: int = 0
    reader: int = 0


class ListingPart(msgspec.Struct, frozen=True, array_like=True):
    """What takes a reader from one position to another; `begins`: it forgets all that it knew."""

    begins: bool
    start: Position
    end: Position
    rows: ListedRows = ListedRows()

    def __post_init__(self) -> None:
        if not 0 < self.start.life == self.end.life or self.start.reader != self.end.reader:
            raise ValueError("a part over two lives or readers, or of no life")

    def follows(self, position: Position) -> bool:
        """Whether a reader who is there takes it. It may come twice, late or never: the reader then
        says again where it is.
        """
        start = self.start
        if not self.begins:
            return start == position
        is_newer = (start.life, start.number) >= (position.life, position.number)
        return is_newer and start.reader == position.reader
