"""Which table the scheduler actor gets.

Importing this is cheap: numba comes with the first table. In the process of a vLLM CPU worker it
must never be loaded.
"""

from __future__ import annotations

import logging

from raykv.directory.table.dicts import DictTable
from raykv.directory.table.protocol import ChunkTable

logger = logging.getLogger(__name__)


def open_table(eviction_policy: str) -> ChunkTable:
    """An empty table: the flat one, if numba can compile it here."""
    try:
        from raykv.directory.table.flat.flat_table import FlatTable
    except Exception as error:  # noqa: BLE001 - whatever numba and its compiler raise
        logger.warning(
            "RayKV's directory runs without numba, ten times slower and larger: %s: %s",
            type(error).__name__,
            error,
        )
        return DictTable(eviction_policy)
    return FlatTable(eviction_policy)
