"""What the ranks of an engine report, put together by vLLM's own code: each of them counts."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from raykv.base.ids import Direction, Refusal
from raykv.engine.lines import WorkerReport
from raykv.protocol.measures import BreakerReport
from raykv.vllm.transfers import RayKVWorkerMetadata
from tests.fixtures.place import NODE_LIFE
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest, failed_end, key


def told(engine: Engine, *ranks: dict[str, Any], job_id: int | None = None) -> RayKVWorkerMetadata:
    """A step ends with what each rank reports; the job has ended in all of them."""
    outputs = []
    for fields in ranks:
        meta = RayKVWorkerMetadata(**fields)
        if job_id is not None:
            meta.mark_completed(job_id)
        output = copy(EMPTY_MODEL_RUNNER_OUTPUT)
        output.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=meta)
        outputs.append(output)
    step = KVOutputAggregator(len(ranks)).aggregate(outputs)
    assert step is not None
    assert step.kv_connector_output is not None
    merged = step.kv_connector_output.kv_connector_worker_meta
    assert isinstance(merged, RayKVWorkerMetadata)
    engine.connector.update_connector_output(step.kv_connector_output)
    return merged


@pytest.mark.parametrize("rank", [0, 1])
def test_load_has_failed_if_it_has_in_one_rank(rank: int) -> None:
    engine, request = Engine(world_size=2), PlayedRequest()
    engine.hold(0, 1, 2)
    engine.begin(request)
    assert engine.schedule(request) == 3 * CHUNK
    (job_id,) = engine.connector.build_connector_meta(SchedulerOutput.make_empty()).load_jobs
    ranks: list[dict[str, Any]] = [{}, {}]
    ranks[rank] = {"ends": [failed_end("r", [key(1)])]}
    told(engine, *ranks, job_id=job_id)
    request.num_computed_tokens = CHUNK
    engine.schedule(request)
    record = engine.finish(request)
    assert (record.loaded, record.missed["load_failed"]) == (CHUNK, 2 * CHUNK)


@pytest.mark.parametrize("rank", [0, 1])
def test_request_loads_nothing_that_one_rank_has_barred(rank: int) -> None:
    engine, request = Engine(world_size=2), PlayedRequest()
    engine.hold(0, 1, 2)
    engine.begin(request)
    ranks: list[dict[str, Any]] = [{}, {}]
    ranks[rank] = {"barred": {"r"}}
    told(engine, *ranks)
    assert engine.schedule(request) == 0


def test_lines_of_all_ranks_are_known() -> None:
    here, lost = (WorkerReport(life, BreakerReport()) for life in (NODE_LIFE, 0))
    merged = told(Engine(world_size=2), {"lines": {0: here}}, {"lines": {1: lost}})
    assert merged.lines == {0: here, 1: lost}


def test_adapter_that_ranks_have_loaded_differently_has_no_content() -> None:
    engine = Engine(world_size=2)
    assert told(engine, {"adapters": {1: "a"}}, {"adapters": {1: "a"}}).adapters == {1: "a"}
    for ranks in (["a", "b"], ["b", "a"]):
        merged = told(engine, *({"adapters": {1: digest}} for digest in ranks))
        assert merged.adapters == {1: ""}
    assert told(engine, {}, {"adapters": {2: "b"}}).adapters == {2: "b"}


def test_weights_and_ends_of_all_ranks_are_known() -> None:
    first, second = (
        failed_end("r", [key(at)], Refusal.POISONED, Direction.STORE) for at in range(2)
    )
    changed = {"weights": {"rank 1": (2, "load_weights")}, "ends": [first]}
    merged = told(Engine(world_size=2), {"ends": [second]}, changed)
    assert merged.weights == {"rank 1": (2, "load_weights")}
    assert [list(each.keys) for each in merged.ends] == [[key(1)], [key(0)]]
