"""LoRA adapters whose files change under one name and path: tokens are those of what is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import add_local_node
from tests.fixtures.lora import write_adapter
from tests.fixtures.waiting import bytes_stored, wait_until_stored

pytestmark = pytest.mark.e2e

LENGTH = 320
ALWAYS_FETCH = {"always_fetch": True, "request_deadline_s": 30.0}
"""However fast this small model computes."""

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@dataclass
class World:
    """An engine with RayKV, and one without as reference."""

    cluster: Cluster
    model: Path
    folder: Path
    engine: EngineProcess
    plain: EngineProcess
    restart: Any
    last_id: int = 0

    def write(self, name: str, seed: int) -> Path:
        """An adapter of that name, with other weights for another seed."""
        return write_adapter(self.folder / name, self.model, seed)

    def adapter(self, name: str, path: Path | None = None, **more: Any) -> dict[str, Any]:
        self.last_id += 1
        path = path or self.folder / name
        return {"lora_name": name, "lora_int_id": self.last_id, "lora_path": str(path), **more}

    def right(self, path: Path, tokens: list[int]) -> list[int]:
        """What vLLM says alone, with the adapter's files of now."""
        (found,) = self.plain.tokens([tokens], adapter=self.adapter(f"ref{self.last_id}", path))
        self.plain.reset()
        return found

    def ask(self, tokens: list[int], adapter: dict[str, Any]) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt's came out of a cache; vLLM's own is empty then."""
        (output,) = self.engine.call("generate", prompts=[tokens], adapter=adapter)
        wait_until_stored(self.cluster)
        self.engine.reset()
        return output["tokens"], output["cached"]


@pytest.fixture(scope="module")
def world(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    cluster.down()
    folder = tmp_path_factory.mktemp("adapters")
    settings = {"ray_address": cluster.address, "pool_bytes": "256MiB"}

    def start() -> EngineProcess:
        return EngineProcess(tiny_model, folder / "log", settings, multiprocess=True, **LORA)

    engine, plain = started_together(
        start, lambda: EngineProcess(tiny_model, folder / "plain", None, cores="1", **LORA)
    )
    made = World(cluster, tiny_model, folder, engine, plain, start)
    yield made
    made.engine.stop()
    plain.stop()


@pytest.mark.extended
def test_adapter_with_other_files_after_a_restart_is_not_served_the_old_kv(world: World) -> None:
    tokens, path = prompt(1, LENGTH), world.write("restarted", 1)
    old = world.right(path, tokens)
    adapter = world.adapter("restarted")
    assert world.ask(tokens, adapter)[0] == old
    assert world.ask(tokens, adapter) == (old, LENGTH)
    world.engine.stop()
    world.write("restarted", 2)
    new = world.right(path, tokens)
    assert new != old
    world.engine = world.restart()
    assert world.ask(tokens, adapter) == (new, 0)
    assert world.ask(tokens, adapter) == (new, LENGTH)
    # Nor is what it stores served to who has the old files.
    world.write("restarted", 1)
    adapter = world.adapter("restarted")
    assert world.ask(tokens, adapter) == (old, LENGTH)


@pytest.mark.parametrize(
    "says_so_again",
    [True, pytest.param(False, marks=pytest.mark.extended)],
    ids=["every-request", "only-once"],
)
def test_adapter_that_is_loaded_in_place_is_not_served_the_old_kv(
    world: World, says_so_again: bool
) -> None:
    name = f"in-place-{says_so_again}"
    tokens, path = prompt(2, LENGTH), world.write(name, 3)
    old = world.right(path, tokens)
    adapter = world.adapter(name)
    assert world.ask(tokens, adapter) == (old, 0)
    assert world.ask(tokens, adapter) == (old, LENGTH)
    world.write(name, 4)
    new = world.right(path, tokens)
    again = {**adapter, "load_inplace": True}
    assert world.engine.call("add_adapter", **again)
    used = again if says_so_again else adapter
    assert world.ask(tokens, used) == (new, 0)
    if not says_so_again:
        # What the engine has loaded was not known when that request came.
        assert world.ask(tokens, used) == (new, 0)
    assert world.ask(tokens, used) == (new, LENGTH)


def test_adapter_whose_files_change_unseen_by_the_engine_neither_stores_nor_loads(
    world: World,
) -> None:
    tokens, path = prompt(3, LENGTH), world.write("unseen", 5)
    old = world.right(path, tokens)
    adapter = world.adapter("unseen")
    assert world.ask(tokens, adapter) == (old, 0)
    world.write("unseen", 6)
    before = bytes_stored(world.cluster)
    for _ in range(2):
        assert world.ask(tokens, adapter) == (old, 0)
    assert bytes_stored(world.cluster) == before
    # An engine that loads them computes anew.
    assert world.ask(tokens, world.adapter("unseen")) == (world.right(path, tokens), 0)


@pytest.mark.extended
def test_own_cache_of_vllm_does_not_bring_the_old_kv_under_the_new_name(world: World) -> None:
    tokens, path = prompt(4, LENGTH), world.write("stale", 7)
    adapter = world.adapter("stale")
    world.engine.tokens([tokens], adapter=adapter)
    world.write("stale", 8)
    new = world.right(path, tokens)
    again = {**adapter, "load_inplace": True}
    assert world.engine.call("add_adapter", **again)
    # vLLM's own cache has not been emptied.
    assert world.ask(tokens, again) == (new, 0)
    assert world.ask(tokens, again) == (new, LENGTH)


@pytest.mark.extended
def test_two_nodes_share_an_adapter_by_its_files_and_not_by_their_path(world: World) -> None:
    tokens, path = prompt(5, LENGTH), world.write("both", 9)
    old = world.right(path, tokens)
    assert world.ask(tokens, world.adapter("both")) == (old, 0)
    second = add_local_node(world.cluster.address)
    try:
        settings = {"node_id": second.node_id, "pool_bytes": "64MiB", **ALWAYS_FETCH}
        settings["ray_address"] = world.cluster.address
        other = EngineProcess(world.model, world.folder / "other.log", settings, **LORA)
        try:
            check_other(world, other, tokens, old)
        finally:
            other.stop()
    finally:
        second.stop()


def check_other(world: World, other: EngineProcess, tokens: list[int], old: list[int]) -> None:
    """The engine on the other node has other files where the first has those of `old`."""

    def ask(adapter: dict[str, Any]) -> tuple[list[int], int]:
        (output,) = other.call("generate", prompts=[tokens], adapter=adapter)
        wait_until_stored(world.cluster)
        other.reset()
        return output["tokens"], output["cached"]

    path = world.write("both", 10)
    new = world.right(path, tokens)
    assert new != old
    adapter = world.adapter("both")
    assert ask(adapter) == (new, 0)
    assert ask(adapter) == (new, LENGTH)
    # With the files of the first node it gets what that one has stored.
    world.write("both", 9)
    assert ask(world.adapter("both")) == (old, LENGTH)
