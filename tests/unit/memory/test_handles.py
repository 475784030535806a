"""Layouts of KV caches: what a NodeActor refuses to open."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from raykv.base.errors import HandleError
from raykv.memory.cuda.driver import MemoryDriver
from raykv.memory.handles import check_layout, open_kv, part_bytes
from raykv.protocol.worker import KVLayout, TensorLayout
from tests.fixtures.processes import is_open

TENSOR = TensorLayout(offset=100, num_blocks=10, block_stride=80, page_bytes=64)
END = 100 + 9 * 80 + 64
BIG = (1 << 63) - 1
LAYOUT = KVLayout(
    kind="memfd",
    num_bytes=END,
    blocks_per_chunk=2,
    tensors=[TENSOR, TensorLayout(0, 1, 16, 16)],
    group_ids=[0, 4],
    groups=[[0, 1], [1]],
)


def memory(num_bytes: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, num_bytes)
    return fd


def no_gpu() -> MemoryDriver:
    raise AssertionError


def test_layout_is_accepted_when_its_last_page_ends_with_the_memory() -> None:
    check_layout(LAYOUT)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_bytes": END - 1},
        {"num_bytes": -1},
        {"num_bytes": BIG},
        {"num_bytes": 0, "tensors": [], "group_ids": [], "groups": []},
        {"blocks_per_chunk": 0},
        {"blocks_per_chunk": 1 << 62},
        {"group_ids": [0]},
        {"group_ids": [0, 0]},
        {"groups": [[], [1]]},
        {"groups": [[0, 2], [1]]},
        {"groups": [[0, -1], [1]]},
        {"tensors": [msgspec.structs.replace(TENSOR, offset=-1), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, offset=101), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, num_blocks=11), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, num_blocks=0), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, block_stride=63), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, block_stride=81), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, num_blocks=1, block_stride=BIG), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, page_bytes=BIG), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, page_bytes=0), TENSOR]},
        {"tensors": [msgspec.structs.replace(TENSOR, page_bytes=65), TENSOR]},
    ],
    ids=str,
)
def test_layout_is_refused_when_it_is_malformed_or_points_outside(changed: dict[str, Any]) -> None:
    with pytest.raises(HandleError):
        check_layout(msgspec.structs.replace(LAYOUT, **changed))


def test_part_bytes_counts_a_page_of_each_layer_for_each_block() -> None:
    assert part_bytes(LAYOUT, 0) == 2 * (64 + 16)
    assert part_bytes(LAYOUT, 1) == 2 * 16


def test_open_kv_maps_the_memory_and_owns_its_descriptor() -> None:
    fd = memory(END)
    kv = open_kv(LAYOUT, [fd], no_gpu)
    assert kv.address
    assert kv.layout == LAYOUT
    kv.close()
    assert not is_open(fd)


@pytest.mark.parametrize(
    ("changed", "num_bytes", "text"),
    [
        ({}, END - 1, f"has {END - 1} bytes, not {END}"),
        ({"kind": "cuda"}, END, "kind 'cuda' can't be opened; known: 'memfd'"),
        ({"blocks_per_chunk": 0}, END, "malformed KV layout"),
    ],
)
def test_open_kv_closes_the_descriptor_when_it_refuses(
    changed: dict[str, Any], num_bytes: int, text: str
) -> None:
    fd = memory(num_bytes)
    with pytest.raises(HandleError, match=text):
        open_kv(msgspec.structs.replace(LAYOUT, **changed), [fd], no_gpu)
    assert not is_open(fd)


@pytest.mark.parametrize("count", [0, 2])
def test_open_kv_closes_all_descriptors_when_their_number_is_wrong(count: int) -> None:
    fds = [memory(END) for _ in range(count)]
    with pytest.raises(HandleError, match=f"1 descriptors, not {count}"):
        open_kv(LAYOUT, fds, no_gpu)
    assert not any(map(is_open, fds))
