"""The doubly linked lists that rows are in, by class and state, compiled."""

from __future__ import annotations

from numba import types

from raykv.directory.table.flat.arrays import (
    ARRAYS,
    COLUMN,
    INT,
    ROWS,
    TABLE,
    Array,
    Arrays,
    inner,
    outer,
)
from raykv.directory.table.flat.layout import (
    CLASS,
    COUNT,
    FREE,
    GENERATION,
    GONE,
    HEAD,
    NEXT,
    NONE,
    NUM_LISTS,
    PREVIOUS,
    SLOT,
    STATE,
    TAIL,
)


@inner(types.void(ROWS, TABLE, INT))
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


@outer(types.void(ROWS, TABLE, INT, INT))
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


@outer(INT(ROWS, INT, COLUMN))
def walk(rows: Array, row: int, out: Array) -> int:
    """The rows of a list from `row` on, as many as `out` has room for; returns how many."""
    count = 0
    while row != NONE and count < len(out):
        out[count] = row
        count += 1
        row = int(rows[row, NEXT])
    return count


@outer(types.void(ARRAYS, INT, INT, INT, INT, INT, INT))
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
    rows, words, lists = arrays.rows, arrays.words, arrays.lists
    for number in range(count):
        row = base + number
        rows[row, STATE] = GONE
        rows[row, CLASS] = of_class
        rows[row, SLOT] = slot + number * stride
        words[row, GENERATION] = lowest
        move(rows, lists, row, FREE)
