"""`routing_simulation`: routers in front of a simulated cluster, at several loads.

See `tests.bench.simulation`. All routers send the same requests at the same times to equal
replicas, which all have RayKV's pools and disks: only the choice of the replica differs. "kv" is
RayKV's planner; "prefix" is Ray's prefix-aware router as it comes, "prefix, 5" the same with an
`imbalanced_threshold` of 5, without which it never looks at loads.

100 % load is the rate at which all replicas compute all the time, if each prompt finds whatever the
cluster's whole memory would hold of it. A case names the load; in "churn" one replica dies, one
drains and two join. `kv` should have the lowest mean and 99th
percentile of the time to the first token, and compute the fewest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raykv.lab.bench.report import Options, Result
from tests.bench.simulation.cluster import CHURN, SimCluster, Simulated
from tests.bench.simulation.hardware import Hardware
from tests.bench.simulation.routers import (
    SimDirectory,
    SimKVRouter,
    SimPowerOfTwo,
    SimPrefixTree,
    SimRoundRobin,
    SimRouter,
)
from tests.bench.simulation.workload import Workload, agents, from_trace

OURS = "kv"
ROUTERS = ("round robin", "power of two", "prefix", "prefix, 5", OURS)

REPLICAS, REQUESTS_PER_REPLICA = 16, 300
QUICK_REPLICAS, QUICK_REQUESTS = 2, 20
LOADS, CHURN_LOAD = (50, 70, 80, 95), 80
"""In per cent."""

DELAY_S = 0.005
SEED = 1

MEAN, P99, COMPUTED = "mean, s", "p99, s", "computed, tokens"


def add(result: Result, case: str, found: Mapping[str, Simulated]) -> None:
    """Rows and verdicts of one case."""
    measured = {
        router: {MEAN: each.mean_s, P99: each.p99_s, COMPUTED: float(each.computed)}
        for router, each in found.items()
    }
    for router, values in measured.items():
        for unit, value in values.items():
            result.add(case, router, unit, value)
    for unit, ours in measured.pop(OURS).items():
        best = min(values[unit] for values in measured.values())
        result.at_most(1.0, ours / best, f"{case}: {unit}, at most that of any other")


def run(options: Options) -> Result:
    """See the module's docstring; `--trace` names a trace with times."""
    result = Result("routing_simulation", is_wide=True)
    hardware = Hardware()
    replicas = QUICK_REPLICAS if options.quick else REPLICAS
    num_requests = replicas * (QUICK_REQUESTS if options.quick else REQUESTS_PER_REPLICA)
    if options.trace is None:
        whole = agents(num_requests, replicas, SEED)
    else:
        whole = from_trace(options.trace, num_requests, replicas, SEED, hardware.max_tokens)
    result.notes.append(
        f"{replicas} replicas: {len(whole.requests):,} requests, {whole.prompt_tokens:,} tokens"
    )
    for load in (CHURN_LOAD,) if options.quick else LOADS:
        bed = Bench(whole.at_load(load / 100, replicas, hardware), replicas, hardware)
        add(result, f"{load} %", bed.all())
    bed = Bench(whole.at_load(CHURN_LOAD / 100, replicas, hardware), replicas, hardware)
    add(result, f"{CHURN_LOAD} %, churn", bed.all(churns=True))
    return result


@dataclass(frozen=True)
class Bench:
    """A workload and a cluster for it, made anew for each router."""

    workload: Workload
    replicas: int
    hardware: Hardware
    delay_s: float = DELAY_S
    """Of the directory's answers."""

    def all(self, *, churns: bool = False) -> dict[str, Simulated]:
        """Run it with each router."""
        return {router: self.one(router, churns=churns) for router in ROUTERS}

    def one(self, router: str, *, churns: bool = False) -> Simulated:
        """Run it with one of `ROUTERS`."""
        changes = CHURN if churns else ()
        cluster = SimCluster(self.workload, self.replicas, self.hardware, self.delay_s, changes)
        return cluster.run(self._router(router, cluster))

    def _router(self, name: str, cluster: SimCluster) -> SimRouter:
        if name == "round robin":
            return SimRoundRobin()
        if name == "power of two":
            return SimPowerOfTwo(SEED)
        if name == "prefix":
            return SimPrefixTree(SEED)
        if name == "prefix, 5":
            return SimPrefixTree(SEED, imbalance=5)
        assert name == OURS, name
        directory = SimDirectory(cluster.net.find, self.delay_s, lambda: cluster.now)
        return SimKVRouter(self.workload.requests, directory, lambda: cluster.now)
