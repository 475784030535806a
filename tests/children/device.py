"""A worker whose KV cache is on a GPU that is not there, in a process for a test to kill.

Usage: python device.py SOCKET_NAME SLOT_BYTES STAGE. Goes up to the stage, then prints a
line and waits to be killed. It leaves nothing behind: memory of a GPU dies with who opened it.
"""

from __future__ import annotations

import signal
import socket
import sys

from raykv.base.ids import Direction
from raykv.memory.cuda.kv import ExportedKV, export_kv
from raykv.memory.words import CancelWords
from raykv.protocol import wire
from raykv.protocol.worker import AttachWorker, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink
from tests.fixtures.cuda.memory import FakeCuda
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine
from tests.fixtures.waiting import wait_until

NUM_BLOCKS = 8
LIFE = 77
"""Of its engine."""
SETTINGS = LinkSettings(step_deadline_s=30.0, store_deadline_s=30.0)


def main() -> None:
    """See the module's docstring."""
    name, slot_bytes, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    cuda = FakeCuda()
    base = cuda.allocate(NUM_BLOCKS * slot_bytes)
    tensor = TensorLayout(base, NUM_BLOCKS, slot_bytes, slot_bytes)
    exported = export_kv(cuda, [tensor], 1, [0], [[0]])
    if stage == "half attached":
        kept: object = greet(name, slot_bytes, exported)
    else:
        CoreLine(name, LIFE, {0: slot_bytes}).wait()
        link = kept = WorkerLink(0, exported.layout, [], SETTINGS)
        link.set_target(LinkTarget(name, "engine", LIFE, "ns", 1, {0: slot_bytes}))
        wait_until(lambda: link.node_life != 0, 10.0, "the worker attaches")
        if stage == "waiting":
            # For a computation that never ends.
            cuda.stream(1).submit(lambda: None)
            exported.record(1)
            link.submit(JobRequest(named_job(Direction.STORE, [numbered_key(0)], [[0]])))
    print("there", flush=True)
    signal.pause()
    del kept


def greet(name: str, slot_bytes: int, exported: ExportedKV) -> tuple[object, ...]:
    """Connect, and send a part of the attach message."""
    sock = wire.connect(name, 10.0)
    words = CancelWords.create()
    hello = AttachWorker("engine", LIFE, "ns", 0, 1, {0: slot_bytes}, exported.layout)
    half = wire.frame(hello)[:-10]
    socket.send_fds(sock, [half], [words.region.fd])
    return sock, words


if __name__ == "__main__":
    main()
