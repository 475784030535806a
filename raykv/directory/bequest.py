"""What a scheduler actor leaves to its next life, in the store of Ray's head node.

Calls wait for the head node as long as Ray does: only threads that nobody waits for, and people,
may make them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from raykv.cluster.names import BEQUESTS

LIFE = "life"
"""The name under which every life leaves a `KeptLife`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name, and what was left under it."""

    name: str
    value: bytes


def leave(name: str, value: bytes | None) -> None:
    """Leave something under a name; None: nothing any more."""
    if value is None:
        _internal_kv_del(name.encode(), namespace=BEQUESTS)
    else:
        _internal_kv_put(name.encode(), value, overwrite=True, namespace=BEQUESTS)


def entries() -> Iterator[Entry]:
    """All that was left."""
    for name in _internal_kv_list(b"", namespace=BEQUESTS):
        value = _internal_kv_get(name, namespace=BEQUESTS)
        if value is not None:
            yield Entry(name.decode(), value)


def forget_all(but: Collection[str]) -> None:
    """Nothing else is left to anybody."""
    for name in _internal_kv_list(b"", namespace=BEQUESTS):
        if name.decode() not in but:
            _internal_kv_del(name, namespace=BEQUESTS)
