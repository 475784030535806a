"""What a publisher publishes: the event stream in, numbered messages in vLLM's format out.

          stored           described, its parent told or late        removed, lost, cleared
 (absent) ──────► waiting ──────────────────────────────────► held ───────────────────────► (absent)
                      │ nothing known for a while               ▲
                      └──────► held as a bare hash ─────────────┘ described at last

A chunk waits for what an engine says of it, which may come before or after the news that it is
stored, and for the chunk before it, without which subscribers can't place it. Every chunk that is
held is in one stream for each node that has it; the topic says which.

Invariants:
1. A chunk of the directory waits, is held, or was counted as skipped. One that waits is in one of
   the queues, or blocked by one that waits.
2. The messages that are kept are the latest ones of all streams, within two bounds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raykv.base.ids import Namespace, NodeId
from raykv.protocol.descriptions import Description
from raykv.protocol.events import Event, LifeBegan
from raykv.stream.descriptions import ROW_BYTES
from raykv.stream.format import WireFormat, batch
from raykv.stream.replay import Place, Replay
from raykv.stream.wire import ChunkId, Stream, parent_of

MAX_EVENTS = 128
"""In one message: 128 chunks of 128 tokens are about 60 KB."""

MAX_KEPT = 10_000
MAX_KEPT_BYTES = 64 << 20
"""Messages that are kept for those who missed them, of all streams together."""

MAX_HELD_BYTES = 512 << 20
"""Of descriptions that are held; chunks beyond are skipped."""

UNDESCRIBED_S = 5.0
"""An engine's description comes with its next exchange, within about a second."""

UNPLACED_S = 2.0
"""For a node's and a model's name, which are asked for with the next round."""

ASK_AGAIN_S = 0.5
"""Between two looks at a chunk that waits."""

ASK_LATE_S = 30.0
"""Between two questions for a chunk that is held without a description."""


@dataclass(frozen=True)
class NodePlace:
    """What a topic may call a node."""

    ip: str
    host: str


@dataclass(frozen=True)
class Message:
    """Three frames in the making."""

    topic: str
    seq: int
    payload: bytes


@dataclass(slots=True)
class _Wait:
    since: float
    nodes: set[NodeId] = field(default_factory=set)
    description: Description | None = None


