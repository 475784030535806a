"""Engines whose weights change while they run: each kind of weights has a cache of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from raykv.base.errors import ClusterError
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.protocol.engine import MissRecord
from tests.fixtures.waiting import wait_until, wait_until_it_stores, wait_until_stored

pytestmark = pytest.mark.e2e

LENGTH = 320


def told(cluster: Cluster, engine_id: str, request_id: str) -> MissRecord:
    """What the engine said of a request."""
    found: list[MissRecord] = []

    def is_told() -> bool:
        with contextlib.suppress(ClusterError):
            every = cluster.why_miss(request_id)
            found.extend(each.record for each in every if each.engine_id == engine_id)
        return bool(found)

    wait_until(is_told, 20.0, "the engine tells of the request")
    return found[0]


def unnamed(cluster: Cluster) -> str:
    """The id of the one engine whose weights have no name."""

    def known() -> list[str]:
        engines = cluster.status().engines
        return [each.engine_id for each in engines if each.counters.get("weights_changed")]

    wait_until(lambda: len(known()) == 1, 20.0, "it is told")
    return known()[0]


@dataclass
class Fleet:
    """Two engines with RayKV and the old weights, and what each kind of weights answers."""

    cluster: Cluster
    first: EngineProcess
    second: EngineProcess
    old_path: str
    new_path: str
    old: list[list[int]]
    new: list[list[int]]

    def reload(self, engine: EngineProcess, path: str) -> None:
        engine.call("reload_weights", path=path)
        wait_until_it_stores(engine, self.cluster)

    def serve(self, engine: EngineProcess, which: int) -> tuple[list[int], int]:
        """Greedy tokens, and how many tokens were loaded: vLLM's own cache is emptied before."""
        engine.reset()
        (output,) = engine.call("generate", prompts=[PROMPTS[which]])
        return output["tokens"], output["cached"]

    def settle(self) -> None:
        """All that is being stored has come."""
        wait_until_stored(self.cluster)


PROMPTS = [prompt(number, LENGTH) for number in range(8)]


