"""Loops over the flat table, compiled. Importing this module loads numba: nobody but the scheduler
actor's process may.

Most take all `arrays` of the table: `rows` (a row for each slot) and `words`, the same memory in
64-bit words; `index`, an open-addressing table of hash and row number plus one of the first replica
of each key; `lists`, heads and tails; `classes`, a node and a slot size each; `counts`, chunks by
node and namespace. `keys` and `names` are a batch of keys: `names` has namespace and length.

The index needs no search from the beginning when it grows: a place is the hash times the capacity,
so that entries keep their order, and moving them is one pass over both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from raykv.directory.layout import (
    CLAIMED,
    CLASS,
    COUNT,
    FREE,
    GENERATION,
    GONE,
    HASH_BITS,
    HEAD,
    HELD,
    KEY,
    LENGTH_BITS,
    NAME,
    NEXT,
    NODE,
    NONE,
    NUM_LISTS,
    PIN,
    PREVIOUS,
    SLOT,
    SPARE,
    STATE,
    TAIL,
    TWIN,
)
from raykv.directory.prefetch import prefetch

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array, Array, Array, Array]

INT = types.int64
ROWS = types.uint32[:, ::1]
TABLE = types.int64[:, ::1]
COLUMN = types.int64[::1]
ARRAYS = types.Tuple((ROWS, TABLE, COLUMN, TABLE, TABLE, TABLE))
KEYS = types.Array(types.uint32, 2, "C", readonly=True)

_SEED = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_TURN, _TURN_BACK = np.uint64(29), np.uint64(35)
_REST = np.uint64(64 - HASH_BITS)


# Lists


@njit(types.void(ROWS, TABLE, INT), cache=True)
def unlink(rows: Array, lists: Array, row: int) -> None:
    """Take a row out of the list of its state, if it is in one."""
    state = rows[row, STATE]
    if state < FREE:
        return
    which = rows[row, CLASS] * NUM_LISTS + state - FREE
    before, after = rows[row, PREVIOUS], rows[row, NEXT]
    if before == NONE:
        lists[which, HEAD] = after
    else:
        rows[before, NEXT] = after
    if after == NONE:
        lists[which, TAIL] = before
    else:
        rows[after, PREVIOUS] = before
    lists[which, COUNT] -= 1


@njit(types.void(ROWS, TABLE, INT, INT), cache=True)
def move(rows: Array, lists: Array, row: int, state: int) -> None:
    """Give a row a state, at the end of that list."""
    unlink(rows, lists, row)
    rows[row, STATE] = state
    if state < FREE:
        return
    which = rows[row, CLASS] * NUM_LISTS + state - FREE
    tail = lists[which, TAIL]
    rows[row, PREVIOUS] = tail
    rows[row, NEXT] = NONE
    if tail == NONE:
        lists[which, HEAD] = row
    else:
        rows[tail, NEXT] = row
    lists[which, TAIL] = row
    lists[which, COUNT] += 1


@njit(INT(ROWS, INT, COLUMN), cache=True)
def walk(rows: Array, row: int, out: Array) -> int:
    """The rows of a list from `row` on, as many as `out` has room for; returns how many."""
    count = 0
    while row != NONE and count < len(out):
        out[count] = row
        count += 1
        row = int(rows[row, NEXT])
    return count


@njit(types.void(ARRAYS, INT, INT, INT, INT, INT, INT), cache=True)
def fill_slab(
    arrays: Arrays,
    base: int,
    count: int,
    of_class: int,
    slot: int,
    stride: int,
    lowest: int,
) -> None:
    """Make `count` rows from `base` on free slots of a class."""
    rows, words, _, lists, _, _ = arrays
    for number in range(count):
        row = base + number
        rows[row, STATE] = GONE
        rows[row, CLASS] = of_class
        rows[row, SLOT] = slot + number * stride
        words[row, GENERATION] = lowest
        move(rows, lists, row, FREE)


# Index


@njit(types.uint64(types.uint64, types.uint64), cache=True, inline="always")
def _mixed(mixed: Any, word: Any) -> Any:
    return (((mixed << _TURN) | (mixed >> _TURN_BACK)) ^ word) * _FACTOR


@njit(INT(KEYS, INT, INT), cache=True)
def hash_of(keys: Array, number: int, name: int) -> int:
    """Of one key of a batch, in its namespace."""
    mixed = np.uint64(name) * _SEED
    num_words = keys.shape[1]
    for word in range(0, num_words - 1, 2):
        high, low = np.uint64(keys[number, word + 1]), np.uint64(keys[number, word])
        mixed = _mixed(mixed, (high << _HALF) | low)
    if num_words % 2:
        mixed = _mixed(mixed, np.uint64(keys[number, num_words - 1]))
    return int(((mixed ^ (mixed >> _HALF)) * _SEED) >> _REST)


@njit(types.boolean(ROWS, INT, KEYS, INT, INT), cache=True)
def is_key(rows: Array, row: int, keys: Array, number: int, name: int) -> bool:
    """Whether a row has a key: all of it is compared."""
    # Nearly always it has: to leave early would only cost.
    differs = rows[row, NAME] ^ np.uint32(name)
    for word in range(keys.shape[1]):
        differs |= rows[row, KEY + word] ^ keys[number, word]
    return bool(differs == 0)


@njit(INT(COLUMN, INT, INT), cache=True)
def candidate(index: Array, place: int, hashed: int) -> int:
    """The first place from `place` on that has the hash or nothing."""
    while index[place] != 0 and index[place] >> 32 != hashed:
        place += 1
        if place == len(index):
            place = 0
    return place


@njit(INT(ROWS, COLUMN, KEYS, INT, INT, INT), cache=True)
def place_from(rows: Array, index: Array, keys: Array, number: int, name: int, place: int) -> int:
    """Place of a key in the index, from a candidate on; or -1 less that where it would come."""
    while index[place] != 0:
        entry = index[place]
        if is_key(rows, (entry & NONE) - 1, keys, number, name):
            return place
        place = candidate(index, (place + 1) % len(index), entry >> 32)
    return -1 - place


@njit(INT(ROWS, COLUMN, KEYS, INT, INT), cache=True)
def place_of(rows: Array, index: Array, keys: Array, number: int, name: int) -> int:
    """Place in the index of a key, or -1 less the place where it would come."""
    hashed = hash_of(keys, number, name)
    place = candidate(index, (hashed * len(index)) >> HASH_BITS, hashed)
    return int(place_from(rows, index, keys, number, name, place))


@njit(types.void(ROWS, COLUMN, KEYS, COLUMN, INT, COLUMN), cache=True)
def look_ahead(
    rows: Array, index: Array, keys: Array, names: Array, start: int, places: Array
) -> None:
    """Candidates for the keys from `start` on; what belongs to them comes into the cache."""
    flat = rows.reshape(-1)
    width = rows.shape[1]
    for number in range(len(places)):
        places[number] = hash_of(keys, start + number, names[start + number])
        prefetch(index, (places[number] * len(index)) >> HASH_BITS)
    for number in range(len(places)):
        hashed = places[number]
        place = candidate(index, (hashed * len(index)) >> HASH_BITS, hashed)
        places[number] = place
        row = (index[place] & NONE) - 1
        if row >= 0:
            prefetch(flat, row * width)
            prefetch(flat, row * width + width - 1)


@njit(INT(ROWS, INT), cache=True)
def hash_of_row(rows: Array, row: int) -> int:
    """Of the key of a row, as `hash_of` has it."""
    mixed = np.uint64(rows[row, NAME]) * _SEED
    width = rows.shape[1]
    for word in range(KEY, width - 1, 2):
        high, low = np.uint64(rows[row, word + 1]), np.uint64(rows[row, word])
        mixed = _mixed(mixed, (high << _HALF) | low)
    if (width - KEY) % 2:
        mixed = _mixed(mixed, np.uint64(rows[row, width - 1]))
    return int(((mixed ^ (mixed >> _HALF)) * _SEED) >> _REST)


@njit(INT(ROWS, COLUMN, INT), cache=True)
def place_of_row(rows: Array, index: Array, row: int) -> int:
    """Place in the index of the key of a row, which is in it."""
    hashed = hash_of_row(rows, row)
    capacity = len(index)
    place = (hashed * capacity) >> HASH_BITS
    while True:
        entry = index[place]
        if entry >> 32 == hashed:
            first = (entry & NONE) - 1
            same = True
            for word in range(NAME, rows.shape[1]):
                if rows[first, word] != rows[row, word]:
                    same = False
                    break
            if same:
                return place
        place += 1
        if place == capacity:
            place = 0


@njit(types.void(COLUMN, INT), cache=True)
def free_place(index: Array, place: int) -> None:
    """Take an entry out; those behind it move up, so that there are no gaps."""
    capacity = len(index)
    other = place
    while True:
        other += 1
        if other == capacity:
            other = 0
        entry = index[other]
        if entry == 0:
            break
        home = ((entry >> 32) * capacity) >> HASH_BITS
        if place <= other:
            stays = place < home <= other
        else:
            stays = place < home or home <= other
        if not stays:
            index[place] = entry
            place = other
    index[place] = 0


@njit(types.void(ROWS, COLUMN, COLUMN), cache=True)
def look_ahead_of(rows: Array, index: Array, wanted: Array) -> None:
    """What belongs to the keys of rows comes into the cache."""
    for row in wanted:
        prefetch(index, (hash_of_row(rows, row) * len(index)) >> HASH_BITS)


@njit(types.void(COLUMN, COLUMN), cache=True)
def rehash(old: Array, new: Array) -> None:
    """Move all entries to an empty index of another capacity."""
    capacity = len(new)
    for entry in old:
        if entry != 0:
            place = ((entry >> 32) * capacity) >> HASH_BITS
            while new[place] != 0:
                place += 1
                if place == capacity:
                    place = 0
            new[place] = entry


@njit(types.void(ROWS, COLUMN, COLUMN), cache=True)
def reindex(rows: Array, old: Array, new: Array) -> None:
    """Make an empty index of the rows of another, whose keys have got another width."""
    capacity = len(new)
    for entry in old:
        if entry != 0:
            hashed = hash_of_row(rows, (entry & NONE) - 1)
            place = (hashed * capacity) >> HASH_BITS
            while new[place] != 0:
                place += 1
                if place == capacity:
                    place = 0
            new[place] = (hashed << 32) | (entry & NONE)


# Chunks


@njit(INT(ARRAYS, KEYS, INT, INT, INT), cache=True)
def find(arrays: Arrays, keys: Array, number: int, name: int, node: int) -> int:
    """Row in which a node has a key, or -1."""
    rows, _, index, _, classes, _ = arrays
    place = place_of(rows, index, keys, number, name)
    if place < 0:
        return -1
    row = (index[place] & NONE) - 1
    while row != NONE:
        if classes[rows[row, CLASS], NODE] == node:
            return row
        row = np.int64(rows[row, TWIN])
    return -1


@njit(types.void(ARRAYS, INT, KEYS, INT, INT, INT), cache=True)
def hold(arrays: Arrays, row: int, keys: Array, number: int, name: int, generation: int) -> None:
    """A slot that is claimed, leased or free has a chunk that its node does not hold yet."""
    rows, words, index, lists, classes, counts = arrays
    place = place_of(rows, index, keys, number, name)
    state = HELD
    if place < 0:
        index[-1 - place] = (hash_of(keys, number, name) << 32) | (row + 1)
    else:
        state = SPARE
        first = (index[place] & NONE) - 1
        last = first
        while rows[last, TWIN] != NONE:
            last = np.int64(rows[last, TWIN])
        rows[last, TWIN] = row
        if rows[first, STATE] == HELD:
            move(rows, lists, first, SPARE)
    move(rows, lists, row, state)
    rows[row, NAME] = name
    for word in range(keys.shape[1]):
        rows[row, KEY + word] = keys[number, word]
    rows[row, TWIN] = NONE
    words[row, GENERATION] = generation
    words[row, PIN] = 0
    node, namespace = classes[rows[row, CLASS], NODE], name >> LENGTH_BITS
    counts[node, namespace] = max(counts[node, namespace], 0) + 1


@njit(types.void(ARRAYS, INT), cache=True)
def forget(arrays: Arrays, row: int) -> None:
    """A row's chunk is gone: its state is CLAIMED."""
    rows, _, index, lists, classes, counts = arrays
    name = np.int64(rows[row, NAME])
    place = place_of_row(rows, index, row)
    first = (index[place] & NONE) - 1
    after = np.int64(rows[row, TWIN])
    if first == row and after == NONE:
        free_place(index, place)
    else:
        if first == row:
            index[place] = (index[place] >> 32 << 32) | (after + 1)
            first = after
        else:
            before = first
            while rows[before, TWIN] != row:
                before = np.int64(rows[before, TWIN])
            rows[before, TWIN] = after
        if rows[first, TWIN] == NONE:
            move(rows, lists, first, HELD)
    move(rows, lists, row, CLAIMED)
    counts[classes[rows[row, CLASS], NODE], name >> LENGTH_BITS] -= 1
