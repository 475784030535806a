"""How much memory this machine, or the control group that we run in, can still give."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from raykv.memory import room
from raykv.protocol.findings import MemoryLimit

_MACHINE = "this machine's memory"

# Files of a control group with its limit and its usage, by the version of control groups.
_V2 = ("memory.max", "memory.current")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest limit of machine and control groups. `root` stands in for `/` in tests."""
    return room.tightest([_machine(root), *_cgroups(root)])


def worker_limits(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[MemoryLimit]:
    """All limits of a process that a raylet started, whose environment it has.

    They are those of machine and control groups, and that of Ray's memory monitor: it kills
    processes long before the kernel would.
    """
    limits = [_machine(root), *_cgroups(root)]
    monitor = ray_monitor(environment, root)
    return limits if monitor is None else [*limits, monitor]


def ray_monitor(environment: Mapping[str, str], root: Path = Path("/")) -> MemoryLimit | None:
    """What Ray's memory monitor leaves, from what it reads itself; None if it is off.

    It knows the control group that is mounted at `/sys/fs/cgroup` only, and counts no page cache:
    see `memory_monitor_utils.cc` of Ray.
    """
    machine = _machine(root)
    group = root / "sys/fs/cgroup"
    found = _cgroup(group, *_V2, ("inactive_file", "active_file")) or _cgroup(
        group / "memory", *_V1, ("total_inactive_file", "total_active_file")
    )
    if found is not None and found.total_bytes <= machine.total_bytes:
        used = found.total_bytes - found.free_bytes
        return room.monitor_limit(environment, used, found.total_bytes, "the container's memory")
    used = machine.total_bytes - machine.free_bytes
    return room.monitor_limit(environment, used, machine.total_bytes, _MACHINE)


def pool_objection(
    pool_bytes: int,
    pool_path: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> str:
    """Why this process should not allocate a pool now, in a sentence; empty if it may."""
    limits = worker_limits(environment, root)
    if not pool_path:
        return room.objection(room.PoolNeeds(pool_bytes), limits, None)
    path = Path(pool_path)
    in_memory = is_in_memory(path, root)
    needs = room.PoolNeeds(pool_bytes, _allocated(path, pool_bytes), in_memory)
    return room.objection(needs, limits, disk_limit(path))


def has_room(floor_bytes: int, root: Path = Path("/")) -> bool:
    """Whether all limits of this process leave more than `floor_bytes`."""
    return room.tightest(worker_limits(root=root)).free_bytes > floor_bytes


def disk_limit(path: Path) -> MemoryLimit | None:
    """Room of the file system that `path` is, or will be, in; None if it is unknown."""
    try:
        found = shutil.disk_usage(path if path.exists() else path.parent)
    except OSError:
        return None
    return MemoryLimit(found.free, found.total, f"the file system of {path}")


def is_in_memory(path: Path, root: Path = Path("/")) -> bool:
    """Whether a file there is memory itself (tmpfs), not page cache over a disk."""
    try:
        place = path.parent.resolve()
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    best, kind = Path("/"), ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4])
        # Of several at one place the last one hides the others.
        if place.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, right.split()[0]
    return kind in _MEMORY_FILE_SYSTEMS


def _allocated(path: Path, most: int) -> int:
    """Bytes of a file that have their place already."""
    try:
        return min(most, path.stat().st_blocks * 512)
    except OSError:
        return 0


def _machine(root: Path) -> MemoryLimit:
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return MemoryLimit(fields["MemAvailable"], fields["MemTotal"], _MACHINE)


def _cgroups(root: Path) -> list[MemoryLimit]:
    """Limits of our own control group and of those above it, version 2 and 1."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        folder = base / path.strip("/")
        for candidate in (folder, *folder.parents):
            limit = _cgroup(candidate, *names)
            if limit is not None:
                found.append(limit)
            if candidate == base:
                break
    return found


def _cgroup(
    folder: Path, limit_name: str, usage_name: str, cache_keys: tuple[str, ...] = ()
) -> MemoryLimit | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        cache = _page_cache(folder, cache_keys)
        if limit == "max" or int(limit) > 1 << 60:
            return None
    except (OSError, ValueError):
        return None
    total = int(limit)
    free = min(total, max(0, total - usage + cache))
    return MemoryLimit(free, total, f"the control group {folder}")


def _page_cache(folder: Path, keys: tuple[str, ...]) -> int:
    """Page cache that counts as usage: of `keys`, else what is given back under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    if keys:
        return sum(int(fields.get(key, 0)) for key in keys)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
