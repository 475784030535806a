"""Tenants share a node's pool: what each is guaranteed, what it can take, and what is lent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raykv.base.ids import Epoch, Key, MissReason, NodeId, TokenSource
from raykv.base.tenants import salt_label
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.directory.table.protocol import MAX_OWNERS
from raykv.directory.tenants.quotas import MAX_WITHOUT_QUOTA
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.engine import MissRecord, Owned
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import (
    DiskNews,
    DiskOrder,
    DiskStats,
    Inventory,
    NodeReportReply,
    NodeStats,
)
from raykv.protocol.operator import MAX_QUOTAS, Quota
from raykv.protocol.reader import ChunkQuery, chunks_of
from tests.fixtures.directory.desk import MODEL, NOTHING, PAGE, Desk

SETTINGS = ManagerSettings(engine_expiry_s=1e9, node_expiry_s=1e9, settle_s=0, pin_s=0.0)
SLOTS = 16
QUIET, NOISY = "quiet", "noisy"

pytestmark = pytest.mark.usefixtures("table")


class Tenancy(Desk):
    """One node of so many slots, and an engine whose requests are of several tenants."""

    def __init__(self, slots: int = SLOTS, pin_s: float = 0.0) -> None:
        settings = replace(SETTINGS, pin_s=pin_s)
        super().__init__(BlockManager(Epoch(1), settings), slots=slots, asker="engine")
        # Of all reports, and what the node's disk was told.
        self.fields: dict[str, Any] = {}
        self.orders: list[DiskOrder] = []
        self.report("node")
        self.attach("engine", "node")

    def report(self, node: str, stored: Inventory = NOTHING, **fields: Any) -> NodeReportReply:
        reply = super().report(node, stored, **self.fields, **fields)
        self.orders.append(reply.disk)
        return reply

    def quota(self, name: str, guaranteed: float = 0.0, most: float = 1.0, label: str = "") -> str:
        tenant = "" if name == "others" else label or name
        quota = Quota(PROTOCOL_VERSION, name, tenant, guaranteed, most)
        answer = self.manager.tenants.set(quota, self.now)
        self.manager.check()
        return answer.error

    def store_for(self, tenant: str, *names: str) -> None:
        """A request of a tenant stores chunks, one after the other."""
        for name in names:
            granted = self.sync("engine", wanted={0: 1}).granted
            assert len(granted.slots) == 1, name
            if tenant:
                owned = Owned([tenant], [0], granted.slots, granted.generations)
                self.sync("engine", owned=owned)
            handles = Handles(Keys.of([self.key(name)]), granted.slots, granted.generations)
            self.arrive("node", handles)

    def use_for(self, tenant: str, *names: str) -> None:
        """A request of a tenant loads chunks."""
        book = self.manager._nodes[NodeId("node")].book
        chunks = [book.find(MODEL, Key(self.key(name))) for name in names]
        held = [chunk for chunk in chunks if chunk is not None]
        assert len(held) == len(names)
        slots, generations = [each.slot for each in held], [each.generation for each in held]
        owned = Owned([tenant], [0] * len(held), [*slots], [*generations])
        self.sync("engine", touched=Keys.of([self.key(name) for name in names]), owned=owned)

    def held(self, *names: str) -> list[str]:
        book = self.manager._nodes[NodeId("node")].book
        return [name for name in names if book.find(MODEL, Key(self.key(name))) is not None]

    def pages(self) -> dict[str, int]:
        return {each.name: each.pool_bytes // PAGE for each in self.manager.tenant_status()}

    def tick(self) -> None:
        self.now += 1
        self.manager.expire(self.now)
        self.manager.check()


def named(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def test_flood_evicts_what_its_tenant_has_above_its_guarantee() -> None:
    desk = Tenancy()
    assert not desk.quota(QUIET, 0.5)
    desk.store_for(QUIET, *named("q", 8))
    desk.store_for(NOISY, *named("n", 100))
    assert desk.held(*named("q", 8)) == named("q", 8)
    assert desk.held(*named("n", 100)) == named("n", 100)[-8:]
    assert desk.pages() == {"others": 0, QUIET: 8, NOISY: 8}


def test_flood_takes_all_where_nobody_has_a_quota() -> None:
    desk = Tenancy()
    desk.store_for(QUIET, *named("q", 8))
    desk.store_for(NOISY, *named("n", 100))
    assert not desk.held(*named("q", 8))


def test_unused_share_is_lent_and_comes_back() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.5)
    desk.store_for(NOISY, *named("n", 16))
    assert desk.held(*named("n", 16)) == named("n", 16)
    desk.store_for(QUIET, *named("q", 8))
    assert desk.held(*named("n", 16), *named("q", 8)) == [*named("n", 16)[8:], *named("q", 8)]


def test_what_is_lent_is_lent_in_equal_parts() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.25)
    desk.quota(NOISY, 0.25)
    desk.store_for(QUIET, *named("q", 16))
    desk.store_for(NOISY, *named("n", 100))
    pages = desk.pages()
    assert pages[QUIET] + pages[NOISY] == SLOTS
    assert abs(pages[QUIET] - pages[NOISY]) <= 2


def test_greatest_share_holds_while_slots_are_free() -> None:
    desk = Tenancy()
    desk.quota(NOISY, most=0.25)
    for number in range(10):
        desk.store_for(NOISY, f"n{number}")
        desk.tick()
    assert desk.held(*named("n", 10)) == named("n", 10)[-4:]


def test_tenant_above_its_greatest_share_gives_up_first() -> None:
    desk = Tenancy()
    desk.quota(NOISY, most=0.25)
    desk.store_for("", *named("o", 10))
    desk.store_for(NOISY, *named("n", 6))
    desk.store_for("", "o10", "o11")
    assert desk.held(*named("o", 12)) == named("o", 12)
    assert desk.held(*named("n", 6)) == named("n", 6)[2:]


def test_nobody_goes_below_a_guarantee_unless_nothing_else_is_left() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.75)
    desk.store_for(QUIET, *named("q", 12))
    # The other four slots are leased.
    granted = desk.sync("engine", wanted={0: 4}).granted
    assert desk.held(*named("q", 12)) == named("q", 12)
    assert len(desk.sync("engine", wanted={0: 1}).granted.slots) == 1
    assert desk.held(*named("q", 12)) == named("q", 12)[1:]
    assert len(granted.slots) == 4


def test_tenant_that_loads_all_the_time_keeps_nothing_from_another_one() -> None:
    """What was just loaded is not evicted for a while; that takes nobody's guarantee."""
    desk = Tenancy(pin_s=10.0)
    desk.quota(QUIET, 0.5)
    desk.store_for(QUIET, *named("q", 8))
    desk.store_for(NOISY, *named("n", 8))
    desk.sync("engine", pinned=Keys.of([desk.key(name) for name in named("n", 8)]))
    assert desk.sync("engine", wanted={0: 4}).granted.slots == []
    assert desk.held(*named("q", 8)) == named("q", 8)
    desk.now += 11
    assert len(desk.sync("engine", wanted={0: 4}).granted.slots) == 4
    assert desk.held(*named("q", 8)) == named("q", 8)


