"""Engines for benchmarks: a Ray cluster on this host, models, and engines of several kinds."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

from raykv.cluster.join import resolve_node_id
from raykv.lab.bench.engine import EngineProcess, own_cluster, settle, wait_for_pools
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.lab.hosts.local_nodes import local_node
from raykv.serve.models import smollm2

Entered = TypeVar("Entered")

BLOCK = 128
"""Tokens in a block, and in a chunk."""

RECOMPUTE, PREFIX_HIT, RAYKV, REMOTE = (
    "recompute",
    "vLLM's own prefix hit",
    "RayKV, same node",
    "RayKV, other node",
)


class Bed:
    """Cluster, model and engines of a benchmark; all of them end with the context.

    Args:
        quick: a tiny random model instead of the real one.
        max_tokens: longest context.
        pool_bytes: of each pool.
    """

    def __init__(self, *, quick: bool, max_tokens: int, pool_bytes: int) -> None:
        self._quick = quick
        self.max_tokens = max_tokens
        self.pool_bytes = pool_bytes
        self._numbers = itertools.count()

    def __enter__(self) -> Bed:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-bench-"))
            self._folder = Path(folder)
            if self._quick:
                most_tokens = self.max_tokens + BLOCK
                self.model = tiny_llama(self._folder / "model", max_position=most_tokens)
            else:
                self.model = smollm2()
            self.cluster = stack.enter_context(own_cluster())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plain(self, **config: Any) -> EngineProcess:
        """vLLM without a connector."""
        return self._start(raykv=None, **config)

    def raykv(self, node_id: str = "", **config: Any) -> EngineProcess:
        """An engine with RayKV."""
        settings = {
            "ray_address": self.cluster.address,
            "node_id": node_id or resolve_node_id(""),
            "pool_bytes": str(self.pool_bytes),
            **config.pop("settings", {}),
        }
        return self._start(raykv=settings, **config)

    def raykv_elsewhere(self, **config: Any) -> EngineProcess:
        """Start an engine with RayKV on another Ray node of this host; it always fetches."""
        return self.raykv(self.second_node(), settings={"always_fetch": True}, **config)

    def with_it(self, context: AbstractContextManager[Entered]) -> Entered:
        """Begin something else that ends with the rest."""
        return self._stack.enter_context(context)

    def second_node(self) -> str:
        """One more Ray node on this host; its id."""
        return self.with_it(local_node(self.cluster.address))

    def _start(self, **config: Any) -> EngineProcess:
        number = next(self._numbers)
        options = {"max_model_len": self.max_tokens, "block_size": BLOCK, **config}
        engine = EngineProcess(self.model, self._folder / f"{number}.log", **options)
        self._stack.callback(engine.stop)
        return engine

    def wait_for_pools(self) -> None:
        """Wait until the pools' pages are there, or a deadline."""
        wait_for_pools(self.cluster)

    def settle(self) -> None:
        """Wait until RayKV's stores stand still and are known, or a deadline."""
        settle(self.cluster)
