"""The index of the flat table, and chunks that come and go, compiled. Importing this module loads
numba: nobody but the scheduler actor's process may.

`keys` and `names` are a batch of keys: `names` has namespace and length.

The index needs no search from the beginning when it grows: a place is the hash times the capacity,
so that entries keep their order, and moving them is one pass over both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from raykv.directory.table.flat import order
from raykv.directory.table.flat.arrays import (
    ARRAYS,
    COLUMN,
    HASH,
    INT,
    KEYS,
    ROWS,
    Array,
    Arrays,
    inner,
    outer,
)
from raykv.directory.table.flat.layout import (
    APART,
    CLAIMED,
    CLASS,
    CLOCK,
    GENERATION,
    HASH_BITS,
    HELD,
    HITS,
    KEY,
    LENGTH_BITS,
    NAME,
    NODE,
    NONE,
    OWNER,
    PIN,
    RELEASED,
    SPARE,
    STATE,
    STORED,
    TOUCHED,
    TWIN,
    WHOLE,
)
from raykv.directory.table.flat.lists import move
from raykv.directory.table.flat.prefetch import prefetch

_SEED = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_TURN, _TURN_BACK = np.uint64(29), np.uint64(35)
_REST = np.uint64(64 - HASH_BITS)


# Index


@inner(types.uint64(types.uint64, types.uint64))
def _mixed(mixed: Any, word: Any) -> Any:
    return (((mixed << _TURN) | (mixed >> _TURN_BACK)) ^ word) * _FACTOR


@inner(INT(HASH))
def short(hashed: Any) -> int:
    """What the index has of a hash."""
    return int(hashed >> _REST)


@inner(HASH(KEYS, INT, INT))
def hash_of(keys: Array, number: int, name: int) -> Any:
    """Hash of one key of a batch, in its namespace."""
    mixed = np.uint64(name) * _SEED
    num_words = keys.shape[1]
    for word in range(0, num_words - 1, 2):
        high, low = np.uint64(keys[number, word + 1]), np.uint64(keys[number, word])
        mixed = _mixed(mixed, (high << _HALF) | low)
    if num_words % 2:
        mixed = _mixed(mixed, np.uint64(keys[number, num_words - 1]))
    return (mixed ^ (mixed >> _HALF)) * _SEED


@inner(types.boolean(ROWS, INT, KEYS, INT, INT))
def is_key(rows: Array, row: int, keys: Array, number: int, name: int) -> bool:
    """Whether a row has a key: all of it is compared."""
    # Nearly always it has: to leave early would only cost.
    differs = rows[row, NAME] ^ np.uint32(name)
    for word in range(keys.shape[1]):
        differs |= rows[row, KEY + word] ^ keys[number, word]
    return bool(differs == 0)


@inner(INT(COLUMN, INT, INT))
def candidate(index: Array, place: int, hashed: int) -> int:
    """The first place from `place` on that has the hash or nothing."""
    while index[place] != 0 and index[place] >> 32 != hashed:
        place += 1
        if place == len(index):
            place = 0
    return place


@inner(INT(ROWS, COLUMN, KEYS, INT, INT, INT))
def place_from(rows: Array, index: Array, keys: Array, number: int, name: int, place: int) -> int:
    """Place of a key in the index, from a candidate on; or -1 less that where it would come."""
    while index[place] != 0:
        entry = index[place]
        if is_key(rows, (entry & NONE) - 1, keys, number, name):
            return place
        place = candidate(index, (place + 1) % len(index), entry >> 32)
    return -1 - place


@inner(INT(ROWS, COLUMN, KEYS, INT, INT))
def place_of(rows: Array, index: Array, keys: Array, number: int, name: int) -> int:
    """Place in the index of a key, or -1 less the place where it would come."""
    hashed = short(hash_of(keys, number, name))
    place = candidate(index, (hashed * len(index)) >> HASH_BITS, hashed)
    return int(place_from(rows, index, keys, number, name, place))


@inner(types.void(ROWS, COLUMN, KEYS, COLUMN, INT, COLUMN))
def look_ahead(
    rows: Array, index: Array, keys: Array, names: Array, start: int, places: Array
) -> None:
    """Candidates for the keys from `start` on; what belongs to them comes into the cache."""
    flat = rows.reshape(-1)
    width = rows.shape[1]
    for number in range(len(places)):
        places[number] = short(hash_of(keys, start + number, names[start + number]))
        prefetch(index, (places[number] * len(index)) >> HASH_BITS)
    for number in range(len(places)):
        hashed = places[number]
        place = candidate(index, (hashed * len(index)) >> HASH_BITS, hashed)
        places[number] = place
        row = (index[place] & NONE) - 1
        if row >= 0:
            prefetch(flat, row * width)
            prefetch(flat, row * width + width - 1)


@inner(HASH(ROWS, INT))
def hash_of_row(rows: Array, row: int) -> Any:
    """Hash of the key in a row, as `hash_of` has it."""
    mixed = np.uint64(rows[row, NAME]) * _SEED
    width = rows.shape[1]
    for word in range(KEY, width - 1, 2):
        high, low = np.uint64(rows[row, word + 1]), np.uint64(rows[row, word])
        mixed = _mixed(mixed, (high << _HALF) | low)
    if (width - KEY) % 2:
        mixed = _mixed(mixed, np.uint64(rows[row, width - 1]))
    return (mixed ^ (mixed >> _HALF)) * _SEED


@inner(INT(ROWS, COLUMN, INT))
def place_of_row(rows: Array, index: Array, row: int) -> int:
    """Place in the index of the key of a row, which is in it."""
    hashed = short(hash_of_row(rows, row))
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


@inner(types.void(COLUMN, INT))
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


@inner(types.void(ROWS, COLUMN, COLUMN))
def look_ahead_of(rows: Array, index: Array, wanted: Array) -> None:
    """What belongs to the keys of rows comes into the cache."""
    for row in wanted:
        prefetch(index, (short(hash_of_row(rows, row)) * len(index)) >> HASH_BITS)


@outer(types.void(COLUMN, COLUMN))
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


@outer(types.void(ROWS, COLUMN, COLUMN))
def reindex(rows: Array, old: Array, new: Array) -> None:
    """Make an empty index of the rows of another, whose keys have got another width."""
    capacity = len(new)
    for entry in old:
        if entry != 0:
            hashed = short(hash_of_row(rows, (entry & NONE) - 1))
            place = (hashed * capacity) >> HASH_BITS
            while new[place] != 0:
                place += 1
                if place == capacity:
                    place = 0
            new[place] = (hashed << 32) | (entry & NONE)


# Chunks


@outer(INT(ARRAYS, KEYS, INT, INT, INT))
def find(arrays: Arrays, keys: Array, number: int, name: int, node: int) -> int:
    """Row in which a node has a key, or -1."""
    rows, index, classes = arrays.rows, arrays.places, arrays.classes
    place = place_of(rows, index, keys, number, name)
    if place < 0:
        return -1
    row = (index[place] & NONE) - 1
    while row != NONE:
        if classes[rows[row, CLASS], NODE] == node:
            return row
        row = np.int64(rows[row, TWIN])
    return -1


@inner(types.void(ARRAYS, INT, HASH))
def _make_spare(arrays: Arrays, row: int, hashed: Any) -> None:
    """Another node has the chunk too."""
    order.evict(arrays, row, hashed)
    move(arrays.rows, arrays.lists, row, SPARE)


@inner(types.void(ARRAYS, INT))
def _go_apart(arrays: Arrays, row: int) -> None:
    """A row is of the class that its owner's chunks are in now; its state is CLAIMED."""
    move(arrays.rows, arrays.lists, row, CLAIMED)
    if arrays.classes.shape[1] > APART:
        whole = arrays.classes[arrays.rows[row, CLASS], WHOLE]
        arrays.rows[row, CLASS] = arrays.classes[whole, APART + arrays.rows[row, OWNER]]


