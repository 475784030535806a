"""Which way a worker's KV cache goes to the NodeActor, and how many parts a chunk has."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.base.settings import Settings, load_settings
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.cuda.kv import CUDA_IPC
from raykv.protocol.worker import NOT_CANONICAL, CanonicalPages, PageMap
from raykv.worker.link import LinkSettings
from tests.fixtures.cuda.memory import PAGE, FakeCuda

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from vllm.device_allocator import alloc_conf
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from raykv.vllm.internals.engine import ordinary_gpu_memory
from raykv.vllm.spec import TOLD, RayKVOffloadingSpec
from raykv.vllm.transfers import RayKVConnectorMetadata
from raykv.vllm.worker import RayKVConnectorWorker
from raykv.worker import staging
from raykv.worker.handover import DeviceLink, make_link, may_sleep
from raykv.worker.staging import StagedLink

NUM_BLOCKS, PAGE_BYTES = 8, 512
CONF = "PYTORCH_CUDA_ALLOC_CONF"


class GPUTensor:
    """As much of a tensor as is looked at before its bytes are."""

    def __init__(self, address: int, kind: str = "cuda") -> None:
        self.address = address
        self.device = SimpleNamespace(type=kind)
        self.shape = (NUM_BLOCKS, PAGE_BYTES)

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dimension: int) -> int:
        assert dimension == 0
        return PAGE_BYTES


def kv_caches(*tensors: Any) -> Any:
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor) for tensor in tensors],
        group_data_refs=[[SimpleNamespace(tensor_idx=i) for i in range(len(tensors))]],
    )


class Spec:
    """What `make_link` asks of a spec; what was staged, and why."""

    group_ids = [0]
    blocks_per_chunk = 1
    part = 0
    pages = NOT_CANONICAL

    def __init__(self, kv_handover: str, *, sleeps: bool = False) -> None:
        self.settings = Settings(kv_handover=kv_handover)
        self.sleeps = sleeps
        self.reasons: list[str] = []

    def link_settings(self) -> LinkSettings:
        return LinkSettings()

    def canonical_pages(self, _caches: Any) -> CanonicalPages:
        return self.pages

    def staged_link(self, _caches: Any, reason: str) -> tuple[Any, Any]:
        self.reasons.append(reason)
        return "staged", None


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    made.end()


def no_cuda() -> FakeCuda:
    raise CUDAError("CUDA can't be used in this process")


@pytest.mark.parametrize("setting", ["auto", "ipc"])
def test_gpu_memory_is_mapped_where_it_can_be(cuda: FakeCuda, setting: str) -> None:
    spec = Spec(setting)
    page = PageMap(2 * PAGE_BYTES, *([0], [PAGE_BYTES], [PAGE_BYTES], [1], [1], [1]))
    spec.pages = CanonicalPages([page], [[0]])
    caches = kv_caches(GPUTensor(cuda.allocate(PAGE)))
    link, layout = make_link(spec, caches, lambda: cuda)
    assert isinstance(link, DeviceLink)
    assert (layout.kind, layout.tensors[0].page_bytes) == (CUDA_IPC, PAGE_BYTES)
    assert layout.canonical == spec.pages
    assert spec.reasons == []
    link.close(5.0)


def test_staged_means_staged(cuda: FakeCuda) -> None:
    spec = Spec("staged")
    assert make_link(spec, kv_caches(GPUTensor(1)), lambda: cuda)[0] == "staged"
    assert cuda.calls == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("sleep", "enable_sleep_mode gives the KV cache other memory"),
        ("xpu", "no other process can map memory of xpu"),
        ("no cuda", "CUDA can't be used in this process"),
        ("not shareable", "start the engine without enable_sleep_mode"),
        ("no event", "create_event was refused"),
    ],
)
@pytest.mark.parametrize("setting", ["auto", "ipc"])
def test_memory_that_can_not_be_mapped_is_staged_or_stops_the_start(
    cuda: FakeCuda, setting: str, case: str, reason: str
) -> None:
    spec = Spec(setting, sleeps=case == "sleep")
    address = cuda.allocate(PAGE, is_ordinary=case != "not shareable")
    caches = kv_caches(GPUTensor(address, "xpu" if case == "xpu" else "cuda"))
    cuda.refused = {"create_event"} if case == "no event" else set()
    load = no_cuda if case == "no cuda" else lambda: cuda
    if setting == "ipc":
        with pytest.raises(SettingError, match=f"kv_handover=ipc can't be had: .*{reason}"):
            make_link(spec, caches, load)
        assert spec.reasons == []
    else:
        assert make_link(spec, caches, load)[0] == "staged"
        assert len(spec.reasons) == 1
        assert reason in spec.reasons[0]
    assert cuda.num_open == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"enable_sleep_mode": False}, False),
        ({"enable_sleep_mode": True}, True),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": True}, True),
    ],
)
def test_engine_that_may_sleep_is_known(config: dict[str, bool], expected: bool) -> None:
    assert may_sleep(SimpleNamespace(**config)) is expected


# Expandable segments


@pytest.fixture
def confs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told; this build of torch has none for GPUs."""
    told: list[str] = []
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", told.append)
    monkeypatch.setattr(alloc_conf, "live_alloc_conf", lambda: None)
    for name in alloc_conf.ALLOC_CONF_ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    return told


