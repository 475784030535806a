"""How much memory there is, read from `/proc` and control groups in a folder of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raykv.memory import limits
from raykv.protocol.findings import MemoryLimit

GIB = 1 << 30
TOTAL = 64 * GIB
AVAILABLE = 32 * GIB


class Host:
    """Files of a machine under `root`."""

    def __init__(self, root: Path, cgroups: str) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal:       {TOTAL >> 10} kB\n"
            f"MemFree:        {1 << 10} kB\n"
            f"MemAvailable:   {AVAILABLE >> 10} kB\n"
            "HugePages_Total:       0\n",
        )
        self.write("proc/self/cgroup", cgroups)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, limit: str, usage: int, stat: str | None = None) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        if stat is not None:
            self.write(f"{folder}/memory.stat", stat)

    def v1(self, group: str, limit: int, usage: int, stat: str | None = None) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        if stat is not None:
            self.write(f"{folder}/memory.stat", stat)

    def free(self) -> int:
        return limits.memory_limit(self.root).free_bytes


V1_LINES = "12:cpu,cpuacct:/pod/box\n5:memory:/pod/box\n1:name=systemd:/pod\n"


@pytest.fixture
def v2(tmp_path: Path) -> Host:
    return Host(tmp_path, "0::/pod/box\n")


@pytest.fixture
def v1(tmp_path: Path) -> Host:
    return Host(tmp_path, V1_LINES)


def test_limit_is_the_machines_memory_when_no_group_limits(v2: Host) -> None:
    limit = limits.memory_limit(v2.root)
    assert (limit.free_bytes, limit.total_bytes) == (AVAILABLE, TOTAL)
    assert limit.source == "this machine's memory"


def test_limit_is_that_of_our_own_group(v2: Host) -> None:
    v2.v2("pod/box", str(8 * GIB), 3 * GIB)
    limit = limits.memory_limit(v2.root)
    assert (limit.free_bytes, limit.total_bytes) == (5 * GIB, 8 * GIB)
    assert limit.source.endswith("sys/fs/cgroup/pod/box")


@pytest.mark.parametrize("group", ["pod", ""])
def test_limit_is_that_of_a_group_above_when_it_is_tighter(v2: Host, group: str) -> None:
    v2.v2("pod/box", str(8 * GIB), 3 * GIB)
    v2.v2(group, str(6 * GIB), 4 * GIB)
    assert v2.free() == 2 * GIB


@pytest.mark.parametrize("limit", [str(100 * GIB), "max"])
def test_limit_is_the_machines_when_the_group_has_more(v2: Host, limit: str) -> None:
    v2.v2("pod/box", limit, 3 * GIB)
    assert v2.free() == AVAILABLE


def test_page_cache_of_a_group_counts_as_free(v2: Host) -> None:
    v2.v2("pod/box", str(8 * GIB), 7 * GIB, f"anon 5\ninactive_file {2 * GIB}\nfile 9\n")
    assert v2.free() == 3 * GIB


def test_group_over_its_limit_has_nothing_free(v2: Host) -> None:
    v2.v2("pod/box", str(8 * GIB), 9 * GIB)
    assert v2.free() == 0


def test_limits_of_version_1_are_those_of_the_memory_controller(v1: Host) -> None:
    v1.v2("pod/box", str(GIB), 0)
    v1.v1("pod/box", 0x7FFFFFFFFFFFF000, 3 * GIB)
    v1.v1("", 6 * GIB, GIB)
    assert v1.free() == 5 * GIB
    # The page cache of the groups below counts as well.
    v1.v1("pod/box", 8 * GIB, 8 * GIB, f"cache 1\ntotal_inactive_file {GIB}\n")
    assert v1.free() == GIB


def test_both_versions_are_looked_at_on_a_mixed_machine(tmp_path: Path) -> None:
    host = Host(tmp_path, V1_LINES + "0::/pod\n")
    host.v1("pod/box", 8 * GIB, GIB)
    assert host.free() == 7 * GIB
    host.v2("pod", str(4 * GIB), GIB)
    assert host.free() == 3 * GIB


@pytest.mark.parametrize("text", ["", "lots\n"])
def test_group_that_cannot_be_read_does_not_limit(v2: Host, text: str) -> None:
    v2.v2("pod/box", str(8 * GIB), GIB)
    v2.write("sys/fs/cgroup/pod/box/memory.current", text)
    assert v2.free() == AVAILABLE


def monitored(host: Host, **environment: str) -> MemoryLimit | None:
    """What Ray's memory monitor leaves, for a raylet with that environment."""
    return limits.ray_monitor(environment, host.root)


