"""What an engine believes that it can load, and what it stores: the view, over all its places.

              prepare_store            its result, complete_store
   (absent) ───────────────► PENDING ──────────────────────────► (absent)
       │                                                             │
       │         every place's listing, or a result, has it          ▼
       └──────────────────────────────────────────────────────────► READY

vLLM's scheduler thread drives it; a lookup is a dict access. What is READY is what its places have
said, and nothing else; it changes between engine steps only, so that a HIT is still there when the
load is prepared. Where it is wrong, a load fails and vLLM computes.

Threads: `query`, `found.take`, `question`, `remote.take_questions` and `remote.take_announced` may
run on another thread. They only pop from the left of queues.

Invariants:
1. A key is READY if every place has it, by what it has said last; where one is silent, or its
   workers and its listing name different lives, none is.
2. For one request a key that failed is a MISS for good, and once its deadline has passed every key
   that is not READY is a MISS.
3. After `reset` nothing is READY or stored until every place has shown orders at least as new as
   that reset's.
4. Behind a chunk of a request that found no room, none of its KV group is offered, unless it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from raykv.base import departures, ids
from raykv.base.ids import Blocks, Key, Lookup, MissReason, Namespace, NodeId, Refusal
from raykv.engine import accounts, remote, requests
from raykv.engine.announcements import Announcements
from raykv.engine.found import TOUCH_S, FoundChunks
from raykv.engine.listed import EnginePlace, ListedPlace, PlaceChange
from raykv.protocol import columns, engine, listing
from raykv.protocol.copies import CopyResult

COUNTED = (
    "misses",
    "chunks_offered",
    "chunks_stored",
    "chunks_loaded",
    "loads_failed",
    "stores_failed",
    "stores_without_room",
    "lookups_timed_out",
    "chunks_fetched",
    "bytes_fetched",
    "fetches_failed",
)
"""Counters of a view, which are told from the start."""

_OF_WINDOWS = (
    MissReason.NEVER_STORED,
    MissReason.WINDOW_MISSING,
    MissReason.EVICTED,
    MissReason.QUOTA,
)
"""Why a window is missing that was not there when its prefix was; other reasons are the prefix's
too.
"""

_WENT: Mapping[listing.Reason | None, MissReason] = {
    listing.Reason.COMING: MissReason.EVICTED,
    listing.Reason.STORED: MissReason.EVICTED,
    listing.Reason.FAILED: MissReason.EVICTED,
    listing.Reason.EVICTED: MissReason.EVICTED,
    listing.Reason.QUOTA: MissReason.QUOTA,
    listing.Reason.MOVED: MissReason.EVICTED,
    listing.Reason.CLEARED: MissReason.CLEARED,
    listing.Reason.DAMAGED: MissReason.LOAD_FAILED,
    None: MissReason.NODE_LOST,
}
"""Why a chunk is missing that a place does not have any more; its life may be over."""


@dataclass(slots=True)
class _PlaceView:
    """What the engine believes of a place.

    `line`: the life that all workers there are connected to; None: not all are, or it is not known.
    `has_more`: not all that it had was read.
    """

    listed: ListedPlace
    line: int | None = None
    facts: engine.PlaceFacts = field(default_factory=engine.PlaceFacts)
    has_more: bool = True

    def is_up(self, now: float) -> bool:
        """Whether its chunks can be loaded."""
        life = self.listed.position.life
        is_heard = life != 0 and not self.listed.is_silent(now)
        return is_heard and self.line == life and not self.facts.is_paused


class EngineView:
    """See the module's docstring. Times are of one clock that never goes back.

    Args:
        settings: of the engine.
        sizes: of chunks, by KV group index.
        announcements: of chunks that come and go, for vLLM's subscribers; None: there are none.
    """

    def __init__(
        self,
        settings: requests.ViewSettings,
        sizes: Mapping[int, remote.ChunkSize] | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self.engine_id, self.life, self.namespace = ids.EngineId(""), 0, Namespace("")
        self.settings = settings
        self.sampler = requests.StoreSampler(is_on=settings.stop_unused_stores)
        self.remote = remote.RemoteChunks(settings, sizes or {})
        self.announcements = announcements
        # Since the engine's start; hits stand apart, since each lookup may be one.
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self.hits = 0
        self.requests = requests.RequestTable()
        self.accounts = accounts.Accounts()
        # The engine has left its namespace, and is in no other one yet.
        self.has_left = False
        # It has come to its namespace while it ran, and no request has begun there.
        self.is_new = False
        self._departures: departures.Departures[MissReason] = departures.Departures()
        self._readers = 0
        self._places: list[_PlaceView] = []
        self._ready: Mapping[Key, Blocks] = {}
        # What this engine is storing.
        self._pending: set[Key] = set()
        # What the places are to be told of.
        self.found = FoundChunks()
        # When `look` was called last.
        self._looked_at = 0.0
        # Resets so far, and of how many the number of their orders is known; what every place has
        # to show.
        self._resets = self._resets_numbered = 0
        self._reset: ids.Stamp | None = None
        # Why no chunk may be loaded or stored now; and the requests of which every chunk that is
        # READY may be loaded, and those chunks: what a caller may look at before `lookup`.
        self._off: MissReason | None = MissReason.NOT_ATTACHED
        self.plain_requests = self.requests.plain
        self.loadable: Mapping[Key, Blocks] = {}

    def begin(self, hello: engine.EngineHello, places: Sequence[EnginePlace], now: float) -> None:
        """Who the engine is, and its places, at least one. Once."""
        self.engine_id, self.life = ids.EngineId(hello.engine_id), hello.life
        self.namespace = Namespace(hello.namespace)
        known = [each._replace(life=each.life or hello.life) for each in places]
        self._places = [_PlaceView(self._read_anew(each, now)) for each in known]
        self._ready = self._common()
        self.look(now)

    def _read_anew(self, place: EnginePlace, now: float) -> ListedPlace:
        self._readers += 1
        return ListedPlace(place, self.namespace, self._readers, now)

    def _common(self) -> Mapping[Key, Blocks]:
        """What every place has; of one place, that goes on changing by itself."""
        first, *others = (each.listed.ready for each in self._places)
        if not others:
            return first
        return {k: blocks for k, blocks in first.items() if all(k in each for each in others)}

    # Places

    @property
    def _listed(self) -> list[ListedPlace]:
        return [each.listed for each in self._places]

    @property
    def places(self) -> list[EnginePlace]:
        """Where the engine's ranks run."""
        return [each.place for each in self._listed]

    @property
    def node_ids(self) -> list[NodeId]:
        """The nodes of the places."""
        return [each.node_id for each in self.places]

    def query(self, at: int) -> engine.ChangesQuery:
        """What to ask a place for next; on any thread."""
        listed = self._places[at].listed
        return engine.ChangesQuery(listed.place.life, listed.namespace, listed.position)

    def take(self, at: int, answer: engine.ChangesAnswer, now: float) -> None:
        """A place's answer to a `query`, which came then. Only between engine steps."""
        place = self._places[at]
        if answer.is_known:
            place.facts, place.has_more = answer.facts, answer.has_more
        self._changed(place.listed.take(answer.part, now))
        self.remote.has_peers = any(each.facts.has_peers for each in self._places)
        # The first place has the engine's counters, by which it knows what is loaded.
        self.sampler.share = self._places[0].facts.store_share
        self.look(now)

    def hear(self, at: int, now: float) -> None:
        """Note when a place was heard of."""
        self._places[at].listed.hear(now)

    def set_line(self, at: int, life: int | None, now: float) -> None:
        """All workers at a place are connected to that life of its NodeActor; None: not all are."""
        self._places[at].line = life
        self.look(now)

    def look(self, now: float) -> None:
        """Find out whether the places can be used now; once per engine step."""
        self._looked_at = now
        if not self._places:
            return
        if self._reset is not None and self.orders >= self._reset:
            self._reset = None
        self._off = self._why_off(now)
        self.loadable = {} if self._off else self._ready

    def _why_off(self, now: float) -> MissReason | None:
        if self.has_left:
            return MissReason.WEIGHTS_CHANGED
        if all(each.is_up(now) for each in self._places):
            return MissReason.CLEARING if self.is_clearing else None
        if self.is_paused:
            return MissReason.PAUSED
        is_attached = all(each.listed.position.life for each in self._places)
        return MissReason.NODE_LOST if is_attached else MissReason.NOT_ATTACHED

    def _changed(self, changes: Iterable[PlaceChange]) -> None:
        """A place has something new, or does not have something any more."""
        for keys, blocks, reason in changes:
            if blocks is None:
                self._note_gone(keys, reason)
            if len(self._places) > 1:
                for key in keys:
                    self._compare(key)
            if self.announcements is not None:
                for key in keys:
                    self.announcements.changed(key, is_there=key in self._ready)

    def _note_gone(self, keys: Iterable[Key], reason: listing.Reason | None) -> None:
        """Chunks are not at a place any more: why, if it says that, or else why they were to go."""
        if reason is listing.Reason.FAILED:
            cleared = MissReason.CLEARED
            keys = (key for key in keys if self._departures.get(key) is not cleared)
        self._departures.note(keys, _WENT[reason])

    def _compare(self, key: Key) -> None:
        """Find out whether each of several places has a key."""
        assert isinstance(self._ready, dict)
        found = [each.listed.ready.get(key) for each in self._places]
        if all(found):
            self._ready[key] = found[0]
        else:
            self._ready.pop(key, None)

    @property
    def orders(self) -> ids.Stamp:
        """The number of the orders that every place has shown: what is offered now is stored under
        it.
        """
        return min((each.facts.orders for each in self._places), default=engine.NOTHING_ORDERED)

    @property
    def is_whole(self) -> bool:
        """Whether the listings of all places have been read to their ends."""
        return all(each.listed.position.place == listing.ALL_READ for each in self._places)

    @property
    def num_ready(self) -> int:
        """Chunks that every place has."""
        return len(self._ready)

    def life_of(self, at: int) -> int:
        """The life of a place's listing; 0: nothing has been heard of it."""
        return self._places[at].listed.position.life

    @property
    def is_paused(self) -> bool:
        """Whether an operator has switched the cache off."""
        return any(each.facts.is_paused for each in self._places)

    # Requests

    def start_request(self, request_id: str, options: requests.RequestOptions) -> None:
        """A request is new, and has nothing of an earlier one with its id."""
        self.is_new = False
        self.finish_request(request_id)
        self.requests.start(request_id, self.sampler.limit(options))

    def finish_request(self, request_id: str) -> None:
        """No more lookups, loads or stores will be asked for this request."""
        request = self.requests.finish(request_id)
        if request is not None:
            self.remote.finish_request(request)

    def ask(self, request_id: str, keys: Sequence[Key]) -> None:
        """Find out early which nodes have what the places do not, and have these keep what they
        have; nothing for an unknown request.

        `keys` are all of one KV group that the prompt has.
        """
        request = self.requests.get(request_id)
        if not request.is_known or self._off or not request.options.load:
            return
        if keys:
            request.chunks[ids.group_of(keys[0])] = keys
        request.touch_at = self._looked_at + TOUCH_S
        self.found.note(request, (key for key in keys if key in self._ready))
        absent = (key for key in keys if key not in self._ready and key not in self._pending)
        # All are looked for on disks, whether others are asked or not.
        elsewhere = [key for key in absent if not self._find_on_disks(request, key)]
        self.remote.ask(request, islice(elsewhere, remote.MAX_ASKED))

    def touch(self, request_id: str, now: float) -> None:
        """A request waits to be admitted: its places are to keep what it has found."""
        if not self._off:
            self.found.note_again(self.requests.get(request_id), self._ready, now)

    def _find_on_disks(self, request: requests.RequestState, key: Key) -> bool:
        """Whether the places have a chunk that they lack in RAM on their own disks."""
        places = self._listed
        if not all(key in each.on_disk or key in each.ready for each in places):
            return False
        if key not in request.found and key not in request.unfetched:
            sources = tuple(each.disk_of(key) for each in places)
            request.find(key, sources, self.node_ids)
        return True

    def lookup(self, request_id: str, key: Key, now: float) -> Lookup:
        """HIT if the chunk can be loaded now, HIT_PENDING while it comes."""
        request = self.requests.get(request_id)
        if (barrier := self._off or request.barrier(key)) is not None:
            return request.missed(key, barrier)
        if key in self._ready:
            self.hits += 1
            return Lookup.HIT
        if self._is_being_stored(key):
            if request.may_wait(now, self.settings.lookup_s):
                return Lookup.HIT_PENDING
            self.counters["lookups_timed_out"] += 1
            self.counters["misses"] += 1
            return request.missed(key, MissReason.PENDING_TOO_LONG)
        if self._may_read_on(request, now):
            return Lookup.RETRY
        self._find_on_disks(request, key)
        found = self.remote.lookup(request, key, now, self._has)
        if found is Lookup.MISS:
            self.counters["misses"] += 1
            self._explain(request)
        return found

    def _explain(self, request: requests.RequestState) -> None:
        """Give a MISS the reason that is remembered, or have the scheduler actor asked for it; and
        say which place lacks what others have.
        """
        miss = request.miss
        if miss is not None and len(self._places) > 1:
            has = [miss.key in place.listed.ready for place in self._places]
            if any(has):
                places = tuple(at for at, is_there in enumerate(has, start=1) if not is_there)
                request.miss = miss = replace(miss, places=places)
        if miss is None or miss.reason is not MissReason.NEVER_STORED:
            return
        if (known := self._departures.get(miss.key)) is not None:
            request.miss = replace(miss, reason=known)
        else:
            self.remote.wonder(request, miss.key)

    def _may_read_on(self, request: requests.RequestState, now: float) -> bool:
        """Whether places have chunks that are not known yet, and a request may wait for that."""
        is_behind = not self.is_whole or any(each.has_more for each in self._places)
        may_wait = request.is_known and is_behind
        return may_wait and request.may_ask(now, self.settings.query_s)

    def _is_being_stored(self, key: Key) -> bool:
        """Whether an engine stores a chunk; one that is fetched is coming, too."""
        is_fetched = self.remote.is_fetching(key)
        return key in self._pending or (not is_fetched and self._is_coming(key))

    def _is_coming(self, key: Key) -> bool:
        """Whether every place that does not have a chunk is getting it from another engine."""
        return all(key in each.listed.ready or key in each.listed.coming for each in self._places)

    def reach(self, request_id: str, keys: Iterable[Key]) -> int:
        """How many chunks of a prefix are known, without a gap: here, on their way, or elsewhere as
        far as the request was told.
        """
        request = self.requests.get(request_id)
        if self._off or not request.options.load:
            return 0
        count = 0
        for key in keys:
            if not (self._has(key) or key in request.found or key in request.pending):
                break
            count += 1
        return count

    def missed_window(self, request_id: str, num_tokens: int, behind: Key | None) -> None:
        """Explain why `num_tokens` of the prefix that a request found are not loaded: a window or a
        state is missing. `behind` is the first unknown chunk behind them, if there is one.
        """
        request = self.requests.get(request_id)
        if request.miss is None or request.miss.reason not in _OF_WINDOWS:
            return
        reason = request.miss.reason
        if reason is MissReason.NEVER_STORED:
            reason = MissReason.WINDOW_MISSING
        if behind is None:
            request.missed(request.miss.key, reason)
            return
        rest = self._departures.get(behind) or MissReason.NEVER_STORED
        if rest is MissReason.NEVER_STORED:
            self.remote.wonder(request, behind)
        request.miss = requests.Miss(behind, rest, num_tokens, reason)

    def _has(self, key: Key) -> bool:
        """Whether the places have a chunk, or will have it."""
        is_own = key in self._ready or key in self._pending
        return is_own or self.remote.is_fetching(key) or self._is_coming(key)

    # What others have

    def questions(self, keys: Sequence[bytes], coming: Sequence[Key]) -> list[engine.Ask]:
        """The next questions to the scheduler actor: about the same keys, for each place."""
        asked, announced = columns.Keys.of(keys), columns.Keys.of(coming)
        return [
            engine.Ask(
                self.engine_id,
                each.place.life,
                each.namespace,
                [each.place.node_id],
                asked,
                announced,
            )
            for each in self._listed
        ]

    def take_answers(
        self, questions: Sequence[engine.Ask], answers: Sequence[engine.AskAnswer]
    ) -> None:
        """The scheduler actor's answers to `questions`; an invalid one counts as nothing found."""
        places = self._listed
        if [each.namespace for each in questions] != [each.namespace for each in places]:
            return
        asked = [Key(key) for key in questions[0].keys]
        why: dict[Key, MissReason] = {}
        for answer in answers:
            why |= _why_gone(asked, answer)
        for reason in set(why.values()):
            self._departures.note([key for key in why if why[key] is reason], reason)
        self.accounts.explain(why)
        self.remote.take_answers(asked, answers, places)

    def finish_fetch(
        self, orders: Sequence[remote.FetchOrder], results: Sequence[CopyResult | None], now: float
    ) -> None:
        """A fetch has ended at each place; None: there was no answer. What arrived everywhere is
        READY, if the places say so.

        What did not is a MISS for the requests that know of it; a later one asks anew.
        """
        refusals = [Refusal.NONE] * len(orders)
        num_bytes, seconds = 0, 0.0
        for place, result in zip(self._places, results, strict=True):
            if result is None:
                refusals = [Refusal.TOO_LATE] * len(orders)
                continue
            self._believe(place, result, now)
            num_bytes += result.num_bytes
            seconds = max(seconds, result.seconds)
            for number, refusal in _failed(result, len(orders)):
                refusals[number] = Refusal.NONE if refusal is Refusal.HERE else refusal
        self.counters["bytes_fetched"] += num_bytes
        if None not in results:
            self.remote.measure(orders, num_bytes, seconds)
        for order, reason in self.remote.finish(orders, refusals):
            if reason is None:
                self.counters["chunks_fetched"] += 1
                continue
            self.counters["fetches_failed"] += 1
            self.remote.forget_source(self.requests.values(), order.key, reason)

    def _believe(self, place: _PlaceView, result: CopyResult, now: float) -> None:
        self._changed(place.listed.learn(result.life, result.number, result.rows, now))

    # Loads

    def prepare_load(self, keys: Collection[Key], request_id: str = "") -> None:
        """Chunks that `lookup` called HIT are about to be loaded."""
        request = self.requests.get(request_id)
        self.found.note(request, (key for key in keys if key not in request.told))
        if self.announcements is not None:
            self.announcements.come(key for key in keys if key in self._ready)

    def end_load(
        self, at: int, request_id: str, keys: Sequence[Key], result: CopyResult, now: float
    ) -> None:
        """A rank's load job has ended, before vLLM completes it.

        What failed is barred for its request; for all, if the place says that it is gone.
        """
        place = self._places[at]
        self._believe(place, result, now)
        namespace = place.listed.namespace
        there = {row.key: row.blocks for row in result.rows if row.namespace == namespace}
        failed = _failed(result, len(keys))
        self.bar(request_id, [keys[number] for number, _ in failed])
        for number, refusal in failed:
            if refusal is Refusal.PARTIAL:
                blocks = there.get(keys[number], ids.NO_BLOCKS)
                self._changed(place.listed.distrust(keys[number], blocks))

    def bar(self, request_id: str, keys: Collection[Key]) -> None:
        """A request did not get chunks: they are a MISS for it from now on."""
        self.counters["loads_failed"] += len(keys)
        request = self.requests.bar(request_id) if keys else None
        if request is not None:
            request.barred.update(keys)

    def complete_load(self, keys: Collection[Key]) -> None:
        """vLLM has completed a load job on all ranks."""
        self.counters["chunks_loaded"] += len(keys)

    # Stores

    def prepare_store(self, request_id: str, keys: Collection[Key]) -> list[Key]:
        """Which of the keys are to be stored: those that not every place has or is getting.

        The others count as found: a prompt that is larger than a pool keeps its head.
        """
        request = self.requests.get(request_id)
        is_leaving = any(each.facts.is_leaving for each in self._places)
        if self._off or is_leaving or not request.options.store:
            self._departures.note(keys, MissReason.STORES_OFF)
            return []
        present = dict.fromkeys(filter(self._has, keys))
        self.found.note(request, present)
        offered = [key for key in keys if key not in present]
        if request.no_room:
            offered = [key for key in offered if self._may_have_room(request, key)]
        self._pending.update(offered)
        self.remote.announce(offered)
        if self.announcements is not None:
            self.announcements.expect(offered)
            self.announcements.come(key for key in present if key in self._ready)
        self.counters["chunks_offered"] += len(offered)
        return offered

    def _may_have_room(self, request: requests.RequestState, key: Key) -> bool:
        group = ids.group_of(key)
        first = request.no_room.get(group)
        if first is None:
            return True
        if not self._has(first):
            self._departures.note([key], MissReason.POOL_FULL)
            return False
        del request.no_room[group]
        return True

    def end_store(
        self, at: int, request_id: str, keys: Sequence[Key], result: CopyResult, now: float
    ) -> None:
        """A rank's store job has ended, before vLLM completes it."""
        self._believe(self._places[at], result, now)
        request = self.requests.get(request_id)
        for number, refusal in _failed(result, len(keys)):
            key = keys[number]
            self.counters["stores_failed"] += 1
            if refusal is Refusal.NO_ROOM:
                self.counters["stores_without_room"] += 1
                request.no_room.setdefault(ids.group_of(key), key)
            full = refusal is Refusal.NO_ROOM
            self._departures.note([key], MissReason.POOL_FULL if full else MissReason.STORE_FAILED)

    def complete_store(self, keys: Iterable[Key]) -> None:
        """vLLM has completed a store job on all ranks: what became of it the places have said."""
        for key in keys:
            if key in self._pending:
                self._pending.discard(key)
                self.counters["chunks_stored"] += key in self._ready
                if self.announcements is not None:
                    self.announcements.changed(key, is_there=key in self._ready)

    def keep_stores(self, flying: Iterable[Key]) -> None:
        """vLLM completes store jobs of these keys, and no others that it has begun."""
        self._pending &= set(flying)

    # Whole-cache events

    def reset(self) -> None:
        """Nothing that is here now may be loaded any more, and the namespace is to be cleared in
        the whole cluster. vLLM does not complete the jobs that it has begun before.
        """
        self._resets += 1
        self._off, self.loadable = self._off or MissReason.CLEARING, {}
        if self.announcements is not None:
            self.announcements.clear()
        self._forget(MissReason.CLEARED)

    @property
    def wanted_clear(self) -> int:
        """The number of the last reset, if it has not been ordered yet; else 0."""
        return self._resets if self._resets != self._resets_numbered else 0

    def cleared(self, reset: int, orders: ids.Stamp, now: float) -> None:
        """The orders that clear the namespace for a reset have that number."""
        if reset == self.wanted_clear:
            self._resets_numbered, self._reset = reset, orders
            self.look(now)

    @property
    def is_clearing(self) -> bool:
        """Whether not every place has shown the orders of the last reset."""
        return self._resets != self._resets_numbered or self._reset is not None

    def _forget(self, why: MissReason) -> None:
        self._departures.note(chain(self._pending, reversed(list(self._ready))), why)
        self._pending.clear()
        self.found.clear()
        if self.announcements is not None:
            self.announcements.lose_all()
        self.remote.forget_all(self.requests.values())

    def leave(self, now: float) -> None:
        """The engine is about to have other weights: nothing is loaded or stored until `enter`.
        What it is storing was computed before, and may end.
        """
        self.has_left = True
        self.look(now)

    def enter(self, namespace: Namespace, now: float) -> None:
        """The engine goes on in a namespace, of whose chunks it learns from its places. In the one
        that it has left everything is as it was.

        Not while `is_clearing`: the clearing would be another namespace's.
        """
        assert not self.is_clearing, self.namespace
        self.has_left = False
        if namespace != self.namespace:
            self.namespace, self.is_new = namespace, True
            self._forget(MissReason.WEIGHTS_CHANGED)
            for place in self._places:
                place.listed = self._read_anew(place.listed.place, now)
            self._ready = self._common()
            # Other nodes may have it, until it is known.
            self.remote.has_peers = True
        self.look(now)

    def move(self, at: int, node_id: NodeId, now: float) -> None:
        """A place is another node, of which nothing is known."""
        self._forget(MissReason.NODE_LOST)
        if self.is_clearing:
            # The next node may know other orders: the clearing is another one, and ordered anew.
            self._resets, self._reset = self._resets + 1, None
        moved = self.places[at]._replace(node_id=node_id)
        self._places[at] = _PlaceView(self._read_anew(moved, now))
        self._ready = self._common()
        self.look(now)

    def counter_values(self) -> dict[str, int]:
        """All counters by name."""
        return {
            "hits": self.hits,
            **self.counters,
            "requests_not_stored": self.sampler.num_left_out,
            "weights_changed": int(self.has_left),
            **self.remote.counter_values(),
            **self.accounts.counter_values(),
        }

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert not self.is_clearing or not self.loadable, self._reset
        for place in self._places:
            assert self._ready.keys() <= place.listed.ready.keys(), place.listed.place
        common = set.intersection(*(set(each.listed.ready) for each in self._places))
        assert common == self._ready.keys(), common ^ self._ready.keys()


def _why_gone(asked: Sequence[Key], answer: engine.AskAnswer) -> dict[Key, MissReason]:
    """Why no node has keys any more, or only engines of another namespace have them."""
    gone = zip(answer.gone, answer.reasons, strict=True)
    why = {asked[at]: _WENT[listing.Reason(each)] for at, each in gone if at < len(asked)}
    others = [asked[at] for at in answer.other if at < len(asked)]
    return why | dict.fromkeys(others, MissReason.OTHER_NAMESPACE)


def _failed(result: CopyResult, num_chunks: int) -> list[tuple[int, Refusal]]:
    """Return the numbers of chunks that did not come, and why."""
    if not result.refusals:
        return []
    rows = zip(result.failed_chunks, result.refusals, strict=True)
    return [(at, Refusal(refusal)) for at, refusal in rows if 0 <= at < num_chunks]
