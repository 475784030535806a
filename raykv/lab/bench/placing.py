"""How the policy "kv" has placed requests, read off Ray's metrics: they lag by seconds."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter

import ray

METRIC = "ray_raykv_routed_requests"
SCRAPE_S = 5.0
_OUTCOME = re.compile(r'outcome="([^"]*)"')


def outcomes() -> Counter[str]:
    """Requests by outcome, over all nodes of this process's cluster."""
    found: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"]:
            address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with urllib.request.urlopen(address, timeout=SCRAPE_S) as answer:
                found += counted(answer.read().decode())
    return found


def counted(exposition: str) -> Counter[str]:
    """Requests by outcome in one scrape."""
    found: Counter[str] = Counter()
    for line in exposition.splitlines():
        outcome = _OUTCOME.search(line)
        if line.startswith(METRIC) and outcome is not None:
            found[outcome[1]] += int(float(line.rsplit(" ", 1)[1]))
    return found
