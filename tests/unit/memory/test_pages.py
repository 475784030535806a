"""What memory a pool gets, on machines of all kinds and on this one."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from raykv.base.errors import HandleError
from raykv.memory import pages
from raykv.memory.region import Region

HUGE = 2 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine(root: Path, free: int = 0, claimed: int = 0, mode: str = "never") -> Path:
    folder = root / "sys/kernel/mm"
    modes = ["always", "within_size", "advise", "never", "deny", "force"]
    text = " ".join(f"[{each}]" if each == mode else each for each in modes)
    write(folder / "hugepages/hugepages-2048kB/free_hugepages", str(free))
    write(folder / "hugepages/hugepages-2048kB/resv_hugepages", str(claimed))
    write(folder / "transparent_hugepage/shmem_enabled", text)
    return root


def gpu(root: Path, slot: str, node: int, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = root / "sys/bus/pci/devices" / slot
    write(folder / "vendor", vendor)
    write(folder / "class", kind)
    write(folder / "numa_node", str(node))


@pytest.mark.parametrize(
    ("count", "free", "claimed", "mode", "expected"),
    [
        (4, 4, 0, "never", pages.HugePages.RESERVED),
        # Those that others have claimed are left to them.
        (4, 4, 1, "never", pages.HugePages.NONE),
        (4, 4, 1, "within_size", pages.HugePages.TRANSPARENT),
        (4, 3, 0, "advise", pages.HugePages.TRANSPARENT),
        (4, 0, 0, "force", pages.HugePages.TRANSPARENT),
        (4.5, 9, 0, "always", pages.HugePages.TRANSPARENT),
        (4.5, 9, 0, "deny", pages.HugePages.NONE),
        (4, 0, 0, "", pages.HugePages.NONE),
    ],
)
def test_pages_are_the_largest_that_all_of_the_pool_can_have(
    tmp_path: Path, count: float, free: int, claimed: int, mode: str, expected: pages.HugePages
) -> None:
    assert pages.wanted_pages(int(count * HUGE), machine(tmp_path, free, claimed, mode)) is expected


def test_machine_that_says_nothing_has_small_pages(tmp_path: Path) -> None:
    assert pages.wanted_pages(4 * HUGE, tmp_path) is pages.HugePages.NONE
    assert pages.gpu_nodes(tmp_path) == pages.memory_nodes(tmp_path) == []


def test_only_gpus_count_and_only_where_their_node_is_known(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0", 1)
    gpu(tmp_path, "0000:01:00.1", 0, kind="0x040300")
    gpu(tmp_path, "0000:02:00.0", 0, vendor="0x8086")
    gpu(tmp_path, "0000:03:00.0", -1)
    gpu(tmp_path, "0000:04:00.0", 3)
    assert pages.gpu_nodes(tmp_path) == [1, 3]


@pytest.mark.parametrize(
    ("text", "nodes"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3", [0, 2, 3]), ("", [])]
)
def test_nodes_with_memory_are_read_off_the_kernels_list(
    tmp_path: Path, text: str, nodes: list[int]
) -> None:
    write(tmp_path / "sys/devices/system/node/has_memory", text)
    assert pages.memory_nodes(tmp_path) == nodes


def test_pages_come_from_the_node_that_was_asked_for(tmp_path: Path) -> None:
    """The kernel's own word for the mapping, in `numa_maps`; node 0 is everywhere."""
    gpu(tmp_path, "0000:01:00.0", 0)
    write(tmp_path / "sys/devices/system/node/has_memory", "0-1")
    region = Region.anonymous(HUGE, "placed-test")
    try:
        assert pages.place_near_gpus(region, tmp_path) == [0]
        try:
            lines = Path("/proc/self/numa_maps").read_text()
        except OSError:
            pytest.skip("this kernel has no numa_maps")
        (line,) = re.findall(rf"^{region.address:x} (\S+)", lines, re.MULTILINE)
        assert line == "prefer:0"
    finally:
        region.close()


def test_node_that_can_not_be_had_is_said_and_pages_come_from_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raykv.node")
    gpu(tmp_path, "0000:01:00.0", 900)
    write(tmp_path / "sys/devices/system/node/has_memory", "0,900")
    region = Region.anonymous(HUGE, "placed-test")
    try:
        assert pages.place_near_gpus(region, tmp_path) == []
        assert "the pool's memory is not placed near the GPUs" in caplog.text
        region.prefault(lambda _done: True)
        region.array()[HUGE - 1] = 7
    finally:
        region.close()


def test_pool_has_memory_whatever_the_machine_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when huge pages are gone that were there a moment ago."""
    caplog.set_level(logging.INFO, "raykv.node")
    for wanted in pages.HugePages:
        monkeypatch.setattr(pages, "wanted_pages", lambda _bytes, wanted=wanted: wanted)
        region = pages.pool_region(2 * HUGE)
        region.prefault(lambda _done: True)
        region.array()[2 * HUGE - 1] = 7
        assert region.num_bytes == 2 * HUGE
        region.close()
    assert caplog.text.count("the pool has small pages") >= 1


def test_huge_pages_that_are_not_there_are_refused() -> None:
    with pytest.raises(HandleError, match="huge pages"):
        Region.huge(1 << 50, "test")


@pytest.mark.parametrize(
    ("gpus", "memory", "expected"),
    [
        ([], [0, 1], []),
        ([0, 0], [0], []),
        ([1, 1], [0, 1], [1]),
        ([1, 0, 1], [0, 1], [0, 1]),
        ([3, 1], [0, 1, 2], [1]),
        ([7], [0, 1], []),
    ],
)
def test_pool_is_near_the_gpus(gpus: list[int], memory: list[int], expected: list[int]) -> None:
    assert pages.placement(gpus, memory) == expected
