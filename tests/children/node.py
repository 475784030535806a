"""Runs a NodeService in a process of its own, so that a test can freeze and kill it.

Usage: python node.py SOCKET_NAME NUM_SLOTS SLOT_BYTES [endless] [limited]. Prints a line when
it listens. With "endless" a copy goes on until it is stopped, and a line says that it has begun;
with "limited" the system gives it no thread any more once it listens.
"""

from __future__ import annotations

import os
import resource
import sys
import time

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Direction
from raykv.copy.cpu import CPUBackend
from raykv.copy.engine import StopSign
from raykv.copy.plan import CopyRuns
from raykv.node import attached
from raykv.node.service import NodeService, ServiceSettings, boot_epoch


class EndlessBackend(CPUBackend):
    """Copies the same runs again and again."""

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        """See `CopyBackend.copy`."""
        print("copying", flush=True)
        while super().copy(direction, runs, first, last, stop):
            time.sleep(0.001)
        return False


def main() -> None:
    """Serve until killed, or until standard input ends."""
    name, num_slots, slot_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if "endless" in sys.argv[4:]:
        vars(attached)["CPUBackend"] = EndlessBackend
    geometry = PoolGeometry(num_slots * slot_bytes, num_slots * slot_bytes)
    service = NodeService(ServiceSettings(name, geometry), boot_epoch())
    service.start()
    if "limited" in sys.argv[4:]:
        if os.getuid() == 0:  # who has no limit
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    print("listening", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
