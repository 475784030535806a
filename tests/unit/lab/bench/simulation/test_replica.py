"""Steps of a replica: what they take, what waits for what, and what is found again."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from raykv.lab.bench.simulation.hardware import TOKENS, Hardware
from raykv.lab.bench.simulation.nodes import NodeNet
from raykv.lab.bench.simulation.replica import Events, Job, SimReplica
from raykv.lab.bench.simulation.workload import SimRequest

HARDWARE = Hardware(cache_chunks=64, pool_chunks=32, disk_chunks=64)


class PlayedTime:
    """Events in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.first: list[int] = []
        self.ended: list[int] = []
        self.events = Events(
            self.schedule,
            lambda job: self.first.append(job.number),
            lambda job: self.ended.append(job.number),
        )
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def schedule(self, at: float, act: Callable[[], None]) -> None:
        assert at >= self.now
        heapq.heappush(self._due, (at, next(self._order), act))

    def run(self, until: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()


def job(number: int, first: int, chunks: int, output: int = 4) -> Job:
    return Job(
        SimRequest(0.0, chunks * TOKENS + 1, output, np.arange(first, first + chunks)), number
    )


def replica(time: PlayedTime, net: NodeNet, name: str = "r", node: str = "n0") -> SimReplica:
    return SimReplica(name, node, net, time.events, HARDWARE)


def net() -> NodeNet:
    return NodeNet(1000, HARDWARE, 0.001)


def test_prompt_takes_as_long_as_its_steps() -> None:
    time = PlayedTime()
    one = replica(time, net())
    each = job(0, 0, 4)
    one.arrive(each, 0.0)
    time.run()
    assert each.first_at == pytest.approx(HARDWARE.step_s + HARDWARE.prefill_s(0, 4 * TOKENS + 1))
    assert (time.first, time.ended, one.computed) == ([0], [0], 4 * TOKENS + 1)
    assert one.busy_s == pytest.approx(time.now)
    assert one.cache.reserved == 0


def test_prompt_is_found_in_the_own_cache_then_on_the_node_then_elsewhere() -> None:
    time, nodes = PlayedTime(), net()
    own = replica(time, nodes)
    sibling, far = replica(time, nodes, "s"), replica(time, nodes, "f", "n1")
    own.arrive(job(0, 0, 8), 0.0)
    time.run()
    waits = []
    for at, each in enumerate((own, sibling, far), 1):
        again = job(at, 0, 8)
        began = time.now
        each.arrive(again, began)
        time.run()
        assert again.first_at is not None
        waits.append(again.first_at - began)
    assert [each.computed for each in (sibling, far)] == [1, 1]
    assert waits == sorted(waits)
    assert waits[2] < HARDWARE.prefill_s(0, 8 * TOKENS)


def test_request_that_has_no_room_waits_until_another_has_ended() -> None:
    time = PlayedTime()
    one = replica(time, net())
    one.arrive(job(0, 0, 40, output=50), 0.0)
    one.arrive(job(1, 100, 40), 0.0)
    time.run(until=0.9)
    assert (time.first, time.ended, one.num_ongoing) == ([0], [], 2)
    time.run()
    assert (time.first, time.ended) == ([0, 1], [0, 1])


def test_arrival_cuts_steps_without_prompts_short() -> None:
    time = PlayedTime()
    one = replica(time, net())
    one.arrive(job(0, 0, 1, output=2000), 0.0)
    time.run(until=0.1)
    late = job(1, 100, 1)
    one.arrive(late, 0.1)
    time.run()
    assert late.first_at is not None
    assert late.first_at < 0.2
    assert time.ended == [1, 0]


def test_dead_replica_says_nothing_more() -> None:
    time = PlayedTime()
    one = replica(time, net())
    one.arrive(job(0, 0, 4), 0.0)
    assert [each.number for each in one.die()] == [0]
    time.run()
    assert (time.first, time.ended) == ([], [])
