"""Bugs that the simulation must find. Each takes out one thing that the design depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec
import pytest

from raykv.base.ids import (
    Blocks,
    Key,
    Lookup,
    Namespace,
    NodeId,
    Refusal,
    Slot,
    Stamp,
)
from raykv.directory.known.document import Orders
from raykv.directory.known.marks import SpareMarks
from raykv.engine.listed import ListedPlace, PlaceChange
from raykv.engine.view import EngineView
from raykv.node.pool.claims import Name
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.jobs import Jobs, Landings
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, ChunkState, StorePart
from raykv.node.pool.reporting import Reporting
from raykv.node.pool.room import Room
from raykv.protocol.columns import NamedKeys
from raykv.protocol.listing import ALL_READ, EVICTIONS, ListedRow, ListingPart, Position, Reason
from raykv.protocol.node import Marks
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.node.owned_pool import land

Plant = Callable[[pytest.MonkeyPatch], None]


# The pool


def source_serves_what_is_in_the_slot(patches: pytest.MonkeyPatch) -> None:
    """Who reads a chunk that has gone gets what has its slot by now."""
    begin, make_ready = PoolIndex._begin_load, PoolIndex._make_ready

    def remember(index: PoolIndex, records: Sequence[ChunkRecord]) -> None:
        make_ready(index, records)
        for record in records:
            slots[id(index), record.namespace, record.key] = record.slot

    def begin_load(
        index: PoolIndex, namespace: Namespace, key: Key, wanted: Blocks, slot_bytes: int
    ) -> ChunkRecord | Refusal:
        slot = slots.get((id(index), namespace, key))
        if index.find(namespace, key) is None and slot is not None:
            for record in index.places:
                if record.slot == slot and record.state is ChunkState.READY:
                    return begin(index, record.namespace, record.key, wanted, slot_bytes)
        return begin(index, namespace, key, wanted, slot_bytes)

    slots: dict[tuple[int, Namespace, Key], Slot] = {}
    patches.setattr(PoolIndex, "_make_ready", remember)
    patches.setattr(PoolIndex, "_begin_load", begin_load)


def slot_is_given_while_it_has_readers(patches: pytest.MonkeyPatch) -> None:
    """What goes leaves its slot at once, whoever reads it."""

    def free(index: PoolIndex, record: ChunkRecord) -> None:
        is_idle = record.state is ChunkState.VOID and not record.writers
        if is_idle and any(each is record for each in index.places):
            index.places.give_back(record)

    patches.setattr(PoolIndex, "_free_if_idle", free)


def slot_is_given_while_it_is_written(patches: pytest.MonkeyPatch) -> None:
    """What is void leaves its slot at once, whoever writes it."""

    def free(index: PoolIndex, record: ChunkRecord) -> None:
        is_idle = record.state is ChunkState.VOID and not record.readers
        if is_idle and any(each is record for each in index.places):
            index.places.give_back(record)

    patches.setattr(PoolIndex, "_free_if_idle", free)


def end_is_by_name(patches: pytest.MonkeyPatch) -> None:
    """Who ends a copy ends that of whatever has its name by then."""
    end = PoolIndex.end_stores

    def end_stores(
        index: PoolIndex, records: Sequence[ChunkRecord], rank: int, **how: Any
    ) -> list[ChunkRecord]:
        def named(record: ChunkRecord) -> ChunkRecord:
            other = index._writing.get((record.namespace, record.key))
            return record if other is None or not other.writers >> rank & 1 else other

        return end(index, [named(record) for record in records], rank, **how)

    patches.setattr(PoolIndex, "end_stores", end_stores)


def _begin_anyway(
    index: PoolIndex,
    begin: Callable[..., list[ChunkRecord | Refusal]],
    part: StorePart,
    chunks: Sequence[ChunkRecord],
    *times: float,
) -> list[ChunkRecord | Refusal]:
    """Begin stores, though another rank has ended the job."""
    job = index._job(part)
    ended = 0
    if not isinstance(job, Refusal):
        ended, job.ended = job.ended, 0
    found = begin(index, part, chunks, *times)
    if not isinstance(job, Refusal):
        job.ended |= ended
    return found


def verdict_differs_between_ranks(patches: pytest.MonkeyPatch) -> None:
    """Each rank is told how things are when it comes."""
    begin = PoolIndex.begin_stores

    def begin_stores(
        index: PoolIndex, part: StorePart, chunks: Sequence[ChunkRecord], *times: float
    ) -> list[ChunkRecord | Refusal]:
        job = index._job(part)
        if not isinstance(job, Refusal):
            for name, verdict in list(job.verdicts.items()):
                if isinstance(verdict, Refusal):
                    del job.verdicts[name]
            job.full.clear()
        return _begin_anyway(index, begin, part, chunks, *times)

    patches.setattr(PoolIndex, "begin_stores", begin_stores)


def rank_of_a_voided_store_joins_again(patches: pytest.MonkeyPatch) -> None:
    """A rank that comes after another one has failed begins the store anew."""
    begin = PoolIndex.begin_stores

    def begin_stores(
        index: PoolIndex, part: StorePart, chunks: Sequence[ChunkRecord], *times: float
    ) -> list[ChunkRecord | Refusal]:
        job = index._job(part)
        if not isinstance(job, Refusal):
            for name, verdict in list(job.verdicts.items()):
                if isinstance(verdict, ChunkRecord) and verdict.state is ChunkState.VOID:
                    del job.verdicts[name]
        return _begin_anyway(index, begin, part, chunks, *times)

    patches.setattr(PoolIndex, "begin_stores", begin_stores)


def store_of_a_dead_engine_never_ends(patches: pytest.MonkeyPatch) -> None:
    """Nobody ends what ranks have begun that are gone."""
    patches.setattr(PoolIndex, "end_line", lambda *_: None)
    patches.setattr(PoolIndex, "end_life", lambda *_: None)


def stores_go_before_loads(patches: pytest.MonkeyPatch) -> None:
    """Stores of a message take their slots before its loads have registered their readers."""
    announce = Jobs._begin_loads

    def later(jobs: Jobs, loads: Sequence[Any], now: float) -> None:
        del jobs, loads, now

    from raykv.node.pool.owner import NodePool

    def admit(pool: NodePool, life: int, rank: int, num_ranks: int, jobs: Any, now: float) -> Any:
        admitted = pool.jobs.announce(life, rank, num_ranks, jobs, now)
        for each in admitted:
            pool.begin_chunks(each, range(len(each.keys)), now)
        announce(pool.jobs, [each for each in admitted if each.is_load and each.sizes], now)
        return admitted

    patches.setattr(Jobs, "_begin_loads", later)
    patches.setattr("tests.simulation.nodes.node.admit", admit)


def narrow_chunk_is_here_for_its_repair(patches: pytest.MonkeyPatch) -> None:
    """What is offered is there, though with fewer blocks."""
    patches.setattr(PoolIndex, "_has", lambda *_: True)


def found_chunks_go_for_stores(patches: pytest.MonkeyPatch) -> None:
    """What a lookup has found may be evicted before its load comes."""
    patches.setattr("raykv.node.pool.index.FRESH_S", 0.0)


def node_waits_for_the_directory(patches: pytest.MonkeyPatch) -> None:
    """Nothing is stored while much of the listing has not been reported."""
    from raykv.node.pool.owner import NodePool

    begin = NodePool.begin_chunks

    def begin_chunks(pool: NodePool, job: Any, numbers: Iterable[int], now: float) -> None:
        if pool.reporting.num_unread > 20:
            for at in numbers:
                job.put(at, Refusal.QUEUE_FULL)
            return
        begin(pool, job, numbers, now)

    patches.setattr(NodePool, "begin_chunks", begin_chunks)


def lives_of_an_engine_are_one(patches: pytest.MonkeyPatch) -> None:
    """An engine that begins anew has the life that it had before, and numbers its jobs anew."""
    from tests.simulation.nodes.cluster import Cluster

    def life_of(cluster: Cluster, seats: Any) -> int:
        del cluster
        return crc32(seats.engine_id.encode()) + 1

    patches.setattr(Cluster, "life_of", life_of)


# Orders


def clear_reaches_what_is_known(patches: pytest.MonkeyPatch) -> None:
    """A clear drops what is there; what comes later is taken in, whatever its stamp."""
    is_void, drop = Floors.is_void, PoolIndex.drop_void
    dropping = [False]

    def drop_void(index: PoolIndex, risen: Iterable[Namespace]) -> None:
        dropping[0] = True
        try:
            drop(index, risen)
        finally:
            dropping[0] = False

    def is_void_now(floors: Floors, namespace: Namespace, stamp: Stamp) -> bool:
        return dropping[0] and is_void(floors, namespace, stamp)

    patches.setattr(PoolIndex, "drop_void", drop_void)
    patches.setattr(Floors, "is_void", is_void_now)


def clear_of_all_is_of_what_is_known(patches: pytest.MonkeyPatch) -> None:
    """To clear everything is to clear each namespace that has been cleared before."""
    clear = Orders.clear

    def clear_known(orders: Orders, order_id: str, namespace: str, now: float) -> OrdersDocument:
        made = clear(orders, order_id, namespace, now)
        if namespace:
            return made
        told = orders.told(now)
        number = made.stamp.number
        known = dict.fromkeys(told.floors if told else (), number)
        return msgspec.structs.replace(made, floors=known)

    patches.setattr(Orders, "clear", clear_known)


def floor_of_what_was_fetched_is_not_compared(patches: pytest.MonkeyPatch) -> None:
    """What comes from another node is taken in, whatever its stamp."""
    land, is_void = Landings.land, PoolIndex._is_void
    landed: set[ChunkRecord] = set()

    def land_all(landings: Landings, chunk: ChunkRecord, now: float) -> ChunkRecord | Refusal:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Floors, "is_void", lambda *_: False)
            found = land(landings, chunk, now)
        if isinstance(found, ChunkRecord):
            landed.add(found)
        return found

    def unless_landed(index: PoolIndex, record: ChunkRecord) -> bool:
        return record not in landed and is_void(index, record)

    patches.setattr(Landings, "land", land_all)
    patches.setattr(PoolIndex, "_is_void", unless_landed)


def fetch_raises_the_stamp(patches: pytest.MonkeyPatch) -> None:
    """What comes from another node counts as stored under the orders that this one knows."""
    from raykv.node.pool.owner import NodePool

    def land_anew(pool: NodePool, *fields: Any) -> ChunkRecord | Refusal:
        namespace, key, slot_bytes, _, *rest = fields
        return land(pool, namespace, key, slot_bytes, pool.orders.stamp, *rest)

    patches.setattr("tests.simulation.nodes.fetches.land", land_anew)


def orders_are_told_before_they_are_kept(patches: pytest.MonkeyPatch) -> None:
    """A draft is in force before the store of Ray's head has it."""
    drafted = Orders._drafted

    def in_force(orders: Orders, order_id: str, now: float, **changes: Any) -> OrdersDocument:
        made = drafted(orders, order_id, now, **changes)
        orders._document, orders._since = made, now
        return made

    patches.setattr(Orders, "_drafted", in_force)
    patches.setattr(
        Orders, "confirm", lambda orders, draft, now: setattr(orders, "_document", draft)
    )


