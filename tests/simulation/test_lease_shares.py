"""Engines whose models have several KV groups, in pools that are not large: what they have stored
is there when they want it again.

The block manager and the engines' views are real; copies succeed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from raykv.base.ids import EngineId, Epoch, Key, Lookup, Namespace
from raykv.base.settings import load_settings
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.engine.cost import FetchCost
from raykv.engine.remote import ChunkSize, RemoteChunks, RemoteSettings
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handle, Keys
from raykv.protocol.engine import AttachEngine, SyncReply
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import Inventory, NodeReport, NodeStats

KIB, MIB = 1 << 10, 1 << 20
SPACE = Namespace("model")
NODE_EPOCH = 1
LEASE_SLOTS = load_settings({}, {}).lease_slots
SETTINGS = ManagerSettings(engine_expiry_s=1e9, node_expiry_s=1e9, settle_s=0)


@dataclass
class Node:
    """A node of one pool, and engines of one model beside each other on it.

    `slot_bytes` by KV group.
    """

    slot_bytes: dict[int, int]
    pool_bytes: int
    num_engines: int = 1
    step_chunks: int = 0
    views: list[EngineView] = field(default_factory=list)
    seq: int = 0
    now: float = 100.0

    def __post_init__(self) -> None:
        self.manager = BlockManager(Epoch(1), SETTINGS)
        self.report(Inventory())
        for number in range(self.num_engines):
            engine_id = EngineId(f"engine {number}")
            sizes = {group: ChunkSize(size) for group, size in self.slot_bytes.items()}
            settings = RemoteSettings(sizes=sizes, step_tokens=self.step_chunks)
            remote = RemoteChunks(settings, FetchCost())
            view = EngineView(engine_id, self.slot_bytes, 1.0, LEASE_SLOTS, remote)
            hello = AttachEngine(
                PROTOCOL_VERSION, engine_id, "node", SPACE, "tiny", 1, self.slot_bytes
            )
            view.attached(self.manager.attach_engine(hello, self.now))
            self.views.append(view)
        self.exchange()

    def report(self, stored: Inventory) -> None:
        self.seq += 1
        self.now += 0.1
        stats = NodeStats(pool_bytes=self.pool_bytes)
        self.manager.node_report(
            NodeReport(
                PROTOCOL_VERSION,
                "node",
                NODE_EPOCH,
                self.seq,
                self.pool_bytes,
                16 * MIB,
                0,
                0,
                stored,
                stats=stats,
            ),
            self.now,
        )
        self.manager.check()

    def exchange(self) -> None:
        """All views and the manager until nobody has news."""
        for _ in range(20):
            for view in self.views:
                reply = SyncReply(0, 0, more=True)
                while reply.more:
                    request = view.take_request(Epoch(1), may_grow=True, may_want=True)
                    reply = self.manager.sync(request, self.now)
                    view.apply(reply, request)
                view.check()
            self.manager.check()
            if not any(view.has_news or view.wants_leases for view in self.views):
                return

    def ask(self, prompt: int, num_chunks: int, engine: int = 0) -> int:
        """A request for a prompt: load what is there, store the rest; how many chunks were there,
        up to the first one of which some group's part is missing.
        """
        view, request_id = self.views[engine], f"{prompt} {self.now}"
        view.start_request(request_id, RequestOptions())
        keys = {
            group: [chunk_key(prompt, at, group) for at in range(num_chunks)]
            for group in self.slot_bytes
        }
        found = num_chunks
        for group in self.slot_bytes:
            hits = [view.lookup(request_id, key, self.now) is Lookup.HIT for key in keys[group]]
            found = min(found, [*hits, False].index(False))
        every = [key for group in keys.values() for key in group]
        plan = view.prepare_store(request_id, every)
        if plan is not None:
            view.complete_store(plan.keys)
            self.report(inventory(plan.keys, plan.handles, self.slot_bytes))
        view.finish_request(request_id)
        self.exchange()
        return found

    def leased(self) -> int:
        return sum(len(view.declared_leases()[1].slots) for view in self.views)


def chunk_key(prompt: int, at: int, group: int) -> Key:
    return Key(prompt.to_bytes(4, "big") + at.to_bytes(4, "big") + group.to_bytes(4, "big"))


def inventory(keys: list[Key], handles: list[Handle], slot_bytes: dict[int, int]) -> Inventory:
    sizes = [slot_bytes[int.from_bytes(key[-4:], "big")] for key in keys]
    return Inventory(
        [SPACE],
        [0] * len(keys),
        Keys.of([*keys]),
        [handle.slot for handle in handles],
        [handle.generation for handle in handles],
        sizes,
    )


def rounds(node: Node, num_prompts: int, num_chunks: int, count: int = 3) -> list[int]:
    """How many chunks are loaded in each round of the same prompts, one engine after the other."""
    loaded = []
    for _ in range(count):
        found = [
            node.ask(prompt, num_chunks, prompt % len(node.views)) for prompt in range(num_prompts)
        ]
        loaded.append(sum(found))
    return loaded


@pytest.mark.parametrize("num_engines", [1, 2, 4])
def test_working_set_of_four_groups_that_fits_the_pool_is_loaded(num_engines: int) -> None:
    """Qwen3-Next's slots; 28 chunks a group, where the pool has room for 900."""
    node = Node(dict.fromkeys(range(4), 144 * KIB), 512 * MIB, num_engines)
    first, *later = rounds(node, 4, 7)
    assert first == 0
    assert later == [28, 28]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_half_of_a_small_pool_is_used_by_six_groups(num_engines: int) -> None:
    """Gemma 3: six groups share 384 slots; 192 chunks are wanted again and again."""
    slot = 256 * KIB
    node = Node(dict.fromkeys(range(6), slot), 384 * slot, num_engines)
    loaded = rounds(node, 8, 4, 6)
    assert loaded[-1] == 32


