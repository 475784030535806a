"""The public API for people and programs beside the engines: look into the cache, switch it.

import raykv
cluster = raykv.connect()
print(cluster.status())
for event in cluster.events(since=0):
    print(event)
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec
import ray

from raykv.actors import cluster, diagnosis
from raykv.actors.inspection import read_requests
from raykv.actors.readers import read_events, take_snapshot
from raykv.config import CLIENT_S
from raykv.core.doctor import diagnose
from raykv.core.replay import Replay
from raykv.errors import ClusterError
from raykv.event_types import Event
from raykv.findings import Finding
from raykv.miss_types import Explanation, RequestPage
from raykv.status_types import ClusterStatus, NodeStatus


class Cluster:
    """RayKV in a Ray cluster. Use as a context manager, or `close` it."""

    def __init__(self, address: str, joined_here: bool) -> None:
        self.address = address
        self._joined_here = joined_here

    def status(self) -> ClusterStatus:
        """Nodes, engines and what they hold, as of now.

        Raises:
            ClusterError: RayKV does not run in this cluster, or does not answer.
        """
        known = cluster.status(self._scheduler(), CLIENT_S)
        return msgspec.structs.replace(
            known,
            nodes=[_fresh(node) for node in known.nodes],
            refused=diagnosis.refusals({node.node_id for node in known.nodes}),
        )

    def doctor(self) -> list[Finding]:
        """What is wrong with the cluster, and how to mend it; takes seconds if somebody is silent.

        Raises:
            ClusterError: Ray itself does not answer.
        """
        return diagnose(diagnosis.gather())

    def pause(self) -> None:
        """Switch the cache off: engines see misses and store nothing within about a second."""
        ray.get(self._scheduler().set_paused.remote(True), timeout=CLIENT_S)

    def resume(self) -> None:
        """Switch the cache on again; what it holds is still there."""
        ray.get(self._scheduler().set_paused.remote(False), timeout=CLIENT_S)

    def clear(self, namespace: str | None = None) -> None:
        """Empty the cache, of one model's namespace or of all: one step, whatever it holds.

        Engines see misses with their next exchange, and store anew; nothing that was stored or
        begun before is ever loaded after that.

        Raises:
            ClusterError: RayKV does not run here, or there is no such namespace.
        """
        scheduler = self._scheduler()
        if namespace is not None:
            namespace = self._full_namespace(namespace)
        ray.get(scheduler.clear.remote(namespace), timeout=CLIENT_S)

    def _full_namespace(self, beginning: str) -> str:
        """The one namespace that begins so; `status` shows the first digits only."""
        status = cluster.status(self._scheduler(), CLIENT_S)
        known = {*status.namespaces, *(engine.namespace for engine in status.engines)}
        found = sorted(name for name in known if name.startswith(beginning))
        if len(found) != 1:
            what = "no namespace" if not found else f"{len(found)} namespaces"
            raise ClusterError(
                f"{what} of the cache begins with {beginning!r}; there are "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        return found[0]

    def why_miss(self, request_id: str) -> list[Explanation]:
        """Why tokens of a request were not loaded; known about a second after it has ended.

        Args:
            request_id: as the API's answer has it, or the beginning of it; vLLM appends to it.

        Returns:
            The requests whose ids begin so, the newest first, at most 16 of the latest 4,096.

        Raises:
            ClusterError: RayKV does not run here, does not answer, or knows no such request.
        """
        known = cluster.why_miss(self._scheduler(), request_id, CLIENT_S)
        if not known.found:
            raise ClusterError(
                f"no request whose id begins with {request_id!r} is among the latest "
                f"{known.num_known} that have ended: it may still run, be older than those or than "
                "the scheduler actor, or have been answered by an engine without RayKV"
            )
        return known.found

    def requests(self, after: int = 0) -> RequestPage:
        """Requests that have ended, all over the cluster, and what became of their tokens.

        Args:
            after: the number of the last one that is known; a page's `first` and the length of
                its `found` give that of the next one.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return read_requests(self._scheduler(), after)

    # Events

    def events(
        self, since: int | tuple[int, int] | None = None, *, follow: bool = True
    ) -> Iterator[Event]:
        """All that happens to the directory, in order and without gaps.

        When events before the next one are not kept any more, an `EventsMissed` comes first: what
        is known from earlier may be wrong then, and `snapshot` gives it anew. After a restart of
        the scheduler actor its new life is told from its beginning, `EpochBegan`.

        Args:
            since: the number of the last event that is known (0: from the epoch's beginning), or
                its epoch and number. None: only what happens from now on.
            follow: wait for more at the end; else stop there.

        Raises:
            ClusterError: RayKV does not run here, its scheduler actor does not answer for half a
                minute, or `since` is no place.
            VersionError: the scheduler actor is of another version.
        """
        return read_events(self._scheduler, since, follow=follow)

    def snapshot(self) -> Replay:
        """What is where now; go on with `events(since=snapshot.place)` and `snapshot.apply`.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return take_snapshot(self._scheduler)

    def down(self) -> int:
        """End all of RayKV's actors and free their pools; returns how many there were.

        Engines that still run go on without the cache, and start the actors again.
        """
        return cluster.stop_actors(CLIENT_S)

    def close(self) -> None:
        """Leave the cluster, if `connect` joined it."""
        if self._joined_here:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _scheduler(self) -> Any:
        actor = cluster.find_scheduler_actor()
        if actor is None:
            raise ClusterError(
                f"RayKV does not run in the Ray cluster at {self.address}: no engine with "
                "RayKVConnector has started there"
            )
        return actor


def connect(ray_address: str | None = None) -> Cluster:
    """Join the cluster that is named, else the one on this host.

    Raises:
        ClusterError: there is none, there are several, or it can't be reached.
    """
    if ray.is_initialized():
        return Cluster(cluster.current_address(), joined_here=False)
    address = cluster.find_cluster(ray_address)
    if address is None:
        raise ClusterError("no Ray cluster runs on this host; name one with --ray-address")
    cluster.join(address)
    return Cluster(cluster.current_address(), joined_here=True)


def events(
    since: int | tuple[int, int] | None = None,
    *,
    follow: bool = True,
    ray_address: str | None = None,
) -> Iterator[Event]:
    """`Cluster.events` of the cluster that `connect` finds; it is left at the end."""
    with connect(ray_address) as connected:
        yield from connected.events(since, follow=follow)


def clear(namespace: str | None = None, *, ray_address: str | None = None) -> None:
    """`Cluster.clear` of the cluster that `connect` finds."""
    with connect(ray_address) as connected:
        connected.clear(namespace)


def _fresh(node: NodeStatus) -> NodeStatus:
    """`node` with counters from its NodeActor, where it answers."""
    actor = cluster.find_node_actor(node.node_id)
    if actor is None:
        return node
    try:
        stats = cluster.describe(actor, CLIENT_S).stats
    except ClusterError:
        return node
    return msgspec.structs.replace(
        node,
        prefaulted_bytes=stats.prefaulted_bytes,
        used_bytes=stats.used_bytes,
        bytes_stored=stats.bytes_stored,
        bytes_loaded=stats.bytes_loaded,
        bytes_fetched=stats.bytes_fetched,
        bytes_sent=stats.bytes_sent,
        chunks_refused=stats.chunks_refused,
        num_workers=stats.num_workers,
        quarantined=stats.quarantined,
        breakers=stats.breakers,
    )