def orders_die_with_the_scheduler_actor(patches: pytest.MonkeyPatch) -> None:
    """The next life does not hear of what was ordered."""
    begin = Orders.__init__

    def begin_anew(orders: Orders, kept: Any, drawn: int, now: float) -> None:
        del kept
        begin(orders, None, drawn, now)

    patches.setattr(Orders, "__init__", begin_anew)
    patches.setattr(Orders, "show", lambda *_: False)


# The listing, and who reads it


def refusal_counts_at_any_number(patches: pytest.MonkeyPatch) -> None:
    """Rows of a result are believed, whatever was read of their keys since."""
    patches.setattr(ListedPlace, "_is_news", lambda *_: True)


def parts_count_in_any_order(patches: pytest.MonkeyPatch) -> None:
    """A part of a listing is taken wherever the reader is."""

    def follows(part: ListingPart, position: Position) -> bool:
        return part.start.reader == position.reader

    patches.setattr(ListingPart, "follows", follows)


def listing_is_read_on_over_a_life(patches: pytest.MonkeyPatch) -> None:
    """What an earlier life has said stays."""

    def begin(place: ListedPlace, end: Position) -> list[PlaceChange]:
        del place, end
        return []

    patches.setattr(ListedPlace, "_begin", begin)


def page_comes_without_the_changes_since(patches: pytest.MonkeyPatch) -> None:
    """Who has not read all pages gets the next one, and no changes."""
    part_after = PoolIndex.part_after

    def pages_first(
        index: PoolIndex, position: Position, most: int, wanted: Any = None
    ) -> ListingPart:
        part = part_after(index, position, most, wanted)
        if part.begins or position.place == ALL_READ:
            return part
        records, _ = index.places.records_from(position.place, min(most, 1024))
        listed = {(each.namespace, each.key) for each in records}
        rows = [row for row in part.rows if (row.namespace, row.key) in listed]
        return msgspec.structs.replace(part, rows=type(part.rows).of(rows))

    patches.setattr(PoolIndex, "part_after", pages_first)


