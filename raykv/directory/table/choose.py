"""The fast table, for a scheduler actor that has begun with the one of dicts.

Importing this is cheap: numba comes with the first table. In the process of a vLLM CPU worker it
must never be loaded.
"""

from __future__ import annotations

import logging

from raykv.directory.table.protocol import ChunkTable

logger = logging.getLogger(__name__)


def fast_table(eviction_policy: str) -> ChunkTable | None:
    """An empty flat table; None if numba can't compile it here.

    Takes 0.4 s, and a quarter of a minute where nothing is compiled yet.
    """
    try:
        from raykv.directory.table.flat.flat_table import FlatTable
    except Exception as error:  # noqa: BLE001 - whatever numba and its compiler raise
        logger.warning(
            "RayKV's directory runs without numba, ten times slower and larger: %s: %s",
            type(error).__name__,
            error,
        )
        return None
    return FlatTable(eviction_policy)
