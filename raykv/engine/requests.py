"""What the engine's view remembers of one request: what it allows, and what it must not have."""

from __future__ import annotations

from collections.abc import Collection, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from raykv.base.ids import Key, Lookup, MissReason, NodeId, TokenSource
from raykv.protocol.columns import Source

PREFILLED_REPEATS = 10
"""Answers that a `prefilled` request does not believe. An announcement leaves the engine before the
step that computes the chunk, so that it is late by milliseconds at most. With one answer each
`REPEAT_PAUSE_S` it is a fifth of a second, which is what a prompt costs that was not stored."""


PlaceSources = tuple[tuple[Source, ...], ...]
"""Where each of an engine's places gets a chunk from, the best source first; none: it has it."""


def token_source(sources: PlaceSources) -> TokenSource:
    """What a chunk counts as that is not in the own pool of every place: by the slowest way."""
    first = [each[0] for each in sources if each]
    if not first:
        return TokenSource.SAME_NODE
    is_disk = all(each.is_disk for each in first)
    return TokenSource.DISK if is_disk else TokenSource.OTHER_NODE


class ViewSettings(Protocol):
    """Of an engine's settings what pure code reads, which gets them as an argument."""

    @property
    def request_deadline_s(self) -> float:
        """Longest wait for chunks of other nodes."""

    @property
    def lookup_s(self) -> float:
        """Longest wait for chunks that are being stored."""

    @property
    def query_s(self) -> float:
        """Longest wait to learn what other nodes have."""

    @property
    def stop_unused_stores(self) -> bool:
        """Whether only some requests store where that does not pay."""

    @property
    def always_fetch(self) -> bool:
        """Whether chunks are fetched also where computing them is faster."""


class Tier(NamedTuple):
    """Where chunks are that are not in the own node's pool."""

    is_disk: bool
    is_remote: bool


@dataclass(frozen=True)
class RequestOptions:
    """What a request allows: `load` from the cache, `store` into it.

    `prefilled`: another engine has just computed the prompt for it. Its chunks are announced or on
    their way to be, so an answer that nobody has them is not final; and they are fetched
    however fast this engine computes, which has other requests to serve. `no_load`: why it does not
    load, if it does not. `tenant`: the label of whose it is; empty: nobody's in particular.
    `most_stored`: the most tokens; None: all. `tiers`: what is fetched for it comes from
    these; None: from any.
    """

    load: bool = True
    store: bool = True
    prefilled: bool = False
    no_load: MissReason = MissReason.OPTED_OUT
    tenant: str = ""
    most_stored: int | None = None
    tiers: frozenset[Tier] | None = None


@dataclass(frozen=True)
class Miss:
    """A chunk that a lookup did not find, and why.

    `known_tokens` before it are known, and are not loaded for another reason: the window or the
    state that they end with is missing. `places`: numbers of those of the engine's places that have
    not got it, from 1 on; none: no place has it, or there is one only.
    """

    key: Key
    reason: MissReason
    known_tokens: int = 0
    known_reason: MissReason = MissReason.WINDOW_MISSING
    places: tuple[int, ...] = ()


