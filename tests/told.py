"""What a failing test wants to know of a request that found nothing."""

from __future__ import annotations

import time

from raykv.client.cluster import Cluster

HEARTBEATS_S = 2.5


def told_after(cluster: Cluster, before: int) -> str:
    """What the engines say of requests after number `before`, and of themselves a while later."""
    time.sleep(HEARTBEATS_S)
    status = cluster.status()
    found = cluster.requests(before).found
    told = [*found, *(engine.counters for engine in status.engines), *status.nodes]
    return "\n".join(map(str, told))
