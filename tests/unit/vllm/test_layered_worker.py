"""The worker's side of loads that a step waits for: what was not seen to come does not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from raykv.base.ids import Direction, Refusal
from raykv.base.settings import Settings
from raykv.prompts import adapters
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import CopyResult
from raykv.protocol.measures import BreakerReport, OpenBreaker
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.identity.adapters import AdapterUse
from raykv.vllm.layered import LayeredConnectorWorker
from raykv.vllm.transfers import (
    ChunkSpec,
    RayKVConnectorMetadata,
    RayKVWorkerMetadata,
    RayOffloadingWorker,
)
from raykv.vllm.worker import RayKVConnectorWorker
from raykv.worker.job import JobRequest
from raykv.worker.link import ALL_LAYERS
from tests.fixtures.vllm import kv_cache_config, layerwise_config, worker_spec

LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]


def ended(job_id: int, failed: Collection[int] = ()) -> CopyResult:
    refusals = bytes([Refusal.NOT_HERE]) * len(failed)
    return CopyResult(
        job_id,
        1,
        1,
        failed_chunks=Numbers.of(failed),
        refusals=refusals,
        num_bytes=10,
        seconds=0.1,
    )


class Link:
    """A line whose jobs end when everything of them is waited for."""

    node_life = 0
    node_id = ""

    def __init__(self) -> None:
        self.submitted: list[JobRequest] = []
        self.waits: list[tuple[set[int], int]] = []
        self.refused: dict[int, list[int]] = {}
        self.failing = ""
        self.breakers = BreakerReport()
        self._results: list[CopyResult] = []

    def submit(self, *requests: JobRequest) -> None:
        self._fail_at("submit")
        self.submitted.extend(requests)

    def finish(self, job_ids: Collection[int]) -> None:
        self.waits.append((set(job_ids), 0))

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        self._fail_at("wait")
        self.waits.append((set(job_ids), count))
        if count == ALL_LAYERS:
            for request in self.submitted:
                failed = self.refused.get(request.job_id, [])
                self._results.append(ended(request.job_id, failed))
            self.submitted.clear()
        return True

    def drain(self) -> list[CopyResult]:
        self._fail_at("drain")
        results, self._results = self._results, []
        return results

    def breaker_report(self) -> BreakerReport:
        return self.breakers

    def following(self) -> Any:
        return self

    def set_target(self, target: Any) -> None:
        pass

    def _fail_at(self, place: str) -> None:
        if self.failing == place:
            raise RuntimeError("planted")


class Side:
    """A connector's worker side, and the calls that vLLM makes."""

    def __init__(
        self, tensors: int = 3, *, is_layerwise: bool = True, is_durable: bool = False
    ) -> None:
        self.link = Link()
        page = [TensorLayout(0, 10, 64, 64)] * tensors
        layout = KVLayout("memfd", 1, 1, page, [0], [list(range(tensors))])
        settings = Settings(layerwise_loads=is_layerwise, durable_stores=is_durable)
        kind = LayeredConnectorWorker if is_layerwise else RayKVConnectorWorker
        self.worker: Any = kind(
            worker_spec(settings), layerwise_config(), kv_cache_config([LAYERS])
        )
        link: Any = self.link
        self.worker.worker = RayOffloadingWorker(link, layout, by_layer=is_layerwise)
        self.connector: Any = RayKVConnector.__new__(RayKVConnector)
        self.connector.connector_worker = self.worker

    def take(self, metadata: RayKVConnectorMetadata) -> None:
        self.connector._connector_metadata = metadata
        self.connector.handle_preemptions(metadata)

    def begin(self, place_life: int = 0, **loads: list[int]) -> None:
        """A step in which requests load into blocks; their jobs are numbered from 1 on."""
        jobs = {
            number: load_job(request_id, blocks)
            for number, (request_id, blocks) in enumerate(loads.items(), start=1)
        }
        self.take(RayKVConnectorMetadata(jobs, {}, None, place_lives=[place_life]))

    def start(self) -> None:
        self.connector.start_load_kv(None)

    def load(self, **loads: list[int]) -> None:
        """The step begins, with its loads."""
        self.begin(0, **loads)
        self.start()

    def store(self, job_id: int) -> None:
        """A step in which a request stores a block, up to its end."""
        jobs = {job_id: store_job("a", [2])}
        self.take(RayKVConnectorMetadata({}, jobs, None))
        self.start()
        self.connector.wait_for_save()
        self.connector.get_finished(set())

    def submitted(self) -> list[int]:
        return [request.job_id for request in self.link.submitted]

    def layer(self, name: str) -> tuple[set[int], int] | None:
        """What is waited for before the layer is computed."""
        before = len(self.link.waits)
        self.connector.wait_for_layer_load(name)
        new = self.link.waits[before:]
        return new[0] if new else None

    def end(self) -> tuple[set[str], set[int], Counter[int]]:
        """Requests that have received theirs, invalid blocks, and jobs that are completed."""
        _, received = self.connector.get_finished(set())
        invalid = self.connector.get_block_ids_with_load_errors()
        meta = self.connector.build_connector_worker_meta()
        return received, invalid, Counter(meta.completed_jobs if meta else {})


