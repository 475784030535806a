"""Ask NodeActors about their engines' requests: what became of tokens, and hidden states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raykv.base import deadlines
from raykv.base.errors import ClusterError, HiddenStatesError, NotFoundError
from raykv.client.scheduler import Scheduler
from raykv.cluster import ask
from raykv.protocol.reader import EndedRequests, Explanation, Explanations, RequestPage
from raykv.protocol.status import MoreRoom


def why_miss(scheduler: Scheduler, request_id: str) -> list[Explanation]:
    """Explain why tokens of a request were not loaded; known about a second after it has ended.

    Args:
        request_id: from the answer, or the client's `X-Request-Id`; the beginning suffices.

    Returns:
        The requests whose ids begin like this, newest first: at most 16 per node, out of its
        latest 4,096.

    Raises:
        ClusterError: RayKV does not run here, does not answer, or knows no such request.
    """
    scheduler.find()
    answers = ask.ask_each(Explanations, ask.asking("why_miss", request_id))
    told = answers.values()
    found = sorted((each for some in told for each in some.found), key=lambda each: each.age_s)
    if not found:
        raise NotFoundError(
            f"no request whose id begins with {request_id!r} is among the latest "
            f"{sum(some.num_known for some in told)} that have ended: it may still run, be older "
            "than those or than its NodeActor, or have been answered by an engine without RayKV"
        )
    return found


def more_room(scheduler: Scheduler) -> MoreRoom:
    """Estimate how many computed tokens larger pools would have saved in the last hour.

    Raises:
        ClusterError: RayKV does not run here, or does not answer.
    """
    scheduler.find()
    told = list(ask.ask_each(MoreRoom, ask.asking("more_room")).values())
    if not told:
        raise NotFoundError("no node has a pool: `raykv up` makes them")
    return summed(told)


def summed(told: Sequence[MoreRoom]) -> MoreRoom:
    """Add up the estimates of several nodes, which are for the same sizes."""
    return MoreRoom(
        window_s=max(each.window_s for each in told),
        nodes=sum(each.nodes for each in told),
        pool_bytes=sum(each.pool_bytes for each in told),
        prompt_tokens=sum(each.prompt_tokens for each in told),
        computed_tokens=sum(each.computed_tokens for each in told),
        more_bytes=told[0].more_bytes,
        saved_tokens=[sum(column) for column in zip(*(t.saved_tokens for t in told), strict=True)],
        reach_bytes=min((t.reach_bytes for t in told if t.reach_bytes is not None), default=None),
    )


class _AccountPlace(NamedTuple):
    """In one node's account of requests: behind number `number` of a life of its NodeActor."""

    life: int = 0
    number: int = 0


def requests(scheduler: Scheduler, after: str | int = "") -> EndedRequests:
    """Return a page of the requests that have ended on all nodes, and what became of their tokens.

    Args:
        after: `following` or `last` of an earlier answer: go on behind it. Empty or 0: begin with
            the oldest request that nodes remember.

    Raises:
        ClusterError: RayKV does not run here, or does not answer, or `after` is invalid.
    """
    scheduler.find()
    known = _places(str(after or ""))

    def question(node_id: str, actor: Any) -> Any:
        return actor.ask.remote("requests", known.get(node_id, _AccountPlace()).number)

    pages = ask.ask_each(RequestPage, question)
    anew = {
        node_id
        for node_id, page in pages.items()
        if known.get(node_id, _AccountPlace()).number and page.life != known[node_id].life
    }
    if anew:
        # Another life counts from 1.
        pages |= ask.ask_each(RequestPage, ask.asking("requests", 0), anew)
    following, last = dict(known), dict(known)
    for node_id, page in pages.items():
        end = page.first + len(page.found) - 1 if page.found else page.last
        following[node_id] = _AccountPlace(page.life, end)
        last[node_id] = _AccountPlace(page.life, page.last)
    found = sorted((e for page in pages.values() for e in page.found), key=lambda each: -each.age_s)
    return EndedRequests(found, _text(following), _text(last))


def _text(places: Mapping[str, _AccountPlace]) -> str:
    return ",".join(f"{node}:{life}:{number}" for node, (life, number) in sorted(places.items()))


def _places(text: str) -> dict[str, _AccountPlace]:
    try:
        parts = [each.split(":") for each in text.split(",") if each]
        return {node_id: _AccountPlace(int(life), int(number)) for node_id, life, number in parts}
    except ValueError:
        raise ClusterError(f"requests after {text[:64]!r}: give what an answer has") from None


def hidden_states(request_id: str, node_id: str | None, deadline_s: float) -> Any:
    """Return a ray.ObjectRef of the hidden states of a request; see `raykv.hidden_states`.

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
        questions = dict.fromkeys(actors, lambda it: it.has_hidden_states.remote(request_id))
        answers = ask.ask_all(
            actors, questions, min(deadlines.CLIENT_S, max(left, deadlines.LOOK_S))
        )
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
        time.sleep(deadlines.LOOK_S)
