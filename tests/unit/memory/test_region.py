"""Shared memory: what it holds, who sees it, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raykv.base.errors import HandleError
from raykv.memory.region import PREFAULT_PIECE_BYTES, Region, yield_to_others
from tests.fixtures.processes import is_open

SIZE = 3 * 4096 + 100


def allocated(region: Region) -> int:
    return os.fstat(region.fd).st_blocks * 512


def test_anonymous_region_is_zero_and_leaves_neither_a_file_nor_a_descriptor_to_children() -> None:
    region = Region.anonymous(SIZE, "test")
    assert bytes(region.array()) == bytes(SIZE)
    assert str(Path(f"/proc/self/fd/{region.fd}").readlink()).startswith("/memfd:raykv-test")
    assert os.fstat(region.fd).st_nlink == 0
    assert not os.get_inheritable(region.fd)
    region.close()


def test_received_region_sees_what_the_other_side_writes() -> None:
    ours = Region.anonymous(SIZE, "test")
    theirs = Region.received(os.dup(ours.fd), SIZE)
    ours.array()[SIZE - 1] = 42
    theirs.array()[0] = 43
    assert theirs.array()[SIZE - 1] == 42
    assert ours.array()[0] == 43
    ours.close()
    assert theirs.array()[SIZE - 1] == 42
    theirs.close()


def test_received_region_is_refused_and_closed_when_it_is_shorter_than_said() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, SIZE - 1)
    with pytest.raises(HandleError, match=f"has {SIZE - 1} bytes, not {SIZE}"):
        Region.received(fd, SIZE)
    assert not is_open(fd)


def test_region_is_refused_and_closed_when_it_cannot_be_mapped() -> None:
    fd = os.memfd_create("huge")
    with pytest.raises(HandleError, match="cannot map"):
        Region(fd, 1 << 62, "something")
    assert not is_open(fd)


def test_close_unmaps_and_closes_once() -> None:
    region = Region.anonymous(SIZE, "test")
    fd = region.fd
    region.close()
    assert not is_open(fd)
    again = os.memfd_create("takes the number")
    region.close()
    assert is_open(again)
    os.close(again)


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096])
def test_file_region_has_the_size_that_is_asked_for(tmp_path: Path, size: int) -> None:
    path = tmp_path / "pool"
    Region.in_file(path, SIZE).close()
    region = Region.in_file(path, size)
    assert path.stat().st_size == size
    region.array()[size - 1] = 1
    region.close()


def test_file_region_names_the_path_when_it_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "pool"
    with pytest.raises(HandleError, match=str(path)):
        Region.in_file(path, SIZE)


OWNER = """
import sys
from pathlib import Path
from raykv.memory.region import Region
region = Region.in_file(Path(sys.argv[1]), int(sys.argv[2]))
region.array()[0] = 7
print("has it", flush=True)
sys.stdin.read()
"""


def test_file_region_belongs_to_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    command = [sys.executable, "-c", OWNER, str(path), str(SIZE)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"has it\n"
        before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr("raykv.base.deadlines.PREDECESSOR_S", 0.2)
        with pytest.raises(HandleError, match=f"{path} is in use by another process"):
            Region.in_file(path, 2 * SIZE)
        assert path.stat().st_size == SIZE
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        monkeypatch.setattr("raykv.base.deadlines.PREDECESSOR_S", 10.0)
        later = threading.Timer(0.3, owner.kill)
        later.start()
        region = Region.in_file(path, SIZE)
        assert region.array()[0] == 7
        region.close()
        later.join()
    finally:
        owner.kill()
        owner.communicate()


def test_file_region_has_its_place_on_the_disk_from_the_start(tmp_path: Path) -> None:
    region = Region.in_file(tmp_path / "pool", 1 << 20)
    assert allocated(region) >= 1 << 20
    region.close()


def test_file_region_is_refused_when_the_disk_has_no_room(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(HandleError, match=r"pool file .* can't have .*smaller pool_bytes"):
        Region.in_file(tmp_path / "pool", 1 << 46)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_prefault_goes_on_from_where_it_is_told_and_stops_when_it_is_told_to() -> None:
    region = Region.anonymous(3 * PREFAULT_PIECE_BYTES, "test")
    done: list[int] = []

    def stop(so_far: int) -> bool:
        done.append(so_far)
        return False

    region.prefault(stop, PREFAULT_PIECE_BYTES)
    assert done == [2 * PREFAULT_PIECE_BYTES]
    assert PREFAULT_PIECE_BYTES <= allocated(region) < 2 * PREFAULT_PIECE_BYTES
    region.close()


def test_prefault_stops_where_the_file_has_no_room_for_a_page(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    region = Region.in_file(path, 3 * PREFAULT_PIECE_BYTES)
    # Like a disk that is full: no page behind the first piece can be had.
    os.truncate(path, PREFAULT_PIECE_BYTES)
    done: list[int] = []
    region.prefault(lambda so_far: not done.append(so_far))  # type: ignore[func-returns-value]
    assert done == [PREFAULT_PIECE_BYTES]
    region.close()


def test_prefault_allocates_all_pages_and_says_how_far_it_is() -> None:
    size = 2 * PREFAULT_PIECE_BYTES + 4096
    region = Region.anonymous(size, "test")
    region.array()[0] = 9
    done: list[int] = []
    region.prefault(lambda so_far: not done.append(so_far))  # type: ignore[func-returns-value]
    assert done == [PREFAULT_PIECE_BYTES, 2 * PREFAULT_PIECE_BYTES, size]
    assert allocated(region) >= size
    assert region.array()[0] == 9
    region.close()


def test_thread_that_yields_has_the_lowest_priority_and_no_other_has() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []

    def work() -> None:
        yield_to_others()
        seen.append(priority())

    before = priority()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [19]
    assert priority() == before
