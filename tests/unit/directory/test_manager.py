"""The block manager, message by message; its invariants are checked after every one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

import raykv.directory.mirror
from raykv.base.clearings import MAX_NAMESPACES
from raykv.base.ids import (
    EVERY_NAMESPACE,
    GENERATIONS_PER_EPOCH,
    SLOT_ALIGNMENT,
    EngineId,
    Epoch,
    Key,
    Namespace,
    NodeId,
    make_generation,
)
from raykv.directory.leases import Generations
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.node.pool.engines import LEAST_REUSE, MIN_SAMPLE, SOME
from raykv.protocol.columns import MAX_KEYS, Handles, Keys, Leases
from raykv.protocol.engine import (
    AttachEngine,
    EngineAttached,
    Naming,
    SyncReply,
    SyncRequest,
)
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import FailedStores, Inventory, NodeReport, NodeReportReply, NodeStats
from tests.fixtures.directory.desk import Desk as PlainDesk

pytestmark = pytest.mark.usefixtures("table")

PAGE = SLOT_ALIGNMENT
EXPIRY_S = 10.0
SETTLE_S = 2.0
PIN_S = 5.0


@dataclass(frozen=True)
class Row:
    """One chunk on a node."""

    key: bytes
    slot: int
    generation: int
    namespace: str = "model"
    pages: int = 1


def inventory(rows: Iterable[Row]) -> Inventory:
    rows = list(rows)
    namespaces = sorted({row.namespace for row in rows})
    return Inventory(
        namespaces,
        [namespaces.index(row.namespace) for row in rows],
        Keys.of([row.key for row in rows]),
        [row.slot for row in rows],
        [row.generation for row in rows],
        [row.pages * PAGE for row in rows],
    )


def leases(rows: Iterable[Row], group: int = 0) -> Leases:
    rows = list(rows)
    return Leases([group] * len(rows), [row.slot for row in rows], [row.generation for row in rows])


def handles(*rows: Row) -> Handles:
    return Handles(
        Keys.of([row.key for row in rows]),
        [row.slot for row in rows],
        [row.generation for row in rows],
    )


class Desk:
    """A manager, the clock, and the numbers that its correspondents count up."""

    def __init__(self, epoch: int = 1, manager: BlockManager | None = None) -> None:
        settings = ManagerSettings(
            engine_expiry_s=EXPIRY_S, node_expiry_s=EXPIRY_S, settle_s=SETTLE_S, pin_s=PIN_S
        )
        self.manager = manager or BlockManager(Epoch(epoch), settings)
        self.now = 1000.0
        self._seq = 0

    def _number(self, seq: int | None) -> int:
        """The next number, or one that is given; later ones are above it."""
        number = self._seq + 1 if seq is None else seq
        self._seq = max(self._seq, number)
        return number

    def report(
        self,
        stored: Iterable[Row] = (),
        node: str = "node",
        epoch: int = 7,
        pages: int = 8,
        slab_pages: int = 4,
        highest: int = 0,
        scheduler_epoch: int = 0,
        page: int = 0,
        last_page: bool = False,
        seq: int | None = None,
        cleared: dict[str, int] | None = None,
        paused: bool = False,
        failed: Iterable[Row] = (),
    ) -> NodeReportReply:
        message = NodeReport(
            version=PROTOCOL_VERSION,
            node_id=node,
            epoch=epoch,
            seq=self._number(seq),
            pool_bytes=pages * PAGE,
            slab_bytes=slab_pages * PAGE,
            highest_generation=highest,
            scheduler_epoch=scheduler_epoch,
            stored=inventory(stored),
            failed=failed_stores(failed),
            page=page,
            last_page=last_page,
            cleared=cleared or {},
            paused=paused,
            stats=NodeStats(pool_bytes=pages * PAGE, bytes_stored=11, bytes_loaded=22),
        )
        reply = self.manager.node_report(message, self.now)
        self.manager.check()
        return reply

    def attach(
        self,
        engine: str = "engine",
        node: str = "node",
        namespace: str = "model",
        sizes: dict[int, int] | None = None,
        held: Leases = Leases(),  # noqa: B008
        version: int = PROTOCOL_VERSION,
        traits: dict[str, str] | None = None,
        node_epoch: int = 7,
    ) -> EngineAttached:
        pages = sizes or {0: 1}
        message = AttachEngine(
            version=version,
            engine_id=engine,
            node_id=node,
            namespace=namespace,
            model="tiny",
            num_ranks=1,
            slot_bytes={group: size * PAGE for group, size in pages.items()},
            leases=held,
            traits=traits or {},
            node_epoch=node_epoch,
        )
        answer = self.manager.attach_engine(message, self.now)
        self.manager.check()
        return answer

    def sync(
        self,
        engine: str = "engine",
        wanted: int | dict[int, int] = 0,
        touched: Sequence[bytes] = (),
        pinned: Sequence[bytes] = (),
        released: Leases = Leases(),  # noqa: B008
        dropped: Handles = Handles(),  # noqa: B008
        clear: int = 0,
        idle: bool = False,
        epoch: int | None = None,
        seq: int | None = None,
        counters: dict[str, int] | None = None,
    ) -> SyncReply:
        request = SyncRequest(
            engine_id=engine,
            epoch=self.manager.epoch if epoch is None else epoch,
            seq=self._number(seq),
            wanted=wanted if isinstance(wanted, dict) else {0: wanted},
            touched=Keys.of(list(touched)),
            pinned=Keys.of(list(pinned)),
            released=released,
            dropped=dropped,
            clear=clear,
            idle=idle,
            counters={"hits": 3} if counters is None else counters,
        )
        reply = self.manager.sync(request, self.now)
        self.manager.check()
        return reply

    def lease(self, count: int, engine: str = "engine", group: int = 0) -> list[Row]:
        """Lease slots; the rows have no key yet."""
        granted = self.sync(engine, {group: count}).granted
        return [
            Row(b"", slot, generation)
            for slot, generation in zip(granted.slots, granted.generations, strict=True)
        ]

    def store(
        self, *keys: bytes, engine: str = "engine", namespace: str = "model", pages: int = 1
    ) -> list[Row]:
        """Lease a slot for each key, store into it and report it.

        The keys are reported as a prompt from its end: the first is the first to be given up.
        """
        free = self.lease(len(keys), engine)
        rows = [
            Row(key, row.slot, row.generation, namespace, pages)
            for key, row in zip(keys, free, strict=True)
        ]
        self.report(rows[::-1])
        return rows

    def holds(self, key: bytes, namespace: str = "model", node: str = "node") -> int | None:
        return self.manager.holds(NodeId(node), Namespace(namespace), Key(key))

    def held(self, keys: str) -> str:
        """Those of the one-letter keys that the directory has."""
        return "".join(key for key in keys if self.holds(key.encode()) is not None)

    def catch_up(self, engine: str = "engine") -> tuple[list[bytes], list[bytes]]:
        """Keys that came and keys that went, in one exchange."""
        reply = self.sync(engine)
        return [*reply.stored.keys], [*reply.removed.keys]


def failed_stores(rows: Iterable[Row]) -> FailedStores:
    listed = list(rows)
    return FailedStores(
        slots=[row.slot for row in listed],
        generations=[row.generation for row in listed],
        slot_bytes=[row.pages * PAGE for row in listed],
    )


@pytest.fixture
def desk() -> Desk:
    """One node of two slabs with four pages each, one engine that takes slots of one page."""
    made = Desk()
    made.report()
    made.attach()
    return made


def names(reply: SyncReply) -> tuple[list[bytes], list[bytes]]:
    return [*reply.stored.keys], [*reply.removed.keys]


# Attaching


def test_engine_is_told_to_come_again_when_its_node_has_not_reported() -> None:
    answer = Desk().attach()
    assert answer.retry
    assert "has not reported yet" in answer.error


def test_engine_without_a_node_is_known_as_waiting_until_it_attaches_or_is_silent() -> None:
    desk = Desk()
    desk.attach()
    assert desk.manager.status("", "", desk.now).waiting == {"engine": "node"}
    desk.report()
    desk.attach()
    assert desk.manager.status("", "", desk.now).waiting == {}
    desk.attach("other", node="gone")
    assert desk.manager.status("", "", desk.now).waiting == {"other": "gone"}
    desk.now += EXPIRY_S + 1
    desk.manager.expire(desk.now)
    assert desk.manager.status("", "", desk.now).waiting == {}


def test_engine_is_refused_with_both_numbers_when_it_speaks_another_protocol(desk: Desk) -> None:
    answer = desk.attach("other", version=PROTOCOL_VERSION + 6)
    assert str(PROTOCOL_VERSION) in answer.error
    assert str(PROTOCOL_VERSION + 6) in answer.error
    assert not answer.retry
    assert desk.sync("other").attach


def test_engine_is_refused_with_both_sizes_when_a_chunk_is_larger_than_a_slab(desk: Desk) -> None:
    answer = desk.attach("other", sizes={0: 1, 3: 5})
    assert "KV group 3" in answer.error
    assert str(5 * PAGE) in answer.error
    assert str(4 * PAGE) in answer.error
    assert desk.sync("other").attach


def test_engine_learns_epochs_and_the_capacity_for_each_group(desk: Desk) -> None:
    answer = desk.attach("other", sizes={0: 1, 1: 3})
    assert not answer.error
    assert (answer.epoch, answer.node_epoch) == (1, 7)
    assert answer.capacity == {0: 8, 1: 2}


@pytest.mark.parametrize(("engine", "epoch"), [("stranger", 1), ("engine", 0), ("engine", 2)])
def test_sync_asks_to_attach_when_engine_or_epoch_is_unknown(
    desk: Desk, engine: str, epoch: int
) -> None:
    reply = desk.sync(engine, wanted=1, epoch=epoch)
    assert reply.attach
    assert not reply.granted.slots


def test_engine_moves_with_its_session_when_it_attaches_on_another_node(desk: Desk) -> None:
    desk.report(node="other")
    desk.lease(8)
    desk.attach(node="other")
    desk.attach("second")
    assert len(desk.lease(8, "second")) == 8
    assert len(desk.lease(8)) == 8


# Leases


def test_grant_is_of_different_places_under_rising_generations(desk: Desk) -> None:
    rows = desk.lease(3) + desk.lease(5)
    assert {row.slot for row in rows} == set(range(8))
    generations = [row.generation for row in rows]
    assert generations == sorted(set(generations))
    assert generations[0] > make_generation(Epoch(1), 0)


def test_grant_is_short_when_the_pool_has_no_more(desk: Desk) -> None:
    assert len(desk.lease(6)) == 6
    assert len(desk.lease(6)) == 2
    assert len(desk.lease(1)) == 0


def test_grant_is_empty_for_a_group_that_the_engine_did_not_name(desk: Desk) -> None:
    assert desk.sync(wanted={5: 2}).granted.slots == []


def test_grant_names_the_group_that_asked(desk: Desk) -> None:
    desk.attach(sizes={2: 1, 4: 2})
    granted = desk.sync(wanted={4: 1, 2: 2}).granted
    assert granted.groups == [4, 2, 2]


def test_grant_never_exceeds_one_page_over_all_groups() -> None:
    desk = Desk()
    desk.report(pages=4096, slab_pages=64)
    desk.attach(sizes={0: 1, 1: 1})
    granted = desk.sync(wanted={0: 1500, 1: 1500}).granted
    assert len(granted.slots) == len(set(granted.slots)) == MAX_KEYS


def test_released_lease_is_free_again(desk: Desk) -> None:
    rows = desk.lease(8)
    desk.sync(released=leases(rows[:2]))
    assert {row.slot for row in desk.lease(8)} == {row.slot for row in rows[:2]}


def test_released_lease_stays_when_the_generation_is_not_its_own(desk: Desk) -> None:
    (row,) = desk.lease(8)[:1]
    other = Row(b"", row.slot, row.generation + 1)
    desk.sync(released=leases([other]))
    assert desk.lease(8) == []


def test_leases_return_when_the_engine_detaches(desk: Desk) -> None:
    rows = desk.lease(8)
    desk.manager.detach_engine(EngineId("engine"))
    desk.manager.check()
    assert desk.sync().attach
    desk.attach("second")
    again = desk.lease(8, "second")
    assert {row.slot for row in again} == {row.slot for row in rows}
    assert min(row.generation for row in again) > max(row.generation for row in rows)


def test_chunks_stay_when_their_engine_detaches(desk: Desk) -> None:
    desk.store(b"a")
    desk.manager.detach_engine(EngineId("engine"))
    assert desk.held("a") == "a"


def test_detach_of_an_unknown_engine_changes_nothing(desk: Desk) -> None:
    desk.lease(8)
    desk.manager.detach_engine(EngineId("stranger"))
    desk.manager.check()
    assert desk.lease(1) == []


def test_leases_return_when_the_engine_has_been_silent_too_long(desk: Desk) -> None:
    desk.lease(8)
    desk.attach("second")
    desk.now += EXPIRY_S
    desk.report()
    desk.sync("second")
    desk.manager.expire(desk.now)
    assert desk.lease(1, "second") == []
    desk.now += 0.1
    desk.manager.expire(desk.now)
    desk.manager.check()
    assert desk.sync().attach
    assert len(desk.lease(8, "second")) == 8


def test_leases_of_a_talking_engine_stay(desk: Desk) -> None:
    rows = desk.lease(8)
    for _ in range(4):
        desk.now += EXPIRY_S - 1
        desk.report()
        desk.sync(idle=True)
        desk.manager.expire(desk.now)
    desk.report([Row(b"a", rows[0].slot, rows[0].generation)])
    assert desk.held("a") == "a"


def test_leases_that_are_not_declared_return_when_an_engine_attaches_again(desk: Desk) -> None:
    rows = desk.lease(8)
    desk.attach(held=leases(rows[:3]))
    assert {row.slot for row in desk.lease(8)} == {row.slot for row in rows[3:]}
    desk.report([Row(b"a", rows[0].slot, rows[0].generation)])
    assert desk.held("a") == "a"


def test_declared_lease_is_not_believed_when_it_is_another_engines(desk: Desk) -> None:
    rows = desk.lease(8)
    desk.attach("thief", held=leases(rows))
    assert desk.lease(1, "thief") == []
    desk.manager.detach_engine(EngineId("thief"))
    desk.report([Row(b"a", rows[0].slot, rows[0].generation)])
    assert desk.held("a") == "a"


@pytest.mark.parametrize(
    "row",
    [
        Row(b"", 99, 1),
        Row(b"", -4, 1),
        Row(b"", 0, int(make_generation(Epoch(1), 5000))),
        Row(b"", 0, int(make_generation(Epoch(2), 0))),
    ],
)
def test_declared_lease_is_not_believed_when_it_cannot_be(desk: Desk, row: Row) -> None:
    desk.attach(held=leases([row]))
    assert len(desk.lease(9)) == 8


@pytest.mark.parametrize("node_epoch", [0, 6, 8])
def test_declared_lease_is_not_believed_when_it_is_of_another_life_of_the_pool(
    desk: Desk, node_epoch: int
) -> None:
    """The engine declares, its NodeActor restarts, and that is heard of first."""
    rows = desk.lease(8)
    answer = desk.attach(held=leases(rows), node_epoch=node_epoch)
    assert answer.rejected == [row.slot for row in rows]
    assert len(desk.lease(9)) == 8


def test_declared_lease_of_an_unknown_group_is_not_believed(desk: Desk) -> None:
    desk.attach(held=leases([Row(b"", 0, 1)], group=3))
    assert len(desk.lease(9)) == 8


# Stored chunks


def test_chunk_is_held_when_it_was_stored_at_its_lease(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    assert desk.holds(b"a") == row.generation


@pytest.mark.parametrize(("slot_off", "generation_off"), [(0, -1), (1, 0)])
def test_chunk_is_not_held_when_its_slot_is_not_leased_at_that_generation(
    desk: Desk, slot_off: int, generation_off: int
) -> None:
    first, second = desk.lease(2)
    assert second.slot == first.slot + 1
    desk.report([Row(b"a", first.slot + slot_off, first.generation + generation_off)])
    assert desk.held("a") == ""


def test_chunk_is_held_and_an_older_lease_of_its_slot_ends(desk: Desk) -> None:
    (row,) = desk.lease(1)
    desk.report([Row(b"a", row.slot, row.generation + 1)])
    assert desk.held("a") == "a"
    assert desk.attach(held=leases([row])).rejected == [row.slot]


@pytest.mark.parametrize("pages", [1, 2])
def test_chunk_is_not_held_when_the_same_report_has_a_later_one_in_its_place(
    desk: Desk, pages: int
) -> None:
    """The node was away for so long that neither lease is known any more."""
    row, other = desk.lease(2)
    assert (row.slot, other.slot) == (0, 1)
    desk.sync(released=leases([row, other]))
    later = Row(b"b", 0, other.generation + 1, pages=pages)
    first = [Row(b"a", 0, row.generation), Row(b"c", 1, other.generation)]
    desk.report([*first, later])
    assert desk.held("abc") == ("bc" if pages == 1 else "b")
    assert desk.holds(b"b") == later.generation


def test_chunk_is_not_held_when_the_same_report_has_a_larger_one_over_it(desk: Desk) -> None:
    """In a slot of its own: the slab has another slot size since."""
    _, row = desk.lease(2)
    assert row.slot == 1
    desk.manager.detach_engine(EngineId("engine"))
    desk.report([Row(b"a", 1, row.generation), Row(b"b", 0, row.generation + 1, pages=2)])
    assert desk.held("ab") == "b"


def test_chunk_is_held_when_its_lease_was_released_but_the_node_has_it(desk: Desk) -> None:
    (row,) = desk.lease(1)
    desk.sync(released=leases([row]))
    desk.report([Row(b"a", row.slot, row.generation)])
    assert desk.held("a") == "a"


def test_chunk_is_held_when_its_engine_detached_before_the_report(desk: Desk) -> None:
    (row,) = desk.lease(1)
    desk.manager.detach_engine(EngineId("engine"))
    desk.report([Row(b"a", row.slot, row.generation)])
    assert desk.held("a") == "a"


def test_chunk_is_not_held_when_its_slot_has_been_leased_again_or_had_a_later_lease(
    desk: Desk,
) -> None:
    rows = desk.lease(8)
    desk.sync(released=leases(rows))
    later = desk.lease(8)
    desk.report([Row(b"a", rows[0].slot, rows[0].generation)])
    assert desk.held("a") == ""
    desk.sync(released=leases(later))
    desk.report([Row(b"a", rows[0].slot, rows[0].generation)])
    assert desk.held("a") == ""


def test_report_counts_once_when_it_is_repeated(desk: Desk) -> None:
    first, second = desk.lease(2)
    rows = [Row(b"a", first.slot, first.generation)]
    desk.report(rows, seq=500)
    desk.report([Row(b"a", second.slot, second.generation)], seq=501)
    desk.report(rows, seq=500)
    desk.report(rows, seq=502)
    assert desk.holds(b"a") == second.generation


def test_report_is_ignored_when_an_older_one_comes_late(desk: Desk) -> None:
    first, second = desk.lease(2)
    desk.report([Row(b"a", first.slot, first.generation)], seq=500)
    desk.report([Row(b"b", second.slot, second.generation)], seq=499)
    assert desk.held("ab") == "a"


def test_chunk_replaces_an_earlier_one_of_the_same_key(desk: Desk) -> None:
    (old,) = desk.store(b"a")
    (new,) = desk.store(b"a")
    assert desk.holds(b"a") == new.generation
    assert old.slot in {row.slot for row in desk.lease(8)}


def test_chunk_is_dropped_when_an_engine_found_it_gone(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    desk.sync(dropped=handles(row))
    assert desk.held("a") == ""
    assert len(desk.lease(8)) == 8


def test_chunk_stays_when_an_engine_found_an_older_one_gone(desk: Desk) -> None:
    (old,) = desk.store(b"a")
    desk.store(b"a")
    desk.sync(dropped=handles(old))
    assert desk.held("a") == "a"


def test_chunk_stays_when_an_engine_of_another_namespace_drops_its_key(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    desk.attach("other", namespace="other")
    desk.sync("other", dropped=handles(row))
    assert desk.held("a") == "a"


# What engines are told


def test_engines_are_told_what_came_on_their_node_in_their_namespace(desk: Desk) -> None:
    desk.report(node="elsewhere")
    desk.attach("same")
    desk.attach("foreign", namespace="other")
    desk.attach("remote", node="elsewhere")
    for engine in ("same", "foreign", "remote"):
        desk.sync(engine)
    (row,) = desk.store(b"a")
    assert desk.sync("same").stored == handles(row)
    assert desk.catch_up("foreign") == ([], [])
    assert desk.catch_up("remote") == ([], [])
    assert desk.catch_up("same") == ([], [])


def test_engine_gets_a_snapshot_after_it_has_attached(desk: Desk) -> None:
    desk.store(b"a", b"b")
    desk.attach("second")
    reply = desk.sync("second")
    assert reply.reset
    assert sorted(reply.stored.keys) == [b"a", b"b"]
    assert not reply.more
    assert not desk.sync("second").reset


def test_snapshot_comes_in_pages_when_it_is_long() -> None:
    desk = Desk()
    count = 2 * MAX_KEYS + 5
    desk.report(pages=3 * MAX_KEYS, slab_pages=64)
    desk.attach()
    keys = [f"key-{i}".encode() for i in range(count)]
    for start in range(0, count, MAX_KEYS):
        desk.store(*keys[start : start + MAX_KEYS])
    desk.attach("second")
    replies = [desk.sync("second") for _ in range(3)]
    assert [len(reply.stored) for reply in replies] == [MAX_KEYS, MAX_KEYS, 5]
    assert [reply.reset for reply in replies] == [True, False, False]
    assert [reply.more for reply in replies] == [True, True, False]
    assert {key for reply in replies for key in reply.stored.keys} == set(keys)


def test_snapshot_leaves_out_what_went_while_its_pages_were_fetched() -> None:
    desk = Desk()
    desk.report(pages=2 * MAX_KEYS, slab_pages=64)
    desk.attach()
    keys = [f"key-{i}".encode() for i in range(MAX_KEYS)]
    rows = desk.store(*keys)
    rows += desk.store(b"late")
    desk.attach("second")
    mirror = set(desk.sync("second").stored.keys)
    desk.sync(dropped=handles(rows[0], rows[-1]))
    second = desk.sync("second")
    mirror |= set(second.stored.keys)
    mirror -= set(second.removed.keys)
    assert mirror == set(keys[1:])
    assert not second.more


def test_changes_come_in_pages_when_they_are_many() -> None:
    desk = Desk()
    desk.report(pages=2 * MAX_KEYS, slab_pages=64)
    desk.attach()
    desk.sync()
    keys = [f"key-{i}".encode() for i in range(MAX_KEYS)]
    free = desk.lease(MAX_KEYS) + desk.lease(5)
    rows = [Row(b"%d" % i, row.slot, row.generation) for i, row in enumerate(free)]
    desk.report(rows)
    replies = [desk.sync(), desk.sync()]
    assert [len(reply.stored) for reply in replies] == [len(keys), 5]
    assert [reply.more for reply in replies] == [True, False]


def test_engine_is_told_of_removals_in_the_answer_that_grants_their_slots(desk: Desk) -> None:
    rows = desk.store(*(b"%d" % i for i in range(8)))
    desk.sync()
    reply = desk.sync(wanted=2)
    assert reply.removed == handles(*rows[:2])
    assert reply.granted.slots == [row.slot for row in rows[:2]]


def test_engine_is_not_told_that_a_chunk_is_there_when_it_came_and_went_meanwhile(
    desk: Desk,
) -> None:
    desk.attach("second")
    desk.sync("second")
    (row,) = desk.store(b"a")
    desk.sync(dropped=handles(row))
    came, went = desk.catch_up("second")
    assert b"a" not in came
    assert went == [b"a"]


def test_engine_is_told_the_last_of_several_chunks_of_a_key(desk: Desk) -> None:
    desk.attach("second")
    desk.sync("second")
    desk.store(b"a")
    (row,) = desk.store(b"a")
    reply = desk.sync("second")
    assert reply.stored == handles(row)


def test_engine_gets_a_snapshot_when_it_has_let_too_many_changes_pile_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.mirror, "MAX_PENDING_CHANGES", 4)
    desk.attach("second")
    desk.sync("second")
    desk.store(b"a", b"b")
    desk.store(b"a", b"b")
    reply = desk.sync("second")
    assert reply.reset
    assert set(reply.stored.keys) == {b"a", b"b"}


def test_changes_do_not_pile_up_for_an_engine_that_stays_idle(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.mirror, "MAX_PENDING_CHANGES", 4)
    desk.attach("second")
    desk.sync("second")
    for _ in range(20):
        desk.store(b"a", b"b")
        desk.sync("second", idle=True)
    engine = desk.manager._engines[EngineId("second")]
    assert engine.mirror.num_pending <= 4
    reply = desk.sync("second")
    assert reply.reset
    assert set(reply.stored.keys) == {b"a", b"b"}


def test_idle_engine_gets_neither_changes_nor_slots_until_it_fetches_them(desk: Desk) -> None:
    desk.attach("second")
    desk.store(b"a")
    quiet = desk.sync("second", wanted=1, idle=True)
    assert names(quiet) == ([], [])
    assert quiet.granted.slots == []
    assert not quiet.reset
    reply = desk.sync("second")
    assert reply.reset
    assert reply.stored.keys == [b"a"]


# Repetitions


def test_sync_gets_the_same_answer_when_it_is_repeated(desk: Desk) -> None:
    desk.store(b"a")
    first = desk.sync(wanted=2, seq=900)
    second = desk.sync(wanted=2, seq=900)
    assert first == second
    assert len(first.granted.slots) == 2
    assert len(desk.lease(8)) == 6


def test_sync_changes_nothing_when_an_older_one_comes_late(desk: Desk) -> None:
    desk.store(b"a")
    desk.sync(wanted=1, seq=901)
    late = desk.sync(wanted=2, seq=900)
    assert late.granted.slots == []
    assert names(late) == ([], [])
    assert len(desk.lease(8)) == 7


# Eviction


def test_eviction_takes_the_oldest_chunks(desk: Desk) -> None:
    for key in "abcdefgh":
        desk.store(key.encode())
    desk.lease(3)
    assert desk.held("abcdefgh") == "defgh"


def test_eviction_spares_what_was_touched_last(desk: Desk) -> None:
    for key in "abcdefgh":
        desk.store(key.encode())
    desk.sync(touched=Keys.of([b"b", b"a"]))
    desk.lease(2)
    assert desk.held("abcdefgh") == "abefgh"


def test_eviction_takes_the_tail_of_a_prefix_first_when_it_was_touched_tail_first(
    desk: Desk,
) -> None:
    desk.store(*(key.encode() for key in "abcdefgh"))
    desk.sync(touched=Keys.of([key.encode() for key in "hgfedcba"]))
    desk.lease(3)
    assert desk.held("abcdefgh") == "abcde"


def test_eviction_takes_free_slots_first(desk: Desk) -> None:
    desk.store(b"a", b"b", b"c", b"d")
    desk.lease(4)
    assert desk.held("abcd") == "abcd"
    desk.lease(1)
    assert desk.held("abcd") == "bcd"


def test_eviction_spares_pinned_chunks_until_the_pin_is_over(desk: Desk) -> None:
    desk.store(*(key.encode() for key in "abcdefgh"))
    desk.sync(pinned=Keys.of([b"a", b"c", b"unknown"]))
    desk.lease(2)
    assert desk.held("abcdefgh") == "acefgh"
    desk.now += PIN_S - 0.1
    desk.lease(1)
    assert desk.held("abcdefgh") == "acfgh"
    desk.now += 0.1
    desk.lease(1)
    assert desk.held("abcdefgh") == "cfgh"


def test_grant_is_short_when_all_else_is_pinned(desk: Desk) -> None:
    desk.store(*(key.encode() for key in "abcdefgh"))
    desk.sync(pinned=Keys.of([key.encode() for key in "abcdefg"]))
    assert len(desk.lease(8)) == 1


def test_pins_of_one_namespace_do_not_protect_another(desk: Desk) -> None:
    desk.store(*(key.encode() for key in "abcdefgh"))
    desk.attach("other", namespace="other")
    desk.sync("other", pinned=Keys.of([b"a"]), touched=Keys.of([b"a"]))
    desk.lease(1)
    assert desk.held("abcdefgh") == "bcdefgh"


# Two slot sizes, two namespaces


def span(row: Row, pages: int) -> set[int]:
    return set(range(row.slot, row.slot + pages))


def test_slots_of_two_sizes_never_meet(desk: Desk) -> None:
    desk.attach("large", namespace="large", sizes={0: 2})
    small = desk.lease(3)
    large = desk.lease(2, "large")
    pages = [*(span(row, 1) for row in small), *(span(row, 2) for row in large)]
    assert len(set().union(*pages)) == sum(map(len, pages)) == 7


def test_keys_of_two_namespaces_never_meet(desk: Desk) -> None:
    desk.attach("other", namespace="other")
    (ours,) = desk.store(b"a")
    (theirs,) = desk.store(b"a", engine="other", namespace="other")
    assert desk.holds(b"a") == ours.generation
    assert desk.holds(b"a", "other") == theirs.generation
    assert ours.slot != theirs.slot
    assert desk.catch_up() == ([b"a"], [])


def full_of_small_chunks() -> Desk:
    """Four slabs, all of them full of chunks that take one page."""
    desk = Desk()
    desk.report(pages=16)
    desk.attach()
    desk.attach("large", namespace="large", sizes={0: 4})
    desk.store(*(b"%x" % i for i in range(16)))
    desk.sync()
    return desk


def test_slabs_are_reclaimed_up_to_a_fair_share(desk: Desk) -> None:
    desk = full_of_small_chunks()
    assert len(desk.lease(4, "large")) == 2
    assert desk.lease(4, "large") == []
    assert len(desk.held("0123456789abcdef")) == 8
    removed = desk.sync().removed.keys
    assert len(removed) == 8


def test_slabs_with_leases_are_not_reclaimed() -> None:
    desk = full_of_small_chunks()
    rows = desk.lease(3)
    assert {row.slot // 4 for row in rows} == {0}
    assert {row.slot // 4 for row in desk.lease(4, "large")} == {1, 2}


def test_slabs_with_chunks_about_to_be_loaded_are_not_reclaimed() -> None:
    desk = full_of_small_chunks()
    desk.sync(pinned=Keys.of([b"0", b"4", b"8"]))
    assert [row.slot for row in desk.lease(4, "large")] == [12]
    desk.now += PIN_S
    assert len(desk.lease(4, "large")) == 1


def test_slabs_that_were_never_used_come_before_eviction() -> None:
    desk = Desk()
    desk.report(pages=8)
    desk.attach()
    desk.attach("large", namespace="large", sizes={0: 4})
    desk.store(*(key.encode() for key in "abcd"))
    assert len(desk.lease(1, "large")) == 1
    assert desk.held("abcd") == "abcd"


# Nodes that come, go and come back


def test_node_with_a_new_epoch_is_empty(desk: Desk) -> None:
    desk.store(b"a")
    desk.sync()
    rows = desk.lease(4)
    reply = desk.report(epoch=8)
    assert not reply.inventory
    assert desk.held("a") == ""
    answer = desk.sync()
    assert answer.node_epoch == 8
    assert answer.reset
    assert names(answer) == ([], [])
    assert len(desk.lease(8)) == 8
    desk.report([Row(b"b", rows[0].slot, rows[0].generation)], epoch=8)
    assert desk.held("b") == ""


def test_report_of_a_former_life_is_ignored(desk: Desk) -> None:
    desk.report(epoch=8)
    (row,) = desk.lease(1)
    desk.report([Row(b"a", row.slot, row.generation)], epoch=7)
    assert desk.held("a") == ""
    assert desk.sync().node_epoch == 8


def test_node_is_forgotten_when_it_has_been_silent_too_long(desk: Desk) -> None:
    desk.store(b"a")
    desk.now += EXPIRY_S
    desk.manager.expire(desk.now)
    assert desk.held("a") == "a"
    desk.now += 0.1
    desk.sync()
    desk.manager.expire(desk.now)
    desk.manager.check()
    assert desk.held("a") == ""
    assert desk.sync().attach


def test_engine_declares_its_leases_when_its_node_was_away_for_too_long(desk: Desk) -> None:
    (row,) = desk.lease(1)
    desk.now += EXPIRY_S - 1
    desk.sync()
    desk.now += 2
    desk.manager.expire(desk.now)
    highest = row.generation
    assert desk.report(highest=highest, scheduler_epoch=1).inventory
    assert desk.sync().attach
    desk.attach(held=leases([row]))
    desk.report(highest=highest, scheduler_epoch=1, page=1, last_page=True)
    desk.report([Row(b"a", row.slot, row.generation)], highest=highest, scheduler_epoch=1)
    assert desk.held("a") == "a"


# A new life of the scheduler actor


def reborn(*stored: Row, pages: int = 8, epoch: int = 5) -> Desk:
    """A manager that has just begun to know a node which has `stored` chunks already."""
    desk = Desk(epoch=epoch)
    highest = max((row.generation for row in stored), default=GEN)
    assert desk.report(pages=pages, highest=highest, scheduler_epoch=1).inventory
    return desk


GEN = int(make_generation(Epoch(1), 100))
"""A generation that the manager's last life granted."""


