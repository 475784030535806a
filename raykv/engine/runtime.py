"""What an engine does at its start: join the cluster, get the actors, hear what is there, say so.

The only place where an engine's thread waits for Ray, apart from an explicit flush.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, RayKVError, SettingError, VersionError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NodeId
from raykv.base.settings import Settings
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.cluster.relay import Relay
from raykv.directory.actor import scheduler_actor
from raykv.engine import session
from raykv.engine.hints import HintBox
from raykv.engine.listed import EnginePlace
from raykv.engine.own_node import OwnNode
from raykv.engine.view import EngineView
from raykv.memory.limits import memory_limit, worker_limits
from raykv.memory.room import check_pool_bytes, equal_pools, human_bytes, tightest
from raykv.node.launch import node_actor
from raykv.protocol.engine import EngineHello
from raykv.protocol.node import NodeDescription
from raykv.stream import descriptions, publishing

logger = logging.getLogger("raykv")


def new_life() -> int:
    """Draw the life of an EngineCore."""
    return secrets.randbits(63) or 1


class PlaceNode:
    """The node of a place: its NodeActor, as far as it is known, and the pool that it is to have.

    It is the next one of its host once that is gone, if the host's ranks live on.
    """

    def __init__(self, own: OwnNode, place: EnginePlace, geometry: PoolGeometry) -> None:
        self.place, self.geometry = place, geometry
        self.description: NodeDescription | None = None
        # Those that its host had before, whose NodeActors have not been ended.
        self.former: list[str] = []
        self._own = own
        self._is_own = place.node_id == own.node_id
        self._relay: Relay | None = None

    @property
    def node_id(self) -> str:
        """The Ray node now."""
        return self._own.node_id if self._is_own else self.place.node_id

    def reach(self, node: NodeDescription) -> NodeDescription:
        """The NodeActor is there: its description, as EngineCore's line reaches it.

        Raises:
            ClusterError: its host has another Ray node by now.
        """
        if node.node_id != self.node_id:
            raise ClusterError(f"this host's Ray node is not {node.node_id[:12]} any more")
        self.description = node
        if self._own.has_on_host(self.node_id):
            return node
        if self._relay is None:
            self._relay = Relay(partial(self._own.call, self._find))
        return msgspec.structs.replace(node, socket_name=self._relay.socket_name)

    def follow(self, node_id: NodeId) -> None:
        """Its host has that Ray node now; `OwnNode` sees to EngineCore's own."""
        if not self._is_own and node_id != self.place.node_id:
            logger.warning(
                "ranks of this engine are at the next Ray node of their host, %s, since %s is gone",
                node_id[:12],
                self.place.node_id[:12],
            )
            self.former.append(self.place.node_id)
            self.place = self.place._replace(node_id=node_id)
            self.description = None

    def _find(self) -> Any:
        return ask.find_node_actor(self.node_id)

    def close(self) -> None:
        """End the relay, if the line needed one."""
        if self._relay is not None:
            self._relay.close()


