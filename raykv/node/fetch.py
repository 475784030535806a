"""The destination's side of a fetch: chunks of other nodes, read in pieces, into leased slots.

    claim ──► begin_store ──► read a piece ──► check, copy in ──► READY
      │                          │ refused, no answer, corrupt
      │                          └──► the next replica, else failed
      └──► follow: another fetch of the same chunk is under way, its outcome is ours

Several pieces are under way at a time, so that the source reads, the network carries and we copy in
at once. A slot that a fetch writes is WRITING like any other: nobody reads it before all is there
and checked.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from raykv.base.deadlines import FETCH_MOST_S, FETCH_SLOT_WAIT_S, SOURCE_PAUSES_S
from raykv.base.errors import MessageError
from raykv.base.ids import (
    ALL_BLOCKS,
    SLOT_ALIGNMENT,
    Blocks,
    ChunkName,
    Epoch,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.cluster import names
from raykv.cluster.breaker import Breakers, Pauses
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes, PeerError, PeerTransport, PendingRead
from raykv.node.slots import SlotState
from raykv.protocol.columns import Handles, LostReplicas, Replica, Source
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.measures import BreakerReport
from raykv.protocol.peer import FetchRequest, FetchResult, ReadReply, ReadRequest, check_read_reply

logger = logging.getLogger("raykv.node")

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


@dataclass(slots=True, eq=False)
class _Landing:
    """A chunk on its way, for all fetches that want it."""

    name: ChunkName
    done: threading.Event = field(default_factory=threading.Event)
    refusal: Refusal = Refusal.NODE_LOST


@dataclass(slots=True, eq=False)
class _WantedChunk:
    """One chunk of a request, and the replicas that were not tried yet."""

    landing: _Landing
    replicas: deque[Replica]
    was_asked: bool = False

    def skip_source(self) -> None:
        """Skip the next source, which is left alone now; a chunk that nobody was asked for fails
        for that reason.
        """
        self.replicas.popleft()
        if not self.was_asked:
            self.landing.refusal = Refusal.BREAKER_OPEN


@dataclass(slots=True)
class _Piece:
    """Chunks that are read from one source in one call."""

    source: Source
    node_epoch: Epoch
    chunks: list[_WantedChunk]
    replicas: list[Replica]
    pending: PendingRead | None = None
    started_at: float = 0.0
    call: int = 0

    @property
    def peer(self) -> str:
        return names.source_name(self.source)


@dataclass(slots=True)
class FetchCounters:
    """Counters since the start."""

    bytes_fetched: int = 0
    chunks_fetched: int = 0
    fetches_failed: int = 0


class FetchService:
    """Any thread may fetch.

    Args:
        keeper: of this node's pool.
        epoch: of this NodeActor.
        transport: reads from other nodes.
        on_stored: called when there is something to report.
    """

    def __init__(
        self,
        keeper: PoolKeeper,
        epoch: Epoch,
        transport: PeerTransport,
        on_stored: Callable[[], None] = lambda: None,
    ) -> None:
        self._keeper = keeper
        self._epoch = epoch
        self._transport = transport
        self._on_stored = on_stored
        self._lock = threading.Lock()
        self._flying: dict[tuple[Namespace, Key], _Landing] = {}
        # By the source's name; `_lock` guards them too.
        self.breakers = Breakers(Pauses(*SOURCE_PAUSES_S))
        self.counters = FetchCounters()

    def fetch(self, request: FetchRequest) -> FetchResult:
        """Fetch all chunks of a request, at most until its deadline; whatever goes wrong is a
        refusal, never an exception.
        """
        started = time.monotonic()
        if request.version != PROTOCOL_VERSION or request.node_epoch != self._epoch:
            return _refused(self._epoch, len(request.handles), Refusal.BAD_HANDLE)
        try:
            fetch = _Fetch(request, started + _bounded(request.deadline_s))
        except (IndexError, ValueError) as error:
            logger.warning("refused a malformed fetch: %s", error)
            return _refused(self._epoch, len(request.handles), Refusal.BAD_HANDLE)
        landings = self._claim(fetch)
        try:
            self._begin(fetch)
            self._transfer(fetch)
        except Exception:
            logger.exception("a fetch failed")
        finally:
            self._end(fetch)
        for landing in landings:
            landing.done.wait(max(0.0, fetch.give_up_at - time.monotonic()))
        with self._lock:
            self.counters.bytes_fetched += fetch.num_bytes
        refusals = [
            landing.refusal if landing.done.is_set() else Refusal.TOO_LATE for landing in landings
        ]
        return FetchResult(
            node_epoch=self._epoch,
            refusals=[int(refusal) for refusal in refusals],
            slots=[landing.name.slot for landing in landings],
            generations=[landing.name.generation for landing in landings],
            num_bytes=fetch.num_bytes,
            seconds=time.monotonic() - started,
            lost=fetch.lost,
        )

    def _claim(self, fetch: _Fetch) -> list[_Landing]:
        """One landing per chunk of the request; another fetch's where one is under way already."""
        landings = []
        with self._lock:
            for chunk in fetch.waiting:
                name = chunk.landing.name
                known = self._flying.get((name.namespace, name.key))
                if known is None:
                    self._flying[name.namespace, name.key] = chunk.landing
                    fetch.own.append(chunk)
                landings.append(known or chunk.landing)
        fetch.waiting = deque(fetch.own)
        return landings

    def _begin(self, fetch: _Fetch) -> None:
        """Claim the slots for writing; what cannot be written is not fetched."""
        for chunk in fetch.own:
            if chunk.replicas and self._next_replica(fetch, chunk) is None:
                # Nobody is asked: the slot stays as it is.
                is_there = self._is_there(chunk)
                self._settle(chunk, Refusal.NONE if is_there else chunk.landing.refusal)
                continue
            wait_s = min(FETCH_SLOT_WAIT_S, max(0.0, fetch.give_up_at - time.monotonic()))
            expiry_s = max(0.0, fetch.give_up_at - time.monotonic()) + FETCH_SLOT_WAIT_S
            refusal = self._keeper.begin_store(chunk.landing.name, 0, 1, wait_s, expiry_s)
            if refusal is Refusal.NONE:
                fetch.writing.add(chunk)
            else:
                self._settle(chunk, Refusal.NONE if self._is_there(chunk) else refusal)
        fetch.waiting = deque(chunk for chunk in fetch.waiting if chunk in fetch.writing)

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
            replica = self._next_replica(fetch, chunk)
            if replica is None:
                fetch.waiting.popleft()
                continue
            source, epoch = replica.source, replica.node_epoch
            if source in fetch.trials:
                break
            num_bytes += chunk.landing.name.slot_bytes
            if piece is None:
                piece = _Piece(source, epoch, [], [])
            elif num_bytes > fetch.piece_bytes or (piece.source, piece.node_epoch) != (
                source,
                epoch,
            ):
                break
            fetch.waiting.popleft()
            chunk.replicas.popleft()
            piece.chunks.append(chunk)
            piece.replicas.append(replica)
        return piece

    def _next_replica(self, fetch: _Fetch, chunk: _WantedChunk) -> Replica | None:
        """The next one whose source is worth asking; it stays in the chunk's list."""
        while chunk.replicas:
            replica = chunk.replicas[0]
            if replica.source in fetch.trials or not self._is_left_alone(replica.source):
                return replica
            chunk.skip_source()
        return None

    def _is_left_alone(self, source: Source) -> bool:
        """Whether a source did not answer a short while ago."""
        with self._lock:
            return self.breakers.refuses(names.source_name(source), time.monotonic())

    def _start(self, fetch: _Fetch, piece: _Piece) -> bool:
        """Ask a source; if it can't be asked, the piece's chunks wait for their next one."""
        with self._lock:
            call = self.breakers.begin(piece.peer, time.monotonic())
            is_trial = call is not None and not self.breakers.is_closed(piece.peer)
        if call is None:
            # Another fetch began the trial meanwhile.
            for chunk, replica in zip(piece.chunks, piece.replicas, strict=True):
                chunk.replicas.appendleft(replica)
                fetch.waiting.append(chunk)
            return False
        piece.call = call
        if is_trial:
            fetch.trials.add(piece.source)
        for chunk in piece.chunks:
            chunk.was_asked = True
        request = ReadRequest(
            version=PROTOCOL_VERSION,
            namespace=fetch.namespace,
            node_epoch=piece.node_epoch,
            handles=Handles.of(
                (chunk.landing.name.key, replica.handle)
                for chunk, replica in zip(piece.chunks, piece.replicas, strict=True)
            ),
            slot_bytes=[chunk.landing.name.slot_bytes for chunk in piece.chunks],
            with_checksums=fetch.with_checksums,
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
        has_others = any(self._next_replica(fetch, chunk) for chunk in piece.chunks)
        if fetch.silent.get(piece.source, 0.0) >= piece.started_at:
            # Another piece has waited for this source already.
            left = 0.0
        try:
            reply, data = piece.pending.wait(left / 2 if has_others else left)
            sizes = [chunk.landing.name.slot_bytes for chunk in piece.chunks]
            check_read_reply(reply, len(data), sizes, with_checksums=fetch.with_checksums)
        except PeerError as error:
            self._failed(fetch, piece, error)
            return
        except MessageError as error:
            self._failed(fetch, piece, PeerError(f"node {piece.source.node_id}: {error}"))
            return
        with self._lock:
            is_back = self.breakers.worked(piece.peer)
        if is_back:
            logger.warning("%s answers again", piece.peer)
        fetch.trials.discard(piece.source)
        fetch.heard[piece.source] = time.monotonic()
        self._land(fetch, piece, reply, data)

    def _land(self, fetch: _Fetch, piece: _Piece, reply: ReadReply, data: Bytes) -> None:
        checksums = iter(reply.checksums)
        end = 0
        columns = zip(piece.chunks, piece.replicas, reply.refusals, strict=True)
        for number, (chunk, replica, refused) in enumerate(columns):
            name = chunk.landing.name
            refusal = Refusal(refused)
            if refusal is Refusal.NONE:
                part = data[end : end + name.slot_bytes]
                end += name.slot_bytes
                checksum = next(checksums, None)
                refusal = self._take(name, part, checksum)
                if refusal is Refusal.NONE:
                    blocks = reply.partial.get(number, ALL_BLOCKS)
                    self._finish(fetch, chunk, Refusal.NONE, checksum, blocks)
                    fetch.num_bytes += name.slot_bytes
                    continue
            elif refusal.is_final and reply.node_epoch == replica.node_epoch:
                fetch.report_lost(replica, name)
            chunk.landing.refusal = refusal
            fetch.waiting.append(chunk)
        self._on_stored()

    def _take(self, name: ChunkName, part: Bytes, checksum: int | None) -> Refusal:
        """Copy a chunk into its slot, if it is what was sent."""
        if checksum is not None and xxhash.xxh3_64_intdigest(part.data) != checksum:
            logger.warning("a chunk arrived corrupt; it is not used")
            return Refusal.CORRUPT
        place = self._keeper.pool.address + name.slot * SLOT_ALIGNMENT
        ctypes.memmove(place, part.ctypes.data, name.slot_bytes)
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
            if not chunk.landing.done.is_set():
                chunk.landing.refusal = Refusal.NODE_LOST
                fetch.waiting.append(chunk)

    def _finish(
        self,
        fetch: _Fetch,
        chunk: _WantedChunk,
        refusal: Refusal,
        checksum: int | None = None,
        blocks: Blocks = ALL_BLOCKS,
    ) -> None:
        """The chunk is there, or will not be: end its store, and wake up those who wait for it."""
        name = chunk.landing.name
        state = self._keeper.end_store(name, 0, refusal is Refusal.NONE, checksum, blocks)
        fetch.writing.remove(chunk)
        if refusal is Refusal.NONE and state is not SlotState.READY:
            refusal = Refusal.CLEARED
        with self._lock:
            self.counters.chunks_fetched += refusal is Refusal.NONE
        self._settle(chunk, refusal)

    def breaker_report(self) -> BreakerReport:
        """Sources that are left alone, but for imports, which end; any thread may ask."""
        with self._lock:
            return self.breakers.report(time.monotonic(), but=names.IMPORT_PREFIX)

    def _is_there(self, chunk: _WantedChunk) -> bool:
        """Whether the slot has the chunk already: the request came twice."""
        is_there = self._keeper.begin_load(chunk.landing.name) is Refusal.NONE
        if is_there:
            self._keeper.end_load(chunk.landing.name)
        return is_there

    def _settle(self, chunk: _WantedChunk, refusal: Refusal) -> None:
        """Nobody has to wait for the chunk any more."""
        name = chunk.landing.name
        chunk.landing.refusal = refusal
        with self._lock:
            if self._flying.get((name.namespace, name.key)) is chunk.landing:
                del self._flying[name.namespace, name.key]
            self.counters.fetches_failed += refusal is not Refusal.NONE
        chunk.landing.done.set()

    def _end(self, fetch: _Fetch) -> None:
        """Whatever happened: no slot stays WRITING, and nobody waits for a chunk that will not
        come.
        """
        for chunk in list(fetch.writing):
            refusal = chunk.landing.refusal
            if time.monotonic() >= fetch.give_up_at:
                refusal = Refusal.TOO_LATE
            self._finish(fetch, chunk, refusal)
        for chunk in fetch.own:
            if not chunk.landing.done.is_set():
                self._settle(chunk, chunk.landing.refusal)


class _Fetch:
    """One request on its way: what waits for a source, and what is being written."""

    def __init__(self, request: FetchRequest, give_up_at: float) -> None:
        self.namespace = request.namespace
        self.with_checksums = request.with_checksums
        self.give_up_at = give_up_at
        self.num_bytes = 0
        self.piece_bytes = piece_bytes(sum(request.slot_bytes))
        self._lost: list[tuple[Source, Key, Generation]] = []
        self.own: list[_WantedChunk] = []
        # When sources failed last, and when they answered.
        self.silent: dict[Source, float] = {}
        self.heard: dict[Source, float] = {}
        # Sources that this fetch asks whether they are back.
        self.trials: set[Source] = set()
        self.writing: set[_WantedChunk] = set()
        self.waiting = deque(_WantedChunk(_Landing(name), known) for name, known in wanted(request))

    def report_lost(self, replica: Replica, name: ChunkName) -> None:
        """A source says that it does not have the chunk."""
        self._lost.append((replica.source, name.key, replica.handle.generation))

    @property
    def lost(self) -> LostReplicas:
        """What sources have said that they do not have."""
        return LostReplicas.of(self._lost)


def piece_bytes(num_bytes: int) -> int:
    """Bytes of one read, of a fetch of so many."""
    return min(max(PIECE_BYTES, num_bytes // WINDOW), MOST_PIECE_BYTES)


def wanted(request: FetchRequest) -> list[tuple[ChunkName, deque[Replica]]]:
    """The chunks of a request, each with its replicas, the best first.

    Raises:
        IndexError: its columns name chunks or nodes that it does not have.
        ValueError: its columns have different lengths.
    """
    handles = request.handles
    columns = zip(handles.keys, handles.slots, handles.generations, request.slot_bytes, strict=True)
    namespace = Namespace(request.namespace)
    chunks: list[tuple[ChunkName, deque[Replica]]] = [
        (ChunkName(namespace, Key(key), Slot(slot), Generation(generation), size), deque())
        for key, slot, generation, size in columns
    ]
    for index, replica in request.sources.rows():
        if index < 0:
            raise IndexError(f"a source of chunk {index}")
        chunks[index][1].append(replica)
    return chunks


def _bounded(deadline_s: float) -> float:
    """The deadline, between 0 and `FETCH_MOST_S`; NaN counts as 0."""
    return min(deadline_s, FETCH_MOST_S) if deadline_s > 0 else 0.0


def _refused(epoch: Epoch, num_chunks: int, refusal: Refusal) -> FetchResult:
    none = [0] * num_chunks
    return FetchResult(epoch, [int(refusal)] * num_chunks, none, none)
