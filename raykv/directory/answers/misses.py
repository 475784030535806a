"""What became of the latest requests' tokens, all over the cluster: for `raykv why-miss`.

An engine reports each request that has ended. The scheduler actor may know more about a chunk that
the engine has never seen: that another node gave it up, or that other engines have it under another
namespace. That is looked up once, when the record comes, for one key.

Nothing of it outlives the scheduler actor.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from raykv.base.departures import Departures
from raykv.base.ids import MAX_REQUEST_ID, Key, MissReason, Namespace, NodeId, shown_id
from raykv.directory.members import Engine, Node
from raykv.protocol.engine import MissRecord
from raykv.protocol.reader import Explanation, Explanations, RequestPage

MAX_RECORDS = 4096
"""Requests; the oldest are forgotten."""

MAX_NAMES_BYTES = 16 << 20
"""Bytes of the names of all chunks of the requests that are remembered."""

MAX_PAGE = 128
"""Requests in one page of all of them."""

MAX_PAGE_NAMES_BYTES = 48 << 10
"""Bytes of chunks' names in a page, unless one request alone has more: the page stays under 100
KiB.
"""

MAX_TOLD = 16
"""Requests in one answer."""

MAX_LISTED = 16_384
"""Chunks that are remembered when all of a node, or of a namespace, go at once."""

MAX_PLACES = 64
"""Nodes, or namespaces there, that are searched for a key of another namespace."""

_PUT_BEFORE = re.compile(r"([0-9]+_)?([a-z]{1,12}-)?([a-z]{1,12}-)?")
"""What vLLM puts before a request's id: a number where a request has several answers, and the name
of the API, `cmpl-` for example, before an id that the client has chosen (`X-Request-Id`).
"""

PLACES_S = 5.0
"""How long the list of each node's namespaces is reused."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record, and where it came from; `at` by the caller's clock. `hint` as in `Explanation`."""

    record: MissRecord
    engine_id: str
    node_id: str
    namespace: str
    model: str
    at: float
    hint: str = ""

    def has_id(self, beginning: str) -> bool:
        """Whether the request's id begins so, with or without what vLLM puts before it.

        Args:
            beginning: as `shown_id` gives it; ids that were cut off there may go on with it.
        """
        whole = self.record.request_id
        put = _PUT_BEFORE.match(whole)
        starts = {0} if put is None else {0, *map(put.end, (1, 2, 3))} - {-1}
        is_cut = len(whole) >= MAX_REQUEST_ID
        return any(
            whole.startswith(beginning[: len(whole) - start] if is_cut else beginning, start)
            for start in starts
        )

    def told(
        self, now: float, name_of: Callable[[str], str], *, nearest_is_cached: bool = False
    ) -> Explanation:
        """What is known of the request at that time."""
        record = self.record
        if record.tenant:
            record = msgspec.structs.replace(record, tenant=name_of(record.tenant))
        return Explanation(
            record=record,
            engine_id=self.engine_id,
            node_id=self.node_id,
            namespace=self.namespace,
            model=self.model,
            age_s=now - self.at,
            nearest_is_cached=nearest_is_cached,
            hint=self.hint,
        )


class MissLog:
    """The latest requests.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        hint_of: what a hint did to a chunk that is missing, as in `Explanation`.
        name_of: what people call the tenant of a label.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        hint_of: Callable[[Namespace, Key], str] = lambda _namespace, _key: "",
        name_of: Callable[[str], str] = str,
    ) -> None:
        self._nodes = nodes
        self._hint_of = hint_of
        self._name_of = name_of
        # The newest one has the number `_num_taken`.
        self._entries: deque[_Entry] = deque()
        self._num_taken = 0
        self._names_bytes = 0
        self._departures: Departures[tuple[Namespace, MissReason]] = Departures()
        self._places: list[tuple[NodeId, Namespace]] = []
        self._places_at = float("-inf")

    # What goes

    def gone(self, namespace: Namespace, keys: Iterable[bytes], reason: MissReason) -> None:
        """Chunks have left a node."""
        self._departures.note(keys, (namespace, reason))

    def lost(self, node: Node) -> None:
        """A node is lost; must be called while its table still exists."""
        table = node.book.table
        held = table.held_at(table.places()[:MAX_LISTED])
        for namespace in set(held.namespaces):
            names = zip(held.namespaces, held.keys, strict=True)
            self.gone(
                namespace, (key for name, key in names if name == namespace), MissReason.NODE_LOST
            )

    def cleared(self, namespace: Namespace) -> None:
        """A namespace is about to be emptied."""
        tables = [node.book.table for node in self._nodes.values()]
        held = (
            table.held_at(table.places(namespace)[:MAX_LISTED], namespace).keys
            for table in tables
            if table.holds_any(namespace)
        )
        keys = islice(chain.from_iterable(held), MAX_LISTED)
        self.gone(namespace, keys, MissReason.CLEARED)

    # Records

    def take(self, engine: Engine, records: Iterable[MissRecord], now: float) -> dict[str, int]:
        """Requests of an engine have ended.

        Returns:
            Tokens by reason that the engine took for `known_as` that reason.
        """
        better: Counter[str] = Counter()
        for record in records:
            known = self._refined(record, engine.namespace, now)
            if known is not record:
                better.update(known.missed)
                better.subtract(record.missed)
            self._remember(
                _Entry(
                    *(known, engine.engine_id, engine.node_id, engine.namespace, engine.model, now),
                    hint=self._hint_of(engine.namespace, Key(record.missing)),
                )
            )
        return dict(+better)

    def _remember(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._num_taken += 1
        self._names_bytes += len(entry.record.chunks)
        while len(self._entries) > MAX_RECORDS or self._names_bytes > MAX_NAMES_BYTES:
            self._names_bytes -= len(self._entries.popleft().record.chunks)

    def _refined(self, record: MissRecord, namespace: Namespace, now: float) -> MissRecord:
        """Give a better reason than that the engine does not know the chunk, or knows that it was
        evicted, if there is one.
        """
        vague = (MissReason.NEVER_STORED, MissReason.EVICTED)
        told = next((reason for reason in vague if reason in record.missed), None)
        if told is None or not record.missing:
            return record
        reason = self._reason(Key(record.missing), namespace, now, told)
        if reason is told:
            return record
        missed = dict(record.missed)
        missed[reason] = missed.pop(told) + missed.get(reason, 0)
        return msgspec.structs.replace(record, missed=missed)

    def _reason(self, key: Key, namespace: Namespace, now: float, told: MissReason) -> MissReason:
        """Why a chunk is missing, where its engine has told a reason that may be too vague."""
        known, space = None, None
        if (departure := self._departures.get(key)) is not None:
            space, known = departure
        if told is MissReason.EVICTED:
            is_quota = space == namespace and known is MissReason.QUOTA
            return MissReason.QUOTA if is_quota else told
        if known is not None and space == namespace:
            # The engine counts it as something better than what it knew, in one step.
            return MissReason.EVICTED if known is MissReason.QUOTA else known
        if self._is_elsewhere(key, namespace, now):
            return MissReason.OTHER_NAMESPACE
        return MissReason.NEVER_STORED

    def _is_elsewhere(self, key: Key, namespace: Namespace, now: float) -> bool:
        """Whether another namespace has a chunk of that key: the same tokens, other bytes."""
        if now - self._places_at >= PLACES_S:
            self._places_at = now
            self._places = [
                (node.node_id, name)
                for node in self._nodes.values()
                for name in node.book.table.sizes()
            ]
        others = ((at, name) for at, name in self._places if name != namespace)
        return any(
            node_id in self._nodes and self._nodes[node_id].book.find(name, key) is not None
            for node_id, name in islice(others, MAX_PLACES)
        )

    def find(self, beginning: str, now: float) -> Explanations:
        """What is known of the requests whose ids begin so, the newest first."""
        asked = shown_id(beginning)
        found = (entry for entry in reversed(self._entries) if entry.has_id(asked))
        return Explanations(
            found=[
                entry.told(now, self._name_of, nearest_is_cached=self._has_nearest(entry))
                for entry in islice(found, MAX_TOLD)
            ],
            num_known=len(self._entries),
        )

    def _has_nearest(self, entry: _Entry) -> bool:
        """Whether the prompt that a request has left is cached, there at least."""
        parting = entry.record.parting
        if parting is None:
            return False
        namespace, key = Namespace(entry.namespace), Key(parting.nearest)
        return any(node.book.find(namespace, key) is not None for node in self._nodes.values())

    def page(self, epoch: int, after: int, now: float) -> RequestPage:
        """The requests that have ended after the one of that number, the oldest first.

        Those that are forgotten are left out: then the first one's number is not the next.
        """
        oldest = self._num_taken - len(self._entries) + 1
        first = max(oldest, after + 1)
        found: list[Explanation] = []
        names_bytes = 0
        for entry in islice(self._entries, first - oldest, first - oldest + MAX_PAGE):
            names_bytes += len(entry.record.chunks)
            if found and names_bytes > MAX_PAGE_NAMES_BYTES:
                break
            found.append(entry.told(now, self._name_of))
        return RequestPage(epoch=epoch, first=first, last=self._num_taken, found=found)
