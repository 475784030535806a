"""What the router of the policy "kv" notes of requests that replicas take; Serve is played."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata

from raykv.serve.http.exchange import STARTS, HttpRequest
from raykv.serve.router import kv_router
from raykv.serve.router.kv_router import KVRouter
from raykv.serve.router.planner import PlacedRequest
from raykv.serve.router.rank import Candidate
from raykv.serve.router.trail import read_trail

REPLICA = ReplicaID("r0", DeploymentID("played", "app"))


class PlayedReplica:
    replica_id = REPLICA
    node_id = "n0"


class PlayedRequest:
    def __init__(self, request: HttpRequest, number: int) -> None:
        self.args = [request]
        self.metadata = RequestMetadata(str(number), str(number))


class NotedPlanner:
    def __init__(self) -> None:
        self.went_to: list[Candidate] = []
        self.over: list[PlacedRequest] = []

    def went(self, _request: PlacedRequest, replica: Candidate) -> None:
        self.went_to.append(replica)

    def ended(self, request: PlacedRequest) -> None:
        self.over.append(request)


def router(planner: NotedPlanner) -> Any:
    """Without the base class's state, which belongs to a cluster."""
    made: Any = object.__new__(KVRouter)
    made._planner = planner
    made._placed, made._taken, made._begun = OrderedDict(), OrderedDict(), deque()
    made._replicas = {REPLICA: PlayedReplica()}
    made._replica_queue_len_cache = {REPLICA: 3}
    return made


def take(made: Any, number: int) -> tuple[HttpRequest, PlacedRequest]:
    """A replica takes a request that has been placed."""
    body = json.dumps({"prompt": f"{number}" * 400}).encode()
    request = HttpRequest("POST", "/v1/completions", b"", [], body)
    placed = PlacedRequest(read_trail(body))
    made._placed[str(number)] = placed
    made.on_request_routed(PlayedRequest(request, number), REPLICA, None)
    return request, placed


def test_router_hears_from_the_ingress_that_an_answer_has_begun() -> None:
    planner, before = NotedPlanner(), len(STARTS)
    made = router(planner)
    request, placed = take(made, 1)
    assert planner.went_to == [Candidate("r0", "n0", 3)]
    STARTS.pop(id(request))()
    assert list(made._begun) == [placed]
    made.on_request_completed(REPLICA, "1")
    made.on_request_completed(REPLICA, "1")
    assert planner.over == [placed]
    # Another ends without an answer.
    _, silent = take(made, 2)
    assert len(STARTS) == before + 1
    made.on_request_completed(REPLICA, "2")
    assert (planner.over, list(made._begun), len(STARTS)) == ([placed, silent], [placed], before)


def test_requests_of_which_no_end_is_heard_are_forgotten_at_last(monkeypatch: Any) -> None:
    monkeypatch.setattr(kv_router, "MOST_TAKEN", 2)
    planner, before = NotedPlanner(), len(STARTS)
    made = router(planner)
    kept = [take(made, number) for number in range(5)]
    assert planner.over == [placed for _, placed in kept[:3]]
    assert len(STARTS) == before + 2
    for number in range(5):
        made.on_request_completed(REPLICA, str(number))
    assert len(STARTS) == before