def test_chunks_that_are_pinned_for_long_starve_nobody() -> None:
    desk = Tenancy(pin_s=600.0)
    desk.quota(QUIET, 0.5)
    desk.store_for(QUIET, *named("q", 8))
    desk.store_for(NOISY, *named("n", 8))
    desk.sync("engine", pinned=Keys.of([desk.key(name) for name in named("n", 8)]))
    assert len(desk.sync("engine", wanted={0: 1}).granted.slots) == 1


def test_tenants_without_a_quota_are_one() -> None:
    """Who calls itself by many names gets no more."""
    desk = Tenancy()
    desk.quota(QUIET, 0.25)
    desk.store_for(QUIET, *named("q", 10))
    for number in range(30):
        desk.store_for(f"name {number}", f"n{number}")
    assert desk.pages()[QUIET] == 10


def test_others_can_have_a_quota_too() -> None:
    desk = Tenancy()
    desk.quota("others", 0.0, 0.25)
    for number in range(12):
        desk.store_for(f"name {number % 3}", f"n{number}")
    desk.tick()
    assert len(desk.held(*named("n", 12))) == 4


def test_chunk_belongs_to_the_first_who_stored_or_used_it() -> None:
    desk = Tenancy()
    desk.store_for(QUIET, "a")
    desk.store_for("", "b")
    desk.use_for(NOISY, "a", "b")
    desk.use_for(QUIET, "b")
    assert desk.pages() == {"others": 0, QUIET: 1, NOISY: 1}