@pytest.fixture(scope="module")
def fleet(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    cluster.down()
    folder = tmp_path_factory.mktemp("weights")
    settings = {"ray_address": cluster.address, "pool_bytes": "256MiB"}
    new_model = tiny_llama(folder / "new", seed=1)
    plain, first, second = started_together(
        lambda: EngineProcess(tiny_model, folder / "plain", None),
        lambda: EngineProcess(tiny_model, folder / "first", settings, multiprocess=True),
        lambda: EngineProcess(tiny_model, folder / "second", settings, cores="1"),
    )
    old = plain.tokens(PROMPTS)
    plain.call("reload_weights", path=str(new_model))
    plain.reset()
    new = plain.tokens(PROMPTS)
    plain.stop()
    try:
        yield Fleet(cluster, first, second, str(tiny_model), str(new_model), old, new)
    finally:
        first.stop()
        second.stop()


@pytest.fixture(autouse=True)
def old_weights(fleet: Fleet) -> None:
    for engine in (fleet.first, fleet.second):
        fleet.reload(engine, fleet.old_path)


def test_engines_of_two_versions_never_see_each_others_kv_and_share_their_own(fleet: Fleet) -> None:
    old, new = fleet.old[0], fleet.new[0]
    assert old != new
    assert fleet.serve(fleet.first, 0) == (old, 0)
    fleet.settle()
    fleet.reload(fleet.first, fleet.new_path)
    assert fleet.serve(fleet.first, 0) == (new, 0)
    fleet.settle()
    assert fleet.serve(fleet.second, 0) == (old, LENGTH)
    assert fleet.serve(fleet.first, 0) == (new, LENGTH)
    fleet.reload(fleet.second, fleet.new_path)
    assert fleet.serve(fleet.second, 0) == (new, LENGTH)


@pytest.mark.extended
def test_engine_that_gets_its_old_weights_back_loads_what_it_had_of_them(fleet: Fleet) -> None:
    old, new = fleet.old[1], fleet.new[1]
    assert fleet.serve(fleet.first, 1) == (old, 0)
    fleet.settle()
    fleet.reload(fleet.first, fleet.new_path)
    assert fleet.serve(fleet.first, 1) == (new, 0)
    fleet.reload(fleet.first, fleet.old_path)
    assert fleet.serve(fleet.first, 1) == (old, LENGTH)


@pytest.mark.extended
def test_request_in_flight_over_a_change_leaves_nothing_under_either_version(fleet: Fleet) -> None:
    mixed = fleet.first.call("change_midway", prompt=PROMPTS[2], path=fleet.new_path)["tokens"]
    assert mixed[:6] != fleet.new[2]
    wait_until_it_stores(fleet.first, fleet.cluster)
    assert fleet.serve(fleet.first, 2) == (fleet.new[2], 0)
    fleet.settle()
    assert fleet.serve(fleet.first, 2) == (fleet.new[2], LENGTH)


@pytest.mark.extended
def test_request_behind_vllms_own_kv_of_other_weights_is_not_stored(fleet: Fleet) -> None:
    fleet.first.reset()
    fleet.first.call("generate", prompts=[PROMPTS[3][:160]])
    fleet.reload(fleet.first, fleet.new_path)
    (output,) = fleet.first.call("generate", prompts=[PROMPTS[3]])
    assert output["cached"] == 160
    fleet.settle()
    assert fleet.serve(fleet.first, 3) == (fleet.new[3], 0)


@pytest.mark.extended
@pytest.mark.parametrize("level", [1, 2])
def test_engine_that_wakes_up_with_the_same_weights_loads_at_once(fleet: Fleet, level: int) -> None:
    which = 3 + level
    assert fleet.serve(fleet.first, which) == (fleet.old[which], 0)
    fleet.settle()
    assert fleet.first.call("rest", level=level)
    assert fleet.serve(fleet.first, which) == (fleet.old[which], LENGTH)


@pytest.mark.extended
def test_engine_whose_weights_cant_be_told_neither_loads_nor_stores_and_says_so(
    fleet: Fleet,
) -> None:
    assert fleet.serve(fleet.second, 6) == (fleet.old[6], 0)
    fleet.settle()
    before = fleet.cluster.status()
    fleet.second.call("write_weights", factor=1.1)
    for _ in range(2):
        other, loaded = fleet.serve(fleet.second, 6)
        assert other != fleet.old[6]
        assert loaded == 0
        # What trainers do after an update takes nothing from others.
        fleet.second.reset(connector=True)
    after = fleet.cluster.status()
    assert after.nodes[0].bytes_stored == before.nodes[0].bytes_stored
    assert after.nodes[0].chunks == before.nodes[0].chunks
    request_id = fleet.second.call("generate", prompts=[PROMPTS[6]])[0]["id"]
    assert told(fleet.cluster, unnamed(fleet.cluster), request_id).missed == {
        "weights_changed": LENGTH
    }
    assert fleet.second.log_text.count("can't tell this engine's weights from others") == 1
    fleet.reload(fleet.second, fleet.old_path)
    assert fleet.serve(fleet.second, 6) == (fleet.old[6], LENGTH)


@pytest.mark.extended
def test_engine_whose_weights_cant_be_told_goes_by_the_name_that_they_are_given(
    fleet: Fleet,
) -> None:
    fleet.second.call("write_weights", factor=1.1)
    other, loaded = fleet.serve(fleet.second, 7)
    assert other != fleet.old[7]
    assert loaded == 0
    engine_id = unnamed(fleet.cluster)
    assert fleet.cluster.set_weights_version(engine_id[:8], "step-7") == [engine_id]
    wait_until_it_stores(fleet.second, fleet.cluster)
    assert fleet.serve(fleet.second, 7) == (other, 0)
    fleet.settle()
    assert fleet.serve(fleet.second, 7) == (other, LENGTH)
    # A name is of the weights that it was given to.
    fleet.second.call("write_weights", factor=1.2)
    assert fleet.serve(fleet.second, 7)[1] == 0


@pytest.mark.extended
def test_name_is_not_told_again_to_other_weights_by_the_next_scheduler_actor(fleet: Fleet) -> None:
    fleet.second.call("write_weights", factor=1.3)
    assert fleet.serve(fleet.second, 7)[1] == 0
    engine_id = unnamed(fleet.cluster)
    assert fleet.cluster.set_weights_version(engine_id, "step-8") == [engine_id]
    wait_until_it_stores(fleet.second, fleet.cluster)
    assert fleet.serve(fleet.second, 7)[1] == 0
    fleet.settle()
    fleet.second.call("write_weights", factor=1.4)
    other, loaded = fleet.serve(fleet.second, 7)
    assert loaded == 0
    # Any other order, after which the number of all orders is another one.
    fleet.cluster.resume()
    life = fleet.cluster.status().life
    ray.kill(ask.find_scheduler_actor(), no_restart=False)

    def has_begun() -> bool:
        with contextlib.suppress(ClusterError):
            status = fleet.cluster.status()
            return status.life != life and len(status.engines) == 2
        return False

    wait_until(has_begun, 30.0, "the next life knows the engines")
    for _ in range(3):
        assert fleet.serve(fleet.second, 7) == (other, 0)
        fleet.settle()
    # It is told what these are called when somebody says so, and not before.
    assert fleet.cluster.set_weights_version(engine_id, "step-9") == [engine_id]
    wait_until_it_stores(fleet.second, fleet.cluster)
    assert fleet.serve(fleet.second, 7) == (other, 0)
