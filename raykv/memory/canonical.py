"""Canonical pages: one order of the bytes of a chunk, whatever the number of ranks.

    page of rank 0   page of rank 1        canonical page, a region of which each rank has
    ┌────┬────┐      ┌────┬────┐           ┌────┬────┬────┬────┐
    │ h0 │ h1 │      │ h2 │ h3 │  ──────►  │ h0 │ h1 │ h2 │ h3 │
    └────┴────┘      └────┴────┘           └────┴────┴────┴────┘

A chunk is, layer by layer, the canonical pages of its blocks. What a worker says of its pages
comes from another process, and is checked before it is used:

1. The fragments of a map are the rank's page from its first byte to its last, each byte once.
2. They end inside of the canonical page, and no two of them overlap there.
3. Ranks that hold the same bytes store a share each, none of them empty; the shares of all of them
   are the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raykv.protocol.worker import CanonicalPages, PageMap

MAX_PAGE_BYTES = 1 << 40
MAX_WRITERS = 1 << 12
MAX_MAPS = 256
"""An engine has one for each kind of its layers."""
MAX_ROWS = 1 << 20
"""Fragments of a chunk. 80 layers of K and V by token, 4,096 tokens to a chunk, are 655,360."""

SHARE_ALIGNMENT = 64
"""Shares end at multiples of it: a cache line, and whole words for kernels that move pages."""

Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fragments:
    """Bytes of a rank's page, and where they are in the canonical one; columns."""

    own: Column
    whole: Column
    size: Column


def fragments_of(page: PageMap) -> Fragments:
    """All fragments of a map without an `objection`, run by run."""
    counts = np.array(page.counts, np.int64)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    def places(begins: list[int], strides: list[int]) -> Column:
        spread: Column = np.repeat(begins, counts) + within * np.repeat(strides, counts)
        return spread

    return Fragments(
        places(page.own, page.own_strides),
        places(page.whole, page.whole_strides),
        np.repeat(page.sizes, counts),
    )


def clipped(found: Fragments, span: range) -> Fragments:
    """The parts of fragments that lie in a span of the rank's page."""
    begin = np.maximum(found.own, span.start)
    end = np.minimum(found.own + found.size, span.stop)
    some = end > begin
    shift = (begin - found.own)[some]
    return Fragments(begin[some], found.whole[some] + shift, (end - begin)[some])


def own_bytes(page: PageMap) -> int:
    """Bytes of the rank's page."""
    return sum(size * count for size, count in zip(page.sizes, page.counts, strict=True))


def shares(pages: Sequence[PageMap]) -> Iterator[range]:
    """Which bytes the rank stores of each of a group's pages.

    Cut out of all pages together: but for the ends of a share whole pages are stored.
    """
    totals: Counter[int] = Counter()
    for page in pages:
        totals[page.num_writers] += own_bytes(page)
    seen: Counter[int] = Counter()
    for page in pages:
        copies, size = page.num_writers, own_bytes(page)
        ends = [
            _share_end(totals[copies], number, copies) - seen[copies]
            for number in (page.writer, page.writer + 1)
        ]
        seen[copies] += size
        yield range(*(min(max(end, 0), size) for end in ends))


def _share_end(total: int, number: int, copies: int) -> int:
    """Where share `number` begins, or the one before it ends."""
    if number == copies:
        return total
    end = total * number // copies
    return end if total < copies * SHARE_ALIGNMENT else end // SHARE_ALIGNMENT * SHARE_ALIGNMENT


