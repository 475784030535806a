"""Runs a NodeService in a process of its own, so that a test can freeze and kill it.

Usage: python node_child.py SOCKET_NAME NUM_SLOTS SLOT_BYTES. Prints a line when it listens.
"""

from __future__ import annotations

import sys

from raykv.actors.node_service import NodeService, ServiceSettings, boot_epoch
from raykv.core.geometry import PoolGeometry


def main() -> None:
    """Serve until killed, or until standard input ends."""
    name, num_slots, slot_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    geometry = PoolGeometry(num_slots * slot_bytes, num_slots * slot_bytes)
    service = NodeService(ServiceSettings(name, geometry), boot_epoch())
    service.start()
    print("listening", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
