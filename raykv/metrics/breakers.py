"""Breakers as metrics: labels distinguish peers by kind only, since nodes come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from raykv.metrics.table import numbers
from raykv.protocol.measures import BreakerReport, MetricFamily

SCHEDULER, OWN_NODE, NODE = "scheduler", "own_node", "other_node"
STATES = ("open", "half_open")


def breaker_families(
    owners: Mapping[str, tuple[Iterable[BreakerReport], BreakerReport]],
) -> list[MetricFamily]:
    """Series by kind of owner, "node" or "engine": the open breakers of all owners of that kind,
    and a report of which only the sums since the start are looked at.
    """
    found: Counter[tuple[str, ...]] = Counter()
    for owner, (open_now, _) in owners.items():
        for kind in (SCHEDULER, OWN_NODE, NODE):
            found.update({(owner, kind, state): 0 for state in STATES})
        for report in open_now:
            for peer, state in zip(report.peers, report.states, strict=False):
                state = state.replace("-", "_")
                found[owner, _kind(peer), state if state in STATES else STATES[0]] += 1
    totals = {owner: total for owner, (_, total) in owners.items()}
    return [
        numbers("raykv_open_breakers", found),
        numbers(
            "raykv_breaker_openings_total", {(name,): each.opened for name, each in totals.items()}
        ),
        numbers(
            "raykv_breaker_failures_total", {(name,): each.failed for name, each in totals.items()}
        ),
        numbers(
            "raykv_breaker_refusals_total", {(name,): each.refused for name, each in totals.items()}
        ),
    ]


def _kind(peer: str) -> str:
    if peer.startswith("own node"):
        return OWN_NODE
    return SCHEDULER if peer == SCHEDULER else NODE
