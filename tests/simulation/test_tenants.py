"""A tenant floods a node: what another one is guaranteed is still there, under load.

The block manager, its tables and the engines' views are real; copies succeed at once. A quiet
tenant asks for its prompts again and again, while a noisy one stores prompts that nobody asks for
twice. What a hit costs the quiet one is measured against the same requests without the noisy one.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from raykv.base.ids import Key, Lookup
from raykv.engine.requests import RequestOptions
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import Quota
from tests.fixtures.directory.tables import TABLES, use_table
from tests.simulation.test_lease_shares import MIB, SETTINGS, Node, chunk_key, inventory

POOL_CHUNKS = 200
PROMPTS, LENGTH = 10, 6
"""Of the quiet tenant: 60 chunks, of the 70 that it is guaranteed."""

REQUESTS, FLOOD = 80, 8
"""Of the quiet tenant, and of the noisy one for each of them."""

MOST_LOST = 0.05

LRU = dataclasses.replace(SETTINGS, eviction_policy="lru")


class SharedNode(Node):
    """A node whose engines serve two tenants; the block manager is asked to expire now and then."""

    def quota(self, name: str, guaranteed: float, most: float) -> None:
        quota = Quota(PROTOCOL_VERSION, name, name, guaranteed, most)
        assert not self.manager.tenants.set(quota, self.now).error

    def request(self, tenant: str, keys: list[Key], engine: int) -> int:
        """Load what is there, store the rest; how many chunks were there without a gap."""
        view, request_id = self.views[engine], f"{tenant} {self.now}"
        view.start_request(request_id, RequestOptions(tenant=tenant))
        found = 0
        for key in keys:
            if view.lookup(request_id, key, self.now) is not Lookup.HIT:
                break
            found += 1
        if found:
            view.prepare_load(keys[:found], request_id)
            view.complete_load(keys[:found])
        plan = view.prepare_store(request_id, keys)
        if plan is not None:
            view.complete_store(plan.keys)
            self.report(inventory(plan.keys, plan.handles, self.slot_bytes))
        view.finish_request(request_id)
        self.exchange()
        self.manager.expire(self.now)
        return found


def hits(*, floods: bool, has_quotas: bool, seed: int) -> int:
    """Chunks that the quiet tenant finds."""
    rng = random.Random(seed)
    node = SharedNode({0: MIB}, POOL_CHUNKS * MIB, num_engines=2)
    if has_quotas:
        node.quota("quiet", 0.35, 1.0)
        node.quota("noisy", 0.0, 0.6)
    found = 0
    for number in range(REQUESTS):
        prompt = rng.randrange(PROMPTS)
        keys = [chunk_key(prompt, at, 0) for at in range(LENGTH)]
        found += node.request("quiet", keys, rng.randrange(2))
        for flood in range(FLOOD if floods else 0):
            new = 1_000 + FLOOD * number + flood
            junk = [chunk_key(new, at, 0) for at in range(LENGTH)]
            node.request("noisy", junk, rng.randrange(2))
    return found


@pytest.mark.parametrize("table", TABLES)
def test_flood_costs_a_guaranteed_tenant_hardly_any_hits(
    monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    use_table(monkeypatch, table)
    alone = hits(floods=False, has_quotas=True, seed=0)
    flooded = hits(floods=True, has_quotas=True, seed=0)
    assert alone > REQUESTS // 2 * LENGTH
    assert flooded >= (1 - MOST_LOST) * alone, (flooded, alone)


def test_flood_costs_most_hits_where_nobody_has_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above measures something; with the least learned of policies."""
    use_table(monkeypatch, "dict")
    monkeypatch.setattr("tests.simulation.test_lease_shares.SETTINGS", LRU)
    alone = hits(floods=False, has_quotas=False, seed=0)
    flooded = hits(floods=True, has_quotas=False, seed=0)
    assert flooded < 0.5 * alone, (flooded, alone)
