"""Request routers for Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class RoundRobinRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Replicas take turns."""

    def initialize_state(self, **kwargs: Any) -> None:
        del kwargs
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Where all are full Serve waits before it asks again.
            pending_request.routing_context.should_backoff = True
        replicas = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        self._turn += 1
        first = self._turn % max(1, len(replicas))
        return [[each] for each in replicas[first:] + replicas[:first]]
