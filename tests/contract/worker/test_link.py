"""Workers and a NodeService in another process, over the real socket: bytes, refusals, deaths."""

from __future__ import annotations

import mmap
import random
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raykv.base.geometry import aligned
from raykv.base.ids import Direction, Refusal, in_group
from raykv.memory.region import Region
from raykv.protocol import wire
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyResult
from raykv.protocol.worker import (
    NOT_CANONICAL,
    CanonicalPages,
    KVLayout,
    PageMap,
    TensorLayout,
)
from raykv.worker.job import JobRequest, Stage
from raykv.worker.link import LinkTarget, WorkerLink
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine
from tests.fixtures.node.links import (
    LONG_S,
    NUM_BLOCKS,
    NUM_SLOTS,
    PATIENT,
    SECONDS,
    SETTINGS,
    MakeNode,
    Node,
    changed,
    ended,
    failures,
    job_ids,
    result_of,
)
from tests.fixtures.processes import freeze
from tests.fixtures.waiting import wait_until, wait_until_quiet


def test_line_goes_to_the_next_node_when_the_engine_is_at_another_one(make_node: MakeNode) -> None:
    slot_bytes = aligned(256)
    first, second = make_node(slot_bytes), make_node(slot_bytes)
    worker = first.worker()
    assert worker.store([0], [0]) == []
    last_life = worker.link.node_life
    worker.core.move(second.name)
    worker.link.set_target(replace(worker.target, socket_name=second.name))
    wait_until(lambda: worker.link.node_life > last_life, LONG_S, "it attaches there")
    worker.core.wait()
    assert worker.load([0], [0]) == [Refusal.NOT_HERE]
    assert worker.store([0], [0]) == []
    assert first.process.poll() is None


def test_jobs_of_the_last_node_have_ended_before_the_line_goes_to_the_next_one(
    make_node: MakeNode,
) -> None:
    slot_bytes = aligned(256)
    first, second = make_node(slot_bytes), make_node(slot_bytes)
    worker = first.worker(settings=PATIENT)
    assert worker.store([0], [0]) == []
    last_life = worker.link.node_life
    freeze(first.process.pid)
    job = worker.job(Direction.LOAD, [0], [0])
    worker.link.submit(job)
    wait_until(lambda: worker.link._pending[job.job_id].stage is Stage.FLYING, LONG_S, "sent")
    worker.core.move(second.name)
    worker.link.set_target(replace(worker.target, socket_name=second.name))
    assert failures(worker.finish(job.job_id)) == [Refusal.NODE_LOST]
    # It could have written into the engine's blocks.
    assert first.process.wait(LONG_S) == -signal.SIGKILL
    wait_until(lambda: worker.link.node_life > last_life, LONG_S, "it attaches there")


def test_first_load_into_blocks_takes_no_page_fault_for_each_page(make_node: MakeNode) -> None:
    """Each costs more than the copy of the page."""
    page_bytes = 1 << 20
    node = make_node(page_bytes)
    worker = node.worker([page_bytes])
    pool_bytes, kv_bytes = NUM_SLOTS * page_bytes, worker.kv.num_bytes
    wait_until(lambda: mapped_bytes(node, "pool") >= pool_bytes, LONG_S, "the pool is mapped")
    wait_until(lambda: mapped_bytes(node, "test-kv") >= kv_bytes, LONG_S, "the KV is mapped")
    chunks = list(range(8))
    assert worker.store(chunks, chunks) == []
    # It loads code in the background, too.
    wait_until_quiet(lambda: num_faults(node), LONG_S, "it has begun")
    before = num_faults(node)
    blocks = list(range(8, 16))
    assert worker.load(chunks, blocks) == []
    assert num_faults(node) - before < 8 * page_bytes // mmap.PAGESIZE // 10


