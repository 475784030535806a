"""An engine's view with one place, whose node has the chunks that a benchmark stores."""

from __future__ import annotations

from collections.abc import Iterable

from raykv.base.ids import ALL_BLOCKS, Key, Namespace, NodeId
from raykv.base.settings import Settings
from raykv.engine.listed import EnginePlace
from raykv.engine.view import EngineView
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.engine import ChangesAnswer, EngineHello
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)

SPACE, LIFE = Namespace("bench"), 1


class ViewedNode:
    """A node that lists its chunks; `view` has read the whole listing."""

    def __init__(self) -> None:
        self.view = EngineView(Settings(request_deadline_s=5.0))
        hello = EngineHello("bench", LIFE, SPACE, slot_bytes={0: 4096})
        self.view.begin(hello, [EnginePlace(NodeId("node"))], 0.0)
        self._number = 0
        self.store(())
        self.view.set_line(0, LIFE, 0.0)

    def store(self, keys: Iterable[Key]) -> None:
        """Chunks are there from now on."""
        rows = [ListedRow(SPACE, key, Where.RAM, ALL_BLOCKS, Reason.STORED) for key in keys]
        for first in range(0, len(rows) or 1, MAX_KEYS):
            self._tell(rows[first : first + MAX_KEYS])

    def _tell(self, rows: list[ListedRow]) -> None:
        asked = self.view.query(0).position
        self._number += len(rows)
        begins = not asked.life
        start = Position(LIFE, reader=asked.reader) if begins else asked
        end = Position(LIFE, self._number, ALL_READ, asked.reader)
        part = ListingPart(begins, start, end, ListedRows.of(rows))
        self.view.take(0, ChangesAnswer(part), 0.0)
