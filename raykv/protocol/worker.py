"""A vLLM worker and its node's NodeActor: attaching, jobs and their results, forms of KV."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from raykv.base.ids import Refusal
from raykv.protocol import columns, copies, engine, framing

MAX_PIECES = 240
"""Pieces of a GPU's memory that a KV cache lies in."""

MAX_PIECE_BYTES = 1 << 46

CUDA_HANDLE_BYTES = 64
"""Bytes of a handle of memory or of an event: CUDA gives both the same size."""

DEVICE_TEXT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A GPU's UUID, as torch writes it too."""


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV tensor in the exported memory; sizes and the offset in bytes.

    Page of block b: [offset + b * block_stride, + page_bytes).
    """

    offset: int
    num_blocks: int
    block_stride: int
    page_bytes: int

    @property
    def end(self) -> int:
        """The offset behind its last page."""
        return self.offset + (self.num_blocks - 1) * self.block_stride + self.page_bytes


class AttachWorker(framing.Versioned, frozen=True, tag="attach"):
    """First message of a connection; the KV memory and the cancel words come with it as fds.

    `life`: of the EngineCore, as in `EngineHello`.
    """

    engine_id: columns.Named
    life: columns.Life
    namespace: columns.Named
    rank: int
    num_ranks: columns.NumRanks
    slot_bytes: columns.SlotSizes
    layout: KVLayout

    def __post_init__(self) -> None:
        columns.require(0 <= self.rank < self.num_ranks, f"rank {self.rank} of {self.num_ranks}")
        has_sizes = set(self.layout.group_ids) <= set(self.slot_bytes)
        columns.require(has_sizes, "a KV group without a slot size")
        check_device_memory(self.layout)


class JobBatch(msgspec.Struct, frozen=True, tag="jobs"):
    """Jobs of one engine step, and the ids of jobs that the engine gives up."""

    jobs: Annotated[list[copies.CopyJob], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    cancelled: Annotated[list[columns.Count], msgspec.Meta(max_length=columns.MAX_ROWS)] = []


class JobResults(msgspec.Struct, frozen=True, tag="results"):
    """Jobs that ended, in order; and by job how many `layers` of one that goes on are there."""

    results: list[copies.CopyResult]
    layers: dict[int, int] = {}


NodeMessage = engine.Welcome | JobResults
"""From a NodeActor to a worker."""


def not_done(job_id: int, num_chunks: int, refusal: Refusal) -> copies.CopyResult:
    """The result of a job that copied nothing, without rows of a listing."""
    every = columns.Numbers.of(range(num_chunks))
    return copies.CopyResult(
        job_id, life=0, number=0, failed_chunks=every, refusals=bytes([refusal]) * num_chunks
    )


def believable(result: copies.CopyResult, num_chunks: int) -> copies.CopyResult:
    """A result as it came; an invalid one becomes the result of a job that was not carried out."""
    failed = set(result.failed_chunks)
    is_sound = len(failed) == len(result.failed_chunks) and columns.REFUSALS.issuperset(
        result.refusals
    )
    if is_sound and all(0 <= chunk < num_chunks for chunk in failed):
        return result
    return not_done(result.job_id, num_chunks, Refusal.COPY_FAILED)


class ElementOrder(msgspec.Struct, frozen=True, array_like=True):
    """Where the elements of K, or of V, are in a page: a block of one layer on one rank.

    The element of head h, token t and dimension d is number heads[h] + tokens[t] + dims[d] of the
    page, counted in elements. Head h is the rank's h-th.
    """

    heads: list[int] = []
    tokens: list[int] = []
    dims: list[int] = []


class GroupForm(msgspec.Struct, frozen=True):
    """Form of a KV group, whose layers have pages of one form; in a chunk they follow in this
    order.

    With `refusal` set, a sentence, its chunks cannot be read as tensors, and nothing else is set.
    """

    layers: list[str] = []
    dtype: str = ""
    page_bytes: int = 0
    keys: ElementOrder = ElementOrder()
    values: ElementOrder = ElementOrder()
    refusal: str = ""


class KVForm(msgspec.Struct, frozen=True):
    """Form of a namespace's chunks: its groups by KV group index, and what all groups share.

    A chunk has a part per rank; a part has a region per layer, a region `blocks_per_chunk` pages.
    `head_copies` ranks that follow each other have the same heads. `slot_bytes` by KV group index.
    Canonical chunks have the form of an engine of one rank, whatever engine stored them.
    """

    num_ranks: int = 1
    head_copies: int = 1
    blocks_per_chunk: int = 1
    slot_bytes: dict[int, int] = {}
    groups: dict[int, GroupForm] = {}


class PageMap(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a rank's page are in the canonical page, that of an engine of one rank.

    Columns, one entry per run: fragment i of run r is `sizes[r]` bytes that begin in the rank's
    page at own[r] + i * own_strides[r], in the canonical one at whole[r] + i * whole_strides[r],
    for i below counts[r]. `page_bytes` are the canonical page's. `num_writers` ranks hold the same
    bytes; this one is number `writer` among them.
    """

    page_bytes: int
    own: list[int]
    whole: list[int]
    sizes: list[int]
    counts: list[int]
    own_strides: list[int]
    whole_strides: list[int]
    num_writers: int = 1
    writer: int = 0


