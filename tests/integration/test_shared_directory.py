"""The scheduler actor under real Ray: sessions without vLLM, and nodes that only report."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import ray

import raykv
from raykv.base.errors import ClusterError
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    ChunkName,
    EngineId,
    Epoch,
    Generation,
    Key,
    Lookup,
    Namespace,
    NodeId,
    Slot,
    make_generation,
)
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.engine.cost import FetchCost
from raykv.engine.remote import ChunkSize, FetchOrder, RemoteChunks, RemoteSettings
from raykv.engine.requests import RequestOptions
from raykv.engine.session import RayCalls, Session, SessionSettings
from raykv.engine.view import EngineView
from raykv.node.keeper import inventory_of
from raykv.protocol.engine import SyncRequest
from raykv.protocol.events import (
    BlockStored,
    CacheCleared,
    EpochBegan,
    EventsMissed,
    NodeJoined,
    NodeLost,
)
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeReport, NodeReportReply
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.one_node import actors_of_one_node, granted
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

NAMESPACE = "model"
POOL_BYTES = 64 << 20
NODE_EXPIRY_S = 5.0


@pytest.fixture
def head(cluster: Cluster) -> Iterator[str]:
    """Both actors, new for each test; the node's name."""
    with actors_of_one_node(cluster, POOL_BYTES) as node_id:
        yield node_id


class ReportingNode:
    """A NodeActor that has no memory: it only says what it holds."""

    def __init__(self, name: str, num_slots: int, epoch: int = 1) -> None:
        self.name = name
        self.pool_bytes = num_slots * SLOT_ALIGNMENT
        self.epoch = epoch
        self._seq = 0
        self._lock = threading.Lock()
        self._silent = threading.Event()
        self.report()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Heartbeats meanwhile."""
        thread = threading.Thread(target=self._beat)
        thread.start()
        try:
            yield
        finally:
            self._silent.set()
            thread.join()

    def _beat(self) -> None:
        while not self._silent.wait(1.0):
            self.report()

    def report(self, chunks: Sequence[ChunkName] = ()) -> NodeReportReply:
        with self._lock:
            return self._report(chunks)

    def _report(self, chunks: Sequence[ChunkName]) -> NodeReportReply:
        self._seq += 1
        message = NodeReport(
            version=PROTOCOL_VERSION,
            node_id=self.name,
            epoch=self.epoch,
            seq=self._seq,
            pool_bytes=self.pool_bytes,
            slab_bytes=self.pool_bytes,
            highest_generation=0,
            scheduler_epoch=0,
            stored=inventory_of(list(chunks)),
        )
        raw = ray.get(ask.find_scheduler_actor().report.remote(encode(message)), timeout=10.0)  # type: ignore[union-attr]
        return decode(raw, NodeReportReply)


def chunk(number: int, slot: int, generation: int, namespace: str = NAMESPACE) -> ChunkName:
    place = (Slot(slot), Generation(generation), SLOT_ALIGNMENT)
    return ChunkName(Namespace(namespace), key(number), *place)


def chunks(numbers: range, generation: int) -> list[ChunkName]:
    return [chunk(number, slot, generation) for slot, number in enumerate(numbers)]


class CountingCalls(RayCalls):
    """Remembers the messages."""

    def __init__(self) -> None:
        super().__init__(ask.find_scheduler_actor, 5.0)
        self.requests: list[SyncRequest] = []

    def sync(self, raw: bytes) -> bytes:
        self.requests.append(decode(raw, SyncRequest))
        return super().sync(raw)


@dataclass
class Engine:
    """An engine's view and session, without vLLM."""

    view: EngineView
    calls: CountingCalls
    session: Session

    def look(self, request: str, keys: list[Key]) -> set[Lookup]:
        self.session.drain()
        return {self.view.lookup(request, name, time.monotonic()) for name in keys}

    def ask(self, request: str, keys: list[Key]) -> None:
        self.view.start_request(request, RequestOptions())
        self.view.ask(request, keys)

    def exchange(self) -> None:
        """What the background thread does when it is nudged."""
        self.session._exchange_quietly()
        self.session.drain()


