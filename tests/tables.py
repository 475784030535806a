"""Both tables of slots and chunks, for tests that must pass with either."""

from __future__ import annotations

import pytest

import raykv.directory.manager
from raykv.base.ids import Epoch
from raykv.directory.manager import BlockManager
from raykv.directory.table.dicts import DictTable
from raykv.directory.table.protocol import ChunkTable

TABLES = ("dict", "flat")


def open_table(kind: str, policy: str = "lru") -> ChunkTable:
    """An empty one. Numba is loaded when a flat one is first wanted, as in the product."""
    if kind == "dict":
        return DictTable(policy)
    from raykv.directory.table.flat.flat_table import FlatTable

    return FlatTable(policy)


def default_table() -> ChunkTable:
    """The one that a block manager has which is given none."""
    return BlockManager(Epoch(1))._table


def use_table(patches: pytest.MonkeyPatch, kind: str) -> None:
    """Give that kind to block managers which are given none."""
    patches.setattr(raykv.directory.manager, "DictTable", lambda policy: open_table(kind, policy))
