"""Two hosts, an engine on each: what one computes, the other one loads, and finds its way back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.cluster import HostEngine, raylet_of
from raykv.lab.hosts.network import Host, networked
from raykv.serve.models import tiny_llama
from tests.fixtures.hosts import HostCluster
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

BLOCK = 32
LENGTH = 8 * BLOCK
BACK_S = 180.0
"""For an engine to load again: Ray's node begins within seconds on a quiet machine, and the actors
on it."""

SETTINGS = {"fetch_bytes_per_s": 1e15, "prefill_tokens_per_s": 1.0}
"""Fetch, however fast this small model computes."""

seeds = count(1000)


@dataclass
class World:
    """`a` has the head of the cluster; `engines` by the name of their host."""

    cluster: HostCluster
    a: Host
    b: Host
    engines: dict[str, HostEngine] = field(default_factory=dict)

    def computed(self, host: Host, length: int = LENGTH) -> tuple[list[int], list[int]]:
        """A new prompt that a host's engine has computed and stored, and its answer."""
        tokens = prompt(next(seeds), length)
        engine = self.engines[host.name]
        (first,) = engine.tokens([tokens])
        (again,) = engine.tokens([tokens])
        assert first == again
        engine.reset()
        return tokens, first

    def loaded(self, host: Host, tokens: list[int], reference: list[int]) -> int:
        """How many tokens of a prompt are loaded by a host's engine; its answer must be right."""
        engine = self.engines[host.name]
        (output,) = engine.call("generate", prompts=[tokens])
        assert output["tokens"] == reference
        assert output["reason"] == "length"
        engine.reset()
        return int(output["cached"])

    def comes(self, source: Host, target: Host) -> bool:
        """Whether the engine of one host loads what that of another one has computed."""
        tokens, reference = self.computed(source)
        time.sleep(0.5)
        return self.loaded(target, tokens, reference) == LENGTH

    def wait_for(self, source: Host, target: Host) -> None:
        what = f"{target.name} loads what {source.name} has computed"
        wait_until(lambda: self.comes(source, target), BACK_S, what)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with networked() as network:
        model = tiny_llama(network.folder / "model")
        a, b = network.host("a"), network.host("b")
        cluster = HostCluster(network, a)
        cluster.start(a, b)
        made = World(cluster, a, b)

        def start(host: Host, core: str) -> EngineProcess:
            pool = {"pool_path": str(host.disk / "pool")}
            made.engines[host.name] = engine = cluster.small_engine(
                host, model, core, **SETTINGS, **pool
            )
            return engine

        started_together(partial(start, a, "0"), partial(start, b, "1"))
        made.wait_for(a, b)
        yield made
        for engine in made.engines.values():
            engine.kill()
        cluster.end()


def test_prompt_of_one_host_is_loaded_on_the_other_with_equal_tokens(world: World) -> None:
    assert world.comes(world.a, world.b)
    assert world.comes(world.b, world.a)


def test_engine_whose_raylet_died_goes_on_at_the_next_one_of_its_host(world: World) -> None:
    tokens, reference = world.computed(world.b)
    time.sleep(2.0)
    began = time.monotonic()
    died = raylet_of(world.b)
    os.kill(died, signal.SIGKILL)
    wait_until(lambda: raylet_of(world.b) not in (0, died), BACK_S, "Ray begins again")
    wait_until(
        lambda: world.loaded(world.b, tokens, reference) == LENGTH,
        BACK_S,
        "what lies in the pool's file is loaded again",
    )
    print(f"loaded again after {time.monotonic() - began:.1f} s")
    world.wait_for(world.a, world.b)
    world.wait_for(world.b, world.a)
