"""What more room would have saved, beside pools that really have it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import pytest

from raykv.node.accounts import savings
from raykv.node.accounts.requests import EndedRequest
from raykv.node.accounts.savings import SIZES, Savings
from raykv.protocol.descriptions import ChunkGroup, groups_text
from raykv.protocol.engine import CHUNK_NAME_BYTES, EngineHello, MissRecord

TOKENS = 16
GROUPS = [ChunkGroup(0, TOKENS)]
SLOT = SIZES[0]
"""Bytes: a size of more room is one more slot, or two, four, …"""


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
def meter() -> Savings:
    """Its node has given up the chunks 0, 1, 2 and 3, in this order."""
    made = Savings()
    for number in range(4):
        made.evicted(key(number), SLOT)
    return made


def take(
    meter: Savings,
    record: MissRecord,
    now: float,
    groups: Sequence[ChunkGroup] = GROUPS,
    slot_bytes: int = 0,
) -> None:
    """A request has ended, of an engine with these KV groups and slots of that size."""
    traits = {"chunks": groups_text(groups)}
    hello = EngineHello("e", 1, "n", slot_bytes={0: slot_bytes}, traits=traits)
    meter.take(EndedRequest(record, hello, now), now)


def saved(meter: Savings, now: float = 60.0) -> dict[int, int]:
    """Chunks by slots of more room."""
    found = meter.told(SLOT, now)
    slots = [size // SLOT for size in found.more_bytes]
    return dict(zip(slots, (tokens // TOKENS for tokens in found.saved_tokens), strict=True))


def test_chunk_would_be_there_with_as_much_room_as_was_evicted_since(meter: Savings) -> None:
    take(meter, record([3]), 0.0)
    assert saved(meter)[1] == 1
    take(meter, record([1]), 0.0)
    assert [saved(meter)[slots] for slots in (1, 2, 4, 8)] == [1, 1, 2, 2]


def test_prompt_counts_up_to_its_first_chunk_that_would_be_missing(meter: Savings) -> None:
    take(meter, record([3, 0, 2]), 0.0)
    assert [saved(meter)[slots] for slots in (1, 2, 4)] == [1, 1, 3]
    take(meter, record([9, 3]), 0.0)
    assert saved(meter)[4] == 3


def test_what_was_found_is_not_saved(meter: Savings) -> None:
    take(meter, record([3, 2], found=1), 0.0)
    assert [saved(meter)[slots] for slots in (1, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("why", "expected"), [("evicted", 1), ("never_stored", 1), ("opted_out", 0), ("cleared", 0)]
)
def test_tokens_count_that_were_computed_for_lack_of_a_chunk(
    meter: Savings, why: str, expected: int
) -> None:
    take(meter, record([3], why=why), 0.0)
    assert saved(meter)[1] == expected


def test_last_chunk_counts_as_far_as_it_was_computed(meter: Savings) -> None:
    take(meter, record([3, 2], missed=TOKENS + 5), 0.0)
    assert meter.told(SLOT, 60.0).saved_tokens[0] == TOKENS


def test_window_of_the_same_name_is_another_chunk(meter: Savings) -> None:
    meter.evicted(b"%08d" % 7 + bytes(27) + b"\1", SLOT)
    take(meter, record([7]), 0.0)
    assert not any(saved(meter).values())


@pytest.mark.parametrize("groups", [[], [ChunkGroup(0, TOKENS, window=2)]])
def test_model_without_whole_prefixes_counts_tokens_only(
    meter: Savings, groups: list[ChunkGroup]
) -> None:
    take(meter, record([3]), 0.0, groups)
    found = meter.told(SLOT, 60.0)
    assert (found.prompt_tokens, found.computed_tokens) == (TOKENS, TOKENS)
    assert not any(found.saved_tokens)


def test_names_that_are_cut_off_end_what_is_counted(meter: Savings) -> None:
    whole = record([3, 2])
    cut = msgspec.structs.replace(whole, chunks=whole.chunks[:CHUNK_NAME_BYTES])
    take(meter, cut, 0.0)
    assert [saved(meter)[slots] for slots in (1, 2)] == [1, 1]


def test_hour_is_what_counts(meter: Savings) -> None:
    take(meter, record([3]), 0.0)
    take(meter, record([3]), 1800.0)
    found = meter.told(10 * SLOT, 1800.0)
    assert (found.window_s, found.saved_tokens[0]) == (1800.0, 2 * TOKENS)
    assert found.per_hour(found.saved_tokens[0]) == 4 * TOKENS
    assert (found.nodes, found.pool_bytes, found.reach_bytes) == (1, 10 * SLOT, None)
    assert saved(meter, 3700.0)[1] == 1
    assert meter.told(SLOT, 9000.0).window_s == 0.0


def test_nothing_is_known_of_a_node_that_has_just_begun() -> None:
    found = Savings().told(0, 5.0)
    assert (found.window_s, found.computed_tokens, found.per_hour(3)) == (0.0, 0, 0)
    assert found.saved_tokens == [0] * len(SIZES)


def test_memory_is_bounded_and_says_how_far_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savings, "MOST_BEHIND", 8)
    meter = Savings()
    for number in range(40):
        meter.evicted(key(number), SLOT)
    assert meter.told(SLOT, 0.0).reach_bytes == 4 * SLOT
    take(meter, record([39]), 0.0)
    take(meter, record([30]), 0.0)
    assert max(saved(meter).values()) == 1


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
    meter = Savings()
    own = Pool(num_slots, lambda chunk: meter.evicted(key(chunk), SLOT))
    larger = Pool(num_slots + more)
    truth = 0
    for chunk in uses:
        if own.use(chunk):
            larger.use(chunk)
            continue
        truth += larger.use(chunk)
        # The record comes when the request has ended, after its own store.
        take(meter, record([chunk], why="never_stored"), 0.0, GROUPS, SLOT)
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