class CanonicalPages(msgspec.Struct, frozen=True):
    """The maps of a worker; without any its chunks have a part for each rank.

    `groups[g]` has, for each tensor of the g-th KV group of the layout, a number of `maps`.
    """

    maps: list[PageMap] = []
    groups: list[list[int]] = []


NOT_CANONICAL = CanonicalPages()


class KVLayout(msgspec.Struct, frozen=True):
    """A worker's KV cache as another process sees it.

    `kind` names the protocol that opens it ("memfd", "cuda-ipc"). `groups[g]` lists, for the g-th
    KV group in the order of `group_ids`, indices into `tensors`.

    Memory of a GPU comes in pieces, of `piece_bytes` each; offsets count through all of them, back
    to back. `device` is the GPU's UUID. `handles` opens them, one each. `event` is the handle of
    the event that the worker records on its compute stream before it submits a job. `form`: how KV
    lies in chunks, for inspection.
    `canonical`: where pages are in chunks that any number of ranks shares. Both may say nothing.
    """

    kind: str
    num_bytes: int
    blocks_per_chunk: int
    tensors: list[TensorLayout]
    group_ids: list[int]
    groups: list[list[int]]
    device: str = ""
    piece_bytes: list[int] = []
    handles: list[bytes] = []
    event: bytes = b""
    form: KVForm = KVForm()
    canonical: CanonicalPages = NOT_CANONICAL


def check_device_memory(layout: KVLayout) -> None:
    """What a layout says of a GPU's memory; that of CPU memory says nothing of it.

    Raises:
        MessageError: it is invalid.
    """
    pieces, handles = layout.piece_bytes, layout.handles
    if not layout.kind.startswith("cuda-"):
        is_silent = not (layout.device or pieces or handles or layout.event)
        columns.require(
            is_silent, f"a KV cache of kind {layout.kind[: columns.MAX_NAME]!r} with GPU memory"
        )
        return
    columns.require(DEVICE_TEXT.fullmatch(layout.device) is not None, "a GPU without a UUID")
    columns.require(1 <= len(pieces) <= MAX_PIECES, f"{len(pieces)} pieces of GPU memory")
    columns.check_numbers("sizes of GPU memory", pieces, 1, MAX_PIECE_BYTES)
    columns.require(
        sum(pieces) == layout.num_bytes, f"{layout.num_bytes} bytes in pieces of {pieces}"
    )
    sizes = {len(layout.event), *map(len, handles)}
    columns.require(sizes == {CUDA_HANDLE_BYTES}, f"handles of GPU memory of {sizes} bytes")
    columns.require(len(handles) == len(pieces), f"{len(handles)} handles of {len(pieces)} pieces")
