"""What is done to many chunks at once, compiled; see `raykv.directory.kernels`."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from raykv.directory.kernels import (
    ARRAYS,
    COLUMN,
    INT,
    KEYS,
    ROWS,
    TABLE,
    Array,
    Arrays,
    find,
    forget,
    hold,
    look_ahead,
    look_ahead_of,
    move,
    place_from,
)
from raykv.directory.layout import (
    BASE,
    CLASS,
    FREE,
    GENERATION,
    HEAD,
    HELD,
    KEY,
    LEASED,
    LENGTH_BITS,
    NAME,
    NEXT,
    NODE,
    NONE,
    NUM_LISTS,
    PIN,
    SLOT,
    SLOT_BYTES,
    SPARE,
    STATE,
    STRIDE,
    TWIN,
    USED,
)

AHEAD = 64
"""Keys of which all that is needed is fetched together."""


@njit(INT(TABLE, INT, INT), cache=True)
def row_at(slabs: Array, pages: int, slot: int) -> int:
    """The row of a slot in a node's slabs, which have so many pages each; -1 if there is none."""
    if slot < 0 or slot >= len(slabs) * pages:
        return -1
    slab = slot // pages
    if slabs[slab, BASE] < 0:
        return -1
    number, rest = divmod(slot - slab * pages, slabs[slab, STRIDE])
    if rest != 0 or number >= pages // slabs[slab, STRIDE]:
        return -1
    return slabs[slab, BASE] + number


@njit(types.UniTuple(INT, 3)(ARRAYS, KEYS, COLUMN, COLUMN, INT, INT, TABLE), cache=True)
def ask(
    arrays: Arrays,
    keys: Array,
    names: Array,
    ranks: Array,
    most: int,
    until: int,
    out: Array,
) -> tuple[int, int, int]:
    """Find replicas and pin them.

    `ranks` by node; the lowest ones are told. `out` gets columns: position of the key, number of
    the node among those told, slot, generation; then the positions of missing keys, and the nodes.
    Returns how many rows, missing keys and nodes there are.
    """
    rows, words, index, _, classes, _ = arrays
    count = num_missing = num_nodes = 0
    numbers = np.full(len(ranks), -1, np.int64)
    candidates = np.empty(AHEAD, np.int64)
    for position in range(len(names)):
        ahead = position % AHEAD
        if ahead == 0:
            some = candidates[: min(AHEAD, len(names) - position)]
            look_ahead(rows, index, keys, names, position, some)
        place = place_from(rows, index, keys, position, names[position], candidates[ahead])
        if place < 0:
            out[4, num_missing] = position
            num_missing += 1
            continue
        first = (index[place] & NONE) - 1
        last_rank = -1
        for _ in range(most if rows[first, TWIN] != NONE else 1):
            best, best_rank = NONE, NONE
            row = first
            while row != NONE:
                rank = ranks[classes[rows[row, CLASS], NODE]]
                if last_rank < rank < best_rank:
                    best, best_rank = row, rank
                row = np.int64(rows[row, TWIN])
            if best == NONE:
                break
            last_rank = best_rank
            of_class = rows[best, CLASS]
            node = classes[of_class, NODE]
            if numbers[node] < 0:
                numbers[node] = num_nodes
                out[5, num_nodes] = node
                num_nodes += 1
            words[best, PIN] = until
            classes[of_class, USED] = max(classes[of_class, USED], until)
            out[0, count] = position
            out[1, count] = numbers[node]
            out[2, count] = rows[best, SLOT]
            out[3, count] = words[best, GENERATION]
            count += 1
    return count, num_missing, num_nodes


@njit(types.void(ARRAYS, KEYS, COLUMN, INT, INT), cache=True)
def pin(arrays: Arrays, keys: Array, names: Array, node: int, until: int) -> None:
    """Pin chunks on a node."""
    rows, words, _, _, classes, _ = arrays
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            words[row, PIN] = until
            of_class = rows[row, CLASS]
            classes[of_class, USED] = max(classes[of_class, USED], until)


@njit(types.void(ARRAYS, KEYS, COLUMN, INT), cache=True)
def touch(arrays: Arrays, keys: Array, names: Array, node: int) -> None:
    """Move chunks on a node to the end of the eviction order."""
    rows, _, _, lists, _, _ = arrays
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            move(rows, lists, row, int(rows[row, STATE]))