def send_inventory(desk: Desk, *stored: Row) -> NodeReportReply:
    return desk.report(stored, highest=GEN, scheduler_epoch=1, page=1, last_page=True)


def send_news(desk: Desk, *stored: Row, failed: Iterable[Row] = ()) -> NodeReportReply:
    return desk.report(stored, failed=failed, highest=GEN, scheduler_epoch=1)


def test_news_from_before_the_inventory_do_not_count() -> None:
    desk = reborn()
    send_news(desk, Row(b"a", 0, GEN - 1))
    send_inventory(desk, Row(b"b", 0, GEN))
    assert desk.held("ab") == "b"


def test_chunk_is_gone_when_a_store_into_an_unknown_lease_failed_over_it() -> None:
    desk = reborn()
    send_inventory(desk, Row(b"a", 0, GEN - 1), Row(b"b", 1, GEN - 1))
    send_news(desk, failed=[Row(b"", 0, GEN)])
    assert desk.held("ab") == "b"


def test_failed_store_takes_nothing_that_came_after_it() -> None:
    desk = reborn()
    send_inventory(desk, Row(b"a", 0, GEN))
    send_news(desk, failed=[Row(b"", 0, GEN - 1)])
    assert desk.held("a") == "a"


def test_lease_is_not_believed_when_its_chunk_came_and_a_newer_one_is_held() -> None:
    desk = reborn()
    send_inventory(desk)
    send_news(desk, Row(b"a", 0, GEN), Row(b"a", 1, GEN - 1))
    assert desk.held("a") == "a"
    assert desk.attach(held=leases([Row(b"", 1, GEN - 1)])).rejected == [1]


