"""A vLLM engine as the simulation plays it: requests that look up, load, compute and store.

It has several requests at a time, and several steps under way: what its ranks say of a job comes
some steps later, one after the other. What it loads it compares with what was asked for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from raykv.base.ids import (
    Blocks,
    Direction,
    EngineId,
    Key,
    Lookup,
    Namespace,
    NodeId,
    Refusal,
    Stamp,
    part_of,
)
from raykv.base.settings import Settings
from raykv.engine.listed import SILENT_S, ListedPlace
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import EngineHello
from raykv.protocol.listing import ALL_READ, Where
from tests.simulation.nodes.content import BLOCKS, BlockBytes, KVCache, blocks_of
from tests.simulation.nodes.jobs import EngineJob, Line, RankJob
from tests.simulation.nodes.models import NARROW, WHOLE, Model, Prompt
from tests.simulation.nodes.talk import EngineTalk

if TYPE_CHECKING:
    from tests.simulation.nodes.cluster import Cluster

SETTINGS = Settings(request_deadline_s=10.0)
LONGEST_WAIT_S = {
    Lookup.RETRY: SETTINGS.query_s,
    Lookup.HIT_PENDING: SETTINGS.request_deadline_s,
}
"""From the first such answer that a request gets to the last one."""


class WrongBytesError(AssertionError):
    """An engine has loaded what is not what it asked for: the gravest of all."""


@dataclass(frozen=True)
class Seats:
    """Who an engine is, and where its ranks run."""

    engine_id: EngineId
    model: Model
    node_ids: tuple[NodeId, ...]


@dataclass(eq=False)
class Prefill:
    """A request. `found`: the chunks that it has loaded or is loading, once it has begun; `done`:
    those that it has. `waits_since` is when it was first told to wait, by answer.
    """

    request_id: str
    prompt: Prompt
    tenant: str
    waits_since: dict[Lookup, float] = field(default_factory=dict)
    blocks: dict[Key, list[int]] = field(default_factory=dict)
    found: int | None = None
    done: int = 0
    load: EngineJob | None = None
    num_jobs: int = 0
    barred: set[Key] = field(default_factory=set)
    expected: int = 0
    is_over: bool = False

    def __repr__(self) -> str:
        return f"{self.request_id} ({'.'.join(self.prompt.chunks)})"


class PlayedEngine:
    """One life of an engine: its view, its ranks and its requests."""

    def __init__(self, cluster: Cluster, seats: Seats, life: int, num_blocks: int) -> None:
        self.seats, self.life = seats, life
        self.model = seats.model
        self._cluster = cluster
        self._weights = 0
        # How far its clock is ahead of the others', in seconds.
        self.ahead_s = 0.0
        self.kv = KVCache(self.model.num_ranks, num_blocks)
        self.view = EngineView(SETTINGS, self.model.sizes())
        self.places = self.model.places(seats.node_ids, life)
        hello = replace(self.hello(0), namespace=self.namespace)
        self.view.begin(hello, self.places, self.clock)
        self.talk = EngineTalk(cluster, self)
        self.requests: list[Prefill] = []
        self.flying: list[EngineJob] = []
        # By place and rank there.
        self.lines: dict[tuple[int, int], Line] = {}
        # By namespace: what was offered up to that step of the world is from before its last reset.
        self.floors: dict[Namespace, int] = {}
        # By place, the orders that it has shown.
        self.told: list[set[Stamp]] = [set() for _ in seats.node_ids]
        self.heard_at = [self.clock for _ in seats.node_ids]
        self.num_loads_failed = 0
        self._is_calm = self.is_frozen = False
        # Of chunks that were surely there, how many there were, and how many were found.
        self.num_expected = self.num_met = 0
        # Chunks of which other blocks were wanted than there are: nothing is heard of them until
        # they are stored anew.
        self.distrusted: dict[Key, Prompt] = {}
        self._results: deque[tuple[RankJob, CopyResult]] = deque()
        self._outbox: dict[tuple[int, int], list[RankJob]] = {}
        self._num_requests = self._num_jobs = 0
        # Those whose blocks are not free yet.
        self._known: dict[str, Prefill] = {}

    def __repr__(self) -> str:
        return f"{self.seats.engine_id} (life {self.life})"

    @property
    def clock(self) -> float:
        return self._cluster.now + self.ahead_s

    @property
    def namespace(self) -> Namespace:
        return self.model.namespace(self._weights)

    def namespace_at(self, place: int) -> Namespace:
        """Of the part that is there."""
        return part_of(self.namespace, self.places[place].part)

    @property
    def is_busy(self) -> bool:
        """Whether it waits for something, or has something to take in."""
        return self.has_requests or self.talk.is_busy

    @property
    def has_requests(self) -> bool:
        """Whether some are not over, or their copies are not."""
        return bool(self.requests or self.flying or self._results)

    def hello(self, place: int) -> EngineHello:
        """Who it is, at one of its places."""
        return EngineHello(
            self.seats.engine_id,
            self.life,
            self.namespace_at(place),
            self.model.name,
            self.model.ranks[place],
            self.model.slot_bytes(),
        )

    # Steps

    def step(self, rng: random.Random, *, is_calm: bool = False) -> None:
        """One step of vLLM: news and results are taken in, requests go on, jobs go out.

        In a calm one all that can happen does.
        """
        self._is_calm = is_calm
        self.view.look(self.clock)
        self.talk.take_news()
        self._take_results(rng, is_calm=is_calm)
        for request in list(self.requests):
            if request.found is None:
                self._schedule(request, rng)
            elif request.load is None and (is_calm or rng.random() < 0.5):
                self._compute(request, rng)
        self.talk.order_fetches()
        self._send()
        self._free_blocks()
        self.view.look(self.clock)

    def begin(self, prompt: Prompt, tenant: str, expected: int = 0) -> Prefill:
        """A new request comes; a point between two steps."""
        self._num_requests += 1
        request = Prefill(f"{self.life}.{self._num_requests}", prompt, tenant, expected=expected)
        self.requests.append(request)
        self._known[request.request_id] = request
        self.view.start_request(request.request_id, RequestOptions(tenant=tenant))
        for group in range(len(self.model.groups)):
            keys = self.model.keys(group, prompt)
            self.view.ask(request.request_id, keys)
            found = {key for _, key in self.view.found._rows}
            untold = [key for key in keys if key in self.view.loadable and key not in found]
            assert not untold, f"{self} tells nobody that {request} has found {untold}"
        return request

    def _schedule(self, request: Prefill, rng: random.Random) -> None:
        """Look its chunks up, as vLLM does, or wait if some may still come."""
        if not request.blocks and not self._has_blocks(request):
            return
        self.view.touch(request.request_id, self.clock)
        found = self._prefix(request)
        if found is None:
            return
        request.found = request.done = found
        self.num_met += min(found, request.expected)
        self.num_expected += request.expected
        request.expected = 0
        if found:
            self._load(request, found, rng)

    def _has_blocks(self, request: Prefill) -> bool:
        """Give it all the blocks that its prompt takes, if they are free."""
        keys = [
            key
            for group in range(len(self.model.groups))
            for key in self.model.keys(group, request.prompt)
        ]
        if self.kv.num_free < len(keys) * BLOCKS:
            return False
        for key in keys:
            request.blocks[key] = self.kv.take(BLOCKS)
        return True

    def _prefix(self, request: Prefill) -> int | None:
        """The longest prefix that can be loaded: all chunks of some groups, and of others those of
        the window that it ends with. None: it is not known yet.
        """
        waits, end = False, len(request.prompt)
        full, windows = self._groups()
        for group in full:
            keys = self.model.keys(group, request.prompt)[:end]
            answers = list(self._answers(request, keys))
            waits |= any(each is not Lookup.HIT for each in answers[:end])
            end = len(answers)
        while end:
            of_windows = [
                self._lookup(request, self.model.keys(group, request.prompt)[at])
                for group in windows
                for at in self.model.needed(group, end)
            ]
            if Lookup.MISS not in of_windows:
                waits |= any(each is not Lookup.HIT for each in of_windows)
                break
            end -= 1
        return None if waits and end else end

    def _groups(self) -> tuple[list[int], list[int]]:
        """Those of full attention, and the others."""
        numbered = list(enumerate(self.model.groups))
        full = [group for group, each in numbered if each.window is None]
        return full, [group for group, each in numbered if each.window is not None]

    def _answers(self, request: Prefill, keys: Sequence[Key]) -> Iterator[Lookup]:
        """Up to the first MISS."""
        for key in keys:
            found = self._lookup(request, key)
            if found is Lookup.MISS:
                return
            yield found

    def _lookup(self, request: Prefill, key: Key) -> Lookup:
        found = self.view.lookup(request.request_id, key, self.clock)
        assert found is Lookup.MISS or key not in request.barred, (request, key, found)
        if found is Lookup.HIT:
            assert key in self.view.loadable, (request, key)
            for node_id, heard_at in zip(self.seats.node_ids, self.heard_at, strict=True):
                silent_s = self.clock - heard_at
                assert silent_s < SILENT_S, f"{self}: HIT at {node_id}, silent for {silent_s} s"
        if found in LONGEST_WAIT_S:
            waited_s = self.clock - request.waits_since.setdefault(found, self.clock)
            assert waited_s < LONGEST_WAIT_S[found], f"{request}: {found} for {waited_s} s"
        return found

    def _load(self, request: Prefill, end: int, rng: random.Random) -> None:
        rows = []
        for group in range(len(self.model.groups)):
            keys = self.model.keys(group, request.prompt)
            rows += [
                (keys[at], self._range(rng, group, at, end)) for at in self.model.needed(group, end)
            ]
        self.view.prepare_load([key for key, _ in rows], request.request_id)
        request.load = self._submit(Direction.LOAD, request, rows)

    def _compute(self, request: Prefill, rng: random.Random) -> None:
        """Some chunks that were not loaded are computed, and stored as far as they are wanted."""
        begin, end = request.done, min(request.done + rng.randint(1, 2), len(request.prompt))
        rows: dict[Key, Blocks] = {}
        for group in range(len(self.model.groups)):
            keys = self.model.keys(group, request.prompt)
            for at in range(begin, end):
                self._fill(keys[at], request.blocks[keys[at]])
                rows[keys[at]] = self._range(rng, group, at, end)
        offered = self.view.prepare_store(request.request_id, list(rows))
        if offered:
            self._submit(Direction.STORE, request, [(key, rows[key]) for key in offered])
        request.done = end
        if end == len(request.prompt):
            self._finish(request)

    def _range(self, rng: random.Random, group: int, at: int, end: int) -> Blocks:
        """What a load wants of a chunk, or a store has of it: of the chunk in which a window begins
        only a part may be needed.
        """
        window = self.model.groups[group].window
        begins = window is not None and at == end - window
        is_whole = self._is_calm or self._cluster.is_calm
        return NARROW if begins and not is_whole and rng.random() < 0.5 else WHOLE

    def _fill(self, key: Key, blocks: list[int]) -> None:
        """All ranks have computed a chunk."""
        for rank in range(self.model.num_ranks):
            for block, block_id in enumerate(blocks):
                made = BlockBytes(
                    self.namespace, key, block, rank, self.view.orders, self._cluster.tick
                )
                self.kv.write(rank, block_id, made)

    def _finish(self, request: Prefill) -> None:
        """It wants nothing any more; its blocks are free when its copies have ended."""
        self.requests.remove(request)
        request.is_over = True
        self.view.finish_request(request.request_id)
        self.talk.request_ended(request)

    def _free_blocks(self) -> None:
        for request in [one for one in self._known.values() if one.is_over and not one.num_jobs]:
            del self._known[request.request_id]
            self.kv.give_back(block for blocks in request.blocks.values() for block in blocks)

    # Copy jobs

    def _submit(
        self, direction: Direction, request: Prefill, rows: list[tuple[Key, Blocks]]
    ) -> EngineJob:
        self._num_jobs += 1
        ranges = [blocks for _, blocks in rows]
        job = EngineJob(
            job_id=self._num_jobs,
            direction=direction,
            request_id=request.request_id,
            prompt=request.prompt,
            namespace=self.namespace,
            keys=[key for key, _ in rows],
            ranges=ranges,
            block_ids=[[request.blocks[key][at] for at in blocks_of(some)] for key, some in rows],
            orders=self.view.orders,
            tenant=request.tenant,
            told=[set(each) for each in self.told],
            floor=self.floors.get(self.namespace, 0),
            made_at=self._cluster.tick,
            num_left=self.model.num_ranks,
        )
        self.flying.append(job)
        request.num_jobs += 1
        for place, rank in self.ranks():
            part = self.places[place].part
            mine = RankJob(job, place, part, self.rank_at(place, rank), self.kv, self._ends)
            self._outbox.setdefault((place, rank), []).append(mine)
        return job

    def _ends(self, job: RankJob, result: CopyResult) -> None:
        self._results.append((job, result))

    def surely_known(self, prompt: Prompt) -> int:
        """How many chunks of a prompt were stored long ago, where nothing is evicted."""
        for at in range(len(prompt)):
            for group in range(len(self.model.groups)):
                key = self.model.keys(group, prompt)[at]
                if not self._cluster.was_stored(self, key):
                    return at
        return len(prompt)

    def ranks(self) -> list[tuple[int, int]]:
        """Each with its place, and its number there."""
        return [
            (place, rank)
            for place, num_ranks in enumerate(self.model.ranks)
            for rank in range(num_ranks)
        ]

    def rank_at(self, place: int, rank: int) -> int:
        """Its number of all ranks."""
        return sum(self.model.ranks[:place]) + rank

    def _send(self) -> None:
        """A step's jobs go out: one message from each rank."""
        outbox, self._outbox = self._outbox, {}
        for at, jobs in outbox.items():
            line = self.lines.get(at)
            if line is None or not line.is_open:
                for job in jobs:
                    job.lose(0)
            else:
                self._cluster.send_jobs(line, jobs)

    def _take_results(self, rng: random.Random, *, is_calm: bool) -> None:
        """What ranks say comes in any order, some of it later."""
        results = list(self._results)
        self._results.clear()
        rng.shuffle(results)
        for job, result in results:
            if is_calm or rng.random() < self._cluster.results_share:
                self._take_result(job, result)
            else:
                self._results.append((job, result))

    def _take_result(self, rank_job: RankJob, result: CopyResult) -> None:
        """vLLM learns how a rank's job ended: first what failed, then that all have ended it."""
        job = rank_job.job
        end = self.view.end_load if job.direction is Direction.LOAD else self.view.end_store
        place = self.view._places[rank_job.place].listed
        trusted = [key for key in job.keys if key not in place._distrusted]
        before = {key: place.ready.get(key) for key in trusted}
        is_known = place.position.life == result.life and not place.is_silent(self.clock)
        early = {key: place._early.get(key, 0) for key in job.keys}
        end(rank_job.place, job.request_id, job.keys, result, self.clock)
        self._check_old_result(place, before, result)
        if is_known and result.number > place.position.number:
            self._check_early_result(place, early, result)
        job.failed.update(result.failed_chunks)
        if job.direction is Direction.LOAD:
            self.note_other_blocks(job, result)
        job.num_left -= 1
        if not job.num_left:
            self._complete(job)

    def _check_old_result(
        self, place: ListedPlace, before: dict[Key, Blocks | None], result: CopyResult
    ) -> None:
        """What was read since a result counts, but for what the result is about."""
        position = place.position
        is_old = (result.life, result.number) < (position.life, position.number)
        if not is_old or position.place != ALL_READ:
            return
        there = {row.key: row.blocks for row in result.rows}
        for key, blocks in before.items():
            is_same = blocks in (place.ready.get(key), there.get(key))
            assert is_same, f"{self} believes an old result about {key!r}, which has {blocks}"

    def _check_early_result(
        self, place: ListedPlace, early: dict[Key, int], result: CopyResult
    ) -> None:
        """What a result says counts before the listing comes to it."""
        if Refusal.PARTIAL in result.refusals:
            return
        for row in result.rows:
            is_own = row.namespace == place.namespace
            if is_own and early[row.key] <= result.number:
                blocks = row.blocks if row.where & Where.RAM else None
                believed = place.ready.get(row.key)
                assert believed == blocks, f"{self} believes {believed} of {row}"

    def note_other_blocks(self, job: EngineJob, result: CopyResult) -> None:
        for at, refusal in zip(result.failed_chunks, result.refusals, strict=True):
            if refusal == Refusal.PARTIAL and job.namespace == self.namespace:
                self.distrusted[job.keys[at]] = self._known[job.request_id].prompt

    def _complete(self, job: EngineJob) -> None:
        self.flying.remove(job)
        self._known[job.request_id].num_jobs -= 1
        if job.direction is Direction.LOAD:
            self._check_bytes(job)
        if not job.is_completed_by_vllm:
            return
        if job.direction is Direction.STORE:
            self.view.complete_store(job.keys)
            if not job.failed:
                self._cluster.note_stored(self, job.keys)
            return
        self.view.complete_load(job.keys)
        request = self._known[job.request_id]
        if request.load is not job:
            return
        request.load = None
        if job.failed:
            self.num_loads_failed += 1
            request.barred.update(job.keys[at] for at in job.failed)
            request.found = None

    def _check_bytes(self, job: EngineJob) -> None:
        """All that a load has brought is right, and was not to be forgotten."""
        for at, (key, some, ids) in enumerate(
            zip(job.keys, job.ranges, job.block_ids, strict=True)
        ):
            if at in job.failed:
                continue
            for place, rank in self.ranks():
                number = self.rank_at(place, rank)
                for block, block_id in zip(blocks_of(some), ids, strict=True):
                    seen = self.kv.read(number, block_id)
                    what = f"{self} loaded block {block} of {key!r}, rank {number}"
                    if seen is None or not seen.is_of(job.namespace, key, block, number):
                        raise WrongBytesError(f"{what}, and got {seen}")
                    if seen.made_at <= job.floor:
                        raise WrongBytesError(f"{what}: of before a reset: {seen}")
                    for told in sorted(job.told[place]):
                        if self._cluster.was_cleared(seen, told):
                            raise WrongBytesError(f"{what}: void by the orders {told}: {seen}")

    # What happens to it

    def connect(self, place: int, rank: int) -> bool:
        """A rank that has no line looks for its node; False if it does not answer."""
        node = self._cluster.nodes[self.seats.node_ids[place]]
        if node.is_frozen:
            return False
        self.lines[place, rank] = node.open_line(self.life, place, rank, self.model.ranks[place])
        self._show_lines(place)
        return True

    def _show_lines(self, place: int) -> None:
        """The view hears to which life of a place all ranks there are connected."""
        lives = {
            line.node.life if (line := self.lines.get((place, rank))) and line.is_open else None
            for rank in range(self.model.ranks[place])
        }
        self.view.set_line(place, lives.pop() if len(lives) == 1 else None, self.clock)

    def line_broke(self, line: Line) -> None:
        """A rank's connection is gone."""
        line.is_open = False
        if line.node.is_dead:
            line.lose_all()
        self._show_lines(line.place)

    def reset(self) -> None:
        """vLLM empties its caches: it never completes the jobs from before."""
        self.view.reset()
        self.floors[self.namespace] = self._cluster.tick
        self._abort([one for one in self.requests if one.found is not None])
        for job in self.flying:
            job.is_completed_by_vllm = False

    def leave(self) -> None:
        """Other weights are about to come."""
        self.view.leave(self.clock)
        self._abort(list(self.requests))

    def enter(self) -> None:
        """They are there."""
        self._weights = 1 - self._weights
        self.view.enter(self.namespace, self.clock)
        self.talk.introduce_again()

    def _abort(self, requests: list[Prefill]) -> None:
        for request in requests:
            self._finish(request)

    def die(self, frozen: tuple[int, int] | None = None) -> None:
        """The engine is dead, but for a rank that is frozen and knows nothing of it."""
        self.talk.die()
        for at, line in self.lines.items():
            line.is_open = line.is_open and at == frozen

    def thaw(self) -> None:
        """A rank that was frozen finds its engine dead."""
        for line in self.lines.values():
            line.is_open = False
