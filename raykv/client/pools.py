"""Make NodeActors before the first engine starts, wait for their pools, and end them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray

from raykv.base import deadlines, errors
from raykv.base.settings import load_settings
from raykv.client.scheduler import Scheduler
from raykv.cluster import ask, bequest, join, names
from raykv.directory.actor import scheduler_actor
from raykv.memory.room import human_bytes
from raykv.node.launch import facts_of, make_node_actor
from raykv.node.wishes import RayNode, usual_nodes, wants
from raykv.protocol.framing import encode, receive
from raykv.protocol.node import NodeDescription
from raykv.protocol.operator import NodeUp, PoolWish

# For the pools of all nodes to be there, prefaulted: 2 GB/s, so 256 GiB take two minutes.
UP_S = 300.0

MAX_STARTING = 32
"""Nodes whose actors are made at the same time."""

Watch = Callable[[Sequence[NodeUp]], None]


def live_nodes() -> list[RayNode]:
    """Return the cluster's living nodes.

    Raises:
        ClusterError: Ray does not answer.
    """
    return [facts_of(node) for node in ask.ask_ray(ray.nodes) if node["Alive"]]


def up(  # noqa: PLR0913 - what pools may be asked for
    scheduler: Scheduler,
    *,
    on: str | None = None,
    node_ids: Sequence[str] = (),
    pool_bytes: int | None = None,
    pool_path: str | None = None,
    slab_bytes: int | None = None,
    deadline_s: float = UP_S,
    watch: Watch = lambda _: None,
) -> list[NodeUp]:
    """Make a prefaulted pool on every matching node before an engine starts; matching nodes that
    join later get one too. Pools that exist stay as they are.

    Args:
        on: "all", a Ray resource like "GPU", or a label like "pool=kv". Default: the nodes with a
            GPU if there are any, else all.
        node_ids: these nodes instead, by Ray's ids.
        pool_bytes: default: the setting, else a quarter of what each node has free.
        pool_path: a file for the pools; default: the setting.
        slab_bytes: the largest chunk that a pool can hold. Default: 64 MiB, or an eighth of a pool
            that is smaller than 512 MiB.
        deadline_s: for all of it.
        watch: called several times a second with the progress of each node.

    Raises:
        ClusterError: no node matches, or Ray does not answer.
        SettingError: a setting is malformed.
    """
    settings = load_settings({})
    wish = PoolWish(
        on=on or usual_nodes(live_nodes()),
        node_ids=[ask.ask_ray(join.resolve_node_id, node_id) for node_id in node_ids],
        pool_bytes=pool_bytes or settings.pool_bytes,
        pool_path=settings.pool_path if pool_path is None else pool_path,
        slab_bytes=slab_bytes,
        metrics=(settings.metrics_port, settings.metrics_address),
        disk=(settings.disk_path, settings.disk_bytes, settings.disk_free_bytes),
        transport=settings.transport,
        pin_share=settings.pin_share,
    )
    give_up_at = time.monotonic() + deadline_s
    actor = scheduler_actor(scheduler.address, settings.metrics_place)
    found = bring_up(scheduler.address, wish, deadline_s, watch)
    left_s = max(deadlines.CLIENT_S, give_up_at - time.monotonic())
    try:
        ask.answer(actor, "wish", encode(wish), timeout_s=left_s)
    except errors.ClusterError as error:
        raise errors.ClusterError(f"{error}; nodes that join later get no pool") from error
    return found


def bring_up(address: str, wish: PoolWish, deadline_s: float, watch: Watch) -> list[NodeUp]:
    """Make a NodeActor with a prefaulted pool on every node that the wish matches.

    Args:
        address: of the cluster.
        wish: which nodes, and what pools.
        deadline_s: for all of it.
        watch: called several times a second with the progress of each node.

    Raises:
        NotFoundError: no node matches.
        ClusterError: Ray does not answer.
    """
    give_up_at = time.monotonic() + deadline_s
    nodes = [node for node in live_nodes() if wants(wish, node)]
    if not nodes:
        which = ", ".join(wish.node_ids) if wish.node_ids else wish.on
        raise errors.NotFoundError(
            f"no live node of the cluster matches {which!r}: `ray status` shows all"
        )
    there = set(ask.ask_ray(ask.named_actors))
    states = {
        node.node_id: NodeUp(
            node.node_id, node.hostname, is_new=names.node_actor(node.node_id) not in there
        )
        for node in nodes
    }
    actors: dict[str, Any] = {}
    with ThreadPoolExecutor(min(MAX_STARTING, len(nodes))) as pool:
        list(pool.map(lambda node_id: _make(address, node_id, wish, actors, states), list(states)))
    while True:
        _look(address, actors, states, wish)
        watch(list(states.values()))
        if all(state.is_ready for state in states.values()):
            return list(states.values())
        if time.monotonic() > give_up_at:
            return [_late(state, deadline_s) for state in states.values()]
        time.sleep(deadlines.LOOK_S)


def _make(
    address: str,
    node_id: str,
    wish: PoolWish,
    actors: dict[str, Any],
    states: dict[str, NodeUp],
) -> None:
    """Make a node's NodeActor, and add it to `actors`; if that fails, `states` says why."""
    try:
        actors[node_id] = make_node_actor(address, node_id, wish)
    except Exception as error:
        states[node_id] = msgspec.structs.replace(states[node_id], error=errors.first_line(error))


