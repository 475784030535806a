"""The public API for people and programs beside the engines: look into the cache, switch it.

import raykv
cluster = raykv.connect()
print(cluster.status())
for event in cluster.events(since=0):
    print(event)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import msgspec
import ray

from raykv.actors import cluster, diagnosis
from raykv.actors.publishing import publish, publisher_status, stop_publisher
from raykv.actors.readers import describe, read_events, take_snapshot
from raykv.config import CLIENT_S
from raykv.core.doctor import diagnose
from raykv.core.replay import Replay
from raykv.description_types import Description
from raykv.errors import ClusterError
from raykv.event_types import Event
from raykv.findings import Finding
from raykv.miss_types import Explanation
from raykv.publisher_types import PublisherSettings, PublisherStatus
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

    def tokens_of(
        self, keys: Iterable[bytes], namespace: str | None = None
    ) -> dict[bytes, Description]:
        """What is inside of chunks, by offload key, where an engine has said so.

        Engines say it under the setting `describe_chunks`, or with `events_endpoint`. A chunk of a
        prompt with a `cache_salt` is never described.

        Args:
            keys: as `snapshot` and `events` have them.
            namespace: None: any in which a key is known.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return {row.key: row for row in describe(self._scheduler, keys, namespace)}

    def publish(self, settings: PublisherSettings) -> PublisherStatus:
        """Have all events published in vLLM's format, from Ray's head node, until `down`.

        Subscribers can place chunks of engines with `describe_chunks`; of others they get bare
        hashes.

        Raises:
            ClusterError: RayKV does not run here, a publisher runs that was set up in another way,
                or its sockets can't be bound.
        """
        self._scheduler()
        return publish(settings)

    def publisher(self) -> PublisherStatus | None:
        """What the publisher of events does; None: there is none.

        Raises:
            ClusterError: it does not answer.
        """
        return publisher_status()

    def stop_publishing(self) -> bool:
        """End the publisher; False: there was none. An engine that attaches may start it again."""
        return stop_publisher()

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
