"""What an engine knows of other nodes' chunks: its questions, the answers, what it has fetched.

                ask                    answer                     order
   (unknown) ────────► UNANSWERED ─────────────► FOUND ────────────────────► FETCHING ──► READY
                        ▲      │                                                │
                 asked  │      ├──► PENDING (it is being stored)                ▼
                 again  └──────┼─────┘                                       (unknown)
                               └──► MISS, for the requests that had asked

Answers belong to the requests that asked: a later request asks again. A fetch belongs to all.

Threads: as in `EngineView`; `take_questions` and `take_announced` may run on another thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from raykv.base.ids import Key, Lookup, MissReason, NodeId, Refusal, TokenSource, group_of
from raykv.engine.cost import FetchCost
from raykv.engine.listed import ListedPlace
from raykv.engine.requests import PlaceSources, RequestState, ViewSettings, token_source
from raykv.prompts.prefixes import loadable_tokens, needed_chunks
from raykv.protocol.columns import Source
from raykv.protocol.descriptions import ChunkGroup
from raykv.protocol.engine import AskAnswer

T = TypeVar("T")

MAX_QUESTIONS = 65_536
"""Keys that wait to be asked for; beyond it the oldest are lost, and count as unanswered until the
deadline of their request."""

MAX_ASKED = 16_384
"""Keys that one request asks for at its start: 2 million tokens in chunks of 128."""

MAX_WONDERED = 64
"""Keys that wait to be asked for, or that one request asks for, for the reason alone."""


@dataclass(frozen=True)
class ChunkSize:
    """Size of a KV group's chunks: bytes, tokens whose KV it holds, and how many chunks a
    prefix needs (None: all).
    """

    num_bytes: int = 1
    num_tokens: int = 1
    window: int | None = None


@dataclass(frozen=True)
class FetchOrder:
    """A chunk to be fetched for a tenant's request; `num_bytes` at all places together."""

    key: Key
    num_bytes: int
    sources: PlaceSources
    tenant: str = ""


_LATE = MissReason.FETCH_FAILED

_REASONS = {
    Refusal.CLEARED: MissReason.CLEARED,
    Refusal.BAD_HANDLE: MissReason.NODE_LOST,
    Refusal.NODE_LOST: MissReason.NODE_LOST,
    Refusal.NOT_HERE: MissReason.EVICTED,
    Refusal.NO_ROOM: MissReason.POOL_FULL,
}
"""Why a chunk did not come, where its source said more than that it failed."""