def blocks_of(blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])


def load_job(request_id: str, blocks: list[int], key: bytes = b"k") -> TransferJob:
    pool = ChunkSpec([key] * len(blocks), "model", request_id=request_id)
    return TransferJob(request_id, pool, blocks_of(blocks))


def store_job(request_id: str, blocks: list[int], key: bytes = b"k") -> TransferJob:
    pool = ChunkSpec([key] * len(blocks), "model", request_id=request_id)
    return TransferJob(request_id, blocks_of(blocks), pool)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The first call of a method fails."""
    method, calls = getattr(owner, name), []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)


def test_each_layer_waits_for_itself_and_the_step_for_all() -> None:
    side = Side()
    side.load(a=[1, 2], b=[3])
    assert all(request.job.by_layer for request in side.link.submitted)
    assert [side.layer(name) for name in LAYERS] == [({1, 2}, 1), ({1, 2}, 2), ({1, 2}, 3)]
    assert side.end() == (set(), set(), Counter({1: 1, 2: 1}))
    assert side.link.waits[-1] == ({1, 2}, ALL_LAYERS)
    side.load()
    assert side.layer(LAYERS[0]) is None
    assert side.end() == (set(), set(), Counter())


@pytest.mark.parametrize(
    ("tensors", "layer"),
    [(1, LAYERS[0]), (2, LAYERS[0]), (4, LAYERS[0]), (3, "draft.layers.0")],
    ids=["one", "fewer", "more", "unknown"],
)
def test_all_layers_are_waited_for_where_the_layers_are_not_those_of_vllm(
    tensors: int, layer: str
) -> None:
    side = Side(tensors)
    side.load(a=[1])
    assert side.layer(layer) == ({1}, ALL_LAYERS)


def test_blocks_of_chunks_that_did_not_come_are_invalid_and_the_job_has_ended() -> None:
    side = Side()
    side.link.refused = {1: [1]}
    side.load(a=[1, 2, 3], b=[4])
    for name in LAYERS:
        side.layer(name)
    assert side.end() == (set(), {2}, Counter({1: 1, 2: 1}))


def test_loads_that_a_layer_has_not_waited_for_are_invalid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side()
    side.load(a=[1, 2])
    for name in LAYERS[:-1]:
        side.layer(name)
    assert side.end() == (set(), {1, 2}, Counter({1: 1}))
    assert f"1 layers ({LAYERS[-1]}) did not wait" in caplog.text
    # The next step begins anew.
    side.load(a=[3])
    side.layer(LAYERS[-1])
    assert side.end()[1] == {3}


@pytest.mark.parametrize("begins_behind_a_layer", [False, True])
def test_load_that_never_began_or_behind_a_layer_is_invalid_and_has_ended(
    begins_behind_a_layer: bool,
) -> None:
    side = Side()
    side.begin(a=[1, 2])
    if begins_behind_a_layer:
        side.layer(LAYERS[0])
        side.start()
    assert side.end() == (set(), {1, 2}, Counter({1: 1}))
    side.begin()
    assert side.end() == (set(), set(), Counter())


@pytest.mark.expects_failures
@pytest.mark.parametrize("place", ["submit", "wait", "drain"])
def test_hook_that_fails_leaves_what_it_was_about_invalid(place: str) -> None:
    side = Side()
    side.begin(a=[1, 2], b=[3])
    side.link.failing = place
    side.start()
    side.layer(LAYERS[0])
    side.link.failing = "drain" if place == "drain" else ""
    _, invalid, completed = side.end()
    assert invalid == {1, 2, 3}
    side.link.failing = ""
    side.begin()
    received, invalid, later = side.end()
    assert (received, invalid) == (set(), set())
    assert completed + later == Counter({1: 1, 2: 1})


@pytest.mark.expects_failures
def test_result_that_is_not_understood_leaves_its_blocks_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    side.load(a=[1, 2], b=[3])

    def strange(request: JobRequest, result: CopyResult) -> Any:
        return SimpleNamespace(job_id=result.job_id)

    monkeypatch.setattr("raykv.vllm.transfers.transfer_result", strange)
    assert side.end() == (set(), {1, 2, 3}, Counter({1: 1, 2: 1}))


@pytest.mark.expects_failures
def test_late_end_that_is_not_understood_is_told_of_no_request_that_vllm_goes_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    side.load(a=[1, 2])
    side.link.failing = "wait"
    assert side.end() == (set(), {1, 2}, Counter())
    side.link.failing = ""
    side.link.wait_layers([], ALL_LAYERS)
    fail_once(monkeypatch, RayKVWorkerMetadata, "mark_completed")
    side.begin()
    results = side.connector.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert side.end() == (set(), set(), Counter({1: 1}))


def test_stranded_blocks_are_invalid() -> None:
    side = Side()
    side.take(RayKVConnectorMetadata({}, {}, None, stranded_blocks=[5, 6]))
    assert side.end()[1] == {5, 6}
    assert side.end()[1] == set()


def test_ordinary_loads_are_waited_for_by_nobody() -> None:
    side = Side(is_layerwise=False)
    side.load(a=[1])
    assert not side.link.submitted[0].job.by_layer
    assert side.layer(LAYERS[0]) is None
    assert side.end() == (set(), set(), Counter())
    side.link.wait_layers([], ALL_LAYERS)
    assert side.end() == ({"a"}, set(), Counter({1: 1}))


@pytest.mark.expects_failures
def test_load_that_must_not_be_ends_though_its_refusal_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(is_layerwise=False)
    side.begin(a=[1, 2])
    side.worker._are_named = False
    fail_once(monkeypatch, RayOffloadingWorker, "refuse")
    side.start()
    assert side.end() == ({"a"}, {1, 2}, Counter({1: 1}))


@pytest.mark.parametrize("is_durable", [False, True])
def test_stores_of_a_step_begin_with_the_next_one_unless_they_are_durable(is_durable: bool) -> None:
    """A step's kernels may still be writing what is to be stored."""
    side = Side(is_layerwise=False, is_durable=is_durable)
    side.store(7)
    assert side.submitted() == ([7] if is_durable else [])
    side.load()
    assert side.submitted() == [7]