@outer(types.void(ARRAYS, COLUMN))
def file_again(arrays: Arrays, moved: Array) -> None:
    """The chunks of rows are in the class of their owner, in that order, as if they came now."""
    rows = arrays.rows
    for row in moved:
        state = rows[row, STATE]
        _go_apart(arrays, row)
        if state < HELD:
            move(rows, arrays.lists, row, state)
        else:
            order.add(arrays, row, hash_of_row(rows, row), 0, False)


@outer(types.void(ARRAYS, INT, KEYS, INT, INT, INT, INT))
def hold(
    arrays: Arrays, row: int, keys: Array, number: int, name: int, generation: int, together: int
) -> None:
    """A slot that is claimed, leased or free has a chunk that its node does not hold yet.

    So many came `together`, and number 0 is a tail; 0: unknown.
    """
    rows, words, index = arrays.rows, arrays.words, arrays.places
    hashed = hash_of(keys, number, name)
    rows[row, NAME] = name
    for word in range(keys.shape[1]):
        rows[row, KEY + word] = keys[number, word]
    if rows[row, OWNER] != 0:
        _go_apart(arrays, row)
    order.add(arrays, row, hashed, together, number == 0)
    place = place_of(rows, index, keys, number, name)
    if place < 0:
        index[-1 - place] = (short(hashed) << 32) | (row + 1)
    else:
        first = (index[place] & NONE) - 1
        last = first
        while rows[last, TWIN] != NONE:
            last = np.int64(rows[last, TWIN])
        rows[last, TWIN] = row
        if rows[first, STATE] >= HELD:
            _make_spare(arrays, first, hashed)
        _make_spare(arrays, row, hashed)
    rows[row, TWIN] = NONE
    words[row, GENERATION] = generation
    rows[row, PIN] = 0
    now = arrays.classes[rows[row, CLASS], CLOCK]
    rows[row, STORED] = now
    rows[row, TOUCHED] = now
    rows[row, HITS] = 0
    node, namespace = arrays.classes[rows[row, CLASS], NODE], name >> LENGTH_BITS
    arrays.counts[node, namespace] = max(arrays.counts[node, namespace], 0) + 1


