"""RayKV's `OffloadingManager`: vLLM's questions, answered from the engine's view.

All methods run on EngineCore's scheduler thread. None calls Ray, none raises: each has a safe
value, which costs a recomputation at most.

From 0.33 on vLLM holds a manager's `lock` over each step. The default, which locks nothing, is
right here: no other thread calls the manager, and what its answers rest on changes on this thread
alone, between steps (`EngineView` says what other threads may touch). `on_reset_flushed` has
nothing to do either: what a late job still stores has a stamp of before the reset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from raykv.base.guard import guarded, nothing
from raykv.base.ids import Direction, Key, Lookup, MissReason, TokenSource
from raykv.base.settings import Settings
from raykv.engine import layered, requests
from raykv.engine.announcements import News
from raykv.engine.hints import Allowed, HintBox
from raykv.engine.session import Session
from raykv.engine.view import EngineView
from raykv.protocol.columns import is_told_name
from raykv.stream.descriptions import DescriptionOutbox
from raykv.vllm.internals import offloading
from raykv.vllm.internals.engine import is_resting
from raykv.vllm.misses import MissReporter
from raykv.vllm.params import HINTS, hint_of, ignored, request_options, tenant_of
from raykv.vllm.transfers import ChunkSpec, JobEnd

logger = logging.getLogger("raykv")

_RESULTS = {each: LookupResult[each.name] for each in Lookup}

_SOURCES = {
    TokenSource.SAME_NODE: CacheHitSource.HOST,
    TokenSource.OTHER_NODE: CacheHitSource.P2P,
    TokenSource.DISK: CacheHitSource.DISK,
}


def allowed_tiers(tier_filter: TierFilter) -> frozenset[requests.Tier] | None:
    """What vLLM's `TierFilter` of a request allows; None: all."""
    if tier_filter is TierFilter.ALL:
        return None
    return frozenset(
        tier
        for tier in starmap(requests.Tier, product((False, True), repeat=2))
        if tier_filter.allows(
            Medium.STORAGE if tier.is_disk else Medium.CPU,
            Locality.REMOTE if tier.is_remote else Locality.LOCAL,
        )
    )


def _refused_load(
    _self: RayOffloadingManager, keys: Collection[OffloadKey], context: ReqContext
) -> ChunkSpec:
    """The safe value: a load that every worker refuses, so that the tokens are computed."""
    return ChunkSpec([bytes(key) for key in keys], request_id=context.req_id)