def result_is_no_change(patches: pytest.MonkeyPatch) -> None:
    """What a job's result says is forgotten, and comes with the listing or never."""

    def learn(
        place: ListedPlace, life: int, number: int, rows: Iterable[ListedRow], now: float
    ) -> list[PlaceChange]:
        del place, life, number, rows, now
        return []

    patches.setattr(ListedPlace, "learn", learn)


def eviction_is_not_listed(patches: pytest.MonkeyPatch) -> None:
    """Nobody hears of chunks that have gone."""
    changed = Listing.changed

    def unless_evicted(listing: Listing, record: Any, reason: Reason) -> None:
        if reason not in EVICTIONS:
            changed(listing, record, reason)

    patches.setattr(Listing, "changed", unless_evicted)


# The view


def lookups_touch_nothing(patches: pytest.MonkeyPatch) -> None:
    """Places are not told what a request has found before it is loaded."""
    ask = EngineView.ask

    def ask_only(view: EngineView, request_id: str, keys: Sequence[Key]) -> None:
        found = list(view.found._rows)
        ask(view, request_id, keys)
        view.found._rows.clear()
        view.found._rows.extend(found)

    patches.setattr(EngineView, "ask", ask_only)


def one_place_is_enough(patches: pytest.MonkeyPatch) -> None:
    """What one place of an engine has is READY for it."""
    compare = EngineView._compare

    def compare_any(view: EngineView, key: Key) -> None:
        found = [each.listed.ready.get(key) for each in view._places]
        there = [blocks for blocks in found if blocks]
        if there and isinstance(view._ready, dict):
            view._ready[key] = there[0]
        else:
            compare(view, key)

    patches.setattr(EngineView, "_compare", compare_any)


