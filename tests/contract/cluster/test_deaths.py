"""Memory dies with its owner: what a NodeActor keeps of a killed worker, at every stage: nothing.

Each worker that is killed leaves a child behind that has all of it open, its socket too: that the
worker is dead shows in its process alone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import raykv.cluster.deaths
from raykv.base.errors import AttachError
from raykv.base.ids import Direction, Refusal
from raykv.cluster.deaths import DeathWatch
from raykv.memory.region import Region
from raykv.protocol import wire
from tests.children.worker import KV_NAME, LIFE
from tests.fixtures.node import links
from tests.fixtures.node.links import Worker, failures
from tests.fixtures.waiting import wait_until
from tests.house import CHILDREN

SLOT_BYTES = 8192
GONE_S = 2.0
"""How long a NodeActor may hold what is not its own; the machine's noise comes on top."""
NOISE_S = 3.0
LONG_S = 10.0


@dataclass
class Orphan:
    """What a killed worker left behind: its forked child, with copies of all descriptors."""

    worker: subprocess.Popen[str]
    child: int

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait(LONG_S)
        assert holds(self.child, KV_NAME), "the child should keep the memory"

    def end(self) -> None:
        for pid in (self.worker.pid, self.child):
            if self.worker.returncode is None or pid != self.worker.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.worker.wait(LONG_S)
        assert self.worker.stdout is not None
        self.worker.stdout.close()


@dataclass
class World:
    """A NodeActor in a process of its own, and workers that are to be killed."""

    node: links.Node
    folder: Path
    orphans: list[Orphan] = field(default_factory=list)

    def spawn(self, stage: str, rank: int = 0, num_ranks: int = 1) -> Orphan:
        command = [sys.executable, str(CHILDREN / "worker.py"), self.node.name]
        command += [str(SLOT_BYTES), stage, str(rank), str(num_ranks)]
        worker = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        assert worker.stdout is not None
        self.orphans.append(Orphan(worker, int(worker.stdout.readline())))
        return self.orphans[-1]

    def expect_line(self, line: str) -> None:
        assert self.node.process.stdout is not None
        assert self.node.process.stdout.readline() == f"{line}\n"

    def wait_until_gone(self, num_fds: int) -> None:
        """The NodeActor has as many descriptors as it had, and maps no memory of a worker."""
        pid = self.node.process.pid

        def is_gone() -> bool:
            names = (KV_NAME, "cancel-words")
            return not any(holds(pid, name) for name in names) and count_fds(pid) == num_fds

        wait_until(is_gone, GONE_S + NOISE_S, "the NodeActor lets go of a dead worker's memory")
        assert self.node.process.poll() is None


def holds(pid: int, name: str) -> bool:
    """Whether a process maps a file of that name, or has it open."""
    return name in Path(f"/proc/{pid}/maps").read_text() or any(name in fd for fd in fds_of(pid))


