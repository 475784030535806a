"""What the connector for hidden states decides: paths, what is captured, and who hears of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raykv.base.errors import HiddenStatesError, SettingError
from raykv.base.ids import Refusal
from raykv.base.settings import Settings
from raykv.node.states.file import load_hidden_states, promise
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import Capture, CopyResult
from raykv.worker.job import JobRequest

hidden_states = pytest.importorskip("raykv.vllm.hidden_states")
readers = pytest.importorskip("raykv.vllm.identity.readers")

BLOCK = 4


def request(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": list(range(10)),
        "all_token_ids": list(range(13)),
        "num_computed_tokens": 12,
        "kv_transfer_params": None,
        **changes,
    }
    return SimpleNamespace(**values)


def scheduled(request_id: str = "r", params: Any = None) -> Any:
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(req_id=request_id, sampling_params=sampling)


def planner(folder: str = "/states", *, takes: bool = False) -> Any:
    return hidden_states.StatesPlanner(folder, takes_client_paths=takes)


def tokens(order: Any) -> list[int]:
    return [int(token) for token in np.frombuffer(order.token_ids, "<i8")]


def test_states_of_the_prompt_are_ordered_with_their_blocks_when_a_request_has_ended() -> None:
    plan = planner()
    assert plan.began([scheduled()]) == {"r": "/states/r.safetensors"}
    assert plan.ended(request(), [7, 8, 9, 3], BLOCK) == "/states/r.safetensors"
    (order,) = plan.take_orders()
    assert (tokens(order), order.block_ids) == (list(range(10)), [7, 8, 9])
    assert plan.take_orders() == []
    assert plan.ended(request(), [7, 8, 9, 3], BLOCK) is None


def test_generated_tokens_are_in_it_where_asked_for_but_for_the_last_one() -> None:
    plan = planner()
    plan.began([scheduled()])
    plan.ended(request(kv_transfer_params={"include_output_tokens": True}), [7, 8, 9, 3], BLOCK)
    (order,) = plan.take_orders()
    assert (tokens(order), order.block_ids) == (list(range(12)), [7, 8, 9])


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"num_computed_tokens": 9}, [7, 8, 9]),
        ({}, []),
        ({}, [7, 8]),
        ({"prompt_token_ids": None}, [7, 8, 9]),
    ],
)
def test_nothing_is_captured_of_a_prompt_that_is_not_whole(
    changes: dict[str, Any], blocks: list[int]
) -> None:
    plan = planner()
    plan.began([scheduled()])
    assert plan.ended(request(**changes), blocks, BLOCK) is None
    assert plan.take_orders() == []
    assert plan.ended(request(), [7, 8, 9], BLOCK) is None, "it has ended"


def test_client_names_a_path_only_where_the_server_lets_it() -> None:
    wish = {"hidden_states_path": "/mine"}
    assert planner().began([scheduled(params=wish)]) == {"r": "/states/r.safetensors"}
    assert planner(takes=True).began([scheduled(params=wish)]) == {"r": "/mine"}
    for nonsense in ({"hidden_states_path": 5}, {"hidden_states_path": ""}, "text", 7):
        assert planner(takes=True).began([scheduled(params=nonsense)]) == {
            "r": "/states/r.safetensors"
        }
    assert planner("").began([scheduled()]) == {}


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "a/b", "a\0b", ".", "x" * 5000])
def test_file_stays_in_its_folder_whatever_a_request_is_called(name: str, tmp_path: Path) -> None:
    made = hidden_states.file_name(name)
    assert (tmp_path / made).resolve().parent == tmp_path.resolve()
    os.close(promise(str(tmp_path / made)))
    assert hidden_states.file_name(name + "y") != made


class Line:
    """In place of the worker that sends captures to the NodeActor."""

    def __init__(self) -> None:
        self.namespace = "model"
        self.jobs: list[JobRequest] = []
        self.is_broken = False

    def submit_capture(self, job: JobRequest) -> None:
        if self.is_broken:
            raise RuntimeError("planted")
        self.jobs.append(job)


def worker(*, is_writer: bool = True) -> Any:
    form = Capture("", b"", 3, 8, "float32", BLOCK, [24, 8, 1], 1 << 20, 60.0, layer=2)
    return hidden_states.StatesWorker(Settings(), 0, form, is_writer=is_writer)


def order(path: str) -> Any:
    return hidden_states.StatesOrder("r", path, np.arange(3, dtype="<i8").tobytes(), [5])


def test_blocks_are_free_when_the_capture_has_ended_and_not_before(tmp_path: Path) -> None:
    path, states, line = str(tmp_path / "r.safetensors"), worker(), Line()
    states.promise({"r": path})
    states.submit(line, order(path))
    assert states.finish({"r"}) == set()
    (job,) = line.jobs
    capture = job.job.capture
    assert capture is not None
    assert (capture.path, capture.has_lock, capture.layer) == (path, True, 2)
    states.take_results([CopyResult(job.job_id, 1, 1, num_bytes=96)])
    assert states.finish(set()) == {"r"}
    assert states.finish(set()) == set()


def test_capture_that_failed_frees_the_blocks_and_the_reader_hears_why(tmp_path: Path) -> None:
    path, states, line = str(tmp_path / "r.safetensors"), worker(), Line()
    states.promise({"r": path})
    states.submit(line, order(path))
    (job,) = line.jobs
    refusals = bytes([Refusal.NODE_LOST])
    lost = CopyResult(job.job_id, 0, 0, failed_chunks=Numbers.of([0]), refusals=refusals)
    states.take_results([lost])
    assert states.finish(set()) == {"r"}
    with pytest.raises(HiddenStatesError, match="node_lost"):
        load_hidden_states(path, 5.0)


@pytest.mark.expects_failures
@pytest.mark.parametrize("line", [None, "broken"])
def test_capture_that_can_not_be_asked_for_frees_the_blocks(
    tmp_path: Path, line: str | None
) -> None:
    path, states = str(tmp_path / "r.safetensors"), worker()
    broken = Line()
    broken.is_broken = True
    states.promise({"r": path})
    states.submit(None if line is None else broken, order(path))
    assert states.finish({"r"}) == {"r"}
    with pytest.raises(HiddenStatesError, match="could not be asked for"):
        load_hidden_states(path, 5.0)


def test_request_that_was_taken_back_leaves_no_lock_behind(tmp_path: Path) -> None:
    path, states = str(tmp_path / "r.safetensors"), worker()
    states.promise({"r": path})
    assert states.finish({"r"}) == set(), "its blocks are free already"
    with pytest.raises(HiddenStatesError, match="taken back"):
        load_hidden_states(path, 5.0)


def test_path_that_can_not_be_written_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states, line = worker(), Line()
    states.promise({"r": str(tmp_path / "file" / "r"), "s": "no\0path"})
    states.submit(line, order(str(tmp_path / "file" / "r")))
    (job,) = line.jobs
    assert job.job.capture is not None
    assert (job.job.capture.path, job.job.capture.has_lock, job.lock_fd) == ("", False, -1)


def test_ranks_that_do_not_write_free_the_blocks_at_once(tmp_path: Path) -> None:
    path, states, line = str(tmp_path / "r.safetensors"), worker(is_writer=False), Line()
    states.promise({"r": path})
    states.submit(line, order(path))
    assert states.finish({"r"}) == {"r"}
    assert line.jobs == []
    assert list(tmp_path.iterdir()) == []


def test_end_of_the_engine_leaves_it_to_the_node_to_say_what_became_of_its_captures(
    tmp_path: Path,
) -> None:
    states, line = worker(), Line()
    paths = {name: str(tmp_path / name) for name in "rs"}
    states.promise(paths)
    states.submit(line, order(paths["r"]))
    states.close()
    with pytest.raises(HiddenStatesError, match="died"):
        load_hidden_states(paths["r"], 5.0)
    with pytest.raises(HiddenStatesError, match="engine has ended"):
        load_hidden_states(paths["s"], 5.0)


def group(*names: str) -> Any:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=SimpleNamespace())


def test_layer_with_the_states_is_found_alone_and_among_others() -> None:
    states = "model.cache_only_layers.4"
    alone = SimpleNamespace(kv_cache_groups=[group("a", "b"), group(states)])
    found = hidden_states.states_layer(alone)
    assert (found.group_id, found.index, found.name) == (1, 0, states)
    among = group("a", states)
    among.kv_cache_spec.kv_cache_specs = {"a": 1, states: 2}
    found = hidden_states.states_layer(SimpleNamespace(kv_cache_groups=[among]))
    assert (found.group_id, found.index, found.spec) == (0, 1, 2)
    with pytest.raises(SettingError, match="has 0"):
        hidden_states.states_layer(SimpleNamespace(kv_cache_groups=[group("a")]))


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_other_methods_stop_the_start(method: str | None) -> None:
    config = None if method is None else SimpleNamespace(method=method)
    with pytest.raises(SettingError, match="extract_hidden_states"):
        hidden_states.refuse_other_methods(config)


def test_states_of_other_layers_are_another_namespace() -> None:
    def facts(*layers: int) -> Any:
        config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(layers))
        draft = SimpleNamespace(hf_config=config)
        told = SimpleNamespace(method="extract_hidden_states", draft_model_config=draft)
        engine: Any = SimpleNamespace(vllm=SimpleNamespace(speculative_config=told))
        return readers.draft(engine)

    assert facts(1, 2) != facts(1, 3)
    assert facts(1, 2) == facts(1, 2)
    nothing: Any = SimpleNamespace(vllm=SimpleNamespace(speculative_config=None))
    assert readers.draft(nothing) is None


def test_request_whose_load_is_under_way_is_not_captured() -> None:
    connector: Any = hidden_states.RayKVHiddenStatesConnector.__new__(
        hidden_states.RayKVHiddenStatesConnector
    )
    connector._planner = planner()
    connector._runtime = None
    connector._layer = SimpleNamespace(spec=SimpleNamespace(block_size=BLOCK))
    status = SimpleNamespace(transfer_jobs={1, 2})
    jobs = {1: SimpleNamespace(is_store=True), 2: SimpleNamespace(is_store=False)}
    connector.connector_scheduler = SimpleNamespace(_req_status={"r": status}, _jobs=jobs)
    connector._planner.began([scheduled()])
    assert connector._answer_of(request(), [7, 8, 9]) is None
    connector._planner.began([scheduled()])
    del jobs[2]
    assert connector._answer_of(request(), [7, 8, 9]) == {
        "hidden_states_request": "r",
        "hidden_states_path": "/states/r.safetensors",
    }
