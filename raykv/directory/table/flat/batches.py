"""What is done to many chunks at once, compiled; see `raykv.directory.table.flat.kernels`."""

from __future__ import annotations

import numpy as np
from numba import types

from raykv.directory.table.flat import order
from raykv.directory.table.flat.arrays import (
    ARRAYS,
    COLUMN,
    INT,
    KEYS,
    ROWS,
    TABLE,
    Array,
    Arrays,
    inner,
    outer,
)
from raykv.directory.table.flat.kernels import (
    find,
    forget,
    give_up,
    hash_of,
    hash_of_row,
    hold,
    is_shared,
    look_ahead,
    look_ahead_of,
    place_from,
    use_again,
)
from raykv.directory.table.flat.layout import (
    APART,
    BASE,
    CLASS,
    CLOCK,
    FREE,
    GENERATION,
    HEAD,
    HITS,
    KEY,
    LEASED,
    LENGTH_BITS,
    NAME,
    NODE,
    NONE,
    NUM_LISTS,
    OWNER,
    PIN,
    RELEASED,
    SLOT,
    SLOT_BYTES,
    STATE,
    STRIDE,
    TOUCHED,
    TWIN,
    USED,
    WHOLE,
)
from raykv.directory.table.flat.lists import move
from raykv.directory.table.flat.prefetch import prefetch

AHEAD = 64
"""Keys of which all that is needed is fetched together: the length of all `candidates`."""


@outer(INT(TABLE, INT, INT))
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


@outer(types.UniTuple(INT, 3)(ARRAYS, KEYS, COLUMN, COLUMN, INT, INT, TABLE))
def ask(
    arrays: Arrays,
    keys: Array,
    names: Array,
    ranks: Array,
    most: int,
    until: int,
    out: Array,
) -> tuple[int, int, int]:
    """Find replicas, and pin them unless `until` is 0.

    `ranks` by node, above -NONE; the lowest ones are told. `out` gets columns: position of the key,
    number of the node among those told, slot, generation; then the positions of missing keys, and
    the nodes. The last one is scratch space. Returns how many rows, missing keys and nodes
    there are.
    """
    rows, words, index, classes = arrays.rows, arrays.words, arrays.places, arrays.classes
    count = num_missing = num_nodes = 0
    numbers = out[6]
    numbers[: len(ranks)] = -1
    for position in range(len(names)):
        ahead = position % AHEAD
        if ahead == 0:
            some = arrays.candidates[: min(AHEAD, len(names) - position)]
            look_ahead(rows, index, keys, names, position, some)
        place = place_from(rows, index, keys, position, names[position], arrays.candidates[ahead])
        if place < 0:
            out[4, num_missing] = position
            num_missing += 1
            continue
        first = (index[place] & NONE) - 1
        last_rank = -NONE
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
            if until > 0:
                rows[best, PIN] = max(np.int64(rows[best, PIN]), until)
                classes[of_class, USED] = max(classes[of_class, USED], until)
            out[0, count] = position
            out[1, count] = numbers[node]
            out[2, count] = rows[best, SLOT]
            out[3, count] = words[best, GENERATION]
            count += 1
    return count, num_missing, num_nodes


@outer(types.void(ARRAYS, KEYS, COLUMN, INT, INT))
def pin(arrays: Arrays, keys: Array, names: Array, node: int, until: int) -> None:
    """Pin chunks on a node."""
    rows, classes = arrays.rows, arrays.classes
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            rows[row, PIN] = max(np.int64(rows[row, PIN]), until)
            of_class = rows[row, CLASS]
            classes[of_class, USED] = max(classes[of_class, USED], until)


@outer(types.void(ARRAYS, KEYS, COLUMN, INT, INT))
def protect(arrays: Arrays, keys: Array, names: Array, node: int, until: int) -> None:
    """Set until when chunks on a node are not evicted."""
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            arrays.rows[row, PIN] = until