def fds_of(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except FileNotFoundError:
            continue
    return found


def count_pools() -> int:
    """Pools that this process maps; other tests have some."""
    return Path("/proc/self/maps").read_text().count("raykv-pool")


def count_fds(pid: int) -> int:
    """Those that a connection has; threads that load code open others for a while."""
    kinds = ("socket:", "anon_inode:[pidfd]", "pidfd:", "/memfd:")
    return sum(fd.startswith(kinds) for fd in fds_of(pid))


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """With the parameter "endless" no copy ends by itself."""
    options = [request.param] if hasattr(request, "param") else []
    node = links.Node(SLOT_BYTES, *options)
    made = World(node, tmp_path)
    yield made
    for orphan in made.orphans:
        orphan.end()
    node.end()
    assert list(tmp_path.iterdir()) == [], "a process has left files behind"


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.end()


endless = pytest.mark.parametrize("world", ["endless"], indirect=True)


@pytest.mark.parametrize("stage", ["connected", "half attached", "unread", "attached"])
def test_nothing_of_a_killed_worker_stays(world: World, stage: str) -> None:
    num_fds = count_fds(world.node.process.pid)
    orphan = world.spawn(stage)
    wait_until(
        lambda: count_fds(world.node.process.pid) > num_fds, LONG_S, "the NodeActor takes it"
    )
    if stage in ("unread", "attached"):
        wait_until(lambda: holds(world.node.process.pid, KV_NAME), LONG_S, "it is mapped")
    orphan.kill_worker()
    world.wait_until_gone(num_fds)


@endless
def test_killed_workers_copy_is_given_up_and_its_slots_are_not_ready(
    world: World, workers: list[Worker]
) -> None:
    num_fds = count_fds(world.node.process.pid)
    orphan = world.spawn("storing")
    world.expect_line("copying")
    orphan.kill_worker()
    world.wait_until_gone(num_fds)
    heir = Worker(world.node, [SLOT_BYTES], 1)
    workers.append(heir)
    for chunk in (0, 1):
        assert failures(heir.run(heir.job(Direction.LOAD, [chunk], [0]))) == [Refusal.NOT_HERE]
    # The next store of the slot begins at once: nobody writes there any more.
    heir.link.submit(heir.job(Direction.STORE, [0], [0]))
    world.expect_line("copying")


@endless
def test_jobs_that_wait_for_their_lane_go_with_their_worker(world: World) -> None:
    num_fds = count_fds(world.node.process.pid)
    first = world.spawn("storing")
    world.expect_line("copying")
    second = world.spawn("storing")
    second.kill_worker()
    wait_until(
        lambda: Path(f"/proc/{world.node.process.pid}/maps").read_text().count(KV_NAME) == 1,
        GONE_S + NOISE_S,
        "only the first one's memory is mapped",
    )
    first.kill_worker()
    world.wait_until_gone(num_fds)


def test_other_rank_lives_on_when_one_is_killed(world: World, workers: list[Worker]) -> None:
    half = SLOT_BYTES // 2
    survivor = Worker(world.node, [half], 1, rank=0, num_ranks=2, life=LIFE)
    workers.append(survivor)
    num_fds = count_fds(world.node.process.pid)
    orphan = world.spawn("attached", rank=1, num_ranks=2)
    assert failures(survivor.run(survivor.job(Direction.STORE, [0], [0]))) == []
    orphan.kill_worker()
    wait_until(
        lambda: (
            not holds(world.node.process.pid, KV_NAME)
            and count_fds(world.node.process.pid) == num_fds
        ),
        GONE_S + NOISE_S,
        "the dead rank's memory is unmapped",
    )
    too_early = survivor.run(survivor.job(Direction.LOAD, [0], [1]))
    # It would wait in vain for the other part.
    assert failures(too_early) == [Refusal.NOT_HERE]
    # The same slot is stored anew, by an engine that lives, at once.
    alone = Worker(world.node, [SLOT_BYTES], 1, namespace="other")
    workers.append(alone)
    assert failures(alone.run(alone.job(Direction.STORE, [0], [0]))) == []
    assert failures(alone.run(alone.job(Direction.LOAD, [0], [1]))) == []


def test_nothing_of_a_killed_node_stays_in_its_worker(world: World, workers: list[Worker]) -> None:
    # Services of earlier tests, which are let go of at any time otherwise.
    gc.collect()
    num_pools = count_pools()
    worker = Worker(world.node, [SLOT_BYTES], 1)
    workers.append(worker)
    assert failures(worker.run(worker.job(Direction.STORE, [0], [0]))) == []
    assert count_pools() == num_pools
    assert worker.link._sock is not None
    line = str(Path(f"/proc/self/fd/{worker.link._sock.fileno()}").readlink())
    world.node.process.kill()
    wait_until(lambda: line not in fds_of(os.getpid()), LONG_S, "the line is closed")
    assert worker.link._pidfd == -1
    wire.listen(world.node.name).close()


def test_nothing_is_in_files_or_in_shared_memory_of_the_host(
    world: World, workers: list[Worker]
) -> None:
    orphan = world.spawn("attached")
    for pid in (world.node.process.pid, orphan.worker.pid):
        assert not holds(pid, "/dev/shm/")
        maps = Path(f"/proc/{pid}/maps").read_text()
        shared = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "rw-s" in line}
        assert shared
        assert all(name.startswith("/memfd:raykv-") for name in shared), shared


def test_descriptors_that_come_over_a_socket_are_closed_in_children() -> None:
    near, far = socket.socketpair()
    with near, far:
        memory = Region.anonymous(4096, "test")
        socket.send_fds(near, [b"x"], [memory.fd])
        _, [fd] = wire.receive_with_fds(far, 8)
        assert not os.get_inheritable(fd)
        os.close(fd)
        memory.close()


def test_memory_of_others_is_not_in_forked_children() -> None:
    memory = Region.anonymous(4096, "forked-test")
    received = Region.received(os.dup(memory.fd), 4096)
    own = Path("/proc/self/maps").read_text().count("forked-test")
    code = os.fork()
    if not code:
        count = Path("/proc/self/maps").read_text().count("forked-test")
        os._exit(count)
    _, status = os.waitpid(code, 0)
    assert (own, os.waitstatus_to_exitcode(status)) == (2, 1)
    received.close()
    memory.close()


