"""What vLLM's scheduler knows of chunks as it stores and finds them: told to those who ask.

vLLM's own tracker is called at the one place where a chunk's request is at hand. Ours does what
that does, for vLLM's own KV events, and describes chunks for the readers of RayKV's. All of it runs
on EngineCore's scheduler thread, and none of it raises.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)

from raykv.base.guard import guarded, nothing
from raykv.base.ids import Key
from raykv.engine.announcements import Announcements
from raykv.engine.runtime import EngineIdentity
from raykv.protocol.descriptions import Description, pack_tokens
from raykv.stream.descriptions import DescriptionOutbox
from raykv.vllm.internals import SchedulerTables, described_chunk

logger = logging.getLogger("raykv")


class ChunkTracker(OffloadingEventsTracker):
    """See the module's docstring.

    Args:
        config: vLLM's, of its KV events.
        identity: of the engine.
        outbox: where descriptions go; None: there are none.
        announcements: for vLLM's own events; None: there are none.
    """

    def __init__(
        self,
        config: Any,
        identity: EngineIdentity,
        outbox: DescriptionOutbox | None,
        announcements: Announcements | None,
    ) -> None:
        super().__init__(config)
        self._identity = identity
        self._outbox = outbox
        self._announcements = announcements

    @guarded(nothing)
    def record_store(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        """See `OffloadingEventsTracker.record_store`."""
        super().record_store(req, group_config, chunk_idx, offload_key)
        if self._announcements is not None:
            self._announcements.expect(Key(offload_key), time.monotonic())
        if self._outbox is not None:
            self._describe(req, group_config, chunk_idx, offload_key)

    @guarded(nothing)
    def record_lookup(self, req: Any, group_config: Any, chunk_idx: int, offload_key: Any) -> None:
        """See `OffloadingEventsTracker.record_lookup`: the chunk is on this node."""
        super().record_lookup(req, group_config, chunk_idx, offload_key)
        if self._announcements is not None:
            self._announcements.expect(Key(offload_key), time.monotonic())
        if self._outbox is not None and not self._outbox.is_busy:
            self._describe(req, group_config, chunk_idx, offload_key)

    def _describe(self, req: Any, group_config: Any, chunk_idx: int, key: Any) -> None:
        outbox = self._outbox
        if outbox is None or outbox.knows(self._identity.namespace, key):
            return
        if group_config.sliding_window_size_in_chunks is not None or has_other_input(req):
            return
        meta = described_chunk(self, req, group_config, chunk_idx)
        parent = meta.parent_block_hash
        outbox.add(
            Description(
                namespace=self._identity.namespace,
                key=bytes(key),
                parent=None if parent is None else bytes(parent),
                inner=b"".join(meta.block_hashes[:-1]),
                tokens=pack_tokens(meta.token_ids),
                block_size=meta.block_size,
                model=self._identity.model,
                kind=meta.kv_cache_spec.kv_cache_spec_kind or "",
                lora=meta.lora_name,
            )
        )


def has_other_input(req: Any) -> bool:
    """Whether a prompt's hashes depend on more than tokens and LoRA, or are secret: by a salt."""
    return any(getattr(req, name, None) for name in ("cache_salt", "mm_features")) or (
        getattr(req, "prompt_embeds", None) is not None
    )


def track_chunks(
    scheduler: Any,
    config: Any,
    identity: EngineIdentity,
    outbox: DescriptionOutbox | None,
    announcements: Announcements | None,
) -> None:
    """Have vLLM's scheduler side tell of its chunks, if anything is to be told."""
    if outbox is None and announcements is None:
        return
    tracker = ChunkTracker(config, identity, outbox, announcements)
    if not SchedulerTables(scheduler).replace_tracker(tracker, OffloadingEventsTracker):
        logger.warning("this vLLM does not tell what chunks are made of: they are not described")
