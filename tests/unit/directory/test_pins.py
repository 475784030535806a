"""Pins, by example: through the block manager, with either table of chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import raykv.directory.pins
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Epoch, Key, Namespace, NodeId
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.pins import FAVOUR_S, LOOK_S
from raykv.protocol.engine import AttachEngine, Hints, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import DiskNews, DiskStats, Inventory, NodeReport, NodeStats
from raykv.protocol.operator import PinAnswer, PinOrder
from tests.fixtures.tables import TABLES, use_table

PAGE = SLOT_ALIGNMENT
SPACE = Namespace("model")
OPEN_DISK = DiskStats(path="/disk", room=100)
LINGER_S = 3.0
SETTINGS = ManagerSettings(
    engine_expiry_s=1e9, node_expiry_s=1e9, settle_s=0, pin_s=LINGER_S, pin_share=0.5
)


@pytest.fixture(params=TABLES, autouse=True)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, request.param)


def key(number: int) -> Key:
    return Key(number.to_bytes(8, "big") + bytes(4))


@dataclass
class Cluster:
    """A manager, and nodes of so many slots with an engine on each that stores what it is told."""

    slots: int = 8
    now: float = 100.0
    seqs: dict[str, int] = field(default_factory=dict)
    disks: dict[str, DiskNews] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.manager = BlockManager(Epoch(1), SETTINGS)

    def _seq(self, name: str) -> int:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.seqs[name]

    def report(
        self, node: str, stored: Inventory | None = None, disk: DiskNews | None = None
    ) -> None:
        pool = self.slots * PAGE
        has_disk = disk is not None or node in self.disks
        message = NodeReport(
            PROTOCOL_VERSION,
            node,
            1,
            self._seq(node),
            pool,
            pool,
            0,
            0,
            stored or Inventory(),
            stats=NodeStats(pool_bytes=pool, disk=OPEN_DISK if has_disk else DiskStats()),
            disk=disk or self.disks.get(node, DiskNews()),
        )
        if disk is not None:
            # It has been heard: nothing is new there.
            self.disks[node] = DiskNews(disk.listing, disk.upto, disk.upto)
        self.manager.node_report(message, self.now)
        self.manager.check()

    def add(self, node: str) -> None:
        self.report(node)
        hello = AttachEngine(
            PROTOCOL_VERSION, f"engine of {node}", node, SPACE, "tiny", 1, {0: PAGE}
        )
        assert not self.manager.attach_engine(hello, self.now).error

    def sync(
        self, node: str, wanted: dict[int, int] | None = None, hints: Hints | None = None
    ) -> SyncReply:
        name = f"engine of {node}"
        request = SyncRequest(
            EngineId(name), 1, self._seq(name), wanted=wanted or {}, hints=hints or Hints()
        )
        reply = self.manager.sync(request, self.now)
        assert not reply.attach
        self.manager.check()
        return reply

    def store(self, node: str, *numbers: int) -> int:
        """Store chunks, evicting others if need be; returns how many found a slot."""
        granted = self.sync(node, {0: len(numbers)}).granted
        keys = [key(number) for number in numbers][: len(granted.slots)]
        count = len(keys)
        rows = Inventory(
            [SPACE], [0] * count, [*keys], granted.slots, granted.generations, [PAGE] * count
        )
        self.report(node, rows)
        return count

    def held(self, node: str, *numbers: int) -> list[int]:
        holds = self.manager.holds
        return [number for number in numbers if holds(NodeId(node), SPACE, key(number))]

    def pin(
        self, *numbers: int, pin_id: str = "p", ttl_s: float = 50.0, priority: int | None = None
    ) -> PinAnswer:
        keys: list[bytes] = [key(number) for number in numbers]
        order = PinOrder(PROTOCOL_VERSION, pin_id, SPACE, keys, ttl_s, priority)
        answer = self.manager.pins.pin(order, self.now)
        self.manager.check()
        return answer

    def wait(self, seconds: float) -> list[str]:
        self.now += seconds
        ended = self.manager.pins.expire(self.now)
        self.manager.check()
        return ended


@pytest.fixture
def one() -> Cluster:
    made = Cluster()
    made.add("a")
    return made


def test_pinned_chunks_stay_while_all_others_are_evicted(one: Cluster) -> None:
    one.store("a", *range(8))
    assert one.pin(0, 1, 2).pin is not None
    for start in range(100, 140, 5):
        assert one.store("a", *range(start, start + 5)) == 5
    assert one.held("a", *range(8)) == [0, 1, 2]


def test_chunks_without_a_pin_are_evicted_in_the_same_place(one: Cluster) -> None:
    one.store("a", *range(8))
    one.store("a", *range(100, 105))
    assert one.held("a", *range(8)) == [5, 6, 7]


def test_slots_run_out_rather_than_a_pin(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    assert one.store("a", *range(100, 120)) == 5
    assert one.held("a", 0, 1, 2) == [0, 1, 2]


def test_unpinned_chunks_are_evicted_after_a_moment(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    assert one.manager.pins.unpin("p", one.now)
    assert not one.manager.pins.unpin("p", one.now)
    one.wait(LINGER_S)
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_pin_ends_with_its_time(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, ttl_s=10)
    assert one.wait(9) == []
    assert one.wait(1) == ["p"]
    assert one.manager.pins.pinned(one.now).pins == []
    one.wait(LINGER_S)
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_eviction_looks_at_the_time_itself_not_at_the_next_look(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, ttl_s=10)
    one.now += 10
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_short_soft_pin_does_not_shorten_a_pin(one: Cluster) -> None:
    """An engine that loads a chunk pins it for some seconds."""
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    request = SyncRequest(
        EngineId("engine of a"), 1, one._seq("engine of a"), pinned=[key(0)], asked=[key(1)]
    )
    one.manager.sync(request, one.now)
    one.wait(LINGER_S + 1)
    one.store("a", *range(100, 105))
    assert one.held("a", 0, 1, 2) == [0, 1, 2]


def test_chunk_that_is_not_stored_yet_is_pinned_when_it_comes(one: Cluster) -> None:
    answer = one.pin(0, 1)
    assert answer.pin is not None
    assert (answer.pin.chunks, answer.pin.held_chunks) == (2, 0)
    one.store("a", *range(8))
    one.store("a", *range(100, 106))
    assert one.held("a", *range(8)) == [0, 1]
    (pin,) = one.manager.pins.pinned(one.now).pins
    assert (pin.held_chunks, pin.kept_bytes) == (2, 2 * PAGE)


def test_pin_beyond_the_quota_is_refused_whole_with_a_sentence(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, pin_id="first")
    error = one.pin(1, 2, 3, 4).error
    for part in ("16.0 KiB more of node a", "pins take 4.0 KiB of the 16.0 KiB", "pin_share=0.5"):
        assert part in error, error
    assert [pin.pin_id for pin in one.manager.pins.pinned(one.now).pins] == ["first"]
    one.store("a", *range(100, 107))
    assert one.held("a", *range(8)) == [0]


def test_chunks_of_two_pins_count_once_and_stay_until_both_have_ended(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, 3, pin_id="long")
    assert not one.pin(2, 3, pin_id="short", ttl_s=5).error
    one.wait(6)
    one.manager.pins.unpin("long", one.now)
    (node,) = one.manager.pins.pinned(one.now).nodes
    assert node.kept_bytes == 0


def test_order_of_a_known_id_takes_the_place_of_the_earlier_one(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, 3)
    assert not one.pin(2, 3, 4, 5).error, "what it gives back counts"
    one.wait(LINGER_S)
    one.store("a", *range(100, 104))
    assert one.held("a", *range(8)) == [2, 3, 4, 5]
    assert one.pin(2, 3, 4, 5) == one.pin(2, 3, 4, 5), "it comes again"


def test_chunk_that_comes_when_pins_are_full_waits_for_room(one: Cluster) -> None:
    one.pin(*range(6), pin_id="wide")
    one.pin(4, 5, pin_id="narrow")
    one.store("a", *range(6))
    wide, narrow = one.manager.pins.pinned(one.now).pins
    assert (wide.held_chunks, wide.waiting_chunks) == (4, 2)
    assert (narrow.held_chunks, narrow.waiting_chunks) == (0, 2)
    one.manager.pins.unpin("wide", one.now)
    (pin,) = one.manager.pins.pinned(one.now).pins
    assert (pin.held_chunks, pin.waiting_chunks) == (2, 0)


def test_pin_that_takes_the_place_of_its_own_gets_the_room_before_what_waits(one: Cluster) -> None:
    one.pin(12, 0, 1, pin_id="other")
    one.pin(0, 1, 2, 3, 4, 12, pin_id="own")
    one.store("a", 5, 0, 1, 2, 3)
    one.store("a", 12)
    pin = one.pin(0, 2, 5, pin_id="own").pin
    assert pin is not None
    assert (pin.held_chunks, pin.waiting_chunks) == (3, 0)


def test_priority_gives_way_last_and_lowest_first(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, pin_id="firm")
    one.pin(1, pin_id="high", priority=9)
    one.pin(2, pin_id="low", priority=1)
    one.store("a", *range(100, 105))
    assert one.held("a", *range(8)) == [0, 1, 2]
    assert one.store("a", *range(110, 116)) == 6
    assert one.held("a", *range(8)) == [0, 1]
    assert one.store("a", *range(120, 128)) == 7
    assert one.held("a", *range(8)) == [0]


def test_replicas_are_pinned_on_every_node_that_has_them() -> None:
    cluster = Cluster()
    cluster.add("a")
    cluster.add("b")
    cluster.store("a", *range(8))
    cluster.pin(0, 1)
    cluster.store("b", 0, 1)
    kept = {node.node_id: node.kept_chunks for node in cluster.manager.pins.pinned(0).nodes}
    assert kept == {"a": 2, "b": 2}
    status = cluster.manager.status("", "", cluster.now)
    assert [(node.pinned_chunks, node.pinned_bytes) for node in status.nodes] == [(2, 2 * PAGE)] * 2


def test_pins_outlive_a_clearing_and_a_node(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1)
    one.manager.clear(SPACE)
    one.manager.check()
    one.sync("a")
    one.store("a", *range(8))
    one.store("a", *range(100, 106))
    assert one.held("a", *range(8)) == [0, 1]


def test_requests_pin_up_to_half_of_the_quota(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints([key(0), key(1), key(2)], [20.0] * 3))
    (node,) = one.manager.pins.pinned(one.now).nodes
    assert (node.kept_bytes, node.client_bytes, node.waiting_chunks) == (2 * PAGE, 2 * PAGE, 1)
    assert not one.pin(3, 4).error, "the operator has the other half"
    one.wait(20 + LOOK_S)
    assert one.manager.pins.pinned(one.now).client_chunks == 0


def test_priority_of_a_request_counts_for_a_while(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints(favoured=[key(0)], priorities=[3]))
    one.store("a", *range(100, 107))
    assert one.held("a", *range(8)) == [0]
    one.wait(FAVOUR_S)
    assert one.manager.pins.pinned(one.now).client_chunks == 0


def test_later_hint_makes_a_pin_longer_never_shorter(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints([key(0)], [30.0]))
    one.sync("a", hints=Hints([key(0)], [5.0]))
    one.wait(20)
    assert one.manager.pins.pinned(one.now).client_chunks == 1


def test_names_are_bounded(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.pins, "MAX_PINNED", 4)
    one.sync("a", hints=Hints([key(number) for number in range(6)], [20.0] * 6))
    pinned = one.manager.pins.pinned(one.now)
    assert (pinned.client_chunks, pinned.hints_refused) == (2, 4)
    assert "5 chunks would be pinned, more than 4 in all" in one.pin(10, 11, 12).error
    assert not one.pin(10, 11).error


def test_number_of_pins_is_bounded(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.pins, "MAX_PINS", 1)
    one.pin(0)
    assert "there are 1 pins already" in one.pin(1, pin_id="other").error
    assert not one.pin(1).error
