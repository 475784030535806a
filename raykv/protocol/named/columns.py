"""Columns of names, and the kinds of fields that messages about names have.

What a field may be is declared with it, so that a message that is received is sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from raykv.base.ids import MAX_KEY_BYTES, Key, Namespace
from raykv.protocol.columns import MAX_KEYS, MAX_NAME, MAX_NUMBER, Keys, Numbers

Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Named = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


def check_column(keys: Keys, *columns: object, most: int = MAX_KEYS) -> None:
    """Refuse keys that nobody has, too many of them, or columns of other lengths.

    Raises:
        ValueError: from `receive` that is a MessageError.
    """
    if len(keys) > most or any(len(each) != len(keys) for each in columns):  # type: ignore[arg-type]
        raise ValueError(f"columns of different lengths beside {len(keys)} keys")
    if keys.lengths and not 0 < min(keys.lengths) <= max(keys.lengths) <= MAX_KEY_BYTES:
        raise ValueError("a key of no or too many bytes")


def check_index(numbers: Iterable[int], names: list[str]) -> None:
    """Refuse numbers of names that are not there.

    Raises:
        ValueError: from `receive` that is a MessageError.
    """
    if any(len(name) > MAX_NAME for name in names):
        raise ValueError("a name of too many characters")
    if not all(0 <= at < len(names) for at in numbers):
        raise ValueError("a name that is not there")


class NamedKeys(msgspec.Struct, frozen=True, array_like=True):
    """Names of chunks in columns; `index` points into `namespaces`.

    Raises:
        ValueError: columns of different lengths, or a namespace that is not there.
    """

    namespaces: list[str] = []
    index: Numbers = Numbers()
    keys: Keys = Keys()

    def __post_init__(self) -> None:
        check_column(self.keys, self.index, most=2 * MAX_KEYS)
        check_index(self.index, self.namespaces)

    @staticmethod
    def of(names: Iterable[tuple[Namespace, Key]]) -> NamedKeys:
        """These names."""
        names = list(names)
        at = {each: number for number, each in enumerate(dict.fromkeys(n for n, _ in names))}
        return NamedKeys(
            list(at), Numbers.of(at[name] for name, _ in names), Keys.of(key for _, key in names)
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Namespace, Key]]:
        for at, key in zip(self.index, self.keys, strict=True):
            yield Namespace(self.namespaces[at]), Key(key)
