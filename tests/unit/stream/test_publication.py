"""The publication: streams of messages out of the event log, for subscribers that may miss some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.ids import Key, Namespace, NodeId
from raykv.protocol.descriptions import Description, pack_tokens
from raykv.protocol.events import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Event,
    LifeBegan,
    NodeJoined,
    NodeLost,
)
from raykv.stream import publication
from raykv.stream.format import WireFormat
from raykv.stream.replay import Replay
from raykv.stream.wire import ChunkId, Stream
from tests.fixtures.wire_index import WireIndex

FIRST = 1000
MODEL = Namespace("model")
A, B = NodeId("a"), NodeId("b")


def block_hash(number: int) -> bytes:
    return b"hash %27d" % number


def key(number: int, group: int = 0) -> Key:
    return Key(block_hash(number) + group.to_bytes(4, "big"))


def described(
    number: int,
    namespace: Namespace = MODEL,
    *,
    root: bool = False,
    inner: tuple[int, ...] = (),
) -> Description:
    """Chunk n follows on chunk n - 1."""
    return Description(
        namespace=namespace,
        key=key(number),
        parent=None if root else block_hash(number - 1),
        inner=b"".join(map(block_hash, inner)),
        tokens=pack_tokens([number] * 2 * (1 + len(inner))),
        block_size=2,
        model="tiny",
        kind="full_attention",
    )


@pytest.mark.parametrize("length", [1, 4, 5])
def test_chunk_with_a_short_key_is_an_event_like_others(length: int) -> None:
    stream = Stream("kv", WireFormat(), FIRST)
    name = MODEL, Key(b"k" * length)
    stream.add(name, A, None)
    stream.check()
    assert len(stream.take_events()) == 2
    stream.remove(name, A)
    stream.check()
    assert not stream.held


def test_block_that_a_description_names_twice_is_counted_twice() -> None:
    stream = Stream("kv", WireFormat(), FIRST)
    name = MODEL, key(7)
    stream.add(name, A, None)
    stream.add(name, B, described(7, inner=(1, 2, 1)))
    stream.check()
    for node_id in (A, B):
        stream.remove(name, node_id)
        stream.check()


class World:
    """A publication, what engines have said, and a subscriber that misses nothing."""

    def __init__(self, topic: str = "kv@{node}@{model}", hashes: str = "bytes") -> None:
        self.publication = publication.Publication(
            WireFormat(hashes=hashes), topic, FIRST, msgspec.msgpack.encode
        )
        self.publication.nodes = {
            A: publication.NodePlace("1.1.1.1", "host-a"),
            B: publication.NodePlace("2.2.2.2", "b"),
        }
        self.publication.models = {MODEL: "tiny"}
        self.said: dict[ChunkId, Description] = {}
        self.index = WireIndex()
        self.now = 0.0
        self._seq = 0
        self.sent: list[publication.Message] = []

    def say(self, *rows: Description) -> None:
        self.said |= {(Namespace(row.namespace), Key(row.key)): row for row in rows}

    def event(self, kind: type[Event], **fields: Any) -> None:
        self._seq += 1
        self.publication.apply(kind(life=1, seq=self._seq, **fields), self.now)

    def stored(self, number: int, node: str = A, namespace: str = MODEL, group: int = 0) -> None:
        self._block(BlockStored, number, node, namespace, group)

    def removed(self, number: int, node: str = A, namespace: str = MODEL) -> None:
        self._block(BlockRemoved, number, node, namespace, 0)

    def _block(self, kind: type[Event], number: int, node: str, namespace: str, group: int) -> None:
        place = {"node_id": node, "namespace": namespace, "key": key(number, group)}
        if node not in self.publication._replay.nodes:
            self.event(NodeJoined, node_id=node, node_life=1, number=0)
        self.event(kind, **place, node_life=1, number=self._seq)

    def cleared(self, namespace: str, names: Iterable[tuple[str, int]]) -> None:
        """A namespace is cleared: its chunks, by node, go one by one."""
        self.event(CacheCleared, namespace=namespace, history=1, floor=1)
        for node, number in names:
            self.removed(number, node, namespace)

    def settle(self, seconds: float = 0.0) -> list[publication.Message]:
        """Some time passes, questions are asked, and what is published reaches the subscriber."""
        self.now += seconds
        while asked := self.publication.questions(self.now, 3):
            rows = {name: self.said[name] for name in asked if name in self.said}
            self.publication.answer(asked, rows, self.now)
        self.publication.check()
        messages = self.publication.take_messages(0.0)
        for message in messages:
            self.index.take(message.topic, message.seq, message.payload)
        self.sent += messages
        return messages

    def seen(self, topic: str = "kv@a@tiny") -> set[int | bytes]:
        return {name for _, name in self.index.blocks.get(topic, {})}


def test_chunks_are_told_with_their_tokens_after_the_one_before_them() -> None:
    world = World()
    world.say(*(described(number, root=number == 1) for number in range(1, 8)))
    for number in (5, 3, 7, 1, 2, 6, 4):
        world.stored(number)
    world.settle()
    assert world.seen() == {block_hash(number) for number in range(1, 8)}
    assert not world.index.orphans
    block = world.index.blocks["kv@a@tiny"][0, block_hash(3)]
    assert (block.parent, block.tokens, block.size) == (block_hash(2), [3, 3], 2)


def test_chunk_waits_until_the_one_before_it_is_told_or_gone() -> None:
    world = World()
    world.say(described(2), described(6))
    for number in (1, 2, 5, 6):
        world.stored(number)
    world.settle()
    assert not world.seen()
    world.removed(5)
    world.settle()
    assert world.seen() == {block_hash(6)}
    world.settle(publication.UNDESCRIBED_S)
    assert world.seen() == {block_hash(number) for number in (1, 2, 6)}


def test_description_may_come_after_the_chunk() -> None:
    world = World()
    world.stored(1)
    world.settle()
    assert not world.seen()
    world.say(described(1))
    world.settle(publication.ASK_AGAIN_S)
    assert world.seen() == {block_hash(1)}
    assert world.publication.counters["undescribed"] == 0


def test_chunk_that_nobody_describes_is_told_as_a_bare_hash_until_somebody_does() -> None:
    world = World()
    world.stored(1)
    world.settle()
    world.settle(publication.UNDESCRIBED_S)
    assert world.index.blocks["kv@a@tiny"][0, block_hash(1)].tokens == []
    assert world.publication.counters["undescribed"] == 1
    world.say(described(1, inner=(100, 101)))
    assert not world.settle(publication.ASK_AGAIN_S)
    world.settle(publication.ASK_LATE_S)
    assert world.seen() == {block_hash(number) for number in (100, 101, 1)}
    assert world.index.blocks["kv@a@tiny"][0, block_hash(1)].tokens == [1, 1]
    world.removed(1)
    world.settle()
    assert not world.seen()


def test_chunk_that_goes_while_it_waits_is_never_told() -> None:
    world = World()
    world.stored(1)
    world.settle()
    world.removed(1)
    assert not world.settle(publication.UNDESCRIBED_S)
    assert world.publication.num_waiting == 0


def test_block_is_stored_with_its_first_copy_and_removed_with_its_last_in_a_shared_stream() -> None:
    world = World(topic="all")
    world.say(described(1))
    world.stored(1, A)
    assert world.settle()
    world.stored(1, B)
    assert not world.settle()
    world.removed(1, A)
    assert not world.settle()
    assert world.seen("all") == {block_hash(1)}
    world.removed(1, B)
    world.settle()
    assert not world.seen("all")


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("kv@{node}@{model}", "kv@a@tiny"),
        ("kv@{ip}:8000@{model}", "kv@1.1.1.1:8000@tiny"),
        ("{host}/{namespace}", "host-a/model"),
        ("", ""),
    ],
)
def test_topic_names_node_and_model(topic: str, expected: str) -> None:
    world = World(topic)
    world.say(described(1))
    world.stored(1)
    (message,) = world.settle()
    assert message.topic == expected


def test_chunk_waits_for_the_names_in_its_topic_for_a_while() -> None:
    world = World()
    world.publication.nodes, world.publication.models = {}, {}
    world.event(NodeJoined, node_id=A, node_life=1, number=0)
    world.say(described(1))
    world.stored(1)
    world.settle()
    assert not world.sent
    assert world.publication.unnamed == ({A}, set())
    world.settle(publication.UNPLACED_S)
    # The model's name came with the description.
    assert world.sent[0].topic == "kv@a@tiny"


def test_stream_begins_with_a_clearing_and_has_numbers_without_gaps() -> None:
    world = World()
    for number in range(300):
        world.say(described(number, root=True))
        world.stored(number)
    world.settle()
    assert [message.seq for message in world.sent] == list(range(FIRST, FIRST + len(world.sent)))
    assert len(world.sent) == 3
    (_, events, _) = msgspec.msgpack.decode(world.sent[0].payload)
    assert events[0] == {"type": "AllBlocksCleared"}


def test_all_is_taken_back_and_told_again_in_a_new_life() -> None:
    world = World()
    world.say(described(1), described(2))
    world.stored(1)
    world.settle()
    world.event(LifeBegan)
    world.stored(2)
    (message,) = world.settle()
    (_, events, _) = msgspec.msgpack.decode(message.payload)
    # Some subscribers take no notice of the second.
    kinds = [event["type"] for event in events]
    assert kinds == ["BlockRemoved", "AllBlocksCleared", "BlockStored"]
    assert world.seen() == {block_hash(2)}
    assert world.publication.counters["restarts"] == 1


def snapshot(*numbers: int) -> Replay:
    replay = Replay()
    replay.place = (7, 9)
    replay.load(A, 1, [(MODEL, key(number)) for number in numbers])
    return replay


def test_restart_from_a_snapshot_gives_what_is_in_it() -> None:
    world = World()
    world.say(*(described(number, root=True) for number in range(5)))
    world.stored(4)
    world.settle()
    world.publication.restart(snapshot(1, 2, 3), world.now)
    world.settle()
    assert world.seen() == {block_hash(number) for number in (1, 2, 3)}
    assert world.publication.place == (7, 9)


def test_questions_have_a_bound_and_come_again() -> None:
    world = World()
    for number in range(5):
        world.stored(number)
    names = []
    while asked := world.publication.questions(0.0, 2):
        assert len(asked) <= 2
        names += asked
        world.publication.answer(asked, {}, 0.0)
    assert sorted(names) == [(MODEL, key(number)) for number in range(5)]
    assert not world.publication.questions(publication.ASK_AGAIN_S / 2, 9)
    assert len(world.publication.questions(publication.ASK_AGAIN_S, 9)) == 5


def test_chunks_beyond_the_bound_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "MAX_HELD_BYTES", 2000)
    world = World()
    world.say(*(described(number, root=True) for number in range(6)))
    for number in range(6):
        world.stored(number)
    world.settle()
    assert world.publication.counters["skipped"] == 6 - len(world.seen())
    assert 1 < len(world.seen()) < 6
    for number in range(6):
        world.removed(number)
    world.stored(9)
    world.say(described(9))
    world.settle()
    assert world.seen() == {block_hash(9)}


# Subscribers that have missed something


def missed(world: World, start: int, topic: str = "") -> Iterator[publication.Message]:
    yield from world.publication.replay(start, topic, 0.0)


def fill(world: World, count: int) -> None:
    for number in range(count):
        world.say(described(number, root=True))
        world.stored(number)
        world.settle()


def test_replay_gives_the_same_messages_again_from_a_number_on() -> None:
    world = World()
    fill(world, 5)
    assert list(missed(world, FIRST + 2)) == world.sent[2:]
    assert list(missed(world, 0)) == world.sent
    assert list(missed(world, FIRST + 5)) == []


def test_replay_is_for_topics_that_begin_so() -> None:
    world = World()
    world.say(described(1), described(2))
    world.stored(1, A)
    world.stored(2, B)
    world.settle()
    assert {message.topic for message in missed(world, 0)} == {"kv@a@tiny", "kv@b@tiny"}
    assert {message.topic for message in missed(world, 0, "kv@b")} == {"kv@b@tiny"}


@pytest.mark.parametrize("start", [0, FIRST, FIRST + 3])
def test_replay_of_what_is_not_kept_is_a_picture_under_the_last_numbers(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    monkeypatch.setattr(publication, "MAX_KEPT", 4)
    world = World()
    fill(world, 20)
    world.removed(3)
    world.settle()
    world.stored(50)
    world.say(described(50, root=True))
    world.settle()
    late = WireIndex(last_seq={"kv@a@tiny": start - 1}) if start else WireIndex()
    messages = list(missed(world, start))
    assert all(start <= message.seq for message in messages)
    for message in messages:
        late.apply(message.topic, message.payload)
    assert late.blocks == world.index.blocks
    assert messages[-1].seq == world.sent[-1].seq
    assert [m.seq for m in messages] == list(range(messages[0].seq, messages[-1].seq + 1))


def test_picture_takes_no_more_messages_than_numbers_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "MAX_KEPT", 1)
    monkeypatch.setattr(publication, "MAX_EVENTS", 2)
    world = World()
    fill(world, 40)
    last = world.sent[-1].seq
    (first, second) = missed(world, last - 1)
    assert (first.seq, second.seq) == (last - 1, last)
    late = WireIndex()
    for message in (first, second):
        late.apply(message.topic, message.payload)
    assert late.blocks == world.index.blocks


def test_kept_messages_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "MAX_KEPT_BYTES", 1000)
    world = World()
    fill(world, 30)
    assert 1 <= len(world.publication._kept) < 30
    world.publication.check()


# All together


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["stored", "removed", "say"]),
            st.integers(0, 9),
            st.sampled_from([A, B]),
            st.sampled_from(["model", "other"]),
        ),
        st.tuples(st.sampled_from(["settle", "late", "lost", "cleared", "life"])),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    steps=STEPS,
    topic=st.sampled_from(["all", "kv@{node}@{model}", "{namespace}"]),
    kept=st.integers(1, 5),
)
def test_subscribers_know_the_directory_whatever_happens_and_whatever_they_miss(
    steps: list[Any], topic: str, kept: int
) -> None:
    """One subscriber hears all, one comes late, one goes deaf in the middle."""
    world = World(topic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publication, "MAX_KEPT", kept)
        held: set[tuple[str, str, int]] = set()
        for step in [*steps, ("late",), ("late",)]:
            play(world, held, step)
        late, deaf = WireIndex(), WireIndex()
        for message in world.sent[: len(world.sent) // 2]:
            deaf.take(message.topic, message.seq, message.payload)
        for index in (late, deaf):
            for name in {message.topic for message in world.sent}:
                start = index.last_seq.get(name, -1) + 1
                for message in world.publication.replay(start, name, 0.0):
                    assert message.seq >= start
                    index.apply(message.topic, message.payload)
    assert not world.index.gaps
    expected: dict[str, set[bytes]] = {}
    for node, namespace, number in held:
        # A model whose name came too late has been told under its namespace's.
        names = [world.publication.models.get(Namespace(namespace), namespace), namespace]
        streams = [topic.format(node=node, model=name, namespace=namespace) for name in names]
        stream = world.publication._topics[NodeId(node), Namespace(namespace)]
        assert stream in streams
        expected.setdefault(stream, set()).add(block_hash(number))
    for index in (world.index, late, deaf):
        seen = {name: {each for _, each in blocks} for name, blocks in index.blocks.items()}
        assert {name: blocks for name, blocks in seen.items() if blocks} == expected


def test_model_is_named_before_any_chunk_of_the_same_answer_is_told() -> None:
    world = World()
    world.stored(0, namespace="other")
    world.settle(0.1)
    world.stored(1, namespace="other")
    world.say(described(0, Namespace("other"), root=True))
    world.settle(2 * publication.UNDESCRIBED_S)
    assert world.seen() == {block_hash(0), block_hash(1)}
    assert not world.seen("kv@a@other")


def play(world: World, held: set[tuple[str, str, int]], step: Any) -> None:
    match step:
        case ("stored", number, node, namespace):
            held.add((node, namespace, number))
            world.stored(number, node, namespace)
        case ("removed", number, node, namespace):
            held.discard((node, namespace, number))
            world.removed(number, node, namespace)
        case ("say", number, _, namespace):
            world.say(described(number, Namespace(namespace), root=number == 0))
        case ("settle",):
            world.settle(0.1)
        case ("late",):
            world.settle(publication.UNDESCRIBED_S)
        case ("lost",):
            held -= {each for each in held if each[0] == A}
            world.event(NodeLost, node_id=A, node_life=1, number=0)
        case ("cleared",):
            void = {each for each in held if each[1] == "model"}
            held -= void
            world.cleared("model", [(node, number) for node, _, number in void])
        case ("life",):
            held.clear()
            world.event(LifeBegan)
