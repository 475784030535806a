"""Two NodeActors that read from each other through NIXL, over TCP, and what their deaths do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from raykv.base.errors import ClusterError
from raykv.base.ids import Refusal
from raykv.lab.bench import fetch
from raykv.lab.bench.fetch import CHUNK_BYTES
from raykv.lab.bench.named_jobs import SPACE
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import CopyResult, Read
from raykv.protocol.framing import encode
from tests.fixtures.node.nixl import needs_nixl
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, needs_nixl]

MOST_BYTES = 512 << 20
LONG_S = 60.0
CHUNKS_A_READ = 64


class Pair(fetch.Pair):
    """Two nodes, of which the second one fetches."""

    def fetched(self, size: int, deadline_s: float = LONG_S) -> CopyResult:
        """How a fetch of that size ends; the second pool has none of it before."""
        self.drop(size)
        return self.order(size, deadline_s)

    def fetched_bytes(self, size: int) -> Iterator[bytes]:
        """What the second pool has of the last fetch, in pieces."""
        keys = fetch.keys_of(size)
        for first in range(0, len(keys), CHUNKS_A_READ):
            some = keys[first : first + CHUNKS_A_READ]
            request = Read(SPACE, some, Numbers.of([CHUNK_BYTES] * len(some)))
            raw = self.actors[1].read.remote(encode(request))
            yield ray.get(raw, timeout=LONG_S)[1].tobytes()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ExitStack() as stack:
        made = Pair(stack, MOST_BYTES, transport="nixl")
        made.wait_for_nixl()
        yield made


def refusals(result: CopyResult) -> set[Refusal]:
    return {Refusal(number) for number in result.refusals}


def assert_right(pair: Pair, num_bytes: int) -> None:
    parts = list(pair.fetched_bytes(num_bytes))
    assert sum(len(part) for part in parts) == num_bytes
    assert all(part.count(b"\7") == len(part) for part in parts)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def begin(pair: Pair, deadline_s: float) -> Future[CopyResult]:
    """A large fetch in another thread; it has begun to move bytes when this returns."""
    before = pair.stats().bytes_nixl
    threads = ThreadPoolExecutor(1)
    fetch = threads.submit(pair.fetched, MOST_BYTES, deadline_s=deadline_s)
    threads.shutdown(wait=False)
    wait_until(lambda: pair.stats().bytes_nixl > before or fetch.done(), LONG_S, "bytes come")
    assert not fetch.done()
    return fetch


def test_all_bytes_come_through_nixl_once_both_have_it(pair: Pair) -> None:
    before = pair.stats().bytes_nixl
    assert refusals(pair.fetched(64 * CHUNK_BYTES)) == set()
    assert pair.stats().bytes_nixl == before + 64 * CHUNK_BYTES
    assert_right(pair, 64 * CHUNK_BYTES)


def test_source_that_dies_in_the_middle_costs_the_rest_of_the_fetch(pair: Pair) -> None:
    source, here = pair.node_pids
    fetch = begin(pair, LONG_S)
    os.kill(source, signal.SIGKILL)
    began = time.monotonic()
    assert Refusal.NODE_LOST in refusals(fetch.result(LONG_S))
    assert time.monotonic() - began < LONG_S / 2
    assert is_running(here)


def test_frozen_source_costs_the_deadline_and_writes_nothing_later(pair: Pair) -> None:
    source, here = pair.node_pids
    fetch = begin(pair, 5.0)
    os.kill(source, signal.SIGSTOP)
    try:
        result = fetch.result(LONG_S)
    finally:
        os.kill(source, signal.SIGCONT)
    assert refusals(result) - {Refusal.NONE}
    assert is_running(here)
    # What is asked now comes another way, or the same: late bytes of the old fetch hurt nobody.
    wait_until(lambda: refusals(pair.fetched(MOST_BYTES)) == set(), LONG_S, "it is read again")
    assert_right(pair, MOST_BYTES)


def test_destination_that_dies_in_the_middle_leaves_no_slot_of_the_source_held(pair: Pair) -> None:
    _, here = pair.node_pids
    begin(pair, LONG_S)
    os.kill(here, signal.SIGKILL)

    def takes_stores() -> bool:
        try:
            pair.fill()
        except ClusterError:
            return False
        return True

    wait_until(takes_stores, LONG_S, "the offers are too old, and every slot is stored into")
