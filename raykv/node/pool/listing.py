"""A node's numbered account of what it has: what engines and the directory believe of it.

See `raykv.protocol.listing` for what readers get of it.

Invariants:
1. Numbers rise; one of another life says nothing.
2. A name that has changed since a reader's number is among its next changes, or the reader is told
   to begin anew.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from raykv.base.ids import Key, Namespace
from raykv.protocol.listing import Reason

MOST_CHANGES = 32_768
"""Changes that are kept. A reader that is further behind begins anew."""

MOST_UNREAD = 1024
"""How far a reader may fall behind while nothing of its namespace changes."""


class ListedStay(Protocol):
    """A stay of a chunk in RAM, or on the disk; `number` is of its last change."""

    namespace: Namespace
    key: Key
    number: int


class ListedChange(NamedTuple):
    """A record's name has changed."""

    record: ListedStay
    reason: Reason


class Listing:
    """See the module's docstring.

    Args:
        life: of the NodeActor; a later one is higher.
        most: changes that are kept.
    """

    def __init__(self, life: int, most: int = MOST_CHANGES) -> None:
        self.life = life
        self.number = 0
        self._changes: deque[tuple[ListedStay, Reason]] = deque(maxlen=most)

    def changed(self, record: ListedStay, reason: Reason) -> None:
        """The state of a record's name is another one now."""
        self.number += 1
        record.number = self.number
        self._changes.append((record, reason))

    def since(self, number: int, most: int) -> tuple[list[ListedChange], int] | None:
        """The changes of up to `most` names after a number, in order, and up to which number they
        go; None: some are not kept any more, or that number was never given.

        A name that has changed again among them is there once, with the latest reason.
        """
        missing = self.number - number
        if not 0 <= missing <= len(self._changes):
            return None
        # From its end: a reader is mostly near to it.
        newest = list(islice(reversed(self._changes), missing))
        found: dict[tuple[Namespace, Key], ListedChange] = {}
        for record, reason in reversed(newest):
            name = record.namespace, record.key
            if found.pop(name, None) is None and len(found) == most:
                break
            found[name] = ListedChange(record, reason)
            number += 1
        return list(found.values()), number

    def has_news(self, number: int, namespace: Namespace) -> bool:
        """Whether a reader of a namespace that is at a number must read on: names of its namespace
        have changed since, or very many others have.
        """
        missing = self.number - number
        if not 0 <= missing <= min(MOST_UNREAD, len(self._changes)):
            return True
        newest = islice(reversed(self._changes), missing)
        return any(record.namespace == namespace for record, _ in newest)
