"""`fetch`: node to node, beside one bare Ray object pull and a plain TCP copy of the same size.

Two Ray nodes, each on a core of its own where there are two: in networks of their own, with a
router between them, where hosts can be made (see `raykv.lab.hosts`), else on loopback. A fetch is
what an engine's NodeActor does: chunks are read out of the source's pool in pieces, checked, and
land in the other pool. The bare pull moves one object between the nodes' object
stores and no further. All are timed by the caller; the CPU seconds are those of all processes that
take part: both raylets, both NodeActors, both peers, and the caller. Those of the bare pull are
with the copy into the first object store, its time is not. Where NIXL is installed, two more nodes
use it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.base.errors import ClusterError
from raykv.base.ids import ALL_BLOCKS
from raykv.base.settings import NodeOptions
from raykv.client.cluster import Cluster, connect
from raykv.cluster import ask
from raykv.cluster import join as clusters
from raykv.cluster.join import LOOPBACK
from raykv.directory.actor import scheduler_actor
from raykv.lab.bench.modelless import DEADLINE_S, ModellessEngine, wait
from raykv.lab.bench.named_jobs import SPACE, key_of
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict, alternate
from raykv.lab.hosts.local_nodes import add_local_node
from raykv.lab.hosts.network import Host, networked, objection
from raykv.node.launch import node_actor
from raykv.protocol.columns import Keys, Numbers, Source
from raykv.protocol.copies import CopyResult, Fetch, Read
from raykv.protocol.engine import NOTHING_ORDERED
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeStats
from raykv.protocol.operator import DropOrder

CHUNK_BYTES = 2 << 20
SIZES = (2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20)
OBJECT_STORE_BYTES = 2 << 30
SLAB_BYTES = 64 << 20
CHUNKS_A_READ = 64
CLONE_NEWNET = 0x40000000
"""`sched.h`."""

RAYKV = "RayKV fetch"
PULL, TCP, NIXL = "bare Ray pull", "plain TCP", "RayKV fetch, NIXL"
LEAST_SHARE = 0.9
MOST_CPU_S = 1.2
"""Of a fetch, for each GiB."""
WARM_UPS = 1


def run(options: Options) -> Result:
    """See the module's docstring."""
    sizes = SIZES[:2] if options.quick else SIZES
    result = Result("fetch", BENCHMARKS["fetch"].summary)
    with ExitStack() as stack:
        pair = Pair(stack, max(sizes), networks=_networks(stack))
        for size in sizes:
            _compare(result, pair, size, options.repeats_or(7))
    if find_spec("nixl") is not None:
        os.environ.setdefault("UCX_TLS", "tcp")
        with ExitStack() as stack:
            pair = Pair(stack, max(sizes), transport="nixl", networks=_networks(stack))
            pair.wait_for_nixl()
            for size in sizes:
                moves = {NIXL: pair.fetch, TCP: pair.send}
                _measure(result, pair, size, options.repeats_or(7), moves, f"{NIXL} ")
        result.notes.append(f"NIXL had UCX_TLS={os.environ['UCX_TLS']}.")
    why = objection()
    where = f"on loopback, since {why}" if why else "in a network of its own, over a router"
    result.notes.append(f"Each node is {where}; they share this machine's memory.")
    return result


def _networks(stack: ExitStack) -> Sequence[Host]:
    """Of two hosts, where they can be made; this thread, and what it begins, is in the first's."""
    if objection():
        return []
    network = stack.enter_context(networked())
    hosts = [network.host(name) for name in ("a", "b")]
    stack.enter_context(_within_network(hosts[0].spaces.pid))
    return hosts


