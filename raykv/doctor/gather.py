"""Gathers what `raykv doctor` looks at. Every question has a deadline; a part that does not answer
is a fact, not an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from raykv.base import deadlines
from raykv.base.version import __version__
from raykv.cluster import names
from raykv.cluster.ask import Answer, ask_all, ask_ray, find, named_actors
from raykv.doctor.facts import ActorFacts, ClusterFacts, NodeFacts
from raykv.protocol.findings import Endpoint, HostFacts, HostQuestion
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeDescription
from raykv.protocol.status import ClusterStatus

logger = logging.getLogger("raykv.doctor")


def gather() -> ClusterFacts:
    """Look at the cluster that this process has joined.

    Raises:
        ClusterError: Ray itself does not answer.
    """
    nodes = ask_ray(ray.nodes)
    named = ask_ray(named_actors)
    states = _actor_states()
    alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
    actors = ask_ray(_find_all, named)
    node_ids = {
        name.removeprefix(names.NODE_PREFIX): name
        for name in named
        if name.startswith(names.NODE_PREFIX)
    }
    questions = {
        names.SCHEDULER: lambda actor: actor.status.remote(),
        **dict.fromkeys(node_ids.values(), lambda actor: actor.describe.remote()),
    }
    first = ask_all(actors, questions, deadlines.PROBE_S)
    asked_at = time.time()
    answering = {name: actors[name] for name, answer in first.items() if not answer.error}
    host_questions = _host_questions(node_ids, list(alive.values()))
    second = ask_all(answering, host_questions, deadlines.PROBE_S)
    status = _decoded(first.get(names.SCHEDULER), ClusterStatus)
    return ClusterFacts(
        raykv_version=__version__,
        protocol=PROTOCOL_VERSION,
        scheduler=_actor_facts(names.SCHEDULER, named, first, states),
        status=status,
        hostnames={node["NodeID"]: str(node["NodeManagerHostname"]) for node in nodes},
        nodes=[
            NodeFacts(
                node_id=node_id,
                hostname=str(alive.get(node_id, {}).get("NodeManagerHostname", "")),
                is_alive=node_id in alive,
                actor=_actor_facts(names.node_actor(node_id), named, first, states),
                description=_decoded(first.get(names.node_actor(node_id)), NodeDescription),
                **_host(second.get(names.node_actor(node_id)), asked_at),
            )
            for node_id in sorted({*alive, *node_ids})
        ],
    )


def _find_all(wanted: list[str]) -> dict[str, Any]:
    """Handles by name; an actor that has just ended has none."""
    return {name: actor for name in wanted if (actor := find(name)) is not None}


def _actor_states() -> dict[str, str]:
    """Ray's state of each of our actors by name; what is alive hides earlier lives.

    Ray's own state API needs its dashboard, which a local cluster does not run.
    """
    try:
        from ray._private.state import actors

        table = ask_ray(actors)
    except Exception as error:
        logger.debug("no states of actors: %s", error)
        return {}
    ours = ("SchedulerActor", "NodeActor")
    found = [
        entry
        for entry in table.values()
        if entry.get("Name") and entry.get("ActorClassName", "").rpartition(".")[2] in ours
    ]
    found.sort(key=lambda entry: entry.get("State") != "DEAD")
    return {entry["Name"]: entry["State"] for entry in found}


def _actor_facts(
    name: str, named: list[str], answers: Mapping[str, Answer], states: Mapping[str, str]
) -> ActorFacts | None:
    if name not in named:
        return None
    answer = answers.get(name, Answer(error="it can't be found"))
    return ActorFacts(states.get(name, ""), answer.error)


def _host_questions(
    node_ids: Mapping[str, str], alive: list[dict[str, Any]]
) -> dict[str, Callable[[Any], Any]]:
    """Each NodeActor tries the ports of all other nodes."""
    places = {node["NodeID"]: _places(node) for node in alive}
    questions: dict[str, Callable[[Any], Any]] = {}
    for node_id, name in node_ids.items():
        others = [place for other, mine in places.items() if other != node_id for place in mine]
        raw = encode(HostQuestion(others, deadlines.PROMPT_S))
        questions[name] = lambda actor, raw=raw: actor.host.remote(raw)  # type: ignore[misc]
    return questions


def _places(node: dict[str, Any]) -> list[Endpoint]:
    host = str(node["NodeManagerAddress"])
    who = f"of node {node['NodeID'][:12]}"
    return [
        Endpoint(host, int(node["NodeManagerPort"]), f"the raylet {who}"),
        Endpoint(host, int(node["ObjectManagerPort"]), f"the object manager {who}"),
    ]


def _host(answer: Answer | None, asked_at: float) -> dict[str, Any]:
    """Fields of `NodeFacts` out of a NodeActor's facts of its host."""
    facts = _decoded(answer, HostFacts)
    if facts is None or answer is None:
        return {}
    middle = (asked_at + answer.came_at) / 2
    return {
        "host": facts,
        "skew_s": facts.wall_time - middle,
        "skew_error_s": (answer.came_at - asked_at) / 2,
    }


def _decoded(answer: Answer | None, kind: type[Any]) -> Any | None:
    """The struct in an answer; None if there is none, or one of another RayKV's."""
    if answer is None or answer.error:
        return None
    try:
        return decode(answer.value, kind)
    except Exception as error:
        logger.debug("an answer can't be read: %s", error)
        return None