@pytest.mark.parametrize("is_failed", [False, True])
def test_declared_lease_ends_when_something_newer_was_in_its_slot(is_failed: bool) -> None:
    desk = reborn()
    send_inventory(desk)
    old = leases([Row(b"", 0, GEN - 1)])
    assert desk.attach(held=old).rejected == []
    newer = Row(b"a", 0, GEN)
    send_news(desk, failed=[newer]) if is_failed else send_news(desk, newer)
    assert desk.held("a") == ("" if is_failed else "a")
    desk.now += SETTLE_S
    # The eighth is evicted.
    assert len(desk.lease(8)) == 8


def test_inventory_is_asked_for_until_its_last_page_is_in() -> None:
    desk = reborn()
    first = Row(b"a", 0, GEN)
    assert not desk.report([first], highest=GEN, scheduler_epoch=1, page=1).inventory
    assert desk.report(highest=GEN, scheduler_epoch=1).inventory
    desk.report([first], highest=GEN, scheduler_epoch=1, page=1)
    desk.report([Row(b"b", 1, GEN)], highest=GEN, scheduler_epoch=1, page=2, last_page=True)
    assert not desk.report(highest=GEN, scheduler_epoch=1).inventory
    assert desk.held("ab") == "ab"


def test_nothing_is_granted_before_the_inventory_is_in() -> None:
    desk = reborn()
    desk.attach()
    desk.now += 10 * SETTLE_S
    desk.report(highest=GEN, scheduler_epoch=1)
    assert desk.sync(wanted=1).granted.slots == []
    send_inventory(desk)
    assert len(desk.sync(wanted=1).granted.slots) == 1