def test_ray_counts_the_machines_memory_when_no_group_limits(v2: Host) -> None:
    limit = monitored(v2)
    assert limit is not None
    assert limit.total_bytes == int(TOTAL * 0.95)
    assert limit.free_bytes == int(TOTAL * 0.95) - (TOTAL - AVAILABLE)
    assert "this machine's memory" in limit.source


def test_ray_counts_the_containers_group_without_any_page_cache(v2: Host) -> None:
    stat = f"inactive_file {GIB}\nactive_file {2 * GIB}\n"
    v2.v2("", str(10 * GIB), 8 * GIB, stat)
    limit = monitored(v2)
    assert limit is not None
    assert limit.free_bytes == int(10 * GIB * 0.95) - 5 * GIB
    assert "the container's memory" in limit.source


def test_ray_counts_the_containers_group_of_version_1(v1: Host) -> None:
    v1.v1("", 10 * GIB, 8 * GIB, f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    limit = monitored(v1)
    assert limit is not None
    assert limit.free_bytes == int(10 * GIB * 0.95) - 6 * GIB


def test_ray_does_not_see_a_group_below_the_mount(v2: Host) -> None:
    v2.v2("pod/box", str(8 * GIB), 3 * GIB)
    limit = monitored(v2)
    assert limit is not None
    assert limit.total_bytes == int(TOTAL * 0.95)


def test_limits_of_a_worker_include_rays_unless_it_is_off(v2: Host) -> None:
    v2.v2("pod/box", str(60 * GIB), GIB)
    sources = [limit.source for limit in limits.worker_limits({}, v2.root)]
    assert len(sources) == 3
    assert any("Ray's memory monitor" in source for source in sources)
    off = limits.worker_limits({"RAY_memory_monitor_refresh_ms": "0"}, v2.root)
    assert not any("Ray" in limit.source for limit in off)


def test_pool_is_refused_when_ray_would_kill_for_it(v2: Host) -> None:
    size = AVAILABLE - 2 * GIB
    assert limits.pool_objection(size, "", {"RAY_memory_monitor_refresh_ms": "0"}, v2.root) == ""
    text = limits.pool_objection(size, "", {}, v2.root)
    assert "Ray's memory monitor (RAY_memory_usage_threshold=0.95" in text
    assert "would fit" in text


def test_pool_file_is_refused_when_its_disk_has_no_room(v2: Host, tmp_path: Path) -> None:
    v2.write("proc/self/mountinfo", f"1 0 8:1 / {tmp_path} rw - ext4 /dev/x rw\n")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    (v2.root / "proc/meminfo").write_text(
        f"MemTotal: {free} kB\nMemAvailable: {free} kB\n"  # far more than the disk has
    )
    path = str(tmp_path / "pool")
    assert limits.pool_objection(GIB >> 10, path, {}, v2.root) == ""
    text = limits.pool_objection(2 * free, path, {}, v2.root)
    assert f"the file system of {path}" in text
    assert not Path(path).exists()


def test_pool_file_in_tmpfs_counts_as_memory(v2: Host, tmp_path: Path) -> None:
    assert limits.is_in_memory(Path("/dev/shm/pool"))
    pool = str(tmp_path / "ram" / "pool")
    mounts = [f"1 0 8:1 / {tmp_path} rw - ext4 /dev/x rw"]
    v2.write("proc/self/mountinfo", "\n".join(mounts))
    assert not limits.is_in_memory(Path(pool), v2.root)
    mounts.append(f"2 1 0:5 / {tmp_path}/ram rw shared:2 - tmpfs tmpfs rw")
    v2.write("proc/self/mountinfo", "\n".join(mounts))
    assert limits.is_in_memory(Path(pool), v2.root)
    assert not limits.is_in_memory(tmp_path / "rambo" / "pool", v2.root)


def test_limit_of_this_machine_is_a_plausible_one() -> None:
    limit = limits.memory_limit()
    assert 0 < limit.free_bytes <= limit.total_bytes
