"""The router of the policy "kv" with a real scheduler actor and real replica actors under it.

Played are the engines, whose messages fill the directory, and the tokenizer: prompts are token ids.
That vLLM's own renderer and hashes say the same is tested with a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from raykv.client.cluster import Cluster
from raykv.directory.actor import scheduler_actor
from raykv.prompts.block_hashes import DEFAULT_SEED, PLAIN, HashScheme, seed_digest
from raykv.prompts.lookup import PromptScheme
from raykv.prompts.prompt_keys import PromptTokens
from raykv.protocol.descriptions import ChunkGroup
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.directory import ROUTE_ANSWER_S
from raykv.serve.router.planner import PlacedRequest
from raykv.serve.router.rendering import ROUTE_RENDER_S
from tests.fixtures.played_node import PlayedNode

pytestmark = pytest.mark.integration

MODEL = "/models/played"
SPACE = "played-space"
NODES = ("a" * 56, "b" * 56)
CHUNK = 16
SLOT_BYTES = 1 << 16
SLAB = 1 << 20
SCHEME = PromptScheme(HashScheme("sha256", DEFAULT_SEED, CHUNK), (ChunkGroup(0, CHUNK),))
TRAITS = {
    "hash_algorithm": "sha256",
    "hash_seed": seed_digest(DEFAULT_SEED),
    "tokens_per_hash": str(CHUNK),
    "chunks": f"0:{CHUNK}",
}
LONG_S = 60.0


class PlayedReplica:
    """Answers a request router as a replica of Serve does."""

    def get_num_ongoing_requests(self) -> int:
        return 0


class PlayedNodes:
    """Nodes with an engine each."""

    def __init__(self) -> None:
        self._nodes = {
            name: PlayedNode(name, 8 * SLAB // SLOT_BYTES, 1, SLOT_BYTES, MODEL, TRAITS)
            for name in NODES
        }
        self._beats = contextlib.ExitStack()
        for node in self._nodes.values():
            node.attach(SPACE)
            node.report()
            self._beats.enter_context(node.beating())

    def end(self) -> None:
        """Say nothing any more."""
        self._beats.close()

    def hold(self, node: str, tokens: list[int]) -> None:
        """Have the node store a prompt's chunks."""
        (keys,) = SCHEME.chunks(tokens).values()
        assert self._nodes[node].store(keys, SPACE) == len(keys)
        self._nodes[node].report()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[PlayedNodes]:
    cluster.down()
    ray.get(scheduler_actor(cluster.address).__ray_ready__.remote(), timeout=LONG_S)
    played = PlayedNodes()
    yield played
    played.end()
    cluster.down()


@pytest.fixture(scope="module")
def replicas(cluster: Cluster) -> Iterator[list[Any]]:
    from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.serve.request_router import RunningReplica

    made, handles = [], []
    for number, node in enumerate(NODES):
        name = f"played-replica-{number}"
        played = ray.remote(num_cpus=0)(PlayedReplica)
        handles.append(played.options(name=name, namespace=SERVE_NAMESPACE).remote())
        identity = ReplicaID(f"r{number}", DeploymentID("played", "app"))
        made.append(RunningReplica(RunningReplicaInfo(identity, node, "", None, name, 256)))
    ray.get([handle.get_num_ongoing_requests.remote() for handle in handles], timeout=LONG_S)
    yield made
    for handle in handles:
        ray.kill(handle)


def tokens_in(_path: str, body: bytes) -> list[PromptTokens]:
    return [PromptTokens(json.loads(body)["prompt"], PLAIN)]