def test_nothing_is_granted_before_the_engines_had_time_to_declare_their_leases() -> None:
    desk = reborn()
    send_inventory(desk)
    desk.attach()
    desk.now += SETTLE_S - 0.1
    assert desk.sync(wanted=1).granted.slots == []
    desk.now += 0.1
    assert len(desk.sync(wanted=1).granted.slots) == 1


def test_first_grant_on_a_new_node_needs_no_settling(desk: Desk) -> None:
    assert len(desk.lease(1)) == 1


def test_grants_are_above_all_generations_that_a_node_has_seen() -> None:
    desk = Desk(epoch=3)
    future = make_generation(Epoch(9), 17)
    desk.report(highest=future)
    assert desk.manager.epoch > 9
    send_inventory(desk)
    desk.attach()
    desk.now += SETTLE_S
    assert desk.lease(1)[0].generation > future


def test_epoch_rises_above_that_of_any_scheduler_that_a_node_has_heard() -> None:
    desk = Desk(epoch=3)
    desk.report(scheduler_epoch=12)
    assert desk.manager.epoch > 12


def test_engine_attaches_again_when_a_report_raised_the_epoch(desk: Desk) -> None:
    before = desk.manager.epoch
    desk.report(node="other", scheduler_epoch=40)
    assert desk.sync(epoch=before).attach


