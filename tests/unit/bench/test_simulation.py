"""A simulated cluster: all is answered once, whatever happens, and each run is like the last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.bench.routing_simulation import OURS, ROUTERS, Bench
from tests.bench.simulation.cluster import CHURN, SimCluster, Simulated
from tests.bench.simulation.hardware import TOKENS, Hardware
from tests.bench.simulation.routers import Replicas, SimPowerOfTwo
from tests.bench.simulation.workload import SimRequest, Workload, agents

HARDWARE = Hardware(replicas_per_node=2)
REPLICAS = 4
WORKLOAD = agents(200, REPLICAS, 5).at_load(0.8, REPLICAS, HARDWARE)


BENCH = Bench(WORKLOAD, REPLICAS, HARDWARE)


def distinct_tokens(workload: Workload) -> int:
    """What must be computed in any case."""
    chunks = {int(chunk) for each in workload.requests for chunk in each.chunks}
    rest = sum(each.num_tokens - len(each.chunks) * TOKENS for each in workload.requests)
    return len(chunks) * TOKENS + rest


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("churns", [False, True], ids=["steady", "churn"])
def test_each_request_is_answered_and_tokens_add_up(router: str, *, churns: bool) -> None:
    done = BENCH.one(router, churns=churns)
    assert len(done.waits_s) == len(WORKLOAD.requests)
    assert min(done.waits_s) > HARDWARE.step_s
    assert done.prompt_tokens == sum(each.num_tokens for each in WORKLOAD.requests)
    lost = done.prompt_tokens if churns else 0
    assert distinct_tokens(WORKLOAD) <= done.computed <= done.prompt_tokens + lost


@pytest.mark.parametrize("router", ROUTERS)
def test_run_is_the_same_for_the_same_arguments(router: str) -> None:
    first, again = (BENCH.one(router, churns=True) for _ in range(2))
    assert first == again


class WatchedRouter(SimPowerOfTwo):
    """Notes which replicas there were when a request went to one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.kept: list[set[str]] = []
        self.went: list[str] = []

    def keep(self, names: Collection[str]) -> None:
        self.kept.append(set(names))

    async def route(self, number: int, request: SimRequest, replicas: Replicas) -> str:
        assert {each.name for each in replicas()} == self.kept[-1]
        self.went.append(await super().route(number, request, replicas))
        return self.went[-1]


def test_replica_that_drains_or_is_dead_gets_no_request() -> None:
    router = WatchedRouter()
    cluster = SimCluster(WORKLOAD, REPLICAS, HARDWARE, 0.0, CHURN)
    done = cluster.run(router)
    first, dead, joined, drained, last = router.kept
    assert (len(first), len(dead), len(drained)) == (4, 3, 3)
    assert not (first - last) & set(router.went[-len(WORKLOAD.requests) // 4 :])
    assert last - first <= set(router.went)
    assert len(joined) == 4
    # What the dead one had not finished went somewhere else.
    assert len(router.went) > len(WORKLOAD.requests) == len(done.replicas)
    assert not (first - dead) & {done.replicas[n] for n in range(150, 200)}


def test_kv_wins_where_agents_have_much_in_common() -> None:
    found: dict[str, Simulated] = BENCH.all()
    ours = found.pop(OURS)
    assert all(ours.mean_s < each.mean_s for each in found.values())
    assert all(ours.p99_s < each.p99_s for each in found.values())
    assert ours.computed <= 1.02 * min(each.computed for each in found.values())


def test_directory_that_answers_too_late_costs_little() -> None:
    late, prompt = (replace(BENCH, delay_s=delay_s).one(OURS) for delay_s in (0.1, 0.0))
    assert late.mean_s < prompt.mean_s + 0.05
    assert late.computed <= 1.02 * prompt.computed


def test_request_waits_for_the_one_that_it_follows() -> None:
    first = WORKLOAD.requests[0]
    both = [replace(first, at=0.0, follows=None), replace(first, at=0.001, follows=0)]
    workload = Workload(both, WORKLOAD.num_chunks)
    done = SimCluster(workload, 2, HARDWARE, 0.0).run(SimPowerOfTwo(1))
    assert done.waits_s[1] < done.waits_s[0]