@outer(types.void(ARRAYS, KEYS, COLUMN, INT))
def touch(arrays: Arrays, keys: Array, names: Array, node: int) -> None:
    """Chunks on a node were used."""
    rows, classes = arrays.rows, arrays.classes
    for position in range(len(names)):
        if position % AHEAD == 0:
            some = arrays.candidates[: min(AHEAD, len(names) - position)]
            look_ahead(rows, arrays.places, keys, names, position, some)
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            use_again(arrays, row, len(names))
            rows[row, TOUCHED] = classes[rows[row, CLASS], CLOCK]
            if rows[row, HITS] < NONE:
                rows[row, HITS] += 1


@outer(types.void(ARRAYS, KEYS, COLUMN, INT))
def release(arrays: Arrays, keys: Array, names: Array, node: int) -> None:
    """Chunks on a node are the next to be given up."""
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0:
            give_up(arrays, row)
            move(arrays.rows, arrays.lists, row, RELEASED)


@outer(types.void(ARRAYS, COLUMN))
def mark_shared(arrays: Arrays, wanted: Array) -> None:
    """Replace rows of chunks by 1 where another node has the chunk too, by 0 where none has."""
    for number in range(len(wanted)):
        wanted[number] = is_shared(arrays, wanted[number])


@inner(types.void(ARRAYS, TABLE, INT, KEYS, TABLE, INT, INT))
def _look_ahead_to_store(
    arrays: Arrays, slabs: Array, pages: int, keys: Array, columns: Array, start: int, count: int
) -> None:
    """The slots of chunks, and what may be remembered of them, come into the cache."""
    rows = arrays.rows
    flat, width = rows.reshape(-1), rows.shape[1]
    for position in range(start, start + count):
        row = row_at(slabs, pages, columns[1, position])
        if row >= 0:
            prefetch(flat, row * width)
            prefetch(flat, row * width + width - 1)
    if len(arrays.lessons) != 0:
        for position in range(start, start + count):
            row = row_at(slabs, pages, columns[1, position])
            if row >= 0:
                hashed = hash_of(keys, position, columns[0, position])
                order.look_ahead(arrays, rows[row, CLASS], hashed)


@outer(INT(ARRAYS, TABLE, INT, KEYS, TABLE, INT, types.boolean))
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
    rows, words, index, classes = arrays.rows, arrays.words, arrays.places, arrays.classes
    num_others = 0
    for position in range(columns.shape[1]):
        if position % AHEAD == 0:
            some = arrays.candidates[: min(AHEAD, columns.shape[1] - position)]
            _look_ahead_to_store(arrays, slabs, pages, keys, columns, position, len(some))
            look_ahead(rows, index, keys, columns[0], position, some)
        name, slot = columns[0, position], columns[1, position]
        generation, slot_bytes = columns[2, position], columns[3, position]
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
            if rows[row, STATE] == FREE:
                rows[row, OWNER] = 0
            hold(arrays, row, keys, position, name, generation, columns.shape[1])
        else:
            columns[4, num_others] = position
            num_others += 1
    return num_others


@outer(types.void(ARRAYS, COLUMN))
def drop(arrays: Arrays, gone: Array) -> None:
    """Free the slots of chunks for later generations."""
    rows, words, index = arrays.rows, arrays.words, arrays.places
    for number, row in enumerate(gone):
        if number % AHEAD == 0:
            look_ahead_of(rows, index, gone[number : number + AHEAD])
        forget(arrays, row)
        words[row, GENERATION] += 1
        if arrays.classes.shape[1] > APART:
            rows[row, CLASS] = arrays.classes[rows[row, CLASS], WHOLE]
        move(rows, arrays.lists, row, FREE)


@outer(types.void(ARRAYS, COLUMN))
def forget_all(arrays: Arrays, gone: Array) -> None:
    """The chunks of rows are gone, and their slots are not free."""
    for row in gone:
        forget(arrays, row)


