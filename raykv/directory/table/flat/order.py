"""In which order chunks are given up, compiled: `lru`, or `worth` as `table/worth.py` has it.

A class's queues are lists of its rows. Where there are no lessons, the order is that of LRU: the
first queue is the only one, and nothing is learned or remembered.

Ghosts of all classes share an arena. Each is in the list of its class, from least to most recently
evicted, and in the chain of a bucket.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from raykv.directory.table import worth
from raykv.directory.table.duel import BY_FIND, BY_WORTH
from raykv.directory.table.flat.arrays import (
    ARRAYS,
    COLUMN,
    HASH,
    INT,
    ROWS,
    Array,
    Arrays,
    inner,
    outer,
)
from raykv.directory.table.flat.layout import (
    CHAIN,
    CLAIMED,
    CLASS,
    COUNT,
    DUE_AT,
    FREE,
    GHOST_KIND,
    GHOST_LAST,
    GHOST_NEXT,
    GHOST_PREVIOUS,
    GHOSTS,
    HASH_BITS,
    HASH_HIGH,
    HASH_LOW,
    HEAD,
    HELD,
    LAST,
    LEADS,
    LEARNED_AT,
    LESSON_SCRATCH,
    MOST_HELD,
    NEXT,
    NONE,
    NOW,
    NUM_LISTS,
    ORDER,
    PIN,
    RELEASED,
    RETURNS,
    SPARE,
    STATE,
    TAIL,
    TAILS_ARE_RARE,
    USES,
    WORTHS,
)
from raykv.directory.table.flat.lists import move
from raykv.directory.table.flat.prefetch import prefetch
from raykv.directory.table.flat.shadows import age_index, handicap, judge, note_use
from raykv.directory.table.worth import (
    FEWEST_USES,
    GHOSTS_PER_NAME,
    LESSONS,
    MOST_GHOSTS,
    NUM_AGES,
    NUM_KINDS,
    NUM_QUEUES,
    NUM_SIZES,
)
from raykv.directory.table.worth import TAIL as TAIL_KIND

NUM_CURSORS = HELD - RELEASED + NUM_QUEUES
"""One for the released, one for the spares, and one for each queue."""

_FIRST_QUEUE = HELD - RELEASED

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_REST = np.uint64(64 - HASH_BITS)

_FLOATS = types.float64[::1]
_size_index = inner(INT(INT))(worth.size_index)
_kind_of = inner(INT(INT))(worth.kind_of)
_next_kind = inner(INT(INT, INT))(worth.next_kind)
_is_found = inner(types.boolean(INT))(worth.is_found)
_are_rare = inner(types.boolean(_FLOATS, _FLOATS, INT))(worth.are_rare)
_learn_ages = inner(types.void(*[_FLOATS] * 3, INT, INT, INT))(worth.learn_ages)
_learn_size = inner(types.void(*[_FLOATS] * 3, INT, INT))(worth.learn_size)
_learn_kind = inner(types.void(*[_FLOATS] * 4, INT))(worth.learn_kind)


# Ghosts


@inner(HASH(HASH, INT))
def _in_class(hashed: Any, of_class: int) -> Any:
    """Hash of a key in its class."""
    mixed = (hashed ^ np.uint64(of_class)) * _FACTOR
    return mixed ^ (mixed >> _HALF)


@inner(INT(COLUMN, HASH))
def _bucket(buckets: Array, hashed: Any) -> int:
    return (int(hashed >> _REST) * len(buckets)) >> HASH_BITS


@inner(HASH(ROWS, INT))
def _hash_of(ghosts: Array, number: int) -> Any:
    return (np.uint64(ghosts[number, HASH_HIGH]) << _HALF) | np.uint64(ghosts[number, HASH_LOW])


@inner(types.void(ARRAYS, INT, INT))
def _end_ghost(arrays: Arrays, of_class: int, number: int) -> None:
    """Take a ghost out of its list and its bucket."""
    ghosts, buckets, lists = arrays.ghosts, arrays.buckets, arrays.lists
    which = of_class * NUM_LISTS + GHOSTS
    before, after = ghosts[number, GHOST_PREVIOUS], ghosts[number, GHOST_NEXT]
    if before == 0:
        lists[which, HEAD] = after
    else:
        ghosts[before, GHOST_NEXT] = after
    if after == 0:
        lists[which, TAIL] = before
    else:
        ghosts[after, GHOST_PREVIOUS] = before
    lists[which, COUNT] -= 1
    bucket = _bucket(buckets, _hash_of(ghosts, number))
    other = buckets[bucket]
    if other == number:
        buckets[bucket] = ghosts[number, CHAIN]
    else:
        while ghosts[other, CHAIN] != number:
            other = np.int64(ghosts[other, CHAIN])
        ghosts[other, CHAIN] = ghosts[number, CHAIN]
    ghosts[number, GHOST_KIND] = NONE
    ghosts[number, GHOST_NEXT] = ghosts[0, GHOST_NEXT]
    ghosts[0, GHOST_NEXT] = number
    ghosts[0, GHOST_PREVIOUS] += 1


@inner(INT(ARRAYS, HASH))
def _ghost_of(arrays: Arrays, hashed: Any) -> int:
    """The ghost of a key in its class, or 0. Two keys of one hash share it: a harmless mistake."""
    ghosts, buckets = arrays.ghosts, arrays.buckets
    number = buckets[_bucket(buckets, hashed)]
    while number != 0 and _hash_of(ghosts, number) != hashed:
        number = np.int64(ghosts[number, CHAIN])
    return int(number)


@inner(types.void(ARRAYS, INT, HASH, INT, INT))
def _add_ghost(arrays: Arrays, of_class: int, hashed: Any, last: int, kind: int) -> None:
    """Remember a name; there is room, see `Rows.room_for_ghosts`."""
    ghosts, buckets, lists = arrays.ghosts, arrays.buckets, arrays.lists
    number = np.int64(ghosts[0, GHOST_NEXT])
    assert number != 0, "no room was reserved"
    ghosts[0, GHOST_NEXT] = ghosts[number, GHOST_NEXT]
    ghosts[0, GHOST_PREVIOUS] -= 1
    ghosts[number, HASH_LOW] = np.uint32(hashed & np.uint64(NONE))
    ghosts[number, HASH_HIGH] = np.uint32(hashed >> _HALF)
    ghosts[number, GHOST_LAST] = last
    ghosts[number, GHOST_KIND] = kind
    which = of_class * NUM_LISTS + GHOSTS
    tail = lists[which, TAIL]
    ghosts[number, GHOST_PREVIOUS] = tail
    ghosts[number, GHOST_NEXT] = 0
    if tail == 0:
        lists[which, HEAD] = number
    else:
        ghosts[tail, GHOST_NEXT] = number
    lists[which, TAIL] = number
    lists[which, COUNT] += 1
    bucket = _bucket(buckets, hashed)
    ghosts[number, CHAIN] = buckets[bucket]
    buckets[bucket] = number


@outer(types.void(ARRAYS, INT))
def end_ghosts(arrays: Arrays, of_class: int) -> None:
    """Forget all ghosts of a class."""
    which = of_class * NUM_LISTS + GHOSTS
    while arrays.lists[which, HEAD] != 0:
        _end_ghost(arrays, of_class, arrays.lists[which, HEAD])


@outer(types.void(ROWS, COLUMN, INT))
def grow_ghosts(ghosts: Array, buckets: Array, old: int) -> None:
    """Take in ghosts from number `old` on, which are new, and buckets, which are new and empty."""
    for number in range(old, len(ghosts)):
        ghosts[number, GHOST_KIND] = NONE
        ghosts[number, GHOST_NEXT] = ghosts[0, GHOST_NEXT]
        ghosts[0, GHOST_NEXT] = number
        ghosts[0, GHOST_PREVIOUS] += 1
    for number in range(1, old):
        if ghosts[number, GHOST_KIND] != NONE:
            bucket = _bucket(buckets, _hash_of(ghosts, number))
            ghosts[number, CHAIN] = buckets[bucket]
            buckets[bucket] = number


@inner(types.void(ARRAYS, INT, HASH))
def look_ahead(arrays: Arrays, of_class: int, hashed: Any) -> None:
    """The bucket of a key that is about to come or go comes into the cache."""
    prefetch(arrays.buckets, _bucket(arrays.buckets, _in_class(hashed, of_class)))


# Queues


@inner(INT(ARRAYS, INT))
def _num_held(arrays: Arrays, of_class: int) -> int:
    """How many chunks a class has in its queues."""
    first = of_class * NUM_LISTS + HELD - FREE
    count = 0
    for queue in range(NUM_QUEUES):
        count += arrays.lists[first + queue, COUNT]
    return count


@inner(types.void(ARRAYS, INT))
def _learn(arrays: Arrays, of_class: int) -> None:
    """See `Worth._learn`."""
    classes, learned = arrays.classes[of_class], arrays.lessons[of_class]
    now, num_held = classes[NOW], _num_held(arrays, of_class)
    passed = now - classes[LEARNED_AT]
    judge(arrays, of_class, passed, num_held)
    uses, returns = learned[USES:RETURNS], learned[RETURNS:WORTHS]
    worths, scratch = learned[WORTHS:LEADS], learned[LESSON_SCRATCH:]
    _learn_ages(uses, returns, scratch, passed, now, num_held)
    for first in range(NUM_SIZES + 1):
        step = NUM_KINDS if first == TAIL_KIND else NUM_SIZES
        _learn_size(uses, returns, scratch, first, step)
        for kind in range(first, NUM_KINDS, step):
            _learn_kind(uses, returns, worths, scratch, kind)
    learned[TAILS_ARE_RARE] = _are_rare(uses, returns, TAIL_KIND)
    classes[LEARNED_AT] = now
    classes[DUE_AT] = now + max(FEWEST_USES, num_held // LESSONS)


@inner(types.void(ARRAYS, INT, INT))
def _enter(arrays: Arrays, row: int, queue: int) -> None:
    """A chunk is used now, and in that queue from now on."""
    rows, classes = arrays.rows, arrays.classes
    move(rows, arrays.lists, row, HELD + queue)
    of_class = np.int64(rows[row, CLASS])
    now = classes[of_class, NOW]
    rows[row, LAST] = np.uint32(now & NONE)
    kind = _kind_of(queue)
    note_use(arrays, row, kind, now)
    classes[of_class, NOW] = now + 1
    arrays.lessons[of_class, USES + kind] += 1
    if now + 1 >= max(classes[of_class, DUE_AT], FEWEST_USES):
        _learn(arrays, of_class)


@inner(INT(ARRAYS, INT, INT, INT, INT))
def _use_again(arrays: Arrays, row: int, kind: int, last: int, together: int) -> int:
    """See `Worth._use_again`."""
    of_class = np.int64(arrays.rows[row, CLASS])
    age = (arrays.classes[of_class, NOW] - last) & NONE
    arrays.lessons[of_class, RETURNS + kind * NUM_AGES + age_index(age)] += 1
    return int(_next_kind(kind, _size_index(together)))


@inner(types.void(ARRAYS, INT, HASH, INT, types.boolean))
def add(arrays: Arrays, row: int, hashed: Any, together: int, is_tail: bool) -> None:
    """A row, in whatever state, has a chunk whose key has that hash, and nobody else has it.

    The key is in the row. For the others see `EvictionPolicy.add`.
    """
    if len(arrays.lessons) == 0:
        move(arrays.rows, arrays.lists, row, HELD)
        return
    of_class = np.int64(arrays.rows[row, CLASS])
    number = _ghost_of(arrays, _in_class(hashed, of_class))
    if number == 0:
        is_first = is_tail and together > 1
        _enter(arrays, row, TAIL_KIND if is_first else 1 + _size_index(together))
        return
    last, kind = arrays.ghosts[number, GHOST_LAST], arrays.ghosts[number, GHOST_KIND]
    _end_ghost(arrays, of_class, number)
    following = _use_again(arrays, row, np.int64(kind), np.int64(last), together)
    _enter(arrays, row, following + NUM_QUEUES - NUM_KINDS)


@inner(types.void(ARRAYS, INT, INT))
def touch(arrays: Arrays, row: int, together: int) -> None:
    """A chunk was used, with so many `together`."""
    state = np.int64(arrays.rows[row, STATE])
    if state == SPARE or len(arrays.lessons) == 0:
        move(arrays.rows, arrays.lists, row, state)
    else:
        last = np.int64(arrays.rows[row, LAST])
        _enter(arrays, row, _use_again(arrays, row, _kind_of(state - HELD), last, together))


@inner(types.void(ARRAYS, INT, HASH))
def evict(arrays: Arrays, row: int, hashed: Any) -> None:
    """A chunk is given up, or becomes a spare: its row is CLAIMED, its past may be remembered."""
    state = np.int64(arrays.rows[row, STATE])
    move(arrays.rows, arrays.lists, row, CLAIMED)
    if state < HELD or len(arrays.lessons) == 0:
        return
    of_class = np.int64(arrays.rows[row, CLASS])
    last = np.int64(arrays.rows[row, LAST])
    _add_ghost(arrays, of_class, _in_class(hashed, of_class), last, _kind_of(state - HELD))
    num_held = _num_held(arrays, of_class)
    classes = arrays.classes
    classes[of_class, MOST_HELD] = max(classes[of_class, MOST_HELD], num_held + 1)
    most = min(MOST_GHOSTS, GHOSTS_PER_NAME * max(num_held, 1))
    which = of_class * NUM_LISTS + GHOSTS
    while arrays.lists[which, COUNT] > most:
        _end_ghost(arrays, of_class, arrays.lists[which, HEAD])


# Order


@outer(types.void(ARRAYS, INT, COLUMN))
def begin(arrays: Arrays, of_class: int, cursors: Array) -> None:
    """Cursors before the first chunk of a class in eviction order."""
    for number in range(NUM_CURSORS):
        cursors[number] = arrays.lists[of_class * NUM_LISTS + RELEASED - FREE + number, HEAD]


@inner(INT(ROWS, INT, COLUMN, INT, COLUMN, INT))
def _take(rows: Array, now: int, cursors: Array, cursor: int, out: Array, count: int) -> int:
    """Move a cursor on; its row comes to the others in `out` unless it is pinned."""
    row = cursors[cursor]
    cursors[cursor] = rows[row, NEXT]
    if rows[row, PIN] > now:
        return count
    out[count] = row
    return count + 1


@inner(types.void(ARRAYS, INT, INT, INT, COLUMN, _FLOATS))
def _look_at_first(
    arrays: Arrays, of_class: int, num_held: int, queue: int, cursors: Array, ranks: Array
) -> None:
    """Worth and age of the chunk that a queue gives up next; see `Worth._rank`."""
    row, learned = cursors[_FIRST_QUEUE + queue], arrays.lessons[of_class]
    if row == NONE:
        return
    age = (arrays.classes[of_class, NOW] - arrays.rows[row, LAST]) & NONE
    its_worth = 0.0
    if learned[ORDER] == BY_WORTH:
        its_worth = learned[WORTHS + _kind_of(queue) * NUM_AGES + age_index(age)]
    elif queue == TAIL_KIND and learned[TAILS_ARE_RARE]:
        its_worth = -1.0
    elif learned[ORDER] == BY_FIND and not _is_found(queue):
        age += handicap(_kind_of(queue), num_held)
    ranks[queue], ranks[NUM_QUEUES + queue] = its_worth, age


@outer(INT(ARRAYS, INT, INT, COLUMN, COLUMN))
def following(arrays: Arrays, of_class: int, now: int, cursors: Array, out: Array) -> int:
    """The next rows in eviction order but those that are pinned after `now`, as many as `out` has
    room for; returns how many. First come the released, then the spares, then the chunk that is
    worth the least.
    """
    rows = arrays.rows
    count = 0
    # Without lessons, the first queue has all others.
    num_lists = _FIRST_QUEUE + (len(arrays.lessons) == 0)
    for cursor in range(num_lists):
        while count < len(out) and cursors[cursor] != NONE:
            count = _take(rows, now, cursors, cursor, out, count)
    if len(arrays.lessons) == 0:
        return count
    ranks, num_held = arrays.lessons[of_class, LESSON_SCRATCH:], _num_held(arrays, of_class)
    for queue in range(NUM_QUEUES):
        _look_at_first(arrays, of_class, num_held, queue, cursors, ranks)
    while count < len(out):
        best = -1
        for queue in range(NUM_QUEUES):
            if cursors[_FIRST_QUEUE + queue] != NONE and (
                best < 0
                or ranks[queue] < ranks[best]
                or (
                    ranks[queue] == ranks[best]
                    and ranks[NUM_QUEUES + queue] > ranks[NUM_QUEUES + best]
                )
            ):
                best = queue
        if best < 0:
            break
        count = _take(rows, now, cursors, _FIRST_QUEUE + best, out, count)
        _look_at_first(arrays, of_class, num_held, best, cursors, ranks)
    return count
