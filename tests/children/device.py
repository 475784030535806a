"""A worker with its KV cache on an imaginary GPU, in a process for a test to kill.

Usage: python device.py SOCKET_NAME SLOT_BYTES STAGE. Goes up to the stage, then prints a
line and waits to be killed. It leaves nothing behind: memory of a GPU dies with who opened it.
"""

from __future__ import annotations

import signal
import sys

from raykv.base.ids import Direction
from raykv.memory.cuda.kv import export_kv
from raykv.protocol.worker import AttachWorker, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkTarget, WorkerLink
from tests.children.worker import LIFE, NUM_BLOCKS, SETTINGS, greet
from tests.fixtures.cuda.memory import FakeCuda
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine
from tests.fixtures.waiting import wait_until


def main() -> None:
    """See the module's docstring."""
    name, slot_bytes, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    cuda = FakeCuda()
    base = cuda.allocate(NUM_BLOCKS * slot_bytes)
    tensor = TensorLayout(base, NUM_BLOCKS, slot_bytes, slot_bytes)
    exported = export_kv(cuda, [tensor], 1, [0], [[0]])
    if stage == "half attached":
        hello = AttachWorker("engine", LIFE, "ns", 0, 1, {0: slot_bytes}, exported.layout)
        kept: object = greet(name, hello, stage)
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


if __name__ == "__main__":
    main()