@dataclass(slots=True)
class RequestState:
    """A request from its first sight to its end.

    `barred` are keys whose load failed for it; they stay a MISS. `waiting_since` is when a lookup
    first found a chunk that was not READY yet. Of the keys that were `asked` for elsewhere some are
    `unanswered`, some `pending` (being stored elsewhere), some `found`; the others are a MISS.
    `asking_since` is when a lookup first found a key without an answer. `chunks`: the prompt's, by
    KV group. `declined`: why the found ones are not fetched, once that is decided; None: they are.
    `unfetched`: found ones that did not come.
    `miss` is what the latest lookup that was a MISS did not find. `repeats_left`: how many more
    answers without a sign of some key are not believed. `fetches_since`: when a lookup first found
    a chunk that is fetched, since the request was admitted. `no_room`: by KV group, the first chunk
    that found no room: behind it nothing is stored, unless it comes. `told`: what its
    places were told that it has found, and `touch_at`, when they are to be told again. `wondered`:
    what nobody knew of when it was looked up.
    """

    options: RequestOptions
    barred: set[Key] = field(default_factory=set)
    waiting_since: float | None = None
    asked: set[Key] = field(default_factory=set)
    unanswered: set[Key] = field(default_factory=set)
    pending: set[Key] = field(default_factory=set)
    found: dict[Key, PlaceSources] = field(default_factory=dict)
    asking_since: float | None = None
    chunks: dict[int, Sequence[Key]] = field(default_factory=dict)
    is_decided: bool = False
    declined: MissReason | None = None
    unfetched: dict[Key, MissReason] = field(default_factory=dict)
    miss: Miss | None = None
    is_known: bool = True
    repeats_left: int = 0
    fetches_since: float | None = None
    no_room: dict[int, Key] = field(default_factory=dict)
    told: set[Key] = field(default_factory=set)
    touch_at: float = 0.0
    wondered: set[Key] = field(default_factory=set)

    def barrier(self, key: Key) -> MissReason | None:
        """Why this request must not have a chunk, even if it is here."""
        if not self.options.load:
            return self.options.no_load
        return MissReason.LOAD_FAILED if key in self.barred else None

    def find(self, key: Key, sources: PlaceSources, own: Collection[NodeId]) -> None:
        """Note where a chunk is, as far as the request may have it from there; `own` are the
        engine's nodes.
        """
        tiers = self.options.tiers
        if not any(sources):
            return
        if tiers is None:
            self.found[key] = sources
            return
        allowed = tuple(
            tuple(each for each in some if Tier(each.is_disk, each.node_id not in own) in tiers)
            for some in sources
        )
        if [*map(bool, allowed)] == [*map(bool, sources)]:
            self.found[key] = allowed
        else:
            self.unfetched[key] = MissReason.OPTED_OUT

    def source_of(self, key: Key) -> TokenSource:
        """Where a chunk was before this request wanted it."""
        return token_source(self.found.get(key, ()))

    def missed(self, key: Key, reason: MissReason) -> Lookup:
        """Remember a lookup's MISS and its reason."""
        self.miss = Miss(key, reason)
        return Lookup.MISS

    def may_wait(self, now: float, deadline_s: float) -> bool:
        """Whether the request may still wait for chunks; the clock starts with the first call."""
        if self.waiting_since is None:
            self.waiting_since = now
        return now - self.waiting_since < deadline_s

    def awaits_fetch(self, now: float) -> None:
        """A chunk that it wants is being fetched."""
        if self.fetches_since is None:
            self.fetches_since = now

    def has_waited(self, now: float, deadline_s: float) -> bool:
        """Whether it has waited for chunks as long as it may."""
        return self.waiting_since is not None and now - self.waiting_since >= deadline_s

    def may_ask(self, now: float, deadline_s: float) -> bool:
        """Whether it may still wait for answers; the clock starts with the first call."""
        if self.asking_since is None:
            self.asking_since = now
        return now - self.asking_since < deadline_s


@dataclass(slots=True)
class StoreSampler:
    """An engine's choice of the requests that store.

    `is_on`: whether there is a choice; else all do. `share`: one in this many does.
    """

    is_on: bool = False
    share: int = 1
    num_left_out: int = 0
    _since_last: int = 0

    @property
    def is_sampling(self) -> bool:
        """Whether only some requests store now."""
        return self.is_on and self.share > 1

    def limit(self, options: RequestOptions) -> RequestOptions:
        """What a new request may do."""
        if not self.is_on or not options.store:
            return options
        self._since_last += 1
        if self._since_last < self.share:
            self.num_left_out += 1
            return replace(options, store=False)
        self._since_last = 0
        return options


@dataclass
class RequestTable:
    """`plain` has the ids of those of which every chunk that is READY may be loaded."""

    plain: set[str] = field(default_factory=set)
    _requests: dict[str, RequestState] = field(default_factory=dict)

    def start(self, request_id: str, options: RequestOptions) -> None:
        """A request is new."""
        repeats = PREFILLED_REPEATS if options.prefilled else 0
        self._requests[request_id] = RequestState(options, repeats_left=repeats)
        if options.load:
            self.plain.add(request_id)

    def finish(self, request_id: str) -> RequestState | None:
        """Forget a request; None if it is unknown."""
        self.plain.discard(request_id)
        return self._requests.pop(request_id, None)

    def bar(self, request_id: str) -> RequestState | None:
        """Not every chunk may be loaded from now on; None if the request is unknown."""
        self.plain.discard(request_id)
        return self._requests.get(request_id)

    def get(self, request_id: str) -> RequestState:
        """The state of a request; one that is unknown gets a state that is not kept."""
        found = self._requests.get(request_id)
        return RequestState(RequestOptions(), is_known=False) if found is None else found

    def take_miss(self, request_id: str) -> Miss | None:
        """The latest MISS of its lookups since the last call."""
        request = self.get(request_id)
        miss, request.miss = request.miss, None
        return miss

    def take_fetches_since(self, request_id: str) -> float | None:
        """When a fetch began for it, since the last call."""
        request = self.get(request_id)
        since, request.fetches_since = request.fetches_since, None
        return since

    def values(self) -> ValuesView[RequestState]:
        """All of them."""
        return self._requests.values()
