"""RayKV's actors by name, and questions to them: each has a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray

from raykv.base import deadlines, threads
from raykv.base.errors import ClusterError, RayKVError, VersionError, cause_of, first_line
from raykv.cluster import logs, names
from raykv.protocol.framing import PROTOCOL_VERSION, S, introduction, receive
from raykv.protocol.node import NodeDescription

# For what a person or a program asks Ray itself.
ASK_RAY_S = 4.0

logger = logging.getLogger("raykv")

T = TypeVar("T")

SCHEDULER, NODE_ACTOR, HERE = "the scheduler actor", "the NodeActor", "this process"


def detached(kind: Any, name: str, environment: Mapping[str, str], **where: Any) -> Any:
    """How a named actor is made that outlives who makes it, and is restarted for ever: its `remote`
    returns the one that is there, or makes it; creators that race get the same one.

    Args:
        kind: what `ray.remote` has made of its class.
        name: the actor's.
        environment: variables of its process, besides those of all RayKV actors.
        where: Ray's options that say on which node it runs. It needs no core.
    """
    return kind.options(
        name=name,
        namespace=names.RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        runtime_env={"env_vars": {**environment, **logs.level_for_actors()}},
        **where,
    )


def find(name: str) -> Any | None:
    """The actor of that name, one of `names`, if there is one."""
    try:
        # bounded: Ray's own deadline; at the start, for a person, or off vLLM's threads
        return ray.get_actor(name, namespace=names.RAY_NAMESPACE)
    except ValueError:
        return None


def find_scheduler_actor() -> Any | None:
    return find(names.SCHEDULER)


def find_node_actor(node_id: str) -> Any | None:
    return find(names.node_actor(node_id))


def end_node_actor(node_id: str) -> None:
    """End a node's NodeActor, if there is one: else it waits for a node that is gone."""
    actor = find_node_actor(node_id)
    if actor is not None:
        # bounded: Ray's own deadline; at the start, for a person, or off vLLM's threads
        ray.kill(actor, no_restart=True)


def describe(actor: Any, timeout_s: float) -> NodeDescription:
    """Ask a NodeActor what it is.

    Raises:
        ClusterError: it does not answer in time, or has died.
        VersionError: it is of another RayKV; if it has no engines it was ended, and the next call
            to `node_actor` makes one of ours.
    """
    raw = answer(actor, "describe", timeout_s=timeout_s, who=NODE_ACTOR)
    with answering(NODE_ACTOR):
        known = introduction(raw)
        if known.version == PROTOCOL_VERSION:
            return receive(raw, NodeDescription, NODE_ACTOR, HERE)
    what = (
        f"the NodeActor runs RayKV {known.raykv_version} (protocol {known.version}), "
        f"this process speaks protocol {PROTOCOL_VERSION}"
    )
    if known.num_workers:
        raise VersionError(f"{what}; engines use it, so it stays: this one runs without the cache")
    # bounded: Ray's own deadline; at the start, for a person, or off vLLM's threads
    ray.kill(actor, no_restart=True)
    raise VersionError(f"{what}; nobody uses it, so it is replaced", is_mended=True)


@contextmanager
def answering(who: str) -> Iterator[None]:
    """Whatever goes wrong with the question inside is a `ClusterError`: one sentence about `who`.

    A `ClusterError` of this process stays as it is.
    """
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        is_theirs = isinstance(error, ray.exceptions.RayTaskError)
        if isinstance(error, ClusterError) and not is_theirs:
            raise
        if isinstance(cause, RayKVError) and is_theirs:
            raise ClusterError(f"{who} refuses it: {cause}") from error
        if isinstance(error, ray.exceptions.GetTimeoutError) and not is_theirs:
            raise ClusterError(f"{who} does not answer in time") from error
        raise ClusterError(f"{who} does not answer: {first_line(cause)}") from error


def answer(
    actor: Any,
    method: str,
    *arguments: Any,
    timeout_s: float,
    who: str = SCHEDULER,
    watch: Callable[[], None] | None = None,
) -> Any:
    """What a method of an actor returns; `who` is the actor, in words for a sentence.

    `watch` is called once if there is no answer after a second.

    Raises:
        ClusterError: it does not answer in time, has died, or refuses.
    """
    with answering(who):
        ref = getattr(actor, method).remote(*arguments)
        if watch is not None and timeout_s > deadlines.SILENCE_S:
            done, _ = ray.wait([ref], num_returns=1, timeout=deadlines.SILENCE_S)
            if not done:
                watch()
                timeout_s -= deadlines.SILENCE_S
        return ray.get(ref, timeout=timeout_s)


def received(kind: type[S], raw: Any) -> S:
    """An answer of the scheduler actor as a struct.

    Raises:
        ClusterError: it is something else.
    """
    with answering(SCHEDULER):
        return receive(raw, kind, SCHEDULER, HERE)


def named_actors() -> list[str]:
    """Names of RayKV's actors in the cluster."""
    # bounded: Ray's own deadline; at the start, for a person, or off vLLM's threads
    found = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == names.RAY_NAMESPACE]