@contextmanager
def _within_network(pid: int) -> Iterator[None]:
    """Be in the network of another process, with this thread alone."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(network: int) -> None:
        if libc.setns(network, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no other network can be entered")

    ours, theirs = Path("/proc/thread-self/ns/net"), Path(f"/proc/{pid}/ns/net")
    with ours.open("rb") as own, theirs.open("rb") as other:
        enter(other.fileno())
        try:
            yield
        finally:
            enter(own.fileno())


def _compare(result: Result, pair: Pair, size: int, repeats: int) -> None:
    case = f"{size >> 20} MiB"
    moves = {
        RAYKV: pair.fetch,
        PULL: pair.pull,
        TCP: pair.send,
    }
    costs = _measure(result, pair, size, repeats, moves, "")
    share = result.row(case, RAYKV).ratio_to(result.row(case, PULL))
    budget = f"{case}: at least 90 % of the bare pull"
    result.verdicts.append(Verdict(budget, share, LEAST_SHARE, is_most=False))
    budget = f"{case}: at most {MOST_CPU_S} CPU seconds for each GiB"
    result.verdicts.append(Verdict(budget, result.row(costs, RAYKV).median, MOST_CPU_S))


def _measure(
    result: Result,
    pair: Pair,
    size: int,
    repeats: int,
    moves: Mapping[str, Callable[[int], float]],
    prefix: str,
) -> str:
    """Add rows of what each move reaches and costs; returns the case of the costs."""
    case = f"{prefix}{size >> 20} MiB"
    cpu_s: dict[str, list[float]] = {}

    def rated(name: str, move: Callable[[int], float]) -> Callable[[], float]:
        spent = cpu_s.setdefault(name, [])

        def measure() -> float:
            before = pair.cpu_s()
            took_s = move(size)
            spent.append((pair.cpu_s() - before) * (1 << 30) / size)
            return size / took_s / 1e9

        return measure

    subjects = {name: rated(name, move) for name, move in moves.items()}
    result.rows += alternate(case, "GB/s", subjects, repeats, WARM_UPS)
    costs = f"{case}, CPU"
    for name, spent in cpu_s.items():
        result.rows.append(Row(costs, name, "s/GiB", tuple(spent[WARM_UPS:])))
    return costs


class BenchPeer:
    """One end of the comparisons, on a node."""

    def __init__(self, most_bytes: int) -> None:
        self._bytes = np.ones(most_bytes, dtype=np.uint8)

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def make(self, size: int) -> Any:
        """An object in this node's store."""
        return self._bytes[:size].copy()

    def pull(self, refs: list[Any]) -> int:
        """Pull another node's object."""
        return int(ray.get(refs[0], timeout=DEADLINE_S)[-1])

    def listen(self) -> tuple[str, int]:
        """Address at which a client asks for a number of bytes and gets them."""
        server = socket.create_server((ray.util.get_node_ip_address(), 0))
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        host, port = server.getsockname()[:2]
        return str(host), int(port)

    def _serve(self, server: socket.socket) -> None:
        while True:
            line, _ = server.accept()
            with line:
                size = int.from_bytes(line.recv(8), "big")
                line.sendall(self._bytes.data[:size])

    def receive(self, address: tuple[str, int], size: int) -> int:
        """Get bytes from a listening peer."""
        with socket.create_connection(address, timeout=DEADLINE_S) as line:
            line.sendall(size.to_bytes(8, "big"))
            view = self._bytes.data[:size]
            done = 0
            while done < size:
                done += line.recv_into(view[done:])
        return done


