"""Fetches of one node, as `raykv/node/fetch.py` does them: each chunk is read from one source
after the other; two fetches of one chunk share what is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from raykv.base.ids import ChunkName, Generation, Key, Namespace, Refusal
from raykv.node.fetch import wanted
from raykv.node.slots import SlotState
from raykv.protocol.columns import Handles, Keys, LostReplicas, Replica, Source
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.peer import FetchRequest, FetchResult, ReadReply, ReadRequest
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.node import Content, Node

A = TypeVar("A")

Post = Callable[[A], None]
ReadAnswer = tuple[ReadReply, "Content | None"]


@dataclass(eq=False)
class _Landing:
    """A chunk on its way, for all fetches that want it."""

    name: ChunkName
    replicas: deque[Replica]
    lost: list[tuple[Source, Key, Generation]]
    is_done: bool = False
    refusal: Refusal = Refusal.NODE_LOST
    call: Call[ReadAnswer] | None = None


@dataclass(eq=False)
class _Fetch:
    """One request on its way; some of its landings may be those of others."""

    post: Post[FetchResult]
    landings: list[_Landing]
    own: list[_Landing]
    lost: list[tuple[Source, Key, Generation]] = field(default_factory=list)


class Fetches:
    """Of one life of a NodeActor."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        self._node = node
        self._cluster = cluster
        self._under_way: list[_Fetch] = []
        self._flying: dict[tuple[Namespace, Key], _Landing] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def die(self) -> None:
        """The node is dead: no answer means anything to it."""
        for landing in self._flying.values():
            if landing.call is not None:
                landing.call.forget()
        self._flying.clear()
        self._under_way.clear()

    def begin(self, request: FetchRequest, post: Post[FetchResult]) -> None:
        """An engine wants chunks of other nodes."""
        if request.node_epoch != self._node.epoch:
            none = [0] * len(request.handles)
            refused = [int(Refusal.BAD_HANDLE)] * len(request.handles)
            post(FetchResult(self._node.epoch, refused, none, none))
            return
        fetch = _Fetch(post, [], [])
        self._under_way.append(fetch)
        for chunk, replicas in wanted(request):
            landing = _Landing(chunk, replicas, fetch.lost)
            name = (landing.name.namespace, landing.name.key)
            known = self._flying.get(name)
            fetch.landings.append(known or landing)
            if known is None:
                self._flying[name] = landing
                fetch.own.append(landing)
        for landing in fetch.own:
            refusal = self._node.begin_store(landing.name)
            if refusal is Refusal.NONE:
                self._read_next(landing)
            else:
                self._land(landing, refusal)
        self._answer()

    def end_late(self, number: int) -> None:
        """The deadline of a fetch has passed: what is not there won't come."""
        fetch = self._under_way.pop(number)
        for landing in fetch.own:
            if not landing.is_done:
                self._finish(landing, Refusal.TOO_LATE, None)
        self._post(fetch)
        self._answer()

    def _read_next(self, landing: _Landing) -> None:
        """Ask the next source for the chunk; when there is none left, it has failed."""
        if not landing.replicas:
            self._finish(landing, landing.refusal, None)
            return
        replica = landing.replicas.popleft()
        node_id, handle = replica.source.node_id, replica.handle
        name = landing.name
        request = ReadRequest(
            version=PROTOCOL_VERSION,
            namespace=name.namespace,
            node_epoch=replica.node_epoch,
            handles=Handles(Keys.of([name.key]), [handle.slot], [handle.generation]),
            slot_bytes=[name.slot_bytes],
        )
        landing.call = Call(
            label=f"read of {name.key[:2]!r} at {node_id} for {self._node.node_id}",
            ends=(self._node.node_id, node_id),
            receive=lambda post: self._cluster.read(node_id, request, post),
            answered=lambda answer: self._take(landing, replica, *answer),
            given_up=lambda: self._try_other(landing, Refusal.NODE_LOST),
        )
        self._cluster.wire.send(landing.call)

    def _take(
        self, landing: _Landing, replica: Replica, reply: ReadReply, content: Content | None
    ) -> None:
        refusal = Refusal(reply.refusals[0])
        if refusal is Refusal.NONE:
            self._finish(landing, Refusal.NONE, content)
            self._answer()
            return
        if refusal.is_final and reply.node_epoch == replica.node_epoch:
            row = (replica.source, landing.name.key, replica.handle.generation)
            landing.lost.append(row)
        self._try_other(landing, refusal)

    def _try_other(self, landing: _Landing, refusal: Refusal) -> None:
        landing.refusal = refusal
        self._read_next(landing)
        self._answer()

    def _finish(self, landing: _Landing, refusal: Refusal, content: Content | None) -> None:
        """The chunk is there, or won't be; what a source sends now comes too late."""
        if landing.call is not None:
            landing.call.forget()
        ok = refusal is Refusal.NONE
        state = self._node.end_store(landing.name, content, ok)
        if ok and state is not SlotState.READY:
            refusal = Refusal.CLEARED
        self._land(landing, refusal)

    def _land(self, landing: _Landing, refusal: Refusal) -> None:
        landing.refusal = refusal
        landing.is_done = True
        del self._flying[landing.name.namespace, landing.name.key]

    def _answer(self) -> None:
        """Tell those engines whose chunks have all landed."""
        ended = [fetch for fetch in self._under_way if all(one.is_done for one in fetch.landings)]
        for fetch in ended:
            self._under_way.remove(fetch)
            self._post(fetch)

    def _post(self, fetch: _Fetch) -> None:
        landings = fetch.landings
        refusals = [one.refusal if one.is_done else Refusal.TOO_LATE for one in landings]
        fetch.post(
            FetchResult(
                node_epoch=self._node.epoch,
                refusals=[int(refusal) for refusal in refusals],
                slots=[landing.name.slot for landing in landings],
                generations=[landing.name.generation for landing in landings],
                lost=LostReplicas.of(fetch.lost),
            )
        )
