"""Ray Serve's power-of-two choice, for routers to fall back to. Ray has no public name for it."""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica


async def two_choices(
    router: Any, candidates: list[RunningReplica], pending: PendingRequest | None
) -> list[list[RunningReplica]]:
    """What it chooses for a router with `LocalityMixin` and `MultiplexMixin`."""
    choose = PowerOfTwoChoicesRequestRouter.choose_replicas
    chosen: list[list[RunningReplica]] = await choose(router, candidates, pending)
    return chosen
