"""What ends the copies of an attached worker."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from raykv.memory.handles import MEMFD, open_kv
from raykv.memory.region import Region
from raykv.memory.words import NUM_WORDS, CancelWords
from raykv.node.attached import AttachedWorker
from raykv.node.devices import Devices
from raykv.protocol.worker import AttachWorker, KVLayout, TensorLayout

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