@outer(INT(ARRAYS, INT, INT, COLUMN, COLUMN))
def evict(arrays: Arrays, of_class: int, now: int, cursors: Array, out: Array) -> int:
    """Free slots of a class, as many as `out` has room for their rows; returns how many."""
    order.begin(arrays, of_class, cursors)
    count = order.following(arrays, of_class, now, cursors, out)
    for number, row in enumerate(out[:count]):
        if number % AHEAD == 0 and len(arrays.lessons) != 0:
            for other in out[number : min(number + AHEAD, count)]:
                order.look_ahead(arrays, of_class, hash_of_row(arrays.rows, other))
        give_up(arrays, row)
    drop(arrays, out[:count])
    return count


@outer(INT(ARRAYS, KEYS, COLUMN, INT, INT, COLUMN))
def evict_keys(arrays: Arrays, keys: Array, names: Array, node: int, now: int, out: Array) -> int:
    """Free the slots of chunks on a node that are not pinned after `now`; their rows come into
    `out`. Returns how many.
    """
    count = 0
    for position in range(len(names)):
        row = find(arrays, keys, position, names[position], node)
        if row >= 0 and arrays.rows[row, PIN] <= now:
            give_up(arrays, row)
            out[count] = row
            drop(arrays, out[count : count + 1])
            count += 1
    return count


@outer(INT(ARRAYS, INT, INT, INT, INT, COLUMN))
def lend(arrays: Arrays, of_class: int, engine: int, group: int, first: int, out: Array) -> int:
    """Lease the first free slots of a class, as many as `out` has room; returns how many."""
    rows, words, lists = arrays.rows, arrays.words, arrays.lists
    count = 0
    while count < len(out):
        row = lists[of_class * NUM_LISTS, HEAD]
        if row == NONE:
            break
        move(rows, lists, row, LEASED)
        rows[row, NAME] = engine
        rows[row, KEY] = group
        rows[row, OWNER] = 0
        words[row, GENERATION] = first + count
        out[count] = row
        count += 1
    return count


@outer(INT(ARRAYS, TABLE, INT, TABLE, COLUMN))
def own(arrays: Arrays, slabs: Array, pages: int, columns: Array, out: Array) -> int:
    """Give owners to what has none: chunks and leases that are in slots at their generations.

    `columns`: slot, generation, owner. Rows of chunks that must be filed again come into `out`;
    returns how many.
    """
    rows, classes = arrays.rows, arrays.classes
    is_apart = classes.shape[1] > APART
    count = 0
    for position in range(columns.shape[1]):
        row = row_at(slabs, pages, columns[0, position])
        if row < 0 or arrays.words[row, GENERATION] != columns[1, position]:
            continue
        state, owner = rows[row, STATE], columns[2, position]
        if state < LEASED or rows[row, OWNER] != 0:
            continue
        rows[row, OWNER] = owner
        of_class = rows[row, CLASS]
        if state != LEASED and is_apart and classes[of_class, APART + owner] != of_class:
            out[count] = row
            count += 1
    return count


@outer(types.void(ROWS, TABLE, INT, COLUMN))
def count_owned(rows: Array, slabs: Array, pages: int, out: Array) -> None:
    """Add up the bytes of chunks, by owner, in pages."""
    for slab in range(len(slabs)):
        base, stride = slabs[slab, BASE], slabs[slab, STRIDE]
        if base >= 0:
            for row in range(base, base + pages // stride):
                if rows[row, STATE] >= RELEASED:
                    out[rows[row, OWNER]] += stride


@outer(INT(ROWS, TABLE, INT, INT, COLUMN))
def scan(rows: Array, slabs: Array, pages: int, namespace: int, out: Array) -> int:
    """Rows of the chunks in a node's slabs, of one namespace unless it is -1; returns how many."""
    count = 0
    for slab in range(len(slabs)):
        base = slabs[slab, BASE]
        if base < 0:
            continue
        for row in range(base, base + pages // slabs[slab, STRIDE]):
            if rows[row, STATE] >= RELEASED and (
                namespace < 0 or rows[row, NAME] >> LENGTH_BITS == namespace
            ):
                out[count] = row
                count += 1
    return count
