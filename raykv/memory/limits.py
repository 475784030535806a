"""How much memory this machine, or the control group that we run in, can still give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """`source` names what limits, for messages."""

    free_bytes: int
    total_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest limit that applies to this process. `root` stands in for `/` in tests."""
    limits = [_machine(root), *_cgroups(root)]
    return min(limits, key=lambda limit: limit.free_bytes)


def _machine(root: Path) -> MemoryLimit:
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return MemoryLimit(fields["MemAvailable"], fields["MemTotal"], "this machine's memory")


def _cgroups(root: Path) -> list[MemoryLimit]:
    """Limits of our own control group and of those above it, version 2 and 1."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
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


def _cgroup(folder: Path, limit_name: str, usage_name: str) -> MemoryLimit | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        cache = _reclaimable(folder)
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) > 1 << 60:
        return None
    total = int(limit)
    free = max(0, total - usage + cache)
    return MemoryLimit(free, total, f"the control group {folder}")


def _reclaimable(folder: Path) -> int:
    """Page cache that counts as usage but is given back under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
