"""Engines and tenants that share a pool which is not large: what they have stored is there when
they want it again.

The node's pool and the engines' views are real; copies succeed at once. A quiet tenant asks for
its prompts again and again, while a noisy one stores prompts that nobody asks for twice. What a hit
costs the quiet one is measured against the same requests without the noisy one.
"""

from __future__ import annotations

import random

import pytest

from raykv.base.ids import Direction, Key, Lookup, in_group
from raykv.base.settings import Settings
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob
from raykv.protocol.operator import OrderedShare
from tests.fixtures.keys import named_key
from tests.fixtures.place import CopyingPlace, engine_hello

POOL_CHUNKS = 192
PROMPTS, LENGTH = 10, 6
"""Of the quiet tenant: 60 chunks, of the 67 that it is guaranteed."""

REQUESTS, FLOOD = 80, 8
"""Of the quiet tenant, and of the noisy one for each of them."""

MOST_LOST = 0.05

BETWEEN_S = 1.0
"""Between two requests."""


class SharedNode:
    """A node of one pool, and engines of one model beside each other on it."""

    def __init__(self, num_slots: int, num_groups: int = 1, num_engines: int = 1) -> None:
        self.clock = 100.0
        self.num_jobs = 0
        self.num_groups = num_groups
        self.place = CopyingPlace(num_slots, lambda: self.clock)
        self.views = [EngineView(Settings(request_deadline_s=5.0)) for _ in range(num_engines)]
        for life, view in enumerate(self.views, 1):
            self.place.join(view, engine_hello(life=life, num_groups=num_groups))

    def ask(self, prompt: int, num_chunks: int, engine: int = 0, tenant: str = "") -> int:
        """A request for a prompt: load what is there, store the rest; how many chunks were there,
        up to the first one of which some group's part is missing.
        """
        view, request_id = self.views[engine], f"{prompt} {self.clock}"
        view.start_request(request_id, RequestOptions(tenant=tenant))
        groups = [
            [in_group(named_key(f"{prompt}-{at}"), group) for at in range(num_chunks)]
            for group in range(self.num_groups)
        ]
        found = num_chunks
        for keys in groups:
            hits = [view.lookup(request_id, key, self.clock) is Lookup.HIT for key in keys]
            found = min(found, [*hits, False].index(False))
        wanted = [key for keys in groups for key in keys[:found]]
        view.prepare_load(wanted, request_id)
        view.complete_load(wanted)
        offered = view.prepare_store(request_id, [key for keys in groups for key in keys])
        self._store(view, request_id, offered, tenant)
        view.finish_request(request_id)
        self.clock += BETWEEN_S
        for each in self.views:
            self.place.exchange(each)
            each.check()
        self.place.pool.check()
        return found

    def _store(self, view: EngineView, request_id: str, keys: list[Key], tenant: str) -> None:
        self.num_jobs += 1
        ones, nothing = Numbers.of([1] * len(keys)), Numbers.of([0] * len(keys))
        job = CopyJob(
            self.num_jobs,
            int(Direction.STORE),
            view.namespace,
            Keys.of(keys),
            ones,
            nothing,
            nothing,
            view.orders,
            tenant,
        )
        result = self.place.copy(view.life, job, {0: []}, [])
        view.end_store(0, request_id, keys, result, self.clock)
        view.complete_store(keys)


def rounds(node: SharedNode, num_prompts: int, num_chunks: int, count: int = 3) -> list[int]:
    """How many chunks are loaded in each round of the same prompts, one engine after the other."""
    return [
        sum(node.ask(each, num_chunks, each % len(node.views)) for each in range(num_prompts))
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_engines", [1, 2, 4])
def test_working_set_of_four_groups_that_fits_the_pool_is_loaded(num_engines: int) -> None:
    """28 chunks a group, where the pool has room for them and no more."""
    node = SharedNode(4 * 28, 4, num_engines)
    assert rounds(node, 4, 7) == [0, 28, 28]


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_what_one_step_stores_finds_room_in_a_small_pool_beside_other_engines(
    num_engines: int,
) -> None:
    """Of the benchmark `ttft`: 4,096 tokens at once, in a pool that is filled again and again."""
    node = SharedNode(POOL_CHUNKS, num_engines=num_engines)
    for prompt in range(12):
        node.ask(prompt, 32, engine=prompt % num_engines)
    assert sum(view.counters["chunks_stored"] for view in node.views) == 12 * 32


def test_first_prompts_of_a_model_with_three_groups_are_stored() -> None:
    node = SharedNode(3 * 64, 3)
    for prompt in range(8):
        node.ask(prompt, 8)
    assert [node.ask(prompt, 8) for prompt in range(8)] == [8] * 8


def hits(*, floods: bool, has_shares: bool, seed: int) -> int:
    """Chunks that the quiet tenant finds."""
    rng = random.Random(seed)
    node = SharedNode(POOL_CHUNKS, num_engines=2)
    if has_shares:
        node.place.share(
            quiet=OrderedShare("quiet", 0.35, 1.0), noisy=OrderedShare("noisy", 0.0, 0.6)
        )
    found = 0
    for number in range(REQUESTS):
        found += node.ask(rng.randrange(PROMPTS), LENGTH, rng.randrange(2), "quiet")
        for flood in range(FLOOD if floods else 0):
            node.ask(1000 + FLOOD * number + flood, LENGTH, rng.randrange(2), "noisy")
    return found


def test_flood_costs_a_guaranteed_tenant_hardly_any_hits() -> None:
    alone = hits(floods=False, has_shares=True, seed=0)
    flooded = hits(floods=True, has_shares=True, seed=0)
    assert alone > REQUESTS // 2 * LENGTH
    assert flooded >= (1 - MOST_LOST) * alone, (flooded, alone)


def test_flood_costs_many_hits_where_nobody_has_a_share() -> None:
    """So that the test above measures something."""
    alone = hits(floods=False, has_shares=False, seed=0)
    flooded = hits(floods=True, has_shares=False, seed=0)
    assert flooded < 0.8 * alone, (flooded, alone)
