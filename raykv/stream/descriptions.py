"""What chunks have inside: reported by engines, kept by NodeActors, both within bounds.

              add             take               taken in             too many, cleared
   (unknown) ─────► waiting ───────► told, kept ──────────► in the book ──────► (unknown)
                       │ too many        │ another NodeActor: `tell_again`
                       ▼                 ▼
                   (dropped)          waiting

Descriptions are for readers alone: nothing is decided by them, and any may be missing.

Invariants:
1. The bytes of a book are those of its rows, never above its bound; the oldest use goes first.
2. The bytes that wait in an outbox are those put minus those taken; the one number is written by
   the engine's thread alone, the other by the exchange thread alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from raykv.base.ids import family_of
from raykv.protocol import columns, descriptions

BOOK_BYTES = 256 << 20
"""Kept by a NodeActor: about 200,000 chunks of 128 tokens."""

TOLD_BYTES = 32 << 20
"""Kept by an engine, to repeat them to a new NodeActor."""

WAITING_BYTES = 8 << 20
"""Waiting in an engine for its next exchanges."""

WAITING_FOUND_BYTES = 256 << 10
"""While more than that waits, chunks that were only found are not described: many may be found in
one step of the engine, and each takes some microseconds of it."""

PAGE_BYTES = 48 << 10
"""In one exchange: with the other columns mostly under Ray's 100 KiB inline limit."""

ANSWER_BYTES = 1 << 20
"""In one answer to a reader."""

ROW_BYTES = 550
"""Overhead of a row's Python objects."""


class DescriptionBook:
    """Descriptions by namespace and key.

    Args:
        most_bytes: beyond them the rows that were not used for longest are forgotten.
    """

    def __init__(self, most_bytes: int = BOOK_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rows: OrderedDict[tuple[str, bytes], descriptions.Description] = OrderedDict()
        # Rows by namespace.
        self._counts: Counter[str] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: descriptions.Description) -> None:
        """Take a description in; a later one of the same chunk takes its place."""
        self._drop((row.namespace, row.key))
        self._rows[row.namespace, row.key] = row
        self._counts[row.namespace] += 1
        self.num_bytes += row.num_bytes + ROW_BYTES
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._rows)))

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether a chunk is described; it does not count as a use."""
        return (namespace, key) in self._rows

    def find(self, key: bytes, namespace: str | None = None) -> descriptions.Description | None:
        """A chunk's description; None for the namespace: that of any."""
        for name in self._counts if namespace is None else (namespace,):
            row = self._rows.get((name, key))
            if row is not None:
                self._rows.move_to_end((name, key))
                return row
        return None

    def page(
        self, keys: Iterable[bytes], namespace: str | None = None
    ) -> list[descriptions.Description]:
        """What is known of chunks, in their order; what would not fit into an answer is left out.

        The first one that is known is always in it.
        """
        rows: list[descriptions.Description] = []
        left = ANSWER_BYTES
        for key in keys:
            row = self.find(key, namespace)
            if row is None:
                continue
            left -= row.num_bytes
            if left < 0 and rows:
                break
            rows.append(row)
        return rows

    def rows(self) -> list[descriptions.Description]:
        """All rows, that of the oldest use first."""
        return list(self._rows.values())

    def forget(self, namespace: str | None = None) -> None:
        """Forget a namespace with its parts, or all if None."""
        for name in list(self._rows):
            if namespace is None or namespace in (name[0], family_of(name[0])):
                self._drop(name)

    def _drop(self, name: tuple[str, bytes]) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self.num_bytes -= row.num_bytes + ROW_BYTES
            self._counts[name[0]] -= 1
            if not self._counts[name[0]]:
                del self._counts[name[0]]

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self.num_bytes == sum(row.num_bytes + ROW_BYTES for row in self._rows.values())
        assert self.num_bytes <= self._most_bytes, self.num_bytes
        assert sum(self._counts.values()) == len(self._rows), self._counts


class DescriptionOutbox:
    """What an engine has to tell of its chunks.

    Threads: `add`, `knows` and `is_busy` are for the engine's thread, all else for the exchange
    thread.
    """

    def __init__(self) -> None:
        self._waiting: deque[descriptions.Description] = deque()
        self._told = DescriptionBook(TOLD_BYTES)
        # The keys in there: each thread adds or discards single ones.
        self._waiting_keys: set[bytes] = set()
        self._again: deque[descriptions.Description] = deque()
        self._bytes_put = 0
        self._bytes_taken = 0
        self.num_dropped = 0
        self.num_unsound = 0

    @property
    def _bytes_waiting(self) -> int:
        return self._bytes_put - self._bytes_taken

    @property
    def is_busy(self) -> bool:
        """Whether chunks that were only found should wait for another time."""
        return self._bytes_waiting > WAITING_FOUND_BYTES

    def knows(self, namespace: str, key: bytes) -> bool:
        """Whether a chunk is remembered as described."""
        return key in self._waiting_keys or self._told.has(namespace, key)

    def add(self, row: descriptions.Description) -> None:
        """Have a chunk described with one of the next exchanges; dropped if too many wait."""
        if self._bytes_waiting + row.num_bytes > WAITING_BYTES:
            self.num_dropped += 1
            return
        self._bytes_put += row.num_bytes
        self._waiting_keys.add(row.key)
        self._waiting.append(row)

    @property
    def has_news(self) -> bool:
        """Whether `take` has something."""
        return bool(self._waiting or self._again)

    def take(self, most_bytes: int = PAGE_BYTES) -> list[descriptions.Description]:
        """The rows of the next exchange; new ones before repeated ones."""
        rows: list[descriptions.Description] = []
        left = most_bytes
        for queue in (self._waiting, self._again):
            while queue and (not rows or left >= queue[0].num_bytes):
                row = queue.popleft()
                left -= row.num_bytes
                rows.append(row)
                if queue is self._waiting:
                    self._bytes_taken += row.num_bytes
                    self._told.add(row)
                    self._waiting_keys.discard(row.key)
        sound = columns.valid(rows, descriptions.check_description)
        self.num_unsound += len(rows) - len(sound)
        return sound

    def counter_values(self) -> dict[str, int]:
        """What was not sent: too many waited, or their parts did not fit together."""
        return {"descriptions_dropped": self.num_dropped + self.num_unsound}

    def tell_again(self) -> None:
        """A new NodeActor knows nothing of what was said before."""
        self._again = deque(self._told.rows())

    def clear(self) -> None:
        """The chunks are gone; what waits still may be of later ones."""
        self._told.forget()
        self._again.clear()