@pytest.mark.parametrize("is_told", [False, True])
def test_stores_that_were_left_to_the_next_step_are_submitted_before_the_worker_sleeps(
    is_told: bool,
) -> None:
    """vLLM 0.33 tells connectors; else the worker's methods are watched."""
    side = Side(is_layerwise=False)
    side.store(7)
    (side.connector.unregister_kv_caches if is_told else side.worker.store_before_sleep)()
    assert side.submitted() == [7]
    assert side.link.waits == [({7}, 0)]
    side.load()
    assert side.submitted() == [7]


@pytest.mark.expects_failures
def test_stores_that_cant_be_submitted_before_the_worker_sleeps_have_failed() -> None:
    side = Side(is_layerwise=False)
    side.store(7)
    side.link.failing = "submit"
    side.worker.store_before_sleep()
    assert side.end()[2] == Counter({7: 1})
    side.link.failing = ""
    side.load()
    assert side.submitted() == []


def test_jobs_of_requests_with_another_adapter_than_the_worker_has_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    content = adapters.content(str(tmp_path))
    right = AdapterUse(1, str(tmp_path), content.digest, reloads=False)
    uses = {"a": right, "b": replace(right, digest="what the files were before")}
    side = Side(is_layerwise=False)
    side.worker._adapters.note(1, content)
    loads = {number: load_job(name, [2]) for number, name in enumerate(uses, 1)}
    stores = {number: store_job(name, [2]) for number, name in enumerate(uses, 3)}
    side.take(RayKVConnectorMetadata(loads, stores, None, adapters=uses, beginning=uses))
    side.start()
    side.connector.wait_for_save()
    assert side.end() == ({"b"}, {2}, Counter({2: 1, 4: 1}))
    side.load()
    assert side.submitted() == [1, 3]


def test_loads_of_a_step_whose_engine_does_not_know_the_weights_fail_and_it_is_told() -> None:
    side = Side(is_layerwise=False)
    worker = side.worker
    side.load(a=[1])
    assert side.submitted() == [1]
    # Somebody writes into the model between two steps.
    worker._weights.note("load_weights")
    watch = worker._weights.name
    load, store = load_job("b", [2], b"l"), store_job("c", [2], b"m")
    metadata = RayKVConnectorMetadata({2: load}, {3: store}, None)
    worker.take_metadata(metadata)
    worker.start_kv_transfers(metadata)
    worker.prepare_store_kv(metadata)
    assert side.submitted() == [1]
    side.link.wait_layers([], ALL_LAYERS)
    worker.get_finished(set())
    meta = worker.build_connector_worker_meta()
    assert meta.weights == {watch: (1, "load_weights")}
    assert meta.completed_jobs == {1: 1, 2: 1, 3: 1}
    # What was under way, too.
    loads = {end.request_id for end in meta.ends if end.direction is Direction.LOAD}
    assert loads == {"a", "b"}
    stores = [end.keys for end in meta.ends if end.direction is Direction.STORE]
    assert stores == [[b"m"]]
    known = RayKVConnectorMetadata({4: load}, {}, None, weights_seen={watch: 1})
    worker.take_metadata(known)
    worker.start_kv_transfers(known)
    assert side.submitted() == [4]
    assert worker.build_connector_worker_meta() is None


def test_line_that_another_life_of_the_node_refuses_too_is_reported_again() -> None:
    """What was said of it before counts for the last life."""
    side = Side()

    def step(place_life: int, num_failed: int) -> bool:
        row = OpenBreaker("own node", "open", num_failed, 1.0, "refused")
        side.link.breakers = BreakerReport([row], opened=1, failed=num_failed)
        side.begin(place_life)
        side.connector.get_finished(set())
        meta = side.connector.build_connector_worker_meta()
        return meta is not None and bool(meta.lines)

    assert step(7, 1)
    step(7, 2)
    assert not step(7, 3)
    assert not step(8, 3), "it has not tried that one"
    assert step(8, 4)
    assert not step(8, 5)
