"""Runs a NodeService in a process of its own, so that a test can freeze and kill it.

Usage: python node.py SOCKET_NAME NUM_SLOTS SLOT_BYTES [endless] [limited] [absurd] [pool=PATH].
Prints a line when it listens. With "endless" a copy goes on until it is stopped, and a line says
that it has begun; with "limited" the system gives it no thread any more once it listens; with
"absurd" it says of each job that a chunk has failed which is not in it; with "pool" the pool is
that file, whose chunks it serves, and they are sealed when standard input ends.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Direction, NodeId, Refusal, Stamp
from raykv.copy.engine import StopSign
from raykv.copy.plan import CopyRuns
from raykv.copy.rows import CPUBackend
from raykv.node import attached
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.pool import jobs
from raykv.node.service import NodeService, boot_life
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import CopyResult
from raykv.protocol.operator import OrdersDocument

POOL = "pool="


class EndlessBackend(CPUBackend):
    """Repeats its copies without end."""

    def copy(self, direction: Direction, runs: CopyRuns, stop: StopSign) -> bool:
        """See `CPUBackend.copy`."""
        print("copying", flush=True)
        while super().copy(direction, runs, stop):
            time.sleep(0.001)
        return False


def absurd(*args: Any) -> CopyResult:
    """Make the result of a job, with the failure of a chunk that is not in it."""
    made: CopyResult = CopyResult(*args)
    refused = bytes([Refusal.NOT_HERE])
    return msgspec.structs.replace(made, failed_chunks=Numbers.of([99]), refusals=refused)


def main() -> None:
    """Serve until killed, or until standard input ends."""
    name, num_slots, slot_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if "endless" in sys.argv[4:]:
        vars(attached)["CPUBackend"] = EndlessBackend
    if "absurd" in sys.argv[4:]:
        vars(jobs)["CopyResult"] = absurd
    geometry = PoolGeometry(num_slots * slot_bytes, num_slots * slot_bytes)
    path = next((each.removeprefix(POOL) for each in sys.argv[4:] if each.startswith(POOL)), "")
    keeper = PoolKeeper(NodeId("node"), boot_life(), geometry, path)
    service = NodeService(name, keeper)
    # Copies run without the kernel, too. While numba is loaded, one takes longer on a busy machine
    # than the deadlines of these tests allow.
    service.rows.load = lambda: None  # type: ignore[method-assign]
    service.start()
    if path:
        keeper.take_orders(OrdersDocument(Stamp(1, 1)), 1.0)
    if "limited" in sys.argv[4:]:
        if os.getuid() == 0:  # who has no limit
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    print("listening", flush=True)
    sys.stdin.read()
    integrity = Integrity(keeper)
    while path and integrity.work(lambda: False):
        pass


if __name__ == "__main__":
    main()
