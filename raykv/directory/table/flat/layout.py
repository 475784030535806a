"""Where things are in the arrays of the flat table.

A row is one slot, whatever its state, in 32-bit words: 24 of them with a key of vLLM's length.

    word   0-1         2    3     4      5         6     7     8
           GENERATION  PIN  SLOT  CLASS  PREVIOUS  NEXT  TWIN  STATE
    word   9     10      11       12    13    14    15-23
           LAST  STORED  TOUCHED  HITS  OWNER NAME  KEY

What a row has learned of a chunk stays there until another chunk comes, so that an evicted one can
be read out afterwards.
"""

from __future__ import annotations

from raykv.directory.table.duel import MOST_SAMPLED
from raykv.directory.table.worth import NUM_AGES, NUM_KINDS, NUM_QUEUES, SCRATCH

NONE = 0xFFFFFFFF
"""Instead of a row number: there is none."""

# Words of 64 bits in a row.
GENERATION = 0
"""Of the chunk or the lease; of a free slot: the lowest that may be stored there."""

# Words of 32 bits in a row.
PIN = 2
"""Until when a chunk is not evicted, in ticks of the host's clock."""
SLOT = 3
CLASS = 4
PREVIOUS = 5
NEXT = 6
"""Neighbours in the list of the slot's state and class."""
TWIN = 7
"""The next row that has the same key, on another node."""
STATE = 8
LAST = 9
"""When the chunk was used last, in uses of its class, modulo 2 ** 32."""
STORED, TOUCHED = 10, 11
"""When a chunk came, and when it was used last, in ticks."""
HITS = 12
"""How often it has been used since it came."""
OWNER = 13
"""Number of the tenant that a chunk belongs to, or what is stored at a lease will; 0: none. Of a
free slot it means nothing.
"""
NAME = 14
"""Number of the namespace and length of the key; of a lease: number of the engine. A key of vLLM's
length, which is 9 words, fills its row: keys that must be filled up take twice as long.
"""
KEY = 15
"""The key's bytes, filled up with zeros; of a lease: the KV group."""

LENGTH_BITS = 12
"""Bits of a name that have the key's length in bytes."""

# States; from FREE on a row is in a list, from RELEASED on it has a chunk.
GONE = 0
CLAIMED = 1
FREE = 2
LEASED = 3
RELEASED = 4
SPARE = 5
HELD = 6
"""The first of the policy's queues, each of which is a state; `lru` has no other."""

NUM_LISTS = HELD - FREE + NUM_QUEUES + 1
"""For each class: those of the states, and that of its ghosts."""
GHOSTS = NUM_LISTS - 1

# Columns of the lists, the classes and a node's slabs.
HEAD, TAIL, COUNT = 0, 1, 2
NODE, SLOT_BYTES, USED, NOW, LEARNED_AT, DUE_AT, CLOCK, WHOLE = 0, 1, 2, 3, 4, 5, 6, 7
"""When slots were wanted last, in ticks; the times of the policy, in uses; the time that it is, in
ticks, the same in all classes; and the class that has the free and the leased slots, which is
another one if this has the chunks of a tenant alone.
"""
SHIFT, ROOM, MOST_HELD, NUM_SHADOWED = 8, 9, 10, 11
NUM_IN_SHADOW = 12
"""Of the duel: its sample, the room in the pool as far as it is known, and the names in all
shadows; from the last one on, those in the shadow of each order.
"""
CLASS_COLUMNS = NUM_IN_SHADOW + 3
APART = CLASS_COLUMNS
"""The first of the columns that name, by tenant, the class of its chunks; there are none as long as
no tenant is set apart.
"""
BASE, SLAB_CLASS, STRIDE = 0, 1, 2
"""The first row of a slab (-1: it has no slot size), its class, and the pages of a slot."""

# Words of 32 bits in a ghost. Number 0 is no ghost: it heads the list of free ones and has their
# number.
HASH_LOW, HASH_HIGH = 0, 1
"""Hash of the key in its class."""
GHOST_LAST, GHOST_KIND = 2, 3
"""When it was used last, and the kind that it was of; NONE if the ghost is free."""
GHOST_PREVIOUS, GHOST_NEXT = 4, 5
"""Neighbours in its class's list, the oldest first."""
CHAIN = 6
"""The next ghost of the same bucket."""
GHOST_WORDS = 7

# Words of 32 bits in an entry of the shadows, and how many entries a class has.
SAMPLE, SHADOW_LAST, SHADOW_FOUND, SHADOW_KIND = 0, 1, 2, 3
"""The second time is the one that counts in the order by find."""
HOLDERS = 4
"""In which shadows the name is: a bit for each order."""
SHADOW_WORDS = 5
SHADOWED = 3 * MOST_SAMPLED + 3

# Columns of the lessons.
USES = 0
RETURNS = USES + NUM_KINDS
WORTHS = RETURNS + NUM_KINDS * NUM_AGES
LEADS = WORTHS + NUM_KINDS * NUM_AGES
POINTS = LEADS + 3
"""By order."""
ORDER, TAILS_ARE_RARE = POINTS + 3, POINTS + 4
LESSON_SCRATCH = POINTS + 5
LESSON_COLUMNS = LESSON_SCRATCH + SCRATCH

TICKS_PER_S = 16
"""So that 32 bits last for eight years."""

HASH_BITS = 31
MAX_LOAD = 0.8
"""Share of the index's places that may be taken."""