class RayOffloadingManager(OffloadingManager):
    """See the module's docstring."""

    session: Session
    """What the engine tells its node and the scheduler actor; from `start` on."""

    def __init__(self, view: EngineView, settings: Settings = Settings()) -> None:  # noqa: B008
        self.view = view
        self._labels = settings.labels()
        self.hints = HintBox(Allowed(settings.client_hints))
        self.misses = MissReporter(view, shows_tokens=settings.why_miss_text)
        # Empty without `layerwise_loads`.
        self.layered = layered.LayeredLoads()
        # New requests that may neither load nor store, and why.
        self._refused: dict[str, MissReason] = {}
        view.accounts.tenants_by_server = settings.tenant_source == "server"
        # Requests whose state may be wrong: they must neither load nor store any more.
        self.barred: set[str] = set()
        self._logged_sampling = False

    def start(self, session: Session) -> None:
        """Tell the scheduler actor from now on; vLLM makes the manager before there is a session.

        A session needs the engine's KV groups, which vLLM tells of a spec's manager alone.
        """
        self.session = session

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See `OffloadingManager.lookup`. vLLM calls it for every chunk of every prefix."""
        view = self.view
        if key in view.loadable and req_context.req_id in view.plain_requests:
            view.hits += 1
            return LookupResult.HIT
        return self._lookup(key, req_context)

    @guarded(lambda *_: LookupResult.MISS)
    def _lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self.view.requests.get(req_context.req_id)
        miss = request.miss
        found = self.view.lookup(req_context.req_id, Key(key), time.monotonic())
        if found is Lookup.MISS and self._is_tail(key, req_context):
            # It is looked up behind the chunks, and does not tell why one of them is missing.
            request.miss = miss
        return _RESULTS[found]

    def _is_tail(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Whether the key names the beginning of a block, which vLLM stores with recurrent states
        too.
        """
        end = req_context.get_offload_key_position(key)
        return end is not None and end % self.view.remote.size_of(Key(key)).num_tokens != 0

    @guarded(lambda *_: CacheHitSource.EXTERNAL_UNSPECIFIED)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Chunks are loaded from this node's RAM; P2P or DISK if they had to come to it."""
        return _SOURCES[self.view.requests.get(req_context.req_id).source_of(Key(key))]

    @guarded(_refused_load)
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        names = cast("list[Key]", list(keys))
        self.view.prepare_load(names, req_context.req_id)
        return self._named(names, req_context)

    def _named(self, keys: list[Key], req_context: ReqContext) -> ChunkSpec:
        view, request_id = self.view, req_context.req_id
        tenant = view.requests.get(request_id).options.tenant
        return ChunkSpec([*keys], view.namespace, view.orders, tenant, request_id)

    @guarded(nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """See `OffloadingManager.complete_load`; failures came with the workers' metadata."""
        self.view.complete_load(cast("Collection[Key]", keys))
        self.misses.loaded(req_context.req_id)

    @guarded(nothing)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """See `OffloadingManager.prepare_store`.

        None while a layered load of the request is under way: vLLM offers the chunks again with the
        next step.
        """
        request_id = req_context.req_id
        if request_id in self.layered.held:
            return None
        if request_id in self.barred or request_id in self.layered.spoiled:
            return PrepareStoreOutput([], self._named([], req_context), [])
        most = self.view.requests.get(request_id).options.most_stored
        if most is not None:
            ends = [(key, req_context.get_offload_key_position(key)) for key in keys]
            keys = [key for key, end in ends if end is not None and end <= most]
        offered = self.view.prepare_store(request_id, cast("list[Key]", list(keys)))
        return PrepareStoreOutput(
            keys_to_store=cast("list[OffloadKey]", offered),
            store_spec=self._named(offered, req_context),
            evicted_keys=[],
        )

    @guarded(nothing)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """See `OffloadingManager.complete_store`; what became of them the NodeActor says."""
        del success
        self.view.complete_store(cast("Collection[Key]", keys))

    @guarded(nothing)
    def belongs(self, request: Any) -> None:
        """A request is about to be new: open its account, which says whose it is."""
        by_server = self.view.accounts.tenants_by_server
        self.misses.began(request, tenant_of(request, by_server=by_server))
        params, kv_hints = request.kv_transfer_params, getattr(request, "kv_hints", None)
        found = ignored(params, kv_hints, self.hints.allowed, by_server=by_server)
        # `HintBox` counts wishes that are not allowed itself.
        others = [name for name in found if name not in HINTS]
        self.hints.note_ignored(len(others))
        self.misses.ignores(request, found)

    def refuse(self, request_id: str, reason: MissReason) -> None:
        """A request that is about to be new may neither load nor store."""
        self._refused[request_id] = reason

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See `OffloadingManager.on_new_request`; a point between steps.

        Not guarded: a request of which nothing is known must neither load nor store.
        """
        self._drain()
        options = request_options(req_context.kv_transfer_params)
        options = replace(options, tiers=allowed_tiers(req_context.load_tier_filter))
        account = self.view.accounts.get(req_context.req_id)
        if account is not None and account.tenant:
            options = replace(options, tenant=account.tenant)
        reason = self._refused.pop(req_context.req_id, None)
        if reason is not None:
            options = replace(options, load=False, store=False, no_load=reason)
        self.view.start_request(req_context.req_id, options)
        hint = hint_of(req_context.kv_transfer_params, req_context.kv_hints)
        self.hints.begin(req_context.req_id, hint)
        return RequestOffloadingContext()

    @guarded(nothing)
    def ask(self, request_id: str, keys: Iterable[OffloadKey]) -> None:
        """Find out who has what this node lacks, before the request is scheduled first; what the
        request wishes for these chunks is passed on.
        """
        wanted = list(keys)
        names = list(map(Key, wanted))
        self.view.ask(request_id, names)
        self.hints.add(request_id, names)
        self.session.note_wanted(wanted)
        self.session.nudge()

    @guarded(nothing)
    def touch(self, request_id: str) -> None:
        """A request is about to be scheduled, or waits: what it has found is to stay."""
        self.view.touch(request_id, time.monotonic())

    @guarded(nothing)
    def ended(self, request_id: str, columns: Iterable[Sequence[OffloadKey]]) -> None:
        """A request has ended, whose chunks have these keys, by KV group; some may still be stored,
        until `on_request_finished`.
        """
        self.hints.name_chunks(request_id, (map(Key, keys) for keys in columns))

    @guarded(nothing)
    def took_step(self, num_tokens: int, seconds: float) -> None:
        """An engine step computed these prompt tokens."""
        self.view.remote.cost.computed(num_tokens, seconds)

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.view.finish_request(req_context.req_id)
        self.layered.spoiled.discard(req_context.req_id)
        self.hints.end(req_context.req_id)
        self.session.nudge()

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See `OffloadingManager.on_schedule_end`; a point between steps."""
        self._drain()

    def _drain(self) -> None:
        self.session.drain()
        self.session.nudge()
        self._log_sampling()

    def _log_sampling(self) -> None:
        samples = self.view.sampler.is_sampling
        if samples != self._logged_sampling:
            self._logged_sampling = samples
            if samples:
                logger.info(
                    "hardly anything that is stored is loaded again: from now on one request in "
                    "%d stores (stop_unused_stores=False turns this off)",
                    self.view.sampler.share,
                )
            else:
                logger.info("stored chunks are loaded again: all requests store")

    def reset_cache(self) -> None:
        """Empty this view at once, and the namespace in the whole cluster with the next exchange.

        Not guarded: the connector answers for it.

        vLLM never completes jobs from before a reset, so nothing is in flight from here on. Of an
        engine that only rests no more than that is forgotten: its chunks are as valid as before.
        One whose weights have just changed has chunks of the new ones only from before it had
        others, or of other engines, and nobody means these.
        """
        if is_resting() or self.view.has_left or self.view.is_new:
            self.view.keep_stores(())
        else:
            self.view.reset()
        self.session.nudge()

    @guarded(nothing)
    def leave(self, what: str) -> None:
        """The weights change, by `what`: nothing is loaded or stored until `enter`."""
        if self.view.has_left:
            return
        logger.info("the weights of this engine change (%s)", what)
        self.view.leave(time.monotonic())
        self.session.nudge()

    def take_ends(self, ends: Iterable[JobEnd]) -> None:
        """How jobs have ended on the workers, before vLLM completes them.

        Not guarded: jobs of which this is not known must not be completed as if they had worked.
        """
        view, now = self.view, time.monotonic()
        for each in ends:
            keys = [Key(key) for key in each.keys]
            is_load = each.direction is Direction.LOAD
            if is_load:
                self.misses.failed(each.request_id, MissReason.LOAD_FAILED)
            if each.namespace == view.namespace:
                end = view.end_load if is_load else view.end_store
                end(each.place, each.request_id, keys, each.result, now)
            elif is_load:
                view.bar(each.request_id, [keys[at] for at in each.result.failed_chunks])

    @guarded(lambda *_: ())
    def take_events(self) -> Iterable[OffloadingEvent]:
        """See `OffloadingManager.take_events`: of chunks that this engine stored or found."""
        announcements = self.view.announcements
        return () if announcements is None else list(offloading_events(announcements.take()))

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """See `OffloadingManager.get_stats`: tokens by source, and why some were computed."""
        return self.misses.take_stats()

    def config_info(self) -> list[Mapping[str, str]]:
        """The labels of `vllm:kv_offload_config_info`, which vLLM has from 0.33 on."""
        return [self._labels]


def offloading_events(news: News) -> Iterable[OffloadingEvent]:
    """vLLM's events of chunks that came to or went from this node and that this engine knows."""
    place = {"medium": Medium.CPU, "locality": Locality.LOCAL}
    for keys, is_removed, more in (
        (news.removed, True, place),
        (news.missing, True, place | offloading.silent()),
        (news.stored, False, place),
    ):
        if keys:
            yield OffloadingEvent([OffloadKey(key) for key in keys], removed=is_removed, **more)


class ChunkTracker(OffloadingEventsTracker):
    """What vLLM's scheduler knows of chunks as it stores and finds them, for those who ask.

    vLLM's own tracker is called at the one place where a chunk's request is at hand. This one does
    what that does, for vLLM's own KV events, and describes chunks for the readers of RayKV's.

    Args:
        config: vLLM's, of its KV events.
        view: the engine's.
        model: its name.
        outbox: where descriptions go; None: there are none.
    """

    def __init__(
        self, config: Any, view: EngineView, model: str, outbox: DescriptionOutbox | None
    ) -> None:
        super().__init__(config)
        self._view = view
        self._model = model
        self._outbox = outbox

    def _find(self, key: Any) -> None:
        """vLLM remembers what the chunk is made of, until it is said to have gone."""
        announcements = self._view.announcements
        if announcements is not None and key in self._view.loadable:
            announcements.come([Key(key)])

    @guarded(nothing)
    def record_store(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        super().record_store(req, group_config, chunk_idx, offload_key)
        if self._outbox is not None:
            self._describe(req, group_config, chunk_idx, offload_key)

    @guarded(nothing)
    def record_lookup(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        """See `OffloadingEventsTracker.record_lookup`: the chunk is on this node."""
        super().record_lookup(req, group_config, chunk_idx, offload_key)
        self._find(offload_key)
        if self._outbox is not None and not self._outbox.is_busy:
            self._describe(req, group_config, chunk_idx, offload_key)

    @guarded(nothing)
    def record_partial_lookup(
        self, req: Any, group_config: Any, boundary_tokens: int, offload_key: Any
    ) -> None:
        """See `OffloadingEventsTracker.record_partial_lookup`; the readers of RayKV's events do not
        get beginnings of blocks described.
        """
        super().record_partial_lookup(req, group_config, boundary_tokens, offload_key)
        self._find(offload_key)

    def _describe(self, req: Any, group_config: Any, chunk_idx: int, key: Any) -> None:
        outbox, namespace = self._outbox, self._view.namespace
        if outbox is None or outbox.knows(namespace, key):
            return
        if offloading.is_windowed(group_config) or has_other_input(req):
            return
        description = offloading.described_chunk(
            self,
            req,
            group_config,
            chunk_idx,
            namespace=namespace,
            key=bytes(key),
            model=self._model,
        )
        if is_told_name(description.lora or ""):
            outbox.add(description)


def has_other_input(req: Any) -> bool:
    """Whether a prompt's hashes depend on more than tokens and LoRA, or are secret: by a salt."""
    return any(getattr(req, name, None) for name in ("cache_salt", "mm_features")) or (
        getattr(req, "prompt_embeds", None) is not None
    )


def track_chunks(
    tables: offloading.SchedulerTables,
    config: Any,
    model: str,
    outbox: DescriptionOutbox | None,
    view: EngineView,
) -> None:
    """Have vLLM's scheduler side report its chunks, if something reads the reports."""
    if outbox is None and view.announcements is None:
        return
    tables.replace_tracker(ChunkTracker(config, view, model, outbox))
