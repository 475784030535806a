"""RayKV's `OffloadingSpec`: what vLLM's offloading connector builds manager and worker from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec, RSWASpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
)

from raykv.base import errors, geometry, threads
from raykv.base.settings import Settings, load_settings
from raykv.engine.announcements import Announcements
from raykv.engine.remote import ChunkSize
from raykv.engine.view import EngineView
from raykv.protocol.worker import NOT_CANONICAL, CanonicalPages, KVForm, KVLayout
from raykv.vllm import kv_form, manager, misses, transfers
from raykv.vllm.internals import engine, offloading
from raykv.worker.export import SharedAllocation, describe
from raykv.worker.handover import make_link, may_sleep
from raykv.worker.link import LinkSettings, WorkerLink

logger = logging.getLogger("raykv")

SPEC_NAME = "RayKVOffloadingSpec"


def use_our_spec(extra_config: dict[str, Any]) -> None:
    """Name our spec where vLLM looks for it, so that users need not."""
    extra_config["spec_name"] = SPEC_NAME
    extra_config["spec_module_path"] = __name__


TOLD = "told_by_the_connector"
"""Key in `kv_connector_extra_config` while vLLM makes our spec, which it gives nothing else that
could carry it. Never a setting of users."""


@dataclass
class Told:
    """What vLLM tells connectors and not specs: its configurations. And the spec, which vLLM makes
    and does not give to connectors.
    """

    vllm: Any = None
    kv_cache: Any = None
    spec: Any = None

    @property
    def block_bytes(self) -> dict[int, int]:
        return kv_form.block_bytes(self.vllm, self.kv_cache)

    def window(self, group: int, tokens_per_chunk: int) -> int | None:
        """How many chunks of a KV group a prefix needs; None: all."""
        if self.kv_cache is None:
            return None
        known = self.kv_cache.kv_cache_groups[group].kv_cache_spec
        return offloading.window_in_chunks(known, tokens_per_chunk)

    @property
    def sleeps(self) -> bool:
        """Whether vLLM may give the KV cache's memory back for a while."""
        return self.vllm is not None and may_sleep(self.vllm.model_config)

    def form(self, spec: RayKVOffloadingSpec) -> KVForm:
        """Of the chunks of this spec's engine, which its first rank measures."""
        is_first = self.vllm is not None and spec.config.parallel.rank == 0
        return kv_form.kv_form_of(self.vllm, self.kv_cache, spec) if is_first else KVForm()


@contextmanager
def told_to_specs(
    extra_config: MutableMapping[str, Any], vllm_config: Any, kv_cache_config: Any
) -> Iterator[Told]:
    """Let the spec that is made within the context know these configurations."""
    extra_config[TOLD] = told = Told(vllm_config, kv_cache_config)
    try:
        yield told
    finally:
        del extra_config[TOLD]


