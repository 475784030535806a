"""The arrays of the flat table, and their types for numba.

All that is compiled imports this module first, which sets where it is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, types

from raykv.directory.table.flat import cache

numba.config.CACHE_DIR = str(cache.folder())

Array = np.ndarray[Any, Any]


class Arrays(NamedTuple):
    """All of them; good until something grows.

    `rows`, a row for each slot, and `words`, the same memory in 64-bit words; `places`, the index:
    an open-addressing table of hash and row number plus one of the first replica of each key;
    `lists`, heads and tails; `classes`, a node and a slot size each, and, once tenants are set
    apart, the class of each tenant's chunks; `counts`, chunks by node and namespace. Of the
    eviction policy `worth` only: `ghosts` and their hash chains, from `buckets` on, the `lessons`
    of each class, which has no rows for `lru`, and the `shadows`. `candidates` is scratch space.
    """

    rows: Array
    words: Array
    places: Array
    lists: Array
    classes: Array
    counts: Array
    ghosts: Array
    buckets: Array
    lessons: Array
    shadows: Array
    candidates: Array


INT = types.int64
HASH = types.uint64
ROWS = types.uint32[:, ::1]
TABLE = types.int64[:, ::1]
COLUMN = types.int64[::1]
LESSONS = types.float64[:, ::1]
ARRAYS = types.NamedTuple(
    (ROWS, TABLE, COLUMN, TABLE, TABLE, TABLE, ROWS, COLUMN, LESSONS, ROWS, COLUMN), Arrays
)
KEYS = types.Array(types.uint32, 2, "C", readonly=True)


def outer(signature: Any) -> Any:
    """Compile a function that Python calls.

    Compiled functions count no references to the arrays, which took longer than all that they do;
    so they can't make any. Python holds those that they are given.
    """
    return njit(signature, cache=True, no_cfunc_wrapper=True, _nrt=False)


def inner(signature: Any) -> Any:
    """Compile a function that only compiled ones call: the wrapper that Python would need takes as
    long to make as the function itself.
    """
    return njit(signature, cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True, _nrt=False)