def test_quota_counts_what_its_tenant_has_stored_before() -> None:
    desk = Tenancy()
    desk.store_for(QUIET, *named("q", 8))
    desk.quota(QUIET, 0.5)
    desk.store_for(NOISY, *named("n", 100))
    assert desk.held(*named("q", 8)) == named("q", 8)


def test_tenant_is_one_of_the_others_once_its_quota_is_removed() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.5)
    desk.store_for(QUIET, *named("q", 8))
    assert desk.manager.tenants.remove(QUIET)
    assert not desk.manager.tenants.remove(QUIET)
    desk.store_for(NOISY, *named("n", 100))
    assert not desk.held(*named("q", 8))


def test_node_that_joins_later_is_shared_too() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.5)
    desk.epochs["node"] = 8
    desk.report("node")
    desk.store_for(QUIET, *named("q", 8))
    desk.store_for(NOISY, *named("n", 100))
    assert desk.held(*named("q", 8)) == named("q", 8)


def test_quota_of_a_salt_has_the_name_that_it_was_given() -> None:
    desk = Tenancy()
    label = salt_label("a secret")
    desk.quota("acme", 0.5, label=label)
    desk.store_for(label, "a")
    (_, acme) = desk.manager.tenant_status()
    assert (acme.name, acme.tenant, acme.pool_bytes) == ("acme", label, PAGE)
    assert "secret" not in str(acme)


def test_quota_that_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    desk = Tenancy()
    assert not desk.quota("a", 0.5)
    assert "all together at most 0.75" in desk.quota("b", 0.5)
    assert "'a' is of the same tenant" in desk.quota("c", 0.1, label="a")
    assert not desk.quota("a", 0.75), "its own earlier one does not count"
    for number in range(MAX_QUOTAS - 1):
        assert not desk.quota(f"tenant {number}")
    assert "64 quotas already" in desk.quota("one more")
    assert len([each for each in desk.manager.tenant_status() if each.has_quota]) == MAX_QUOTAS


def test_tenants_beyond_those_that_are_distinguished_are_others() -> None:
    desk = Tenancy(slots=MAX_WITHOUT_QUOTA + 8)
    for number in range(MAX_WITHOUT_QUOTA + 2):
        desk.store_for(f"tenant {number}", f"n{number}")
    assert desk.pages()["others"] == 2
    # Numbers of tenants without chunks are free again, but not at once.
    desk.manager.clear()
    desk.store_for("early", "early")
    assert desk.pages() == {"others": 1}
    desk.now += 100
    desk.store_for("late", "late")
    assert desk.pages() == {"others": 1, "late": 1}


def test_quotas_find_room_however_many_salts_clients_use() -> None:
    desk = Tenancy(slots=MAX_OWNERS + 8)
    for number in range(MAX_OWNERS + 1):
        desk.store_for(salt_label(f"random {number}"), f"n{number}")
    assert [desk.quota(f"tenant {number}") for number in range(MAX_QUOTAS)] == [""] * MAX_QUOTAS
    desk.store_for("tenant 63", "own")
    assert desk.pages()["tenant 63"] == 1
    # No salt takes the place of one whose quota ends.
    assert desk.manager.tenants.remove("tenant 1")
    desk.now += 100
    desk.store_for(salt_label("one more"), "more")
    desk.now += 100
    assert desk.quota("next") == ""


def test_miss_of_what_a_quota_has_evicted_says_so() -> None:
    desk = Tenancy()
    desk.quota(NOISY, 0.0, 0.5)
    desk.store_for("", *named("o", 8))
    desk.store_for(NOISY, *named("n", 9))
    desk.tick()
    assert not desk.held("n0")
    missed = {str(MissReason.EVICTED): 32, str(MissReason.INCOMPLETE_CHUNK): 3}
    record = MissRecord("request", 35, 0, 0, missed, missing=desk.key("n0"), tenant=NOISY)
    assert desk.sync("engine", finished=[record]).refined == {str(MissReason.QUOTA): 32}
    (found,) = desk.manager.why_miss("request", desk.now).found
    assert found.record.missed == {str(MissReason.QUOTA): 32, str(MissReason.INCOMPLETE_CHUNK): 3}
    assert found.record.tenant == NOISY


