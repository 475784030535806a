"""`fetch`: from node to node, compared with one bare Ray object pull of the same size.

Two Ray nodes on this host, each on a core of its own where there are two. A fetch is what an
engine's NodeActor does: chunks are read out of the source's pool in pieces, checked, and land in
the other pool. The bare pull moves one object between the nodes' object stores and no further. Both
are timed by the caller. Where NIXL is installed, two more nodes use it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.base.errors import ClusterError
from raykv.base.ids import ALL_BLOCKS
from raykv.base.settings import NodeOptions
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as clusters
from raykv.directory.actor import scheduler_actor
from raykv.lab.bench.engine import own_cluster
from raykv.lab.bench.modelless import ModellessEngine
from raykv.lab.bench.named_jobs import SPACE, key_of
from raykv.lab.bench.report import Options, Result, alternate
from raykv.lab.hosts.local_nodes import local_node
from raykv.lab.waiting import DEADLINE_S, wait
from raykv.node.launch import node_actor
from raykv.protocol.columns import Keys, Numbers, Source, SourceRows
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.engine import NOTHING_ORDERED
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import NodeStats
from raykv.protocol.operator import DropOrder

CHUNK_BYTES = 2 << 20
SIZES = (2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20)
OBJECT_STORE_BYTES = 2 << 30
SLAB_BYTES = 64 << 20

RAYKV, NIXL, PULL = "RayKV fetch", "RayKV fetch, NIXL", "bare Ray pull"
LEAST_SHARE = 0.9


def run(options: Options) -> Result:
    """See the module's docstring."""
    sizes = SIZES[:2] if options.quick else SIZES
    result = Result("fetch")
    with ExitStack() as stack:
        pair = Pair(stack, max(sizes))
        for size in sizes:
            case, subjects = f"{size >> 20} MiB", {RAYKV: pair.fetch, PULL: pair.pull}
            result.rows += alternate(case, "GB/s", rates(subjects, size), options.repeats_or(7))
            share = result.ratio(case, RAYKV, PULL)
            result.at_least(LEAST_SHARE, share, f"{case}: at least 90 % of the bare pull")
    if find_spec("nixl") is not None:
        os.environ.setdefault("UCX_TLS", "tcp")
        with ExitStack() as stack:
            pair = Pair(stack, max(sizes), transport="nixl")
            pair.wait_for_nixl()
            for size in sizes:
                case, moves = f"{size >> 20} MiB", rates({NIXL: pair.fetch}, size)
                result.rows += alternate(case, "GB/s", moves, options.repeats_or(7))
        result.notes.append(f"NIXL had UCX_TLS={os.environ['UCX_TLS']}.")
    result.notes.append("Both nodes are on this host, and share its memory.")
    return result


def rates(moves: Mapping[str, Callable[[int], float]], size: int) -> dict[str, Callable[[], float]]:
    """Turn functions that return the seconds of a move into ones that return its GB/s."""

    def rate(move: Callable[[int], float]) -> float:
        return size / move(size) / 1e9

    return {name: partial(rate, move) for name, move in moves.items()}


class BenchPeer:
    """One end of the bare pull, on a node."""

    def __init__(self, most_bytes: int) -> None:
        self._bytes = np.ones(most_bytes, dtype=np.uint8)

    def pid(self) -> int:
        return os.getpid()

    def make(self, size: int) -> Any:
        """Make an object in this node's store."""
        return self._bytes[:size].copy()

    def pull(self, refs: list[Any]) -> int:
        """Pull another node's object."""
        return int(ray.get(refs[0], timeout=DEADLINE_S)[-1])


