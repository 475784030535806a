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
from raykv.engine import place, session
from raykv.engine.hints import HintBox
from raykv.engine.view import EngineView
from raykv.memory.limits import memory_limit, worker_limits
from raykv.memory.room import check_pool_bytes, default_pool_bytes, human_bytes, tightest
from raykv.node.launch import node_actor
from raykv.protocol.engine import EngineHello
from raykv.protocol.node import NodeDescription
from raykv.stream import descriptions, publishing

logger = logging.getLogger("raykv")


def new_life() -> int:
    """The life of an EngineCore that begins now."""
    return secrets.randbits(63) or 1


class Home:
    """A place of an engine: its node, as far as it is known, and the pool that it is to have.

    Where that is EngineCore's own node, it is the next one of its host once that is gone.
    """

    def __init__(
        self,
        here: place.EnginePlace,
        seat: place.EngineSeat,
        geometry: PoolGeometry,
        own: str,
    ) -> None:
        self.seat, self.geometry = seat, geometry
        self.node: NodeDescription | None = None
        self._here = here
        self._is_own = seat.node_id == own
        self._relay: Relay | None = None

    @property
    def node_id(self) -> str:
        """The Ray node now."""
        return self._here.node_id if self._is_own else self.seat.node_id

    def reach(self, node: NodeDescription) -> NodeDescription:
        """The NodeActor is there: its description, as EngineCore's line reaches it."""
        self.node = node
        if self._here.has_on_host(self.node_id):
            return node
        if self._relay is None:
            self._relay = Relay(partial(self._here.call, self._find))
        return msgspec.structs.replace(node, socket_name=self._relay.socket_name)

    def _find(self) -> Any:
        return ask.find_node_actor(self.node_id)

    def close(self) -> None:
        """No line is needed any more."""
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
        None: at several nodes, or it is not known. Then `sit` is to be called.

        Raises:
            ClusterError: there is no such cluster, or several and none is named.
            SettingError: the pool that is asked for is impossible.
        """
        self.settings = settings
        self._view, self._hello = view, hello
        self._hints, self._described = hints, described
        self._check_sizes()
        self.homes: list[Home] = []
        # The threads of all lines look for NodeActors, one at a time.
        self._locating = threading.Lock()
        is_ours = not ray.is_initialized()
        self._stopped = threading.Event()
        self._joined = found = self._join()
        self.address = cluster.current_address()
        try:
            ranks_at = node_of_ranks()
            node_id = cluster.resolve_node_id(settings.node_id or ranks_at or "")
            self._place = place.EnginePlace(found.address, node_id, is_ours=is_ours)
            if ranks_at is not None:
                self.sit([place.EngineSeat(node_id)])
        except RayKVError:
            # The engine does not start, so a cluster that was started for it has no user.
            if found.started:
                cluster.stop_started(found.address)
            raise

    def sit(self, seats: Sequence[place.EngineSeat]) -> None:
        """The engine has these places, at least one.

        Raises:
            ClusterError: one is on a node of another cluster.
        """
        if further := {each.node_id for each in seats} - {self.node_id}:
            for node_id in sorted(further - cluster.live_nodes()):
                raise ClusterError(
                    f"ranks of this engine run on Ray node {node_id[:12]}, which is no live node "
                    f"of the cluster at {self.address}: {cluster.ONE_CLUSTER}"
                )
        self.homes = [
            Home(self._place, each, self._choose_geometry(each, seats), self.node_id)
            for each in seats
        ]
        self.session = session.Session(
            self._view,
            self._hello,
            [
                session.SessionPlace(
                    NodeId(home.node_id), partial(self._locate, home), home.seat.part
                )
                for home in self.homes
            ],
            partial(self._place.call, self._find_scheduler, deadlines.ANSWER_S),
            self._hints,
            self._described,
        )

    @property
    def node_id(self) -> str:
        """The Ray node that the engine is at."""
        return self._place.node_id

    @property
    def node(self) -> NodeDescription | None:
        """The NodeActor of the engine's first place, as far as it is known."""
        return self.homes[0].node if self.homes else None

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

    def _choose_geometry(
        self, seat: place.EngineSeat, seats: Sequence[place.EngineSeat]
    ) -> PoolGeometry:
        """Sizes of the pool of a place's node, should this engine be the one that makes it.

        Whether it fits the NodeActor finds out, since what is free counts where the pool is made,
        which may be another control group.
        """
        parts = [each.part for each in seats if each.node_id == seat.node_id]
        sizes = [size for part in parts for size in part.slot_bytes.values()]
        chunk_bytes = max(sizes or self._hello.slot_bytes.values())
        pool_bytes = self.settings.pool_bytes
        if pool_bytes is None:
            free_bytes = seat.free_bytes or tightest(worker_limits()).free_bytes
            pool_bytes = max(chunk_bytes, default_pool_bytes(free_bytes))
        return PoolGeometry.for_pool(pool_bytes, chunk_bytes)

    def _refuse_after_end(self) -> None:
        """Once Ray has been left, any call to it fails.

        Raises:
            ClusterError: the engine is shutting down.
        """
        if self._stopped.is_set():
            raise ClusterError("the engine is shutting down")

    def _locate(self, home: Home, is_lost: bool) -> NodeDescription:
        """The NodeActor of a place's node, which may be the next one of EngineCore's host; asked
        anew if it `is_lost`.

        Raises:
            ClusterError: there is none.
        """
        node = home.node
        if node is not None and not is_lost:
            return home.reach(node)
        self._refuse_after_end()
        with self._locating:
            before = self.node_id
            if not self._place.follow():
                raise ClusterError("this engine has no Ray node")
            if self.node_id != before:
                with contextlib.suppress(Exception):
                    ask.end_node_actor(before)
            self._find_actors()
            give_up_at = time.monotonic() + deadlines.ANSWER_S
            return home.reach(self._describe_node(home, give_up_at))

    def _find_scheduler(self) -> Any:
        self._refuse_after_end()
        found = ask.find_scheduler_actor()
        return self._find_actors() if found is None else found

    def _find_actors(self) -> Any:
        """The scheduler actor; all actors are made that are not there."""
        self._refuse_after_end()
        settings = self.settings
        scheduler = scheduler_actor(self.address, settings.metrics_place)
        for home in self.homes:
            node_actor(
                self.address,
                home.node_id,
                home.geometry.pool_bytes,
                home.geometry.slab_bytes,
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
            for home in self.homes:
                home.node = self._describe_node(home, give_up_at)
                self._warn_of_other_size(home.node)
            self.session.attach(max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
            for home in self.homes:
                self._announce(home)
        except SettingError:
            if self._joined.started:
                cluster.stop_started(self._joined.address)
            raise
        except Exception as error:
            logger.warning("running without the cache for now, trying again: %s", error)
        self.session.start()

    def _describe_node(self, home: Home, give_up_at: float) -> NodeDescription:
        while True:
            self._refuse_after_end()
            node_id = home.node_id
            actor = ask.find_node_actor(node_id)
            if actor is None:
                self._find_actors()
                actor = ask.find_node_actor(node_id)
            if actor is None:
                raise ClusterError(f"there is no NodeActor on node {node_id}")
            try:
                node = ask.describe(actor, max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
                if not node.refusal:
                    return node
                # It serves nobody.
                with contextlib.suppress(Exception):
                    ask.end_node_actor(node_id)
                if node.pool_bytes == home.geometry.pool_bytes or time.monotonic() > give_up_at:
                    raise SettingError(f"node {node_id[:12]} gives no pool: {node.refusal}")
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

    def _announce(self, home: Home) -> None:
        node, part = home.node, home.seat.part
        assert node is not None
        logger.info(
            "%s: Ray cluster %s, node %s%s, pool %s (%.0f %% prefaulted), namespace %s (%s), "
            "%d chunks cached",
            self._hello.versions,
            self.address,
            home.node_id[:12],
            f" (ranks {', '.join(map(str, part.ranks))})" if part.name else "",
            human_bytes(node.pool_bytes),
            100 * node.prefaulted_bytes / node.pool_bytes,
            self._hello.namespace[:12],
            self._hello.model,
            self._view.num_ready,
        )

    def stop(self) -> None:
        """End the session; leave the cluster if we joined it. Ends within seconds."""
        self._stopped.set()
        if self.homes:
            self.session.stop(deadlines.STOP_S)
        for home in self.homes:
            home.close()
        with _signal_handlers_kept():
            self._place.leave(deadlines.LEAVE_S)


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
