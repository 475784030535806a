"""What many messages have: kinds of fields, keys and numbers in columns, and their checks.

A message is looked at as a whole before anything of it is carried out, so that a refused one
changes nothing.
"""

from __future__ import annotations

import struct
from abc import ABCMeta
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Sized
from enum import IntEnum
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Annotated, TypeVar, overload

import msgspec

from raykv.base import ids
from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES, SLOT_ALIGNMENT, Key, Namespace, Refusal, Stamp

N = TypeVar("N", bound=Hashable)
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

MAX_KEYS = 2048
"""Keys in one page: with their columns they stay under Ray's 100 KiB inline limit (a key of 36
bytes, and some numbers: about 50 bytes a key)."""

MAX_ROWS = 1 << 17
"""Rows of any column; honest ones have a few thousand."""

MAX_NAME = 4096
"""Characters of an id, a namespace or a name for people."""

MAX_SLOTS = 1 << 32
MAX_POOL_BYTES = MAX_SLOTS * SLOT_ALIGNMENT
MAX_GROUPS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 20
MAX_NUMBER = (1 << 63) - 1

MAX_PRIORITY = 9
"""The highest that a pin may have which gives way; the lowest is 1."""

REFUSALS = frozenset(int(refusal) for refusal in Refusal)

Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Named = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
KeyBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Life = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Counts = Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)]
Group = Annotated[int, msgspec.Meta(ge=0, lt=1 << 8 * ids.GROUP_BYTES)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
SlotSizes = Annotated[dict[Group, Count], msgspec.Meta(max_length=MAX_GROUPS)]
"""Of the chunks of each KV group, in bytes."""

NUMBER_BYTES = 8

SPLIT_TOGETHER = 64
"""Keys that are cut out of a blob at once, which takes a third of the time."""


class _SequenceMeta(msgspec.StructMeta, ABCMeta):
    """Of structs that are sequences."""


class _Column(
    Sequence[T_co],
    msgspec.Struct,
    frozen=True,
    array_like=True,
    eq=False,
    gc=False,
    metaclass=_SequenceMeta,
):
    """Equal to any sequence of the same."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Keys(_Column[bytes], frozen=True):
    """A column of keys as one blob: an object for each is made only on demand.

    `lengths` has a byte for the length of each key, or one byte in all if they have the same
    length, as the keys of an engine do.

    Raises:
        ValueError: the blob is not that long. From `receive` that is a MessageError.
    """

    raw: bytes = b""
    lengths: bytes = b""

    def __post_init__(self) -> None:
        num_bytes, width = len(self.raw), self.width
        if width is None:
            needed = sum(self.lengths)
            if num_bytes != needed:
                raise ValueError(f"keys in {num_bytes} bytes that should have {needed} in all")
        elif not width or num_bytes % width:
            raise ValueError(f"keys of {width} bytes each in {num_bytes} bytes")

    @staticmethod
    def of(keys: Iterable[bytes]) -> Keys:
        """These keys, each of 255 bytes at most; a column as it is."""
        if isinstance(keys, Keys):
            return keys
        keys = list(keys)
        lengths = set(map(len, keys))
        return Keys(b"".join(keys), bytes(lengths if len(lengths) == 1 else map(len, keys)))

    @staticmethod
    def joined(columns: Sequence[Keys]) -> Keys:
        """All keys of columns, in order."""
        lengths = {column.lengths for column in columns if column}
        if len(lengths) > 1 or any(len(each) > 1 for each in lengths):
            return Keys.of(chain.from_iterable(columns))
        return Keys(b"".join([column.raw for column in columns]), *lengths)

    @property
    def width(self) -> int | None:
        """The length of all keys; None where that differs, or there is none."""
        return self.lengths[0] if len(self.lengths) == 1 else None

    def __len__(self) -> int:
        lengths = self.lengths
        count = len(lengths)
        return len(self.raw) // lengths[0] if count == 1 else count

    def __bool__(self) -> bool:
        return bool(self.raw)

    def __iter__(self) -> Iterator[bytes]:
        raw, width = self.raw, self.width
        if not raw:
            return iter(())
        if width is None:
            return (raw[start:end] for start, end in pairwise(accumulate(self.lengths, initial=0)))
        whole = len(raw) - len(raw) % (width * SPLIT_TOGETHER)
        if not whole:
            return chain.from_iterable(_cutter(width, 1).iter_unpack(raw))
        blocks = _cutter(width, SPLIT_TOGETHER).iter_unpack(memoryview(raw)[:whole])
        rest = _cutter(width, 1).iter_unpack(memoryview(raw)[whole:])
        return chain(chain.from_iterable(blocks), chain.from_iterable(rest))

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Keys: ...

    def __getitem__(self, at: int | slice) -> bytes | Keys:
        width = self.width
        if isinstance(at, slice):
            if width is None or at.step not in (None, 1):
                some = list(self)[at]
                return Keys.of(some) if width is None else Keys(b"".join(some), self.lengths)
            start, end, _ = at.indices(len(self))
            return Keys(self.raw[start * width : end * width], self.lengths)
        if width is None:
            return list(self)[at]
        number = range(len(self))[at]
        return self.raw[number * width : (number + 1) * width]


@cache
def _cutter(width: int, count: int) -> struct.Struct:
    return struct.Struct(f"{width}s" * count)


class Numbers(_Column[int], frozen=True):
    """A column of numbers as one blob, of 64 bits each in the order of bytes that x86 and ARM have.

    Raises:
        ValueError: the blob is not that long. From `receive` that is a MessageError.
    """

    raw: bytes = b""

    def __post_init__(self) -> None:
        if len(self.raw) % NUMBER_BYTES:
            raise ValueError(f"numbers of {NUMBER_BYTES} bytes each in {len(self.raw)} bytes")

    @staticmethod
    def of(numbers: Iterable[int]) -> Numbers:
        """These numbers, each of 64 bits at most; a column as it is."""
        return numbers if isinstance(numbers, Numbers) else Numbers(array("q", numbers).tobytes())

    def __add__(self, others: Iterable[int]) -> Numbers:
        return Numbers(self.raw + Numbers.of(others).raw)

    def __len__(self) -> int:
        return len(self.raw) // NUMBER_BYTES

    def span(self) -> tuple[int, int]:
        """The least and the greatest of them, where there is one."""
        # Mostly all are equal, which is seen in a tenth of the time.
        are_equal = self.raw == self.raw[:NUMBER_BYTES] * len(self)
        some = array("q", self.raw[:NUMBER_BYTES] if are_equal else self.raw)
        return min(some), max(some)

    def __iter__(self) -> Iterator[int]:
        return iter(array("q", self.raw))

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Numbers: ...

    def __getitem__(self, at: int | slice) -> int | Numbers:
        found = array("q", self.raw)[at]
        return found if isinstance(found, int) else Numbers(found.tobytes())


class Texts(_Column[str], frozen=True):
    """A column of texts with few different ones: `numbers` point into `distinct`."""

    distinct: list[str] = []
    numbers: Numbers = Numbers()

    def __post_init__(self) -> None:
        check_names("a text", self.distinct)
        check_numbers("numbers of texts", self.numbers, 0, len(self.distinct) - 1)

    @staticmethod
    def of(texts: Iterable[str]) -> Texts:
        """These texts."""
        return Texts(*_numbered(texts))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[str]:
        return map(self.distinct.__getitem__, self.numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Texts: ...

    def __getitem__(self, at: int | slice) -> str | Texts:
        if isinstance(at, slice):
            return Texts(self.distinct, self.numbers[at])
        return self.distinct[self.numbers[at]]


def _numbered(column: Iterable[N]) -> tuple[list[N], Numbers]:
    """What differs in a column, and the column as positions in that."""
    numbers: dict[N, int] = {}
    index = Numbers.of(numbers.setdefault(each, len(numbers)) for each in column)
    return list(numbers), index


class SourceKind(IntEnum):
    """What a source reads its chunks from."""

    POOL = 0
    DISK = 1
    IMPORT = 2


class Source(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where chunks are read from: a node's pool, its disk, or an import's actor.

    `node_id` of an import is the import's own id.
    """

    node_id: Text
    kind: SourceKind = SourceKind.POOL

    @property
    def is_disk(self) -> bool:
        return self.kind is SourceKind.DISK


class SourceRows(msgspec.Struct, frozen=True, array_like=True):
    """Where the chunks of some keys are read from: a row for each source of a key, the one to be
    tried first before the others. `key_index` has numbers of keys, `source_index` points into
    `sources`.
    """

    sources: Annotated[list[Source], msgspec.Meta(max_length=MAX_ROWS)] = []
    key_index: Numbers = Numbers()
    source_index: Numbers = Numbers()

    def __post_init__(self) -> None:
        check_rows("sources of keys", self.key_index, self.source_index)
        check_numbers("numbers of sources", self.source_index, 0, len(self.sources) - 1)

    @staticmethod
    def of(sources: Iterable[Iterable[Source]]) -> SourceRows:
        """The sources of each key."""
        rows = [(at, source) for at, some in enumerate(sources) for source in some]
        places, index = _numbered(source for _, source in rows)
        return SourceRows(places, Numbers.of(at for at, _ in rows), index)

    def by_key(self, num_keys: int) -> dict[int, list[Source]]:
        """The sources of each key that has some, by its number.

        Raises:
            MessageError: a row is of a key beyond `num_keys`.
        """
        check_numbers("numbers of keys", self.key_index, 0, num_keys - 1)
        found: dict[int, list[Source]] = {}
        for at, source in zip(self.key_index, self.source_index, strict=True):
            found.setdefault(at, []).append(self.sources[source])
        return found


def require(condition: bool, what: str) -> None:
    """Refuse a message if a condition does not hold.

    Raises:
        MessageError: it does not.
    """
    if not condition:
        raise MessageError(f"invalid message: {what}")


def check_numbers(what: str, numbers: Collection[int], least: int, most: int) -> None:
    if numbers:
        low, high = numbers.span() if isinstance(numbers, Numbers) else (min(numbers), max(numbers))
        require(least <= low and high <= most, f"{what} from {low} to {high}")


def check_stamps(*stamps: Stamp) -> None:
    check_numbers("numbers of orders", [*chain.from_iterable(stamps)], 0, MAX_NUMBER)


def check_rows(what: str, first: Sized, *others: Sized, most: int = MAX_ROWS) -> None:
    """Refuse columns of different lengths, or of more than `most` rows."""
    count = len(first)
    require(count <= most, f"{count} {what}")
    for other in others:
        require(len(other) == count, f"{what}: columns of {count} and {len(other)} rows")


def is_told_name(name: str) -> bool:
    """Whether messages may have a name that users choose."""
    return len(name) <= MAX_NAME and name.isprintable()


def check_names(what: str, names: Iterable[str]) -> None:
    for name in names:
        require(len(name) <= MAX_NAME, f"{what} of {len(name)} characters")


def valid(rows: Iterable[R], check: Callable[[R], None]) -> list[R]:
    """The rows that a check does not refuse: a bad one costs no other."""
    found = []
    for row in rows:
        try:
            check(row)
        except MessageError:
            continue
        found.append(row)
    return found


def check_column(keys: Keys, *columns: Sized, most: int = MAX_KEYS) -> None:
    """Refuse impossible keys, too many of them, or columns of other lengths."""
    check_rows("keys", keys, *columns, most=most)
    check_numbers("lengths of keys", keys.lengths, 1, MAX_KEY_BYTES)


class NamedKeys(msgspec.Struct, frozen=True, array_like=True):
    """Names of chunks in columns."""

    namespaces: Texts = Texts()
    keys: Keys = Keys()

    def __post_init__(self) -> None:
        check_column(self.keys, self.namespaces, most=2 * MAX_KEYS)

    @staticmethod
    def of(names: Iterable[tuple[Namespace, Key]]) -> NamedKeys:
        """These names."""
        names = list(names)
        return NamedKeys(Texts.of(name for name, _ in names), Keys.of(key for _, key in names))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Namespace, Key]]:
        for namespace, key in zip(self.namespaces, self.keys, strict=True):
            yield Namespace(namespace), Key(key)
