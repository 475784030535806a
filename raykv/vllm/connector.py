"""RayKVConnector: vLLM's `OffloadingConnector` with RayKV behind it.

vLLM's class keeps all scheduling logic. What is added here: our spec is named for the user, a
failed load reaches vLLM as a failed load, and no hook raises. Constructors may raise: a wrong
setting stops the start.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import ray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from raykv.base import errors, settings
from raykv.base.guard import guarded, nothing
from raykv.base.ids import Direction, MissReason, part_of
from raykv.base.version import __version__
from raykv.cluster.logs import set_up_logging
from raykv.engine import cost
from raykv.engine.insight.spans import RequestSpans
from raykv.engine.runtime import EngineRuntime, PlaceNode, new_life
from raykv.protocol import descriptions, engine
from raykv.stream.descriptions import DescriptionOutbox
from raykv.vllm import layered, mending, misses, params, transfers, weights, windows
from raykv.vllm.identity import media, placement, weight_changes
from raykv.vllm.identity.adapters import AdapterUse, AdapterUses
from raykv.vllm.identity.facts import engine_facts, namespace_of, traits_of
from raykv.vllm.internals import arguments, names, scheduling
from raykv.vllm.internals.engine import watch_rests
from raykv.vllm.internals.offloading import (
    SchedulerTables,
    count_by_transfer_type,
    evict_blocks,
    replace_worker_side,
    scheduler_side,
    worker_side,
)
from raykv.vllm.manager import RayOffloadingManager, track_chunks
from raykv.vllm.spec import (
    RayKVOffloadingSpec,
    refuse_kinds,
    told_to_specs,
    use_our_spec,
)
from raykv.vllm.worker import RayKVConnectorWorker
from raykv.worker.link import LinkTarget

logger = logging.getLogger("raykv")


@contextmanager
def logged_refusals() -> Iterator[None]:
    """Say why the start is stopped: vLLM buries it in the tracebacks of three processes."""
    try:
        yield
    except errors.RayKVError as error:
        logger.critical("RayKV stops the start of the engine: %s", error)
        raise


class RayKVConnector(OffloadingConnector):
    """One object per vLLM process: in EngineCore for the scheduler, in each worker for its rank."""

    # On the scheduler's side, for engines with adapters.
    _adapters: AdapterUses | None = None
    # On the scheduler's side, and there alone.
    _manager: RayOffloadingManager
    _windows: windows.Windows
    raykv_weights: weights.WeightChanges
    # What the workers were told last, or were to be told in a step that failed.
    _told: Sequence[LinkTarget | None] = ()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Set up this process's side.

        Raises:
            VersionError: this vLLM is not supported.
            SettingError: a setting is unknown or impossible.
            ClusterError: the Ray cluster can't be joined.
        """
        set_up_logging()
        self._runtime: EngineRuntime | None = None
        # On the scheduler's side.
        self._steps = cost.StepTimes()
        self._loading = layered.LoadScheduling()
        with logged_refusals():
            self._start(vllm_config, role, kv_cache_config)

    def _start(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        names.check_vllm_version(names.vllm_version())
        arguments.refuse_arguments(vllm_config)
        placement.refuse_launcher(vllm_config.parallel_config)
        refuse_kinds(kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        extra_config = transfer_config.kv_connector_extra_config
        use_our_spec(extra_config)
        transfer_config.kv_load_failure_policy = "recompute"
        with told_to_specs(extra_config, vllm_config, kv_cache_config) as told:
            super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_side(told.spec, vllm_config, kv_cache_config)
        else:
            plain = worker_side(self)
            names.require(names.WORKER, self, plain)
            is_layered = plain.spec.settings.layerwise_loads
            kind = layered.LayeredConnectorWorker if is_layered else RayKVConnectorWorker
            worker = kind(plain.spec, vllm_config, kv_cache_config)
            replace_worker_side(self, worker)
            worker.watch(vllm_config)
            self._parallel = vllm_config.parallel_config
            is_spread = self._parallel.nnodes_within_dp > 1
            address = worker.spec.settings.ray_address
            self._host = placement.HostNode(address) if is_spread else None
            if self._parallel.node_rank_within_dp > 0:
                worker.host = self._host

    def _start_scheduler_side(
        self, spec: RayKVOffloadingSpec, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        names.require(names.SCHEDULER, self, scheduler_side(self))
        manager = spec.get_manager()
        facts = engine_facts(
            vllm_config, kv_cache_config, spec.config, spec.settings.weights_version
        )
        hello = engine.EngineHello(
            spec.config.engine_id,
            new_life(),
            namespace_of(facts),
            model=spec.config.model.name,
            num_ranks=spec.num_parts,
            slot_bytes=spec.slot_bytes_by_group(),
            versions=f"RayKV {__version__}, vLLM {names.vllm_version()}, Ray {ray.__version__}",
            traits={**traits_of(facts), **self._chunk_traits()},
        )
        if spec.settings.layerwise_loads:
            layered.refuse_layerwise(spec.settings, vllm_config, kv_cache_config)
            names.require(names.LAYERWISE, self)
            evict = partial(evict_blocks, self)
            self._loading = layered.LayeredScheduling(manager.layered, self._tables, evict)
        self._windows = windows.Windows(self._tables, spec.settings.window_share)
        self._windows.keep_states(kv_cache_config)
        self._hello = hello
        self._manager = manager
        self.raykv_weights = weights.WeightChanges(facts, manager, self._tables)
        describes = spec.settings.describe_chunks or spec.settings.events_endpoint
        described = DescriptionOutbox() if describes else None
        self._runtime = EngineRuntime(
            spec.settings,
            manager.view,
            hello,
            manager.hints,
            described,
            partial(self._node_of_ranks, vllm_config.parallel_config),
        )
        if vllm_config.observability_config.otlp_traces_endpoint:
            from raykv.vllm.insight.tracing import SpanExporter

            manager.misses.spans = RequestSpans(SpanExporter().tell)
        track_chunks(self._tables, spec.kv_events_config, hello.model, described, manager.view)
        manager.view.accounts.tokens_per_chunk = self._tables.tokens_per_prefix
        watch_rests()
        scheduling.watch_scheduler(RayKVConnector)
        weight_changes.watch_calls()
        if vllm_config.lora_config is not None:
            self._adapters = AdapterUses()
        self._spec, self._name = spec, vllm_config.kv_transfer_config.kv_connector
        if self._runtime.nodes:
            self._begin(self._runtime)

    @staticmethod
    def _node_of_ranks(parallel_config: Any) -> str | None:
        nodes = placement.nodes_of_ranks(parallel_config, current_platform.ray_device_key)
        if not placement.has_one_place(parallel_config, nodes):
            return None
        return "".join(nodes or ())

    def _begin(self, runtime: EngineRuntime) -> None:
        """Start the session: the engine's places are known."""
        self._manager.start(runtime.session)
        runtime.start()

    def _chunk_traits(self) -> dict[str, str]:
        """From which a client works out how much of a prompt can be loaded: what the chunks of
        each KV group are, and which of them are recurrent states.
        """
        states = " ".join(map(str, self._tables.states))
        found = {"chunks": descriptions.groups_text(self._tables.groups)}
        return found | {"state_groups": states} if states else found

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See `KVConnectorBase_V1.requires_piecewise_for_cudagraph`: it does not, since steps that
        load by layer are not taken for steps of decoding; see `LEFT_TO_COMPUTE`.

        vLLM asks in the user's own process before it starts any other: the right place to refuse
        a wrong setting.

        Raises:
            SettingError: a setting is unknown or malformed.
        """
        settings.load_settings(extra_config)
        return False

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """See `OffloadingConnector.build_prom_metrics`; runs in the API server's process."""
        use_our_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        misses.unregister_metrics()
        return count_by_transfer_type(
            super().build_prom_metrics(
                vllm_config, metric_types, labelnames, per_engine_labelvalues
            )
        )

    # Worker side

    @property
    def _worker(self) -> RayKVConnectorWorker:
        worker = worker_side(self)
        assert isinstance(worker, RayKVConnectorWorker), worker
        return worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """See `KVConnectorBase_V1.get_mem_pool_context`: KV in memory that can be shared."""
        spec = self._worker.spec
        assert isinstance(spec, RayKVOffloadingSpec), spec
        return spec.memory_context()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See `KVConnectorBase_V1.register_kv_caches`.

        Raises:
            SettingError: what was asked for can't be had with this KV cache.
        """
        with logged_refusals():
            super().register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """See `KVConnectorBase_V1.unregister_kv_caches`: 0.33 gives the KV cache's memory back."""
        self._worker.store_before_sleep()

    def get_handshake_metadata(self) -> placement.RankPlace | None:
        """See `KVConnectorBase_V1.get_handshake_metadata`: where this rank runs."""
        return placement.place_of_rank(self._worker.spec, self._parallel, self._host)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See `KVConnectorBase_V1.handle_preemptions`.

        Not guarded as a whole: what must not be skipped is the wait for copies out of blocks that
        vLLM is about to reuse, and the worker's methods are safe one by one.
        """
        self._worker.take_metadata(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def _distrust_loads(self, *_arguments: Any, **_more: Any) -> None:
        """What should be loaded may be missing: nothing computed with it may be used."""
        self._worker.distrust_loads()

    def _refuse_submissions(self, *_arguments: Any, **_more: Any) -> None:
        """Loads that were not submitted have failed, and are reported to vLLM as failed."""
        self._worker.distrust_loads()
        self._worker.refuse_submissions(self._get_connector_metadata())

    @guarded(_refuse_submissions)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)

    @guarded(_distrust_loads)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `KVConnectorBase_V1.wait_for_layer_load`; returns at once but for `layerwise_loads`.

        The only hook that waits, since the user has asked for it; loads have their deadlines.
        """
        self._worker.wait_for_layer(layer_name)

    def _refuse_stores(self) -> None:
        self._worker.refuse_stores(self._get_connector_metadata())

    @guarded(_refuse_stores)
    def wait_for_save(self) -> None:
        super().wait_for_save()

    def _nothing_finished(self, _finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), self._worker.end_badly()

    @guarded(_nothing_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return super().get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received, self._worker.take_failed_recving())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_block_ids()

    @guarded(lambda self: self._worker.take_meta())
    def build_connector_worker_meta(self) -> Any:
        return super().build_connector_worker_meta()

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """See `KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware`; part of the engine's
        start.

        Raises:
            SettingError: a rank is where RayKV can't serve it.
        """
        runtime = self._runtime
        if runtime is None:
            return
        ranks = [each for each in metadata.values() if isinstance(each, placement.RankPlace)]
        own = runtime.node_id
        try:
            with logged_refusals():
                if runtime.nodes:
                    # vLLM 0.33 hands it over again when an engine wakes up.
                    nodes = {each.node_id for each in runtime.nodes}
                    if len(nodes) == 1:
                        placement.refuse_ranks_elsewhere(ranks, nodes.pop())
                else:
                    places = placement.places_of(ranks, self._spec.config.parallel.world_size, own)
                    placement.refuse_spread(places, self._spec, self._name)
                    runtime.settle(places)
                    self._begin(runtime)
        except errors.RayKVError:
            runtime.stop()
            raise

    @cached_property
    def _tables(self) -> SchedulerTables:
        return SchedulerTables(scheduler_side(self))

    @cached_property
    def _mender(self) -> mending.Mender:
        return mending.Mender(self._tables, self._manager)

    @cached_property
    def _siblings(self) -> layered.SiblingScheduling:
        evict = partial(evict_blocks, self)
        return layered.SiblingScheduling(self._tables, self._manager, evict)

    def _adopt(self, request: Any) -> None:
        self._mender.adopt(request)

    @guarded(_adopt)
    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1.on_new_request`; asks at once who has the prompt's chunks."""
        self._mender.put_aside(request)
        self._manager.belongs(request)
        if self._adapters is not None and not self._adapters.begin(request):
            self._manager.refuse(request.request_id, MissReason.ADAPTER_UNKNOWN)
        if not media.may_share_media(request):
            self._manager.refuse(request.request_id, MissReason.MEDIA_UNKNOWN)
        with params.only_documented(request):
            super().on_new_request(request)
        if request.skip_reading_prefix_cache:
            return
        known = self._tables.find(request.request_id)
        assert known is not None, request.request_id
        known.name_chunks()
        for keys in self._columns_of(request.request_id):
            self._manager.ask(request.request_id, keys)

    def _nothing_matched(self, request: Any, _num_computed_tokens: int) -> tuple[int | None, bool]:
        """Blocks in vLLM's own cache may be used, or are asked about again with the next step."""
        self._mender.adopt(request)
        return (None, False) if self._loading.is_busy else (0, False)

    @guarded(_nothing_matched)
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._siblings.ask(request.request_id, num_computed_tokens)
        if self._loading.must_wait(request, num_computed_tokens):
            return None, False
        has_media = bool(request.mm_features)
        self.raykv_weights.begin(request.request_id, num_computed_tokens, has_media=has_media)
        if request.request_id in self._manager.barred:
            return 0, False
        known = self._tables.find(request.request_id)
        most = None if known is None else known.most_loaded
        self._manager.misses.looks(request, num_computed_tokens, most)
        self._manager.touch(request.request_id)
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is not None:
            here = num_computed_tokens + found
            self._windows.note_parting(request, here, self._manager.view)
        if not found:
            return found, is_async
        return self._loading.found(request, num_computed_tokens, found, is_async=is_async)

    @guarded(lambda *_: {})
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        self._manager.misses.came_from(request, sources)
        return sources

    def _admit_without_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM waits for a load, or goes on as if it had been done: it is reported as failed."""
        self._mender.give_up_load(request.request_id)
        if num_external_tokens:
            self._loading.strand(request, blocks)
            self._manager.misses.failed(request.request_id, MissReason.OTHER)

    @guarded(_admit_without_load)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._manager.misses.admitted(request, num_external_tokens)
        seen = blocks
        if num_external_tokens:
            self._siblings.load_own(request.request_id)
            seen = self._loading.begin(request, blocks)
        super().update_state_after_alloc(request, seen, num_external_tokens)

    def _bare_meta(self, scheduler_output: Any) -> transfers.RayKVConnectorMetadata:
        """Loads of all requests go out, except where the content of their adapter is unknown."""
        may_load = self._adapters is None
        base, stranded = self._mender.give_up_step(scheduler_output, may_load=may_load)
        self._loading.strand_step(stranded)
        return self._meta_of(base, scheduler_output)

    @guarded(_bare_meta)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._told = self._targets()
        tables = self._tables
        ended = tables.ended(scheduler_output)
        # Most steps have none of these.
        if scheduler_output.scheduled_new_reqs:
            tables.forget_blocks(each.req_id for each in scheduler_output.scheduled_new_reqs)
        if scheduler_output.preempted_req_ids:
            tables.forget_preempted(scheduler_output)
        if ended:
            tables.forget_blocks_left_behind(ended)
        self._loading.begin_step(scheduler_output)
        seen = tables.seen(scheduler_output, ended)
        self._siblings.begin(scheduler_output, self.raykv_weights)
        names = self._siblings.held | self._loading.held
        held = tables.hold_stores(names) if names else ()
        try:
            base = super().build_connector_meta(seen)
        finally:
            for request, most in held:
                request.most_stored = most
        assert isinstance(base, OffloadingConnectorMetadata), base
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._steps.begin(scheduler_output, num_tokens, time.monotonic())
        adapters = self._adapters_of(base, scheduler_output)
        return self._meta_of(base, scheduler_output, self._told, *adapters)

    def _meta_of(
        self,
        base: OffloadingConnectorMetadata,
        scheduler_output: Any,
        targets: Sequence[LinkTarget | None] = (),
        adapters: dict[str, AdapterUse] | None = None,
        beginning: dict[str, AdapterUse] | None = None,
    ) -> transfers.RayKVConnectorMetadata:
        """Nothing may fail from here on: its contents count as sent."""
        stranded, stranded_blocks = self._loading.take_stranded()
        meta = transfers.RayKVConnectorMetadata(
            load_jobs=base.load_jobs,
            store_jobs=base.store_jobs,
            jobs_to_flush=base.jobs_to_flush,
            targets=[*targets],
            stranded=stranded,
            stranded_blocks=stranded_blocks,
            adapters=adapters or {},
            beginning=beginning or {},
            weights_seen=self.raykv_weights.seen,
            place_lives=self._place_lives,
        )
        self._loading.close_step(scheduler_output)
        self._mender.end_step(scheduler_output)
        return meta

    def _adapters_of(
        self, base: OffloadingConnectorMetadata, scheduler_output: Any
    ) -> tuple[dict[str, AdapterUse], dict[str, AdapterUse]]:
        """Adapters of requests with jobs, and of those that are computed for the first time in this
        step.
        """
        if self._adapters is None:
            return {}, {}
        jobs = [*base.load_jobs.values(), *base.store_jobs.values()]
        used = self._adapters.of({job.req_id for job in jobs})
        began = self._adapters.of({each.req_id for each in scheduler_output.scheduled_new_reqs})
        self._adapters.end(self._tables.ended(scheduler_output))
        return used, began

    @guarded(nothing)
    def end_step(self, scheduler: Any, scheduled: Any, result: Any) -> None:
        """A step has ended, and vLLM has not looked at its result yet.

        While it fails, requests that would have hit blocks that did not come go on waiting.
        """
        took = self._steps.end(scheduled, time.monotonic())
        if took is not None:
            self._manager.took_step(*took)
        self._siblings.end_step(scheduled, result)
        self._loading.end_step(scheduler, scheduled, result)

    def tell_sources(self, outputs: Any) -> None:
        """The same step's outputs are about to go to the front ends; never raises."""
        if self._manager.misses.has_untold:
            self._manager.misses.tell(outputs)

    @property
    def _place_lives(self) -> list[int]:
        is_begun = self._runtime is not None and self._runtime.nodes
        return self._manager.session.place_lives if is_begun else []

    def _targets(self) -> Sequence[LinkTarget | None]:
        """Where the workers of each place find their NodeActor; mostly what they were told last."""
        nodes = [] if self._runtime is None else self._runtime.nodes
        told = self._told or [None] * len(nodes)
        targets = [self._target(at, *each) for at, each in enumerate(zip(nodes, told, strict=True))]
        return self._told if all(map(operator.is_, targets, told)) else targets

    def _target(self, at: int, node: PlaceNode, told: LinkTarget | None) -> LinkTarget | None:
        found, place = node.description, node.place
        if found is None:
            return None
        namespace = part_of(self._manager.view.namespace, place.part)
        if told and (told.socket_name, told.namespace) == (found.socket_name, namespace):
            return told
        hello = place.introduced(self._hello)
        return LinkTarget(
            socket_name=found.socket_name,
            engine_id=hello.engine_id,
            life=hello.life,
            namespace=namespace,
            num_ranks=hello.num_ranks,
            slot_bytes=hello.slot_bytes,
            place=at,
            part=place.part,
            ranks=place.ranks,
        )

    def _end_jobs(self, connector_output: Any) -> None:
        """The results of a step's jobs were not understood: what they stored is not used."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, OffloadingWorkerMetadata):
            ends = meta.ends if isinstance(meta, transfers.RayKVWorkerMetadata) else []
            failed = [each.request_id for each in ends if each.direction is Direction.LOAD]
            self._mender.end_jobs(meta.completed_jobs, failed)

    @guarded(_end_jobs)
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, transfers.RayKVWorkerMetadata):
            self._manager.barred |= meta.barred
            self._manager.take_ends(meta.ends)
            if self._adapters is not None:
                self._adapters.take_loaded(meta.adapters)
            self.raykv_weights.hear(meta.weights)
            if meta.lines and self._runtime is not None:
                self._runtime.session.take_lines(meta.lines)
            # Those that were given up meanwhile are unknown to vLLM's scheduler, but for jobs from
            # before a reset: it steps on until their ends are reported.
            known, first = self._tables.jobs, self._tables.first_job
            ended = {i: n for i, n in meta.completed_jobs.items() if i in known or i < first}
            meta.completed_jobs = ended
        super().update_connector_output(connector_output)

    def _fenced(self, *_arguments: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are still read are known to be, before vLLM frees them."""
        self._mender.mend()
        return False, None

    @guarded(_fenced)
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request)
        return super().request_finished(request, block_ids)

    @guarded(_fenced)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request)
        return super().request_finished_all_groups(request, block_ids)

    def _ended(self, request: Any) -> None:
        columns = self._columns_of(request.request_id)
        tokens = self._tables.groups[self._ranked[0]].tokens
        self._manager.misses.ended(request, columns[0] if columns else (), tokens)
        self._manager.ended(request.request_id, columns)

    @cached_property
    def _ranked(self) -> list[int]:
        """Places of the KV groups: those that are loaded as whole prefixes come first.

        What windows serve nothing without comes first: a hint may be cut off.
        """
        groups = self._tables.groups
        return sorted(range(len(groups)), key=lambda at: groups[at].window is not None)

    @guarded(lambda *_: ())
    def _columns_of(self, request_id: str) -> Sequence[Sequence[Any]]:
        """Keys of a request's chunks, a column for each KV group, as they are ranked."""
        known = self._tables.find(request_id)
        return () if known is None else [known.keys[at] for at in self._ranked]

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        """Workers learn where their NodeActor is with a step: an idle engine makes one for it.

        So the NodeActor opens the KV cache, and page-locks its pool for a GPU, while the engine
        waits for its first request.
        """
        return self._told is not self._targets() or super().has_pending_push_work()

    @guarded(lambda *_: ())
    def take_events(self) -> Iterable[Any]:
        return list(super().take_events())

    def _not_reset(self) -> bool:
        self._mender.end_reset()
        return False

    @guarded(_not_reset)
    def reset_cache(self) -> bool | None:
        """See `KVConnectorBase_V1.reset_cache`; False: not all of it was forgotten."""
        # vLLM's must not get any of an earlier reset, or of a hook that failed.
        flushed = set(self._tables.flushed)
        self._tables.flushed.clear()
        # vLLM offers all blocks of running requests anew.
        self._tables.forget_blocks_left_behind(self._tables.requests)
        try:
            return super().reset_cache()
        finally:
            self._tables.flushed.update(flushed)

    @guarded(nothing)
    def get_kv_connector_stats(self) -> Any:
        return super().get_kv_connector_stats()

    @guarded(nothing)
    def shutdown(self) -> None:
        """See `KVConnectorBase_V1.shutdown`; ends within seconds."""
        super().shutdown()
        if self._runtime is not None:
            self._runtime.stop()