class Pair:
    """Two nodes with a NodeActor and a peer each; the first one's pool is full of chunks."""

    def __init__(self, stack: ExitStack, most_bytes: int, transport: str = "ray") -> None:
        cluster = stack.enter_context(own_cluster())
        self._address = address = cluster.address
        scheduler_actor(address)
        there = local_node(address, object_store_bytes=OBJECT_STORE_BYTES)
        self._nodes = [clusters.resolve_node_id(""), stack.enter_context(there)]
        self._pool_bytes = -(-most_bytes // SLAB_BYTES) * SLAB_BYTES
        self._most_bytes = most_bytes
        extra = NodeOptions(transport=transport)
        self.actors = [
            node_actor(address, node_id, self._pool_bytes, SLAB_BYTES, "", extra)
            for node_id in self._nodes
        ]
        self.node_pids = [ask.describe(actor, DEADLINE_S).pid for actor in self.actors]
        self._peers = [_peer(node_id, most_bytes) for node_id in self._nodes]
        self._pin(ray.get([peer.pid.remote() for peer in self._peers], timeout=DEADLINE_S))
        self._numbers = itertools.count(1)
        wait(lambda: _are_ready(cluster), "both pools are ready", 0.01)
        self.fill()

    def _pin(self, peers: list[int]) -> None:
        """Give each node a core of its own, with its raylet, which is the parent of its actors."""
        cores = sorted(os.sched_getaffinity(0))
        for node, peer, core in zip(self.node_pids, peers, cores[:2], strict=False):
            for pid in (node, psutil.Process(node).ppid(), peer) if len(cores) > 1 else ():
                _pin(pid, core)

    def fill(self) -> None:
        """Fill the first pool with chunks, as an engine does."""
        engine = ModellessEngine(
            self._address, self._nodes[0], SPACE, CHUNK_BYTES, self._pool_bytes
        ).with_worker()
        engine.store([key_of(number) for number in range(self._most_bytes // CHUNK_BYTES)])
        engine.stop()

    def stats(self) -> NodeStats:
        """Ask the second NodeActor for its counts."""
        return ask.describe(self.actors[1], DEADLINE_S).stats

    def wait_for_nixl(self) -> None:
        """Fetch until bytes come through NIXL."""

        def is_used() -> bool:
            self.fetch(CHUNK_BYTES)
            return self.stats().bytes_nixl > 0

        wait(is_used, "both NodeActors load NIXL", 0.01)

    def fetch(self, size: int) -> float:
        """Return the seconds of a fetch of this size in all.

        The second pool has none of the chunks before.
        """
        self.drop(size)
        began = time.perf_counter()
        result = self.order(size, DEADLINE_S)
        took_s = time.perf_counter() - began
        if result.refusals:
            raise ClusterError(f"a fetch was refused: {set(result.refusals)}")
        return took_s

    def drop(self, size: int) -> None:
        """Drop chunks of this size in all from the second pool."""
        keys = keys_of(size)
        first, count = (Numbers.of([number] * len(keys)) for number in ALL_BLOCKS)
        order = DropOrder(SPACE, keys, first, count)
        ray.get(self.actors[1].ask.remote("drop", encode(order)), timeout=DEADLINE_S)

    def order(self, size: int, deadline_s: float) -> CopyResult:
        """Fetch chunks of this size in all, and return the result."""
        count = size // CHUNK_BYTES
        order = Fetch(
            next(self._numbers),
            0,
            SPACE,
            keys_of(size),
            Numbers.of([CHUNK_BYTES] * count),
            SourceRows.of([[Source(self._nodes[0])]] * count),
            deadline_s=deadline_s,
        )
        raw = ray.get(self.actors[1].fetch.remote(encode(order)), timeout=DEADLINE_S)
        return decode(raw, CopyResult)

    def pull(self, size: int) -> float:
        """Return the seconds until an object of the first node is in the second one's store."""
        ref = self._peers[0].make.remote(size)
        ray.wait([ref], timeout=DEADLINE_S, fetch_local=False)
        began = time.perf_counter()
        ray.get(self._peers[1].pull.remote([ref]), timeout=DEADLINE_S)
        return time.perf_counter() - began


def _are_ready(cluster: Cluster) -> bool:
    """Whether all pages of both pools are ready, and both know the orders that stores name."""
    known = cluster.status()
    return known.orders != NOTHING_ORDERED and all(
        node.prefaulted_bytes >= node.pool_bytes and node.orders == known.orders
        for node in known.nodes
    )


def _pin(pid: int, core: int) -> None:
    """Move all threads of a process to a core; later threads inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def _peer(node_id: str, most_bytes: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {"env_vars": {"RAY_worker_niceness": "0"}}
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "runtime_env": environment}
    return ray.remote(BenchPeer).options(**options).remote(most_bytes)


def keys_of(size: int) -> Keys:
    """Return the keys of chunks of this size in all."""
    return Keys.of(key_of(number) for number in range(size // CHUNK_BYTES))