def test_pool_file_of_a_node_that_was_killed_while_it_wrote_has_whole_chunks_only(
    tmp_path: Path, workers: list[Worker]
) -> None:
    num_blocks = links.NUM_SLOTS // 2
    node = links.Node(SLOT_BYTES, f"pool={tmp_path / 'pool'}")
    try:
        worker = Worker(node, [SLOT_BYTES], 1)
        workers.append(worker)
        blocks = list(range(num_blocks))
        for first in (0, num_blocks):
            chunks = [first + each for each in blocks]
            assert failures(worker.run(worker.job(Direction.STORE, chunks, blocks))) == []
        # It ends in order, with all chunks sealed.
        node.process.communicate(timeout=LONG_S)
        node.options = (*node.options, "endless")
        node.start()
        writer = Worker(node, [SLOT_BYTES], 1, settings=links.PATIENT)
        workers.append(writer)
        # The pool is full: this one takes another one's slot.
        writer.link.submit(writer.job(Direction.STORE, [links.NUM_SLOTS], [num_blocks]))
        assert node.process.stdout is not None
        assert node.process.stdout.readline() == "copying\n"
        node.end()
        node.options = node.options[:1]
        node.start()
        reader = Worker(node, [SLOT_BYTES], 1)
        workers.append(reader)
        expected = [reader.block(each) for each in blocks]
        missing = []
        for chunk in range(links.NUM_SLOTS + 1):
            refused = failures(reader.run(reader.job(Direction.LOAD, [chunk], [num_blocks])))
            if refused:
                missing.append((chunk, refused))
            else:
                assert reader.block(num_blocks) == expected[chunk % num_blocks], chunk
        evicted = [each for each in missing if each[0] != links.NUM_SLOTS]
        assert len(evicted) == 1
        assert (links.NUM_SLOTS, [Refusal.NOT_HERE]) in missing
        assert evicted[0][1] == [Refusal.NOT_HERE]
    finally:
        node.end()


# The watch


@dataclass
class Caller:
    """A process that has connected to a socket, and forked a child that keeps it open."""

    process: subprocess.Popen[str]
    sock: socket.socket


CALL = """
import os, signal, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
if os.fork():
    print("there", flush=True)
else:
    signal.alarm(60)
signal.pause()
"""


@pytest.fixture
def caller() -> Iterator[Caller]:
    name = f"raykv-test/{os.getpid()}/caller"
    with wire.listen(name) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", CALL, name],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        sock, _ = listener.accept()
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield Caller(process, sock)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LONG_S)
        process.stdout.close()
        sock.close()


@pytest.fixture
def deaths() -> Iterator[DeathWatch]:
    made = DeathWatch()
    thread = made.start()
    yield made
    made.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()


def refuse_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux before 6.5."""
    monkeypatch.setattr(raykv.cluster.deaths, "SO_PEERPIDFD", 9999)


@pytest.mark.parametrize("is_old", [False, True])
def test_watch_ends_the_connection_of_a_killed_process(
    caller: Caller, deaths: DeathWatch, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    if is_old:
        refuse_peer_pidfd(monkeypatch)
    watch = deaths.watch(caller.sock)
    caller.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        caller.sock.recv(1)
    assert not watch.has_died
    caller.process.kill()
    caller.sock.settimeout(LONG_S)
    assert caller.sock.recv(1) == b""
    assert watch.has_died
    num_fds = count_fds(os.getpid())
    deaths.unwatch(watch)
    deaths.unwatch(watch)
    assert count_fds(os.getpid()) == num_fds - 1


def test_process_that_has_ended_before_it_is_watched_is_noticed(
    caller: Caller, deaths: DeathWatch
) -> None:
    caller.process.kill()
    caller.process.wait(LONG_S)
    try:
        watch = deaths.watch(caller.sock)
    except AttachError:
        # Kernels before 6.16 can't name it any more.
        return
    caller.sock.settimeout(LONG_S)
    assert caller.sock.recv(1) == b""
    deaths.unwatch(watch)


def test_without_pidfds_the_socket_has_to_do_and_that_is_said_once(
    caller: Caller,
    deaths: DeathWatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    refuse_peer_pidfd(monkeypatch)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with caplog.at_level(logging.WARNING, "raykv.node"):
        watches = [deaths.watch(caller.sock) for _ in range(2)]
    assert [watch.pidfd for watch in watches] == [None, None]
    assert caplog.text.count("can't be watched (Operation not permitted)") == 1
    for watch in watches:
        deaths.unwatch(watch)
