"""How a worker attaches, and what ends its copies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from raykv.memory.handles import MEMFD, open_kv
from raykv.memory.region import Region
from raykv.memory.words import NUM_WORDS, CancelWords
from raykv.node.attached import AttachedWorker, receive_hello
from raykv.node.devices import Devices
from raykv.protocol import wire
from raykv.protocol.worker import AttachWorker, KVLayout, TensorLayout

LONG_S = 10.0
LAYOUT = KVLayout(MEMFD, 4096, 1, [TensorLayout(0, 64, 64, 64)], [0], [[0]])


@pytest.fixture
def worker() -> Iterator[AttachedWorker]:
    here, there = socket.socketpair()
    hello = AttachWorker(
        engine_id="engine",
        life=3,
        namespace="namespace",
        rank=0,
        num_ranks=1,
        layout=LAYOUT,
        slot_bytes={0: 4096},
    )
    devices = Devices()
    kv = open_kv(LAYOUT, [Region.anonymous(4096, "kv").fd], devices.driver)
    attached = AttachedWorker(here, hello, kv, CancelWords.create(), devices)
    yield attached
    attached.unmap()
    here.close()
    there.close()


@pytest.mark.parametrize("job_id", [0, 7, NUM_WORDS + 7])
def test_job_is_stopped_when_its_worker_takes_it_back(worker: AttachedWorker, job_id: int) -> None:
    sign = worker.stop_sign(job_id)
    worker.words.cancel(job_id + 1)
    assert not sign()
    worker.words.cancel(job_id)
    assert sign()


def test_every_job_is_stopped_when_its_workers_connection_is_closed(
    worker: AttachedWorker,
) -> None:
    sign = worker.stop_sign(1)
    assert worker.is_open
    assert not sign()
    worker.close_connection()
    assert not worker.is_open
    assert sign()
    assert worker.stop_sign(2)()


def test_attach_message_that_comes_bit_by_bit_has_one_deadline() -> None:
    near, far = socket.socketpair()
    stopped = threading.Event()

    def trickle() -> None:
        near.sendall((1000).to_bytes(4, "little"))
        while not stopped.wait(0.02):
            near.sendall(b"x")

    with near, far:
        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            receive_hello(far, wire.FrameReader(), 0.3)
        assert time.monotonic() - started < LONG_S / 2
        stopped.set()
        thread.join(LONG_S)
