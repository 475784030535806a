"""A NodeActor's service in a process of its own, and a real GPU's KV cache; no vLLM, no Ray."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from raykv.base.ids import Direction, Refusal
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.kv import export_kv
from raykv.node.states.file import load_hidden_states, promise
from raykv.protocol.copies import Capture
from raykv.protocol.worker import TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key, numbered_key
from tests.fixtures.node.cores import CoreLine, lives
from tests.fixtures.node.links import refusals
from tests.fixtures.waiting import wait_until
from tests.gpu.test_cuda_copy import has_gpu
from tests.house import CHILDREN, ROOT

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="there is no GPU here")]

STORE, LOAD = Direction.STORE, Direction.LOAD
NUM_LAYERS = 32
NUM_BLOCKS = 96
PAGE_BYTES = 16 * 2 * 8 * 128 * 2
"""Llama 8B, one layer: 16 tokens, keys and values, 8 heads of 128 numbers of 2 bytes."""
BLOCKS_PER_CHUNK = 2
SLOT_BYTES = NUM_LAYERS * BLOCKS_PER_CHUNK * PAGE_BYTES
NUM_SLOTS = 64
LONG_S = 60.0
DEADLINE_S = 5.0

_job_ids = itertools.count(1)
_names = itertools.count()


class Node:
    """The service, with a pool of 64 slots of 4 MiB."""

    def __init__(self) -> None:
        self.name = f"raykv-test-gpu/{os.getpid()}/{next(_names)}"
        arguments = [self.name, str(NUM_SLOTS), str(SLOT_BYTES)]
        self.process = subprocess.Popen(
            [sys.executable, str(CHILDREN / "node.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "listening\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.end()


class Worker:
    """A rank's KV cache in this process, as `raykv.worker.handover` hands it over, and its link."""

    def __init__(self, node: Node, num_layers: int = NUM_LAYERS) -> None:
        shape = (num_layers, NUM_BLOCKS, PAGE_BYTES)
        self.kv = torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
        torch.cuda.synchronize()
        tensors = [TensorLayout(x.data_ptr(), NUM_BLOCKS, PAGE_BYTES, PAGE_BYTES) for x in self.kv]
        groups = [list(range(num_layers))]
        self.exported = export_kv(cuda_driver.load(), tensors, BLOCKS_PER_CHUNK, [0], groups)
        settings = LinkSettings(step_deadline_s=DEADLINE_S, store_deadline_s=DEADLINE_S)
        self.link = WorkerLink(0, self.exported.layout, [], settings)
        slot_bytes = num_layers * BLOCKS_PER_CHUNK * PAGE_BYTES
        life = next(lives)
        self.core = CoreLine(node.name, life, {0: slot_bytes})
        self.core.wait()
        self.link.set_target(LinkTarget(node.name, "engine", life, "ns", 1, {0: slot_bytes}))
        wait_until(lambda: self.link.node_life != 0, LONG_S, "the worker attaches")

    def end(self) -> None:
        self.link.close(5.0)
        self.core.end()

    def submit(self, direction: Direction, chunks: list[int], blocks: list[int]) -> int:
        """As `DeviceLink` does: the event first."""
        job_id, count = next(_job_ids), BLOCKS_PER_CHUNK
        keys = [numbered_key(chunk) for chunk in chunks]
        parts = [blocks[i * count : (i + 1) * count] for i in range(len(chunks))]
        self.exported.record(torch.cuda.current_stream().cuda_stream)
        self.link.submit(JobRequest(named_job(direction, keys, parts, job_id=job_id)))
        return job_id

    def finish(self, job_id: int) -> list[Refusal]:
        return refusals(self.link, job_id, LONG_S)

    def run(self, direction: Direction, chunks: list[int], blocks: list[int]) -> list[Refusal]:
        return self.finish(self.submit(direction, chunks, blocks))

    def capture(self, blocks: list[int], capture: Capture, lock_fd: int) -> int:
        job_id = next(_job_ids) + (1 << 48)
        self.exported.record(torch.cuda.current_stream().cuda_stream)
        job = named_job(STORE, [named_key("states")], [blocks], job_id=job_id)
        self.link.submit(JobRequest(msgspec.structs.replace(job, capture=capture), lock_fd))
        return job_id

    def blocks(self, numbers: list[int]) -> Any:
        torch.cuda.synchronize()
        return self.kv[:, numbers].clone()