def test_miss_of_what_was_evicted_without_a_quota_stays_evicted() -> None:
    desk = Tenancy()
    desk.quota(QUIET, 0.5)
    desk.store_for("", *named("o", 20))
    record = MissRecord("request", 32, 0, 0, {"evicted": 32}, missing=desk.key("o0"))
    assert desk.sync("engine", finished=[record]).refined == {}


def test_disk_gets_what_is_evicted_with_its_tenant_and_the_shares() -> None:
    desk = Tenancy()
    disk = DiskStats(path="/disk", room=100, tenant_bytes={NOISY: 5 * PAGE})
    desk.fields = {"stats": NodeStats(disk=disk), "disk": DiskNews(1)}
    desk.quota(NOISY, 0.0, 0.5)
    desk.report("node")
    desk.store_for("", *named("o", 8))
    desk.store_for(NOISY, *named("n", 9))
    desk.store_for("", "late")
    assert desk.orders[-1].shares == {NOISY: (0.0, 0.5)}
    told = [order.demoted for order in desk.orders] + [desk.report("node").disk.demoted]
    whose = {
        key: tenant for each in told for key, tenant in zip(each.keys, each.of_tenants, strict=True)
    }
    assert whose == {b"o0": "", b"n0": NOISY}
    status = {each.name: each.disk_bytes for each in desk.manager.tenant_status()}
    assert status == {"others": 0, NOISY: 5 * PAGE}


def series(desk: Tenancy, name: str) -> dict[tuple[str, ...], float]:
    families = desk.manager.meter.families(desk.now, is_paused=False)
    (family,) = [each for each in families if each.name == name]
    return {tuple(row.labels): row.value for row in family.rows}


def test_metrics_have_tenants_with_a_quota_and_all_others_as_one() -> None:
    desk = Tenancy()
    desk.store_for("early", "e")
    assert series(desk, "raykv_tenant_bytes") == {}
    desk.quota(NOISY, 0.0, 0.25)
    desk.store_for(QUIET, "q0", "q1")
    desk.store_for(NOISY, *named("n", 6))
    desk.tick()
    assert series(desk, "raykv_tenant_bytes") == {
        ("others", "ram"): 3 * PAGE,
        ("others", "disk"): 0,
        (NOISY, "ram"): 4 * PAGE,
        (NOISY, "disk"): 0,
    }
    assert series(desk, "raykv_tenant_evicted_chunks_total") == {("others",): 0, (NOISY,): 2}


def test_tokens_of_prompts_are_counted_by_tenant_where_there_are_quotas() -> None:
    desk = Tenancy()
    record = MissRecord("r", 100, 10, 60, {"evicted": 30}, fetched=5, disk=7, tenant=NOISY)
    desk.sync("engine", finished=[record])
    desk.quota(NOISY)
    desk.sync("engine", finished=[record, record])
    tokens = series(desk, "raykv_tenant_prompt_tokens_total")
    assert tokens == {
        (NOISY, "computed"): 60,
        (NOISY, "own_cache"): 20,
        (NOISY, "same_node"): 96,
        (NOISY, "other_node"): 10,
        (NOISY, "disk"): 14,
        **{("others", str(source)): 0 for source in TokenSource},
    }


def test_listed_chunks_say_whose_they_are() -> None:
    desk = Tenancy()
    desk.quota("acme", label="salt:1")
    desk.store_for("", "o")
    desk.store_for("salt:1", "a")
    desk.store_for(QUIET, "q")
    page = desk.manager.catalog.page(ChunkQuery(PROTOCOL_VERSION), desk.now)
    assert {each.key: each.tenant for each in chunks_of(page)} == {
        b"o": "others",
        b"a": "acme",
        b"q": QUIET,
    }
