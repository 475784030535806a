"""What more room would have saved, beside pools that really have it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest

from raykv.base.ids import Epoch, Key, NodeId
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.meter import room
from raykv.directory.meter.room import SIZES, RoomMeter
from raykv.protocol.descriptions import ChunkGroup
from raykv.protocol.engine import CHUNK_NAME_BYTES, AttachEngine, MissRecord
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.status import MoreRoom
from tests.fixtures.directory.desk import MODEL, PAGE, Desk
from tests.fixtures.keys import named_key

TOKENS = 16
GROUPS = [ChunkGroup(0, TOKENS)]
SLOT = SIZES[0]
"""Bytes: a size of more room is one more slot, or two, four, …"""

HERE = (NodeId("node"), Epoch(7))


def key(number: int) -> bytes:
    return b"%08d" % number + bytes(28)


def record(
    chunks: Sequence[int], found: int = 0, missed: int | None = None, why: str = "evicted"
) -> MissRecord:
    """Of a prompt of those chunks; `found` of them were there."""
    computed = (len(chunks) - found) * TOKENS if missed is None else missed
    names = b"".join(key(number)[:CHUNK_NAME_BYTES] for number in chunks)
    prompt = found * TOKENS + computed
    return MissRecord("r", prompt, 0, found * TOKENS, {why: computed}, chunks=names)


@pytest.fixture
def meter() -> RoomMeter:
    """Its node has given up the chunks 0, 1, 2 and 3, in this order."""
    made = RoomMeter()
    for number in range(4):
        made.evicted(HERE, [key(number)], SLOT)
    return made


def saved(meter: RoomMeter, now: float = 60.0) -> dict[int, int]:
    """Chunks by slots of more room."""
    found = meter.savings(1, SLOT, now)
    slots = [size // SLOT for size in found.more_bytes]
    return dict(zip(slots, (tokens // TOKENS for tokens in found.saved_tokens), strict=True))


def test_chunk_would_be_there_with_as_much_room_as_was_evicted_since(meter: RoomMeter) -> None:
    meter.take([record([3])], GROUPS, 0, 0.0)
    assert saved(meter)[1] == 1
    meter.take([record([1])], GROUPS, 0, 0.0)
    assert [saved(meter)[slots] for slots in (1, 2, 4, 8)] == [1, 1, 2, 2]


def test_prompt_counts_up_to_its_first_chunk_that_would_be_missing(meter: RoomMeter) -> None:
    meter.take([record([3, 0, 2])], GROUPS, 0, 0.0)
    assert [saved(meter)[slots] for slots in (1, 2, 4)] == [1, 1, 3]
    meter.take([record([9, 3])], GROUPS, 0, 0.0)
    assert saved(meter)[4] == 3


def test_what_was_found_is_not_saved(meter: RoomMeter) -> None:
    meter.take([record([3, 2], found=1)], GROUPS, 0, 0.0)
    assert [saved(meter)[slots] for slots in (1, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("why", "expected"), [("evicted", 1), ("never_stored", 1), ("opted_out", 0), ("cleared", 0)]
)
def test_tokens_count_that_were_computed_for_lack_of_a_chunk(
    meter: RoomMeter, why: str, expected: int
) -> None:
    meter.take([record([3], why=why)], GROUPS, 0, 0.0)
    assert saved(meter)[1] == expected


def test_last_chunk_counts_as_far_as_it_was_computed(meter: RoomMeter) -> None:
    meter.take([record([3, 2], missed=TOKENS + 5)], GROUPS, 0, 0.0)
    assert meter.savings(1, SLOT, 60.0).saved_tokens[0] == TOKENS


def test_window_of_the_same_name_is_another_chunk(meter: RoomMeter) -> None:
    meter.evicted(HERE, [b"%08d" % 7 + bytes(27) + b"\1"], SLOT)
    meter.take([record([7])], GROUPS, 0, 0.0)
    assert not any(saved(meter).values())


@pytest.mark.parametrize("groups", [[], [ChunkGroup(0, TOKENS, window=2)]])
def test_model_without_whole_prefixes_counts_tokens_only(
    meter: RoomMeter, groups: list[ChunkGroup]
) -> None:
    meter.take([record([3])], groups, 0, 0.0)
    found = meter.savings(1, SLOT, 60.0)
    assert (found.prompt_tokens, found.computed_tokens) == (TOKENS, TOKENS)
    assert not any(found.saved_tokens)


def test_pool_that_is_lost_would_have_kept_nothing(meter: RoomMeter) -> None:
    meter.lost(HERE)
    meter.take([record([3])], GROUPS, 0, 0.0)
    assert not any(saved(meter).values())
    # It comes back, and gives up others.
    meter.evicted((HERE[0], Epoch(8)), [key(50)], SLOT)
    meter.take([record([3])], GROUPS, 0, 0.0)
    assert not any(saved(meter).values())


def test_hour_is_what_counts(meter: RoomMeter) -> None:
    meter.take([record([3])], GROUPS, 0, 0.0)
    meter.take([record([3])], GROUPS, 0, 1800.0)
    found = meter.savings(2, 10 * SLOT, 1800.0)
    assert (found.window_s, found.saved_tokens[0]) == (1800.0, 2 * TOKENS)
    assert found.per_hour(found.saved_tokens[0]) == 4 * TOKENS
    assert (found.nodes, found.pool_bytes, found.reach_bytes) == (2, 10 * SLOT, None)
    assert saved(meter, 3700.0)[1] == 1
    assert meter.savings(1, SLOT, 9000.0).window_s == 0.0


def test_nothing_is_known_of_a_cluster_that_has_just_begun() -> None:
    found = RoomMeter().savings(0, 0, 5.0)
    assert (found.window_s, found.computed_tokens, found.per_hour(3)) == (0.0, 0, 0)
    assert found.saved_tokens == [0] * len(SIZES)


def test_memory_is_bounded_and_says_how_far_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_BEHIND", 8)
    meter = RoomMeter()
    for number in range(40):
        meter.evicted(HERE, [key(number)], SLOT)
    assert len(meter._behind) <= 8
    assert meter.savings(1, SLOT, 0.0).reach_bytes == 4 * SLOT
    assert meter.savings(2, SLOT, 0.0).reach_bytes == 2 * SLOT


class Pool:
    """Keeps what was used last."""

    def __init__(self, num_slots: int, gave_up: Callable[[int], None] = lambda _: None) -> None:
        self._num_slots = num_slots
        self._gave_up = gave_up
        self._held: OrderedDict[int, None] = OrderedDict()

    def use(self, chunk: int) -> bool:
        """Whether it was there; it is from now on."""
        is_there = chunk in self._held
        self._held[chunk] = None
        self._held.move_to_end(chunk)
        if len(self._held) > self._num_slots:
            self._gave_up(self._held.popitem(last=False)[0])
        return is_there


def compare(uses: Sequence[int], num_slots: int, more: int) -> tuple[int, int]:
    """What the meter says that more slots would have saved, and what they do."""
    meter = RoomMeter()
    own = Pool(num_slots, lambda chunk: meter.evicted(HERE, [key(chunk)], SLOT))
    larger = Pool(num_slots + more)
    truth = 0
    for chunk in uses:
        if own.use(chunk):
            larger.use(chunk)
            continue
        truth += larger.use(chunk)
        # The record comes when the request has ended, after its own store.
        meter.take([record([chunk], why="never_stored")], GROUPS, SLOT, 0.0)
    return saved(meter)[more], truth


@pytest.mark.parametrize("more", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_more_slots_save_what_the_meter_says_or_a_little_more(seed: int, more: int) -> None:
    rng = random.Random(seed)
    uses = [int(rng.paretovariate(1.0)) % 60 for _ in range(3000)]
    said, truth = compare(uses, 10, more)
    assert 0.4 * truth <= said <= truth


@pytest.mark.parametrize("more", [2, 4, 8])
def test_documents_that_come_in_turn_need_room_for_all(more: int) -> None:
    uses = [number % 12 for number in range(600)]
    said, truth = compare(uses, 8, more)
    assert (said > 0) == (truth > 0) == (more >= 4)


# In the manager


def answered(desk: Desk) -> MoreRoom:
    return desk.manager.more_room(desk.now)


def is_held(desk: Desk, chunk: bytes) -> bool:
    (node,) = desk.manager._nodes.values()
    return node.book.find(MODEL, Key(chunk)) is not None


class NamedDesk(Desk):
    """Its chunks have keys like vLLM's."""

    def key(self, letter: str) -> bytes:
        return named_key(letter)


