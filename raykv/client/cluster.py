"""The public API for people and programs beside the engines: look into the cache, switch it.

import raykv
cluster = raykv.connect()
print(cluster.status())
for event in cluster.events(since=0):
    print(event)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import ray

from raykv.base.deadlines import CLIENT_S, STATES_READ_S, TRANSFER_LOOK_S, TRANSFER_S
from raykv.base.errors import ClusterError, NotFoundError
from raykv.base.settings import load_settings
from raykv.client import accounts, import_source, listing, pools, quotas, scheduler, ship, states
from raykv.client.pins import PIN_S, Pinning
from raykv.client.sessions import ClientSession, SessionDesk
from raykv.client.transfers import Moving, Watch
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.doctor import checks
from raykv.doctor import gather as diagnosis
from raykv.prompts.block_hashes import PLAIN, PromptTraits
from raykv.protocol import descriptions, findings, operator, reader
from raykv.protocol.events import Event, PublisherSettings, PublisherStatus
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import Kept
from raykv.protocol.sessions import SessionStatus
from raykv.protocol.status import ClusterStatus, MoreRoom
from raykv.stream import publishing, readers, replay

# For a person or a program to join the cluster: tenths of a second, or many where all cores of the
# host are busy. They are told after `CLIENT_S`; a part that hangs is found within `CLIENT_PROBE_S`.
CLIENT_JOIN_S = 30.0

# For leaving it again; also for somebody who has pressed Ctrl-C because it hangs.
CLIENT_LEAVE_S = 2.0


WHOLE_NAMESPACE = re.compile("[0-9a-f]{32}")
"""All digits of a namespace."""


class Cluster:
    """RayKV in a Ray cluster. Use as a context manager, or `close` it."""

    def __init__(self, address: str, joined_here: bool) -> None:
        self.address = address
        self._joined_here = joined_here
        self._scheduler = scheduler.Scheduler(address)
        self._reader = listing.Reader(self._scheduler)
        self._pins = Pinning(self._scheduler, self._reader)
        self.quotas = quotas.Quotas(self._scheduler)
        self._transfers = Moving(self._scheduler, self._reader)
        self._sessions = SessionDesk(self._scheduler, self._reader, self._transfers)
        self._shipping = ship.Shipping(self._scheduler, self._reader, self._pins)

    def status(self) -> ClusterStatus:
        """Nodes, engines and what they hold, as of now. `silent` NodeActors do not answer: their
        numbers are the last that they have reported.

        Raises:
            ClusterError: RayKV does not run in this cluster, or its scheduler actor does not
                answer.
        """
        known = self._scheduler.status()
        try:
            answers = diagnosis.node_answers()
        except ClusterError as error:
            answers = {node.node_id: str(error) for node in known.nodes}
        return scheduler.with_answers(known, answers)

    def doctor(self) -> list[findings.Finding]:
        """What is wrong with the cluster, and how to mend it; takes seconds if an actor does not
        answer.

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
        self._scheduler.order(operator.PauseOrder(PROTOCOL_VERSION, uuid4().hex, paused=True))

    def resume(self) -> None:
        """Switch the cache on again; what it holds is still there.

        Raises:
            ClusterError: as for `pause`.
        """
        self._scheduler.order(operator.PauseOrder(PROTOCOL_VERSION, uuid4().hex, paused=False))

    def set_weights_version(self, engine: str, version: str) -> list[str]:
        """Give the weights that engines have now a name; the ids of those that have heard it.

        It is needed where RayKV can't tell weights by their content (`status` says so), and may be
        used where it can: it counts beside the content. It takes the place of the setting
        `weights_version` until the weights change the next time. Engines that say the same of the
        same model share their chunks. From its next request on an engine goes by it; those that
        are under way then neither load nor store any more.

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
        order = operator.NameWeights(PROTOCOL_VERSION, uuid4().hex, engine, version)
        told = self._scheduler.order(order)
        give_up_at = time.monotonic() + CLIENT_S
        while not self._scheduler.ask("has_heard", order.order_id):
            if time.monotonic() > give_up_at:
                raise ClusterError(
                    f"not all of {', '.join(told)} have heard of it: they do not talk to their "
                    "NodeActors (`raykv status` says why); say it again when they do"
                )
            time.sleep(TRANSFER_LOOK_S)
        return told

    def clear(
        self,
        namespace: str | None = None,
        *,
        watch: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        """Empty the cache, of one model's namespace or of all: one step, whatever it holds.

        Engines see misses as soon as their nodes have heard of it, and store anew; nothing that was
        stored or begun before is ever loaded after that, nor what a node or a disk has that is away
        now and comes later. `watch` is given the ids of nodes that have not shown it after a
        second, if there are any: they are waited for, 8 s at most.

        Args:
            namespace: as `status` shows it, or the beginning of it; a whole name (32 digits) need
                not be known now. None: all, known or not.
            watch: see above.

        Raises:
            ClusterError: RayKV does not run here, or there is no such namespace; or it is not kept
                yet, or a node that reports has not shown it in time, and is named.
        """
        if namespace is not None and not WHOLE_NAMESPACE.fullmatch(namespace):
            namespace = self._reader.full_namespace(namespace)
        self._scheduler.order(
            operator.ClearOrder(PROTOCOL_VERSION, uuid4().hex, namespace or ""), watch
        )

    # Chunks

    def chunks(
        self,
        *,
        namespace: str | None = None,
        node: str | None = None,
        key: bytes | str = b"",
        group: int | None = None,
        order: str = "",
        limit: int | None = None,
        tier: str = "",
    ) -> Iterator[reader.Chunk]:
        """The chunks that are held, one for each pool and disk that has it, page by page.

        A chunk that stays where it is the whole time is listed exactly once; one that comes, goes
        or moves meanwhile may be listed or not. Nothing is changed or kept in memory for it.

        Args:
            namespace: only of this one, which may be the beginning of a name.
            node: only on this one; the same.
            key: only those whose key, or its hexadecimal digits, begins so.
            group: only of this KV group.
            order: by age, idle, hits or size, what has most of it first; "": pages of all nodes in
                turn, each node's disk after its pool.
            limit: the first ones only. An order without a limit has all in memory here.
            tier: only in pools ("ram"), or on disks ("disk").

        Raises:
            ClusterError: RayKV does not run here or does not answer, or an argument is invalid.
        """
        return self._reader.chunks(namespace, node, key, group, order, limit, tier)

    def chunk(self, key: bytes | str) -> list[reader.Chunk]:
        """The copies of the chunk whose key, or its hexadecimal digits, begins so; may be none.

        Raises:
            ClusterError: several keys begin so, or RayKV does not run here or does not answer.
        """
        return self._reader.chunk(key)

    def lookup(
        self,
        tokens: Sequence[int] | None = None,
        *,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        namespace: str | None = None,
        traits: PromptTraits = PLAIN,
    ) -> reader.PromptLookup:
        """Where the chunks of a prompt are, and how much of it each node could load.

        Args:
            tokens: the prompt; or
            text: that, as `/v1/completions` takes it; or
            messages: those of a chat, as `/v1/chat/completions` takes them. Text and messages need
                the tokenizer of `model`, by default that of the namespace's engines.
            model: as its engines call it, or the last part of that.
            namespace: or the beginning of one. Needed only if a model has several.
            traits: what separates the prompt from others with the same tokens: salt, adapter.

        Raises:
            ClusterError: RayKV does not run here or does not answer; there is not exactly one such
                namespace; or none of its engines is known.
            SettingError: the engines' hashes can't be made here, or there is no such tokenizer.
        """
        return self._reader.lookup(tokens, text, messages, model, namespace, traits)

    def why_miss(self, request_id: str) -> list[reader.Explanation]:
        """Why tokens of a request were not loaded; known about a second after it has ended.

        Args:
            request_id: as in the answer, or the client's `X-Request-Id`, or its beginning.

        Returns:
            The requests whose ids begin so, the newest first, at most 16 of each node's latest
            4,096.

        Raises:
            ClusterError: RayKV does not run here, does not answer, or knows no such request.
        """
        self._scheduler.find()
        return accounts.why_miss(request_id)

    def log(self, node_id: str = "", *, follow: bool = False) -> Iterator[bytes]:
        """The end of a NodeActor's log, else of the scheduler actor's; `follow` waits for more."""
        return self._scheduler.log(node_id, follow=follow)

    def more_room(self) -> MoreRoom:
        """What more room in each pool would have saved in the last hour, in computed tokens.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        self._scheduler.find()
        return accounts.more_room()

    def requests(self, after: str | int = "") -> reader.EndedRequests:
        """Requests that have ended, all over the cluster, and what became of their tokens; some of
        them if there are many.

        Args:
            after: the place behind the last one that is known, as an earlier answer has it;
                empty, or 0: from the oldest one on that is remembered.

        Raises:
            ClusterError: RayKV does not run here, or does not answer, or that is no place.
        """
        self._scheduler.find()
        return accounts.ended_requests(str(after or ""))

    # Events

    def events(
        self, since: int | tuple[int, int] | None = None, *, follow: bool = True
    ) -> Iterator[Event]:
        """All that happens to the directory, in order and without gaps.

        When events before the next one are not kept any more, an `EventsMissed` comes first: what
        is known from earlier may be wrong then, and `snapshot` gives it anew. After a restart of
        the scheduler actor its new life is told from its beginning, `LifeBegan`.

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
        """What is where now; go on with `events(since=snapshot.place)` and `snapshot.apply`.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return readers.take_snapshot(self._scheduler.find, ask.node_actors)

    def tokens_of(
        self, keys: Iterable[bytes], namespace: str | None = None
    ) -> dict[bytes, descriptions.Description]:
        """What is inside of chunks, by offload key, where an engine has said so.

        Engines say it under the setting `describe_chunks`, or with `events_endpoint`. A chunk of a
        prompt with a `cache_salt` is never described.

        Args:
            keys: as `snapshot` and `events` have them.
            namespace: None: any in which a key is known.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return readers.Insides(ask.node_actors).describe(keys, namespace)

    def publish(self, settings: PublisherSettings) -> PublisherStatus:
        """Have all events published in vLLM's format, from Ray's head node, until `down`.

        Subscribers can place chunks of engines with `describe_chunks`; of others they get bare
        hashes.

        Raises:
            ClusterError: RayKV does not run here, a publisher runs that was set up in another way,
                or its sockets can't be bound.
        """
        self._scheduler.find()
        return publishing.publish(settings)

    def publisher(self) -> PublisherStatus | None:
        """What the publisher of events does; None: there is none.

        Raises:
            ClusterError: it does not answer.
        """
        return publishing.publisher_status()

    def stop_publishing(self) -> bool:
        """End the publisher; False: there was none. An engine that attaches may start it again."""
        return publishing.stop_publisher()

    def hidden_states(
        self, request_id: str, *, node_id: str | None = None, timeout_s: float = STATES_READ_S
    ) -> Any:
        """The hidden states of a request that has ended, as a Ray object reference.

        `ray.get` of it gives `HiddenStates`; on the node where they are, without a copy. The states
        stay in that node's memory until `hidden_states_ttl_s` is over or others need the room
        (`hidden_states_bytes`); what the reference stands for stays as long as the reference.

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
        return states.reference(request_id, node_id, timeout_s)

    # Pins

    def pin(
        self,
        keys: Sequence[bytes | str],
        *,
        namespace: str = "",
        ttl_s: float = PIN_S,
        priority: int | None = None,
        pin_id: str | None = None,
    ) -> operator.PinStatus:
        """Keep chunks in the cache, wherever they are and come to; those too that are not stored
        yet. All of them or, with an error, none.

        Args:
            keys: offload keys of the chunks, as bytes or hex, the prefix's first ones first. Those
                of a prompt are `cluster.lookup(text=…).keys`.
            namespace: as `status` shows it, or the beginning of it; may be left out if there is
                one only.
            ttl_s: for so many seconds, at most 30 days.
            priority: None: no eviction takes them. 1 to 9: evictions take them only when nothing
                without a priority, or with a lower one, is left.
            pin_id: a name for the pin, in the place of an earlier one of that name; else a new one.

        Raises:
            ClusterError: RayKV does not run here, or does not answer; pins may not take so much.
            SettingError: an argument is not allowed.
        """
        return self._pins.pin(keys, namespace, ttl_s, priority, pin_id)

    def unpin(self, pin_id: str) -> None:
        """End a pin; its chunks are evicted in their turn again.

        Raises:
            ClusterError: RayKV does not run here, or does not answer, or there is no such pin.
        """
        self._pins.unpin(pin_id)

    def pins(self) -> operator.Pinned:
        """All pins, and what they take of each node.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return self._pins.pins()

    # Sessions

    def session(self, name: str, *, namespace: str = "") -> ClientSession:
        """A session of requests, by the name that they give it: look at it, say that it is over or
        pauses, bring its chunks to where it goes on. Asks nobody yet.

        Args:
            name: as `raykv_session` in `kv_transfer_params` has it.
            namespace: as for `pin`; needed if several namespaces have a session of that name.

        Raises:
            SettingError: the name is empty or too long.
        """
        return ClientSession(name, namespace, self._sessions)

    def sessions(self, *, namespace: str = "") -> list[SessionStatus]:
        """The sessions that were used last, 256 of them at most, the latest first.

        Args:
            namespace: of this one only; as for `pin`.

        Raises:
            ClusterError: RayKV does not run here, or does not answer.
        """
        return self._sessions.found(self._sessions.whole(namespace))

    # Transfers

    def prefetch(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        *,
        namespace: str = "",
        deadline_s: float = TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> operator.TransferResult:
        """Bring chunks to a node's pool, from any node or disk, before a request needs them there:
        from other pools, or from disks what is in none.

        The first chunks come first. What does not come is no error: the result counts it.

        Args:
            keys: as for `pin`.
            node_id: Ray's, or the beginning of it.
            namespace: as for `pin`.
            deadline_s: for all of them.
            watch: called after every page with the result so far.

        Raises:
            ClusterError: RayKV does not run here, or does not answer; the node has no pool.
        """
        return self._transfers.prefetch(keys, node_id, namespace, deadline_s, watch)

    def move(
        self,
        keys: Sequence[bytes | str],
        node_id: str,
        *,
        namespace: str = "",
        deadline_s: float = TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> operator.TransferResult:
        """`prefetch`, then give up the copies that other nodes have of what is there now.

        A copy stays that is pinned where it is, unless it is pinned on the node too, and one with
        more blocks. What is on disks stays there.

        Raises:
            ClusterError: as for `prefetch`.
        """
        return self._transfers.move(keys, node_id, namespace, deadline_s, watch)

    def export_chunks(
        self,
        path: str | Path,
        *,
        keys: Sequence[bytes | str] | None = None,
        pin_id: str = "",
        namespace: str = "",
        most_bytes: int | None = None,
    ) -> operator.Exported:
        """Write chunks of one namespace, in pools and on disks, to files that another cluster can
        import.

        Args:
            path: a folder, which must be new or empty; or one file, if it ends in `.safetensors`:
                then all of it is in memory for a while.
            keys: these chunks; those of a prompt are `cluster.lookup(text=…).keys`.
            pin_id: those of a pin instead. Default: all of the namespace.
            namespace: as `status` shows it, or the beginning of it; may be left out if there is one
                only.
            most_bytes: no more than so many; the most used chunks are taken then.

        Raises:
            ClusterError: RayKV does not run here, or does not answer, or there is no such pin.
            SettingError: the path is in use or can't be written (the files that are there are
                whole), a key is invalid, or no chunk was found.
        """
        return self._shipping.export_chunks(path, keys, pin_id, namespace, most_bytes)

    def import_chunks(
        self,
        path: str | Path,
        node_id: str = "",
        *,
        deadline_s: float = import_source.IMPORT_S,
        watch: Watch = lambda _: None,
    ) -> operator.TransferResult:
        """Bring the chunks of files into a node's pool, the first ones of as many as it has room
        for beside what is pinned or in use there. Others are evicted for them; what the import has
        brought is not, also for a minute after it, in which others may find no room. What does not
        come is no error: the result counts it, as `no_room` what is beyond that.

        Args:
            path: what `export_chunks` has written, where this process can read it.
            node_id: Ray's, or the beginning of it. Default: the node with the most room.
            deadline_s: for all of them.
            watch: called after every page with the result so far.

        Raises:
            ChunkFileError: a file is damaged, or none of these.
            ClusterError: RayKV does not run here, or does not answer.
            SettingError: there are no files, or the engines here can't use such KV.
        """
        return self._shipping.import_chunks(path, node_id, deadline_s, watch)

    # Pools

    def up(
        self,
        *,
        on: str | None = None,
        node_ids: Sequence[str] = (),
        pool_bytes: int | None = None,
        pool_path: str | None = None,
        slab_bytes: int | None = None,
        deadline_s: float = pools.UP_S,
        watch: pools.Watch = lambda _: None,
    ) -> list[operator.NodeUp]:
        """Have a pool on every node that matches, prefaulted, before an engine starts; nodes that
        match and join later get one too. What is there already stays as it is.

        Args:
            on: "all", a Ray resource like "GPU", or a label like "pool=kv". Default: the nodes
                with a GPU if there are any, else all.
            node_ids: these instead, by Ray's ids.
            pool_bytes: default: the setting, else a quarter of what each node has free.
            pool_path: a file for the pools; default: the setting.
            slab_bytes: the largest chunk that a pool can hold. Default: 64 MiB, or an eighth of a
                pool that is smaller than 512 MiB.
            deadline_s: for all of it.
            watch: called several times a second with how far each node is.

        Raises:
            ClusterError: no node matches, or Ray does not answer.
            SettingError: a setting is malformed.
        """
        settings = load_settings({})
        wish = pools.wish_of(settings, on, node_ids, pool_bytes, pool_path, slab_bytes)
        return pools.up(self.address, settings, wish, deadline_s, watch)

    def keep(self, deadline_s: float = pools.KEEP_S) -> list[Kept]:
        """Have all that the pools hold where it outlives the actors: on disks, in pool files.

        Returns:
            A row for each node; what a node does not answer is a problem in its row.

        Raises:
            ClusterError: Ray does not answer.
        """
        return pools.keep_pools(deadline_s)

    def down(self) -> int:
        """End all of RayKV's actors and free their pools; returns how many there were.

        Engines that still run go on without the cache, and start the actors again.

        Raises:
            ClusterError: Ray does not answer.
        """
        return ask.ask_ray(pools.stop_actors, CLIENT_S / 2, deadline_s=CLIENT_S)

    def close(self) -> None:
        """Leave the cluster, if `connect` joined it."""
        if self._joined_here:
            cluster.leave_ray(ray.shutdown, CLIENT_LEAVE_S)

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
            "no Ray cluster runs on this host under this user; name one with --ray-address"
        )
    cluster.join_within(address, CLIENT_JOIN_S)
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
    request_id: str, *, node_id: str | None = None, timeout_s: float = STATES_READ_S
) -> Any:
    """`Cluster.hidden_states` of the Ray cluster that this process is in, else of this host's.

    This process stays in it: the reference would be worth nothing outside.
    """
    return connect().hidden_states(request_id, node_id=node_id, timeout_s=timeout_s)


def clear(namespace: str | None = None, *, ray_address: str | None = None) -> None:
    """`Cluster.clear` of the cluster that `connect` finds."""
    with connect(ray_address) as connected:
        connected.clear(namespace)