def answer_from_before_a_reset_counts(patches: pytest.MonkeyPatch) -> None:
    """An engine that has emptied its view takes in what was there before."""
    patches.setattr(EngineView, "is_clearing", property(lambda _: False))


def what_is_coming_is_a_hit(patches: pytest.MonkeyPatch) -> None:
    """A lookup says HIT for what another engine stores."""
    lookup = EngineView.lookup

    def hopeful(view: EngineView, request_id: str, key: Key, now: float) -> Lookup:
        found = lookup(view, request_id, key, now)
        return Lookup.HIT if found is Lookup.HIT_PENDING else found

    patches.setattr(EngineView, "lookup", hopeful)


def late_refusal_of_blocks_counts(patches: pytest.MonkeyPatch) -> None:
    """A rank says late that a chunk lacks blocks, which has them by now."""
    patches.setattr(ListedPlace, "distrust", lambda place, key, _: place._drop([key]))


def silent_place_is_believed(patches: pytest.MonkeyPatch) -> None:
    """A place that has not been heard of for long has what it had."""
    patches.setattr(ListedPlace, "is_silent", lambda *_: False)


# Spare copies


def all_nodes_are_spare(patches: pytest.MonkeyPatch) -> None:
    """Each node that has a chunk is told that another one keeps it."""

    def wait(marks: SpareMarks, node_id: NodeId, name: Name, *, spare: bool) -> None:
        del spare
        marks._marked[node_id].spare[name] = None

    def split(marks: SpareMarks, node_id: NodeId, marked: Any) -> tuple[list[Name], list[Name]]:
        del marks, node_id
        return list(marked.out), []

    patches.setattr(SpareMarks, "_wait", wait)
    patches.setattr(SpareMarks, "_split", split)