MakeEngine = Callable[[str, str], Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """A function that attaches an engine, given its name and its node."""
    made: list[Engine] = []

    def make(name: str, node_id: str) -> Engine:
        fetching = RemoteSettings(10.0, 10.0, 10.0, sizes={0: ChunkSize(SLOT_ALIGNMENT, 1)})
        remote = RemoteChunks(fetching, FetchCost())
        view = EngineView(EngineId(name), [0], 10.0, 8, remote=remote, node_id=NodeId(node_id))
        settings = SessionSettings(
            EngineId(name), NodeId(node_id), Namespace(NAMESPACE), "tiny", 1, {0: SLOT_ALIGNMENT}
        )
        calls = CountingCalls()
        engine = Engine(view, calls, Session(view, calls, settings))
        engine.session.attach(10.0)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.session.stop(5.0)


def test_question_about_ten_thousand_chunks_is_answered_in_one_exchange(
    head: str, make_engine: MakeEngine
) -> None:
    other = ReportingNode("other", 10_000)
    other.report(chunks(range(10_000), generation=granted(1)))
    engine = make_engine("asking", head)
    keys = [key(number) for number in range(10_000)]
    engine.ask("long", keys)
    assert engine.look("long", keys) == {Lookup.RETRY}
    engine.exchange()
    asked = [len(request.asked) for request in engine.calls.requests if request.asked]
    assert asked == [10_000]
    # All are found there: each waits for its fetch, or for a lease to fetch it into.
    assert Lookup.MISS not in engine.look("long", keys)
    assert engine.view.remote.take_orders()


def test_chunk_that_another_engine_is_storing_is_waited_for(
    head: str, make_engine: MakeEngine
) -> None:
    other = ReportingNode("other", 8)
    with other.beating():
        storing, waiting = make_engine("storing", "other"), make_engine("waiting", head)
        storing.exchange()
        storing.view.start_request("first", RequestOptions())
        plan = storing.view.prepare_store("first", [key(1)])
        assert plan is not None
        storing.exchange()
        waiting.ask("second", [key(1)])
        waiting.exchange()
        assert waiting.look("second", [key(1)]) == {Lookup.HIT_PENDING}
        assert not waiting.view.remote.take_orders()
        (handle,) = plan.handles
        other.report([chunk(1, handle.slot, handle.generation)])
        found: list[FetchOrder] = []

        def is_ordered() -> bool:
            waiting.exchange()
            assert waiting.look("second", [key(1)]) == {Lookup.HIT_PENDING}
            found.extend(waiting.view.remote.take_orders())
            return bool(found)

        wait_until(is_ordered, 5.0, "the question is asked again")
    assert [replica.handle for replica in found[0].replicas] == [handle]


def test_events_are_told_in_order_and_replayed_from_any_number(head: str) -> None:
    seen = list(raykv.events(since=0, follow=False))
    assert [type(event) for event in seen] == [EpochBegan, NodeJoined]
    node = ReportingNode("other", 4)
    node.report(chunks(range(2), generation=granted(1)))
    raykv.clear(NAMESPACE)
    more = list(raykv.events(since=seen[-1].seq, follow=False))
    assert [type(event) for event in more] == [NodeJoined, BlockStored, BlockStored, CacheCleared]
    assert [event.seq for event in [*seen, *more]] == list(range(1, 7))
    again = list(raykv.events(since=4, follow=False))
    # When it happened is known to about a second, and reckoned anew for each reader.
    for event, before in zip(again, more[2:], strict=True):
        assert event.time == pytest.approx(before.time, abs=1.0)
        assert msgspec.structs.replace(event, time=before.time) == before
    assert list(raykv.events(follow=False)) == []


def test_node_that_falls_silent_leaves_the_directory_within_seconds(
    head: str, cluster: Cluster
) -> None:
    node = ReportingNode("other", 4)
    node.report(chunks(range(2), generation=granted(1)))
    place = cluster.snapshot().place
    began = time.monotonic()
    lost = next(event for event in cluster.events(since=place) if isinstance(event, NodeLost))
    assert lost.node_id == "other"
    assert time.monotonic() - began < NODE_EXPIRY_S + 3.0
    assert not cluster.snapshot().chunks


def test_reader_is_told_when_the_scheduler_actor_has_a_new_life(
    head: str, cluster: Cluster
) -> None:
    reader = cluster.events(since=0)
    first = list(islice(reader, 2))
    assert [type(event) for event in first] == [EpochBegan, NodeJoined]
    ray.kill(ask.find_scheduler_actor(), no_restart=False)
    again = list(islice(reader, 2))
    assert [type(event) for event in again] == [EpochBegan, NodeJoined]
    assert again[0].epoch > first[0].epoch


def test_reader_whom_the_log_has_outrun_is_told_and_a_snapshot_puts_it_right(
    head: str, cluster: Cluster
) -> None:
    node = ReportingNode("other", 10_000)
    epoch = int(cluster.snapshot().place[0])
    for round_number in range(1, 10):
        generation = make_generation(Epoch(epoch), 1_000_000 * round_number)
        names = chunks(range(round_number * 10_000, (round_number + 1) * 10_000), generation)
        node.report(names)
    missed = next(cluster.events(since=1))
    assert isinstance(missed, EventsMissed)
    assert missed.missed
    snapshot = cluster.snapshot()
    assert len(snapshot.chunks) == 10_000
    assert list(cluster.events(since=snapshot.place, follow=False)) == []


def test_clearing_one_namespace_leaves_the_others(head: str, cluster: Cluster) -> None:
    node = ReportingNode("other", 4)
    node.report([*chunks(range(2), generation=granted(1)), chunk(9, 3, granted(1), "foreign")])
    raykv.clear(NAMESPACE)
    assert {name for _, name, _ in cluster.snapshot().chunks} == {"foreign"}
    with pytest.raises(ClusterError, match="foreig"):
        raykv.clear("nobody")
    raykv.clear()
    assert not cluster.snapshot().chunks


CREATOR = """
import sys
from raykv.cluster import ask, join as cluster
from raykv.directory.launch import scheduler_actor
from raykv.node.launch import node_actor
address, pool_bytes = sys.argv[1], int(sys.argv[2])
cluster.join(address)
node_id = cluster.resolve_node_id("")
print("ready", flush=True)
sys.stdin.readline()
scheduler = scheduler_actor(address, "lru")
node = node_actor(address, node_id, pool_bytes, 1 << 20, "")
print(scheduler._actor_id.hex(), node._actor_id.hex(), ask.describe(node, 30.0).pid)
"""


def test_creators_that_race_get_the_same_actors(cluster: Cluster, tmp_path: Path) -> None:
    cluster.down()
    script = tmp_path / "creator.py"
    script.write_text(CREATOR)
    command = [sys.executable, str(script), cluster.address, str(POOL_BYTES)]
    creators = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for creator in creators:
            assert creator.stdout is not None
            assert creator.stdout.readline() == "ready\n"
        outputs = [
            creator.communicate(input="\n", timeout=60.0)[0] for creator in start_all(creators)
        ]
    finally:
        for creator in creators:
            creator.kill()
            creator.communicate()
    assert all(creator.returncode == 0 for creator in creators)
    assert len(set(outputs)) == 1
    wait_until(lambda: len(cluster.status().nodes) == 1, 10.0, "the NodeActor reports")
    cluster.down()


def start_all(creators: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """All of them go on at the same time."""
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("\n")
        creator.stdin.flush()
    return creators
