"""Reports to the engine's accounts what vLLM does with a request, and to vLLM's metrics the
outcome.

All methods run on EngineCore's scheduler thread, and none raises.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from raykv.base.guard import guarded, nothing
from raykv.base.ids import MissReason
from raykv.engine.accounts import MissStage, TokenAccount
from raykv.engine.insight.partings import Partings, PassingPrompt
from raykv.engine.insight.spans import RequestSpans
from raykv.engine.view import EngineView
from raykv.protocol.engine import MissRecord, Parting, tokens_by_source
from raykv.vllm.internals.answers import first_outputs

logger = logging.getLogger("raykv")

SOURCES_PARAM = "raykv_sources"
"""In the `kv_transfer_params` of a request's first output, see `raykv.vllm.insight.sources`."""

MAX_COMPLAINTS = 64
"""Keys that the log complains of: clients choose their names."""

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

    def __init__(self, view: EngineView, *, shows_tokens: bool = False) -> None:
        """`shows_tokens`: tokens of prompts may be shown to operators."""
        self._view = view
        self._shows_tokens = shows_tokens
        self._partings = Partings()
        self._complained: set[str] = set()
        # Others take its place in engines whose vLLM traces.
        self.spans = RequestSpans()
        self._tokens: Counter[tuple[str, str]] = Counter()
        # Of requests that were admitted and have had no output yet; they may have ended since.
        self._untold: dict[str, TokenAccount] = {}

    @guarded(nothing)
    def began(self, request: Any, tenant: str = "") -> None:
        """A request of a tenant is new."""
        self._view.accounts.open(request.request_id, request.num_prompt_tokens, tenant)
        self.spans.begin(request.request_id, request.trace_headers or {}, time.monotonic())

    @guarded(nothing)
    def ignores(self, request: Any, found: dict[str, str]) -> None:
        """What a request that is new asks for and will not get; each key is logged once."""
        account = self._view.accounts.get(request.request_id)
        if account is not None:
            account.ignored = found
        for name in found.keys() - self._complained:
            if len(self._complained) < MAX_COMPLAINTS:
                self._complained.add(name)
                logger.warning(
                    "a request's kv_transfer_params have %s, which is ignored: %s (said once)",
                    name,
                    found[name],
                )

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
        self.spans.look(request.request_id, num_computed_tokens, time.monotonic())

    @guarded(nothing)
    def admitted(self, request: Any, num_external_tokens: int) -> None:
        """vLLM gave the request blocks, and loads `num_external_tokens` into them."""
        account = self._view.accounts.get(request.request_id)
        miss = self._view.requests.take_miss(request.request_id)
        if account is not None:
            if account.stage is not MissStage.SETTLED:
                self._untold[request.request_id] = account
            account.admit(request.num_computed_tokens, num_external_tokens, miss)
        since = self._view.requests.take_fetches_since(request.request_id)
        reason = "" if miss is None else str(miss.reason)
        self.spans.admit(request.request_id, num_external_tokens, reason, since, time.monotonic())

    @guarded(nothing)
    def came_from(self, request: Any, sources: Mapping[CacheHitSource, int]) -> None:
        """Where the tokens are that the request loads, after it was admitted."""
        account = self._view.accounts.get(request.request_id)
        if account is not None:
            account.fetched = sources.get(CacheHitSource.P2P, 0)
            account.disk = sources.get(CacheHitSource.DISK, 0)
            self.spans.came_from(request.request_id, account.fetched, account.disk)

    @guarded(nothing)
    def failed(self, request_id: str, reason: MissReason) -> None:
        """Some of what the request loads will not come."""
        account = self._view.accounts.get(request_id)
        if account is not None:
            account.failure = reason
        self.spans.fail(request_id, str(reason))

    @guarded(nothing)
    def loaded(self, request_id: str) -> None:
        """A load job of the request has ended, well or not."""
        self.spans.loaded(request_id, time.monotonic())

    @guarded(nothing)
    def ended(self, request: Any, keys: Sequence[bytes] = (), chunk_tokens: int = 1) -> None:
        """The request has finished, or was aborted; `keys` are those of its chunks, of
        `chunk_tokens` tokens each.
        """
        self.spans.end(request.request_id, time.monotonic())
        account = self._view.accounts.get(request.request_id)
        parting = None if account is None else self._parting(request, account, keys, chunk_tokens)
        record = self._view.accounts.close(request.request_id, keys, parting)
        if record is None:
            return
        for source, count in tokens_by_source(record).items():
            self._tokens["source", source] += count
        for reason, count in record.missed.items():
            self._tokens["reason", reason] += count
        if record.missed:
            logger.debug("%s", sentence(record))

    @guarded(nothing)
    def _parting(
        self, request: Any, account: TokenAccount, keys: Sequence[bytes], chunk_tokens: int
    ) -> Parting | None:
        """Where a prompt that was computed leaves those before it."""
        if account.stage is not MissStage.SETTLED or request.prompt_embeds is not None:
            return None
        num_whole = account.prompt // chunk_tokens
        parting = self._partings.pass_by(
            PassingPrompt(
                keys=keys,
                tokens=request.all_token_ids,
                chunk_tokens=chunk_tokens,
                num_whole=num_whole,
                num_found=(account.own + account.loaded) // chunk_tokens,
            )
        )
        if parting is None or self._shows_tokens:
            return parting
        return msgspec.structs.replace(parting, before=[], own=[], other=[])

    @property
    def has_untold(self) -> bool:
        """Whether `tell` may have something to add."""
        return bool(self._untold)

    @guarded(nothing)
    def tell(self, outputs: Mapping[int, Any]) -> None:
        """Have first outputs say where the tokens of their prompts came from; nothing is said of
        prompts of which another connector has loaded a part.

        Args:
            outputs: of a step, as vLLM's scheduler makes them.
        """
        for output, num_external in first_outputs(outputs):
            account = self._untold.pop(output.request_id, None)
            if account is None:
                continue
            # Of one that has ended the account is closed; its first output may be its last.
            if self._view.accounts.get(output.request_id) is account:
                account.produce()
            if account.asked_for >= num_external:
                tokens = tokens_by_source(account.record(""))
                told = {str(source): count for source, count in tokens.items()}
                output.kv_transfer_params = {
                    **(output.kv_transfer_params or {}),
                    SOURCES_PARAM: told,
                }
        # Those that have ended without a token.
        accounts = self._view.accounts
        self._untold = {i: each for i, each in self._untold.items() if accounts.get(i) is each}

    def take_stats(self) -> OffloadingConnectorStats | None:
        """What has been counted since the last call; None: nothing."""
        tokens = +self._tokens
        self._tokens.clear()
        if not tokens:
            return None
        stats = OffloadingConnectorStats()
        for (label, value), count in tokens.items():
            name = PROMPT_TOKENS if label == "source" else MISSED_TOKENS
            stats.increase_counter(name, count, (str(value),))
        return stats


def sentence(record: MissRecord) -> str:
    """A record in one line."""
    by_size = sorted(record.missed.items(), key=lambda row: -row[1])
    reasons = ", ".join(f"{count} {name}" for name, count in by_size)
    return (
        f"request {record.request_id}: of {record.prompt} prompt tokens {record.own} were in "
        f"vLLM's own cache, {record.loaded} loaded, and computed: {reasons}"
    )