def worker_of(node: Node) -> Worker:
    """Its memory is not of expandable segments, whatever the environment says."""
    # Its name since torch 2.10, and before.
    known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    configure = known or torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:False")
    return Worker(node)


def test_bytes_of_the_gpu_come_back_to_other_blocks(node: Node) -> None:
    worker = worker_of(node)
    source = random.Random(3)
    for turn in range(3):
        chunks = list(range(20 * turn, 20 * (turn + 1)))
        stored, loaded = (source.sample(range(NUM_BLOCKS), 40) for _ in range(2))
        expected = worker.blocks(list(range(NUM_BLOCKS)))
        assert worker.run(STORE, chunks, stored) == []
        expected[:, loaded] = expected[:, stored]
        assert worker.run(LOAD, chunks, loaded) == []
        assert torch.equal(worker.blocks(list(range(NUM_BLOCKS))), expected)
    worker.end()


def test_store_has_what_the_gpu_computes_after_the_job_was_submitted(node: Node) -> None:
    worker = worker_of(node)
    torch.cuda._sleep(1_000_000_000)
    worker.kv[:, 1:3] = 77
    job_id = worker.submit(STORE, [5], [1, 2])
    # What is queued behind the event is the next step's.
    assert worker.finish(job_id) == []
    worker.kv[:, 1:3] = 78
    assert worker.run(LOAD, [5], [8, 9]) == []
    assert bool((worker.blocks([8, 9]) == 77).all())
    assert bool((worker.blocks([1, 2]) == 78).all())
    worker.end()


def test_load_does_not_run_ahead_of_what_was_queued_before_it(node: Node) -> None:
    worker = worker_of(node)
    expected = worker.blocks([1, 2])
    assert worker.run(STORE, [5], [1, 2]) == []
    torch.cuda._sleep(1_000_000_000)
    worker.kv[:, 8:10] = 0
    assert worker.run(LOAD, [5], [8, 9]) == []
    assert torch.equal(worker.blocks([8, 9]), expected)
    worker.end()


def test_hidden_states_are_captured_out_of_the_gpu(node: Node, tmp_path: Path) -> None:
    worker = Worker(node, num_layers=1)
    num_states, hidden_size = 4, 512
    path = str(tmp_path / "states.safetensors")
    lock_fd = promise(path)
    blocks = random.Random(5).sample(range(NUM_BLOCKS), 70)
    num_tokens = 16 * len(blocks) - 3
    capture = Capture(
        request_id="a",
        token_ids=np.arange(num_tokens, dtype="<i8").tobytes(),
        num_states=num_states,
        hidden_size=hidden_size,
        dtype="float16",
        block_tokens=16,
        strides=[num_states * hidden_size, hidden_size, 1],
        most_bytes=1 << 30,
        ttl_s=60.0,
        path=path,
        has_lock=True,
    )
    # The forward pass that computes them is still on its way.
    torch.cuda._sleep(1_000_000_000)
    worker.kv.random_(-128, 128)
    job_id = worker.capture(blocks, capture, lock_fd)
    assert worker.finish(job_id) == []
    os.close(lock_fd)
    expected = worker.blocks(blocks).cpu().numpy().view(np.uint16)
    worker.kv.zero_()
    found = load_hidden_states(path, LONG_S)["hidden_states"].numpy().view(np.uint16)
    shape = (-1, num_states, hidden_size)
    assert np.array_equal(found, expected.reshape(shape)[:num_tokens])
    worker.end()


def test_killed_node_fails_jobs_in_time_and_leaves_the_gpu_usable(node: Node) -> None:
    worker = worker_of(node)
    assert worker.run(STORE, list(range(40)), list(range(80))) == []
    before = worker.blocks(list(range(NUM_BLOCKS)))
    torch.cuda._sleep(1_000_000_000)
    job_id = worker.submit(LOAD, [0], [94, 95])
    node.process.send_signal(signal.SIGKILL)
    assert worker.finish(job_id) != []
    after = worker.blocks(list(range(NUM_BLOCKS)))
    assert torch.equal(after[:, :94], before[:, :94])
    # Copies of the dead process end with it: the blocks are ours again.
    worker.kv[:, 94:] = 3
    assert bool((worker.blocks([94, 95]) == 3).all())
    worker.end()
