"""The publisher under real Ray, with a subscriber that keeps an index as a router does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import ray
import zmq
from typer.testing import CliRunner

from raykv.base.errors import ClusterError
from raykv.base.ids import Key
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.protocol.descriptions import Description, Descriptions, pack_tokens
from raykv.protocol.events import PublisherStatus
from raykv.protocol.framing import encode
from raykv.stream.publishing import find_publisher
from tests.fixtures.one_node import actors_of_one_node
from tests.fixtures.played_node import played_actor
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import wait_until
from tests.fixtures.wire_index import WireIndex

pytestmark = pytest.mark.integration

NAMESPACE = "model"
NODES = ("first", "second")
NUM_CHUNKS = 1024
SETTLED_S = 30.0


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(number: int) -> Key:
    return Key(block_hash(number) + bytes(4))


def description(number: int) -> Description:
    """Chunks of a hundred are a prompt."""
    return Description(
        namespace=NAMESPACE,
        key=key(number),
        parent=block_hash(number - 1) if number % 100 else None,
        inner=b"",
        tokens=pack_tokens([number, number + 1]),
        block_size=2,
        model="tiny",
        kind="full_attention",
    )


class Subscriber:
    """Reads in a thread of its own; asks for what it has missed, as vLLM's example does."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.index = WireIndex()
        self.lock = threading.Lock()
        # A deaf one throws away what it reads.
        self.is_deaf = False
        self.num_asked = self.num_thrown_away = 0
        self._endpoint, self._replay = endpoint, replay
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(20.0)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as events:
            events.connect(self._endpoint)
            events.setsockopt(zmq.SUBSCRIBE, b"kv@")
            with context.socket(zmq.DEALER) as questions:
                questions.setsockopt(zmq.LINGER, 0)
                questions.connect(self._replay)
                self._ask(questions, 0)
                while not self._ended.is_set():
                    if events.poll(100):
                        self._take(questions, *events.recv_multipart())

    def _take(
        self, questions: zmq.Socket[bytes], topic: bytes, seq_bytes: bytes, payload: bytes
    ) -> None:
        if self.is_deaf:
            self.num_thrown_away += 1
            return
        name, seq = topic.decode(), int.from_bytes(seq_bytes, "big")
        last = self.index.last_seq.get(name)
        if last is not None and seq > last + 1:
            self._ask(questions, last + 1, topic)
        with self.lock:
            self.index.take(name, seq, payload)

    def _ask(self, questions: zmq.Socket[bytes], start: int, *topic: bytes) -> None:
        self.num_asked += 1
        questions.send_multipart([b"", start.to_bytes(8, "big"), *topic])
        while questions.poll(10_000):
            _, name, seq, payload = questions.recv_multipart()
            if not payload:
                assert seq == (-1).to_bytes(8, "big", signed=True)
                return
            with self.lock:
                self.index.last_seq.setdefault(name.decode(), -1)
                # The picture's numbers may leave some out.
                self.index.last_seq[name.decode()] = int.from_bytes(seq, "big") - 1
                self.index.take(name.decode(), int.from_bytes(seq, "big"), payload)
        raise AssertionError("no answer from the replay socket")

    def blocks(self) -> dict[str, set[int | bytes]]:
        """What it believes, by stream."""
        with self.lock:
            return {
                topic: {name for _, name in blocks}
                for topic, blocks in self.index.blocks.items()
                if blocks
            }


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


class Scene:
    """A cluster with a publisher, nodes whose engines describe, and a subscriber."""

    def __init__(self, cluster: Cluster) -> None:
        endpoint, replay = (f"tcp://*:{free_port()}" for _ in range(2))
        self.settings = [endpoint, "--replay", replay, "--hashes", "bytes"]
        self.cluster = cluster
        self.started = json.loads(run("publish", "start", *self.settings, "--json"))
        self._ends = ExitStack()
        self.nodes = {
            name: self._ends.enter_context(played_actor(name, NUM_CHUNKS)) for name in NODES
        }
        self.subscriber = Subscriber(self.started["endpoint"], self.started["replay_endpoint"])

    def stop(self) -> None:
        self.subscriber.stop()
        self._ends.close()

    def publisher(self) -> PublisherStatus:
        """What it says; without a process while it is not there."""
        nobody = PublisherStatus("", "", "", "", "", pid=0)
        try:
            return self.cluster.publisher() or nobody
        except ClusterError:
            return nobody

    def store(self, name: str, numbers: range) -> None:
        """The news and what the engine says of it come in any order."""
        node = self.nodes[name]
        keys = [key(number) for number in numbers]
        stored = node.store.remote(keys, NAMESPACE)
        inside = encode(Descriptions([description(number) for number in numbers]))
        ray.get([stored, node.tell_inside.remote(inside)], timeout=SETTLED_S)

    def settle(self, num_chunks: int) -> None:
        """Wait until the subscriber believes what the directory has."""
        expected: dict[str, set[int | bytes]] = {}

        def agrees() -> bool:
            chunks = self.cluster.snapshot().chunks
            expected.clear()
            for node_id, _, name in chunks:
                expected.setdefault(f"kv@{node_id}@tiny", set()).add(name[:-4])
            return len(chunks) == num_chunks and self.subscriber.blocks() == expected

        wait_until(agrees, SETTLED_S, f"the subscriber knows of {num_chunks} chunks")


