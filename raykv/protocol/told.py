"""Circuit breakers as they cross processes: in reports, exchanges and status."""

from __future__ import annotations

import msgspec

MAX_ROWS = 16
"""Breakers in one report: the sums count them all."""

MAX_REASON = 120
"""Characters of a reason."""


OWN_NODE = "own node"
"""How a worker's line to its NodeActor is called in reports."""


class BreakerReport(msgspec.Struct, frozen=True, array_like=True):
    """Columns of breakers that are not closed, at most `MAX_ROWS`, then sums since the start.

    `peers` says who is left alone: "scheduler", "node:<node id>" or, for an engine, its own node,
    for copies or for fetches. `states` are "open" or "half-open", `failures` those in a row,
    `seconds` how long the breaker has not been closed. `opened` counts closed breakers that opened,
    `failed` calls that failed, `refused` calls that were not made because a breaker was open.
    """

    peers: list[str] = []
    states: list[str] = []
    failures: list[int] = []
    seconds: list[float] = []
    reasons: list[str] = []
    opened: int = 0
    failed: int = 0
    refused: int = 0
