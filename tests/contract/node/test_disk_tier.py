"""A disk tier over a real pool and a real folder: what the pool gives up comes back as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raykv.node.disk.folder
import raykv.node.disk.tier
from raykv.base.ids import (
    EVERY_NAMESPACE,
    ChunkName,
    Epoch,
    Generation,
    Namespace,
    Refusal,
    Slot,
)
from raykv.base.settings import DiskPlace
from raykv.node.disk.chunk_file import PART_SUFFIX, ChunkBytes, ChunkFile, write_chunks
from raykv.node.disk.folder import TierFolder
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.peers import PendingRead
from raykv.protocol.columns import Handle, Replica, Source, SourceKind
from raykv.protocol.node import Demotions, DiskOrder
from raykv.protocol.peer import ReadRequest
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    NAMESPACE,
    PAGE,
    Network,
    Node,
    assert_right,
    overwritten,
    refusals,
)
from tests.fixtures.waiting import wait_until

Made = Callable[..., DiskTier]


@pytest.fixture
def make(here: Node, tmp_path: Path) -> Iterator[Made]:
    """Tiers of the node `here`, one after another on the same folder."""
    made: list[DiskTier] = []

    def one(path: Path = tmp_path, *, epoch: Epoch = here.epoch, **place: int) -> DiskTier:
        limits = {"most_bytes": 1 << 20, "floor_bytes": 0, **place}
        tier = DiskTier(DiskPlace(str(path), **limits), here.keeper, epoch)
        made.append(tier)
        tier.start()
        return tier

    yield one
    for tier in made:
        tier.stop()
    for tier in made:
        end(tier)


def end(tier: DiskTier) -> None:
    """As if its process had ended."""
    tier.stop()
    wait_until(lambda: not threads(), 5.0, "the tier's threads end")
    folder = tier._state.folder
    if folder is not None:
        tier._state.folder = None
        folder.close()


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("raykv-disk")]


def demotions(*names: ChunkName, tenant: str = "") -> Demotions:
    return Demotions(
        [str(NAMESPACE)],
        [0] * len(names),
        [name.key for name in names],
        [name.slot for name in names],
        [name.generation for name in names],
        ["", tenant] if tenant else [],
        [1] * len(names) if tenant else [],
    )


def write(tier: DiskTier, *names: ChunkName, tenant: str = "") -> None:
    """Have chunks of a tenant on the disk."""
    before = tier.stats().chunks_written
    tier.demote(demotions(*names, tenant=tenant))
    wait_until(
        lambda: tier.stats().chunks_written == before + len(names), 10.0, "chunks are written"
    )


def replicas(tier: DiskTier, epoch: Epoch) -> dict[bytes, Replica]:
    """What a directory is told of the disk."""
    found = {}
    tier.take_order(DiskOrder(99, 0))
    news = tier.news()
    columns = zip(news.came.keys, news.came.places, news.came.generations, strict=True)
    for name, place, generation in columns:
        handle = Handle(Slot(place), Generation(generation))
        found[name] = Replica(Source("here", SourceKind.DISK), epoch, handle)
    return found


def fetcher(here: Node, tier: DiskTier) -> FetchService:
    transport = TieredTransport("here", tier.reads, here.network)
    return FetchService(here.keeper, here.epoch, transport)


def test_what_the_pool_gives_up_comes_back_with_equal_bytes(here: Node, make: Made) -> None:
    tier = make()
    names = [here.store(key(number), PAGE * (1 + number % 3)) for number in range(9)]
    write(tier, *names)
    told = replicas(tier, here.epoch)
    for name in names:
        here.keeper.clear({})
        here.store(key(50 + name.slot), name.slot_bytes, at=here.lease(slot=name.slot))
    orders = [here.order(n.key, told[n.key], num_bytes=n.slot_bytes) for n in names]
    result = fetcher(here, tier).fetch(here.request(orders))
    assert refusals(result) == [Refusal.NONE] * len(names)
    assert_right(here, orders)
    assert tier.stats().chunks_read == len(names)


def test_another_node_reads_from_the_disk_through_the_node(
    here: Node, other: Node, network: Network, make: Made
) -> None:
    tier = make()
    name = here.store(key(1))
    write(tier, name)
    order = other.order(key(1), replicas(tier, here.epoch)[key(1)])

    class Remote:
        def start_read(self, source: Source, request: ReadRequest) -> PendingRead:
            assert source.node_id == "here"
            assert request.from_disk
            return tier.reads.start_read(request)

    transport = TieredTransport("other", None, Remote())
    service = FetchService(other.keeper, other.epoch, transport)
    assert refusals(service.fetch(other.request([order]))) == [Refusal.NONE]
    assert_right(other, [order])


def test_chunk_that_was_overwritten_before_it_was_written_is_left_out(
    here: Node, make: Made
) -> None:
    tier = make()
    gone, kept = here.store(key(1)), here.store(key(2))
    overwritten(here, gone)
    write_some = demotions(gone, kept)
    tier.demote(write_some)
    wait_until(lambda: tier.stats().chunks_written == 1, 10.0, "the other one is written")
    assert list(replicas(tier, here.epoch)) == [key(2)]


def test_restart_finds_the_chunks_again(here: Node, make: Made) -> None:
    first = make()
    name = here.store(key(1))
    write(first, name)
    end(first)
    again = make()
    wait_until(lambda: again.stats().num_chunks == 1, 10.0, "the folder is read")
    overwritten(here, name)
    order = here.order(key(1), replicas(again, here.epoch)[key(1)])
    assert refusals(fetcher(here, again).fetch(here.request([order]))) == [Refusal.NONE]
    assert_right(here, [order])


def test_place_of_an_earlier_life_is_refused(here: Node, make: Made) -> None:
    tier = make()
    write(tier, here.store(key(1)))
    replica = replicas(tier, Epoch(here.epoch - 1))[key(1)]
    result = fetcher(here, tier).fetch(here.request([here.order(key(1), replica)]))
    assert refusals(result) == [Refusal.BAD_HANDLE]


def test_cleared_chunks_never_come_back(here: Node, make: Made) -> None:
    tier = make()
    name = here.store(key(1))
    write(tier, name)
    told = replicas(tier, here.epoch)
    tier.clear({NAMESPACE: name.generation})
    order = here.order(key(1), told[key(1)])
    result = fetcher(here, tier).fetch(here.request([order]))
    assert refusals(result) == [Refusal.STALE]
    assert result.lost.keys == [key(1)]
    folder = tier._state.folder
    assert folder is not None
    wait_until(lambda: not list(folder.path.glob("*.safetensors")), 10.0, "the file is deleted")
    end(tier)
    again = make()
    wait_until(lambda: not again.stats().problem, 10.0, "the folder is read")
    assert again.cleared() == {NAMESPACE: name.generation}


def test_folder_that_is_taken_up_later_brings_nothing_back(here: Node, make: Made) -> None:
    """All was cleared while nobody owned the folder, nor knew the namespaces in it."""
    first = make()
    old, new = here.store(key(1)), here.store(key(2))
    write(first, old, new)
    end(first)
    later = make()
    later.clear({EVERY_NAMESPACE: old.generation})
    wait_until(lambda: later.stats().num_chunks == 1, 10.0, "the folder is read")
    assert later.wait_for_clearings(10.0)
    assert list(replicas(later, here.epoch)) == [key(2)]
    end(later)
    last = make()
    wait_until(lambda: last.stats().num_chunks == 1, 10.0, "the folder is read")
    assert last.cleared() == {EVERY_NAMESPACE: old.generation}


def test_folder_whose_clearings_can_not_be_meant_is_not_believed(here: Node, make: Made) -> None:
    tier = make()
    write(tier, here.store(key(1)))
    folder = tier._state.folder
    assert folder is not None
    end(tier)
    (folder.path / "cleared.json").write_text(f'{{"": {1 << 70}}}')
    again = make()
    wait_until(lambda: "can't be read" in again.stats().problem, 10.0, "it says why")
    assert again.stats().num_chunks == 0


def test_file_that_outlived_its_clearing_is_not_believed(
    here: Node, make: Made, tmp_path: Path
) -> None:
    """A crash came after the clearing was noted and before the files were deleted."""
    tier = make()
    name = here.store(key(1))
    write(tier, name)
    folder = tier._state.folder
    assert folder is not None
    end(tier)
    folder.write_cleared({NAMESPACE: int(name.generation)})
    again = make()
    wait_until(lambda: not again.stats().problem, 10.0, "the folder is read")
    assert again.stats().num_chunks == 0
    wait_until(lambda: not list(tmp_path.glob("*/*.safetensors")), 10.0, "it is deleted")


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_damaged_file_is_a_refusal_and_is_forgotten(
    here: Node, make: Made, tmp_path: Path, harm: str
) -> None:
    tier = make()
    write(tier, here.store(key(1)))
    (path,) = tmp_path.glob("*/*.safetensors")
    raw = bytearray(path.read_bytes())
    if harm == "delete":
        path.unlink()
    else:
        raw[-1] ^= 1
        path.write_bytes(raw if harm == "flip" else raw[:-1])
    order = here.order(key(1), replicas(tier, here.epoch)[key(1)])
    (refusal,) = refusals(fetcher(here, tier).fetch(here.request([order])))
    assert refusal is (Refusal.STALE if harm == "delete" else Refusal.CORRUPT)
    assert tier.stats().num_chunks == 0
    assert tier.stats().chunks_damaged == (harm != "delete")


def test_oldest_files_go_when_the_limit_is_reached(here: Node, make: Made, tmp_path: Path) -> None:
    tier = make(most_bytes=20 * PAGE)
    for number in range(8):
        write(tier, here.store(key(number), 4 * PAGE))
    stats = tier.stats()
    assert stats.is_full
    assert stats.used_bytes <= 20 * PAGE
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 20 * PAGE
    assert stats.files_evicted >= 4
    assert key(7) in replicas(tier, here.epoch)


def test_flood_of_others_leaves_a_tenant_what_it_is_guaranteed_of_the_disk(
    here: Node, make: Made
) -> None:
    shares = {"quiet": (0.4, 1.0), "greedy": (0.0, 0.2)}
    tier = make(most_bytes=20 * (PAGE + 1024))
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")
    tier.take_order(DiskOrder(shares=shares))
    hers = [here.store(key(number)) for number in range(6)]
    for name in hers:
        write(tier, name, tenant="quiet")
    for number in range(100, 140):
        write(tier, here.store(key(number)), tenant="greedy" if number % 2 else "")
    stats = tier.stats()
    assert stats.used_bytes <= stats.most_bytes
    assert stats.tenant_bytes["greedy"] <= 0.2 * stats.most_bytes
    told = replicas(tier, here.epoch)
    assert {name.key for name in hers} <= told.keys()
    assert len(told) > len(hers) + 3
    # Files say whose they are.
    end(tier)
    again = make(most_bytes=20 * (PAGE + 1024))
    wait_until(lambda: not again.stats().problem, 10.0, "the folder is read again")
    assert again.stats().tenant_bytes == stats.tenant_bytes


def test_nothing_is_written_below_the_floor_and_it_says_so(here: Node, make: Made) -> None:
    tier = make(floor_bytes=1 << 60)
    wait_until(lambda: "must stay free" in tier.stats().problem, 10.0, "it says why")
    tier.demote(demotions(here.store(key(1))))
    time.sleep(0.2)
    assert tier.stats().chunks_written == 0


def test_disk_that_fails_for_a_while_is_used_again(
    here: Node, make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.disk.tier, "DISK_RETRY_S", 0.2)
    tier = make()
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(raykv.node.disk.tier, "write_chunks", full)
        tier.demote(demotions(here.store(key(1))))
        wait_until(lambda: tier.stats().problem == "No space left on device", 10.0, "it fails")
    wait_until(lambda: not tier.stats().problem, 10.0, "it is tried again")
    write(tier, here.store(key(2)))
    assert not list(tmp_path.glob(f"*/*{PART_SUFFIX}"))


def test_place_that_can_not_be_a_folder_is_a_problem_and_no_error(
    here: Node, make: Made, tmp_path: Path
) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    tier = make(place)
    wait_until(lambda: "disk_path=" in tier.stats().problem, 10.0, "it says why")
    assert tier.news().listing == 0
    order = here.order(
        key(1), Replica(Source("here", SourceKind.DISK), here.epoch, Handle(Slot(1), Generation(1)))
    )
    assert refusals(fetcher(here, tier).fetch(here.request([order]))) == [Refusal.BAD_HANDLE]


def test_keep_writes_all_that_the_pool_has(here: Node, make: Made) -> None:
    tier = make()
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")
    for number in range(20):
        here.store(key(number))
    assert tier.keep(10.0) == 0
    assert tier.stats().num_chunks == 20
    # A second time there is nothing to do.
    assert tier.keep(10.0) == 0
    assert tier.stats().chunks_written == 20


def test_slow_disk_holds_up_no_store(
    here: Node, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slow(
        path: Path,
        namespace: Namespace,
        chunks: list[ChunkBytes],
        facts: dict[str, str] | None = None,
    ) -> int:
        goes_on.wait(20.0)
        return write_chunks(path, namespace, chunks, facts)

    monkeypatch.setattr(raykv.node.disk.tier, "write_chunks", slow)
    tier = make()
    name = here.store(key(1))
    tier.demote(demotions(name))
    wait_until(lambda: bool(tier._batches), 10.0, "the chunk was copied")
    # Its slot is free for others while the disk is at it.
    overwritten(here, name)
    goes_on.set()
    wait_until(lambda: tier.stats().chunks_written == 1, 10.0, "it is written")
    assert list(replicas(tier, here.epoch)) == [key(1)]


def test_chunks_are_copied_before_others_take_their_place(here: Node, make: Made) -> None:
    tier = make()
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")
    names = [here.store(key(number)) for number in range(9)]
    assert tier.demote_now(demotions(*names), 10.0)
    for name in names:
        overwritten(here, name)
    wait_until(lambda: tier.stats().chunks_written == len(names), 10.0, "they are written")
    assert sorted(replicas(tier, here.epoch)) == [key(number) for number in range(9)]
    assert tier.demote_now(Demotions(), 10.0)


def test_nobody_waits_for_a_disk_that_can_not_be_written(here: Node, make: Made) -> None:
    full = make(floor_bytes=1 << 60)
    wait_until(lambda: "must stay free" in full.stats().problem, 10.0, "it says why")
    began = time.monotonic()
    assert not full.demote_now(demotions(here.store(key(1))), 30.0)
    assert time.monotonic() - began < 15.0
    assert full.stats().chunks_written == 0


def test_chunks_that_find_no_room_are_said(
    here: Node, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")
    names = [here.store(key(number)) for number in range(2)]
    monkeypatch.setattr(raykv.node.disk.tier, "MAX_QUEUED", 0)
    assert not tier.demote_now(demotions(*names), 10.0)
    monkeypatch.setattr(raykv.node.disk.tier, "MAX_QUEUED", 2)
    assert tier.demote_now(demotions(*names), 10.0)


def test_copy_that_takes_too_long_is_said(
    here: Node, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    wait_until(lambda: not tier.stats().problem, 10.0, "the folder is read")
    goes_on = threading.Event()
    real = DiskTier._copy
    monkeypatch.setattr(
        DiskTier, "_copy", lambda self, *queued: (goes_on.wait(20.0), real(self, *queued))
    )
    assert not tier.demote_now(demotions(here.store(key(1))), 0.1)
    goes_on.set()
    assert tier.demote_now(Demotions(), 10.0)


def test_clearing_is_noted_while_nothing_can_be_written(here: Node, make: Made) -> None:
    tier = make()
    name = here.store(key(1))
    write(tier, name)
    end(tier)
    full = make(floor_bytes=1 << 60)
    wait_until(lambda: "must stay free" in full.stats().problem, 10.0, "it says why")
    full.clear({NAMESPACE: name.generation})
    folder = full._state.folder
    assert folder is not None
    wait_until(lambda: bool(folder.read_cleared()), 10.0, "it is noted")
    wait_until(lambda: not list(folder.path.glob("*.safetensors")), 10.0, "the file goes")


def test_clearing_makes_room_where_it_can_not_be_noted(
    here: Node, make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    name = here.store(key(1))
    write(tier, name)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TierFolder, "write_cleared", full)
    tier.clear({NAMESPACE: name.generation})
    wait_until(lambda: not list(tmp_path.glob("*/*.safetensors")), 10.0, "the file goes")
    assert not tier.wait_for_clearings(0.1)
    monkeypatch.undo()
    assert tier.wait_for_clearings(10.0)
    folder = tier._state.folder
    assert folder is not None
    assert folder.read_cleared() == {NAMESPACE: name.generation}


def test_file_that_can_not_be_read_for_a_moment_is_no_damage(
    here: Node, make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    write(tier, here.store(key(1)))
    end(tier)
    monkeypatch.setattr(raykv.node.disk.tier, "DISK_RETRY_S", 0.1)

    def fails(_: Path) -> ChunkFile:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(raykv.node.disk.folder, "read_header", fails)
        again = make()
        wait_until(lambda: again.stats().problem == "Input/output error", 10.0, "it says why")
    wait_until(lambda: again.stats().num_chunks == 1, 10.0, "it is tried again")
    assert again.stats().files_damaged == 0