@pytest.fixture(scope="module")
def scene(cluster: Cluster) -> Iterator[Scene]:
    with actors_of_one_node(cluster, 16 << 20):
        made = Scene(cluster)
        yield made
        made.stop()


def test_subscriber_builds_the_directory_with_tokens_and_parents(scene: Scene) -> None:
    scene.store(NODES[0], range(300))
    scene.store(NODES[1], range(150))
    scene.settle(450)
    index = scene.subscriber.index
    for (group, name), block in index.blocks[f"kv@{NODES[0]}@tiny"].items():
        assert isinstance(name, bytes)
        number = int.from_bytes(name, "big")
        parent = block_hash(number - 1) if number % 100 else None
        assert (group, block.parent, block.tokens) == (0, parent, [number, number + 1])
    assert not index.orphans
    assert not index.gaps
    status = json.loads(run("publish", "status", "--json"))
    assert (status["held"], status["streams"], status["undescribed"]) == (450, 2, 0)
    assert "450 chunks published in 2 streams" in run("publish", "status")


def test_tokens_of_chunks_are_known_to_clients(scene: Scene) -> None:
    known = scene.cluster.tokens_of([key(5), b"no such key", key(200)])
    assert {name: row.token_ids for name, row in known.items()} == {
        key(5): [5, 6],
        key(200): [200, 201],
    }
    assert known[key(5)] == description(5)
    assert scene.cluster.tokens_of([key(5)], "other") == {}


def test_deaf_subscriber_gets_what_it_has_missed(scene: Scene) -> None:
    asked = scene.subscriber.num_asked
    scene.subscriber.is_deaf = True
    scene.store(NODES[1], range(300, 400))
    wait_until(lambda: scene.publisher().held == 550, SETTLED_S, "the chunks are told")
    wait_until(lambda: scene.subscriber.num_thrown_away > 0, SETTLED_S, "some come to the deaf one")
    scene.subscriber.is_deaf = False
    scene.store(NODES[1], range(400, 410))
    scene.settle(560)
    assert scene.subscriber.num_asked > asked


def test_all_is_told_again_after_the_scheduler_actor_has_died(scene: Scene) -> None:
    before = scene.cluster.status().life
    ray.kill(ask.find_scheduler_actor(), no_restart=False)

    def is_back() -> bool:
        try:
            return scene.cluster.status().life > before
        except ClusterError:
            return False

    wait_until(is_back, SETTLED_S, "another scheduler actor")
    scene.settle(560)
    index = scene.subscriber.index
    blocks = [block for blocks in index.blocks.values() for block in blocks.values()]
    assert all(block.tokens for block in blocks)


def test_publisher_that_has_died_goes_on_where_it_was(scene: Scene) -> None:
    """Its numbers begin anew, higher: subscribers see a gap, and ask for what they have missed."""
    asked, pid = scene.subscriber.num_asked, scene.publisher().pid
    ray.kill(find_publisher(), no_restart=False)
    scene.store(NODES[0], range(500, 510))
    wait_until(lambda: scene.publisher().pid not in (0, pid), SETTLED_S, "another publisher")
    scene.settle(570)
    assert scene.subscriber.num_asked > asked


def test_clearing_takes_all_back(scene: Scene) -> None:
    scene.cluster.clear()
    scene.settle(0)
    assert scene.cluster.tokens_of([key(5)]) == {}


def test_second_publisher_is_refused_and_the_same_one_is_not(scene: Scene) -> None:
    run("publish", "start", *scene.settings)
    result = CliRunner().invoke(app, ["publish", "start", scene.settings[0], "--topic", "other"])
    assert "a publisher runs already" in str(result.exception)
    run("publish", "stop")
    wait_until(lambda: scene.cluster.publisher() is None, 10.0, "the publisher has ended")
    assert CliRunner().invoke(app, ["publish", "stop"]).exit_code == 1
    assert CliRunner().invoke(app, ["publish", "status"]).exit_code == 1