def test_inventory_is_told_to_engines_that_have_attached_before() -> None:
    desk = reborn()
    desk.attach()
    desk.sync()
    send_inventory(desk, Row(b"a", 3, GEN))
    assert desk.sync().stored == handles(Row(b"a", 3, GEN))


@pytest.mark.parametrize(
    "row", [Row(b"a", 99, GEN), Row(b"a", -1, GEN), Row(b"a", 1, GEN, pages=2)]
)
def test_inventory_is_not_believed_where_no_slot_can_be(row: Row) -> None:
    desk = reborn()
    send_inventory(desk, row)
    assert desk.held("a") == ""


def test_inventory_is_not_believed_where_chunks_overlap() -> None:
    desk = reborn()
    send_inventory(desk, Row(b"a", 0, GEN), Row(b"b", 2, GEN - 1, pages=2))
    assert desk.held("ab") == "a"


def test_inventory_page_counts_once_when_it_is_repeated() -> None:
    desk = reborn()
    row = Row(b"a", 0, GEN)
    desk.report([row], highest=GEN, scheduler_epoch=1, page=1)
    desk.report([row], highest=GEN, scheduler_epoch=1, page=1)
    send_inventory(desk, row)
    assert desk.holds(b"a") == GEN


def test_declared_lease_keeps_its_slot_when_it_comes_before_the_inventory() -> None:
    desk = reborn()
    held = Row(b"", 0, GEN - 1)
    desk.attach(held=leases([held]))
    send_inventory(desk, Row(b"old", 0, GEN - 5), Row(b"b", 1, GEN))
    assert desk.holds(b"old") is None
    desk.report([Row(b"a", 0, GEN - 1)], highest=GEN, scheduler_epoch=1)
    assert desk.held("ab") == "ab"