def objection(
    pages: CanonicalPages,
    groups: Sequence[Sequence[int]],
    page_bytes: Sequence[int],
    blocks_per_chunk: int,
) -> str:
    """What is impossible about canonical pages, empty if nothing is.

    Args:
        pages: what the worker says; nothing is possible.
        groups: tensors of each KV group.
        page_bytes: of each tensor; the map of its page may leave out padding at the end.
        blocks_per_chunk: of the layout.
    """
    if not pages.maps and not pages.groups:
        return ""
    if [len(group) for group in pages.groups] != [len(group) for group in groups]:
        return f"canonical pages of {len(pages.groups)} groups, tensors of {len(groups)}"
    wrong = _maps_objection(pages.maps)
    if wrong:
        return wrong
    for numbers, tensors in zip(pages.groups, groups, strict=True):
        if not all(0 <= number < len(pages.maps) for number in numbers):
            return f"{len(pages.maps)} maps, and a group of numbers {numbers[:8]}"
        maps = [pages.maps[number] for number in numbers]
        writers = {page.num_writers: page.writer for page in maps}
        if any(writers[page.num_writers] != page.writer for page in maps):
            # Shares are cut out of all pages of a group: no rank would store some of the bytes.
            return "a rank that is two of the writers of a group"
        if sum(sum(page.counts) for page in maps) * blocks_per_chunk > MAX_ROWS:
            return f"a chunk of more than {MAX_ROWS} fragments"
        for page, tensor in zip(maps, tensors, strict=True):
            if own_bytes(page) > page_bytes[tensor]:
                return f"a map of {own_bytes(page)} bytes for a page of {page_bytes[tensor]}"
    return ""


def _maps_objection(maps: Sequence[PageMap]) -> str:
    if len(maps) > MAX_MAPS:
        return f"{len(maps)} maps"
    for check in (_numbers_objection, _overlap_objection):
        for number, page in enumerate(maps):
            wrong = check(page)
            if wrong:
                return f"map {number}: {wrong}"
        # Before they are made one by one.
        if sum(sum(page.counts) for page in maps) > MAX_ROWS:
            return f"maps of more than {MAX_ROWS} fragments"
    return ""


def _numbers_objection(page: PageMap) -> str:
    columns = (
        *(page.own, page.whole, page.sizes),
        *(page.counts, page.own_strides, page.whole_strides),
    )
    if {len(column) for column in columns} != {len(page.own)} or not page.own:
        return f"columns of {[len(column) for column in columns]} runs"
    if not 0 < page.page_bytes <= MAX_PAGE_BYTES:
        return f"a canonical page of {page.page_bytes} bytes"
    if not 0 <= page.writer < page.num_writers <= MAX_WRITERS:
        return f"writer {page.writer} of {page.num_writers}"
    if any(not 0 <= min(column) <= max(column) <= MAX_PAGE_BYTES for column in columns):
        return "a number that is negative or too large"
    if not min(page.sizes) or not min(page.counts) or sum(page.counts) > MAX_ROWS:
        return f"runs of {sum(page.counts)} fragments, or empty ones"
    if own_bytes(page) < page.num_writers:
        return f"{own_bytes(page)} bytes for {page.num_writers} writers"
    return ""


def _overlap_objection(page: PageMap) -> str:
    last = _end(page, page.whole, page.whole_strides)
    if last > page.page_bytes:
        return f"a fragment ends at {last} of {page.page_bytes} canonical bytes"
    end = _end(page, page.own, page.own_strides)
    if end != own_bytes(page):
        return f"fragments of {own_bytes(page)} bytes end at {end}"
    found = fragments_of(page)
    if _has_overlap(found.own, found.size) or _has_overlap(found.whole, found.size):
        return "fragments that overlap"
    return ""


def _end(page: PageMap, begins: Sequence[int], strides: Sequence[int]) -> int:
    """Where the last one of all runs ends."""
    # Python's integers: strides times counts may pass 64 bits.
    runs = zip(begins, page.counts, strides, page.sizes, strict=True)
    return max(begin + (count - 1) * stride + size for begin, count, stride, size in runs)


def _has_overlap(begins: Column, sizes: Column) -> bool:
    order = np.argsort(begins, kind="stable")
    ends = (begins + sizes)[order]
    return bool(np.any(ends[:-1] > begins[order][1:]))
