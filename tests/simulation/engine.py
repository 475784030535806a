"""A vLLM engine as the simulation plays it: requests that look up, load, compute and store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raykv.base.ids import NO_GENERATION, ChunkName, Direction, Key, Lookup, Refusal
from raykv.engine.cost import FetchCost
from raykv.engine.fetches import fetch_request
from raykv.engine.hints import Hint
from raykv.engine.remote import ChunkSize, FetchOrder, RemoteChunks, RemoteSettings
from raykv.engine.requests import FailedLoad, RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handle
from raykv.protocol.peer import FetchResult
from tests.simulation.node import Job
from tests.simulation.session import FetchEnded, Identity, Session
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

LEASE_SLOTS = 4
LOOKUP_DEADLINE_S = 1.0
REMOTE = RemoteSettings(query_deadline_s=1.0, fetch_deadline_s=10.0, pending_deadline_s=2.0)
LONGEST_WAIT_S = {
    Lookup.RETRY: REMOTE.query_deadline_s,
    Lookup.HIT_PENDING: max(LOOKUP_DEADLINE_S, REMOTE.pending_deadline_s, REMOTE.fetch_deadline_s),
}
"""From the first such answer that a request gets to the last one."""


@dataclass(eq=False)
class Request:
    """A prompt of some chunks, in order. `hits` are loaded or being loaded, once it has begun.

    `waits_since` is when it was first told to wait, by answer.
    """

    request_id: str
    keys: list[Key]
    waits_since: dict[Lookup, float] = field(default_factory=dict)
    hits: list[Key] | None = None
    load: Job | None = None
    barred: set[Key] = field(default_factory=set)


class Engine:
    """One life of an engine: its view, its session and its requests."""

    def __init__(self, cluster: Cluster, identity: Identity) -> None:
        self.identity = identity
        self.view = EngineView(
            identity.engine_id,
            groups=[0],
            lookup_deadline_s=LOOKUP_DEADLINE_S,
            lease_slots=LEASE_SLOTS,
            remote=RemoteChunks(
                replace(REMOTE, sizes={0: ChunkSize(identity.slot_bytes, 1)}), FetchCost()
            ),
            node_id=identity.node_id,
        )
        self.session = Session(cluster, self.view, identity)
        self.requests: list[Request] = []
        self.is_link_up = True
        # How far its clock is ahead of the others', in seconds.
        self.clock_ahead_s = 0.0
        # What was computed up to this step of the world is from before the last reset.
        self.floor = 0
        self._cluster = cluster
        self._flying: list[Job] = []
        self._ended: deque[Job] = deque()
        self._calls: list[Call[FetchResult]] = []
        self._counter = 0

    @property
    def clock(self) -> float:
        return self._cluster.now + self.clock_ahead_s

    @property
    def is_busy(self) -> bool:
        """Whether it waits for something, or has something to take in."""
        return bool(self.requests or self._flying or self._calls or self.session.inbox)

    def die(self) -> None:
        """Its node drops what it has queued; the scheduler actor hears nothing of it."""
        self.session.die()
        for call in self._calls:
            call.forget()
        self._cluster.nodes[self.identity.node_id].drop_jobs(self.identity.engine_id)

    # Steps

    def step(self, computes: Callable[[], bool]) -> None:
        """One step of vLLM: results are taken in, requests scheduled, fetches ordered.

        `computes` says whether a request that waits for nothing gets its turn.
        """
        self.session.drain()
        while self._ended:
            self._take_result(self._ended.popleft())
        for request in list(self.requests):
            if request.hits is None:
                self._schedule(request)
            elif request.load is None and computes():
                self._compute(request)
        self._order_fetches()

    def begin(self, keys: list[Key], hint: Hint = Hint()) -> Request:  # noqa: B008 - it is frozen
        """A new request comes; a point between two steps."""
        self.session.drain()
        self._counter += 1
        request = Request(f"request-{self._counter}", keys)
        self.requests.append(request)
        self.view.start_request(request.request_id, RequestOptions())
        self.view.ask(request.request_id, keys)
        self.session.hints.begin(request.request_id, hint)
        return request

    def _schedule(self, request: Request) -> None:
        """Look its chunks up, as vLLM does: the longest prefix, or wait if some may still come."""
        hits: list[Key] = []
        waits = False
        for key in request.keys:
            found = self.view.lookup(request.request_id, key, self.clock)
            assert found is Lookup.MISS or key not in request.barred, (request, key, found)
            if found is Lookup.MISS:
                break
            if found is Lookup.HIT:
                hits.append(key)
            else:
                waits = True
                waited_s = self.clock - request.waits_since.setdefault(found, self.clock)
                assert waited_s < LONGEST_WAIT_S[found], f"{request}: {found} for {waited_s} s"
        if waits:
            return
        request.hits = hits
        if hits:
            handles = self.view.prepare_load(hits)
            assert all(handle.generation != NO_GENERATION for handle in handles), handles
            request.load = self._submit(Direction.LOAD, request, hits, handles)

    def _compute(self, request: Request) -> None:
        """What was not loaded is computed, and stored as far as there are leases."""
        assert request.hits is not None
        plan = self.view.prepare_store(request.request_id, request.keys[len(request.hits) :])
        if plan is not None and plan.keys:
            self._submit(Direction.STORE, request, plan.keys, plan.handles)
        self.requests.remove(request)
        self.view.finish_request(request.request_id)
        self._end_hints(request)

    def _end_hints(self, request: Request) -> None:
        self.session.hints.name_chunks(request.request_id, [request.keys])
        self.session.hints.end(request.request_id)

    # Copy jobs

    def _submit(
        self, direction: Direction, request: Request, keys: list[Key], handles: list[Handle]
    ) -> Job:
        identity = self.identity
        job = Job(
            owner=identity.engine_id,
            direction=direction,
            request_id=request.request_id,
            names=[
                ChunkName(
                    identity.namespace, key, handle.slot, handle.generation, identity.slot_bytes
                )
                for key, handle in zip(keys, handles, strict=True)
            ],
            node_epoch=self.view.node_epoch,
            made_at=self._cluster.tick,
            floor=self.floor,
            ended=self._ended.append,
        )
        self._flying.append(job)
        if self.is_link_up:
            self._cluster.nodes[identity.node_id].jobs.append(job)
        else:
            job.refuse_all(Refusal.NODE_LOST)
            self._ended.append(job)
        return job

    def _take_result(self, job: Job) -> None:
        """vLLM learns how a job ended: first what failed, then that it is over."""
        self._flying.remove(job)
        for chunk, refusal in job.refusals.items():
            name = job.names[chunk]
            if job.direction is Direction.STORE:
                self.view.fail_store(name.key, name.generation)
            else:
                self.view.fail_load(
                    FailedLoad(
                        job.request_id, name.key, name.generation, job.node_epoch, refusal.is_final
                    )
                )
        if not job.is_completed_by_vllm:
            return
        keys = [name.key for name in job.names]
        if job.direction is Direction.STORE:
            self.view.complete_store(keys)
        else:
            self.view.complete_load(keys)
            self._end_load(job)

    def _end_load(self, job: Job) -> None:
        """The request goes on with what was loaded, or is looked up again."""
        self._check_bytes(job)
        request = next((one for one in self.requests if one.load is job), None)
        if request is None:
            return
        request.load = None
        if job.refusals:
            request.barred.update(job.names[chunk].key for chunk in job.refusals)
            request.hits = None

    def _check_bytes(self, job: Job) -> None:
        for chunk, name in enumerate(job.names):
            if chunk in job.refusals:
                continue
            seen = job.seen[chunk]
            assert seen is not None, f"{name} was loaded in parts"
            is_right = (seen.namespace, seen.key) == (name.namespace, name.key)
            assert is_right, f"{name} was loaded but it is {seen}"
            assert seen.made_at > job.floor, f"{name} is of before a reset: {seen}"

    # Fetches

    def _order_fetches(self) -> None:
        orders = self.view.remote.take_orders()
        if orders:
            self._calls = [call for call in self._calls if call.is_open]
            self._calls.append(self._fetch(orders))
            self._cluster.wire.send(self._calls[-1])

    def _fetch(self, orders: list[FetchOrder]) -> Call[FetchResult]:
        identity = self.identity
        request = fetch_request(
            identity.namespace, orders, self.view.node_epoch, REMOTE.fetch_deadline_s
        )
        return Call(
            label=f"fetch of {[order.key[:2] for order in orders]} for {identity.engine_id}",
            ends=(identity.engine_id, f"pool of {identity.node_id}"),
            receive=lambda post: self._cluster.fetch(identity.node_id, request, post),
            answered=lambda result: self.session.inbox.append(FetchEnded(orders, result)),
            given_up=lambda: self.session.inbox.append(FetchEnded(orders, None)),
        )

    # What happens to it

    def reset(self) -> None:
        """vLLM empties its caches: it never completes the jobs from before."""
        self.view.reset()
        self.floor = self._cluster.tick
        for job in self._flying:
            job.is_completed_by_vllm = False
        for request in [one for one in self.requests if one.hits is not None]:
            self.requests.remove(request)
            self.view.finish_request(request.request_id)
            self._end_hints(request)

    def lose_link(self) -> None:
        """Its workers' connections to the NodeActor have broken; the scheduler learns of it."""
        self.is_link_up = False
        self.view.set_link(False)

    def find_link(self) -> None:
        """Its workers are connected again, and have reported all that was lost."""
        if not self._ended:
            self.is_link_up = True
            self.view.set_link(True)
            self.view.node_restarted(self._cluster.nodes[self.identity.node_id].epoch)
