"""Pools and disks of the nodes, the links between them, and where the directory says chunks are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raykv.serve.router.directory import FoundPrompt
from tests.bench.simulation.chunk_cache import ChunkCache, Chunks, leading
from tests.bench.simulation.hardware import TOKENS, Hardware


@dataclass
class Wire:
    """Takes one transfer after the other. `free_at`: when it is done with all so far."""

    free_at: float = 0.0

    def after(self, now: float) -> float:
        """When a transfer can begin."""
        return max(now, self.free_at)


class SimNode:
    """One pool with one disk under it, and the node's links to others."""

    def __init__(self, name: str, num_chunks: int, hardware: Hardware) -> None:
        self.name = name
        self.pool = ChunkCache(num_chunks, hardware.pool_chunks)
        self.disk = ChunkCache(num_chunks, hardware.disk_chunks)
        self.incoming, self.outgoing, self.reading = Wire(), Wire(), Wire()

    def store(self, chunks: Chunks) -> None:
        """Put chunks into the pool, and on the disk behind it."""
        self.pool.put(chunks)
        self.disk.put(chunks)

    def prefix(self, chunks: Chunks) -> int:
        """How many of the first chunks are in the pool or on the disk."""
        return leading(self.pool.has(chunks) | self.disk.has(chunks))


@dataclass(frozen=True)
class Loaded:
    """Chunks that a replica gets from elsewhere, and when it has them."""

    number: int
    at: float


class NodeNet:
    """All nodes.

    Args:
        num_chunks: chunks have numbers below it.
        hardware: of all of them.
        ask_s: until an engine knows what other nodes have.
    """

    def __init__(self, num_chunks: int, hardware: Hardware, ask_s: float) -> None:
        self.num_chunks = num_chunks
        self._hardware = hardware
        self._ask_s = ask_s
        self.nodes: dict[str, SimNode] = {}

    def node(self, name: str) -> SimNode:
        """A node, made when it is named for the first time."""
        if name not in self.nodes:
            self.nodes[name] = SimNode(name, self.num_chunks, self._hardware)
        return self.nodes[name]

    def find(self, chunks: Chunks) -> FoundPrompt:
        """Answer as the directory does."""
        anywhere = np.zeros(len(chunks), np.bool_)
        on_nodes = {}
        for node in self.nodes.values():
            there = node.pool.has(chunks) | node.disk.has(chunks)
            anywhere |= there
            found = leading(there) * TOKENS
            if found:
                on_nodes[node.name] = found
        return FoundPrompt(on_nodes, leading(anywhere) * TOKENS)

    def load(self, name: str, gpu: Wire, chunks: Chunks, begin: int, now: float) -> Loaded:
        """Load the available chunks of a prompt behind the first `begin` ones.

        First what is on the node, then what one other node has of the rest, if it comes earlier
        than it would be computed.
        """
        node, hardware = self.nodes[name], self._hardware
        rest = chunks[begin:]
        here = node.prefix(rest)
        at = now
        if here:
            from_disk = here - int(np.count_nonzero(node.pool.has(rest[:here])))
            if from_disk:
                at = node.reading.after(now) + from_disk * hardware.disk_s
                node.reading.free_at = at
        fetched = self._fetch(node, rest[here:], begin + here, at)
        number = here + fetched.number
        if not number:
            return Loaded(0, now)
        node.store(rest[:number])
        gpu.free_at = gpu.after(fetched.at) + number * hardware.load_s
        return Loaded(number, gpu.free_at)

    def _fetch(self, node: SimNode, rest: Chunks, begin: int, now: float) -> Loaded:
        """Get chunks from the node that has most of them."""
        others = [each for each in self.nodes.values() if each is not node]
        if not len(rest) or not others:
            return Loaded(0, now)
        found, source = max(((each.prefix(rest), each) for each in others), key=lambda it: it[0])
        if not found:
            return Loaded(0, now)
        hardware = self._hardware
        from_disk = found - int(np.count_nonzero(source.pool.has(rest[:found])))
        began = max(node.incoming.after(now + self._ask_s), source.outgoing.after(now))
        read = source.reading.after(now) + from_disk * hardware.disk_s if from_disk else began
        ends = max(began + found * hardware.fetch_s, read)
        if ends - now > hardware.prefill_s(begin * TOKENS, found * TOKENS):
            return Loaded(0, now)
        if from_disk:
            source.reading.free_at = read
        node.incoming.free_at = source.outgoing.free_at = ends
        return Loaded(found, ends)
