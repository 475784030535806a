"""What an engine does at its start: join the cluster, get the actors, attach, say so.

The only place where an engine's thread waits for Ray, apart from an explicit flush.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raykv.actors import cluster
from raykv.actors.fetch_client import FetchClient
from raykv.actors.session import RayCalls, Session, SessionSettings
from raykv.config import Settings, check_pool_bytes, default_pool_bytes
from raykv.core.geometry import PoolGeometry
from raykv.core.view import EngineView
from raykv.errors import ClusterError, RayKVError, VersionError
from raykv.memory.limits import memory_limit
from raykv.messages import NodeDescription
from raykv.types import NodeId

logger = logging.getLogger("raykv")

REPLACE_PAUSE_S = 0.5
"""For Ray to forget the name of an actor that was ended."""

STOP_DEADLINE_S = 2.0
"""For the session's thread at shutdown."""


@dataclass(frozen=True)
class EngineIdentity:
    """Who the engine is to the actors; `slot_bytes` by KV group index.

    `versions` is for people: of RayKV, vLLM and Ray.
    """

    engine_id: str
    namespace: str
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    versions: str


class EngineRuntime:
    """An engine's connection to the cluster, from its start to its end."""

    def __init__(self, settings: Settings, view: EngineView, identity: EngineIdentity) -> None:
        """Find the cluster and join it.

        Raises:
            ClusterError: there is no such cluster, or several and none is named.
            SettingError: the pool that is asked for can't be.
        """
        self._settings = settings
        self._identity = identity
        self._check_sizes()
        self._joined_here = not ray.is_initialized()
        found = self._join()
        self.address = cluster.current_address()
        try:
            self.node_id = cluster.resolve_node_id(settings.node_id)
            self._geometry = self._choose_geometry()
        except RayKVError:
            # Nobody will use a cluster that was started for an engine that does not start.
            if found.started:
                cluster.stop_started(found.address)
            raise
        self.node: NodeDescription | None = None
        calls = RayCalls(self._find_actors, settings.rpc_deadline_s)
        fetches = FetchClient(
            identity.namespace,
            lambda: cluster.find_node_actor(self.node_id),
            settings.fetch_deadline_s,
            with_checksums=settings.fetch_checksums,
        )
        self.session = Session(view, calls, self._session_settings(), fetches)
        view.node_id = NodeId(self.node_id)
        self._view = view

    def _check_sizes(self) -> None:
        """Refuse a pool that this machine can't have at all, before anything is started."""
        if self._settings.pool_bytes is not None:
            limit = memory_limit()
            largest = max(self._identity.slot_bytes.values())
            check_pool_bytes(self._settings.pool_bytes, largest, limit.total_bytes, limit.source)

    def _join(self) -> cluster.Joined:
        if ray.is_initialized():
            return cluster.Joined(cluster.current_address(), started=False)
        found = cluster.ensure_cluster(self._settings.ray_address or None)
        with _signal_handlers_kept():
            cluster.join(found.address)
        return found

    def _session_settings(self) -> SessionSettings:
        identity = self._identity
        return SessionSettings(
            engine_id=identity.engine_id,
            node_id=self.node_id,
            namespace=identity.namespace,
            model=identity.model,
            num_ranks=identity.num_ranks,
            slot_bytes=identity.slot_bytes,
            versions=identity.versions,
            heartbeat_s=self._settings.heartbeat_s,
            rpc_deadline_s=self._settings.rpc_deadline_s,
        )

    def _choose_geometry(self) -> PoolGeometry:
        """Sizes of the pool, should this engine be the one that makes it."""
        chunk_bytes = max(self._identity.slot_bytes.values())
        limit = memory_limit()
        pool_bytes = self._settings.pool_bytes
        if pool_bytes is None:
            pool_bytes = max(chunk_bytes, default_pool_bytes(limit.free_bytes))
        exists = cluster.find_node_actor(self.node_id) is not None
        free_bytes = limit.total_bytes if exists else limit.free_bytes
        check_pool_bytes(pool_bytes, chunk_bytes, free_bytes, limit.source)
        return PoolGeometry.for_pool(pool_bytes, chunk_bytes)

    def _find_actors(self) -> Any:
        """The scheduler actor; both actors are made if they are not there."""
        geometry = self._geometry
        scheduler = cluster.scheduler_actor(self.address, self._settings.eviction_policy)
        cluster.node_actor(
            self.address,
            self.node_id,
            geometry.pool_bytes,
            geometry.slab_bytes,
            self._settings.pool_path,
        )
        return scheduler

    def start(self) -> None:
        """Attach, at most for the attach deadline; else go on trying in the background."""
        give_up_at = time.monotonic() + self._settings.attach_deadline_s
        try:
            self._find_actors()
            self.node = self._describe_node(give_up_at)
            self._warn_of_other_size(self.node)
            self.session.attach(max(1.0, give_up_at - time.monotonic()))
            self._announce(self.node)
        except Exception as error:
            logger.warning("running without the cache for now, trying again: %s", error)
        self.session.start()
        if self.node is None:
            threading.Thread(target=self._keep_describing, name="raykv-find", daemon=True).start()

    def _describe_node(self, give_up_at: float) -> NodeDescription:
        while True:
            actor = cluster.find_node_actor(self.node_id)
            if actor is None:
                self._find_actors()
                actor = cluster.find_node_actor(self.node_id)
            if actor is None:
                raise ClusterError(f"there is no NodeActor on node {self.node_id}")
            try:
                return cluster.describe(actor, max(1.0, give_up_at - time.monotonic()))
            except VersionError as error:
                if not error.is_mended or time.monotonic() > give_up_at:
                    raise
                logger.warning("%s", error)
                time.sleep(REPLACE_PAUSE_S)

    def _keep_describing(self) -> None:
        """Until the NodeActor has said where it listens; the socket's name never changes then."""
        while self.node is None:
            time.sleep(self._settings.heartbeat_s)
            try:
                self.node = self._describe_node(time.monotonic() + self._settings.rpc_deadline_s)
            except Exception as error:
                logger.debug("still no NodeActor: %s", error)

    def _warn_of_other_size(self, node: NodeDescription) -> None:
        wanted = self._settings.pool_bytes
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
            self._identity.versions,
            self.address,
            self.node_id[:12],
            human_bytes(node.pool_bytes),
            100 * node.prefaulted_bytes / node.pool_bytes,
            self._identity.namespace[:12],
            self._identity.model,
            self._view.num_ready,
        )

    def stop(self) -> None:
        """End the session; leave the cluster if we joined it."""
        self.session.stop(STOP_DEADLINE_S)
        if self._joined_here:
            with _signal_handlers_kept():
                ray.shutdown()


def human_bytes(num_bytes: float) -> str:
    """For people: "8.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


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
