"""The processes of a chaos run: where they are, how to kill and freeze them, what they use."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from raykv.base.errors import ClusterError
from raykv.cluster import ask
from raykv.cluster import join as cluster
from raykv.cluster.local_nodes import LocalNode, add_local_node
from raykv.cluster.processes import argument, command_lines, group_of, is_raylet
from raykv.lab.chaos.report import Process

FIND_DEADLINE_S = 30.0
"""For an actor to be there: its next life may be about to begin."""

POLL_S = 0.05

NODE_ACTOR, SCHEDULER_ACTOR = "NodeActor", "SchedulerActor"


@dataclass
class ChaosNode:
    """A Ray node; the head has no `local`, which is what we have started."""

    node_id: str
    local: LocalNode | None = None


class Parts:
    """The processes of a cluster on this host.

    Args:
        address: of its GCS.
        num_nodes: with the head, which is there already; this starts the others.
    """

    def __init__(self, address: str, num_nodes: int) -> None:
        self.address = address
        # Whether the GCS is gone: nothing may be asked through Ray then.
        self.is_headless = False
        self.nodes = [ChaosNode(cluster.resolve_node_id(""))]
        while len(self.nodes) < num_nodes:
            self.nodes.append(self._new_node())

    def _new_node(self) -> ChaosNode:
        local = add_local_node(self.address)
        return ChaosNode(local.node_id, local)

    def replace(self, number: int) -> None:
        """A new Ray node in the place of one whose raylet is dead."""
        local = self.nodes[number].local
        assert local is not None, "the head can't be replaced"
        local.stop()
        self.nodes[number] = self._new_node()

    def stop(self) -> None:
        """End the nodes that this has started, with all that runs on them."""
        for node in self.nodes:
            if node.local is not None:
                if not self.is_headless:
                    with contextlib.suppress(ClusterError):
                        ask.end_node_actor(node.node_id)
                node.local.stop()

    # Processes

    def raylet(self, number: int) -> int:
        """Pid of a node's raylet."""
        wanted = self.nodes[number].node_id
        for process, arguments in command_lines():
            if is_raylet(arguments) and argument(arguments, "node-id") == wanted:
                return int(process.pid)
        raise ClusterError(f"node {number} has no raylet")

    def gcs(self) -> int:
        """Pid of the cluster's GCS server: it is in the process group of the head's raylet."""
        group = os.getpgid(self.raylet(0))
        for process, arguments in command_lines():
            if Path(arguments[0]).name == "gcs_server" and group_of(process) == group:
                return int(process.pid)
        raise ClusterError("the cluster has no GCS server")

    def node_actor(self, number: int) -> int:
        """Pid of a node's NodeActor, waited for."""
        return self._actor(NODE_ACTOR, [number])

    def scheduler_actor(self) -> int:
        """Pid of the scheduler actor, waited for."""
        return self._actor(SCHEDULER_ACTOR, range(len(self.nodes)))

    def _actor(self, name: str, numbers: range | list[int]) -> int:
        give_up_at = time.monotonic() + FIND_DEADLINE_S
        while time.monotonic() < give_up_at:
            for number in numbers:
                for process in self._actors(number, name):
                    return int(process.pid)
            time.sleep(POLL_S)
        raise ClusterError(f"no {name} within {FIND_DEADLINE_S:.0f} s")

    def _actors(self, number: int, name: str) -> Iterator[psutil.Process]:
        with contextlib.suppress(ClusterError, psutil.NoSuchProcess):
            for process in psutil.Process(self.raylet(number)).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if name in " ".join(process.cmdline()):
                        yield process

    # What they use

    def processes(self) -> list[Process]:
        """The actors of all nodes."""
        found = []
        for number in range(len(self.nodes)):
            for name in (NODE_ACTOR, SCHEDULER_ACTOR):
                for process in self._actors(number, name):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found.append(measured(name, process.pid))
        return found

    def mappings(self, number: int) -> list[str]:
        """Names of the memory that a NodeActor shares with others, one for each mapped object."""
        found = set()
        for process in self._actors(number, NODE_ACTOR):
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
