"""RayKV's `OffloadingSpec`: what vLLM's offloading connector builds manager and worker from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
)

from raykv.base.errors import SettingError
from raykv.base.geometry import aligned
from raykv.base.ids import EngineId
from raykv.base.settings import Settings, load_settings
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.engine.cost import FetchCost, Rates
from raykv.engine.hints import Allowed, HintBox
from raykv.engine.remote import ChunkSize, RemoteSettings
from raykv.engine.requests import StoreSampler
from raykv.engine.view import EngineView
from raykv.protocol.worker import NOT_CANONICAL, CanonicalPages, KVForm, KVLayout
from raykv.vllm import canonical
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.misses import metric_definitions
from raykv.vllm.transfers import RayOffloadingWorker
from raykv.worker.handover import make_link
from raykv.worker.link import LinkSettings, WorkerLink

logger = logging.getLogger("raykv")

SPEC_NAME = "RayKVOffloadingSpec"


def use_our_spec(extra_config: dict[str, Any]) -> None:
    """Name our spec where vLLM looks for it; users don't have to."""
    extra_config["spec_name"] = SPEC_NAME
    extra_config["spec_module_path"] = __name__


class RayKVOffloadingSpec(OffloadingSpec):
    """Knows sizes and settings; the connector gives it what vLLM's interface does not carry."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own, self._block_bytes = canonical.untold(self.extra_config)
        self.settings: Settings = load_settings(own)
        # Conversations need generated tokens too; vLLM's own default is True.
        self.offload_prompt_only = bool(self.extra_config.get("offload_prompt_only", False))
        self.group_ids = [group.group_id for group in config.groups]
        # Set by the connector before vLLM asks for the worker, where the KV cache can be shared.
        self.shared_allocation: Any = None
        # Set by the connector: whether vLLM may give the KV cache's memory back for a while.
        self.sleeps = False
        # Then only rank 0 stores, for all; see vLLM's `OffloadingConnectorWorker`. Of canonical
        # chunks all ranks store a share.
        self.replicated_layout = bool(config.replicated_layout and not config.canonical_layout)
        # Set by the worker side, which has vLLM's configuration.
        self.tell_form: Callable[[], KVForm] = KVForm
        self._manager: RayOffloadingManager | None = None
        refuse_unsupported(config)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """See `OffloadingSpec.build_metric_definitions`; also in the API server's process."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    @property
    def num_parts(self) -> int:
        """Parts of a chunk: one for each rank, or one for all where all have the same bytes."""
        return 1 if self.replicated_layout else self.config.parallel.world_size

    @property
    def part(self) -> int:
        """Which part of a chunk is this worker's."""
        return 0 if self.replicated_layout else self.config.parallel.rank

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a chunk of any group, all parts, rounded up.

        vLLM lets the groups of a hybrid model share its blocks, so a block of any group takes at
        most `worker_kv_bytes_per_block`. Of canonical chunks it is the same for all numbers of
        ranks.
        """
        if self.config.canonical_layout:
            return aligned(max(self._block_bytes.values()) * self.blocks_per_chunk)
        per_rank = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        return aligned(per_rank * self.num_parts)

    def slot_bytes_by_group(self) -> dict[int, int]:
        """`slot_bytes` for each KV group index."""
        return dict.fromkeys(self.group_ids, self.slot_bytes)

    def get_manager(self) -> RayOffloadingManager:
        """See `OffloadingSpec.get_manager`."""
        if self._manager is None:
            settings = self.settings
            rates = Rates(settings.fetch_bytes_per_s, settings.prefill_tokens_per_s)
            view = EngineView(
                EngineId(self.config.engine_id),
                self.group_ids,
                settings.lookup_deadline_s,
                settings.lease_slots,
                self._remote_settings(),
                FetchCost(rates),
            )
            view.sampler = StoreSampler(is_on=settings.stop_unused_stores)
            self._manager = RayOffloadingManager(view)
            self._manager.hints = HintBox(Allowed(settings.client_hints))
        return self._manager

    def _remote_settings(self) -> RemoteSettings:
        sizes = {
            group.group_id: ChunkSize(
                self.slot_bytes, group.tokens_per_block * self.blocks_per_chunk
            )
            for group in self.config.groups
        }
        return RemoteSettings(
            query_deadline_s=self.settings.query_deadline_s,
            fetch_deadline_s=self.settings.fetch_deadline_s,
            pending_deadline_s=self.settings.lookup_deadline_s,
            sizes=sizes,
        )

    def canonical_pages(self, kv_caches: CanonicalKVCaches) -> CanonicalPages:
        """Where this worker's pages are in canonical chunks; empty if these are not wanted.

        Raises:
            SettingError: vLLM does not certify it.
        """
        if not self.config.canonical_layout:
            return NOT_CANONICAL
        return canonical.pages_of(kv_caches, self.config.kv_cache_layout)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> RayOffloadingWorker:
        """See `OffloadingSpec.get_worker`."""
        if self.shared_allocation is None:
            link, layout = make_link(self, kv_caches)
        else:
            link, layout = self._direct_link(kv_caches)
        return RayOffloadingWorker(link, layout)

    def _direct_link(self, kv_caches: CanonicalKVCaches) -> tuple[Any, KVLayout]:
        """The NodeActor maps the KV cache itself."""
        from raykv.worker.export import describe

        layout, region = describe(
            self.shared_allocation.regions, kv_caches, self.group_ids, self.blocks_per_chunk
        )
        pages = self.canonical_pages(kv_caches)
        layout = msgspec.structs.replace(layout, form=self.tell_form(), canonical=pages)
        # A page that is touched for the first time costs more than the copy into it.
        prefault = partial(region.prefault, lambda _done: True)
        SupervisedThread("raykv-prefault", prefault, OnFailure.GIVE_UP).revive()
        return WorkerLink(self.part, layout, [region.fd], self.link_settings()), layout

    def staged_link(self, kv_caches: CanonicalKVCaches, reason: str) -> tuple[Any, KVLayout]:
        """The KV cache goes through staging memory, which the NodeActor maps.

        `reason` says why, and is logged.

        Raises:
            SettingError: the staging memory is too small.
        """
        from raykv.worker.staging import StagedLink, StagingMemory

        memory = StagingMemory(
            kv_caches, self.group_ids, self.blocks_per_chunk, self.settings.staging_bytes
        )
        pages = self.canonical_pages(kv_caches)
        memory.layout = msgspec.structs.replace(
            memory.layout, form=self.tell_form(), canonical=pages
        )
        logger.warning(
            "the KV cache is copied through %d MiB of host memory by the engine itself, slower "
            "than by the NodeActor: %s",
            memory.region.num_bytes >> 20,
            reason,
        )
        return StagedLink(self.part, memory, self.link_settings()), memory.layout

    def link_settings(self) -> LinkSettings:
        """Deadlines of the worker's line to its NodeActor."""
        settings = self.settings
        return LinkSettings(
            load_deadline_s=settings.load_deadline_s,
            store_deadline_s=settings.store_deadline_s,
            flush_deadline_s=settings.flush_deadline_s,
            cancel_grace_s=settings.cancel_grace_s,
        )


def refuse_non_causal(kv_cache_config: Any) -> None:
    """vLLM turns its own prefix cache off for such models.

    Raises:
        SettingError: a token's KV depends on what comes behind it.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs += [each for spec in specs for each in getattr(spec, "kv_cache_specs", {}).values()]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise SettingError(
            "in this model the KV of a token depends on tokens behind it, so that prompts with the "
            "same beginning share none: RayKV can't be used with it"
        )


def refuse_unsupported(config: Any) -> None:
    """What is not built yet stops the start instead of giving wrong or no hits.

    Raises:
        SettingError: naming the setting.
    """
    if config.parallel.pp_size > 1:
        raise SettingError(
            f"pipeline_parallel_size={config.parallel.pp_size} is not supported by RayKV yet: "
            "only 1 is"
        )
    if config.canonical_layout and not config.parallel.is_parallelism_agnostic:
        raise SettingError(
            "canonical_layout=true can't be had: vLLM certifies no byte order of this engine's KV "
            f"cache that does not depend on tensor_parallel_size={config.parallel.tp_size} (it "
            "does for attention and MLA layers without scales per token, a number of KV heads "
            "that divides the ranks or is divided by them, and no context parallelism): leave it "
            "out"
        )
