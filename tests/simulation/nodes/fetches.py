"""Fetches of one life of a NodeActor, and what other nodes read here.

Each chunk is read from one source after the other. A source sends what is in the slot, block by
block; what has come is written likewise, once it has a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.base.ids import Key, Namespace, NodeId, Refusal, Stamp
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyResult, Fetch, Read, ReadReply
from raykv.protocol.framing import decode, encode
from tests.fixtures.node.owned_pool import land
from tests.simulation.nodes.content import Content, blocks_of
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.nodes.cluster import Cluster
    from tests.simulation.nodes.node import PlayedNode

ReadAnswer = tuple[ReadReply, Content]


@dataclass(eq=False)
class ReadUnderWay:
    """Another node reads a chunk; `left` are the blocks that are still to be copied."""

    record: ChunkRecord
    reply: ReadReply
    post: Callable[[ReadAnswer], None]
    left: deque[tuple[int, int]]
    content: Content = field(default_factory=dict)


@dataclass(eq=False)
class Landing:
    """A chunk on its way here. `record` is where it is written, once its bytes have come."""

    key: Key
    slot_bytes: int
    sources: deque[NodeId]
    refusal: Refusal = Refusal.NOT_HERE
    is_done: bool = False
    call: Call[ReadAnswer] | None = None
    record: ChunkRecord | None = None
    left: deque[tuple[int, int]] = field(default_factory=deque)
    content: Content = field(default_factory=dict)


@dataclass(eq=False)
class FetchUnderWay:
    """An order of an engine."""

    order: Fetch
    post: Callable[[CopyResult], None]
    landings: list[Landing]


class Fetches:
    """See the module's docstring."""

    def __init__(self, cluster: Cluster, node: PlayedNode) -> None:
        self._cluster = cluster
        self._node = node
        self.under_way: list[FetchUnderWay] = []
        self.reads: list[ReadUnderWay] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way or self.reads)

    def die(self) -> None:
        """No answer means anything to a dead node."""
        for fetch in self.under_way:
            for landing in fetch.landings:
                if landing.call is not None:
                    landing.call.forget()
        self.under_way.clear()
        self.reads.clear()

    # Here

    def begin(self, order: Fetch, post: Callable[[CopyResult], None]) -> None:
        """An engine wants chunks of other nodes."""
        order = decode(encode(order), Fetch)
        sources = order.sources.by_key(len(order.keys))
        landings = [
            Landing(Key(key), size, deque(NodeId(each.node_id) for each in sources.get(at, ())))
            for at, (key, size) in enumerate(zip(order.keys, order.slot_bytes, strict=True))
        ]
        fetch = FetchUnderWay(order, post, landings)
        self.under_way.append(fetch)
        for landing in landings:
            self._read_next(fetch, landing)

    def _read_next(self, fetch: FetchUnderWay, landing: Landing) -> None:
        """Ask the next source for the chunk; when there is none left, it has failed."""
        if not landing.sources:
            self._end(fetch, landing, landing.refusal)
            return
        node_id = landing.sources.popleft()
        namespace = fetch.order.namespace
        request = Read(namespace, Keys.of([landing.key]), Numbers.of([landing.slot_bytes]))
        landing.call = Call(
            f"read of {landing.key!r} at {node_id} for {self._node}",
            (self._node.node_id, node_id),
            lambda post: self._cluster.at(node_id, lambda node: node.fetches.read(request, post)),
            lambda answer: self._node.receive(lambda: self._arrived(fetch, landing, *answer)),
            lambda: self._node.receive(lambda: self._try_other(fetch, landing, Refusal.NODE_LOST)),
        )
        self._cluster.wire.send(landing.call)

    def _try_other(self, fetch: FetchUnderWay, landing: Landing, refusal: Refusal) -> None:
        if not landing.is_done:
            landing.refusal = refusal
            self._read_next(fetch, landing)

    def _arrived(
        self, fetch: FetchUnderWay, landing: Landing, reply: ReadReply, content: Content
    ) -> None:
        if landing.is_done:
            return
        refusal = Refusal(reply.refusals[0])
        if refusal is not Refusal.NONE:
            self._try_other(fetch, landing, refusal)
            return
        (row,) = reply.rows
        record = land(
            self._node.pool,
            Namespace(fetch.order.namespace),
            landing.key,
            landing.slot_bytes,
            Stamp(reply.histories[0], reply.stamps[0]),
            row.blocks,
            fetch.order.tenant,
            self._node.clock,
        )
        if isinstance(record, Refusal):
            self._end(fetch, landing, record)
            return
        landing.record, landing.content, landing.left = record, content, deque(content)
        self._node.check_slots()

    def write(self, fetch: FetchUnderWay, landing: Landing, num_blocks: int, *, ok: bool) -> None:
        """Some blocks of what has come are written."""
        record = landing.record
        assert record is not None
        for _ in range(min(num_blocks, len(landing.left))):
            rank, block = landing.left.popleft()
            self._node.memory.write(record, rank, block, landing.content[rank, block])
        if not ok or not landing.left:
            self._landed(fetch, landing, Refusal.NONE if ok else Refusal.COPY_FAILED)

    def _landed(self, fetch: FetchUnderWay, landing: Landing, refusal: Refusal) -> None:
        record = landing.record
        assert record is not None
        landing.record = None
        self._node.pool.landings.landed(record, ok=refusal is Refusal.NONE)
        if refusal is Refusal.NONE and record.state is not ChunkState.READY:
            refusal = Refusal.CLEARED
        self._end(fetch, landing, refusal)

    def end_late(self, fetch: FetchUnderWay) -> None:
        """The deadline of a fetch has passed: what is not there won't come."""
        for landing in [each for each in fetch.landings if not each.is_done]:
            if landing.record is not None:
                self._landed(fetch, landing, Refusal.TOO_LATE)
            else:
                self._end(fetch, landing, Refusal.TOO_LATE)

    def _end(self, fetch: FetchUnderWay, landing: Landing, refusal: Refusal) -> None:
        landing.refusal, landing.is_done = refusal, True
        if landing.call is not None:
            landing.call.forget()
        if not all(each.is_done for each in fetch.landings):
            return
        self.under_way.remove(fetch)
        life, number, rows = self._node.pool.state_of(
            Namespace(fetch.order.namespace), [each.key for each in fetch.landings]
        )
        failed = {
            at: each.refusal
            for at, each in enumerate(fetch.landings)
            if each.refusal is not Refusal.NONE
        }
        result = CopyResult(
            fetch.order.number,
            life,
            number,
            rows,
            Numbers.of(failed),
            bytes(failed.values()),
            4096 * (len(fetch.landings) - len(failed)),
            0.01,
        )
        fetch.post(decode(encode(result), CopyResult))

    def writing(self) -> Iterator[tuple[FetchUnderWay, Landing]]:
        """What has come and is being written."""
        for fetch in self.under_way:
            for landing in fetch.landings:
                if landing.record is not None:
                    yield fetch, landing

    # For others

    def read(self, request: Read, post: Callable[[ReadAnswer], None]) -> None:
        """Begin to copy one chunk out, or refuse it."""
        request = decode(encode(request), Read)
        namespace = Namespace(request.namespace)
        keys = [Key(key) for key in request.keys]
        pool = self._node.pool
        (found,) = pool.begin_read(namespace, keys, request.slot_bytes, self._node.clock)
        life, number, rows = pool.state_of(namespace, keys)
        if isinstance(found, Refusal):
            refused = ReadReply(life, number, bytes([found]), rows)
            post((decode(encode(refused), ReadReply), {}))
            return
        reply = ReadReply(
            life,
            number,
            bytes([Refusal.NONE]),
            rows,
            [],
            Numbers.of([found.stamp.history]),
            Numbers.of([found.stamp.number]),
        )
        ranks = range(self._cluster.num_ranks_of(namespace))
        left = deque((rank, block) for rank in ranks for block in blocks_of(found.blocks))
        self.reads.append(ReadUnderWay(found, reply, post, left))

    def send(self, read: ReadUnderWay, num_blocks: int) -> None:
        """Some blocks are copied out; after the last one the bytes are sent."""
        for _ in range(min(num_blocks, len(read.left))):
            rank, block = read.left.popleft()
            read.content[rank, block] = self._node.memory.read(read.record, rank, block)
        if read.left:
            return
        self.reads.remove(read)
        self._node.pool.index.end_load(read.record)
        content = read.content
        if any(each is not None and each.is_damaged for each in content.values()):
            reply = read.reply
            refused = ReadReply(reply.life, reply.number, bytes([Refusal.CORRUPT]), reply.rows)
            read.post((refused, {}))
            return
        read.post((decode(encode(read.reply), ReadReply), content))