def mapped_bytes(node: Node, name: str) -> int:
    """That the node's process has in its page table."""
    maps = Path(f"/proc/{node.process.pid}/smaps").read_text().partition(f"raykv-{name} ")[2]
    found = re.search(r"^Rss: +(\d+) kB$", maps, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def num_faults(node: Node) -> int:
    """Of pages that were in memory already."""
    stat = Path(f"/proc/{node.process.pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[7])


@pytest.mark.parametrize(
    ("blocks_per_chunk", "pages"), [(1, [4096]), (1, [128, 1024, 64]), (4, [128, 1024, 64])]
)
def test_bytes_of_one_engine_come_back_in_other_engine(
    make_node: MakeNode, blocks_per_chunk: int, pages: list[int]
) -> None:
    slot_bytes = aligned(blocks_per_chunk * sum(pages))
    node = make_node(slot_bytes)
    first, second = (node.worker(pages, blocks_per_chunk) for _ in range(2))
    source = random.Random(1)
    num_chunks = NUM_BLOCKS // 4 // 2
    stored = source.sample(range(NUM_BLOCKS), num_chunks * blocks_per_chunk)
    loaded = source.sample(range(NUM_BLOCKS), num_chunks * blocks_per_chunk)
    chunks = list(range(num_chunks))
    untouched = [second.block(n) for n in range(NUM_BLOCKS)]
    result = first.run(first.job(Direction.STORE, chunks, stored))
    assert failures(result) == []
    assert result.num_bytes == len(stored) * sum(pages)
    expected = [first.block(number) for number in stored]
    result = second.run(second.job(Direction.LOAD, chunks, loaded))
    assert failures(result) == []
    assert [second.block(number) for number in loaded] == expected
    for number in set(range(NUM_BLOCKS)) - set(loaded):
        assert second.block(number) == untouched[number]


def test_layers_of_a_load_are_told_one_by_one_and_bytes_are_those_of_any_load(
    make_node: MakeNode,
) -> None:
    pages = [256, 128, 64]
    node = make_node(aligned(2 * sum(pages)))
    worker = node.worker(pages, 2)
    assert worker.store([0, 1, 2], list(range(6))) == []
    expected = [worker.block(number) for number in range(6)]
    job = changed(worker.job(Direction.LOAD, [0, 1, 2], list(range(6, 12))), by_layer=True)
    worker.link.submit(job)
    for count in (1, 2, 3):
        worker.link.wait_layers([job.job_id], count)
        for position, block in enumerate(range(6, 12)):
            assert worker.block(block)[:count] == expected[position][:count]
    result = worker.finish(job.job_id)
    assert failures(result) == []
    assert result.num_bytes == 6 * sum(pages)
    worker.link.wait_layers([job.job_id], 1 << 30)


def test_load_by_layer_leaves_out_what_is_not_there(node: Node) -> None:
    worker = node.worker([256, 128])
    assert worker.store([0, 1], [0, 1]) == []
    untouched = worker.block(6)
    load = worker.job(Direction.LOAD, [0, 7, 1], [5, 6, 7])
    worker.link.submit(changed(load, by_layer=True))
    worker.link.wait_layers([load.job_id], 1 << 30)
    result = worker.finish(load.job_id)
    assert (list(result.failed_chunks), failures(result)) == ([1], [Refusal.NOT_HERE])
    assert [worker.block(5), worker.block(7)] == [worker.block(0), worker.block(1)]
    assert worker.block(6) == untouched
    none = changed(worker.job(Direction.LOAD, [7], [6]), by_layer=True)
    assert failures(worker.run(none)) == [Refusal.NOT_HERE]


def test_wait_for_layers_ends_with_the_deadline_of_the_load(make_node: MakeNode) -> None:
    node = make_node(4096, "endless")
    worker = node.worker([256, 128])
    worker.link.submit(worker.job(Direction.STORE, [0], [0]))
    load = changed(worker.job(Direction.LOAD, [0], [5]), by_layer=True)
    freeze(node.process.pid)
    worker.link.submit(load)
    worker.link.wait_layers([load.job_id], 1)
    assert failures(worker.finish(load.job_id)) == [Refusal.NODE_LOST]


def test_load_is_refused_unless_its_name_and_its_blocks_are_there(node: Node) -> None:
    mine, stranger = node.worker(), node.worker(namespace="other")
    assert mine.store([3], [0]) == []
    before = mine.block(5)
    right = mine.job(Direction.LOAD, [3], [5])
    wrong = [
        (changed(right, keys=Keys.of([numbered_key(4)])), Refusal.NOT_HERE),
        (changed(right, block_ids=Numbers.of([NUM_BLOCKS])), Refusal.BAD_HANDLE),
        (changed(right, keys=Keys.of([in_group(numbered_key(3), 1)])), Refusal.NOT_HERE),
        (changed(right, namespace="other"), Refusal.BAD_HANDLE),
    ]
    for job, refusal in wrong:
        result = mine.run(changed(job, job_id=next(job_ids)))
        assert failures(result) == [refusal], job
        assert mine.block(5) == before
    assert stranger.load([3], [5]) == [Refusal.NOT_HERE]
    assert failures(mine.run(right)) == []
    assert mine.block(5) == mine.block(0)


def test_job_is_of_the_namespace_that_it_names_whatever_the_line_was_attached_with(
    node: Node,
) -> None:
    moved, other = node.worker(), node.worker(namespace="other")
    core = CoreLine(node.name, moved.target.life, {0: node.slot_bytes}, ("ns", "other"))
    core.wait()
    store = moved.job(Direction.STORE, [3], [0])
    assert failures(moved.run(changed(store, namespace="other"))) == []
    assert other.load([3], [5]) == []
    assert other.block(5) == moved.block(0)
    assert moved.load([3], [5]) == [Refusal.NOT_HERE]
    core.end()


def test_jobs_of_an_engine_that_is_not_here_are_refused(node: Node) -> None:
    worker = node.worker(settings=PATIENT)
    assert worker.store([0], [0]) == []
    worker.core.end()

    def is_refused() -> bool:
        return worker.load([0], [5]) == [Refusal.BAD_HANDLE]

    wait_until(is_refused, LONG_S, "the NodeActor has noticed")
    worker.core = CoreLine(node.name, worker.target.life, {0: node.slot_bytes})
    worker.core.wait()
    assert worker.load([0], [5]) == []


@pytest.mark.parametrize("is_canonical", [False, True])
def test_layout_that_points_outside_of_its_memory_or_slot_is_refused(
    node: Node, is_canonical: bool
) -> None:
    kv = Region.anonymous(4096, "test-kv")
    page = PageMap(node.slot_bytes + 1, *([0], [0], [256], [1], [256], [256]))
    pages = CanonicalPages([page], [[0]]) if is_canonical else NOT_CANONICAL
    num_bytes = 4096 if is_canonical else 1 << 30
    tensor = TensorLayout(0, 4, 256, 256)
    layout = KVLayout("memfd", num_bytes, 1, [tensor], [0], [[0]], canonical=pages)
    link = WorkerLink(0, layout, [kv.fd], SETTINGS)
    link.set_target(LinkTarget(node.name, "e", 1, "ns", 1, {0: node.slot_bytes}))
    job = named_job(Direction.STORE, [numbered_key(0)], [[0]], job_id=next(job_ids))
    link.submit(JobRequest(job))
    assert failures(result_of(link, job.job_id)) == [Refusal.NODE_LOST]
    assert link.node_life == 0
    assert node.process.poll() is None
    link.close(5.0)


def test_frozen_node_is_dead_before_its_load_is_reported_failed(node: Node) -> None:
    worker = node.worker()
    assert worker.store([0], [0]) == []
    before = worker.block(3)
    freeze(node.process.pid)
    assert worker.load([0], [3]) == [Refusal.NODE_LOST]
    # Were it alive, it could still write into block 3.
    assert node.process.wait(0) == -signal.SIGKILL
    assert worker.block(3) == before


def test_jobs_that_do_not_fit_into_one_message_are_sent_with_several(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = node.worker()
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 200 << 10)
    kept, large = [worker.job(Direction.STORE, [at], [at]) for at in range(8)], job_of([0] * 30_000)
    with worker.link._lock:
        for job in (*kept, large):
            worker.link.submit(job)
    found: dict[int, CopyResult] = {}

    def is_over() -> bool:
        found.update((result.job_id, result) for result in worker.link.drain())
        return len(found) == 9

    wait_until(is_over, LONG_S, "all have ended")
    assert failures(found.pop(large.job_id)) == [Refusal.BAD_HANDLE]
    assert not any(result.failed_chunks for result in found.values())
    assert node.process.poll() is None


def job_of(blocks: list[int]) -> JobRequest:
    """Of one chunk with many blocks."""
    job = named_job(Direction.STORE, [numbered_key(9)], [blocks], job_id=next(job_ids))
    return JobRequest(job)


def test_wait_for_store_ends_although_node_is_frozen(node: Node) -> None:
    worker = node.worker()
    freeze(node.process.pid)
    job = worker.job(Direction.STORE, [0], [0])
    worker.link.submit(job)
    worker.link.wait({job.job_id, 987_654})
    # vLLM writes into the blocks from here on: nobody may read them any more.
    assert node.process.wait(0) == -signal.SIGKILL
    assert [failures(result) for result in worker.link.drain()] == [[Refusal.NODE_LOST]]


def test_all_chunks_of_a_job_have_failed_if_its_result_is_absurd(make_node: MakeNode) -> None:
    node = make_node(4096, "absurd")
    worker = node.worker()
    result = worker.run(worker.job(Direction.STORE, [0, 1], [0, 1]))
    assert (list(result.failed_chunks), result.num_bytes) == ([0, 1], 0)
    assert failures(result) == [Refusal.COPY_FAILED] * 2


def test_node_frozen_for_a_moment_lives_and_does_its_job(node: Node) -> None:
    worker = node.worker()
    assert worker.store([0], [0]) == []
    freeze(node.process.pid)
    job = worker.job(Direction.LOAD, [0], [3])
    worker.link.submit(job)
    node.process.send_signal(signal.SIGCONT)
    assert failures(worker.finish(job.job_id)) == []
    assert worker.block(3) == worker.block(0)
    assert node.process.poll() is None


def test_worker_attaches_again_to_next_life_of_node(node: Node) -> None:
    worker = node.worker()
    assert worker.store([0], [0]) == []
    old = worker.link.node_life
    node.end()
    assert worker.load([0], [3]) == [Refusal.NODE_LOST]
    node.start()
    wait_until(lambda: worker.link.node_life > old, 10.0, "the worker attaches again")
    worker.core.wait()
    assert worker.load([0], [3]) == [Refusal.NOT_HERE]
    assert worker.store([0], [0]) == []
    assert worker.load([0], [3]) == []
    assert worker.block(3) == worker.block(0)


def test_idle_line_stays_up(node: Node) -> None:
    """Longer than any deadline of the line: silence alone is no reason to hang up."""
    worker = node.worker()
    life = worker.link.node_life
    quiet_until = time.monotonic() + 2.5
    wait_until(lambda: time.monotonic() > quiet_until, 5.0, "some silence")
    assert worker.link.node_life == life
    assert worker.store([0], [0]) == []


# The breaker, and the end


def test_job_fails_at_once_while_there_is_no_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.RETRY_PAUSES_S", (LONG_S, LONG_S))
    node.end()
    line = node.line(PATIENT)
    link = line.link
    wait_until(lambda: link.breaker_report().opened == 1, LONG_S, "the breaker opens")
    line.submit()
    assert ended(line, SECONDS) == [Refusal.NODE_LOST]


def test_node_that_is_gone_is_said_once_and_its_return_too(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    line = node.line(PATIENT)
    link = line.link
    wait_until(lambda: link.node_life != 0, LONG_S, "the worker attaches")
    assert link.breaker_report().rows == []
    node.end()
    wait_until(lambda: link.breaker_report().failed > 4, LONG_S, "some attempts fail")
    report = link.breaker_report()
    assert ([row.peer for row in report.rows], report.opened) == (["own node"], 1)
    node.start()
    wait_until(lambda: "is there again" in caplog.text, LONG_S, "the worker attaches again")
    assert link.node_life != 0
    assert link.breaker_report().rows == []
    assert caplog.text.count("no line to the NodeActor: it is gone") == 1
    assert caplog.text.count("no line to the NodeActor") == 1
    assert caplog.text.count("is there again") == 1


def test_frozen_node_costs_a_job_its_deadline_at_most_while_the_worker_attaches(node: Node) -> None:
    freeze(node.process.pid)
    line = node.line(replace(PATIENT, step_deadline_s=0.3))
    line.submit()
    assert ended(line, SECONDS) == [Refusal.NODE_LOST]


def test_engine_ends_in_time_while_it_attaches_to_a_frozen_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze(node.process.pid)
    begun = threading.Event()
    connect = wire.connect

    def connect_and_tell(name: str, timeout_s: float) -> socket.socket:
        begun.set()
        return connect(name, timeout_s)

    monkeypatch.setattr(wire, "connect", connect_and_tell)
    line = node.line(PATIENT)
    assert begun.wait(LONG_S)
    line.end_in_time()


def test_engine_ends_in_time_with_its_flush_while_a_frozen_node_has_its_job(node: Node) -> None:
    line = node.line(PATIENT)
    line.wait_until_attached()
    freeze(node.process.pid)
    job_id = line.submit()
    flush = threading.Thread(target=line.link.wait, args=([job_id],))
    flush.start()
    line.end_in_time()
    flush.join(SECONDS)
    assert not flush.is_alive()
    assert line.link.drain() == []


def test_engine_ends_in_time_while_a_killed_node_does_not_exit(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is not reported: its copy may still be made."""
    killed = threading.Event()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: killed.set())
    line = node.line(replace(PATIENT, step_deadline_s=0.2, cancel_grace_s=0.2))
    line.wait_until_attached()
    freeze(node.process.pid)
    line.submit()
    assert killed.wait(LONG_S)
    line.end_in_time()
    assert line.link.drain() == []
