"""The request router of the policy "kv": follows what it remembers, or asks RayKV's directory.

Ray chooses only for requests that have no prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from ray.util.metrics import Counter

from raykv.serve.arguments import ModelArguments, parse, plan_of
from raykv.serve.http import exchange
from raykv.serve.router import directory, planner, power_of_two, rank
from raykv.serve.router.rendering import Fallback, PromptRenderer, Render
from raykv.serve.router.settings import parse_route_settings

MOST_PLACED = 1024
"""Requests whose places are known and that no replica has taken yet."""

MOST_TAKEN = 4096
"""Requests that a replica has taken and that have not ended, as far as is known."""

PLACED = "placed"
REMEMBERED = "sent where its beginning went"
SILENT_BUT_REMEMBERED = "directory did not answer, sent where its beginning went"


class KVRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Sends a request where the fewest bytes have to move and the least work waits.

    Serve runs all of it on one event loop.
    """

    def initialize_state(self, model: Mapping[str, Any], **kwargs: Any) -> None:
        """See `RequestRouter.initialize_state`; the arguments are those of `kv_router_kwargs`."""
        settings = parse_route_settings(kwargs)
        plan = plan_of(parse(ModelArguments, model), ray_address=None)
        self._directory = directory.AskedDirectory(plan.model, settings.namespace)
        self._renderer = PromptRenderer(lambda: _vllm_renderer([plan.model, *plan.flags]))
        self._planner = planner.RoutePlanner(self._renderer.render, self._directory, settings)
        self._placed: OrderedDict[str, planner.PlacedRequest] = OrderedDict()
        # Requests that a replica has taken.
        self._taken: OrderedDict[str, tuple[exchange.HttpRequest, planner.PlacedRequest]] = (
            OrderedDict()
        )
        # Filled by the ingress, on its own thread.
        self._begun: deque[planner.PlacedRequest] = deque()
        self._outcomes = Counter(
            "raykv_routed_requests",
            "Requests by how a replica was chosen for them: placed, or why not.",
            tag_keys=("deployment", "application", "outcome"),
        )
        self._outcomes.set_default_tags(
            {"deployment": self._deployment_id.name, "application": self._deployment_id.app_name}
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._planner.keep([each.replica_id.unique_id for each in replicas])
        if replicas:
            self._directory.learn(each.node_id for each in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        self._directory.learn(each.node_id for each in candidate_replicas)
        placed = await self._place(pending_request)
        if pending_request is None or placed is None:
            return await power_of_two.two_choices(self, candidate_replicas, pending_request)
        # Where all are full Serve waits before it asks again.
        pending_request.routing_context.should_backoff = True
        while self._begun:
            self._planner.began(self._begun.popleft())
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        replicas = self._candidates(candidate_replicas)
        return [[by_name[choice.name]] for choice in self._planner.choose(placed, replicas)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        name = pending_request.metadata.internal_request_id
        placed, replica = self._placed.pop(name, None), self.curr_replicas.get(replica_id)
        if placed is None or replica is None:
            return
        self._planner.went(placed, *self._candidates([replica]))
        request = pending_request.args[0]
        self._taken[name] = (request, placed)
        exchange.STARTS[id(request)] = partial(self._begun.append, placed)
        if len(self._taken) > MOST_TAKEN:
            self._end(next(iter(self._taken)))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if internal_request_id in self._taken:
            self._end(internal_request_id)

    def _end(self, name: str) -> None:
        request, placed = self._taken.pop(name)
        exchange.STARTS.pop(id(request), None)
        self._planner.ended(placed)

    def _candidates(self, replicas: Sequence[RunningReplica]) -> list[rank.Candidate]:
        loads = self.replica_queue_len_cache
        return [
            rank.Candidate(each.replica_id.unique_id, each.node_id, loads.get(each.replica_id) or 0)
            for each in replicas
        ]

    def _outcome(self, placed: planner.PlacedRequest) -> str:
        """How a replica is chosen, where the prompts are known."""
        if placed.silence is None:
            return PLACED if placed.found else REMEMBERED
        if not self._planner.remembers(placed):
            return placed.silence.value
        return SILENT_BUT_REMEMBERED if placed.silence is Fallback.NO_ANSWER else REMEMBERED

    async def _place(self, pending: PendingRequest | None) -> planner.PlacedRequest | None:
        """Where the request's prompts are; the first answer counts while replicas are full."""
        request = pending.args[0] if pending is not None and pending.args else None
        if pending is None or not isinstance(request, exchange.HttpRequest):
            return None
        name = pending.metadata.internal_request_id
        known = self._placed.get(name)
        if known is not None:
            return known
        placed = await self._planner.place(request)
        if isinstance(placed, Fallback):
            self._outcomes.inc(tags={"outcome": placed.value})
            return None
        self._outcomes.inc(tags={"outcome": self._outcome(placed)})
        self._placed[name] = placed
        if len(self._placed) > MOST_PLACED:
            self._placed.popitem(last=False)
        return placed


def _vllm_renderer(flags: list[str]) -> Render:
    from raykv.serve.router.vllm_renderer import VLLMRenderer

    return VLLMRenderer(flags)
