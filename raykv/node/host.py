"""Facts of the host that a NodeActor runs on, for `raykv doctor`."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import ray

from raykv.base import deadlines, errors, threads, version
from raykv.memory import limits
from raykv.node.disk.folder import unowned_folders
from raykv.protocol.findings import Endpoint, HostFacts, HostQuestion, UnownedFolder

logger = logging.getLogger("raykv.doctor")

MAX_PLACES = 64
"""Ports that are tried for one question; of more, the first ones."""

_PROBES = 16
"""Such places that are tried at a time."""


def host_facts(question: HostQuestion, pool_path: str, disk_path: str) -> HostFacts:
    """Look around, for as long as ports that do not answer take; says nothing of the pool."""
    unreached = unreached_of(question.places[:MAX_PLACES], question.reach_s)
    return HostFacts(
        hostname=socket.gethostname(),
        raykv_version=version.__version__,
        ray_version=str(ray.__version__),
        python_version=platform.python_version(),
        # Last, so that the caller knows how old it is.
        wall_time=time.time(),
        is_memory=not pool_path or limits.is_in_memory(Path(pool_path)),
        limits=limits.worker_limits(),
        disk=limits.disk_limit(Path(pool_path)) if pool_path else None,
        shm_bytes=_shm_bytes(),
        plasma_folder=_plasma_folder(),
        threads_failed=threads.num_failed(),
        unreached=unreached,
        unowned=_unowned(disk_path) if disk_path else [],
    )


def _unowned(disk_path: str) -> list[UnownedFolder]:
    """Folders on the disk that no process holds, if the disk answers in time."""
    try:
        return threads.within(
            deadlines.PROMPT_S, lambda: unowned_folders(Path(disk_path), time.time())
        )
    except (OSError, TimeoutError, errors.ThreadError) as error:
        logger.warning("disk_path=%r can't be looked at: %s", disk_path, error)
        return []


def unreached_of(places: Sequence[Endpoint], reach_s: float) -> list[tuple[Endpoint, str]]:
    """Addresses that cannot be connected to from here, each with the reason."""
    if not places:
        return []
    with ThreadPoolExecutor(_PROBES, "raykv-probe") as pool:
        answers = list(pool.map(lambda place: _objection(place, reach_s), places))
    return [(place, why) for place, why in zip(places, answers, strict=True) if why]


def _objection(place: Endpoint, reach_s: float) -> str:
    try:
        socket.create_connection((place.host, place.port), reach_s).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _shm_bytes() -> int:
    """Size of `/dev/shm`; 0 where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _plasma_folder() -> str:
    """Folder of the object store, from the raylet that is this process's parent."""
    try:
        arguments = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return ""
    given = dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)
    return given.get("plasma_directory", "")