@dataclass(frozen=True)
class Answer:
    """The answer to one question, or why there is none. `came_at` is in Unix seconds.

    `is_dead`: Ray says that the actor has died.
    """

    value: Any = None
    error: str = ""
    came_at: float = 0.0
    is_dead: bool = False


def ask_all(
    actors: Mapping[str, Any],
    questions: Mapping[str, Callable[[Any], Any]],
    deadline_s: float,
) -> dict[str, Answer]:
    """Ask actors at the same time, each its question; by name, what came within the deadline."""
    answers: dict[str, Answer] = {}
    refs: dict[Any, str] = {}
    for name, question in questions.items():
        if (actor := actors.get(name)) is None:
            continue
        try:
            refs[question(actor)] = name
        except Exception as error:
            answers[name] = Answer(error=first_line(error))
    give_up_at = time.monotonic() + deadline_s
    waiting = list(refs)
    while waiting and (left := give_up_at - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        came_at = time.time()
        for ref in done:
            try:
                answers[refs[ref]] = Answer(
                    ray.get(ref, timeout=deadlines.PROMPT_S), came_at=came_at
                )
            except Exception as error:
                is_dead = isinstance(error, ray.exceptions.ActorDiedError)
                answers[refs[ref]] = Answer(error=first_line(error), is_dead=is_dead)
    for ref in waiting:
        answers[refs[ref]] = Answer(error=f"no answer within {deadline_s:g} s")
    return answers


def node_actors() -> dict[str, Any]:
    """The NodeActors by node, but for those of nodes that Ray says are dead.

    Raises:
        ClusterError: Ray does not answer.
    """
    dead = {node["NodeID"] for node in ask_ray(ray.nodes) if not node["Alive"]}
    return {n: actor for n, actor in ask_ray(_node_actors).items() if n not in dead}


def _node_actors() -> dict[str, Any]:
    there = (name for name in named_actors() if name.startswith(names.NODE_PREFIX))
    node_ids = sorted(name.removeprefix(names.NODE_PREFIX) for name in there)
    found = {node_id: find_node_actor(node_id) for node_id in node_ids}
    return {node_id: actor for node_id, actor in found.items() if actor is not None}


NodeQuestion = Callable[[str, Any], Any]
"""Calls a method of a node's actor, and gives Ray's reference."""


def asking(*question: Any) -> NodeQuestion:
    """A question that `NodeActor.ask` answers: its name and arguments."""
    return lambda _, actor: actor.ask.remote(*question)


def ask_nodes(
    kind: type[S],
    question: NodeQuestion,
    of: Collection[str] | None = None,
    deadline_s: float = deadlines.CLIENT_S,
) -> tuple[dict[str, S], dict[str, str]]:
    """What NodeActors answer, all asked at the same time, by node; and why others do not.

    Args:
        kind: of the answers.
        question: asks one.
        of: these nodes only; None: all that live.
        deadline_s: for all answers.

    Raises:
        ClusterError: Ray does not answer.
    """
    actors = node_actors()
    silent = {node_id: "it has no NodeActor" for node_id in of or () if node_id not in actors}
    questions = {
        node_id: partial(question, node_id) for node_id in actors if of is None or node_id in of
    }
    found: dict[str, S] = {}
    for node_id, answer in ask_all(actors, questions, deadline_s).items():
        if answer.error:
            silent[node_id] = answer.error
            continue
        try:
            found[node_id] = receive(answer.value, kind, NODE_ACTOR, HERE)
        except RayKVError as error:
            silent[node_id] = str(error)
    return found, silent


def ask_each(
    kind: type[S],
    question: NodeQuestion,
    of: Collection[str] | None = None,
) -> dict[str, S]:
    """`ask_nodes`, where what some nodes say is worth something without the others: who does
    not answer is named in a warning.

    Raises:
        ClusterError: Ray does not answer, or no node does.
    """
    found, silent = ask_nodes(kind, question, of)
    if silent and not found:
        raise ClusterError(f"the NodeActors do not answer: {_named(silent)}")
    warn_of(silent)
    return found


def warn_of(silent: Mapping[str, str]) -> None:
    """Name the nodes that do not answer, by node and with the reason, if there are any."""
    if silent:
        logger.warning("what follows is without %s", _named(silent))


def _named(silent: Mapping[str, str]) -> str:
    return "; ".join(f"node {node_id[:12]} ({why})" for node_id, why in sorted(silent.items()))


def ask_ray(call: Callable[..., T], *arguments: Any, deadline_s: float = ASK_RAY_S) -> T:
    """The result of a call to Ray that has no deadline of its own.

    Raises:
        ClusterError: it took longer than `deadline_s`, or failed.
    """
    try:
        return threads.within(deadline_s, lambda: call(*arguments))
    except TimeoutError as error:
        raise ClusterError(
            f"Ray's head node does not answer within {deadline_s:g} s: is its gcs_server alive?"
        ) from error
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(f"Ray does not answer: {first_line(error)}") from error