class Pair:
    """Two nodes with a NodeActor and a peer each; the first one's pool is full of chunks.

    Args:
        networks: two hosts, whose networks the nodes are in; empty: both are in this process's.
    """

    def __init__(
        self,
        stack: ExitStack,
        most_bytes: int,
        transport: str = "ray",
        networks: Sequence[Host] = (),
    ) -> None:
        own_ip = networks[0].address if networks else LOOPBACK
        address = clusters.ensure_cluster("local", own_ip).address
        stack.callback(clusters.stop_started, address)
        cluster = stack.enter_context(connect(address))
        stack.callback(cluster.down)
        scheduler_actor(address)
        where: dict[str, Any] = {}
        if networks:
            inside = ["nsenter", f"--target={networks[1].spaces.pid}", "--net"]
            where = {"own_ip": networks[1].address, "inside": inside}
        other = add_local_node(address, OBJECT_STORE_BYTES, **where)
        stack.callback(other.stop)
        self._nodes = [clusters.resolve_node_id(""), other.node_id]
        pool_bytes = -(-most_bytes // SLAB_BYTES) * SLAB_BYTES
        extra = NodeOptions(transport=transport)
        self._actors = [
            node_actor(address, node_id, pool_bytes, SLAB_BYTES, "", extra)
            for node_id in self._nodes
        ]
        described = [ask.describe(actor, DEADLINE_S) for actor in self._actors]
        self.node_pids = [each.pid for each in described]
        self._peers = [_peer(node_id, most_bytes) for node_id in self._nodes]
        peers = ray.get([peer.pid.remote() for peer in self._peers], timeout=DEADLINE_S)
        # A raylet is the parent of its actors.
        of_nodes = [
            (pid, _parent(pid), peer) for pid, peer in zip(self.node_pids, peers, strict=True)
        ]
        cores = sorted(os.sched_getaffinity(0))
        for pids, core in zip(of_nodes, cores if len(cores) > 1 else [], strict=False):
            for pid in pids:
                _pin(pid, core)
        self._pids = [*itertools.chain(*of_nodes), os.getpid()]
        self._listener = ray.get(self._peers[0].listen.remote(), timeout=DEADLINE_S)
        self._numbers = itertools.count(1)
        wait(lambda: _are_ready(cluster), "both pools are ready", 0.01)
        self._address, self._pool_bytes, self._most_bytes = address, pool_bytes, most_bytes
        self.fill()
        stack.callback(ask.end_node_actor, other.node_id)

    def cpu_s(self) -> float:
        """CPU seconds so far of all processes that take part."""
        return sum(_cpu_s(pid) for pid in self._pids)

    def fill(self) -> None:
        """Fill the first pool with chunks, as an engine does."""
        engine = ModellessEngine(
            self._address, self._nodes[0], SPACE, CHUNK_BYTES, self._pool_bytes
        ).with_worker()
        engine.store([key_of(number) for number in range(self._most_bytes // CHUNK_BYTES)])
        engine.stop()

    def stats(self) -> NodeStats:
        """Of the second NodeActor."""
        return ask.describe(self._actors[1], DEADLINE_S).stats

    def fetched_bytes(self, size: int) -> Iterator[bytes]:
        """What the second pool has of the last fetch, in pieces."""
        keys = _keys(size)
        for first in range(0, len(keys), CHUNKS_A_READ):
            some = keys[first : first + CHUNKS_A_READ]
            sizes = Numbers.of([CHUNK_BYTES] * len(some))
            request = Read(PROTOCOL_VERSION, SPACE, some, sizes)
            raw = self._actors[1].read.remote(encode(request))
            yield ray.get(raw, timeout=DEADLINE_S)[1].tobytes()

    def wait_for_nixl(self) -> None:
        """Fetch until bytes come through NIXL."""

        def is_used() -> bool:
            self.fetch(CHUNK_BYTES)
            return self.stats().bytes_nixl > 0

        wait(is_used, "both NodeActors load NIXL", 0.01)

    def fetch(self, size: int) -> float:
        """Seconds until chunks of that size together are in the second pool, which has none of them
        before.
        """
        self.drop(size)
        began = time.perf_counter()
        result = self._order(size, DEADLINE_S)
        took_s = time.perf_counter() - began
        if result.refusals:
            raise ClusterError(f"a fetch was refused: {set(result.refusals)}")
        return took_s

    def drop(self, size: int) -> None:
        """Of chunks of that size together the second pool has none any more."""
        keys = _keys(size)
        first, count = (Numbers.of([number] * len(keys)) for number in ALL_BLOCKS)
        order = DropOrder(PROTOCOL_VERSION, SPACE, keys, first, count)
        ray.get(self._actors[1].ask.remote("drop", encode(order)), timeout=DEADLINE_S)

    def fetched(self, size: int, *, deadline_s: float = DEADLINE_S) -> CopyResult:
        """How a fetch of that size ends; the second pool has none of it before."""
        self.drop(size)
        return self._order(size, deadline_s)

    def _order(self, size: int, deadline_s: float) -> CopyResult:
        count = size // CHUNK_BYTES
        order = Fetch(
            PROTOCOL_VERSION,
            next(self._numbers),
            0,
            SPACE,
            _keys(size),
            Numbers.of([CHUNK_BYTES] * count),
            [Source(self._nodes[0])],
            Numbers.of(range(count)),
            Numbers.of([0] * count),
            deadline_s=deadline_s,
        )
        raw = ray.get(self._actors[1].fetch.remote(encode(order)), timeout=DEADLINE_S)
        return decode(raw, CopyResult)

    def pull(self, size: int) -> float:
        """Seconds until an object of the first node is in the second one's store."""
        ref = self._peers[0].make.remote(size)
        ray.wait([ref], timeout=DEADLINE_S, fetch_local=False)
        began = time.perf_counter()
        ray.get(self._peers[1].pull.remote([ref]), timeout=DEADLINE_S)
        return time.perf_counter() - began

    def send(self, size: int) -> float:
        """Seconds until bytes have come over a socket."""
        began = time.perf_counter()
        ray.get(self._peers[1].receive.remote(self._listener, size), timeout=DEADLINE_S)
        return time.perf_counter() - began


def _are_ready(cluster: Cluster) -> bool:
    """Whether both pools' pages are there, and both know which orders stores are to name."""
    known = cluster.status()
    return known.orders != NOTHING_ORDERED and all(
        node.prefaulted_bytes >= node.pool_bytes and node.orders == known.orders
        for node in known.nodes
    )


def _parent(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def _pin(pid: int, core: int) -> None:
    """Threads that it begins later are there too."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def _cpu_s(pid: int) -> float:
    """Of all threads that a process has had; to the nanosecond, unlike what `/proc` says of it."""
    # As clock_getcpuclockid(3) makes it on Linux.
    return time.clock_gettime(~pid << 3 | 2)


def _peer(node_id: str, most_bytes: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {"env_vars": {"RAY_worker_niceness": "0"}}
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "runtime_env": environment}
    return ray.remote(BenchPeer).options(**options).remote(most_bytes)


def _keys(size: int) -> Keys:
    """Of chunks of that size together."""
    return Keys.of(key_of(number) for number in range(size // CHUNK_BYTES))
