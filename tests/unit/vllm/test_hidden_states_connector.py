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


@pytest.mark.parametrize(
    ("params", "num_tokens"), [(None, 10), ({"include_output_tokens": True}, 12)], ids=str
)
def test_states_of_the_tokens_that_are_asked_for_are_ordered_when_a_request_has_ended(
    params: dict[str, bool] | None, num_tokens: int
) -> None:
    """Of the last token that was generated there are none."""
    plan, ended = planner(), request(kv_transfer_params=params)
    assert plan.began([scheduled()]) == {"r": "/states/r.safetensors"}
    assert plan.ended(ended, [7, 8, 9, 3], BLOCK) == "/states/r.safetensors"
    (order,) = plan.take_orders()
    assert (tokens(order), order.block_ids) == (list(range(num_tokens)), [7, 8, 9])
    assert plan.take_orders() == []
    assert plan.ended(ended, [7, 8, 9, 3], BLOCK) is None


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


class Promised:
    """A worker that has promised the file of the request "r"."""

    def __init__(self, folder: Path, *, is_writer: bool = True) -> None:
        self.path, self.line = str(folder / "r.safetensors"), Line()
        self.states = worker(is_writer=is_writer)
        self.states.promise({"r": self.path})

    def submit(self) -> None:
        self.states.submit(self.line, order(self.path))

    def assert_reader_hears(self, why: str) -> None:
        with pytest.raises(HiddenStatesError, match=why):
            load_hidden_states(self.path, 5.0)


def test_blocks_are_free_when_the_capture_has_ended_and_not_before(tmp_path: Path) -> None:
    promised = Promised(tmp_path)
    promised.submit()
    states = promised.states
    assert states.finish({"r"}) == set()
    (job,) = promised.line.jobs
    capture = job.job.capture
    assert capture is not None
    assert (capture.path, capture.has_lock, capture.layer) == (promised.path, True, 2)
    states.take_results({"r": CopyResult(job.job_id, 1, 1, num_bytes=96)})
    assert states.finish(set()) == {"r"}
    assert states.finish(set()) == set()


def test_capture_that_failed_frees_the_blocks_and_the_reader_hears_why(tmp_path: Path) -> None:
    promised = Promised(tmp_path)
    promised.submit()
    (job,) = promised.line.jobs
    refusals = bytes([Refusal.NODE_LOST])
    lost = CopyResult(job.job_id, 0, 0, failed_chunks=Numbers.of([0]), refusals=refusals)
    promised.states.take_results({"r": lost})
    assert promised.states.finish({"r"}) == {"r"}
    promised.assert_reader_hears("node_lost")


@pytest.mark.expects_failures
@pytest.mark.parametrize("has_line", [True, False])
def test_capture_that_can_not_be_asked_for_frees_the_blocks(tmp_path: Path, has_line: bool) -> None:
    promised = Promised(tmp_path)
    promised.line.is_broken = True
    promised.states.submit(promised.line if has_line else None, order(promised.path))
    assert promised.states.finish({"r"}) == {"r"}
    promised.assert_reader_hears("could not be asked for")


def test_request_that_was_taken_back_leaves_no_lock_behind(tmp_path: Path) -> None:
    promised = Promised(tmp_path)
    assert promised.states.finish({"r"}) == set(), "its blocks are free already"
    promised.assert_reader_hears("taken back")


def test_path_that_can_not_be_written_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states, line = worker(), Line()
    states.promise({"r": str(tmp_path / "file" / "r"), "s": "no\0path"})
    states.submit(line, order(str(tmp_path / "file" / "r")))
    (job,) = line.jobs
    assert job.job.capture is not None
    assert (job.job.capture.path, job.job.capture.has_lock, job.lock_fd) == ("", False, -1)


def test_ranks_that_do_not_write_free_the_blocks_at_once(tmp_path: Path) -> None:
    promised = Promised(tmp_path, is_writer=False)
    promised.submit()
    assert promised.states.finish({"r"}) == {"r"}
    assert promised.line.jobs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("is_captured", "why"), [(True, "died"), (False, "engine has ended")], ids=str
)
def test_end_of_the_engine_leaves_it_to_the_node_to_say_what_became_of_its_captures(
    tmp_path: Path, is_captured: bool, why: str
) -> None:
    promised = Promised(tmp_path)
    if is_captured:
        promised.submit()
    promised.states.close()
    promised.assert_reader_hears(why)


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
