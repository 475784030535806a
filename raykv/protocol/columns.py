"""What many messages have: handles, leases and replicas in columns, and the checks of columns.

A message is looked at as a whole before anything of it is carried out, so that a refused one
changes nothing. All numbers that pass fit into the tables of `raykv/directory`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Sized
from enum import IntEnum
from itertools import islice
from typing import TypeVar, cast

import msgspec

from raykv.base.errors import MessageError
from raykv.base.ids import (
    MAX_GENERATION,
    MAX_KEY_BYTES,
    SLOT_ALIGNMENT,
    Epoch,
    Generation,
    Refusal,
    Slot,
)

N = TypeVar("N", bound=Hashable)

MAX_KEYS = 2048
"""Keys in one page of an exchange: with their columns they stay under Ray's 100 KiB inline limit
(36-byte key, slot, generation: about 50 bytes a key)."""

MAX_ROWS = 1 << 17
"""Rows of any column; honest ones have a few thousand."""

MAX_NAME = 4096
"""Characters of an id, a namespace or a name for people."""

MAX_SLOTS = 1 << 32
MAX_POOL_BYTES = MAX_SLOTS * SLOT_ALIGNMENT
MAX_SLABS = 1 << 20
MAX_GROUPS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 20
MAX_NUMBER = (1 << 63) - 1
REFUSALS = frozenset(int(refusal) for refusal in Refusal)


class Handles(msgspec.Struct, frozen=True, array_like=True):
    """Columns that name chunks at a generation; all have the same length."""

    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class Handle(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk is: a slot at a generation.

    It crosses no process: the rows of an answer become these. vLLM's scheduler waits for that, and
    a dataclass takes five times as long to make.
    """

    slot: Slot
    generation: Generation


def handles_of(slots: Iterable[int], generations: Iterable[int]) -> Iterator[Handle]:
    """Handles out of two columns of one length."""
    make = cast("Callable[[int, int], Handle]", Handle)
    return map(make, slots, generations)


class Leases(msgspec.Struct, frozen=True, array_like=True):
    """Columns of free slots that an engine may store into."""

    groups: list[int] = []
    slots: list[int] = []
    generations: list[int] = []


class SourceKind(IntEnum):
    """What a source reads its chunks from."""

    POOL = 0
    DISK = 1
    IMPORT = 2


class Source(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where chunks are read from: a node's pool, its disk, or an import's actor.

    `node_id` of an import is the import's own id.
    """

    node_id: str
    kind: SourceKind = SourceKind.POOL

    @property
    def is_disk(self) -> bool:
        return self.kind is SourceKind.DISK


class Replica(msgspec.Struct, frozen=True, gc=False):
    """A chunk at a source, in one life of its NodeActor.

    On a disk, `handle` has the chunk's place there for a slot. It crosses no process.
    """

    source: Source
    node_epoch: Epoch
    handle: Handle


class Replicas(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys of a question are: one row per replica, the best source of a key first.

    `key_index` points into the list of keys that was asked, `source_index` into `sources`, whose
    NodeActors have the epochs `node_epochs`. `pending` lists the keys that an engine is storing
    now. A key that is in neither is nowhere.
    """

    sources: list[Source] = []
    node_epochs: list[int] = []
    key_index: list[int] = []
    source_index: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    pending: list[int] = []

    def rows(self) -> Iterator[tuple[int, Replica]]:
        """The position of each replica's key, and the replica.

        Raises:
            IndexError: a row names a source that is not there.
            ValueError: the columns have different lengths.
        """
        rows = zip(self.key_index, self.source_index, self.slots, self.generations, strict=True)
        for position, at, slot, generation in rows:
            if at < 0:
                raise IndexError(f"source {at} of chunk {position}")
            handle = Handle(Slot(slot), Generation(generation))
            yield position, Replica(self.sources[at], Epoch(self.node_epochs[at]), handle)


class LostReplicas(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that a source said it does not have (any more)."""

    sources: list[Source] = []
    keys: list[bytes] = []
    generations: list[int] = []


def check_lost(lost: LostReplicas) -> None:
    check_rows("lost chunks", lost.keys, lost.sources, lost.generations)
    check_keys("lost keys", lost.keys)
    check_numbers("lost generations", lost.generations, 0, MAX_GENERATION)


def require(condition: bool, what: str) -> None:
    """Refuse a message if a condition does not hold.

    Raises:
        MessageError: it does not.
    """
    if not condition:
        raise MessageError(f"invalid message: {what}")


def check_numbers(what: str, numbers: Collection[int], least: int, most: int) -> None:
    if numbers:
        low, high = min(numbers), max(numbers)
        require(least <= low and high <= most, f"{what} from {low} to {high}")


def check_rows(what: str, first: Sized, *others: Sized) -> None:
    count = len(first)
    require(count <= MAX_ROWS, f"{count} {what}")
    for other in others:
        require(len(other) == count, f"{what}: columns of {count} and {len(other)} rows")


def check_keys(what: str, keys: Sequence[bytes]) -> None:
    check_rows(what, keys)
    check_numbers(f"lengths of {what}", set(map(len, keys)), 1, MAX_KEY_BYTES)


def check_names(what: str, names: Iterable[str]) -> None:
    for name in names:
        require(len(name) <= MAX_NAME, f"{what} of {len(name)} characters")


def check_places(what: str, slots: Sequence[int], generations: Sequence[int]) -> None:
    check_rows(what, slots, generations)
    check_numbers(f"slots of {what}", slots, 0, MAX_SLOTS - 1)
    check_numbers(f"generations of {what}", generations, 0, MAX_GENERATION)


def check_handles(what: str, handles: Handles) -> None:
    check_keys(f"keys of {what}", handles.keys)
    check_rows(what, handles.keys, handles.slots)
    check_places(what, handles.slots, handles.generations)


def check_leases(what: str, leases: Leases) -> None:
    check_rows(what, leases.groups, leases.slots)
    check_numbers(f"KV groups of {what}", leases.groups, 0, MAX_GROUPS - 1)
    check_places(what, leases.slots, leases.generations)


def check_sizes(sizes: set[int]) -> None:
    check_numbers("slot sizes", sizes, SLOT_ALIGNMENT, MAX_POOL_BYTES)
    require(not any(size % SLOT_ALIGNMENT for size in sizes), f"slot sizes {sizes}")


def numbered(names: list[N], column: Iterable[N]) -> list[int]:
    """A column as positions in `names`, to which the names that are new are added."""
    numbers = {name: number for number, name in enumerate(names)}
    index = [numbers.setdefault(name, len(numbers)) for name in column]
    names.extend(islice(numbers, len(names), None))
    return index
