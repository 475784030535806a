"""The destination's side of a fetch: chunks of other nodes, read in pieces, into this node's pool.

    claim ──► here already? ──► read a piece ──► check ──► land, copy in ──► READY
      │                            │ refused, no answer, corrupt, cleared
      │                            └──► the next source, else failed
      └──► follow: another fetch of the same chunk is under way, its outcome is ours

Several pieces are under way at a time, so that the source reads, the network carries and we copy in
at once. A chunk gets its slot when its bytes have come with their stamp. A slot that a fetch writes
is WRITING like any other: nobody reads it before all is there and checked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import xxhash

from raykv.base import deadlines, errors
from raykv.base.ids import NO_BLOCKS, Key, Namespace, Refusal, Stamp
from raykv.cluster import breaker, names
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes, PeerError, PeerTransport, PendingRead
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.node.read import blocks_in
from raykv.protocol import columns, copies, measures

logger = logging.getLogger("raykv.node")

# Upper bound, whatever a request says; as much as a setting allows.
FETCH_MOST_S = 3600.0


PIECE_BYTES = 16 << 20
"""Bytes of one read of a small fetch, which is to have several, so that one comes in while another
is copied.
"""

MOST_PIECE_BYTES = 64 << 20
"""Bytes of one read, but for chunks that are larger. Each read costs both ends and Ray some ms of
CPU time, whatever its size: in pieces of 16 MiB a GiB takes a third more.
"""

WINDOW = 2
"""Pieces of one fetch that are under way at a time."""

GO_ON = (Refusal.CORRUPT, Refusal.CLEARED)
"""Refusals of the bytes that have come: another source may have better ones."""


@dataclass(slots=True, eq=False)
class _WantedChunk:
    """A chunk on its way, for all fetches that want it, and the sources that were not tried yet."""

    key: Key
    slot_bytes: int
    sources: deque[columns.Source] = field(default_factory=deque)
    was_asked: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    refusal: Refusal = Refusal.NODE_LOST


@dataclass(slots=True)
class _Piece:
    """Chunks that are read from one source in one call."""

    source: columns.Source
    chunks: list[_WantedChunk]
    pending: PendingRead | None = None
    started_at: float = 0.0
    call: int = 0

    @property
    def peer(self) -> str:
        return names.source_name(self.source)

    @property
    def sizes(self) -> list[int]:
        return [chunk.slot_bytes for chunk in self.chunks]


class FetchService:
    """Any thread may fetch.

    Args:
        keeper: of this node's pool.
        transport: reads from other nodes.
    """

    def __init__(self, keeper: PoolKeeper, transport: PeerTransport) -> None:
        self._keeper = keeper
        self._transport = transport
        self._lock = threading.Lock()
        self._flying: dict[tuple[Namespace, Key], _WantedChunk] = {}
        # By the source's name; `_lock` guards them too.
        self.breakers = breaker.Breakers(breaker.Pauses(*deadlines.SOURCE_PAUSES_S))
        self.counters: Counter[str] = Counter()
        """Of `NodeStats`, since the start."""

    def fetch(self, order: copies.Fetch) -> copies.CopyResult:
        """Fetch all chunks of an order, at most until its deadline; whatever goes wrong is a
        refusal, never an exception.
        """
        fetch = _Fetch(order, time.monotonic())
        claimed = self._claim(fetch)
        try:
            self._begin(fetch)
            self._transfer(fetch)
        except Exception:
            logger.exception("a fetch failed")
        finally:
            self._end(fetch)
        for chunk in claimed:
            chunk.done.wait(max(0.0, fetch.give_up_at - time.monotonic()))
        with self._lock:
            self.counters["bytes_fetched"] += fetch.num_bytes
        refusals = [chunk.refusal if chunk.done.is_set() else Refusal.TOO_LATE for chunk in claimed]
        return self._result(fetch, refusals)

    def _result(self, fetch: _Fetch, refusals: list[Refusal]) -> copies.CopyResult:
        """How the fetch has ended, and how all of its chunks are now."""
        with self._keeper.lock:
            keys = [chunk.key for chunk in fetch.chunks]
            life, number, rows = self._keeper.owner.state_of(fetch.namespace, keys)
        failed = {at: refusal for at, refusal in enumerate(refusals) if refusal}
        return copies.CopyResult(
            fetch.order.number,
            life,
            number,
            rows,
            columns.Numbers.of(failed),
            bytes(failed.values()),
            fetch.num_bytes,
            time.monotonic() - fetch.began_at,
        )

    def _claim(self, fetch: _Fetch) -> list[_WantedChunk]:
        """The chunks of the order; another fetch's where one is under way already."""
        claimed = []
        with self._lock:
            for chunk in fetch.chunks:
                name = fetch.namespace, chunk.key
                known = self._flying.get(name)
                if known is None:
                    self._flying[name] = chunk
                    fetch.left[chunk] = None
                claimed.append(known or chunk)
        return claimed

    def _begin(self, fetch: _Fetch) -> None:
        """Settle the chunks that are here already, which count as found, and refuse those of a size
        that no slot has. No source is blamed for these.
        """
        order, here = fetch.order, {}
        slab_bytes = self._keeper.geometry.slab_bytes
        for chunk in [each for each in fetch.left if not 0 < each.slot_bytes <= slab_bytes]:
            self._settle(fetch, chunk, Refusal.BAD_HANDLE)
        with self._keeper.lock:
            owner, now = self._keeper.owner, self._keeper.now()
            fetch.orders = owner.orders.stamp
            for chunk in fetch.left:
                record = owner.index.find(fetch.namespace, chunk.key)
                if record is not None:
                    here[chunk] = record
            owner.index.touch(list(here.values()), now)
            if order.series:
                owner.keep_series(order.series, fetch.namespace, map(Key, order.keys), now)
        for chunk in here:
            self._settle(fetch, chunk, Refusal.NONE)
        fetch.waiting.extend(fetch.left)

    def _transfer(self, fetch: _Fetch) -> None:
        flying: deque[_Piece] = deque()
        try:
            while time.monotonic() < fetch.give_up_at:
                while len(flying) < WINDOW and fetch.waiting:
                    piece = self._next_piece(fetch)
                    if piece is None:
                        break
                    if self._start(fetch, piece):
                        flying.append(piece)
                if not flying:
                    return
                self._receive(fetch, flying.popleft())
        finally:
            for piece in flying:
                if piece.pending is not None:
                    piece.pending.abandon()
                with self._lock:
                    self.breakers.forget(piece.peer, piece.call, time.monotonic())

    def _next_piece(self, fetch: _Fetch) -> _Piece | None:
        """Chunks in order, as long as they come from the same source and fit into a piece.

        None when there is nothing to ask for now, or the next source is on trial: then a piece of
        this fetch is under way that shows whether it is back.
        """
        piece: _Piece | None = None
        num_bytes = 0
        while fetch.waiting:
            chunk = fetch.waiting[0]
            source = self._next_source(fetch, chunk)
            if source is None:
                fetch.waiting.popleft()
                continue
            if source in fetch.trials:
                break
            num_bytes += chunk.slot_bytes
            if piece is None:
                piece = _Piece(source, [])
            elif num_bytes > fetch.piece_bytes or piece.source != source:
                break
            fetch.waiting.popleft()
            chunk.sources.popleft()
            piece.chunks.append(chunk)
        return piece

    def _next_source(self, fetch: _Fetch, chunk: _WantedChunk) -> columns.Source | None:
        """The next one that is worth asking; it stays in the chunk's list."""
        while chunk.sources:
            source = chunk.sources[0]
            with self._lock:
                is_left_alone = self.breakers.refuses(names.source_name(source), time.monotonic())
            if source in fetch.trials or not is_left_alone:
                return source
            chunk.sources.popleft()
            if not chunk.was_asked:
                # No source was asked for it: all of them are left alone.
                chunk.refusal = Refusal.BREAKER_OPEN
        return None

    def _start(self, fetch: _Fetch, piece: _Piece) -> bool:
        """Ask a source; if it can't be asked, the piece's chunks wait for their next one."""
        with self._lock:
            call = self.breakers.begin(piece.peer, time.monotonic())
            is_trial = call is not None and not self.breakers.is_closed(piece.peer)
        if call is None:
            # Another fetch began the trial meanwhile.
            for chunk in piece.chunks:
                chunk.sources.appendleft(piece.source)
                fetch.waiting.append(chunk)
            return False
        piece.call = call
        if is_trial:
            fetch.trials.add(piece.source)
        for chunk in piece.chunks:
            chunk.was_asked = True
        request = copies.Read(
            fetch.namespace,
            columns.Keys.of(chunk.key for chunk in piece.chunks),
            columns.Numbers.of(piece.sizes),
        )
        piece.started_at = time.monotonic()
        try:
            piece.pending = self._transport.start_read(piece.source, request)
        except PeerError as error:
            self._failed(fetch, piece, error)
            return False
        return True

    def _receive(self, fetch: _Fetch, piece: _Piece) -> None:
        """Wait for a piece and copy it in; what did not come is tried at the next source."""
        assert piece.pending is not None
        left = fetch.give_up_at - time.monotonic()
        # Where there is another source, leave it half of the time.
        has_others = any(self._next_source(fetch, chunk) for chunk in piece.chunks)
        if fetch.silent.get(piece.source, 0.0) >= piece.started_at:
            # Another piece has waited for this source already.
            left = 0.0
        try:
            # bounded: what is left of the fetch's deadline, or half of it
            reply, data = piece.pending.wait(left / 2 if has_others else left)
            copies.check_read_reply(reply, len(data), piece.sizes)
        except PeerError as error:
            self._failed(fetch, piece, error)
            return
        except errors.MessageError as error:
            self._failed(fetch, piece, PeerError(f"node {piece.source.node_id}: {error}"))
            return
        with self._lock:
            is_back = self.breakers.worked(piece.peer)
        if is_back:
            logger.warning("%s answers again", piece.peer)
        fetch.trials.discard(piece.source)
        fetch.heard[piece.source] = time.monotonic()
        self._land(fetch, piece, reply, data)

    def _land(self, fetch: _Fetch, piece: _Piece, reply: copies.ReadReply, data: Bytes) -> None:
        checksums, blocks = iter(reply.checksums), blocks_in(reply)
        stamps = map(Stamp, reply.histories, reply.stamps)
        end = 0
        for chunk, refused in zip(piece.chunks, reply.refusals, strict=True):
            refusal, is_ours = Refusal(refused), False
            if refusal is Refusal.NONE:
                part = data[end : end + chunk.slot_bytes]
                end += chunk.slot_bytes
                # An import is a store of this fetch's time.
                stamp = next(stamps)
                if piece.source.kind is columns.SourceKind.IMPORT:
                    stamp = fetch.orders
                offered = ChunkRecord(
                    fetch.namespace,
                    chunk.key,
                    chunk.slot_bytes,
                    stamp,
                    blocks.get(chunk.key, NO_BLOCKS),
                    fetch.order.tenant,
                )
                refusal = self._take(fetch, offered, part, next(checksums))
                is_ours = refusal not in GO_ON
            if is_ours:
                self._settle(fetch, chunk, refusal)
            else:
                chunk.refusal = refusal
                fetch.waiting.append(chunk)

    def _take(self, fetch: _Fetch, chunk: ChunkRecord, part: Bytes, checksum: int) -> Refusal:
        """Copy a chunk into a slot, if it is what was sent, and may be here."""
        if xxhash.xxh3_64_intdigest(part.data) != checksum:
            logger.warning("a chunk arrived corrupt; it is not used")
            return Refusal.CORRUPT
        record = self._keeper.land(chunk)
        if isinstance(record, Refusal):
            return Refusal.NONE if record is Refusal.HERE else record
        is_there = False
        try:
            self._keeper.bytes_of(record)[:] = part
            is_there = True
        finally:
            self._keeper.landed(record, ok=is_there, checksum=checksum)
        if record.state is not ChunkState.READY:
            return Refusal.CLEARED
        fetch.num_bytes += chunk.slot_bytes
        with self._lock:
            self.counters["chunks_fetched"] += 1
        return Refusal.NONE

    def _failed(self, fetch: _Fetch, piece: _Piece, error: PeerError) -> None:
        """A source did not answer: leave it alone for a while, try the next one."""
        fetch.trials.discard(piece.source)
        fetch.silent[piece.source] = time.monotonic()
        # A source that answered meanwhile is at most slow: the fetch's time is up.
        is_alive = fetch.heard.get(piece.source, 0.0) >= piece.started_at > 0.0
        with self._lock:
            now = time.monotonic()
            if is_alive:
                self.breakers.forget(piece.peer, piece.call, now)
            elif self.breakers.failed(piece.peer, piece.call, now, str(error)):
                logger.warning("no answer, other nodes are asked for now: %s", error)
        for chunk in piece.chunks:
            chunk.refusal = Refusal.NODE_LOST
            fetch.waiting.append(chunk)

    def breaker_report(self) -> measures.BreakerReport:
        """Sources that are left alone, but for imports, which end; any thread may ask."""
        with self._lock:
            return self.breakers.report(time.monotonic(), but=names.IMPORT_PREFIX)

    def _settle(self, fetch: _Fetch, chunk: _WantedChunk, refusal: Refusal) -> None:
        """End the wait for a chunk: it is there, or will not come."""
        del fetch.left[chunk]
        chunk.refusal = refusal
        with self._lock:
            del self._flying[fetch.namespace, chunk.key]
            self.counters["fetches_failed"] += refusal is not Refusal.NONE
        chunk.done.set()

    def _end(self, fetch: _Fetch) -> None:
        """End the wait for all chunks that have not come, whatever happened."""
        is_late = time.monotonic() >= fetch.give_up_at
        for chunk in list(fetch.left):
            self._settle(fetch, chunk, Refusal.TOO_LATE if is_late else chunk.refusal)


