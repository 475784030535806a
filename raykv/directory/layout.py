"""Where things are in the arrays of the flat table.

A row is one slot, whatever its state, in 32-bit words. What a row has been told of a chunk stays
there until another chunk comes, so that an evicted one can be read out afterwards.
"""

from __future__ import annotations

NONE = 0xFFFFFFFF
"""Instead of a row number: there is none."""

# Words of 64 bits in a row.
GENERATION = 0
"""Of the chunk or the lease; of a free slot: the lowest that may be stored there."""
PIN = 1
"""Until when a chunk is not evicted: the bits of a float that is not negative, in its order."""

# Words of 32 bits in a row.
SLOT = 4
CLASS = 5
PREVIOUS = 6
NEXT = 7
"""Neighbours in the list of the slot's state and class."""
TWIN = 8
"""The next row that has the same key, on another node."""
STATE = 9
NAME = 10
"""Number of the namespace and length of the key; of a lease: number of the engine."""
KEY = 11
"""The key's bytes, filled up with zeros; of a lease: the KV group."""

LENGTH_BITS = 12
"""Of a key's length in bytes, in the name."""

# States; from FREE on a row is in a list.
GONE = 0
CLAIMED = 1
FREE = 2
LEASED = 3
HELD = 4
SPARE = 5
NUM_LISTS = 4
"""For each class."""

# Columns of the lists, the classes and a node's slabs.
HEAD, TAIL, COUNT = 0, 1, 2
NODE, SLOT_BYTES, USED = 0, 1, 2
BASE, SLAB_CLASS, STRIDE = 0, 1, 2
"""The first row of a slab (-1: it has no slot size), its class, and the pages of a slot."""

HASH_BITS = 31
MAX_LOAD = 0.8
"""Share of the index's places that may be taken."""
