"""Both tables of slots and chunks, for tests that must pass with either."""

from __future__ import annotations

import pytest

import raykv.core.manager
from raykv.core.dict_table import DictTable
from raykv.core.manager import BlockManager
from raykv.core.table import ChunkTable
from raykv.types import Epoch

TABLES = ("dict", "flat")


def open_table(kind: str, policy: str = "lru") -> ChunkTable:
    """An empty one. Numba is loaded when a flat one is first wanted, as in the product."""
    if kind == "dict":
        return DictTable(policy)
    from raykv.directory.flat_table import FlatTable

    return FlatTable(policy)


def default_table() -> ChunkTable:
    """The one that a block manager has which is given none."""
    return BlockManager(Epoch(1))._table


def use_table(patches: pytest.MonkeyPatch, kind: str) -> None:
    """Give that kind to block managers which are given none."""
    patches.setattr(raykv.core.manager, "DictTable", lambda policy: open_table(kind, policy))
