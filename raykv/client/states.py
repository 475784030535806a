"""Which node has the hidden states of a request, for its readers."""

from __future__ import annotations

import time
from typing import Any

from raykv.base.deadlines import CLIENT_S
from raykv.base.errors import HiddenStatesError
from raykv.cluster import ask
from raykv.cluster.ask import ask_all

# Between two rounds of asking which node has a request's states.
STATES_FIND_PAUSE_S = 0.05


def reference(request_id: str, node_id: str | None, deadline_s: float) -> Any:
    """A ray.ObjectRef of the states; see `raykv.hidden_states`.

    Raises:
        HiddenStatesError: no node knows the request in time, or the node has no NodeActor.
        ClusterError: Ray does not answer.
    """
    give_up_at = time.monotonic() + deadline_s
    if node_id is not None:
        actor = ask.ask_ray(ask.find_node_actor, node_id)
        if actor is None:
            raise HiddenStatesError(
                f"the NodeActor of node {node_id} is gone, and with it the hidden states that it "
                "kept in memory; a file that is written stays"
            )
        return actor.hidden_states.remote(request_id, deadline_s)
    while True:
        actors = ask.node_actors()
        left = give_up_at - time.monotonic()
        questions = {
            name: lambda actor: actor.has_hidden_states.remote(request_id) for name in actors
        }
        answers = ask_all(actors, questions, min(CLIENT_S, max(left, STATES_FIND_PAUSE_S)))
        for name, answer in answers.items():
            if answer.value is True:
                return actors[name].hidden_states.remote(request_id, max(left, 0.0))
        if left <= 0:
            asked = ", ".join(actors) or "none"
            raise HiddenStatesError(
                f"no node knows hidden states of request {request_id} (NodeActors: {asked}): it "
                "has not ended, its engine has no RayKVHiddenStatesConnector, or they have expired "
                "or made room for others (hidden_states_ttl_s, hidden_states_bytes)"
            )
        time.sleep(STATES_FIND_PAUSE_S)