class EngineRuntime:
    """An engine's connection to the cluster, from its start to its end."""

    def __init__(
        self,
        settings: Settings,
        view: EngineView,
        hello: EngineHello,
        hints: HintBox | None = None,
        described: descriptions.DescriptionOutbox | None = None,
        node_of_ranks: Callable[[], str | None] = lambda: "",
    ) -> None:
        """Find the cluster and join it; see `Session` for `hints` and `described`.

        `node_of_ranks` is asked once it is joined: where Ray has placed the ranks; empty: nowhere;
        None: at several nodes, or it is not known. Then `settle` is to be called.

        Raises:
            ClusterError: there is no such cluster, or several and none is named.
            SettingError: the pool that is asked for is impossible.
        """
        self.settings = settings
        self._view, self._hello = view, hello
        self._hints, self._described = hints, described
        self._check_sizes()
        self.nodes: list[PlaceNode] = []
        # The threads of all lines look for NodeActors, one at a time.
        self._locating = threading.Lock()
        is_ours = not ray.is_initialized()
        self._stopped = threading.Event()
        self._joined = found = self._join()
        self.address = cluster.current_address()
        try:
            ranks_at = node_of_ranks()
            node_id = cluster.resolve_node_id(settings.node_id or ranks_at or "")
            self._own = OwnNode(found.address, node_id, is_ours=is_ours)
            if ranks_at is not None:
                self.settle([EnginePlace(NodeId(node_id))])
        except RayKVError:
            # The engine does not start, so a cluster that was started for it has no user.
            if found.started:
                cluster.stop_started(found.address)
            raise

    def settle(self, places: Sequence[EnginePlace]) -> None:
        """Make the session of an engine with these places, at least one.

        Raises:
            ClusterError: one is on a node of another cluster.
        """
        for node_id in sorted(self._strangers(places)):
            raise ClusterError(
                f"ranks of this engine run on Ray node {node_id[:12]}, which is no live node of "
                f"the cluster at {self.address}: {cluster.ONE_CLUSTER}"
            )
        geometries = self._choose_geometries(places)
        self.nodes = [PlaceNode(self._own, each, geometries[each.node_id]) for each in places]
        self.session = session.Session(
            self._view,
            self._hello,
            places,
            self._locate,
            partial(self._own.call, self._find_scheduler, deadlines.ANSWER_S),
            self._hints,
            self._described,
        )
        self.session.follow = lambda at, node_id: self.nodes[at].follow(node_id)

    def _strangers(self, places: Sequence[EnginePlace]) -> set[NodeId]:
        """Nodes of places that are not in the cluster, as far as Ray answers."""
        further = {each.node_id for each in places} - {self.node_id}
        try:
            return further - cluster.live_nodes() if further else set()
        except Exception as error:
            logger.warning("it is not known whether all ranks are in one cluster: %s", error)
            return set()

    @property
    def node_id(self) -> str:
        """The Ray node that the engine is at."""
        return self._own.node_id

    @property
    def node(self) -> NodeDescription | None:
        """The NodeActor of the engine's first place, as far as it is known."""
        return self.nodes[0].description if self.nodes else None

    def _check_sizes(self) -> None:
        """Refuse a pool that this machine cannot hold, before anything is started."""
        if self.settings.pool_bytes is not None:
            limit = memory_limit()
            largest = max(self._hello.slot_bytes.values())
            check_pool_bytes(self.settings.pool_bytes, largest, limit.total_bytes, limit.source)

    def _join(self) -> cluster.Joined:
        cluster.connect_only_when_told()
        if ray.is_initialized():
            return cluster.Joined(cluster.current_address(), started=False)
        found = cluster.ensure_cluster(self.settings.ray_address or None)
        with _signal_handlers_kept():
            cluster.join(found.address)
        return found

    def _choose_geometries(self, places: Sequence[EnginePlace]) -> dict[NodeId, PoolGeometry]:
        """Sizes of the pools of the places' nodes, should this engine be the one that makes them.

        Whether one fits the NodeActor finds out, since what is free counts where the pool is made,
        which may be another control group.
        """
        whole, here = max(self._hello.slot_bytes.values()), tightest(worker_limits()).free_bytes
        slots: dict[NodeId, list[int]] = {}
        for each in places:
            slot_bytes = max(each.slot_bytes.values(), default=whole)
            slots.setdefault(each.node_id, []).append(slot_bytes)
        by_default = equal_pools(
            {each.node_id: each.free_bytes or here for each in places},
            {node_id: sum(sizes) for node_id, sizes in slots.items()},
        )
        return {
            node_id: PoolGeometry.for_pool(
                self.settings.pool_bytes or max(*sizes, by_default[node_id]), max(sizes)
            )
            for node_id, sizes in slots.items()
        }

    def _refuse_after_end(self) -> None:
        """Once Ray has been left, any call to it fails.

        Raises:
            ClusterError: the engine is shutting down.
        """
        if self._stopped.is_set():
            raise ClusterError("the engine is shutting down")

    def _locate(self, at: int, is_lost: bool) -> NodeDescription:
        """The NodeActor of a place's node, which may be the next one of its host; asked anew if it
        `is_lost`.

        Raises:
            ClusterError: there is none.
        """
        node = self.nodes[at]
        description = node.description
        if description is not None and not is_lost:
            return node.reach(description)
        self._refuse_after_end()
        with self._locating:
            before = self.node_id
            if not self._own.follow():
                raise ClusterError("this engine has no Ray node")
            ended = [before] if self.node_id != before else []
            while node.former:
                ended.append(node.former.pop())
            for node_id in ended:
                with contextlib.suppress(Exception):
                    ask.end_node_actor(node_id)
            self._find_actors()
            give_up_at = time.monotonic() + deadlines.ANSWER_S
            return node.reach(self._describe(node, give_up_at))

    def _find_scheduler(self) -> Any:
        self._refuse_after_end()
        found = ask.find_scheduler_actor()
        return self._find_actors() if found is None else found

    def _find_actors(self) -> Any:
        """The scheduler actor; all actors are made that are not there."""
        self._refuse_after_end()
        settings = self.settings
        scheduler = scheduler_actor(self.address, settings.metrics_place)
        for node in self.nodes:
            node_actor(
                self.address,
                node.node_id,
                node.geometry.pool_bytes,
                node.geometry.slab_bytes,
                settings.pool_path,
                settings.node_options,
            )
        publishing.ensure_publisher(self.settings)
        return scheduler

    def start(self) -> None:
        """Hear what the node has within the start deadline; else go on trying in the background.

        Raises:
            SettingError: this node's NodeActor can't have the pool.
        """
        give_up_at = time.monotonic() + self.settings.start_deadline_s
        logger.info("connecting to RayKV's actors, at most %.0f s", self.settings.start_deadline_s)
        try:
            self._find_actors()
            for node in self.nodes:
                node.description = self._describe(node, give_up_at)
                self._warn_of_other_size(node.description)
            self.session.attach(max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
            for node in self.nodes:
                self._announce(node)
        except SettingError:
            if self._joined.started:
                cluster.stop_started(self._joined.address)
            raise
        except Exception as error:
            logger.warning("running without the cache for now, trying again: %s", error)
        self.session.start()

    def _describe(self, node: PlaceNode, give_up_at: float) -> NodeDescription:
        while True:
            self._refuse_after_end()
            node_id = node.node_id
            actor = ask.find_node_actor(node_id)
            if actor is None:
                self._find_actors()
                actor = ask.find_node_actor(node_id)
            if actor is None:
                raise ClusterError(f"there is no NodeActor on node {node_id}")
            try:
                found = ask.describe(actor, max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
                if not found.refusal:
                    return found
                # It serves no engine.
                with contextlib.suppress(Exception):
                    ask.end_node_actor(node_id)
                if found.pool_bytes == node.geometry.pool_bytes or time.monotonic() > give_up_at:
                    raise SettingError(f"node {node_id[:12]} gives no pool: {found.refusal}")
                # Another engine asked for that size; ours may fit.
                self._stopped.wait(deadlines.IDLE_LOOK_S)
            except VersionError as error:
                if not error.is_mended or time.monotonic() > give_up_at:
                    raise
                logger.warning("%s", error)
                self._stopped.wait(deadlines.IDLE_LOOK_S)

    def _warn_of_other_size(self, node: NodeDescription) -> None:
        wanted = self.settings.pool_bytes
        if wanted is not None and wanted != node.pool_bytes:
            logger.warning(
                "this node's pool has %d bytes already; pool_bytes=%d is ignored (the first engine "
                "on a node decides; `raykv down` frees the pool)",
                node.pool_bytes,
                wanted,
            )

    def _announce(self, node: PlaceNode) -> None:
        found, place = node.description, node.place
        assert found is not None
        logger.info(
            "%s: Ray cluster %s, node %s%s, pool %s (%.0f %% prefaulted), namespace %s (%s), "
            "%d chunks cached",
            self._hello.versions,
            self.address,
            node.node_id[:12],
            f" (ranks {', '.join(map(str, place.ranks))})" if place.part else "",
            human_bytes(found.pool_bytes),
            100 * found.prefaulted_bytes / found.pool_bytes,
            self._hello.namespace[:12],
            self._hello.model,
            self._view.num_ready,
        )

    def stop(self) -> None:
        """End the session; leave the cluster if we joined it. Ends within seconds."""
        self._stopped.set()
        if self.nodes:
            self.session.stop(deadlines.STOP_S)
        for node in self.nodes:
            node.close()
        with _signal_handlers_kept():
            self._own.leave(deadlines.LEAVE_S)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray must not take over the signals of a process that belongs to vLLM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)
