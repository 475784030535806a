"""Reports to the engine's accounts what vLLM does with a request, and to vLLM's metrics the
outcome.

All methods run on EngineCore's scheduler thread, and none raises.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from raykv.base.guard import guarded, nothing
from raykv.base.ids import MissReason, TokenSource
from raykv.engine.view import EngineView
from raykv.protocol.engine import MissRecord

logger = logging.getLogger("raykv")

PROMPT_TOKENS = "raykv_prompt_tokens"
MISSED_TOKENS = "raykv_missed_tokens"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Counters in vLLM's `/metrics`; Prometheus appends `_total` to their names."""
    return {
        PROMPT_TOKENS: OffloadingCounterMetadata(
            documentation="Prompt tokens of finished requests by where their KV came from: "
            "computed, vLLM's own cache, this node's pool, another node's, a disk. The sum is all "
            "prompt tokens.",
            labelnames=("source",),
        ),
        MISSED_TOKENS: OffloadingCounterMetadata(
            documentation="Prompt tokens of finished requests that were computed, by the reason "
            "for which RayKV did not load them.",
            labelnames=("reason",),
        ),
    }


def unregister_metrics() -> None:
    """Forget the metrics of an earlier engine of this process, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("raykv_"):
            REGISTRY.unregister(collector)


class MissReporter:
    """See the module's docstring."""

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self._tokens: Counter[tuple[str, str]] = Counter()

    @guarded(nothing)
    def began(self, request: Any) -> None:
        """A request is new."""
        self._view.accounts.open(request.request_id, request.num_prompt_tokens)

    @guarded(nothing)
    def looks(self, request: Any, num_computed_tokens: int, max_load_tokens: int | None) -> None:
        """vLLM asks what can be loaded beyond what its own cache has.

        Args:
            request: vLLM's.
            num_computed_tokens: tokens in vLLM's cache.
            max_load_tokens: what the client allows at most.
        """
        account = self._view.accounts.get(request.request_id)
        self._view.requests.take_miss(request.request_id)
        if account is not None:
            opted_out = request.skip_reading_prefix_cache or max_load_tokens is not None
            otherwise = MissReason.OPTED_OUT if opted_out else MissReason.OTHER
            account.look(num_computed_tokens, otherwise)

    @guarded(nothing)
    def admitted(self, request: Any, num_external_tokens: int) -> None:
        """vLLM gave the request blocks, and loads so many tokens into them."""
        account = self._view.accounts.get(request.request_id)
        miss = self._view.requests.take_miss(request.request_id)
        if account is not None:
            account.admit(request.num_computed_tokens, num_external_tokens, miss)

    @guarded(nothing)
    def came_from(self, request: Any, sources: Mapping[CacheHitSource, int]) -> None:
        """Where the tokens are that the request loads, after it was admitted."""
        account = self._view.accounts.get(request.request_id)
        if account is not None:
            account.fetched = sources.get(CacheHitSource.P2P, 0)
            account.disk = sources.get(CacheHitSource.DISK, 0)

    @guarded(nothing)
    def failed(self, request_id: str, reason: MissReason) -> None:
        """Some of what the request loads will not come."""
        account = self._view.accounts.get(request_id)
        if account is not None:
            account.failure = reason

    @guarded(nothing)
    def ended(self, request: Any, keys: Sequence[bytes] = ()) -> None:
        """The request has finished, or was aborted; `keys` are those of its chunks."""
        record = self._view.accounts.close(request.request_id, keys)
        if record is None:
            return
        self._tokens["source", TokenSource.OWN_CACHE] += record.own
        here = record.loaded - record.fetched - record.disk
        self._tokens["source", TokenSource.SAME_NODE] += here
        self._tokens["source", TokenSource.OTHER_NODE] += record.fetched
        self._tokens["source", TokenSource.DISK] += record.disk
        self._tokens["source", TokenSource.COMPUTED] += sum(record.missed.values())
        for reason, count in record.missed.items():
            self._tokens["reason", reason] += count
        if record.missed:
            logger.debug("%s", sentence(record))

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What has been counted since the last call; None: nothing."""
        self._correct()
        tokens = +self._tokens
        if not tokens:
            return None
        self._tokens.subtract(tokens)
        stats = OffloadingConnectorStats()
        for (label, value), count in tokens.items():
            name = PROMPT_TOKENS if label == "source" else MISSED_TOKENS
            stats.increase_counter(name, count, (str(value),))
        return stats

    def _correct(self) -> None:
        """Take in reasons that the scheduler actor knew better.

        Prometheus has already counted those tokens as never stored, and its counters do
        not go back: later ones that were never stored are left out until that is made up for.
        """
        refined = self._view.accounts.take_refined()
        for reason, count in refined.items():
            self._tokens["reason", reason] += count
            self._tokens["reason", MissReason.NEVER_STORED] -= count


def sentence(record: MissRecord) -> str:
    """A record in one line."""
    by_size = sorted(record.missed.items(), key=lambda row: -row[1])
    reasons = ", ".join(f"{count} {name}" for name, count in by_size)
    return (
        f"request {record.request_id}: of {record.prompt} prompt tokens {record.own} were in "
        f"vLLM's own cache, {record.loaded} loaded, and computed: {reasons}"
    )
