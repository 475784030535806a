"""Puts vLLM's KV cache into memory that the NodeActor can map.

vLLM allocates one int8 buffer for the KV of all layers with `torch.zeros`. While the context of
`SharedAllocation` is active that one call gets a tensor over a memfd instead: no copy, pages come
when they are touched, and no pointer ever moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from raykv.base.errors import HandleError
from raykv.memory.handles import MEMFD
from raykv.memory.region import Region
from raykv.protocol.worker import KVLayout, TensorLayout


class SharedAllocation(TorchFunctionMode):
    """Context in which a flat int8 `torch.zeros` on the CPU is shared memory.

    `regions` holds the mappings; they must live as long as the tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function inside of the context."""
        kwargs = kwargs or {}
        if func is torch.zeros and self._is_kv_buffer(args, kwargs):
            return self._allocate(args[0])
        return func(*args, **kwargs)

    def _is_kv_buffer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = torch.device(kwargs.get("device") or "cpu")
        is_flat = len(args) == 1 and isinstance(args[0], int) and args[0] > 0
        return is_flat and kwargs.get("dtype") is torch.int8 and device.type == "cpu"

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        region = Region.anonymous(num_bytes, "kv")
        self.regions.append(region)
        return torch.frombuffer(region.array(), dtype=torch.int8)


def describe(
    regions: list[Region], kv_caches: Any, group_ids: list[int], blocks_per_chunk: int
) -> tuple[KVLayout, Region]:
    """Where the tensors of `kv_caches` (vLLM's `CanonicalKVCaches`) are in the shared memory.

    Raises:
        HandleError: a tensor is not in the one region that can be handed over.
    """
    if len(regions) != 1:
        raise HandleError(
            f"vLLM allocated its KV cache in {len(regions)} shared buffers instead of one; "
            "this vLLM places it where RayKV can't share it"
        )
    region = regions[0]
    tensors = [_tensor_layout(region, entry.tensor) for entry in kv_caches.tensors]
    return (
        KVLayout(
            kind=MEMFD,
            num_bytes=region.num_bytes,
            blocks_per_chunk=blocks_per_chunk,
            tensors=tensors,
            group_ids=group_ids,
            groups=[[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs],
        ),
        region,
    )


def _tensor_layout(region: Region, tensor: torch.Tensor) -> TensorLayout:
    offset = tensor.data_ptr() - region.address
    if not 0 <= offset < region.num_bytes:
        raise HandleError("a KV tensor lies outside of the shared memory")
    assert tensor.dtype == torch.int8, tensor.dtype
    num_blocks, page_bytes = tensor.shape
    return TensorLayout(offset, num_blocks, tensor.stride(0), page_bytes)