def test_manager_counts_what_its_nodes_evict_and_its_engines_miss() -> None:
    desk = NamedDesk(BlockManager(Epoch(1), ManagerSettings(settle_s=0.0, pin_s=0.0)))
    desk.report("node")
    message = AttachEngine(
        *(PROTOCOL_VERSION, "engine", "node", "model", "tiny", 1, {0: PAGE}),
        traits={"chunks": f"0:{TOKENS}"},
    )
    assert not desk.manager.attach_engine(message, desk.now).error
    names = [named_key(letter) for letter in "abcd"]
    desk.store("node", "abcd", "engine")
    desk.store("node", "ef", "engine")
    gone = next(name for name in names if not is_held(desk, name))
    missed = MissRecord(
        *("r", TOKENS + 3, 0, 0, {"evicted": TOKENS, "incomplete_chunk": 3}, gone),
        chunks=gone[:CHUNK_NAME_BYTES],
        chunk_tokens=TOKENS,
    )
    desk.sync("engine", finished=[missed])
    found = answered(desk)
    assert (found.nodes, found.pool_bytes) == (1, 4 * PAGE)
    assert (found.prompt_tokens, found.computed_tokens) == (TOKENS + 3, TOKENS + 3)
    assert found.saved_tokens[0] == TOKENS
