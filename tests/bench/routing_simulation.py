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
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raykv.lab.bench.report import Options, Result, Row, Verdict, short
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


def run(options: Options) -> Result:
    """See the module's docstring; `--trace` names a trace with times."""
    result = SimulationResult("routing_simulation")
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
        result.add(f"{load} %", bed.all())
    bed = Bench(whole.at_load(CHURN_LOAD / 100, replicas, hardware), replicas, hardware)
    result.add(f"{CHURN_LOAD} %, churn", bed.all(churns=True))
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
            return SimPowerOfTwo(SEED)
        if name == "prefix":
            return SimPrefixTree(SEED)
        if name == "prefix, 5":
            return SimPrefixTree(SEED, imbalance=5)
        assert name == OURS, name
        directory = SimDirectory(cluster.net.find, self.delay_s, lambda: cluster.now)
        return SimKVRouter(self.workload.requests, directory, lambda: cluster.now)