class RemoteChunks:
    """See the module's docstring. `sizes`: of chunks, by KV group index."""

    def __init__(self, settings: ViewSettings, sizes: Mapping[int, ChunkSize]) -> None:
        self._settings = settings
        self._sizes = sizes
        self.cost = FetchCost()
        # Whether there is anybody else who may have chunks of this namespace.
        self.has_peers = False
        # Whether calls to the scheduler actor fail; set by the thread that makes them.
        self.is_cut_off = False
        self.counters = Counter(chunks_asked=0, fetches_declined=0, waits_timed_out=0)
        self._fetching: dict[Key, FetchOrder] = {}
        self._orders: list[FetchOrder] = []
        self._questions: deque[Key] = deque(maxlen=MAX_QUESTIONS)
        # Of which nobody waits for the answer.
        self._wondered: deque[Key] = deque(maxlen=MAX_WONDERED)
        # Who waits for the answer about a key, and for a key that is being stored elsewhere.
        self._askers: dict[Key, list[RequestState]] = {}
        self._repeated: dict[Key, None] = {}
        # By identity, requests for which the present answer lacks a key that must come.
        self._doubting: dict[int, RequestState] = {}
        self._announced: deque[Key] = deque(maxlen=MAX_QUESTIONS)

    def size_of(self, key: Key) -> ChunkSize:
        """Size of the chunks of a key's group."""
        return self._sizes.get(group_of(key), ChunkSize())

    def counter_values(self) -> dict[str, int]:
        """Counters by name; the rates are what `cost.py` counts with, 0 if unknown."""
        rates = self.cost.bytes_per_s
        return {
            **self.counters,
            "fetch_bytes_per_s": int(rates.get(TokenSource.OTHER_NODE, 0)),
            "disk_bytes_per_s": int(rates.get(TokenSource.DISK, 0)),
            "prefill_tokens_per_s": int(self.cost.prefill_tokens_per_s or 0),
        }

    # Questions

    def ask(self, request: RequestState, keys: Iterable[Key]) -> None:
        """Have the scheduler actor asked which nodes have `keys`, unless this request has asked
        before.
        """
        # The router that had the prompt prefilled knows of a peer of which this node may not
        # have heard.
        has_peers = self.has_peers or request.options.prefilled
        if not has_peers or not request.is_known:
            return
        for key in keys:
            if key in request.asked:
                continue
            request.asked.add(key)
            request.unanswered.add(key)
            askers = self._askers.setdefault(key, [])
            if not askers:
                self._questions.append(key)
                self.counters["chunks_asked"] += 1
            askers.append(request)

    def wonder(self, request: RequestState, key: Key) -> None:
        """Have the scheduler actor asked why nobody has a chunk, unless it was. Nobody waits for
        the answer, which is for people.
        """
        is_asked = key in request.asked or key in request.wondered
        if request.is_known and not is_asked and len(request.wondered) < MAX_WONDERED:
            request.wondered.add(key)
            self._wondered.append(key)

    def take_questions(self, most: int, may_repeat: bool) -> list[bytes]:
        """Keys to ask for now; those that were being stored again, if `may_repeat`; and those of
        which the reason is wanted.
        """
        taken: list[bytes] = [*take(self._questions, most)]
        if may_repeat:
            taken += list(self._repeated)[: most - len(taken)]
        return taken + take(self._wondered, most - len(taken))

    @property
    def has_questions(self) -> bool:
        """Whether there are keys that were not asked for yet."""
        return bool(self._questions)

    @property
    def has_news(self) -> bool:
        """Whether the scheduler actor is to be asked, or told, something."""
        return bool(self._questions or self._announced or self._wondered)

    @property
    def has_repeats(self) -> bool:
        """Whether there are keys to ask for again and again."""
        return bool(self._repeated)

    def announce(self, keys: Iterable[Key]) -> None:
        """Note that chunks are being stored, so that engines that ask for them wait."""
        if self.has_peers:
            self._announced.extend(keys)

    def take_announced(self, most: int) -> list[Key]:
        """Announcements to be sent now."""
        return take(self._announced, most)

    def take_answers(
        self,
        asked: Sequence[Key],
        answers: Sequence[AskAnswer],
        places: Sequence[ListedPlace],
    ) -> None:
        """What the scheduler actor says of keys, for each of the engine's places."""
        own = [each.place.node_id for each in places]
        elsewhere = [_sources(asked, answer) for answer in answers]
        coming = [{asked[n] for n in each.coming if n < len(asked)} for each in answers]
        said = list(zip(range(len(places)), places, elsewhere, coming, strict=True))
        nowhere: PlaceSources = ((),) * len(places)
        for key in asked:
            found = [*nowhere]
            # Of the places that lack it: whether some other node has it, and whether it comes to
            # one, to all, or can be had by all.
            is_away = comes = False
            all_come = all_have = True
            for at, listed, is_at, comes_here in said:
                if key in listed.ready:
                    continue
                away, is_coming = is_at.get(key, ()), key in comes_here
                found[at] = listed.disk_of(key) + away if key in listed.on_disk else away
                is_away |= bool(away)
                comes |= is_coming
                all_come &= is_coming
                all_have &= is_coming or bool(found[at])
            is_known = all_have if is_away else all_come
            known = (tuple(found) if is_away else nowhere) if is_known else ()
            self._take_place(key, known, own, is_pending=comes and is_known)
        while self._doubting:
            self._doubting.popitem()[1].repeats_left -= 1

    def _take_place(
        self, key: Key, sources: PlaceSources, own: Collection[NodeId], *, is_pending: bool
    ) -> None:
        """An answer says where a key is besides on the engine's `own` nodes; none: not for every
        place.
        """
        if is_pending:
            if key in self._askers:
                self._repeated[key] = None
            for request in self._askers.get(key, ()):
                request.unanswered.discard(key)
                request.pending.add(key)
            return
        self._repeated.pop(key, None)
        for request in self._askers.pop(key, ()):
            request.pending.discard(key)
            if not sources and request.repeats_left:
                self._doubt(request, key)
                continue
            request.unanswered.discard(key)
            request.find(key, sources, own)

    def _doubt(self, request: RequestState, key: Key) -> None:
        """Ask again: the announcement is on its way."""
        request.unanswered.add(key)
        self._askers.setdefault(key, []).append(request)
        self._repeated[key] = None
        self._doubting[id(request)] = request

    def finish_request(self, request: RequestState) -> None:
        """Forget what a request waits for."""
        for key in request.unanswered | request.pending:
            askers = [other for other in self._askers.get(key, ()) if other is not request]
            if askers:
                self._askers[key] = askers
            else:
                self._askers.pop(key, None)
                self._repeated.pop(key, None)

    # Lookups

    def lookup(
        self,
        request: RequestState,
        key: Key,
        now: float,
        is_here: Callable[[Key], bool],
    ) -> Lookup:
        """Answer for a key that this node does not have; a fetch begins if another node has it.

        Args:
            request: who wants it.
            key: what is wanted.
            now: seconds, for deadlines.
            is_here: whether the own node has a chunk, or will have it.
        """
        if key in self._fetching:
            request.awaits_fetch(now)
            may_wait = request.may_wait(now, self._settings.request_deadline_s)
            return Lookup.HIT_PENDING if may_wait else self._give_up(request, key, _LATE)
        if key in request.found:
            if not request.is_decided:
                request.is_decided = True
                request.declined = self._objection(request, key, is_here)
                if request.declined:
                    self.counters["fetches_declined"] += len(request.found)
            return self._fetch(request, key, now)
        if key not in request.asked:
            self.ask(request, [key])
        if key in request.pending:
            may_wait = request.may_wait(now, self._settings.lookup_s)
            too_long = MissReason.PENDING_TOO_LONG
            return Lookup.HIT_PENDING if may_wait else self._give_up(request, key, too_long)
        if key in request.unanswered:
            may_ask = request.may_ask(now, self._settings.query_s)
            silent = MissReason.BREAKER_OPEN if self.is_cut_off else MissReason.UNANSWERED
            return Lookup.RETRY if may_ask else self._give_up(request, key, silent)
        return request.missed(key, request.unfetched.get(key, MissReason.NEVER_STORED))

    def _give_up(self, request: RequestState, key: Key, reason: MissReason) -> Lookup:
        """Count an expired deadline, and answer MISS."""
        self.counters["waits_timed_out"] += 1
        return request.missed(key, reason)

    def _fetch(self, request: RequestState, key: Key, now: float) -> Lookup:
        if request.declined:
            return request.missed(key, request.declined)
        if request.has_waited(now, self._settings.request_deadline_s):
            return request.missed(key, _LATE)
        size = self.size_of(key).num_bytes
        order = FetchOrder(key, size, request.found[key], request.options.tenant)
        self._fetching[key] = order
        self._orders.append(order)
        request.awaits_fetch(now)
        request.may_wait(now, self._settings.request_deadline_s)
        return Lookup.HIT_PENDING

    def _objection(
        self, request: RequestState, key: Key, is_here: Callable[[Key], bool]
    ) -> MissReason | None:
        """Why what was found is not to be fetched: the times are compared for all that is needed of
        it, unless computing is what to avoid.
        """
        needed, num_tokens = self._needed(request, key, is_here)
        if not num_tokens:
            return MissReason.WINDOW_MISSING
        if request.options.prefilled or self._settings.always_fetch:
            return None
        num_bytes: Counter[TokenSource] = Counter()
        for each in needed:
            num_bytes[request.source_of(each)] += self.size_of(each).num_bytes
        is_worth_it = self.cost.prefers_fetch(num_bytes, num_tokens, self.fetching_bytes)
        return None if is_worth_it else MissReason.FETCH_SLOWER

    def _needed(
        self, request: RequestState, first: Key, is_here: Callable[[Key], bool]
    ) -> tuple[list[Key], int]:
        """What to fetch of the found chunks, and how many tokens longer the prefix that can be
        loaded is with them. vLLM asks for `first`: what comes before it may be in no pool, but is
        in vLLM's own cache.
        """
        groups = [
            ChunkGroup(group, size.num_tokens, size.window)
            for group, size in self._sizes.items()
            if group in request.chunks
        ]
        if not groups:
            tokens: Counter[int] = Counter()
            for key in request.found:
                tokens[group_of(key)] += self.size_of(key).num_tokens
            return list(request.found), max(tokens.values())
        before = _chunks_before(first, request.chunks, groups)

        def is_there(key: Key) -> bool:
            return key in before or is_here(key)

        here = {each.group: [*map(is_there, request.chunks[each.group])] for each in groups}
        # What is not known yet may turn out to be there.
        comes = request.found.keys() | request.pending | request.unanswered
        known = {
            group: [
                there or key in comes
                for there, key in zip(some, request.chunks[group], strict=True)
            ]
            for group, some in here.items()
        }
        end = loadable_tokens(groups, known)
        needed = [
            key
            for each in groups
            for key in needed_chunks(each, request.chunks[each.group], end)
            if key in request.found and not is_there(key)
        ]
        return needed, end - loadable_tokens(groups, here)

    # Fetches

    def is_fetching(self, key: Key) -> bool:
        """Whether the chunk is on its way here."""
        return key in self._fetching

    @property
    def fetching_bytes(self) -> int:
        """Bytes on their way here."""
        return sum(order.num_bytes for order in self._fetching.values())

    def take_orders(self) -> list[FetchOrder]:
        """Fetches to begin now."""
        orders, self._orders = self._orders, []
        return orders

    def measure(self, orders: Iterable[FetchOrder], num_bytes: int, seconds: float) -> None:
        """A fetch was answered: it has brought these bytes in this time."""
        sources = {token_source(order.sources) for order in orders}
        if len(sources) == 1:
            self.cost.fetched(sources.pop(), num_bytes, seconds)

    def finish(
        self, orders: Iterable[FetchOrder], refusals: Iterable[Refusal]
    ) -> Iterator[tuple[FetchOrder, MissReason | None]]:
        """A fetch has ended; gives for each order why it did not come, None if it did.

        Orders that were forgotten meanwhile are left out.
        """
        for order, refusal in zip(orders, refusals, strict=True):
            if self._fetching.get(order.key) is order:
                del self._fetching[order.key]
                came = refusal is Refusal.NONE
                yield order, None if came else _REASONS.get(refusal, MissReason.FETCH_FAILED)

    def forget_all(self, requests: Iterable[RequestState]) -> None:
        """The namespace was cleared, or the node is another one: what was known is void, and so are
        the answers that requests were given.
        """
        self._fetching.clear()
        self._orders.clear()
        self._announced.clear()
        for request in requests:
            request.found.clear()

    def forget_source(self, requests: Iterable[RequestState], key: Key, reason: MissReason) -> None:
        """A chunk did not come: it is a MISS for the requests that know of it."""
        for request in requests:
            if request.found.pop(key, None) is not None:
                request.unfetched[key] = reason


def take(queue: deque[T], most: int) -> list[T]:
    """Take up to `most` off the left end; another thread may empty the queue meanwhile."""
    taken: list[T] = []
    with suppress(IndexError):
        while len(taken) < most:
            taken.append(queue.popleft())
    return taken


def _sources(asked: Sequence[Key], answer: AskAnswer) -> dict[Key, tuple[Source, ...]]:
    """Which nodes have the keys that were asked for; an invalid answer says nothing."""
    try:
        found = answer.sources.by_key(len(asked))
    except ValueError:
        return {}
    return {asked[at]: tuple(some) for at, some in found.items()}


def _chunks_before(
    first: Key, chunks: Mapping[int, Sequence[Key]], groups: Sequence[ChunkGroup]
) -> set[Key]:
    """A prompt's chunks of all groups before one of full attention, for which vLLM asks from the
    end of its own hit on; none before a window's, for which it asks from the prompt's end.
    """
    num_tokens = 0
    for each in groups:
        keys = chunks[each.group]
        if each.group == group_of(first) and each.window is None and first in keys:
            num_tokens = keys.index(first) * each.tokens
    return {key for each in groups for key in chunks[each.group][: num_tokens // each.tokens]}
