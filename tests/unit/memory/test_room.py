"""Whether a pool fits: which limit says no, how much is free, what would fit."""

from __future__ import annotations

import pytest

from raykv.base.errors import SettingError
from raykv.memory import room
from raykv.protocol.findings import MemoryLimit

GIB = 1 << 30
BOX = MemoryLimit(10 * GIB, 16 * GIB, "the box")
FITS = 10 * GIB - room.RESERVE_BYTES

FREE = "RAY_min_memory_free_bytes"


def test_pool_fits_when_the_reserve_stays_free() -> None:
    assert room.objection(room.PoolNeeds(FITS), [BOX], None) == ""
    assert room.objection(room.PoolNeeds(FITS + 1), [BOX], None) != ""


def test_objection_names_limit_free_bytes_and_what_would_fit() -> None:
    text = room.objection(room.PoolNeeds(12 * GIB), [BOX], None)
    assert f"pool_bytes={12 * GIB} (12.0 GiB) does not fit" in text
    assert "the box allows 16.0 GiB and has 10.0 GiB free" in text
    assert f"pool_bytes='{FITS >> 20}MiB' would fit" in text


def test_objection_is_that_of_the_tightest_limit_and_says_so_when_no_pool_fits() -> None:
    tight = MemoryLimit(4 * GIB, 5 * GIB, "the group")
    text = room.objection(room.PoolNeeds(12 * GIB), [BOX, tight], None)
    assert "the group" in text
    assert "the box" not in text
    full = MemoryLimit(room.RESERVE_BYTES, 16 * GIB, "the box")
    assert "no pool fits now" in room.objection(room.PoolNeeds(GIB), [full], None)
    assert room.objection(room.PoolNeeds(GIB, present_bytes=GIB), [full], None) == ""


def test_pages_that_are_there_are_not_asked_for_again() -> None:
    needs = room.PoolNeeds(12 * GIB, present_bytes=3 * GIB)
    assert room.objection(needs, [BOX], None) == ""
    text = room.objection(room.PoolNeeds(15 * GIB, present_bytes=3 * GIB), [BOX], None)
    assert "(3.0 GiB of it are there)" in text
    assert f"pool_bytes='{(FITS + 3 * GIB) >> 20}MiB' would fit" in text


def test_pool_file_on_a_disk_needs_room_there_and_no_free_memory() -> None:
    disk = MemoryLimit(20 * GIB, 100 * GIB, "the disk")
    assert room.objection(room.PoolNeeds(12 * GIB, in_memory=False), [BOX], disk) == ""
    small = MemoryLimit(11 * GIB, 100 * GIB, "the disk")
    text = room.objection(room.PoolNeeds(12 * GIB, in_memory=False), [BOX], small)
    assert "the disk allows 100.0 GiB and has 11.0 GiB free" in text
    assert f"pool_bytes='{11 << 10}MiB' would fit" in text


def test_pool_file_on_a_disk_is_refused_when_it_is_larger_than_memory() -> None:
    disk = MemoryLimit(90 * GIB, 100 * GIB, "the disk")
    text = room.objection(room.PoolNeeds(17 * GIB, in_memory=False), [BOX], disk)
    assert "never wholly in memory" in text
    assert f"pool_bytes='{16 << 10}MiB' would fit" in text


def test_pool_file_in_memory_counts_against_both() -> None:
    mount = MemoryLimit(5 * GIB, 6 * GIB, "the tmpfs")
    assert "the tmpfs" in room.objection(room.PoolNeeds(6 * GIB), [BOX], mount)
    wide = MemoryLimit(50 * GIB, 60 * GIB, "the tmpfs")
    assert "the box" in room.objection(room.PoolNeeds(12 * GIB), [BOX], wide)


def test_ray_kills_above_its_threshold() -> None:
    limit = room.monitor_limit({}, 4 * GIB, 100 * GIB, "this")
    assert limit is not None
    assert (limit.free_bytes, limit.total_bytes) == (91 * GIB, 95 * GIB)
    assert "RAY_memory_usage_threshold=0.95" in limit.source
    full = room.monitor_limit({}, 97 * GIB, 100 * GIB, "this")
    assert full is not None
    assert full.free_bytes == 0
    off = {"RAY_memory_monitor_refresh_ms": "0"}
    assert room.monitor_limit(off, GIB, 2 * GIB, "this") is None


def test_higher_one_of_rays_two_thresholds_counts() -> None:
    limit = room.monitor_limit({FREE: str(GIB)}, 0, 100 * GIB, "this")
    assert limit is not None
    assert limit.total_bytes == 99 * GIB
    assert "RAY_min_memory_free_bytes" in limit.source
    limit = room.monitor_limit({FREE: str(9 * GIB)}, 0, 100 * GIB, "this")
    assert limit is not None
    assert limit.total_bytes == 95 * GIB


@pytest.mark.parametrize(
    ("environment", "total_bytes"),
    [
        ({"RAY_memory_usage_threshold": "0.8"}, 80 * GIB),
        ({"RAY_memory_usage_threshold": "much"}, 95 * GIB),
        ({"RAY_memory_usage_threshold": "1.5"}, 95 * GIB),
        ({"RAY_memory_monitor_refresh_ms": "100"}, 95 * GIB),
    ],
)
def test_settings_of_rays_monitor_are_read(environment: dict[str, str], total_bytes: int) -> None:
    limit = room.monitor_limit(environment, 0, 100 * GIB, "this")
    assert limit is not None
    assert limit.total_bytes == total_bytes


def test_pool_is_at_least_a_chunk_and_at_most_what_is_free() -> None:
    room.check_pool_bytes(100, chunk_bytes=100, free_bytes=100, limit="this machine's memory")
    with pytest.raises(SettingError, match=r"pool_bytes=99 .*\(100 bytes\).*at least 100"):
        room.check_pool_bytes(99, chunk_bytes=100, free_bytes=1000, limit="x")
    with pytest.raises(SettingError, match=r"pool_bytes=1001 .*the box can give.*1000 bytes"):
        room.check_pool_bytes(1001, chunk_bytes=100, free_bytes=1000, limit="the box")
    assert room.default_pool_bytes(4001) == 1000


def test_default_pools_of_an_engine_have_room_for_the_same_chunks() -> None:
    assert room.equal_pools({"a": 800}, {"a": 30}) == {"a": 200}
    # Two parts of a chunk are on one node, or a node has less memory.
    assert room.equal_pools({"a": 800, "b": 800}, {"a": 20, "b": 10}) == {"a": 200, "b": 100}
    assert room.equal_pools({"a": 800, "b": 80}, {"a": 10, "b": 10}) == {"a": 20, "b": 20}
