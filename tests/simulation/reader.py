"""A reader of the event stream, who polls now and then and rebuilds the directory."""

from __future__ import annotations

from raykv.base.ids import Epoch
from raykv.directory.manager import BlockManager
from raykv.protocol.events import events_of
from raykv.stream.replay import Replay


class Reader:
    """Reads pages of events; takes a snapshot, page by page, when it has missed some.

    It does not know when the scheduler actor has a new life, only what the pages say.
    """

    def __init__(self) -> None:
        self.replay = Replay()
        self.num_gaps = 0
        # The snapshot that is being taken, and the cursor of its next page.
        self._taken: Replay | None = None
        self._cursor = 0

    def poll(self, manager: BlockManager) -> bool:
        """Read one page; returns whether there is nothing left to read."""
        if self._taken is not None:
            self._read_snapshot(manager, self._taken)
            return False
        epoch, after = self.replay.place
        page = manager.events(Epoch(epoch), after)
        if page.is_gap:
            self.num_gaps += 1
            self._begin_snapshot()
            return False
        for event in events_of(page):
            self.replay.apply(event)
        return self.replay.place == (page.epoch, page.last_seq)

    def _begin_snapshot(self) -> None:
        self._taken = Replay()
        self._cursor = 0

    def _read_snapshot(self, manager: BlockManager, taken: Replay) -> None:
        page = manager.snapshot(self._cursor)
        if page.error:
            self._begin_snapshot()
            return
        taken.load(page)
        self._cursor = page.cursor
        if page.is_last:
            self.replay, self._taken = taken, None
