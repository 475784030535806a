"""The fastest offloading that a single engine can have: all in its own process, for comparison.

vLLM's own `CPUOffloadingManager` decides, and the engine's own thread copies at once between vLLM's
KV cache and memory of the same process: a thread beside it would wait for Python's lock with every
page. No other process can use what it keeps, it dies with the engine, and steps wait for it.
vLLM's own worker for this can't run on CPUs. One block per chunk, one KV group.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class InProcessSpec(CPUOffloadingSpec):
    """vLLM's specification with another worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, self.blocks_per_chunk
        return InProcessWorker(kv_caches, self.num_chunks)


class InProcessWorker(OffloadingWorker):
    """Copies page by page, before a job's submission returns."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        tensors = [one.tensor for one in kv_caches.tensors]
        self._pages = [one.page_size_bytes for one in kv_caches.tensors]
        self._kv = [tensor.data_ptr() for tensor in tensors]
        self._strides = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
        self._keep = tensors
        self._chunk_bytes = sum(self._pages)
        # Touched at once: a page that is new costs more than the copy into it.
        self._memory = mmap.mmap(
            -1, num_chunks * self._chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        array = np.frombuffer(self._memory, dtype=np.uint8)
        array[:: mmap.PAGESIZE] = 0
        self._base = int(array.ctypes.data)
        self._array = array
        self._results: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **_later: Any
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_later: Any
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def _submit(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, is_store: bool
    ) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec), chunks
        began = time.monotonic()
        block_ids = blocks.block_ids.tolist()
        self._copy(block_ids, chunks.chunk_ids.tolist(), is_store=is_store)
        took_s = time.monotonic() - began
        size = len(block_ids) * self._chunk_bytes
        self._results.append(TransferResult(job_id, True, size, took_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """See `OffloadingWorker.wait`: every job has ended."""

    def _copy(self, blocks: list[int], chunks: list[int], *, is_store: bool) -> None:
        move = ctypes.memmove
        offset = self._base
        for kv, stride, page in zip(self._kv, self._strides, self._pages, strict=True):
            for block, chunk in zip(blocks, chunks, strict=True):
                there, here = kv + block * stride, offset + chunk * self._chunk_bytes
                if is_store:
                    move(here, there, page)
                else:
                    move(there, here, page)
            offset += page
