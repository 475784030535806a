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
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from raykv.base import deadlines, errors, guard
from raykv.base.ids import Direction, Key, Refusal, group_of
from raykv.memory import handles, region
from raykv.protocol import copies, listing, worker
from raykv.protocol.columns import Numbers
from raykv.worker.job import JobRequest
from raykv.worker.link import ALL_LAYERS, LinkSettings, WorkerLink

FIRST_PART = 1 << 62
"""Parts of loads have numbers from here on; a store is one part, with its own number, under which
other ranks store theirs.
"""


class StagingMemory:
    """Shared host memory with room for some of vLLM's blocks, laid out layer by layer."""

    def __init__(
        self,
        kv_caches: Any,
        group_ids: list[int],
        blocks_per_chunk: int,
        staging_bytes: int,
        form: worker.KVForm | None = None,
        canonical: worker.CanonicalPages = worker.NOT_CANONICAL,
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
            raise errors.SettingError(
                f"staging_bytes={staging_bytes} is less than one chunk of this model: set it to at "
                f"least {blocks_per_chunk * sum(pages)}"
            )
        self.region = region.Region.anonymous(self.num_blocks * sum(pages), "staging")
        whole = torch.frombuffer(self.region.array(), dtype=torch.int8)
        self._views: list[torch.Tensor] = []
        layouts = []
        offset = 0
        for page in pages:
            size = self.num_blocks * page
            self._views.append(whole[offset : offset + size].view(self.num_blocks, page))
            layouts.append(worker.TensorLayout(offset, self.num_blocks, page, page))
            offset += size
        groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._groups = dict(zip(group_ids, groups, strict=True))
        self.layout = worker.KVLayout(
            *(handles.MEMFD, self.region.num_bytes, blocks_per_chunk, layouts, group_ids, groups),
            form=form or worker.KVForm(),
            canonical=canonical,
        )
        self._free = list(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        """Number of free staging blocks."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` staging blocks; as many must be free."""
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
    """A job on its way: chunks before `next_chunk` were submitted, in parts by their own ids;
    `results` are those of the parts.
    """

    job: copies.CopyJob
    deadline: float
    next_chunk: int = 0
    num_flying: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    results: list[copies.CopyResult] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def num_chunks(self) -> int:
        return len(self.job.keys)

    @property
    def is_store(self) -> bool:
        return self.job.direction == Direction.STORE

    @property
    def is_done(self) -> bool:
        return self.num_flying == 0 and self.next_chunk == self.num_chunks

    def block_ids(self, first: int, last: int) -> list[int]:
        """KV blocks of the chunks [first, last)."""
        counts = list(self.job.num_blocks)
        start = sum(counts[:first])
        return list(self.job.block_ids[start : start + sum(counts[first:last])])

    def fail_rest(self, refusal: Refusal) -> None:
        """What was not submitted has failed."""
        self.failed |= dict.fromkeys(range(self.next_chunk, self.num_chunks), int(refusal))
        self.next_chunk = self.num_chunks

    def joined(self) -> copies.CopyResult:
        """How it has ended. What parts say counts if one life of the NodeActor said it."""
        failed = dict(sorted(self.failed.items()))
        last = self.results[-1] if self.results else None
        is_one = last is not None and all(each.life == last.life for each in self.results)
        rows = [row for each in self.results if is_one for row in each.rows]
        return copies.CopyResult(
            self.job.job_id,
            last.life if last is not None and is_one else 0,
            last.number if last is not None and is_one else 0,
            listing.ListedRows.of(rows),
            Numbers.of(failed),
            bytes(failed.values()),
            sum(each.num_bytes for each in self.results),
            time.monotonic() - self.started_at,
        )


@dataclass(frozen=True)
class _JobPart:
    """Chunks [first, last) of a job, and the staging blocks that they use."""

    job_id: int
    first: int
    last: int
    staging_blocks: list[int]


class StagedLink(WorkerLink):
    """A line with staging memory in between."""

    def __init__(self, rank: int, memory: StagingMemory, settings: LinkSettings) -> None:
        super().__init__(rank, memory.layout, [memory.region.fd], settings)
        self._memory = memory
        self._jobs: dict[int, _Staged] = {}
        self._parts: dict[int, _JobPart] = {}
        self._waiting: deque[int] = deque()
        self._ended: list[copies.CopyResult] = []
        self._num_parts = 0

    def submit(self, *requests: JobRequest) -> None:
        """See `WorkerLink.submit`. Stores have left their blocks when this returns.

        A job that can't begin ends as failed; the others go on.
        """
        for request in requests:
            try:
                self._begin(request)
            except Exception:
                guard.report("StagedLink.submit")
                self._jobs.pop(request.job_id, None)
                failed = worker.not_done(request.job_id, request.num_chunks, Refusal.COPY_FAILED)
                self._ended.append(failed)

    def _begin(self, request: JobRequest) -> None:
        deadline = time.monotonic() + self._settings.step_deadline_s
        job = self._jobs[request.job_id] = _Staged(request.job, deadline)
        self._submit_more(job)
        if job.is_store:
            # No request waits for a store: what finds no room now is not stored.
            job.fail_rest(Refusal.QUEUE_FULL)
        elif job.next_chunk < job.num_chunks:
            self._waiting.append(request.job_id)
        self._end_if_done(job)

    def drain(self) -> list[copies.CopyResult]:
        """See `WorkerLink.drain`. Moves loads on, so it is to be called in every step."""
        self._pump()
        results, self._ended = self._ended, []
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """See `WorkerLink.wait`. Stores have left their blocks already; loads are ended."""
        loads = [
            job_id for job_id in job_ids if job_id in self._jobs and not self._jobs[job_id].is_store
        ]
        for job_id in loads:
            job = self._jobs[job_id]
            job.fail_rest(Refusal.CANCELLED)
            self._end_if_done(job)
        super().wait([n for n, part in self._parts.items() if part.job_id in loads])
        self._pump()

    def finish(self, job_ids: Collection[int]) -> None:
        super().wait([n for n, part in self._parts.items() if part.job_id in job_ids])
        self._pump()

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        """See `WorkerLink.wait_layers`. Here all layers come together."""
        while any(job_id in self._jobs for job_id in job_ids):
            parts = [n for n, part in self._parts.items() if part.job_id in job_ids]
            if not super().wait_layers(parts, ALL_LAYERS):
                return False
            if not parts:
                time.sleep(deadlines.INSTANT_S)
            self._pump()
        return True

    def _pump(self) -> None:
        """Take in parts that have ended, and submit what has room now."""
        for result in super().drain():
            self._finish_part(self._parts.pop(result.job_id), result)
        now = time.monotonic()
        while self._waiting:
            job = self._jobs.get(self._waiting[0])
            if job is not None and now > job.deadline:
                job.fail_rest(Refusal.CANCELLED)
                self._end_if_done(job)
            if job is not None and job.next_chunk < job.num_chunks:
                self._submit_more(job)
                self._end_if_done(job)
                if job.next_chunk < job.num_chunks:
                    return
            self._waiting.popleft()

    def _submit_more(self, job: _Staged) -> None:
        """Submit as many of the job's next chunks as the staging memory has room for: of a store
        none perhaps, so that other ranks hear that this one has ended it.
        """
        named, first = job.job, job.next_chunk
        last, room, counts = first, self._memory.num_free, list(job.job.num_blocks)
        while last < job.num_chunks and counts[last] <= room:
            room -= counts[last]
            last += 1
        if first == last and not job.is_store:
            return
        staging_blocks = self._memory.take(sum(counts[first:last]))
        part = _JobPart(named.job_id, first, last, staging_blocks)
        job.next_chunk = last
        if job.is_store and not self._copy(job, part, {}):
            self._memory.give_back(staging_blocks)
            staging_blocks, last = [], first
            part = _JobPart(named.job_id, first, last, staging_blocks)
        number = named.job_id if job.is_store else FIRST_PART + self._num_parts
        self._num_parts += 1
        try:
            sent = msgspec.structs.replace(
                named,
                job_id=number,
                keys=named.keys[first:last],
                num_blocks=named.num_blocks[first:last],
                first_block=named.first_block[first:last],
                block_ids=Numbers.of(staging_blocks),
            )
            super().submit(JobRequest(sent))
        except Exception:
            guard.report("StagedLink.submit")
            self._memory.give_back(staging_blocks)
            job.failed |= dict.fromkeys(range(first, last), int(Refusal.COPY_FAILED))
            return
        self._parts[number] = part
        job.num_flying += 1

    def _copy(self, job: _Staged, part: _JobPart, failed: dict[int, int]) -> bool:
        """Copy a part's blocks between KV cache and staging memory, one call per KV group.

        If the device refuses, the whole part has failed and the answer is False.
        """
        try:
            self._move(job, part, failed)
        except Exception:
            guard.report("StagedLink.copy")
            job.failed |= dict.fromkeys(range(part.first, part.last), int(Refusal.COPY_FAILED))
            return False
        return True

    def _move(self, job: _Staged, part: _JobPart, failed: dict[int, int]) -> None:
        move = self._memory.gather if job.is_store else self._memory.scatter
        counts, keys = list(job.job.num_blocks), list(job.job.keys)
        kv_blocks = job.block_ids(part.first, part.last)
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        start = 0
        for chunk in range(part.first, part.last):
            end = start + counts[chunk]
            if chunk not in failed:
                kv, staging = by_group.setdefault(group_of(Key(keys[chunk])), ([], []))
                kv += kv_blocks[start:end]
                staging += part.staging_blocks[start:end]
            start = end
        for group_id, (kv, staging) in by_group.items():
            move(group_id, kv, staging)

    def _finish_part(self, part: _JobPart, result: copies.CopyResult) -> None:
        job = self._jobs[part.job_id]
        columns = zip(result.failed_chunks, result.refusals, strict=True)
        failed = {part.first + chunk: refusal for chunk, refusal in columns}
        job.failed |= failed
        job.results.append(result)
        job.num_flying -= 1
        if not job.is_store:
            self._copy(job, part, failed)
        self._memory.give_back(part.staging_blocks)
        self._end_if_done(job)

    def _end_if_done(self, job: _Staged) -> None:
        if job.is_done and self._jobs.pop(job.job.job_id, None) is not None:
            self._ended.append(job.joined())