class Routed:
    """A router on the event loop of a test."""

    def __init__(self, replicas: list[Any]) -> None:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID

        from raykv.serve.router.kv_router import KVRouter

        self.router = KVRouter(
            deployment_id=DeploymentID("played", "app"),
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(model={"model": MODEL})
        self.router.update_replicas(replicas)
        for replica in replicas:
            # Serve goes past a replica that does not tell its queue's length within 0.1 s.
            self.router.on_new_queue_len_info(replica.replica_id, 0)
        self._numbers = itertools.count()

    async def until_placing(self) -> None:
        await until(lambda: self.router._directory.hasher is not None)
        await until(lambda: self.router._renderer._render is not None)

    async def send(self, tokens: list[int], path: str = "/v1/completions") -> str:
        """Which node the request goes to; it stays there for good."""
        from ray.serve._private.common import RequestMetadata
        from ray.serve.request_router import PendingRequest

        number = str(next(self._numbers))
        request = HttpRequest("POST", path, b"", [], json.dumps({"prompt": tokens}).encode())
        pending = PendingRequest([request], {}, RequestMetadata(number, number))
        replica = await asyncio.wait_for(self.router._choose_replica_for_request(pending), LONG_S)
        self.router.on_send_request(replica.replica_id)
        self.router.on_request_routed(pending, replica.replica_id, None)
        return str(replica.node_id)

    def done(self, node: str) -> None:
        """A request there has ended."""
        for replica in self.router.curr_replicas.values():
            if replica.node_id == node:
                self.router.decrement_queue_len_cache(replica.replica_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.01)


def prompt(seed: int, chunks: int) -> list[int]:
    return [(seed * 7919 + n) % 1000 for n in range(chunks * CHUNK + 1)]


@pytest.fixture(autouse=True)
def played_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from raykv.serve.router import kv_router

    monkeypatch.setattr(kv_router, "_vllm_renderer", lambda _flags: tokens_in)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have all the time that they need."""
    from raykv.serve.router import directory, rendering

    monkeypatch.setattr(directory, "ROUTE_ANSWER_S", LONG_S)
    monkeypatch.setattr(rendering, "ROUTE_RENDER_S", LONG_S)


@pytest.mark.usefixtures("patient")
def test_requests_go_where_their_chunks_are_and_new_ones_are_spread(
    nodes: PlayedNodes, replicas: list[Any]
) -> None:
    first, second = prompt(1, 40), prompt(2, 40)
    nodes.hold(NODES[0], first)
    nodes.hold(NODES[1], second)

    async def main() -> None:
        routed = Routed(replicas)
        await routed.until_placing()
        for tokens, node in ((first, NODES[0]), (second, NODES[1])):
            for _ in range(3):
                # What comes after the shared beginning is new each time.
                assert await routed.send([*tokens, 5, 6, 7]) == node
                routed.done(node)
        spread = Counter([await routed.send(prompt(seed, 3)) for seed in range(10, 18)])
        assert spread == {NODES[0]: 4, NODES[1]: 4}

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_burst_with_one_beginning_stays_together_and_spreads_before_it_queues_up(
    nodes: PlayedNodes, replicas: list[Any]
) -> None:
    async def main() -> None:
        routed = Routed(replicas)
        await routed.until_placing()
        beginning = prompt(3, 63)
        # Nobody has it yet, and each of them stays where it went.
        went = [await routed.send([*beginning, n]) for n in range(3)]
        assert len(set(went)) == 1
        # No first token comes: what waits there soon costs more than the beginning, computed again.
        more = [await routed.send([*beginning, *prompt(100 + n, 40)]) for n in range(9)]
        assert set(more) == set(NODES)

    asyncio.run(main())


def test_no_request_waits_for_a_directory_that_is_gone(
    nodes: PlayedNodes, replicas: list[Any], cluster: Cluster
) -> None:
    async def main() -> None:
        routed = Routed(replicas)
        await routed.until_placing()
        routed.done(await routed.send(prompt(4, 10)))
        planner = routed.router._planner
        cluster.down()
        loop = asyncio.get_running_loop()
        took = []
        for seed in range(5, 15):
            began = loop.time()
            node = await routed.send(prompt(seed, 10))
            took.append(loop.time() - began)
            assert node in NODES
            routed.done(node)
        body = json.dumps({"prompt": prompt(5, 10)}).encode()
        placed = await planner.place(HttpRequest("POST", "/v1/completions", b"", [], body))
        assert isinstance(placed, PlacedRequest)
        assert not placed.found
        # Ray has chosen for a new prompt, and a conversation goes on where it began.
        talk = prompt(20, 63)
        first = await routed.send(talk)
        for turn in range(6):
            routed.done(first)
            assert await routed.send([*talk, turn]) == first
        # It is left alone after the first question in vain.
        breakers = routed.router._directory._breakers
        assert breakers.num_opened >= 1
        assert breakers.num_refused >= 1
        assert max(took) < ROUTE_ANSWER_S + ROUTE_RENDER_S + 2.0
        # Whatever is no prompt asks nobody.
        assert await routed.send([], path="/tokenize") in NODES

    asyncio.run(main())
    assert nodes is not None
