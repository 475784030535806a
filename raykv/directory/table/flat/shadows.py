"""The duel of `table/duel.py`, compiled: all shadows of a class are one list of sampled names.

Entries are in no order. What is searched in them is searched from end to end: there are few, and
few names are sampled of a large pool.
"""

from __future__ import annotations

import numpy as np
from numba import types

from raykv.directory.table import duel, worth
from raykv.directory.table.duel import (
    BY_FIND,
    BY_USE,
    BY_WORTH,
    DUEL_HALF_LIFE,
    LEAST_POINTS,
    MARGIN,
    MOST_SAMPLED,
    PRIME,
)
from raykv.directory.table.flat.arrays import ARRAYS, INT, ROWS, Array, Arrays, inner
from raykv.directory.table.flat.layout import (
    CLASS,
    HOLDERS,
    KEY,
    LEADS,
    LESSON_SCRATCH,
    MOST_HELD,
    NONE,
    NUM_IN_SHADOW,
    NUM_SHADOWED,
    ORDER,
    POINTS,
    ROOM,
    SAMPLE,
    SHADOW_FOUND,
    SHADOW_KIND,
    SHADOW_LAST,
    SHADOW_WORDS,
    SHADOWED,
    SHIFT,
    WORTHS,
)
from raykv.directory.table.worth import NUM_AGES, NUM_KINDS

_ALL = 1 << BY_USE | 1 << BY_FIND | 1 << BY_WORTH

_is_sampled = inner(types.boolean(INT, INT))(duel.is_sampled)
age_index = inner(INT(INT))(worth.age_index)
handicap = inner(INT(INT, INT))(worth.handicap)


@inner(INT(ROWS, INT))
def _sample_of(rows: Array, row: int) -> int:
    """The rest of a row's key: 2 ** 32 leaves a rest of 2."""
    sample = np.int64(0)
    for word in range(rows.shape[1] - 1, KEY - 1, -1):
        sample = 2 * sample + np.int64(rows[row, word])
        sample = (sample & PRIME) + (sample >> 31)
        if sample >= PRIME:
            sample -= PRIME
    return int(sample)


@inner(types.void(ARRAYS, INT, INT, INT))
def _take_out(arrays: Arrays, of_class: int, entry: int, holders: int) -> None:
    """Take a name out of some shadows; the last entry takes the place of an empty one."""
    shadows, classes = arrays.shadows, arrays.classes
    left = np.int64(shadows[entry, HOLDERS])
    for order in range(BY_WORTH + 1):
        if holders & left & (1 << order):
            classes[of_class, NUM_IN_SHADOW + order] -= 1
            left -= 1 << order
    shadows[entry, HOLDERS] = left
    if left == 0:
        classes[of_class, NUM_SHADOWED] -= 1
        last = of_class * SHADOWED + classes[of_class, NUM_SHADOWED]
        for word in range(SHADOW_WORDS):
            shadows[entry, word] = shadows[last, word]


@inner(types.void(ARRAYS, INT, INT, INT, INT))
def _give_up_oldest(arrays: Arrays, of_class: int, now: int, order: int, time: int) -> None:
    """In the shadow of an order, by a column that has a time."""
    shadows = arrays.shadows
    first = of_class * SHADOWED
    oldest, oldest_age = first, np.int64(-1)
    for entry in range(first, first + arrays.classes[of_class, NUM_SHADOWED]):
        age = (now - np.int64(shadows[entry, time])) & NONE
        if age > oldest_age and shadows[entry, HOLDERS] & (1 << order):
            oldest, oldest_age = entry, age
    _take_out(arrays, of_class, oldest, 1 << order)


@inner(types.void(ARRAYS, INT, INT))
def _give_up_by_worth(arrays: Arrays, of_class: int, now: int) -> None:
    shadows, lessons = arrays.shadows, arrays.lessons
    # The oldest of each kind.
    ages = lessons[of_class, LESSON_SCRATCH:]
    entries = ages[NUM_KINDS:]
    ages[:NUM_KINDS] = -1
    first = of_class * SHADOWED
    for entry in range(first, first + arrays.classes[of_class, NUM_SHADOWED]):
        age = (now - np.int64(shadows[entry, SHADOW_LAST])) & NONE
        kind = np.int64(shadows[entry, SHADOW_KIND])
        if age > ages[kind] and shadows[entry, HOLDERS] & (1 << BY_WORTH):
            ages[kind], entries[kind] = age, entry
    best, best_worth = -1, 0.0
    for number in range(NUM_KINDS):
        if ages[number] >= 0:
            index = WORTHS + number * NUM_AGES + age_index(int(ages[number]))
            its_worth = lessons[of_class, index]
            if (
                best < 0
                or its_worth < best_worth
                or (its_worth == best_worth and ages[number] > ages[best])
            ):
                best, best_worth = number, its_worth
    _take_out(arrays, of_class, int(entries[best]), 1 << BY_WORTH)


