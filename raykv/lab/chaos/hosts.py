"""A chaos run's cluster on several hosts: `raykv chaos --hosts 3`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from raykv.base.errors import ClusterError
from raykv.lab.chaos.parts import kill
from raykv.lab.chaos.plan import AWAY_S, Fault, FaultKind
from raykv.lab.hosts.cluster import HostCluster, HostEngine, command_of, raylet_of
from raykv.lab.hosts.network import BOOT_S, networked

SLOW_BYTES_PER_S = 256 << 10
"""A chunk of the tiny model takes half a second."""


class HostParts:
    """`Parts` on a host per node; Ray starts again where it ends.

    Args:
        num_nodes: how many hosts.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        with ExitStack() as stack:
            self._network = stack.enter_context(networked())
            self._hosts = [self._network.host(f"host{number}") for number in range(num_nodes)]
            self._there = [threading.Event() for _ in self._hosts]
            for each in self._there:
                each.set()
            self._cluster = HostCluster(self._network, self._hosts[0])
            stack.callback(self._cluster.end)
            self._cluster.start(*self._hosts)
            self._end = stack.pop_all()

    def engine(self, number: int, model: Path, log: Path, **config: Any) -> HostEngine:
        host = self._hosts[number]
        if not self._there[number].wait(max(AWAY_S) + BOOT_S):
            raise ClusterError(f"the host {host.name} is still away")
        self._cluster.wait(host)
        raykv = {**config.pop("raykv"), "disk_path": str(host.disk / "chunks")}
        return self._cluster.engine(host, model, log, raykv, **config)

    def raylet(self, number: int) -> int:
        pid = raylet_of(self._hosts[number])
        if not pid:
            raise ClusterError(f"node {number} has no raylet")
        return pid

    def lose_raylet(self, number: int) -> bool:
        """Kill it; its service starts another one, which the engine has to find by itself."""
        kill(self.raylet(number))
        return False

    def gcs(self) -> int:
        for pid in self._hosts[0].spaces.processes():
            if any(each.endswith("/gcs_server") for each in command_of(pid)[:1]):
                return pid
        raise ClusterError("the cluster has no GCS server")

    def afflict(self, fault: Fault) -> AbstractContextManager[None]:
        host = self._hosts[fault.node]
        match fault.kind:
            case FaultKind.HOST_CUT_OFF:
                return self._network.unplugged(host)
            case FaultKind.HOST_HALF_OPEN:
                return self._network.unheard(host)
            case FaultKind.HOST_SLOW:
                return host.slowed(SLOW_BYTES_PER_S)
            case FaultKind.HOST_FROZEN:
                return host.frozen()
            case _:
                assert fault.kind is FaultKind.HOST_LOST, fault
                return self._without_power(fault.node)

    @contextlib.contextmanager
    def _without_power(self, number: int) -> Iterator[None]:
        host, there = self._hosts[number], self._there[number]
        there.clear()
        self._cluster.forget(host)
        host.lose_power()
        try:
            yield
        finally:
            host.boot()
            self._cluster.begin(host)
            there.set()

    def nodes(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self._cluster.raykv(self._hosts[0], "status")["nodes"]
        return found

    def end(self, *, is_headless: bool) -> None:
        """End the hosts, and with them everything on them; ignore `is_headless`."""
        self._end.close()
