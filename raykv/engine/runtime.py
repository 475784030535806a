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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, RayKVError, SettingError, VersionError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NodeId
from raykv.base.settings import Settings
from raykv.cluster import ask
from raykv.cluster import join as cluster
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


class EngineRuntime:
    """An engine's connection to the cluster, from its start to its end."""

    def __init__(
        self,
        settings: Settings,
        view: EngineView,
        hello: EngineHello,
        hints: HintBox | None = None,
        described: descriptions.DescriptionOutbox | None = None,
        node_of_ranks: Callable[[], str] = lambda: "",
    ) -> None:
        """Find the cluster and join it; see `Session` for `hints` and `described`.

        `node_of_ranks` is asked once it is joined: where Ray has placed the ranks; empty: nowhere.

        Raises:
            ClusterError: there is no such cluster, or several and none is named.
            SettingError: the pool that is asked for is impossible.
        """
        self.settings = settings
        self._hello = hello
        self._check_sizes()
        is_ours = not ray.is_initialized()
        self._stopped = threading.Event()
        self._joined = found = self._join()
        self.address = cluster.current_address()
        try:
            ranks_at = node_of_ranks()
            node_id = cluster.resolve_node_id(settings.node_id or ranks_at)
            self._place = place.EnginePlace(found.address, node_id, is_ours=is_ours)
            self._geometry = self._choose_geometry()
        except RayKVError:
            # The engine does not start, so a cluster that was started for it has no user.
            if found.started:
                cluster.stop_started(found.address)
            raise
        self.node: NodeDescription | None = None
        self.session = session.Session(
            view,
            hello,
            NodeId(self.node_id),
            partial(self._place.call, self._find_scheduler, deadlines.ANSWER_S),
            self._locate,
            hints,
            described,
        )
        self._view = view

    @property
    def node_id(self) -> str:
        """The Ray node that the engine is at."""
        return self._place.node_id

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

    def _choose_geometry(self) -> PoolGeometry:
        """Sizes of the pool, should this engine be the one that makes it.

        Whether it fits the NodeActor finds out, since what is free counts where the pool is made,
        which may be another control group.
        """
        chunk_bytes = max(self._hello.slot_bytes.values())
        pool_bytes = self.settings.pool_bytes
        if pool_bytes is None:
            free_bytes = tightest(worker_limits()).free_bytes
            pool_bytes = max(chunk_bytes, default_pool_bytes(free_bytes))
        return PoolGeometry.for_pool(pool_bytes, chunk_bytes)

    def _find_node_actor(self) -> Any:
        self._refuse_after_end()
        return ask.find_node_actor(self.node_id)

    def _refuse_after_end(self) -> None:
        """Once Ray has been left, any call to it fails.

        Raises:
            ClusterError: the engine is shutting down.
        """
        if self._stopped.is_set():
            raise ClusterError("the engine is shutting down")

    def _locate(self, is_lost: bool) -> NodeDescription:
        """The NodeActor of the node that the engine is at, which may be the next one of its host;
        asked anew if it `is_lost`.

        Raises:
            ClusterError: there is none.
        """
        node = self.node
        if node is not None and not is_lost:
            return node
        self._refuse_after_end()
        before = self.node_id
        if not self._place.follow():
            raise ClusterError("this engine has no Ray node")
        if self.node_id != before:
            with contextlib.suppress(Exception):
                ask.end_node_actor(before)
        self._find_actors()
        give_up_at = time.monotonic() + deadlines.ANSWER_S
        self.node = self._describe_node(give_up_at)
        return self.node

    def _find_scheduler(self) -> Any:
        self._refuse_after_end()
        found = ask.find_scheduler_actor()
        return self._find_actors() if found is None else found

    def _find_actors(self) -> Any:
        """The scheduler actor; both actors are made if they are not there."""
        self._refuse_after_end()
        geometry = self._geometry
        settings = self.settings
        scheduler = scheduler_actor(self.address, settings.metrics_place)
        node_actor(
            self.address,
            self.node_id,
            geometry.pool_bytes,
            geometry.slab_bytes,
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
            self.node = self._describe_node(give_up_at)
            self._warn_of_other_size(self.node)
            self.session.attach(max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
            self._announce(self.node)
        except SettingError:
            if self._joined.started:
                cluster.stop_started(self._joined.address)
            raise
        except Exception as error:
            logger.warning("running without the cache for now, trying again: %s", error)
        self.session.start()

    def _describe_node(self, give_up_at: float) -> NodeDescription:
        while True:
            actor = self._find_node_actor()
            if actor is None:
                self._find_actors()
                actor = self._find_node_actor()
            if actor is None:
                raise ClusterError(f"there is no NodeActor on node {self.node_id}")
            try:
                node = ask.describe(actor, max(deadlines.PROMPT_S, give_up_at - time.monotonic()))
                if not node.refusal:
                    return node
                # It serves nobody.
                with contextlib.suppress(Exception):
                    ask.end_node_actor(self.node_id)
                if node.pool_bytes == self._geometry.pool_bytes or time.monotonic() > give_up_at:
                    raise SettingError(f"node {self.node_id[:12]} gives no pool: {node.refusal}")
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

    def _announce(self, node: NodeDescription) -> None:
        logger.info(
            "%s: Ray cluster %s, node %s, pool %s (%.0f %% prefaulted), namespace %s (%s), "
            "%d chunks cached",
            self._hello.versions,
            self.address,
            self.node_id[:12],
            human_bytes(node.pool_bytes),
            100 * node.prefaulted_bytes / node.pool_bytes,
            self._hello.namespace[:12],
            self._hello.model,
            self._view.num_ready,
        )

    def stop(self) -> None:
        """End the session; leave the cluster if we joined it. Ends within seconds."""
        self._stopped.set()
        self.session.stop(deadlines.STOP_S)
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
