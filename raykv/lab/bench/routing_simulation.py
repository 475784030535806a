"""`routing --simulate`: routers in front of a simulated cluster, at several loads.

See `raykv.lab.bench.simulation`. All routers send the same requests at the same times to equal
replicas, which all have RayKV's pools and disks: only the choice of the replica differs. "kv" is
RayKV's planner; "prefix" is Ray's prefix-aware router as it comes, "prefix, 5" the same with an
`imbalanced_threshold` of 5, without which it never looks at loads.

100 % load is the rate at which all replicas compute all the time, if each prompt finds whatever the
cluster's whole memory would hold of it. A case names replicas, load, and delay of the directory; in
"churn" one replica dies, one drains and two join. `kv` should have the lowest mean and 99th
percentile of the time to the first token, and compute the fewest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raykv.lab.bench.report import ClusterOptions, Options, Result, Row, Verdict, short
from raykv.lab.bench.simulation.cluster import CHURN, SimCluster, Simulated
from raykv.lab.bench.simulation.hardware import Hardware
from raykv.lab.bench.simulation.routers import (
    SimDirectory,
    SimKVRouter,
    SimPowerOfTwo,
    SimPrefixTree,
    SimRoundRobin,
    SimRouter,
)
from raykv.lab.bench.simulation.workload import Workload, agents, from_trace

OURS = "kv"
ROUTERS = ("round robin", "power of two", "prefix", "prefix, 5", OURS)

REQUESTS_PER_REPLICA = 300

MEASURES = {"mean": "s to the first token", "p99": "s", "computed": "tokens"}


@dataclass
class SimulationResult(Result):
    """Its table has a line for each router."""

    found: dict[str, Mapping[str, Simulated]] = field(default_factory=dict)

    def add(self, case: str, found: Mapping[str, Simulated]) -> None:
        """Rows and verdicts of one case."""
        self.found[case] = found
        for router, each in found.items():
            for measure, value in _measures(each).items():
                self.rows.append(Row(case, f"{router}: {measure}", MEASURES[measure], (value,)))
        for measure in MEASURES:
            best = min(_measures(found[name])[measure] for name in found if name != OURS)
            ours = _measures(found[OURS])[measure]
            self.verdicts.append(
                Verdict(f"{case}: {measure} at most that of any other", ours / best, 1.0)
            )

    def to_table(self) -> RenderableType:
        """See the class."""
        table = Table(box=SIMPLE_HEAD, title=f"{self.name}: {self.summary}", title_justify="left")
        table.add_column("case")
        table.add_column("router")
        for column in ("mean, s", "p99, s", "computed, M", "by least"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("best at")
        for case, found in self.found.items():
            least = min(each.computed for each in found.values())
            for number, (router, each) in enumerate(found.items()):
                best = [name for name in MEASURES if _is_best(found, router, name)]
                table.add_row(
                    case if number == 0 else "",
                    router,
                    short(each.mean_s),
                    short(each.p99_s),
                    f"{each.computed / 1e6:.2f}",
                    f"{each.computed / least:.4f}",
                    ", ".join(best),
                )
        met = [verdict.is_met for verdict in self.verdicts]
        missed = [
            Text(f"NOT MET: {each.budget} ({each.measured:.4f} times it)", style="red")
            for each in self.verdicts
            if not each.is_met
        ]
        lines = [Text(f"met: {sum(met)} of {len(met)}"), *missed, *map(Text, self.notes)]
        return Group(table, *lines)


def _measures(each: Simulated) -> dict[str, float]:
    return {"mean": each.mean_s, "p99": each.p99_s, "computed": float(each.computed)}


def _is_best(found: Mapping[str, Simulated], router: str, measure: str) -> bool:
    least = min(_measures(each)[measure] for each in found.values())
    return _measures(found[router])[measure] == least


def run_simulation(options: Options, cluster: ClusterOptions, summary: str) -> Result:
    """See the module's docstring."""
    result = SimulationResult("routing", summary)
    hardware = Hardware()
    per_replica = 20 if options.quick else REQUESTS_PER_REPLICA
    for replicas in cluster.replicas:
        whole = _workload(options.trace, per_replica * replicas, replicas, cluster.seed, hardware)
        result.notes.append(
            f"{replicas} replicas: {len(whole.requests):,} requests, {whole.prompt_tokens:,} tokens"
        )
        for load, delay_ms in product(cluster.loads, cluster.delays_ms):
            workload = whole.at_load(load / 100, replicas, hardware)
            bed = Bench(workload, replicas, hardware, delay_ms / 1e3, cluster.seed)
            case = f"{replicas}, {load:g} %, {delay_ms:g} ms"
            result.add(case, bed.all())
        middle = sorted(cluster.loads)[len(cluster.loads) // 2]
        workload = whole.at_load(middle / 100, replicas, hardware)
        bed = Bench(workload, replicas, hardware, cluster.delays_ms[0] / 1e3, cluster.seed)
        result.add(f"{replicas}, {middle:g} %, churn", bed.all(churns=True))
    return result


def _workload(
    trace: str | None, num_requests: int, replicas: int, seed: int, hardware: Hardware
) -> Workload:
    if trace is None:
        return agents(num_requests, replicas, seed)
    return from_trace(trace, num_requests, replicas, seed, hardware.max_tokens)


@dataclass(frozen=True)
class Bench:
    """A workload and a cluster for it, made anew for each router."""

    workload: Workload
    replicas: int
    hardware: Hardware
    delay_s: float
    seed: int

    def all(self, *, churns: bool = False) -> dict[str, Simulated]:
        """What becomes of it with each router."""
        return {router: self.one(router, churns=churns) for router in ROUTERS}

    def one(self, router: str, *, churns: bool = False) -> Simulated:
        """With one of `ROUTERS`."""
        changes = CHURN if churns else ()
        cluster = SimCluster(self.workload, self.replicas, self.hardware, self.delay_s, changes)
        return cluster.run(self._router(router, cluster))

    def _router(self, name: str, cluster: SimCluster) -> SimRouter:
        if name == "round robin":
            return SimRoundRobin()
        if name == "power of two":
            return SimPowerOfTwo(self.seed)
        if name == "prefix":
            return SimPrefixTree(self.seed)
        if name == "prefix, 5":
            return SimPrefixTree(self.seed, imbalance=5)
        assert name == OURS, name
        directory = SimDirectory(cluster.net.find, self.delay_s, lambda: cluster.now)
        return SimKVRouter(self.workload.requests, directory, lambda: cluster.now)
