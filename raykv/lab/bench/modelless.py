"""An engine without a model: RayKV's part in EngineCore, and a worker that stores."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from raykv.base.errors import ClusterError
from raykv.base.ids import Direction, Key
from raykv.base.settings import Settings
from raykv.cluster import names
from raykv.engine.runtime import EngineRuntime, new_life
from raykv.engine.view import EngineView
from raykv.lab.bench.named_jobs import named_job
from raykv.lab.waiting import DEADLINE_S, wait
from raykv.memory.region import Region
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import NOTHING_ORDERED, EngineHello
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink


class ModellessEngine:
    """RayKV in EngineCore, called by a benchmark instead of vLLM's scheduler.

    Args:
        address: of the Ray cluster.
        node_id: where the engine is.
        namespace: of its chunks.
        chunk_bytes: of each chunk, which has one block.
        pool_bytes: of the pool, if the node has none yet.
    """

    def __init__(
        self, address: str, node_id: str, namespace: str, chunk_bytes: int, pool_bytes: int
    ) -> None:
        self._life = new_life()
        self._namespace, self._sizes = namespace, {0: chunk_bytes}
        self._name = f"engine-{self._life:x}"
        hello = EngineHello(self._name, self._life, namespace, slot_bytes=self._sizes)
        self.view = EngineView(Settings(request_deadline_s=5 * DEADLINE_S))
        settings = Settings(ray_address=address, node_id=node_id, pool_bytes=pool_bytes)
        self.runtime = EngineRuntime(settings, self.view, hello)
        self.runtime.start()
        self._address, self._node_id = address, node_id
        self.numbers = itertools.count(1)
        self._link: WorkerLink | None = None

    def with_worker(self) -> ModellessEngine:
        """Add a worker with one block, whose bytes are all 7."""
        (chunk_bytes,) = self._sizes.values()
        self._memory = Region.anonymous(chunk_bytes, "raykv-bench")
        ctypes.memset(self._memory.address, 7, chunk_bytes)
        tensor = TensorLayout(0, 1, chunk_bytes, chunk_bytes)
        layout = KVLayout("memfd", chunk_bytes, 1, [tensor], [0], [[0]])
        settings = LinkSettings(step_deadline_s=DEADLINE_S)
        link = self._link = WorkerLink(0, layout, [self._memory.fd], settings)
        socket = names.node_socket(self._address, self._node_id)
        link.set_target(LinkTarget(socket, self._name, self._life, self._namespace, 1, self._sizes))
        wait(lambda: link.node_life != 0, "the NodeActor takes the worker")

        def has_orders() -> bool:
            self.runtime.session.drain()
            return self.view.orders != NOTHING_ORDERED

        wait(has_orders, "the NodeActor has orders")
        return self

    def submit(self, keys: Sequence[Key]) -> None:
        """Begin to store chunks."""
        assert self._link is not None
        self.runtime.session.drain()
        job = named_job(
            next(self.numbers),
            Direction.STORE,
            keys,
            [0] * len(keys),
            namespace=self._namespace,
            orders=self.view.orders,
        )
        self._link.submit(JobRequest(job))

    def ended(self) -> list[CopyResult]:
        """Return the stores that have ended since the last call.

        Raises:
            ClusterError: one was refused.
        """
        assert self._link is not None
        results = self._link.drain()
        for result in results:
            if any(result.refusals):
                raise ClusterError(f"a store was refused: {set(result.refusals)}")
        return results

    def store(self, keys: Sequence[Key]) -> None:
        """Store chunks, and wait for their end."""
        self.submit(keys)
        wait(lambda: bool(self.ended()), "the chunks are stored")

    def stop(self) -> None:
        """Leave the cluster."""
        if self._link is not None:
            self._link.close(5.0)
        self.runtime.stop()