class RayKVOffloadingSpec(OffloadingSpec):
    """Knows sizes and settings, and makes the manager and the worker from them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own = dict(self.extra_config)
        self._told: Told = own.pop(TOLD, Told())
        self._told.spec = self
        self.settings: Settings = load_settings(own)
        # Conversations need generated tokens too; vLLM's own default is True.
        self.offload_prompt_only = bool(
            self.extra_config.get("offload_prompt_only", False)
        ) or stores_prompts_alone(self._told.kv_cache)
        self.group_ids = [group.group_id for group in config.groups]
        self.sleeps = self._told.sleeps
        # Where the KV cache is, if vLLM has allocated it in memory that can be shared.
        self._shared: SharedAllocation | None = None
        # Then only rank 0 stores, for all; see vLLM's `OffloadingConnectorWorker`. Of canonical
        # chunks all ranks store a share.
        self.replicated_layout = bool(config.replicated_layout and not config.canonical_layout)
        self._manager: manager.RayOffloadingManager | None = None
        refuse_unsupported(config)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """See `OffloadingSpec.build_metric_definitions`; also in the API server's process."""
        return {**super().build_metric_definitions(extra_config), **misses.metric_definitions()}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of the labels of `vllm:kv_offload_config_info`, which vLLM has from 0.33 on."""
        return tuple(Settings().labels())

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
        """Bytes that a chunk of any group takes in a pool: all parts, rounded up.

        vLLM lets the groups of a hybrid model share its blocks, so a block of any group takes at
        most `worker_kv_bytes_per_block`. Of canonical chunks it is the same for all numbers of
        ranks.
        """
        if self.config.canonical_layout:
            return geometry.aligned(max(self._told.block_bytes.values()) * self.blocks_per_chunk)
        per_rank = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        return geometry.aligned(per_rank * self.num_parts)

    def slot_bytes_by_group(self) -> dict[int, int]:
        """`slot_bytes` for each KV group index."""
        return dict.fromkeys(self.group_ids, self.slot_bytes)

    def get_manager(self) -> manager.RayOffloadingManager:
        if self._manager is None:
            wants_events = self.kv_events_config.enable_kv_cache_events
            told = Announcements() if wants_events else None
            view = EngineView(self.settings, self._chunk_sizes(), told)
            self._manager = manager.RayOffloadingManager(view, self.settings)
        return self._manager

    def _chunk_sizes(self) -> dict[int, ChunkSize]:
        sizes = {}
        for group in self.config.groups:
            tokens = group.tokens_per_block * self.blocks_per_chunk
            window = self._told.window(group.group_id, tokens)
            sizes[group.group_id] = ChunkSize(self.slot_bytes, tokens, window)
        return sizes

    def canonical_pages(self, kv_caches: CanonicalKVCaches) -> CanonicalPages:
        """Where this worker's pages are in canonical chunks; empty if these are not wanted.

        Raises:
            SettingError: vLLM does not certify it.
        """
        if not self.config.canonical_layout:
            return NOT_CANONICAL
        return kv_form.pages_of(kv_caches, self.config.kv_cache_layout)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> transfers.RayOffloadingWorker:
        if self._shared is None:
            link, layout = make_link(self, kv_caches)
        else:
            link, layout = self._direct_link(self._shared, kv_caches)
        return transfers.RayOffloadingWorker(link, layout, by_layer=self.settings.layerwise_loads)

    def memory_context(self) -> AbstractContextManager[Any] | None:
        """In which vLLM is to allocate the KV cache; None: as it would."""
        if self.settings.kv_handover == "staged":
            return None
        if not current_platform.is_cpu():
            return engine.ordinary_gpu_memory(self.sleeps) if current_platform.is_cuda() else None
        self._shared = SharedAllocation()
        return self._shared

    def _direct_link(
        self, shared: SharedAllocation, kv_caches: CanonicalKVCaches
    ) -> tuple[Any, KVLayout]:
        """The NodeActor maps the KV cache itself."""
        layout, region = describe(shared.regions, kv_caches, self.group_ids, self.blocks_per_chunk)
        pages = self.canonical_pages(kv_caches)
        layout = msgspec.structs.replace(layout, form=self._told.form(self), canonical=pages)
        # A page that is touched for the first time costs more than the copy into it.
        prefault = partial(region.prefault, lambda _done: True)
        threads.SupervisedThread("raykv-prefault", prefault, threads.OnFailure.GIVE_UP).revive()
        return WorkerLink(self.part, layout, [region.fd], self.link_settings()), layout

    def staged_link(self, kv_caches: CanonicalKVCaches, reason: str) -> tuple[Any, KVLayout]:
        """The KV cache goes through staging memory, which the NodeActor maps.

        `reason` says why, and is logged.

        Raises:
            SettingError: the staging memory is too small.
        """
        from raykv.worker.staging import StagedLink, StagingMemory

        memory = StagingMemory(
            kv_caches,
            self.group_ids,
            self.blocks_per_chunk,
            self.settings.staging_bytes,
            form=self._told.form(self),
            canonical=self.canonical_pages(kv_caches),
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
        return LinkSettings(self.settings.step_deadline_s)


def stores_prompts_alone(kv_cache_config: Any) -> bool:
    """Whether tokens of answers see less than those of prompts (R-SWA): their KV is not that of a
    prompt that goes on from them, and their blocks are given away before the request ends.
    """
    return any(isinstance(spec, RSWASpec) for spec in specs_of(kv_cache_config))


def specs_of(kv_cache_config: Any) -> list[Any]:
    """Of the KV groups, and of the layers where those of a group differ; None has none."""
    groups = [] if kv_cache_config is None else kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    return specs + [each for spec in specs for each in getattr(spec, "kv_cache_specs", {}).values()]


def refuse_non_causal(kv_cache_config: Any) -> None:
    """vLLM turns its own prefix cache off for such models.

    Raises:
        SettingError: a token's KV depends on what comes behind it.
    """
    if any(getattr(spec, "non_causal", False) for spec in specs_of(kv_cache_config)):
        raise errors.SettingError(
            "in this model the KV of a token depends on tokens behind it, so that prompts with the "
            "same beginning share none: RayKV can't be used with it"
        )


def refuse_kinds(kv_cache_config: Any) -> None:
    """Of KV that prompts with the same beginning don't share.

    Raises:
        SettingError: saying what of the model's KV is in the way.
    """
    if not kv_cache_config.prefix_cacheable_group_ids:
        raise errors.SettingError(
            "vLLM keeps no KV of this engine's prompts that later ones could use, so that there is "
            "nothing to store: leave RayKV out"
        )
    refuse_non_causal(kv_cache_config)
    specs = specs_of(kv_cache_config)
    if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        raise errors.SettingError(
            "this model has an encoder and a decoder, and the KV of the one says nothing about the "
            "beginning of a prompt: RayKV can't be used with it"
        )
    if any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs):
        raise errors.SettingError(
            "without enable_prefix_caching=true vLLM keeps no recurrent states of this model where "
            "prompts may part, and RayKV can store none: set it, or leave RayKV out"
        )


def refuse_unsupported(config: Any) -> None:
    """What is not built yet stops the start instead of giving wrong or no hits.

    Raises:
        SettingError: naming the setting.
    """
    if config.canonical_layout and not config.parallel.is_parallelism_agnostic:
        raise errors.SettingError(
            "canonical_layout=true can't be had: vLLM certifies no byte order of this engine's KV "
            f"cache that does not depend on tensor_parallel_size={config.parallel.tp_size} (it "
            "does for attention and MLA layers without scales per token, a number of KV heads "
            "that divides the ranks or is divided by them, and no context parallelism): leave it "
            "out"
        )
