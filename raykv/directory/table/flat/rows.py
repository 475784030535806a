"""The arrays of the flat table: how they grow, and how keys go in and out of them.

The rows are in a mapping of their own, which grows by an eighth: the kernel moves pages, not bytes,
so there are never two copies of all rows, and what is not used yet takes no memory. It asks for
large pages, since lookups go anywhere.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from raykv.base.ids import Namespace
from raykv.directory.table.flat import batches, kernels, order
from raykv.directory.table.flat.arrays import Array, Arrays
from raykv.directory.table.flat.layout import (
    APART,
    CLASS,
    CLASS_COLUMNS,
    CLOCK,
    COUNT,
    FREE,
    GENERATION,
    GHOST_PREVIOUS,
    GHOST_WORDS,
    GHOSTS,
    GONE,
    HITS,
    KEY,
    LENGTH_BITS,
    LESSON_COLUMNS,
    MAX_LOAD,
    NAME,
    NONE,
    NUM_LISTS,
    OWNER,
    RELEASED,
    SHADOW_WORDS,
    SHADOWED,
    SLOT,
    SLOT_BYTES,
    SPARE,
    STATE,
    STORED,
    TICKS_PER_S,
    TOUCHED,
    WHOLE,
)
from raykv.directory.table.protocol import MAX_OWNERS, Changes, Held, Uses
from raykv.protocol.columns import Keys

MIN_ROWS = 256
MIN_PLACES = 512


def until_tick(seconds: float) -> int:
    """The first tick at which a time is over."""
    return min(ceil(seconds * TICKS_PER_S), NONE)


def tick_of(seconds: float) -> int:
    """The last tick that has come by a time."""
    return floor(seconds * TICKS_PER_S)


@dataclass(frozen=True, slots=True)
class Batch:
    """Keys of one namespace, as the kernels want them."""

    keys: Array
    names: Array


class Rows:
    """All rows, the index of their keys, and the lists that they are in."""

    def __init__(self, *, learns: bool) -> None:
        self._learns = learns
        # Rows are whole 64-bit words.
        self._key_words = 2 - KEY % 2
        self._map_rows(MIN_ROWS)
        self.index: Array = np.zeros(MIN_PLACES, np.int64)
        # Entries of the index at most: chunks that were added since the others were counted.
        self._num_entries = 0
        self.lists: Array = np.zeros((0, 3), np.int64)
        self.classes: Array = np.zeros((0, CLASS_COLUMNS), np.int64)
        self.counts: Array = np.full((1, 1), -1, np.int64)
        self._ghosts: Array = np.zeros((1, GHOST_WORDS), np.uint32)
        self._buckets: Array = np.zeros(1, np.int64)
        self._lessons: Array = np.zeros((0, LESSON_COLUMNS))
        self._shadows: Array = np.zeros((0, SHADOW_WORDS), np.uint32)
        # Scratch space for the kernels.
        self._candidates: Array = np.empty(batches.AHEAD, np.int64)
        self.cursors: Array = np.empty(order.NUM_CURSORS, np.int64)
        self._num_rows = 0
        # First rows of blocks that nobody uses, by their length.
        self._free_blocks: dict[int, list[int]] = {}
        self._free_classes: list[int] = []
        self._tick = 0
        self._namespaces: list[Namespace] = []
        self._numbers: dict[Namespace, int] = {}

    @property
    def arrays(self) -> Arrays:
        """All of them, as the kernels want them; good until something grows."""
        return Arrays(
            self.rows,
            self.words,
            self.index,
            self.lists,
            self.classes,
            self.counts,
            self._ghosts,
            self._buckets,
            self._lessons,
            self._shadows,
            self._candidates,
        )

    def set_clock(self, now: float) -> None:
        """Set the time at which chunks come or are used from now on."""
        tick = min(tick_of(now), NONE)
        if tick != self._tick:
            self._tick = tick
            self.classes[:, CLOCK] = tick

    # Growth

    def take_block(self, count: int) -> int:
        """The first of so many rows that nobody uses."""
        free = self._free_blocks.get(count)
        if free:
            return free.pop()
        base = self._num_rows
        self._num_rows += count
        assert self._num_rows < NONE, self._num_rows
        if self._num_rows > len(self.rows):
            room = max(self._num_rows, len(self.rows) + len(self.rows) // 8)
            # Nothing may point into a mapping that moves.
            del self.rows, self.words
            self._memory.resize(room * self._row_bytes)
            self._view_rows(room)
        return base

    @property
    def _row_bytes(self) -> int:
        return 4 * (KEY + self._key_words)

    def _map_rows(self, count: int) -> None:
        """Map this many new rows."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, count * self._row_bytes, flags=flags)
        with suppress(OSError):
            # A kernel may have none.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view_rows(count)

    def _view_rows(self, count: int) -> None:
        size = count * self._row_bytes // 4
        self.rows: Array = np.frombuffer(self._memory, np.uint32, size).reshape(count, -1)
        self.words: Array = self.rows.view(np.int64)

    def give_block(self, base: int, count: int) -> None:
        """Nobody uses a block any more."""
        self.rows[base : base + count, STATE] = GONE
        self._free_blocks.setdefault(count, []).append(base)

    def new_class(self, node: int, slot_bytes: int) -> int:
        """Number of a class with empty lists."""
        if not self._free_classes:
            count = len(self.classes)
            self._free_classes = list(range(2 * count + 3, count - 1, -1))
            self.classes = _grown(self.classes, 2 * count + 4)
            self.lists = _grown(self.lists, (2 * count + 4) * NUM_LISTS)
            if self._learns:
                self._lessons = _grown(self._lessons, 2 * count + 4)
                self._shadows = _grown(self._shadows, (2 * count + 4) * SHADOWED)
        number = self._free_classes.pop()
        self.classes[number] = 0
        self.classes[number, :2] = (node, slot_bytes)
        self.classes[number, CLOCK] = self._tick
        self.classes[number, WHOLE] = number
        self.classes[number, APART:] = number
        first = number * NUM_LISTS
        self.lists[first : first + NUM_LISTS] = (NONE, NONE, 0)
        self.lists[first + GHOSTS] = 0
        if self._learns:
            self._lessons[number] = 0.0
        return number

    def give_class(self, number: int) -> None:
        """No row has that class any more."""
        order.end_ghosts(self.arrays, number)
        self._free_classes.append(number)

    def new_part(self, whole: int, owner: int) -> int:
        """Number of a class for the chunks of one tenant, which come there from now on."""
        node, slot_bytes = self.classes[whole, :2].tolist()
        number = self.new_class(node, slot_bytes)
        if self.classes.shape[1] == APART:
            own = np.repeat(np.arange(len(self.classes))[:, None], MAX_OWNERS, axis=1)
            self.classes = np.concatenate((self.classes, own), axis=1)
        self.classes[number, WHOLE] = whole
        self.classes[whole, APART + owner] = number
        return number

    def end_part(self, whole: int, owner: int) -> None:
        """The chunks of a tenant come to the class of all from now on."""
        self.classes[whole, APART + owner] = whole

    def room_for_ghosts(self, count: int) -> Arrays:
        """The arrays, grown so that this many chunks may be given up or become spares."""
        missing = count - int(self._ghosts[0, GHOST_PREVIOUS])
        if missing > 0 and self._learns:
            old = len(self._ghosts)
            self._ghosts = _grown(self._ghosts, old + max(missing, old // 4))
            self._buckets = np.zeros(len(self._ghosts), np.int64)
            order.grow_ghosts(self._ghosts, self._buckets, old)
        return self.arrays

    def reserve_node(self, node: int) -> None:
        """A node has no namespaces yet."""
        if node >= len(self.counts):
            more = np.full((node + 1, self.counts.shape[1]), -1, np.int64)
            self.counts = np.concatenate((self.counts, more))
        self.counts[node] = -1

    def room_for_chunks(self, count: int) -> Arrays:
        """The arrays, grown so that this many more chunks may be held."""
        capacity = len(self.index)
        self._num_entries += count
        if self._num_entries > capacity * MAX_LOAD:
            # Those that went are not counted on the way.
            self._num_entries = int(np.count_nonzero(self.index)) + count
            needed = int(self._num_entries / MAX_LOAD)
            if needed > capacity * 0.9:
                grown = np.zeros(max(needed, capacity + capacity // 4), np.int64)
                kernels.rehash(self.index, grown)
                self.index = grown
        # Each may make spares of itself and of another.
        return self.room_for_ghosts(2 * count)

    def _widen(self, longest: int) -> None:
        """Keys may be as long as that: all rows are written anew."""
        key_words = -(-longest // 4)
        key_words += (KEY + key_words) % 2
        self._key_words, narrow, index = key_words, self.rows, self.index
        self._map_rows(len(narrow))
        self.rows[:, : narrow.shape[1]] = narrow
        self.index = np.zeros_like(index)
        kernels.reindex(self.rows, index, self.index)

    # Namespaces and keys

    def number_of(self, namespace: Namespace) -> int:
        """Number of a namespace: the same as long as this process lives."""
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self._namespaces)
            assert number < 1 << (32 - LENGTH_BITS), "too many namespaces"
            self._namespaces.append(namespace)
            if number >= self.counts.shape[1]:
                more = np.full_like(self.counts, -1)
                self.counts = np.concatenate((self.counts, more), axis=1)
        return number

    def sizes(self, node: int) -> dict[Namespace, int]:
        """Chunks of a node by namespace, of those that it has ever had since they were cleared."""
        counts = self.counts[node].tolist()
        return {
            namespace: count
            for namespace, count in zip(self._namespaces, counts, strict=False)
            if count >= 0
        }

    def batch(self, namespace: Namespace, keys: Sequence[bytes]) -> Batch:
        """Keys of a namespace; a column of keys as long as a row's is read as it lies there."""
        column = Keys.of(keys)
        longest = max(column.lengths, default=0)
        if longest > self._key_words * 4:
            self._widen(longest)
        width = self._key_words * 4
        first_bits = self.number_of(namespace) << LENGTH_BITS
        raw = column.raw
        if column.width == width:
            names = np.full(len(column), first_bits | width, np.int64)
        else:
            raw = b"".join([key.ljust(width, b"\0") for key in column])
            names = np.array([first_bits | len(key) for key in column], np.int64)
        return Batch(np.frombuffer(raw, np.uint32).reshape(len(column), self._key_words), names)

    def keys_at(self, rows: Array) -> Keys:
        """Keys of rows that have, or have just had, a chunk."""
        width = self._key_words * 4
        raw = self.rows[rows, KEY:].tobytes()
        lengths = self.rows[rows, NAME] & ((1 << LENGTH_BITS) - 1)
        if not len(rows) or (lengths == width).all():
            return Keys(raw, bytes([width]))
        starts = range(0, len(raw), width)
        ends = (np.arange(len(rows)) * width + lengths).tolist()
        return Keys.of([raw[start:end] for start, end in zip(starts, ends, strict=True)])

    def changes(self, rows: Array, now: float, *, with_owners: bool) -> list[Changes]:
        """What went with rows that have just been evicted."""
        if not len(rows):
            return []
        numbers = self.rows[rows, NAME] >> LENGTH_BITS
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
        keys = self.keys_at(rows)
        slots = self.rows[rows, SLOT].tolist()
        generations = (self.words[rows, GENERATION] - 1).tolist()
        hits = self.rows[rows, HITS].tolist()
        ages = np.maximum(now - self.rows[rows, STORED] / TICKS_PER_S, 0.0).tolist()
        owners = self.rows[rows, OWNER].tolist() if with_owners else []
        gone = []
        start = 0
        for end in ends:
            part = slice(start, end)
            namespace = self._namespaces[int(numbers[start])]
            columns = keys[part], slots[part], generations[part]
            uses = hits[part], ages[part], owners[part]
            gone.append(Changes(False, namespace, *columns, False, *uses))
            start = end
        return gone

    def held(self, rows: Array) -> Held:
        """The chunks of rows that have one."""
        numbers = (self.rows[rows, NAME] >> LENGTH_BITS).tolist()
        return Held(
            namespaces=[self._namespaces[number] for number in numbers],
            keys=self.keys_at(rows),
            slots=self.rows[rows, SLOT].tolist(),
            generations=self.words[rows, GENERATION].tolist(),
            slot_bytes=self.classes[self.rows[rows, CLASS], SLOT_BYTES].tolist(),
        )

    def uses(self, rows: Array) -> Uses:
        """What became of the chunks of rows that have one."""
        return Uses(
            slot_bytes=self.classes[self.rows[rows, CLASS], SLOT_BYTES].tolist(),
            stored_at=(self.rows[rows, STORED] / TICKS_PER_S).tolist(),
            used_at=(self.rows[rows, TOUCHED] / TICKS_PER_S).tolist(),
            hits=self.rows[rows, HITS].tolist(),
            is_spare=self.is_shared(rows).tolist(),
            owners=self.rows[rows, OWNER].tolist(),
        )

    def is_shared(self, rows: Array) -> Array:
        """Whether another node has each of the chunks of rows too."""
        states = self.rows[rows, STATE]
        is_shared: Array = states == SPARE
        released = np.flatnonzero(states == RELEASED)
        shared = rows[released]
        batches.mark_shared(self.arrays, shared)
        is_shared[released] = shared
        return is_shared

    def is_of(self, rows: Array, namespace: Namespace) -> Array:
        """Whether the name in each row is of a namespace."""
        is_same: Array = self.rows[rows, NAME] >> LENGTH_BITS == self.number_of(namespace)
        return is_same

    def list_of(self, of_class: int, state: int) -> int:
        """Number of the list of a class and a state."""
        return of_class * NUM_LISTS + state - FREE

    def count(self, of_class: int, state: int) -> int:
        """Rows of a class in a state."""
        return int(self.lists[self.list_of(of_class, state), COUNT])


def _grown(table: Array, length: int) -> Array:
    """The table with rows of zeros added."""
    return np.concatenate((table, np.zeros((length - len(table), table.shape[1]), table.dtype)))