@inner(types.void(ARRAYS, INT))
def _thin_out(arrays: Arrays, of_class: int) -> None:
    """Half of the sample is enough."""
    classes = arrays.classes
    classes[of_class, SHIFT] += 1
    first = of_class * SHADOWED
    for entry in range(first + classes[of_class, NUM_SHADOWED] - 1, first - 1, -1):
        if not _is_sampled(np.int64(arrays.shadows[entry, SAMPLE]), classes[of_class, SHIFT]):
            _take_out(arrays, of_class, entry, _ALL)


@inner(types.void(ARRAYS, INT, INT, INT))
def note_use(arrays: Arrays, row: int, kind: int, now: int) -> None:
    """A row's chunk came, or was used, and is of that kind from now on."""
    shadows, classes, lessons = arrays.shadows, arrays.classes, arrays.lessons
    of_class = np.int64(arrays.rows[row, CLASS])
    sample = _sample_of(arrays.rows, row)
    if not _is_sampled(sample, classes[of_class, SHIFT]):
        return
    first, found = of_class * SHADOWED, now - handicap(kind, classes[of_class, ROOM])
    for entry in range(first, first + classes[of_class, NUM_SHADOWED]):
        if shadows[entry, SAMPLE] == sample:
            holders = np.int64(shadows[entry, HOLDERS])
            for order in (BY_FIND, BY_WORTH):
                lead = (holders >> order & 1) - (holders >> BY_USE & 1)
                lessons[of_class, LEADS + order] += lead
                lessons[of_class, POINTS + order] += abs(lead)
            if holders >> BY_FIND & 1:
                found = now
            _take_out(arrays, of_class, entry, _ALL)
            break
    if classes[of_class, ROOM]:
        room = max(classes[of_class, ROOM] >> classes[of_class, SHIFT], 1)
        while classes[of_class, NUM_IN_SHADOW + BY_USE] >= room:
            _give_up_oldest(arrays, of_class, now, BY_USE, SHADOW_LAST)
        while classes[of_class, NUM_IN_SHADOW + BY_FIND] >= room:
            _give_up_oldest(arrays, of_class, now, BY_FIND, SHADOW_FOUND)
        while classes[of_class, NUM_IN_SHADOW + BY_WORTH] >= room:
            _give_up_by_worth(arrays, of_class, now)
    entry = first + classes[of_class, NUM_SHADOWED]
    shadows[entry, SAMPLE] = sample
    shadows[entry, SHADOW_LAST] = np.uint32(now & NONE)
    shadows[entry, SHADOW_FOUND] = np.uint32(found & NONE)
    shadows[entry, SHADOW_KIND] = kind
    shadows[entry, HOLDERS] = _ALL
    classes[of_class, NUM_SHADOWED] += 1
    for order in range(BY_WORTH + 1):
        classes[of_class, NUM_IN_SHADOW + order] += 1
    while classes[of_class, NUM_IN_SHADOW + BY_USE] > MOST_SAMPLED:
        _thin_out(arrays, of_class)


@inner(types.void(ARRAYS, INT, INT, INT))
def judge(arrays: Arrays, of_class: int, passed: int, num_held: int) -> None:
    """See `Duel.judge`."""
    classes, lessons = arrays.classes, arrays.lessons[of_class]
    factor = 0.5 ** (passed / (DUEL_HALF_LIFE * num_held))
    lessons[ORDER], most = BY_USE, 0.0
    for order in (BY_FIND, BY_WORTH):
        lessons[LEADS + order] *= factor
        lessons[POINTS + order] *= factor
        points, lead = max(lessons[POINTS + order], LEAST_POINTS), lessons[LEADS + order]
        least = max(MARGIN * points, points**0.5) if order == BY_WORTH else 0.0
        if lead > max(least, most):
            lessons[ORDER], most = order, lead
    if classes[of_class, MOST_HELD]:
        classes[of_class, ROOM] = classes[of_class, MOST_HELD]
        classes[of_class, MOST_HELD] = 0
        while classes[of_class, ROOM] >> classes[of_class, SHIFT] > MOST_SAMPLED:
            _thin_out(arrays, of_class)