def test_engines_of_a_node_lease_a_quarter_of_its_pool_together() -> None:
    slot = 256 * KIB
    node = Node(dict.fromkeys(range(6), slot), 384 * slot, 3)
    assert 0 < node.leased() <= 384 // 4 + 3 * 6
    rounds(node, 6, 3)
    assert 0 < node.leased() <= 384 // 4 + 3 * 6


def test_engine_that_stores_has_what_an_idle_one_gives_back() -> None:
    node = Node({0: MIB}, 400 * MIB, 2)
    busy, idle = node.views
    before = [len(view.declared_leases()[1].slots) for view in (busy, idle)]
    for prompt in range(400):
        node.ask(prompt, 20)
    after = [len(view.declared_leases()[1].slots) for view in (busy, idle)]
    assert before[0] == before[1]
    assert after[1] < before[1]
    assert after[0] > before[0]
    assert sum(after) <= 100


def test_what_one_step_stores_finds_room_in_a_small_pool_beside_idle_engines() -> None:
    """Of `bench ttft`: 4,096 tokens at once, in a pool of 182 chunks that is filled again and
    again.
    """
    node = Node({0: MIB}, 182 * MIB, 2, step_chunks=32)
    for prompt in range(12):
        node.ask(prompt, 32, engine=prompt % 2)
    assert [view.counters.chunks_stored for view in node.views] == [6 * 32, 6 * 32]


def test_engines_hold_half_of_a_pool_for_steps_that_it_has_no_room_for() -> None:
    node = Node({0: MIB, 1: MIB}, 182 * MIB, 4, step_chunks=64)
    assert 3 * 182 // 8 < node.leased() <= 182 // 2


def test_first_prompts_of_a_model_with_three_groups_are_stored() -> None:
    """A grant is a page of 2,048 leases, which no group gets alone."""
    node = Node(dict.fromkeys(range(3), 16 * KIB), 512 * MIB)
    for prompt in range(8):
        node.ask(prompt, 8)
    assert [node.ask(prompt, 8) for prompt in range(8)] == [8] * 8


def test_groups_get_leases_by_what_they_store() -> None:
    """One stores a chunk where the other stores twenty."""
    node = Node({0: MIB, 1: MIB}, 400 * MIB)
    (view,) = node.views
    for prompt in range(300):
        request_id = str(prompt)
        view.start_request(request_id, RequestOptions())
        keys = [chunk_key(prompt, at, 0) for at in range(20)] + [chunk_key(prompt, 0, 1)]
        plan = view.prepare_store(request_id, keys)
        assert plan is not None
        assert len(plan.keys) == 21
        view.complete_store(plan.keys)
        node.report(inventory(plan.keys, plan.handles, node.slot_bytes))
        view.finish_request(request_id)
        node.exchange()
    counts = [view._stock.target(group) for group in (0, 1)]
    assert counts[0] > 2 * counts[1] > 0