class Publication:
    """See the module's docstring. All times are seconds of one monotonic clock of the caller.

    Args:
        form: how events look.
        topic: a stream's name, with fields in braces.
        first_seq: of all streams; above every number of earlier lives.
        encode: makes bytes of a payload.
    """

    def __init__(
        self, form: WireFormat, topic: str, first_seq: int, encode: Callable[[Any], bytes]
    ) -> None:
        self._form = form
        self._topic = topic
        self._first_seq = first_seq
        self._encode = encode
        self._replay = Replay()
        self._waiting: dict[ChunkId, _Wait] = {}
        # Chunks to be looked at, with the time from which on; each in the order of their times.
        self._fresh: deque[ChunkId] = deque()
        self._again: deque[tuple[float, ChunkId]] = deque()
        self._late: deque[tuple[float, ChunkId]] = deque()
        # By a waiting chunk: those behind it in a prompt that wait for it.
        self._blocked: dict[ChunkId, list[ChunkId]] = {}
        self._streams: dict[str, Stream] = {}
        self._topics: dict[tuple[NodeId, Namespace], str] = {}
        self._kept: deque[tuple[Stream, int, bytes]] = deque()
        self._kept_bytes = 0
        self._held_bytes = 0
        # Names for topics, given by the caller; those of models by descriptions too.
        self.nodes: dict[NodeId, NodePlace] = {}
        self.models: dict[Namespace, str] = {}
        # Since the publisher's start, by their names in `PublisherStatus`.
        self.counters: Counter[str] = Counter()

    # In

    @property
    def place(self) -> tuple[int, int]:
        """Life and number of the last event that is in here."""
        return self._replay.place

    def restart(self, replay: Replay, now: float) -> None:
        """Begin anew from a snapshot: all is taken back, and published again."""
        self._clear()
        self._replay = replay
        self._came(replay.chunks, now)

    def apply(self, event: Event, now: float) -> None:
        """Take in the next event of the log; not `EventsMissed`: restart then."""
        moved = self._replay.apply(event)
        if isinstance(event, LifeBegan):
            self._clear()
            return
        self._went(moved.went)
        self._came(moved.came, now)

    def _clear(self) -> None:
        if self._streams:
            self.counters["restarts"] += 1
        self._waiting.clear()
        self._blocked.clear()
        for queue in (self._fresh, self._again, self._late):
            queue.clear()
        for stream in self._streams.values():
            stream.clear()
        self._held_bytes = 0

    def _came(self, places: Iterable[Place], now: float) -> None:
        for node_id, namespace, key in places:
            name = (namespace, key)
            wait = self._waiting.get(name)
            if wait is None:
                wait = self._waiting[name] = _Wait(now)
                self._fresh.append(name)
            wait.nodes.add(node_id)

    def _went(self, places: Iterable[Place]) -> None:
        for node_id, namespace, key in places:
            name = (namespace, key)
            wait = self._waiting.get(name)
            if wait is not None and node_id in wait.nodes:
                wait.nodes.discard(node_id)
                if not wait.nodes:
                    del self._waiting[name]
                    self._fresh += self._blocked.pop(name, ())
            topic = self._topics.get((node_id, namespace))
            gone = None if topic is None else self._streams[topic].remove(name, node_id)
            if gone is not None:
                self._held_bytes -= _bytes_of(gone.description)

    # Descriptions

    def questions(self, now: float, most: int) -> list[ChunkId]:
        """Up to `most` chunks whose descriptions are wanted; give these to `answer`."""
        found: list[ChunkId] = []
        while self._fresh and len(found) < most:
            found.append(self._fresh.popleft())
        for queue in (self._again, self._late):
            while queue and len(found) < most and queue[0][0] <= now:
                found.append(queue.popleft()[1])
        return [name for name in dict.fromkeys(found) if self._is_wanted(name)]

    def _is_wanted(self, name: ChunkId) -> bool:
        if name in self._waiting:
            return True
        held = [stream.held[name] for stream in self._streams.values() if name in stream.held]
        return any(each.description is None for each in held)

    def answer(
        self, asked: Sequence[ChunkId], rows: Mapping[ChunkId, Description], now: float
    ) -> None:
        """Take the answer to `questions`, and publish the chunks that can be."""
        for name, known in rows.items():
            # Before any of them is published: a stream keeps the name under which it first was.
            if known.model:
                self.models.setdefault(name[0], known.model)
        for name in asked:
            row = rows.get(name)
            wait = self._waiting.get(name)
            if wait is None:
                self._describe_late(name, row, now)
                continue
            wait.description = row or wait.description
            self._tell_in_order(name, now)

    def _tell_in_order(self, name: ChunkId, now: float) -> None:
        """Publish a chunk if it is ready, and then those that waited for it."""
        due = [name]
        while due:
            each = due.pop()
            wait = self._waiting.get(each)
            if wait is None:
                continue
            parent = parent_of(each, wait.description)
            if parent is not None and parent != each and parent in self._waiting:
                self._blocked.setdefault(parent, []).append(each)
            elif self._may_tell(each, wait, now):
                self._tell(each, self._waiting.pop(each), now)
                due += self._blocked.pop(each, ())
            else:
                self._again.append((now + ASK_AGAIN_S, each))

    def _may_tell(self, name: ChunkId, wait: _Wait, now: float) -> bool:
        """Whether it is described, and its nodes and model have names; or it is late."""
        waited = now - wait.since
        if wait.description is None and waited < UNDESCRIBED_S:
            return False
        is_named = all(self._is_named(node_id, name[0]) for node_id in wait.nodes)
        return is_named or waited >= UNPLACED_S

    def _is_named(self, node_id: NodeId, namespace: Namespace) -> bool:
        """Whether a topic can name them, or has."""
        is_known = node_id in self.nodes and namespace in self.models
        return is_known or (node_id, namespace) in self._topics

    def _describe_late(self, name: ChunkId, row: Description | None, now: float) -> None:
        for stream in self._streams.values():
            holding = stream.held.get(name)
            if holding is None or holding.description is not None:
                continue
            if row is None:
                self._late.append((now + ASK_LATE_S, name))
                return
            self._held_bytes += _bytes_of(row)
            for node_id in list(holding.nodes):
                stream.add(name, node_id, row)

    def _tell(self, name: ChunkId, wait: _Wait, now: float) -> None:
        if wait.description is None:
            self.counters["undescribed"] += 1
            self._late.append((now + ASK_LATE_S, name))
        for node_id in wait.nodes:
            stream = self._stream_of(node_id, name[0])
            if name not in stream.held:
                if self._held_bytes + _bytes_of(wait.description) > MAX_HELD_BYTES:
                    self.counters["skipped"] += 1
                    continue
                self._held_bytes += _bytes_of(wait.description)
            stream.add(name, node_id, wait.description)

    # Streams

    def _stream_of(self, node_id: NodeId, namespace: Namespace) -> Stream:
        topic = self._topics.get((node_id, namespace))
        if topic is None:
            place = self.nodes.get(node_id, NodePlace(node_id, node_id))
            topic = self._topics[node_id, namespace] = self._topic.format(
                node=node_id,
                ip=place.ip,
                host=place.host,
                model=self.models.get(namespace, namespace),
                namespace=namespace,
            )
        if topic not in self._streams:
            self._streams[topic] = Stream(topic, self._form, self._first_seq)
        return self._streams[topic]

    @property
    def num_streams(self) -> int:
        """Topics so far."""
        return len(self._streams)

    @property
    def num_held(self) -> int:
        """Chunks that subscribers know of; one that is in several streams counts for each."""
        return sum(len(stream.held) for stream in self._streams.values())

    @property
    def num_waiting(self) -> int:
        """Chunks that are not published yet."""
        return len(self._waiting)

    @property
    def unnamed(self) -> tuple[set[NodeId], set[Namespace]]:
        """Nodes and namespaces that topics have no name for yet."""
        nodes = {node_id for node_id in self._replay.nodes if node_id not in self.nodes}
        waiting = {name[0] for name in self._waiting}
        return nodes, waiting - self.models.keys()

    # Out

    def take_messages(self, wall_time: float) -> list[Message]:
        """Everything to be published now, in order; kept for `replay`, within bounds."""
        messages = []
        for stream in self._streams.values():
            events = stream.take_events()
            for first in range(0, len(events), MAX_EVENTS):
                payload = self._encode(batch(wall_time, events[first : first + MAX_EVENTS]))
                message = Message(stream.topic, stream.number(), payload)
                self._keep(stream, message)
                messages.append(message)
        self.counters["messages"] += len(messages)
        return messages

    def _keep(self, stream: Stream, message: Message) -> None:
        self._kept.append((stream, message.seq, message.payload))
        self._kept_bytes += len(message.payload)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            oldest, seq, payload = self._kept.popleft()
            self._kept_bytes -= len(payload)
            oldest.first_kept = seq + 1

    def replay(self, start: int, topic: str, wall_time: float) -> list[Message]:
        """What subscribers of the streams whose topics begin so have missed, from a number on.

        Where messages are not kept any more, a picture of all that is held now takes their place,
        under the last of the numbers that are missing.
        """
        messages = []
        for stream in self._streams.values():
            if not stream.topic.startswith(topic) or start >= stream.next_seq:
                continue
            if max(start, stream.first_seq) >= stream.first_kept:
                messages += [
                    Message(stream.topic, seq, payload)
                    for kept, seq, payload in self._kept
                    if kept is stream and seq >= start
                ]
            else:
                messages += self._picture(stream, max(start, stream.first_seq), wall_time)
        return messages

    def _picture(self, stream: Stream, start: int, wall_time: float) -> list[Message]:
        events = list(stream.picture())
        num_numbers = stream.next_seq - start
        size = max(MAX_EVENTS, -(-len(events) // num_numbers))
        pages = [events[first : first + size] for first in range(0, len(events), size)]
        first_seq = stream.next_seq - len(pages)
        return [
            Message(stream.topic, first_seq + number, self._encode(batch(wall_time, page)))
            for number, page in enumerate(pages)
        ]

    def check(self) -> None:
        """Assert the invariants; for tests."""
        held: set[Place] = set()
        for stream in self._streams.values():
            stream.check()
            held |= {(node, *name) for name, each in stream.held.items() for node in each.nodes}
        waiting = {(node, *name) for name, each in self._waiting.items() for node in each.nodes}
        assert not held & waiting, held & waiting
        missing = self._replay.chunks - held - waiting
        assert len(missing) <= self.counters["skipped"], missing
        assert held | waiting <= self._replay.chunks
        assert self._kept_bytes == sum(len(payload) for _, _, payload in self._kept)


def _bytes_of(description: Description | None) -> int:
    return ROW_BYTES + (0 if description is None else description.num_bytes)
