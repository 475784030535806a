"""The public API, for people and programs outside the engines: look into the cache, control it.

import raykv
cluster = raykv.connect()
print(cluster.status())
for event in cluster.events(since=0):
    print(event)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, NotFoundError
from raykv.base.ids import family_of
from raykv.client import accounts, listing, pools, quotas, scheduler, ship, transfers
from raykv.client import pins as pinning
from raykv.client.sessions import ClientSession, found_sessions
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.doctor import checks
from raykv.doctor import gather as diagnosis
from raykv.protocol import descriptions, findings, operator
from raykv.protocol.events import Event, PublisherSettings, PublisherStatus
from raykv.protocol.node import Kept, NodeDescription
from raykv.protocol.sessions import SessionStatus
from raykv.protocol.status import ClusterStatus
from raykv.stream import publishing, readers, replay

WHOLE_NAMESPACE = re.compile("[0-9a-f]{32}")
"""All digits of a namespace."""


P = ParamSpec("P")
R = TypeVar("R")


def _method(
    function: Callable[Concatenate[scheduler.Scheduler, P], R],
) -> Callable[Concatenate[Cluster, P], R]:
    """Make a function of the scheduler a method of the cluster, with its docstring."""

    @wraps(function)
    def call(self: Cluster, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(self._scheduler, *args, **kwargs)

    first, *others = signature(function).parameters.values()
    own = signature(function).replace(parameters=[first.replace(name="self"), *others])
    call.__signature__ = own  # type: ignore[attr-defined]
    return call


class Cluster:
    """RayKV in a Ray cluster. Use as a context manager, or `close` it."""

    def __init__(self, address: str, joined_here: bool) -> None:
        self.address = address
        self._joined_here = joined_here
        self._scheduler = scheduler.Scheduler(address)
        self.quotas = quotas.Quotas(self._scheduler)

    def status(self) -> ClusterStatus:
        """Return nodes, engines and what they hold. `silent` are NodeActors that do not answer:
        their numbers are the last ones that they reported.

        Raises:
            ClusterError: RayKV does not run in this cluster, or its scheduler actor does not
                answer.
        """
        known = self._scheduler.status()
        try:
            described, silent = ask.ask_nodes(
                NodeDescription, lambda _, actor: actor.describe.remote(), None, deadlines.PROBE_S
            )
        except ClusterError as error:
            described, silent = {}, {node.node_id: str(error) for node in known.nodes}
        return scheduler.with_answers(known, described, silent)

    def doctor(self) -> list[findings.Finding]:
        """Find what is wrong with the cluster, and how to mend it; takes seconds if an actor does
        not answer.

        Raises:
            ClusterError: Ray itself does not answer.
        """
        return checks.diagnose(diagnosis.gather())

    def pause(self) -> None:
        """Switch the cache off: engines see misses and store nothing from now on.

        Raises:
            ClusterError: RayKV does not run here, or does not answer; or a node has not heard of it
                in time.
        """
        self._scheduler.order(operator.PauseOrder(uuid4().hex, paused=True))

    def resume(self) -> None:
        """Switch the cache on again; what it holds is still there.

        Raises:
            ClusterError: as for `pause`.
        """
        self._scheduler.order(operator.PauseOrder(uuid4().hex, paused=False))

    def set_weights_version(self, engine: str, version: str) -> list[str]:
        """Name the weights that engines have now; returns the ids of engines that have heard it.

        A name is needed if RayKV can't read the weights' content (`status` says so). Otherwise it
        counts together with the content. It replaces the setting `weights_version` until the
        weights change again. Engines with the same name for the same model share their chunks. An
        engine uses it from its next request on; requests that are under way then neither load nor
        store any more.

        Args:
            engine: its id as `status` shows it, or the beginning of it; the ranks of data
                parallelism have one beginning.
            version: a name; the same one always means the same weights.

        Raises:
            ClusterError: RayKV does not run here, there is no such engine, or one has not heard of
                it in time.
        """
        known = [each.engine_id for each in self._scheduler.status().engines]
        if not any(engine_id.startswith(engine) for engine_id in known):
            raise NotFoundError(
                f"the id of no engine begins with {engine!r}; there are "
                f"{', '.join(known) or 'none'}"
            )
        order = operator.NameWeights(uuid4().hex, engine, version)
        told = self._scheduler.order(order)
        give_up_at = time.monotonic() + deadlines.CLIENT_S
        while not self._scheduler.ask("has_heard", order.order_id):
            if time.monotonic() > give_up_at:
                raise ClusterError(
                    f"not all of {', '.join(told)} have heard of it: they do not talk to their "
                    "NodeActors (`raykv status` says why); say it again when they do"
                )
            time.sleep(deadlines.LOOK_S)
        return told

    def clear(
        self,
        namespace: str | None = None,
        *,
        watch: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        """Empty the cache, of one model's namespace or of all, in one step, whatever it holds.

        Engines see misses as soon as their nodes have heard of it, and store anew. Nothing that was
        stored or begun before is ever loaded after that, not even from a node or a disk that is
        away now and comes back later. The call waits up to 8 s for all nodes, and after a second
        gives `watch` the ids of those that have not shown the order.

        Args:
            namespace: as `status` shows it, or the beginning of it; a whole name (32 digits) need
                not be known now. None: all, known or not.
            watch: see above.

        Raises:
            ClusterError: RayKV does not run here, or there is no such namespace; or it is not kept
                yet, or a node that reports has not shown it in time, and is named.
        """
        if namespace is not None and not WHOLE_NAMESPACE.fullmatch(namespace):
            namespace = family_of(self._scheduler.full_namespace(namespace))
        self._scheduler.order(operator.ClearOrder(uuid4().hex, namespace or ""), watch)

    # Chunks

    chunks = _method(listing.chunks)

    chunk = _method(listing.chunk)

    lookup = _method(listing.lookup)

    why_miss = _method(accounts.why_miss)

    log = _method(scheduler.Scheduler.log)

    more_room = _method(accounts.more_room)

    requests = _method(accounts.requests)

    # Events

    def events(
        self, since: int | tuple[int, int] | None = None, *, follow: bool = True
    ) -> Iterator[Event]:
        """Read all changes of the directory, in order and without gaps.

        If events before the next one are not kept any more, an `EventsMissed` comes first: earlier
        knowledge may be wrong then, and `snapshot` gives it anew. After a restart of the scheduler
        actor, the events of its new life begin with `LifeBegan`.

        Args:
            since: the number of the last event that is known (0: from the beginning of this life),
                or its life and number. None: only what happens from now on.
            follow: wait for more at the end; else stop there.

        Raises:
            ClusterError: RayKV does not run here, its scheduler actor does not answer (in 8 s, or
                for half a minute once there were events), or `since` is no place.
            VersionError: the scheduler actor is of another version.
        """
        return readers.read_events(self._scheduler.find, since, follow=follow)

    def snapshot(self) -> replay.Replay:
        """Say what is where now; go on with `events(since=snapshot.place)` and `snapshot.apply`.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return readers.take_snapshot(self._scheduler.find, ask.node_actors)

    def tokens_of(
        self, keys: Iterable[bytes], namespace: str | None = None
    ) -> dict[bytes, descriptions.Description]:
        """Describe the contents of chunks, by offload key, as far as engines have done so.

        Engines do so with the setting `describe_chunks`, or with `events_endpoint`. A chunk of a
        prompt with a `cache_salt` is never described.

        Args:
            keys: as `snapshot` and `events` have them.
            namespace: only this one; None: any in which a key is known.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return readers.Insides(ask.node_actors).describe(keys, namespace)

    def publish(self, settings: PublisherSettings) -> PublisherStatus:
        """Publish all events in vLLM's format, from Ray's head node, until `down`.

        Chunks of engines with `describe_chunks` have their tokens and parents; others have bare
        hashes.

        Raises:
            ClusterError: RayKV does not run here, a publisher runs that was set up in another way,
                or its sockets can't be bound.
        """
        self._scheduler.find()
        return publishing.publish(settings)

    def publisher(self) -> PublisherStatus | None:
        """Say what the publisher of events does, or None if there is none.

        Raises:
            ClusterError: it does not answer.
        """
        return publishing.publisher_status()

    def stop_publishing(self) -> bool:
        """End the publisher; False if there was none. An attaching engine may start it again."""
        return publishing.stop_publisher()

    def hidden_states(
        self, request_id: str, *, node_id: str | None = None, timeout_s: float = deadlines.READ_S
    ) -> Any:
        """Return the hidden states of a request that has ended, as a Ray object reference.

        `ray.get` of it gives `HiddenStates`; on the node where they are, without a copy. The states
        stay in that node's memory until `hidden_states_ttl_s` is over or others need the room
        (`hidden_states_bytes`). The object stays as long as the reference.

        Args:
            request_id: as the engine's answer has it, or `hidden_states_request` in its
                `kv_transfer_params`.
            node_id: `hidden_states_node` in these; without it all nodes are asked.
            timeout_s: longest wait for the states to be copied, 30 s at most.

        Raises:
            HiddenStatesError: no node knows the request. `ray.get` raises it too, wrapped in a
                `ray.exceptions.RayTaskError`: the capture has failed, and why; or several requests
                are called so.
            ClusterError: Ray does not answer.
        """
        return accounts.hidden_states(request_id, node_id, timeout_s)

    # Pins

    pin = _method(pinning.pin)

    unpin = _method(pinning.unpin)

    pins = _method(pinning.pins)

    # Sessions

    def session(self, name: str, *, namespace: str = "") -> ClientSession:
        """Return a session of requests, by the name that they give it: look at it, end or pause it,
        bring its chunks to where it goes on. The call itself asks no actor.

        Args:
            name: as `raykv_session` in `kv_transfer_params` has it.
            namespace: as for `pin`; needed if several namespaces have a session of that name.

        Raises:
            SettingError: the name is empty or too long.
        """
        return ClientSession(name, namespace, self._scheduler)

    def sessions(self, *, namespace: str = "") -> list[SessionStatus]:
        """List the sessions that were used last, at most 256, the latest first.

        Args:
            namespace: of this one only; as for `pin`.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return found_sessions(self._scheduler, namespace)

    # Transfers

    prefetch = _method(transfers.prefetch)

    move = _method(transfers.move)

    export_chunks = _method(ship.export_chunks)

    import_chunks = _method(ship.import_chunks)

    # Pools

    up = _method(pools.up)

    def keep(self, deadline_s: float = deadlines.BULK_S) -> list[Kept]:
        """Write all that the pools hold to where it outlives the actors: disks and pool files.

        Returns:
            A row for each node; a node that does not answer has a problem in its row.

        Raises:
            ClusterError: Ray does not answer.
        """
        found, silent = ask.ask_nodes(
            Kept,
            lambda _, actor: actor.keep.remote(deadline_s),
            deadline_s=deadline_s + deadlines.ANSWER_S,
        )
        problems = {node_id: Kept(node_id, problem=why) for node_id, why in silent.items()}
        return [kept for _, kept in sorted({**found, **problems}.items())]

    def down(self) -> int:
        """End all of RayKV's actors and free their pools; returns how many there were.

        Engines that still run go on without the cache, and start the actors again.

        Raises:
            ClusterError: Ray does not answer.
        """
        return ask.ask_ray(pools.stop_actors, deadlines.CLIENT_S / 2, deadline_s=deadlines.CLIENT_S)

    def close(self) -> None:
        """Leave the cluster, if `connect` joined it."""
        if self._joined_here:
            cluster.leave_ray(ray.shutdown, deadlines.STOP_S)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(ray_address: str | None = None) -> Cluster:
    """Join the cluster that is named, else this user's one on this host.

    Raises:
        ClusterError: there is none, there are several, or it can't be reached.
    """
    cluster.connect_only_when_told()
    if ray.is_initialized():
        return Cluster(cluster.current_address(), joined_here=False)
    address = cluster.find_cluster(ray_address)
    if address is None:
        raise ClusterError(
            "no Ray cluster runs on this host under this user; name one (`--address`, or "
            "RAY_ADDRESS)"
        )
    cluster.join_within(address, deadlines.JOIN_S)
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


def hidden_states(
    request_id: str, *, node_id: str | None = None, timeout_s: float = deadlines.READ_S
) -> Any:
    """`Cluster.hidden_states` of the Ray cluster that this process is in, else of this host's.

    This process stays in it: the reference would be worth nothing outside.
    """
    return connect().hidden_states(request_id, node_id=node_id, timeout_s=timeout_s)


def clear(namespace: str | None = None, *, ray_address: str | None = None) -> None:
    """`Cluster.clear` of the cluster that `connect` finds."""
    with connect(ray_address) as connected:
        connected.clear(namespace)