@njit(INT(ARRAYS, TABLE, INT, KEYS, TABLE, INT, types.boolean), cache=True)
def store(
    arrays: Arrays,
    slabs: Array,
    pages: int,
    keys: Array,
    columns: Array,
    cleared: int,
    from_free: bool,
) -> int:
    """Hold what is plain; see `NodeTable.store`.

    `columns`: name, slot, generation, slot size, and a last one that gets the positions of those
    that are not plain. Returns how many.
    """
    rows, words, index, _, classes, _ = arrays
    num_others = 0
    candidates = np.empty(AHEAD, np.int64)
    for position in range(columns.shape[1]):
        if position % AHEAD == 0:
            some = candidates[: min(AHEAD, columns.shape[1] - position)]
            look_ahead(rows, index, keys, columns[0], position, some)
        name, slot, generation, slot_bytes = columns[:4, position]
        row = row_at(slabs, pages, slot)
        fits = row >= 0 and generation > cleared
        if fits:
            state = rows[row, STATE]
            of_class = rows[row, CLASS]
            fits = classes[of_class, SLOT_BYTES] == slot_bytes and (
                (state == LEASED and words[row, GENERATION] == generation)
                or (from_free and state == FREE)
            )
            if fits:
                fits = find(arrays, keys, position, name, classes[of_class, NODE]) < 0
        if fits:
            hold(arrays, row, keys, position, name, generation)
        else:
            columns[4, num_others] = position
            num_others += 1
    return num_others


@njit(types.void(ARRAYS, COLUMN), cache=True)
def drop(arrays: Arrays, gone: Array) -> None:
    """Free the slots of chunks for later generations."""
    rows, words, index, lists, _, _ = arrays
    for number, row in enumerate(gone):
        if number % AHEAD == 0:
            look_ahead_of(rows, index, gone[number : number + AHEAD])
        forget(arrays, row)
        words[row, GENERATION] += 1
        move(rows, lists, row, FREE)


@njit(types.void(ARRAYS, COLUMN), cache=True)
def forget_all(arrays: Arrays, gone: Array) -> None:
    """The chunks of rows are gone, and their slots are not free."""
    for row in gone:
        forget(arrays, row)


@njit(INT(ARRAYS, INT, INT, COLUMN), cache=True)
def evict(arrays: Arrays, of_class: int, now: int, out: Array) -> int:
    """Free slots of a class, as many as `out` has room for their rows; returns how many."""
    rows, words, _, lists, _, _ = arrays
    count = 0
    for state in (SPARE, HELD):
        row = lists[of_class * NUM_LISTS + state - FREE, HEAD]
        while row != NONE and count < len(out):
            if words[row, PIN] <= now:
                out[count] = row
                count += 1
            row = int(rows[row, NEXT])
    drop(arrays, out[:count])
    return count


@njit(INT(ARRAYS, INT, INT, INT, INT, COLUMN), cache=True)
def lend(arrays: Arrays, of_class: int, engine: int, group: int, first: int, out: Array) -> int:
    """Lease the first free slots of a class, as many as `out` has room; returns how many."""
    rows, words, _, lists, _, _ = arrays
    count = 0
    while count < len(out):
        row = lists[of_class * NUM_LISTS, HEAD]
        if row == NONE:
            break
        move(rows, lists, row, LEASED)
        rows[row, NAME] = engine
        rows[row, KEY] = group
        words[row, GENERATION] = first + count
        out[count] = row
        count += 1
    return count


@njit(INT(ROWS, TABLE, INT, INT, COLUMN), cache=True)
def scan(rows: Array, slabs: Array, pages: int, namespace: int, out: Array) -> int:
    """Rows of the chunks in a node's slabs, of one namespace unless it is -1; returns how many."""
    count = 0
    for slab in range(len(slabs)):
        base = slabs[slab, BASE]
        if base < 0:
            continue
        for row in range(base, base + pages // slabs[slab, STRIDE]):
            if rows[row, STATE] >= HELD and (
                namespace < 0 or rows[row, NAME] >> LENGTH_BITS == namespace
            ):
                out[count] = row
                count += 1
    return count
