"""The processes of a chaos run: where they are, how to kill and freeze them, what they use."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from raykv.base.errors import ClusterError
from raykv.client.cluster import connect
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.cluster.processes import argument, command_lines, group_of, is_raylet
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.chaos.plan import Fault
from raykv.lab.chaos.report import Process
from raykv.lab.hosts.local_nodes import add_local_node
from raykv.lab.waiting import wait

FIND_DEADLINE_S = 30.0
"""For an actor to be there: its next life may be about to begin."""

POLL_S = 0.05

LOST_S = 3.0
"""How long an engine runs at a node that is gone before both are replaced."""

NODE_ACTOR, SCHEDULER_ACTOR = "NodeActor", "SchedulerActor"


class Parts(Protocol):
    """The processes of a cluster, wherever they run. Node 0 is the head."""

    num_nodes: int

    def engine(self, number: int, model: Path, log: Path, **config: Any) -> EngineProcess:
        """A new engine on a node; `config` as `EngineProcess` has it."""

    def raylet(self, number: int) -> int:
        """Pid of a node's raylet.

        Raises:
            ClusterError: it has none.
        """

    def lose_raylet(self, number: int) -> bool:
        """Kill it and replace it; return whether engines have to start again."""

    def gcs(self) -> int:
        """Pid of the cluster's GCS server."""

    def afflict(self, fault: Fault) -> AbstractContextManager[None]:
        """Disturb a node's host within the context."""

    def nodes(self) -> list[Mapping[str, Any]]:
        """The cluster's status of each node."""

    def end(self, *, is_headless: bool) -> None:
        """End all of them. If the cluster is headless, ask nothing through Ray: its GCS is gone."""


class LocalParts:
    """`Parts` on this host, where every node has the same network and disk; see there.

    Args:
        num_nodes: with the head, which this starts too.
        folder: for the disks.
    """

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self.num_nodes = num_nodes
        self._folder = folder
        self._address = cluster.ensure_cluster("local").address
        self._cluster = connect(self._address)
        self._head = cluster.resolve_node_id("")
        self._others = [add_local_node(self._address) for _ in range(1, num_nodes)]

    def _node_id(self, number: int) -> str:
        return self._others[number - 1].node_id if number else self._head

    def engine(self, number: int, model: Path, log: Path, **config: Any) -> EngineProcess:
        settings = {
            **config.pop("raykv"),
            "ray_address": self._address,
            "node_id": self._node_id(number),
            "disk_path": str(self._folder / f"disk-{number}"),
        }
        return EngineProcess(model, log, settings, **config)

    def raylet(self, number: int) -> int:
        wanted = self._node_id(number)
        for process, arguments in command_lines():
            if is_raylet(arguments) and argument(arguments, "node-id") == wanted:
                return int(process.pid)
        raise ClusterError(f"node {number} has no raylet")

    def lose_raylet(self, number: int) -> bool:
        assert number > 0, "the head can't be replaced"
        kill(self.raylet(number))
        time.sleep(LOST_S)
        self._others[number - 1].stop()
        self._others[number - 1] = add_local_node(self._address)
        return True

    def gcs(self) -> int:
        """It is in the process group of the head's raylet."""
        group = os.getpgid(self.raylet(0))
        for process, arguments in command_lines():
            if Path(arguments[0]).name == "gcs_server" and group_of(process.pid) == group:
                return int(process.pid)
        raise ClusterError("the cluster has no GCS server")

    def afflict(self, fault: Fault) -> AbstractContextManager[None]:
        raise ClusterError(f"{fault.kind}: all nodes are on one host")

    def nodes(self) -> list[Mapping[str, Any]]:
        return [msgspec.structs.asdict(node) for node in self._cluster.status().nodes]

    def end(self, *, is_headless: bool) -> None:
        for node in self._others:
            if not is_headless:
                with contextlib.suppress(ClusterError):
                    ask.end_node_actor(node.node_id)
            node.stop()
        self._cluster.close()
        cluster.stop_started(self._address)


# Actors


def actor(parts: Parts, name: str, *nodes: int) -> int:
    """Wait for an actor on any of these nodes, and return its pid."""
    found: list[int] = []

    def is_there() -> bool:
        found.extend(each.pid for number in nodes for each in _actors(parts, number, name))
        return bool(found)

    wait(is_there, f"there is a {name}", POLL_S, FIND_DEADLINE_S)
    return found[0]


def _actors(parts: Parts, number: int, name: str) -> Iterator[psutil.Process]:
    with contextlib.suppress(ClusterError, psutil.NoSuchProcess):
        for process in psutil.Process(parts.raylet(number)).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    yield process


# What they use


def actors(parts: Parts) -> list[Process]:
    """The actors of all nodes."""
    found = []
    for number in range(parts.num_nodes):
        for name in (NODE_ACTOR, SCHEDULER_ACTOR):
            for process in _actors(parts, number, name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(measured(name, process.pid))
    return found


def mappings(parts: Parts, number: int) -> list[str]:
    """Names of the memory that a NodeActor shares with others, one for each mapped object."""
    found = set()
    for process in _actors(parts, number, NODE_ACTOR):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and "memfd:" in fields[5]:
                    found.add((fields[4], fields[5]))
    return sorted(name for _, name in found)


def measured(name: str, pid: int) -> Process:
    """A process as it is now. Memory that it shares with others, like the pool, is left out."""
    process = psutil.Process(pid)
    memory = process.memory_info()
    return Process(name, pid, memory.rss - memory.shared, process.num_fds())


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone is not an error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP until the context ends; the process may be killed meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
