"""The duel of `table/duel.py`, compiled: both shadows of a class are one list of sampled names.

Entries are in no order. What is searched in them is searched from end to end: there are few, and
few names are sampled of a large pool.
"""

from __future__ import annotations

import numpy as np
from numba import types

from raykv.directory.table import duel, worth
from raykv.directory.table.duel import (
    DUEL_HALF_LIFE,
    LEAST_POINTS,
    MARGIN,
    MOST_SAMPLED,
    PRIME,
)
from raykv.directory.table.flat.arrays import ARRAYS, INT, ROWS, Array, Arrays, inner
from raykv.directory.table.flat.layout import (
    BY_USE,
    BY_WORTH,
    CLASS,
    HOLDERS,
    IS_FOR_WORTH,
    KEY,
    LEAD,
    LESSON_SCRATCH,
    MOST_HELD,
    NONE,
    NUM_BY_USE,
    NUM_BY_WORTH,
    NUM_POINTS,
    NUM_SHADOWED,
    ROOM,
    SAMPLE,
    SHADOW_LAST,
    SHADOW_QUEUE,
    SHADOW_WORDS,
    SHADOWED,
    SHIFT,
    WORTHS,
)
from raykv.directory.table.worth import NUM_AGES, NUM_QUEUES

_is_sampled = inner(types.boolean(INT, INT))(duel.is_sampled)
age_index = inner(INT(INT))(worth.age_index)


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
    """Take a name out of one or both shadows; the last entry takes the place of an empty one."""
    shadows, classes = arrays.shadows, arrays.classes
    left = np.int64(shadows[entry, HOLDERS])
    for holder, column in ((BY_USE, NUM_BY_USE), (BY_WORTH, NUM_BY_WORTH)):
        if holders & holder and left & holder:
            classes[of_class, column] -= 1
            left -= holder
    shadows[entry, HOLDERS] = left
    if left == 0:
        classes[of_class, NUM_SHADOWED] -= 1
        last = of_class * SHADOWED + classes[of_class, NUM_SHADOWED]
        for word in range(SHADOW_WORDS):
            shadows[entry, word] = shadows[last, word]


@inner(types.void(ARRAYS, INT, INT))
def _give_up_by_use(arrays: Arrays, of_class: int, now: int) -> None:
    shadows = arrays.shadows
    first = of_class * SHADOWED
    oldest, oldest_age = first, np.int64(-1)
    for entry in range(first, first + arrays.classes[of_class, NUM_SHADOWED]):
        age = (now - np.int64(shadows[entry, SHADOW_LAST])) & NONE
        if age > oldest_age and shadows[entry, HOLDERS] & BY_USE:
            oldest, oldest_age = entry, age
    _take_out(arrays, of_class, oldest, BY_USE)


@inner(types.void(ARRAYS, INT, INT))
def _give_up_by_worth(arrays: Arrays, of_class: int, now: int) -> None:
    shadows, lessons = arrays.shadows, arrays.lessons
    # The oldest of each queue.
    ages = lessons[of_class, LESSON_SCRATCH:]
    entries = ages[NUM_QUEUES:]
    ages[:NUM_QUEUES] = -1
    first = of_class * SHADOWED
    for entry in range(first, first + arrays.classes[of_class, NUM_SHADOWED]):
        age = (now - np.int64(shadows[entry, SHADOW_LAST])) & NONE
        queue = np.int64(shadows[entry, SHADOW_QUEUE])
        if age > ages[queue] and shadows[entry, HOLDERS] & BY_WORTH:
            ages[queue], entries[queue] = age, entry
    best, best_worth = -1, 0.0
    for number in range(NUM_QUEUES):
        if ages[number] >= 0:
            index = WORTHS + number * NUM_AGES + age_index(int(ages[number]))
            its_worth = lessons[of_class, index]
            if (
                best < 0
                or its_worth < best_worth
                or (its_worth == best_worth and ages[number] > ages[best])
            ):
                best, best_worth = number, its_worth
    _take_out(arrays, of_class, int(entries[best]), BY_WORTH)


@inner(types.void(ARRAYS, INT))
def _thin_out(arrays: Arrays, of_class: int) -> None:
    """Half of the sample is enough."""
    classes = arrays.classes
    classes[of_class, SHIFT] += 1
    first = of_class * SHADOWED
    for entry in range(first + classes[of_class, NUM_SHADOWED] - 1, first - 1, -1):
        if not _is_sampled(np.int64(arrays.shadows[entry, SAMPLE]), classes[of_class, SHIFT]):
            _take_out(arrays, of_class, entry, BY_USE | BY_WORTH)


@inner(types.void(ARRAYS, INT, INT, INT))
def note_use(arrays: Arrays, row: int, queue: int, now: int) -> None:
    """A row's chunk came, or was used, and is in that queue from now on."""
    shadows, classes, lessons = arrays.shadows, arrays.classes, arrays.lessons
    of_class = np.int64(arrays.rows[row, CLASS])
    sample = _sample_of(arrays.rows, row)
    if not _is_sampled(sample, classes[of_class, SHIFT]):
        return
    first = of_class * SHADOWED
    for entry in range(first, first + classes[of_class, NUM_SHADOWED]):
        if shadows[entry, SAMPLE] == sample:
            holders = np.int64(shadows[entry, HOLDERS])
            if holders != BY_USE | BY_WORTH:
                lessons[of_class, LEAD] += 1.0 if holders == BY_WORTH else -1.0
                lessons[of_class, NUM_POINTS] += 1
            _take_out(arrays, of_class, entry, BY_USE | BY_WORTH)
            break
    if classes[of_class, ROOM]:
        room = max(classes[of_class, ROOM] >> classes[of_class, SHIFT], 1)
        while classes[of_class, NUM_BY_USE] >= room:
            _give_up_by_use(arrays, of_class, now)
        while classes[of_class, NUM_BY_WORTH] >= room:
            _give_up_by_worth(arrays, of_class, now)
    entry = first + classes[of_class, NUM_SHADOWED]
    shadows[entry, SAMPLE] = sample
    shadows[entry, SHADOW_LAST] = np.uint32(now & NONE)
    shadows[entry, SHADOW_QUEUE] = queue
    shadows[entry, HOLDERS] = BY_USE | BY_WORTH
    for column in (NUM_SHADOWED, NUM_BY_USE, NUM_BY_WORTH):
        classes[of_class, column] += 1
    while classes[of_class, NUM_BY_USE] > MOST_SAMPLED:
        _thin_out(arrays, of_class)


@inner(types.void(ARRAYS, INT, INT, INT))
def judge(arrays: Arrays, of_class: int, passed: int, num_held: int) -> None:
    """See `Duel.judge`."""
    classes, lessons = arrays.classes, arrays.lessons[of_class]
    factor = 0.5 ** (passed / (DUEL_HALF_LIFE * num_held))
    lessons[LEAD] *= factor
    lessons[NUM_POINTS] *= factor
    points = max(lessons[NUM_POINTS], LEAST_POINTS)
    lessons[IS_FOR_WORTH] = lessons[LEAD] > max(MARGIN * points, points**0.5)
    if classes[of_class, MOST_HELD]:
        classes[of_class, ROOM] = classes[of_class, MOST_HELD]
        classes[of_class, MOST_HELD] = 0
        while classes[of_class, ROOM] >> classes[of_class, SHIFT] > MOST_SAMPLED:
            _thin_out(arrays, of_class)
