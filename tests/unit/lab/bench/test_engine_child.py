"""What is added to the arguments of engines that tests and benchmarks start."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.lab.bench.engine_child import GPU_SHARE, KV_BYTES, room_on


def test_engine_on_a_gpu_leaves_room_for_others() -> None:
    """Ten of them: what each needs beside its KV cache is less than that."""
    config = room_on(True, {"model": "m", "num_gpu_blocks_override": 96})
    assert config == {"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": KV_BYTES}
    assert GPU_SHARE <= 0.1


@pytest.mark.parametrize(
    ("is_gpu", "config"), [(False, {}), (True, {"gpu_memory_utilization": 0.45})]
)
def test_engine_that_is_sized_otherwise_is_left_alone(is_gpu: bool, config: dict[str, Any]) -> None:
    assert room_on(is_gpu, config) == {}