def test_expandable_segments_are_off_while_the_kv_cache_is_allocated(
    confs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = "expandable_segments:True,max_split_size_mb:512"
    monkeypatch.setenv(CONF, before)
    context = ordinary_gpu_memory(sleeps=False)
    assert context is not None
    assert confs == []

    def allocate() -> None:
        with context:
            assert confs == ["expandable_segments:False,max_split_size_mb:512"]
            raise MemoryError

    with pytest.raises(MemoryError):
        allocate()
    assert confs[1:] == [before]


@pytest.mark.parametrize(
    ("conf", "sleeps"),
    [
        ("", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:512", False),
        ("expandable_segments:True", True),
    ],
)
def test_allocator_is_left_alone_when_its_memory_can_be_shared_or_is_that_of_sleep_mode(
    confs: list[str], monkeypatch: pytest.MonkeyPatch, conf: str, sleeps: bool
) -> None:
    monkeypatch.setenv(CONF, conf)
    assert ordinary_gpu_memory(sleeps=sleeps) is None
    assert confs == []


# Parts


def spec_of(rank: int, world_size: int, *, replicated: bool, **more: Any) -> RayKVOffloadingSpec:
    ones = dict.fromkeys(("pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    parallel = OffloadingParallelConfig(
        rank=rank,
        world_size=world_size,
        tp_size=world_size,
        data_parallel_index=0,
        data_parallel_rank_local=0,
        is_parallelism_agnostic=more.get("canonical_layout", False),
        **ones,
    )
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=PAGE_BYTES,
        enable_kv_cache_events=False,
        extra_config=more.pop("extra_config", {}),
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=4),
        parallel=parallel,
        replicated_layout=replicated,
        **more,
    )
    return RayKVOffloadingSpec(config)


@pytest.mark.parametrize("replicated", [False, True])
def test_canonical_chunk_has_a_part_of_each_rank_and_one_size(*, replicated: bool) -> None:
    """Latents of MLA too, of which each rank stores a share."""
    told = SimpleNamespace(block_bytes={0: 5000, 1: 4000}, sleeps=False, kv_cache=None)
    extra = {"canonical_layout": True, TOLD: told}
    canonical = {"canonical_layout": True, "extra_config": extra, "kv_cache_layout": "LBHNC"}
    specs = [spec_of(1, ranks, replicated=replicated, **canonical) for ranks in (2, 8)]
    assert [(spec.num_parts, spec.part) for spec in specs] == [(2, 1), (8, 1)]
    assert {spec.slot_bytes for spec in specs} == {20480}
    assert not any(spec.replicated_layout for spec in specs)


def test_sharded_chunk_has_a_part_for_each_rank() -> None:
    spec = spec_of(3, 8, replicated=False)
    assert (spec.num_parts, spec.part) == (8, 3)
    assert spec.slot_bytes == 8 * 4 * PAGE_BYTES
    assert not spec.replicated_layout


def test_replicated_chunk_has_one_part_for_all_ranks() -> None:
    specs = [spec_of(rank, 8, replicated=True) for rank in range(8)]
    assert {(spec.num_parts, spec.part) for spec in specs} == {(1, 0)}
    # 2,048 bytes take a whole page of the pool.
    assert {spec.slot_bytes for spec in specs} == {4096}
    assert all(spec.replicated_layout for spec in specs)


def test_only_rank_0_stores_what_all_have_and_the_others_confirm() -> None:
    """By vLLM's own rules, out of what our spec says."""
    for rank in range(2):
        spec = spec_of(rank, 2, replicated=True)
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=[])
        config = SimpleNamespace(kv_cache_groups=[group])
        worker = RayKVConnectorWorker(spec, None, config)
        entry = SimpleNamespace(src_spec=None, dst_spec=None)
        metadata = RayKVConnectorMetadata({}, {5: entry}, None)
        if rank == 0:
            with pytest.raises(AssertionError):
                # It goes on to the job's blocks, of which there are none here.
                worker.prepare_store_kv(metadata)
            continue
        worker.prepare_store_kv(metadata)
        told = worker.build_connector_worker_meta()
        assert told is not None
        assert set(told.completed_jobs) == {5}


def test_staged_worker_of_a_replicated_engine_comes_as_its_one_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks: list[int] = []

    class Link(StagedLink):
        def __init__(self, rank: int, *others: Any) -> None:
            ranks.append(rank)
            super().__init__(rank, *others)

    monkeypatch.setattr(staging, "StagedLink", Link)
    spec = spec_of(1, 2, replicated=True)
    spec.settings = load_settings({"staging_bytes": 1 << 20}, {})
    kv = torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8)
    worker = spec.get_worker(kv_caches(kv))
    assert ranks == [0]
    assert "slower than by the NodeActor: no other process can map memory of cpu" in caplog.text
    worker.shutdown()