def test_declared_lease_keeps_its_slot_when_it_comes_after_the_inventory() -> None:
    desk = reborn()
    send_inventory(desk, Row(b"old", 0, GEN - 5), Row(b"b", 1, GEN))
    desk.attach(held=leases([Row(b"", 0, GEN - 1), Row(b"", 2, GEN - 2)]))
    assert desk.holds(b"old") is None
    desk.now += SETTLE_S
    assert {row.slot for row in desk.lease(5)} == {3, 4, 5, 6, 7}
    rows = [Row(b"a", 0, GEN - 1), Row(b"c", 2, GEN - 2)]
    desk.report(rows, highest=GEN, scheduler_epoch=1)
    assert desk.held("abc") == "abc"


def test_declared_lease_gives_way_to_a_chunk_of_its_own_or_a_later_generation() -> None:
    desk = reborn()
    send_inventory(desk, Row(b"a", 0, GEN - 1), Row(b"b", 1, GEN))
    desk.attach(held=leases([Row(b"", 0, GEN - 1), Row(b"", 1, GEN - 1)]))
    assert desk.held("ab") == "ab"
    desk.now += SETTLE_S
    assert {row.slot for row in desk.lease(6)} == {2, 3, 4, 5, 6, 7}


def test_declared_lease_ends_when_the_inventory_has_its_chunk() -> None:
    desk = reborn()
    desk.attach(held=leases([Row(b"", 0, GEN)]))
    send_inventory(desk, Row(b"a", 0, GEN))
    assert desk.holds(b"a") == GEN
    desk.sync(dropped=handles(Row(b"a", 0, GEN)))
    desk.now += SETTLE_S
    assert len(desk.lease(8)) == 8


# Clearing


def test_clear_by_an_engine_voids_chunks_and_leases_of_its_namespace(desk: Desk) -> None:
    desk.attach("peer")
    desk.attach("other", namespace="other")
    desk.sync("other")
    desk.store(b"a")
    desk.store(b"a", engine="other", namespace="other")
    (lease,) = desk.lease(1, "peer")
    (spared,) = desk.lease(1, "other")
    reply = desk.sync(clear=1)
    assert (reply.void, reply.reset, reply.cleared) == (True, True, 1)
    assert desk.holds(b"a") is None
    assert desk.holds(b"a", "other") is not None
    peer = desk.sync("peer")
    assert (peer.void, peer.reset, names(peer)) == (True, True, ([], []))
    other = desk.sync("other")
    assert (other.void, other.reset) == (False, False)
    desk.report([Row(b"b", lease.slot, lease.generation)])
    desk.report([Row(b"c", spared.slot, spared.generation, "other")])
    assert desk.holds(b"b") is None
    assert desk.holds(b"c", "other") is not None


