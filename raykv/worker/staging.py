"""KV caches that no other process can map, such as a GPU's, copied through shared host memory.

    store: KV blocks ──torch──► staging blocks ──NodeActor──► pool
    load:  pool ──NodeActor──► staging blocks ──torch──► KV blocks

The slow way, and the one that works on every device: the copies to and from the device run on the
worker's main thread, in the order of the current stream, so that a store reads what was computed
before it. The blocks of a store can be reused as soon as `submit` returns. A load that is larger
than the staging memory is made in parts.

All methods run on the worker's main thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raykv.base.deadlines import STAGED_LOOK_S
from raykv.base.errors import SettingError
from raykv.base.guard import report
from raykv.base.ids import Direction, Refusal
from raykv.memory.handles import MEMFD
from raykv.memory.region import Region
from raykv.protocol.columns import Handles
from raykv.protocol.worker import (
    NOT_CANONICAL,
    CanonicalPages,
    JobResult,
    KVForm,
    KVLayout,
    TensorLayout,
)
from raykv.worker.front import ALL_LAYERS, FrontLink
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, WorkerLink


class StagingMemory:
    """Shared host memory with room for some of vLLM's blocks, laid out layer by layer."""

    def __init__(
        self,
        kv_caches: Any,
        group_ids: list[int],
        blocks_per_chunk: int,
        staging_bytes: int,
        form: KVForm | None = None,
        canonical: CanonicalPages = NOT_CANONICAL,
    ) -> None:
        """Make room for as many blocks as fit.

        Args:
            kv_caches: vLLM's `CanonicalKVCaches`.
            group_ids: KV group index of each entry of `kv_caches.group_data_refs`.
            blocks_per_chunk: vLLM's blocks in a chunk.
            staging_bytes: size of the memory.
            form, canonical: as in `KVLayout`.

        Raises:
            SettingError: not even one chunk fits.
        """
        self._tensors: list[torch.Tensor] = [entry.tensor for entry in kv_caches.tensors]
        pages = [int(tensor.shape[1]) for tensor in self._tensors]
        self.num_blocks = staging_bytes // sum(pages)
        if self.num_blocks < blocks_per_chunk:
            raise SettingError(
                f"staging_bytes={staging_bytes} is less than one chunk of this model: set it to at "
                f"least {blocks_per_chunk * sum(pages)}"
            )
        self.region = Region.anonymous(self.num_blocks * sum(pages), "staging")
        whole = torch.frombuffer(self.region.array(), dtype=torch.int8)
        self._views: list[torch.Tensor] = []
        layouts = []
        offset = 0
        for page in pages:
            size = self.num_blocks * page
            self._views.append(whole[offset : offset + size].view(self.num_blocks, page))
            layouts.append(TensorLayout(offset, self.num_blocks, page, page))
            offset += size
        groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._groups = dict(zip(group_ids, groups, strict=True))
        self.layout = KVLayout(
            *(MEMFD, self.region.num_bytes, blocks_per_chunk, layouts, group_ids, groups),
            form=form or KVForm(),
            canonical=canonical,
        )
        self._free = list(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        """Staging blocks that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Some free staging blocks; there must be so many."""
        assert count <= len(self._free), (count, len(self._free))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """These staging blocks are free again."""
        self._free += blocks

    def gather(self, group_id: int, kv_blocks: list[int], staging_blocks: list[int]) -> None:
        """Copy KV blocks of a group to staging blocks; the bytes are there when it returns."""
        where = torch.tensor(staging_blocks)
        for index in self._groups[group_id]:
            tensor = self._tensors[index]
            chosen = torch.tensor(kv_blocks, device=tensor.device)
            self._views[index].index_copy_(0, where, tensor.index_select(0, chosen).cpu())

    def scatter(self, group_id: int, kv_blocks: list[int], staging_blocks: list[int]) -> None:
        """Copy staging blocks to KV blocks, ordered before what the device does next."""
        where = torch.tensor(staging_blocks)
        for index in self._groups[group_id]:
            tensor = self._tensors[index]
            chosen = torch.tensor(kv_blocks, device=tensor.device)
            tensor.index_copy_(
                0, chosen, self._views[index].index_select(0, where).to(tensor.device)
            )


@dataclass
class _Staged:
    """A job on its way: chunks before `next_chunk` were submitted, in parts by their own ids."""

    request: JobRequest
    deadline: float
    next_chunk: int = 0
    num_flying: int = 0
    num_bytes: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def num_chunks(self) -> int:
        return len(self.request.handles.keys)

    @property
    def is_done(self) -> bool:
        return self.num_flying == 0 and self.next_chunk == self.num_chunks

    def block_ids(self, first: int, last: int) -> list[int]:
        """KV blocks of the chunks [first, last)."""
        counts = self.request.num_blocks
        start = sum(counts[:first])
        return self.request.block_ids[start : start + sum(counts[first:last])]

    def fail(self, first: int, last: int, refusal: Refusal) -> None:
        for chunk in range(first, last):
            self.failed[chunk] = int(refusal)


@dataclass(frozen=True)
class _JobPart:
    """Chunks [first, last) of a job, and the staging blocks that they use."""

    job_id: int
    first: int
    last: int
    staging_blocks: list[int]


class StagedLink(FrontLink[WorkerLink]):
    """A line with staging memory in between."""

    def __init__(self, rank: int, memory: StagingMemory, settings: LinkSettings) -> None:
        super().__init__(WorkerLink(rank, memory.layout, [memory.region.fd], settings))
        self._memory = memory
        self._settings = settings
        self._jobs: dict[int, _Staged] = {}
        self._parts: dict[int, _JobPart] = {}
        self._waiting: deque[int] = deque()
        self._results: list[JobResult] = []
        self._num_parts = 0

    def submit(self, request: JobRequest) -> None:
        """See `WorkerLink.submit`. A store has left its blocks when this returns."""
        deadline = time.monotonic() + self._settings.load_deadline_s
        job = self._jobs[request.job_id] = _Staged(request, deadline)
        self._submit_more(job)
        if request.direction is Direction.STORE:
            # Nobody waits for a store: what finds no room now is not stored.
            job.fail(job.next_chunk, job.num_chunks, Refusal.QUEUE_FULL)
            job.next_chunk = job.num_chunks
            self._end_if_done(job)
        elif job.next_chunk < job.num_chunks:
            self._waiting.append(request.job_id)

    def drain(self) -> list[JobResult]:
        """See `WorkerLink.drain`. Moves loads on, so it is to be called in every step."""
        self._pump()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """See `WorkerLink.wait`. Stores have left their blocks already; loads are ended."""
        loads = [
            job_id
            for job_id in job_ids
            if job_id in self._jobs and self._jobs[job_id].request.direction is Direction.LOAD
        ]
        for job_id in loads:
            job = self._jobs[job_id]
            job.fail(job.next_chunk, job.num_chunks, Refusal.CANCELLED)
            job.next_chunk = job.num_chunks
        self._link.wait([n for n, part in self._parts.items() if part.job_id in loads])
        self._pump()

    def finish(self, job_ids: Collection[int]) -> None:
        self._link.finish([n for n, part in self._parts.items() if part.job_id in job_ids])
        self._pump()

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        """See `WorkerLink.wait_layers`. Here all layers come together."""
        while any(job_id in self._jobs for job_id in job_ids):
            parts = [n for n, part in self._parts.items() if part.job_id in job_ids]
            if not self._link.wait_layers(parts, ALL_LAYERS):
                return False
            if not parts:
                time.sleep(STAGED_LOOK_S)
            self._pump()
        return True

    def _pump(self) -> None:
        """Take in parts that have ended, and submit what has room now."""
        for result in self._link.drain():
            self._finish_part(self._parts.pop(result.job_id), result)
        now = time.monotonic()
        while self._waiting:
            job = self._jobs.get(self._waiting[0])
            if job is not None and now > job.deadline:
                job.fail(job.next_chunk, job.num_chunks, Refusal.CANCELLED)
                job.next_chunk = job.num_chunks
                self._end_if_done(job)
            if job is not None and job.next_chunk < job.num_chunks:
                self._submit_more(job)
                if job.next_chunk < job.num_chunks:
                    return
            self._waiting.popleft()

    def _submit_more(self, job: _Staged) -> None:
        """Submit as many of the job's next chunks as the staging memory has room for."""
        first = last = job.next_chunk
        room = self._memory.num_free
        while last < job.num_chunks and job.request.num_blocks[last] <= room:
            room -= job.request.num_blocks[last]
            last += 1
        if first == last:
            return
        request = job.request
        staging_blocks = self._memory.take(sum(request.num_blocks[first:last]))
        part = _JobPart(request.job_id, first, last, staging_blocks)
        job.next_chunk = last
        if request.direction is Direction.STORE and not self._copy(job, part, {}):
            self._memory.give_back(staging_blocks)
            return
        self._num_parts += 1
        self._parts[self._num_parts] = part
        job.num_flying += 1
        handles = request.handles
        self._link.submit(
            replace(
                request,
                job_id=self._num_parts,
                handles=Handles(
                    handles.keys[first:last],
                    handles.slots[first:last],
                    handles.generations[first:last],
                ),
                groups=request.groups[first:last],
                num_blocks=request.num_blocks[first:last],
                first_block=request.first_block[first:last],
                block_ids=staging_blocks,
            )
        )

    def _copy(self, job: _Staged, part: _JobPart, failed: dict[int, int]) -> bool:
        """Copy a part's blocks between KV cache and staging memory, one call per KV group.

        If the device refuses, the whole part has failed and the answer is False.
        """
        try:
            self._move(job, part, failed)
        except Exception:
            report("StagedLink.copy")
            job.fail(part.first, part.last, Refusal.COPY_FAILED)
            return False
        return True

    def _move(self, job: _Staged, part: _JobPart, failed: dict[int, int]) -> None:
        is_store = job.request.direction is Direction.STORE
        move = self._memory.gather if is_store else self._memory.scatter
        kv_blocks = job.block_ids(part.first, part.last)
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        start = 0
        for chunk in range(part.first, part.last):
            end = start + job.request.num_blocks[chunk]
            if chunk not in failed:
                kv, staging = by_group.setdefault(job.request.groups[chunk], ([], []))
                kv += kv_blocks[start:end]
                staging += part.staging_blocks[start:end]
            start = end
        for group_id, (kv, staging) in by_group.items():
            move(group_id, kv, staging)

    def _finish_part(self, part: _JobPart, result: JobResult) -> None:
        job = self._jobs[part.job_id]
        columns = zip(result.failed_chunks, result.refusals, strict=True)
        failed = {part.first + chunk: refusal for chunk, refusal in columns}
        job.failed |= failed
        job.num_bytes += result.num_bytes
        job.num_flying -= 1
        if job.request.direction is Direction.LOAD:
            self._copy(job, part, failed)
        self._memory.give_back(part.staging_blocks)
        self._end_if_done(job)

    def _end_if_done(self, job: _Staged) -> None:
        job_id = job.request.job_id
        if not job.is_done or job_id not in self._jobs:
            return
        del self._jobs[job_id]
        seconds = time.monotonic() - job.started_at
        failed = sorted(job.failed)
        refusals = [job.failed[chunk] for chunk in failed]
        self._results.append(JobResult(job_id, job.num_bytes, seconds, failed, refusals))