def _look(address: str, actors: dict[str, Any], states: dict[str, NodeUp], wish: PoolWish) -> None:
    """Update the nodes that are not ready; one that does not answer keeps its state.

    A NodeActor that was to have another pool and got none is ended, and made anew by the next look.
    """
    asked = {node_id: actor for node_id, actor in actors.items() if not states[node_id].is_ready}
    questions = dict.fromkeys(asked, lambda actor: actor.describe.remote())
    for node_id, answer in ask.ask_all(asked, questions, deadlines.PROBE_S).items():
        if answer.is_dead:
            _make(address, node_id, wish, actors, states)
        if answer.error:
            continue
        try:
            described = receive(answer.value, NodeDescription, "the NodeActor", "this process")
        except errors.RayKVError as error:
            states[node_id] = msgspec.structs.replace(states[node_id], error=str(error))
            continue
        is_of_this_wish = states[node_id].is_new and wish.pool_bytes in (None, described.pool_bytes)
        if described.refusal and not is_of_this_wish:
            ask.end_node_actor(node_id)
            states[node_id] = msgspec.structs.replace(states[node_id], is_new=True)
            continue
        note = ""
        if wish.pool_bytes is not None and described.pool_bytes != wish.pool_bytes:
            note = (
                f"it has a pool of {human_bytes(described.pool_bytes)} already, which stays as it "
                "is: `raykv down` frees it"
            )
        states[node_id] = msgspec.structs.replace(
            states[node_id],
            pool_bytes=described.pool_bytes,
            prefaulted_bytes=described.prefaulted_bytes,
            error=described.refusal,
            note=note,
        )


def _late(state: NodeUp, deadline_s: float) -> NodeUp:
    if state.is_ready:
        return state
    done = f"{human_bytes(state.prefaulted_bytes)} of {human_bytes(state.pool_bytes)} prefaulted"
    how_far = done if state.pool_bytes else "no answer of its NodeActor"
    return msgspec.structs.replace(state, error=f"not ready within {deadline_s:g} s: {how_far}")


def stop_actors(timeout_s: float) -> int:
    """End all of RayKV's actors in the cluster; returns how many there were.

    The scheduler actor goes first, and the wish for pools, since its next life would make
    NodeActors anew. What was cleared stays so: disks and pool files outlive the actors.
    """
    ours = sorted(ask.named_actors(), key=lambda name: name != names.SCHEDULER)
    bequest.delete(bequest.WISH)
    for name in ours:
        if (actor := ask.find(name)) is not None:
            ray.kill(actor, no_restart=True)  # bounded: Ray's own deadline; for a person
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at and ask.named_actors():
        time.sleep(deadlines.LOOK_S)
    bequest.forget_orders()
    return len(ours)