@inner(types.void(ARRAYS, INT))
def forget(arrays: Arrays, row: int) -> None:
    """A row's chunk is gone: its state is CLAIMED."""
    rows, index = arrays.rows, arrays.places
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
        if rows[first, TWIN] == NONE and rows[first, STATE] == SPARE:
            order.add(arrays, first, hash_of_row(rows, first), 0, False)
    move(rows, arrays.lists, row, CLAIMED)
    arrays.counts[arrays.classes[rows[row, CLASS], NODE], name >> LENGTH_BITS] -= 1


@inner(types.boolean(ARRAYS, INT))
def is_shared(arrays: Arrays, row: int) -> bool:
    """Whether another node has a row's chunk too."""
    rows, index = arrays.rows, arrays.places
    if rows[row, TWIN] != NONE:
        return True
    return bool((index[place_of_row(rows, index, row)] & NONE) - 1 != row)


@inner(types.void(ARRAYS, INT, INT))
def use_again(arrays: Arrays, row: int, together: int) -> None:
    """A row's chunk was used; one that was released is an ordinary one again."""
    if arrays.rows[row, STATE] != RELEASED:
        order.touch(arrays, row, together)
    elif is_shared(arrays, row):
        move(arrays.rows, arrays.lists, row, SPARE)
    else:
        order.add(arrays, row, hash_of_row(arrays.rows, row), together, False)


@inner(types.void(ARRAYS, INT))
def give_up(arrays: Arrays, row: int) -> None:
    """A row's chunk is about to be forgotten for lack of room; its past may be remembered."""
    if arrays.rows[row, STATE] >= HELD:
        order.evict(arrays, row, hash_of_row(arrays.rows, row))
