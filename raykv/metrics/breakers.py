"""Breakers as metrics: labels distinguish peers by kind only, since nodes come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from raykv.metrics.table import numbers
from raykv.protocol.measures import BreakerReport, MetricFamily

SCHEDULER, OWN_NODE, NODE = "scheduler", "own_node", "other_node"
STATES = ("open", "half_open")


def breaker_families(
    owner: str, open_now: Iterable[BreakerReport], totals: BreakerReport
) -> list[MetricFamily]:
    """Series of one kind of owner.

    Args:
        owner: whose breakers these are, "node" or "engine".
        open_now: of all owners of that kind.
        totals: of which only the sums since the start are looked at.
    """
    found: Counter[tuple[str, ...]] = Counter(
        {(owner, kind, state): 0 for kind in (SCHEDULER, OWN_NODE, NODE) for state in STATES}
    )
    for report in open_now:
        for peer, state in zip(report.peers, report.states, strict=False):
            state = state.replace("-", "_")
            found[owner, _kind(peer), state if state in STATES else STATES[0]] += 1
    return [
        numbers("raykv_open_breakers", found),
        numbers("raykv_breaker_openings_total", {(owner,): totals.opened}),
        numbers("raykv_breaker_failures_total", {(owner,): totals.failed}),
        numbers("raykv_breaker_refusals_total", {(owner,): totals.refused}),
    ]


def _kind(peer: str) -> str:
    if peer.startswith("own node"):
        return OWN_NODE
    return SCHEDULER if peer == SCHEDULER else NODE
