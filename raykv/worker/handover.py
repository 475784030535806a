"""How a worker's KV cache reaches the NodeActor: mapped there where it can be, else staged.

    kv_handover   KV in CPU memory     on a GPU that can share it     elsewhere
    auto          memfd                CUDA IPC                       staged
    ipc           memfd                CUDA IPC                       the start is refused
    staged        staged               staged                         staged

What can be shared shows twice: here, when the memory is exported, and at the NodeActor, which may
see no such GPU. In the second case an engine with `auto` goes on staged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from raykv.base import errors, guard
from raykv.base.ids import Refusal
from raykv.memory.cuda import driver, kv
from raykv.protocol.worker import KVLayout, TensorLayout, not_done
from raykv.worker import job
from raykv.worker.link import LinkSettings, WorkerLink

logger = logging.getLogger("raykv")


def may_sleep(model_config: Any) -> bool:
    """Whether vLLM's own allocator, which can give memory back for a while, has the KV cache."""
    # The second name is that of the allocator alone; not every version of vLLM has it.
    return bool(
        model_config.enable_sleep_mode or getattr(model_config, "enable_cumem_allocator", False)
    )


def current_stream() -> int:
    """The stream that torch computes on now, in the calling thread."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


class DeviceLink(WorkerLink):
    """A line for a KV cache whose bytes come later than its jobs.

    Methods run on the worker's main thread.
    """

    def __init__(
        self,
        rank: int,
        exported: kv.ExportedKV,
        settings: LinkSettings,
        stream: Callable[[], int] = current_stream,
        make_staged: Callable[[str], WorkerLink] | None = None,
    ) -> None:
        """`make_staged` makes the line that takes over if the NodeActor can't map the memory; it
        gets the reason. None: no line does.
        """
        super().__init__(rank, exported.layout, [], settings)
        self._exported = exported
        self._stream = stream
        self._make_staged = make_staged

    def submit(self, *requests: job.JobRequest) -> None:
        """See `WorkerLink.submit`. The copies wait for all that was queued for the GPU before."""
        try:
            self._exported.record(self._stream())
        except Exception:
            # Without their event copies would run ahead of what they depend on.
            guard.report("DeviceLink.submit")
            with self._lock:
                self._results.extend(
                    not_done(each.job_id, each.num_chunks, Refusal.COPY_FAILED) for each in requests
                )
            return
        super().submit(*requests)

    def following(self) -> WorkerLink:
        """See `WorkerLink.following`. Whatever was submitted ends where it was."""
        if self._make_staged is None or not self.unsuited or not self.is_idle:
            return self
        try:
            staged = self._make_staged(self.unsuited)
        except Exception:
            guard.report("DeviceLink.following")
            self._make_staged = None
            return self
        self.close(0.0)
        return staged


def device_link(
    spec: Any,
    kv_caches: Any,
    load: Callable[[], driver.MemoryDriver],
    make_staged: Callable[[str], WorkerLink] | None,
) -> tuple[DeviceLink, KVLayout]:
    """The NodeActor maps the GPU memory of vLLM's `CanonicalKVCaches`; see `DeviceLink`.

    Raises:
        HandleError: that can't be; the text says why, and what to change.
    """
    if spec.sleeps:
        # While an engine sleeps its KV cache's memory is given back; then it gets another one.
        raise errors.HandleError(
            "enable_sleep_mode gives the KV cache other memory each time the engine wakes up: "
            "leave it out if the engine never sleeps, since staging costs a copy more"
        )
    tensors = [entry.tensor for entry in kv_caches.tensors]
    kinds = {tensor.device.type for tensor in tensors}
    if kinds != {"cuda"}:
        raise errors.HandleError(f"no other process can map memory of {', '.join(sorted(kinds))}")
    groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
    where = [
        TensorLayout(tensor.data_ptr(), tensor.shape[0], tensor.stride(0), tensor.shape[1])
        for tensor in tensors
    ]
    pages = spec.canonical_pages(kv_caches)
    try:
        exported = kv.export_kv(load(), where, spec.blocks_per_chunk, spec.group_ids, groups, pages)
    except driver.CUDAError as error:
        raise errors.HandleError(f"its GPU memory can't be shared: {error}") from error
    logger.info(
        "the NodeActor maps the KV cache on GPU %s (%s)",
        exported.layout.device,
        exported.layout.kind,
    )
    settings = spec.link_settings()
    link = DeviceLink(spec.part, exported, settings, make_staged=make_staged)
    return link, exported.layout


def make_link(
    spec: Any, kv_caches: Any, load: Callable[[], driver.MemoryDriver] = driver.load
) -> tuple[Any, KVLayout]:
    """The line of a worker whose KV cache is in no shared memory of the host.

    Raises:
        SettingError: it must not be staged, and can't be mapped; or the staging memory is too
            small.
    """
    setting = spec.settings.kv_handover
    if setting == "staged":
        return spec.staged_link(kv_caches, "kv_handover=staged")
    if setting == "ipc":
        try:
            return device_link(spec, kv_caches, load, None)
        except errors.HandleError as error:
            raise errors.SettingError(f"kv_handover=ipc can't be had: {error}") from error
    try:
        return device_link(
            spec, kv_caches, load, lambda reason: spec.staged_link(kv_caches, reason)[0]
        )
    except errors.HandleError as error:
        return spec.staged_link(kv_caches, str(error))