class _Fetch:
    """One order on its way: what is `left` of it, and of that what waits for a source."""

    def __init__(self, order: copies.Fetch, began_at: float) -> None:
        self.order = order
        self.namespace = Namespace(order.namespace)
        self.began_at = began_at
        self.give_up_at = began_at + min(order.deadline_s, FETCH_MOST_S)
        self.num_bytes = 0
        self.piece_bytes = piece_bytes(sum(order.slot_bytes))
        self.orders = Stamp(0, 0)
        """The number of the orders when it began."""
        # When sources failed last, and when they answered.
        self.silent: dict[columns.Source, float] = {}
        self.heard: dict[columns.Source, float] = {}
        # Sources that this fetch asks whether they are back.
        self.trials: set[columns.Source] = set()
        sources = order.sources.by_key(len(order.keys))
        self.chunks = [
            _WantedChunk(Key(key), size, deque(sources.get(at, ())))
            for at, (key, size) in enumerate(zip(order.keys, order.slot_bytes, strict=True))
        ]
        self.left: dict[_WantedChunk, None] = {}
        self.waiting: deque[_WantedChunk] = deque()


def piece_bytes(num_bytes: int) -> int:
    """Bytes of one read, of a fetch of `num_bytes`."""
    return min(max(PIECE_BYTES, num_bytes // WINDOW), MOST_PIECE_BYTES)
