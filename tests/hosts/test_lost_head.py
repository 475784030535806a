"""The head of the cluster on a host for itself, engines on two others: the head is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.fixtures.hosts.world import SLOWEST_S, World, new_world

pytestmark = [pytest.mark.hosts, pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with new_world("b", "c", head="a") as made:
        made.wait_for_all()
        yield made


@pytest.mark.parametrize("seconds", [5.0, 30.0, 120.0])
def test_engines_answer_without_the_heads_host_and_load_again_when_it_is_back(
    world: World, seconds: float
) -> None:
    """The network's fault: when the link is mended the head is as it was. After 57 s without it,
    Ray's nodes have been given up, and end.
    """
    with world.cluster.network.unplugged(world.cluster.head):
        assert world.slowest_answer(seconds) < SLOWEST_S
    began = time.monotonic()
    world.wait_for_all()
    took_s = time.monotonic() - began
    print(f"without a head for {seconds:g} s, all load again after {took_s:.1f} s")


@pytest.mark.parametrize("seconds", [5.0, 120.0])
def test_engines_go_on_in_the_cluster_that_begins_at_the_address_of_one_that_lost_power(
    world: World, seconds: float
) -> None:
    """Without its state, which Ray keeps in a Redis or not at all, it is another cluster. What lies
    in pool files is of use there too.
    """
    in_file = {host.name: world.computed(host) for host in world.hosts}
    time.sleep(2.0)
    head = world.cluster.head
    head.lose_power()
    assert world.slowest_answer(seconds) < SLOWEST_S
    head.boot()
    world.cluster.start(head)
    began = time.monotonic()
    world.wait_for_all()
    took_s = time.monotonic() - began
    print(f"after {seconds:g} s without power all load again after {took_s:.1f} s")
    for host in world.hosts:
        assert world.loads(host, *in_file[host.name])
