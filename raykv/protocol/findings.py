"""What `raykv doctor` asks for and says: facts of a node's host, and findings."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """`FAIL` costs hits or an engine; `WARN` may, or is meant so; `OK` says what was looked at."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor: what was looked at, what is there, how to mend it.

    `check` is one of a closed list of names (`raykv.doctor.checks.CHECKS`); `mend` is empty where
    nothing needs to be done.
    """

    check: str
    severity: Severity
    what: str
    mend: str = ""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """A port that others must be able to reach; `what` names it for messages."""

    host: str
    port: int
    what: str


class HostQuestion(msgspec.Struct, frozen=True):
    """Ask a NodeActor for facts of its host; it tries to reach `places`, each for `reach_s`."""

    places: list[Endpoint] = []
    reach_s: float = 1.0


class MemoryLimit(msgspec.Struct, frozen=True):
    """`source` names what limits, for messages; `total_bytes` is all that it ever gives."""

    free_bytes: int
    total_bytes: int
    source: str


class UnownedFolder(msgspec.Struct, frozen=True):
    """A folder under `disk_path` that no process holds, last written to or taken `age_s` ago."""

    path: str
    num_bytes: int
    age_s: float


class HostFacts(msgspec.Struct, frozen=True):
    """A NodeActor's host as its process sees it.

    `wall_time` is its clock in Unix seconds. `left_bytes` of the pool are not touched yet, and
    `is_memory` says whether they will count as memory. `unreached` has the places that could not
    be reached, and why. `plasma_folder` is where Ray keeps objects. `unowned`: what earlier nodes,
    or other clusters that are down now, have left under `disk_path`. `threads_failed`: how often
    threads of the NodeActor have failed, or were not given by the system.
    """

    hostname: str
    raykv_version: str
    ray_version: str
    python_version: str
    wall_time: float
    pool_bytes: int = 0
    left_bytes: int = 0
    is_memory: bool = True
    is_short: bool = False
    refusal: str = ""
    limits: list[MemoryLimit] = []
    disk: MemoryLimit | None = None
    shm_bytes: int = 0
    plasma_folder: str = ""
    threads_failed: int = 0
    unreached: list[tuple[Endpoint, str]] = []
    unowned: list[UnownedFolder] = []
