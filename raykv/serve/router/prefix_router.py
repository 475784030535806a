"""Ray's prefix-aware router (of `ray.llm`, with its internal names), for requests as they are here.

It remembers which texts were sent to which replica, and asks its own actor with calls that block
the router's event loop. It knows no pool: a comparison for the policy "kv".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from raykv.serve.http.exchange import HttpRequest, parsed
from raykv.serve.router.power_of_two import two_choices


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Requests without a text go where the power-of-two choice says."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not self._text(pending_request):
            return await two_choices(self, candidate_replicas, pending_request)
        chosen: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        return chosen

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if self._text(pending_request):
            super().on_request_routed(pending_request, replica_id, result)

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        return self._text(pending_request)

    def _text(self, pending_request: PendingRequest) -> str:
        """All text of the request's prompts or messages; empty if there is none."""
        request = pending_request.args[0] if pending_request.args else None
        if not isinstance(request, HttpRequest) or not request.body:
            return ""
        try:
            body = parsed(request.body)
        except ValueError:
            return ""
        if not isinstance(body, Mapping):
            return ""
        text: str = self._normalize_prompt_to_string(body.get("messages") or body.get("prompt"))
        return text
