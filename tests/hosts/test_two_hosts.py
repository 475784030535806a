"""Two hosts, an engine on each: what one computes, the other one loads, and finds its way back."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from raykv.protocol.findings import Severity
from tests.fixtures.hosts.cluster import HostCluster
from tests.fixtures.hosts.world import BACK_S, LENGTH, SLOWEST_S, World, new_world
from tests.fixtures.waiting import wait_until
from tests.house import CHILDREN, ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.extended, pytest.mark.timeout(900)]

CLOCK_AHEAD_S = 3600.0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """`a` has the head, and nothing happens to it."""
    with new_world("a", "b") as made:
        made.wait_for(made.a, made.b)
        yield made


def failures(world: World) -> list[str]:
    """What the doctor says is wrong."""
    findings = world.cluster.raykv(world.a, "doctor")
    return [each["what"] for each in findings if each["severity"] == Severity.FAIL]


def test_prompt_of_one_host_is_loaded_on_the_other_with_equal_tokens(world: World) -> None:
    assert world.comes(world.a, world.b)
    assert world.comes(world.b, world.a)


def test_engine_whose_raylet_died_goes_on_at_the_next_one_of_its_host(world: World) -> None:
    """Ray ends on one host with all that it has started there, and somebody starts it again."""
    in_file, asked = world.computed(world.b), world.computed(world.b)
    time.sleep(2.0)
    world.cluster.stop(world.b)
    assert not world.loads(world.b, *asked)
    wait_until(
        lambda: any("has no cache: its Ray node" in each for each in failures(world)),
        BACK_S,
        "the doctor says whose Ray node is gone",
    )
    assert any("(b) is gone" in each for each in failures(world))
    world.cluster.start(world.b)
    world.wait_for_own(world.b)
    assert world.loads(world.b, *in_file), "it lies in the pool's file"
    world.wait_for_all()
    wait_until(lambda: failures(world) == [], BACK_S, "the doctor finds nothing")


@pytest.mark.parametrize("seconds", [5.0, 30.0, 120.0])
def test_host_that_was_away_loads_again_and_no_request_failed_meanwhile(
    world: World, seconds: float
) -> None:
    """After 57 s Ray has given the node up, and its raylet ends as soon as the link is there."""
    in_file = world.computed(world.b)
    time.sleep(2.0)
    with world.cluster.network.unplugged(world.b):
        assert world.slowest_answer(seconds) < SLOWEST_S
    began = time.monotonic()
    world.wait_for_all()
    print(f"away for {seconds:g} s, both load again after {time.monotonic() - began:.1f} s")
    assert world.loads(world.b, *in_file)


@pytest.mark.parametrize("silent", ["a", "b"])
def test_half_open_link_costs_time_and_no_request(world: World, silent: str) -> None:
    """What `silent` sends is lost; what is sent to it arrives."""
    source, target = (world.a, world.b) if silent == "a" else (world.b, world.a)
    with world.cluster.network.cut(source, target):
        assert world.slowest_answer(20.0) < SLOWEST_S
    world.wait_for_all()


def test_host_that_was_frozen_loads_again(world: World) -> None:
    """Its engine too, so that only the other one is asked."""
    known = world.computed(world.b)
    time.sleep(1.0)
    with world.b.frozen():
        began = time.monotonic()
        world.loads(world.a, *known)
        assert time.monotonic() - began < SLOWEST_S
        time.sleep(15.0)
    world.wait_for_all()


def test_host_whose_clock_is_wrong_stores_and_loads_as_any(world: World) -> None:
    world.cluster.stop(world.b)
    wrong = {"PYTHONPATH": f"{CHILDREN / 'clock'}:{ROOT}", "CLOCK_AHEAD_S": str(CLOCK_AHEAD_S)}
    world.cluster.start(world.b, **wrong)
    world.wait_for_all()
    (finding,) = [each for each in failures(world) if "clock" in each]
    said = re.search(r"\(b\) is (\S+) s ahead of this host's", finding)
    assert said, finding
    assert float(said[1]) == pytest.approx(CLOCK_AHEAD_S, abs=10.0)
    world.cluster.stop(world.b)
    world.cluster.start(world.b)
    world.wait_for_all()


def test_fetch_over_a_slow_link_is_declined_and_the_prompt_is_computed(world: World) -> None:
    """The engine measures what a fetch takes, and what computing does."""
    world.end_engine(world.b)
    world.start_engines(world.b, always_fetch=False)
    wait_until(lambda: world.comes(world.a, world.b), BACK_S, "it fetches over a fast link")
    try:
        with world.b.slowed(50_000):
            began = time.monotonic()
            wait_until(lambda: is_computed_at_once(world), BACK_S, "it does not even try")
            print(f"declined after {time.monotonic() - began:.1f} s")
    finally:
        world.end_engine(world.b)
        world.start_engines(world.b)
    world.wait_for_all()


def is_computed_at_once(world: World) -> bool:
    tokens, reference = world.computed(world.a, LENGTH)
    time.sleep(1.0)
    began = time.monotonic()
    answer, cached = world.answer(world.b, tokens)
    assert answer == reference
    return cached == 0 and time.monotonic() - began < 2.0


def test_two_clusters_in_one_network_share_nothing(world: World) -> None:
    network = world.cluster.network
    others = HostCluster(network, network.host("c"))
    stranger = World(others, [others.head])
    try:
        others.start(others.head)
        stranger.start_engines(others.head)
        tokens, reference = world.computed(world.a)
        time.sleep(1.0)
        assert not stranger.loads(others.head, tokens, reference)
        wait_until(
            lambda: stranger.loads(others.head, tokens, reference), BACK_S, "it loads its own"
        )
        world.wait_for_all()
        for cluster, host in ((world.cluster, world.a), (others, others.head)):
            known = {each["hostname"] for each in cluster.raykv(host, "status")["nodes"]}
            assert known == ({"c"} if host is others.head else {"a", "b"})
    finally:
        stranger.end_engine(others.head)
        others.end()
        others.head.lose_power()


def test_node_that_leaves_for_good_is_forgotten_and_the_others_go_on(world: World) -> None:
    """The last test here: nobody comes back."""
    tokens, reference = world.computed(world.b)
    time.sleep(1.0)
    assert world.loads(world.a, tokens, reference)
    only_there = world.computed(world.b)
    world.b.lose_power()
    world.end_engine(world.b)
    began = time.monotonic()
    assert not world.loads(world.a, *only_there)
    assert time.monotonic() - began < SLOWEST_S
    wait_until(
        lambda: (
            [each["hostname"] for each in world.cluster.raykv(world.a, "status")["nodes"]] == ["a"]
        ),
        BACK_S,
        "its pool has left the directory",
    )
    assert world.loads(world.a, tokens, reference)
    assert world.loads(world.a, *world.computed(world.a))
