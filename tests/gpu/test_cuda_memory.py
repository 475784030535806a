"""A real GPU's memory between two processes; torch and cuda.bindings are all that is needed."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.cuda.kv import CUDA_IPC, DeviceKV
from raykv.memory.cuda.page_lock import PoolLocker
from raykv.memory.handles import open_kv
from raykv.memory.pool import Pool
from raykv.protocol.framing import decode
from raykv.protocol.worker import KVLayout, check_device_memory
from tests.fixtures.waiting import wait_until

pytest.importorskip("torch")

import torch

from tests.house import CHILDREN, ROOT

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 64
LONG_S = 60.0
CONF = "PYTORCH_CUDA_ALLOC_CONF"
PATHS = os.pathsep.join([str(ROOT), *sys.path])


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs the package cuda-bindings")


@pytest.fixture
def cuda() -> Any:
    return cuda_driver.load()


class Worker:
    """The child, and what it has handed over."""

    def __init__(self, *, is_split: bool = False) -> None:
        near, far = socket.socketpair()
        child = CHILDREN / "gpu_worker.py"
        arguments = [str(far.fileno()), str(NUM_BLOCKS), "split" if is_split else "whole"]
        self.process = subprocess.Popen(
            [sys.executable, str(child), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[far.fileno()],
            env={**os.environ, CONF: "", "PYTHONPATH": PATHS},
        )
        far.close()
        near.settimeout(LONG_S)
        raw = b""
        while not raw.endswith(b"\n"):
            data = near.recv(1 << 16)
            assert data, "the child has ended"
            raw += data
        near.close()
        self.layout = decode(base64.b64decode(raw), KVLayout)
        check_device_memory(self.layout)

    def ask(self, command: str, value: int = 0) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {value}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def open(self, cuda: Any) -> DeviceKV:
        kv = open_kv(self.layout, [], lambda: cuda)
        assert isinstance(kv, DeviceKV)
        return kv

    def end(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.end()


def copy_out(kv: DeviceKV, layer: int, block: int) -> bytes:
    """With a plain copy of CUDA; the copy engine has tests of its own."""
    from cuda.bindings import runtime

    tensor = kv.layout.tensors[layer]
    out = bytearray(tensor.page_bytes)
    address = kv.address + tensor.offset + block * tensor.block_stride
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
    (code,) = runtime.cudaMemcpy(out, address, tensor.page_bytes, kind)
    assert code == runtime.cudaError_t.cudaSuccess, code
    return bytes(out)


def fill_block(kv: DeviceKV, block: int, value: int) -> None:
    from cuda.bindings import runtime

    for tensor in kv.layout.tensors:
        address = kv.address + tensor.offset + block * tensor.block_stride
        (code,) = runtime.cudaMemset(address, value, tensor.page_bytes)
        assert code == runtime.cudaError_t.cudaSuccess, code
    runtime.cudaDeviceSynchronize()


@pytest.mark.parametrize("is_split", [False, True])
def test_both_processes_see_one_memory(cuda: Any, workers: list[Worker], is_split: bool) -> None:
    worker = Worker(is_split=is_split)
    workers.append(worker)
    assert worker.layout.kind == CUDA_IPC
    kv = worker.open(cuda)
    for layer in range(32):
        assert set(copy_out(kv, layer, NUM_BLOCKS - 1)) == {layer + 1}
    fill_block(kv, 1, 77)
    assert worker.ask("check", 77)
    kv.close()


def test_event_holds_back_who_waits_for_it_until_the_other_process_has_computed(
    cuda: Any, workers: list[Worker]
) -> None:
    """Without the wait the old bytes would be read, which is looked at too."""
    from cuda.bindings import runtime

    worker = Worker()
    workers.append(worker)
    kv = worker.open(cuda)
    assert worker.ask("delayed", 99)
    _, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    (code,) = runtime.cudaEventQuery(kv.compute_event)
    assert code == runtime.cudaError_t.cudaErrorNotReady
    (code,) = runtime.cudaStreamWaitEvent(stream, kv.compute_event, 0)
    assert code == runtime.cudaError_t.cudaSuccess
    (code,) = runtime.cudaStreamSynchronize(stream)
    assert code == runtime.cudaError_t.cudaSuccess
    assert set(copy_out(kv, 31, 0)) == {99}
    runtime.cudaStreamDestroy(stream)
    kv.close()


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_of_a_dead_worker_is_free_once_it_is_closed(
    cuda: Any, workers: list[Worker]
) -> None:
    before = used_bytes()
    worker = Worker()
    workers.append(worker)
    kv = worker.open(cuda)
    worker.process.kill()
    worker.process.wait(LONG_S)
    # Still there, and harmless to read, until it is let go of.
    assert len(copy_out(kv, 0, 0)) == kv.layout.tensors[0].page_bytes
    kv.close()
    kv.close()
    slack = 32 << 20
    wait_until(lambda: used_bytes() <= before + slack, LONG_S, "its memory is free again")


OPENER = """
import os, signal, sys
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.handles import open_kv
from raykv.protocol.framing import decode
from raykv.protocol.worker import KVLayout
kv = open_kv(decode(bytes.fromhex(sys.argv[1]), KVLayout), [], cuda_driver.load)
print("there", flush=True)
signal.pause()
"""


def test_worker_goes_on_when_who_opened_its_memory_dies(workers: list[Worker]) -> None:
    from raykv.protocol.framing import encode

    worker = Worker()
    workers.append(worker)
    opener = subprocess.Popen(
        [sys.executable, "-c", OPENER, encode(worker.layout).hex()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert opener.stdout is not None
    assert opener.stdout.readline() == "there\n"
    opener.kill()
    opener.wait(LONG_S)
    opener.stdout.close()
    assert worker.ask("check", 0) is False
    assert worker.ask("delayed", 5)


def test_handle_of_a_worker_that_is_gone_is_refused(cuda: Any, workers: list[Worker]) -> None:
    worker = Worker()
    workers.append(worker)
    worker.process.kill()
    worker.process.wait(LONG_S)
    with pytest.raises(CUDAError, match="cuIpcOpen"):
        worker.open(cuda)


def test_devices_have_the_uuids_that_torch_gives_them(cuda: Any) -> None:
    count = torch.cuda.device_count()
    expected = [str(torch.cuda.get_device_properties(n).uuid) for n in range(count)]
    assert cuda.devices() == expected


def test_pool_is_locked_and_unpinned(cuda: Any) -> None:
    from cuda.bindings import runtime

    geometry = PoolGeometry(256 << 20, 4 << 20)
    pool = Pool(geometry, "")
    pool.prefault()
    locker = PoolLocker(cuda, cuda.devices()[0], pool, geometry)

    def kind_at(address: int) -> Any:
        code, attributes = runtime.cudaPointerGetAttributes(address)
        assert code == runtime.cudaError_t.cudaSuccess, code
        return attributes.type

    locker.start()
    wait_until(lambda: locker.locked_bytes == 256 << 20, LONG_S, "all of it is locked")
    last = pool.address + (256 << 20) - 1
    assert kind_at(last) == runtime.cudaMemoryType.cudaMemoryTypeHost
    locker.stop(LONG_S)
    assert kind_at(last) == runtime.cudaMemoryType.cudaMemoryTypeUnregistered
