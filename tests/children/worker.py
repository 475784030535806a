"""A worker in a process of its own, for a test to kill; a child that it forks keeps all open.

Usage: python worker.py SOCKET_NAME SLOT_BYTES STAGE RANK NUM_RANKS. Goes up to the stage,
then prints a line with the forked child's process id and waits to be killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from raykv.base.ids import Direction
from raykv.memory.region import Region
from raykv.memory.words import CancelWords
from raykv.protocol import wire
from raykv.protocol.worker import AttachWorker, KVLayout, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine
from tests.fixtures.waiting import wait_until

NUM_BLOCKS = 8
KV_NAME = "orphaned-kv"
LIFE = 77
"""Of the engine, if it has several ranks."""
SETTINGS = LinkSettings(step_deadline_s=30.0, store_deadline_s=30.0)


def main() -> None:
    """See the module's docstring."""
    name, slot_bytes, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rank, num_ranks = int(sys.argv[4]), int(sys.argv[5])
    life = LIFE if num_ranks > 1 else os.getpid()
    part = slot_bytes // num_ranks
    kv = Region.anonymous(NUM_BLOCKS * part, KV_NAME)
    tensor = TensorLayout(0, NUM_BLOCKS, part, part)
    layout = KVLayout("memfd", kv.num_bytes, 1, [tensor], [0], [[0]])
    if stage in ("connected", "half attached", "unread"):
        hello = AttachWorker("engine", life, "ns", rank, num_ranks, {0: slot_bytes}, layout)
        kept: object = greet(name, hello, stage, kv.fd)
    else:
        CoreLine(name, life, {0: slot_bytes}, num_ranks=num_ranks).wait()
        link = kept = WorkerLink(rank, layout, [kv.fd], SETTINGS)
        link.set_target(LinkTarget(name, "engine", life, "ns", num_ranks, {0: slot_bytes}))
        wait_until(lambda: link.node_life != 0, 10.0, "the worker attaches")
        if stage != "attached":
            submit(link, Direction.LOAD if stage == "loading" else Direction.STORE)
    child = os.fork()
    if child:
        print(child, flush=True)
    signal.pause()
    del kept


def greet(name: str, hello: AttachWorker, stage: str, *fds: int) -> tuple[object, ...]:
    """Connect, and send at most a part of the attach message, with these descriptors of KV."""
    sock = wire.connect(name, 10.0)
    words = CancelWords.create()
    if stage == "half attached":
        half = wire.frame(hello)[:-10]
        socket.send_fds(sock, [half], [words.region.fd, *fds])
    elif stage == "unread":
        wire.send_with_fds(sock, hello, [words.region.fd, *fds])
    return sock, words


def submit(link: WorkerLink, direction: Direction) -> None:
    """A job for the chunks 0 and 1."""
    keys = [numbered_key(chunk) for chunk in range(2)]
    link.submit(JobRequest(named_job(direction, keys, [[0], [1]])))


if __name__ == "__main__":
    main()