def keeper_is_not_told(patches: pytest.MonkeyPatch) -> None:
    """A node never hears that its copy is not spare any more."""
    mark = Reporting._mark

    def mark_spare(reporting: Reporting, marks: Marks) -> None:
        mark(reporting, msgspec.structs.replace(marks, kept=NamedKeys()))

    patches.setattr(Reporting, "_mark", mark_spare)


def marks_are_never_forgotten(patches: pytest.MonkeyPatch) -> None:
    """Marks of an earlier life of the directory stay, and those for a keeper that is lost."""
    patches.setattr(Room, "forget_spares", lambda _: None)


def mark_counts_at_any_number(patches: pytest.MonkeyPatch) -> None:
    """A mark is believed of a chunk that was stored anew since."""
    mark = Reporting._mark

    def mark_all(reporting: Reporting, marks: Marks) -> None:
        mark(reporting, msgspec.structs.replace(marks, known=1 << 60))

    patches.setattr(Reporting, "_mark", mark_all)


BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        source_serves_what_is_in_the_slot,
        slot_is_given_while_it_has_readers,
        slot_is_given_while_it_is_written,
        end_is_by_name,
        verdict_differs_between_ranks,
        rank_of_a_voided_store_joins_again,
        store_of_a_dead_engine_never_ends,
        stores_go_before_loads,
        narrow_chunk_is_here_for_its_repair,
        found_chunks_go_for_stores,
        node_waits_for_the_directory,
        lives_of_an_engine_are_one,
        clear_reaches_what_is_known,
        clear_of_all_is_of_what_is_known,
        floor_of_what_was_fetched_is_not_compared,
        fetch_raises_the_stamp,
        orders_are_told_before_they_are_kept,
        orders_die_with_the_scheduler_actor,
        refusal_counts_at_any_number,
        result_is_no_change,
        parts_count_in_any_order,
        listing_is_read_on_over_a_life,
        page_comes_without_the_changes_since,
        eviction_is_not_listed,
        answer_from_before_a_reset_counts,
        lookups_touch_nothing,
        one_place_is_enough,
        what_is_coming_is_a_hit,
        late_refusal_of_blocks_counts,
        silent_place_is_believed,
        all_nodes_are_spare,
        keeper_is_not_told,
        marks_are_never_forgotten,
        mark_counts_at_any_number,
    )
}

OF_PLACES = {one_place_is_enough.__name__}
"""Those that engines over several nodes meet."""
