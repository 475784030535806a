"""What a scheduler actor leaves to its next life, in the store of Ray's head node.

Calls wait for the head node as long as Ray does: only threads that nobody waits for, and people,
may make them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from raykv.cluster.names import BEQUESTS

LIFE = "life"
"""The name under which every life leaves its number."""


def put(name: str, value: bytes) -> None:
    """Leave something under a name."""
    _internal_kv_put(name.encode(), value, overwrite=True, namespace=BEQUESTS)


def delete(name: str) -> None:
    """Nothing is left under a name any more."""
    _internal_kv_del(name.encode(), namespace=BEQUESTS)


def entries() -> Iterator[tuple[str, bytes]]:
    """All that was left, by name."""
    for name in _internal_kv_list(b"", namespace=BEQUESTS):
        value = _internal_kv_get(name, namespace=BEQUESTS)
        if value is not None:
            yield name.decode(), value