def test_clear_is_carried_out_once_when_it_is_asked_for_again(desk: Desk) -> None:
    desk.sync(clear=1)
    desk.store(b"a")
    reply = desk.sync(clear=1)
    assert (reply.cleared, reply.void) == (1, False)
    assert desk.held("a") == "a"
    assert desk.sync(clear=2).void
    assert desk.held("a") == ""


def test_clear_is_carried_out_also_for_an_idle_engine(desk: Desk) -> None:
    desk.store(b"a")
    quiet = desk.sync(clear=1, idle=True)
    assert quiet.cleared == 1
    assert desk.held("a") == ""
    assert desk.sync().void


def test_clear_reaches_the_nodes_with_the_generation_up_to_which_it_holds(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    desk.sync(clear=1)
    cleared = desk.report().cleared
    assert cleared == {"model": row.generation}
    assert desk.lease(1)[0].generation > cleared["model"]


def test_clear_holds_against_an_inventory_that_is_older() -> None:
    desk = reborn()
    desk.attach()
    desk.sync(clear=1)
    send_inventory(desk, Row(b"a", 0, GEN))
    assert desk.held("a") == ""


def test_clear_that_a_node_remembers_holds_in_the_next_life() -> None:
    desk = Desk(epoch=5)
    desk.report(highest=GEN, scheduler_epoch=1, cleared={"model": GEN})
    send_inventory(desk)
    desk.attach(held=leases([Row(b"", 0, GEN), Row(b"", 1, GEN - 1)]))
    desk.report([Row(b"a", 0, GEN)], highest=GEN, scheduler_epoch=1)
    assert desk.held("a") == ""
    assert desk.report(highest=GEN, scheduler_epoch=1).cleared == {"model": GEN}


def test_clear_of_everything_empties_all_namespaces(desk: Desk) -> None:
    desk.attach("other", namespace="other")
    desk.store(b"a")
    desk.store(b"a", engine="other", namespace="other")
    desk.manager.clear()
    desk.manager.check()
    assert desk.holds(b"a") is None
    assert desk.holds(b"a", "other") is None
    assert desk.sync("other").void
    assert desk.report().cleared.keys() == {EVERY_NAMESPACE}


def test_clear_of_everything_holds_for_a_namespace_that_nobody_knew(desk: Desk) -> None:
    rows = [Row(b"a", 0, GEN, "unknown"), Row(b"b", 1, GEN, "other")]
    desk.lease(2)
    desk.manager.clear()
    desk.report(node="away", highest=GEN - 200, page=0)
    desk.report(rows, node="away", highest=GEN - 200, page=1, last_page=True)
    assert desk.holds(b"a", "unknown", "away") == GEN
    late = Desk(epoch=2)
    late.manager.clear()
    late.report(node="away", highest=GEN)
    late.report(rows, node="away", highest=GEN, page=1, last_page=True)
    assert late.holds(b"a", "unknown", "away") is None
    assert late.holds(b"b", "other", "away") is None


def test_engine_that_attaches_is_told_what_was_cleared_of_its_namespace(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    assert desk.attach().cleared == 0
    desk.manager.clear(Namespace("other"))
    assert desk.attach().cleared == 0
    desk.manager.clear()
    assert desk.attach().cleared == row.generation


def test_clear_of_a_namespace_holds_for_a_node_that_was_away(desk: Desk) -> None:
    (row,) = desk.store(b"a")
    desk.now += 2 * EXPIRY_S
    desk.manager.expire(desk.now)
    desk.manager.clear(Namespace("model"))
    desk.report(highest=row.generation, scheduler_epoch=1)
    reply = desk.report([row], highest=row.generation, scheduler_epoch=1, page=1, last_page=True)
    assert desk.held("a") == ""
    assert reply.cleared["model"] >= row.generation


def test_clear_that_an_earlier_life_has_left_holds_in_the_next_one() -> None:
    manager = BlockManager(Epoch(1), cleared={"": GEN, "model": GEN + 7})
    assert manager.cleared == {"": GEN, "model": GEN + 7}
    assert manager.epoch > 1
    desk = Desk(manager=manager)
    desk.report(highest=GEN + 8, scheduler_epoch=1)
    rows = [Row(b"a", 0, GEN + 7), Row(b"b", 1, GEN, "x"), Row(b"c", 2, GEN + 8)]
    desk.report(rows, highest=GEN + 8, scheduler_epoch=1, page=1, last_page=True)
    assert desk.held("ac") == "c"
    assert desk.holds(b"b", "x") is None


def test_clear_that_a_second_node_remembers_takes_back_what_the_first_one_told() -> None:
    """After a restart: who has not heard of the clearing speaks first."""
    desk = Desk(epoch=5)
    old, new = Row(b"a", 0, GEN), Row(b"b", 1, GEN + 1)
    desk.report(highest=GEN + 1, scheduler_epoch=1)
    desk.attach(held=leases([Row(b"", 2, GEN - 1)]))
    desk.report([old, new], highest=GEN + 1, scheduler_epoch=1, page=1, last_page=True)
    desk.attach("peer")
    came, gone = desk.catch_up("peer")
    assert (sorted(came), gone) == ([b"a", b"b"], [])
    assert desk.held("ab") == "ab"
    desk.report(node="other", highest=GEN, scheduler_epoch=1, cleared={"": GEN})
    assert desk.held("ab") == "b"
    assert desk.catch_up("peer") == ([], [b"a"])
    assert desk.sync().void
    assert desk.report().cleared == {"": GEN}


def test_clear_before_a_late_clock_is_found_out_is_of_what_was_stored_before() -> None:
    desk = Desk(epoch=2)
    desk.manager.clear()
    old = Row(b"a", 0, int(make_generation(Epoch(9), 5)))
    desk.report(highest=old.generation, scheduler_epoch=9)
    desk.report([old], highest=old.generation, scheduler_epoch=9, page=1, last_page=True)
    assert desk.held("a") == ""
    desk.attach()
    desk.now += SETTLE_S
    (row,) = desk.store(b"b")
    assert desk.held("b") == "b"
    assert row.generation > old.generation


def test_floor_of_a_disk_from_another_cluster_is_below_what_is_granted(desk: Desk) -> None:
    floor = int(make_generation(Epoch(30), 4))
    desk.report(node="other", cleared={"": floor})
    desk.attach()
    desk.now += SETTLE_S
    assert desk.lease(1)[0].generation > floor


def test_floor_of_an_earlier_life_with_this_epoch_holds_and_is_risen_above(desk: Desk) -> None:
    floor = int(make_generation(Epoch(1), 900))
    assert desk.report(cleared={"model": floor}).cleared == {"model": floor}
    desk.attach()
    desk.now += SETTLE_S
    assert desk.lease(1)[0].generation > floor


def test_namespaces_that_were_cleared_long_ago_share_a_floor(desk: Desk) -> None:
    desk.attach("other", namespace="other")
    desk.store(b"a", engine="other", namespace="other")
    for number in range(MAX_NAMESPACES + 1):
        desk.store(b"b")
        desk.manager.clear(Namespace(f"{number}"))
        desk.manager.check()
        assert len(desk.manager.cleared) <= MAX_NAMESPACES + 1
    assert desk.holds(b"a", "other") is None
    assert desk.holds(b"b") is not None


# A counter that is near its end


def test_generations_rise_over_many_epochs_with_one_conversation() -> None:
    settings = ManagerSettings(settle_s=SETTLE_S, generations_per_epoch=3)
    desk = Desk(manager=BlockManager(Epoch(1), settings))
    desk.report()
    desk.attach()
    generations = []
    for _ in range(20):
        rows = desk.store(b"a", b"b")
        generations += [row.generation for row in rows]
        desk.report(highest=rows[-1].generation, scheduler_epoch=desk.manager.granting)
    assert generations == sorted(set(generations))
    assert desk.manager.epoch == 1
    assert desk.manager.granting > 9
    assert desk.held("ab") == "ab"
    desk.manager.clear()
    assert desk.held("ab") == ""


def test_generations_never_fill_their_counter() -> None:
    generations = Generations(Epoch(3))
    generations.skip(GENERATIONS_PER_EPOCH - 1)
    assert generations.next == make_generation(Epoch(3), GENERATIONS_PER_EPOCH)
    before = generations.next
    generations.skip(MAX_KEYS)
    assert generations.next == make_generation(Epoch(4), 1) > before + MAX_KEYS


def test_life_after_a_risen_counter_grants_above_it_whatever_its_clock_says() -> None:
    desk = Desk(epoch=3)
    highest = int(make_generation(Epoch(8), 6))
    desk.report([Row(b"a", 0, highest)], highest=highest, scheduler_epoch=8)
    assert desk.manager.epoch == 9


# Pausing


def test_nothing_is_granted_while_the_cache_is_paused(desk: Desk) -> None:
    desk.manager.set_paused(True)
    reply = desk.sync(wanted=1)
    assert reply.paused
    assert reply.granted.slots == []
    assert desk.report().paused
    assert desk.attach().paused
    desk.manager.set_paused(False)
    assert not desk.sync().paused
    assert len(desk.lease(1)) == 1


def test_pause_that_a_node_remembers_holds_in_the_next_life() -> None:
    desk = Desk()
    assert desk.report(paused=True).paused


def test_pause_that_a_node_remembers_does_not_overrule_an_operator(desk: Desk) -> None:
    desk.manager.set_paused(False)
    assert not desk.report(node="other", paused=True).paused


# The picture for people


def test_status_counts_slots_chunks_and_leases(desk: Desk) -> None:
    desk.store(b"a", b"b")
    desk.lease(3)
    desk.now += 4
    desk.report()
    desk.now += 1
    status = desk.manager.status("ray://x", "1.2.3", desk.now)
    (node,), (engine,) = status.nodes, status.engines
    assert (node.node_id, node.epoch, node.chunks, node.leased_slots) == ("node", 7, 2, 3)
    assert (node.free_slots, node.pool_bytes, node.bytes_stored) == (3, 8 * PAGE, 11)
    assert node.age_s == 1
    assert (engine.engine_id, engine.leased_slots, engine.age_s) == ("engine", 3, 5)
    assert engine.counters == {"hits": 3}
    assert status.namespaces == {"model": 2}
    assert (status.address, status.raykv_version, status.epoch) == ("ray://x", "1.2.3", 1)


def test_engines_of_a_namespace_are_told_to_store_less_when_nothing_is_loaded_again(
    desk: Desk,
) -> None:
    desk.report()
    for engine, namespace in (("engine", "model"), ("twin", "model"), ("other", "second")):
        desk.attach(engine, namespace=namespace)
    desk.sync(counters={"chunks_stored": MIN_SAMPLE - 1})
    assert desk.sync("twin").store_share == 1
    desk.sync(counters={})
    desk.sync(counters={"chunks_stored": MIN_SAMPLE, "chunks_loaded": 0})
    shares = [desk.sync(engine).store_share for engine in ("engine", "twin", "other")]
    assert shares == [SOME, SOME, 1]
    assert desk.sync(idle=True).store_share == SOME


def test_engines_are_told_to_store_all_while_chunks_are_loaded_by_any_of_them(desk: Desk) -> None:
    desk.report()
    desk.attach()
    desk.attach("twin")
    desk.sync("twin", counters={"chunks_loaded": MIN_SAMPLE})
    assert desk.sync(counters={"chunks_stored": MIN_SAMPLE}).store_share == 1


def test_tokens_of_a_prefix_count_as_the_chunks_of_all_groups(desk: Desk) -> None:
    """A prefix needs few chunks of windows, and saves what computing them all costs."""
    desk.report()
    desk.attach(traits={"chunks": "0:16 1:16/2 2:16/2 3:16/2"})
    chunks = 4 * MIN_SAMPLE
    loaded = {"chunks_loaded": int(chunks * LEAST_REUSE / 3)}
    # Each is full attention; of the windows there are two chunks a prompt.
    saved = {"loaded_tokens": 16 * loaded["chunks_loaded"]}
    assert desk.sync(counters={"chunks_stored": chunks, **loaded, **saved}).store_share == 1


def test_nothing_is_decided_before_the_pools_were_filled_once() -> None:
    desk = Desk()
    desk.report(pages=2 * MIN_SAMPLE)
    desk.attach()
    assert desk.sync(counters={"chunks_stored": 2 * MIN_SAMPLE - 1}).store_share == 1
    assert desk.sync(counters={"chunks_stored": 2 * MIN_SAMPLE}).store_share == SOME


def test_status_has_the_traits_that_an_engine_told(desk: Desk) -> None:
    desk.report()
    traits = {"hash_algorithm": "sha256"}
    message = AttachEngine(
        PROTOCOL_VERSION, "engine", "node", "model", "tiny", 1, {0: PAGE}, traits=traits
    )
    assert not desk.manager.attach_engine(message, desk.now).error
    status = desk.manager.status("ray://x", "1.2.3", desk.now)
    assert status.engines[0].traits == traits


def test_name_of_an_engines_weights_is_told_until_it_was_heard() -> None:
    desk = PlainDesk(BlockManager(Epoch(1)))
    desk.report("n")
    for engine in ("first", "second-a", "second-b"):
        desk.attach(engine, "n")
    naming = Naming("order", "v2")
    assert desk.manager.name_weights("third", naming) == []
    assert desk.manager.name_weights("second", naming) == ["second-a", "second-b"]
    assert desk.sync("first").naming is None
    assert desk.sync("second-a").naming == naming
    assert desk.sync("second-a", idle=True).naming == naming
    assert desk.sync("second-a", heard="order").naming is None
    assert not desk.manager.has_heard("order")
    # It attaches as one of another namespace meanwhile.
    desk.attach("second-b", "n", "other")
    assert desk.sync("second-b").naming == naming
    desk.manager.detach_engine(EngineId("second-b"))
    assert desk.manager.has_heard("order")
