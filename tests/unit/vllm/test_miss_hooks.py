"""The connector's hooks with vLLM's own offloading scheduler between them and the view."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.output import SchedulerOutput

from raykv.protocol.engine import MissRecord
from raykv.vllm.identity import media
from tests.fixtures.vllm import CHUNK, NUM_PROMPT, Engine, PlayedRequest, key


def loading(*chunks: int) -> tuple[Engine, PlayedRequest]:
    """A request has begun to load these first chunks of its prompt."""
    engine, request = Engine(), PlayedRequest()
    engine.hold(*chunks)
    engine.begin(request)
    assert engine.schedule(request) == len(chunks) * CHUNK
    return engine, request


def test_prompt_that_is_cached_loaded_and_computed_in_parts() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(1, 2, 4)
    engine.begin(request)
    assert engine.schedule(request, own=CHUNK) == 2 * CHUNK
    engine.end_load(request)
    engine.schedule(request)
    missed = {"incomplete_chunk": 3, "never_stored": 2 * CHUNK}
    names = b"".join(key(at)[:8] for at in range(5))
    assert engine.finish(request) == MissRecord(
        "r", NUM_PROMPT, CHUNK, 2 * CHUNK, missed, key(3), names, CHUNK
    )


def test_request_that_waits_has_what_it_has_found_told_again() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(0, 1)
    engine.begin(request)
    assert list(engine.view.found.take().keys) == [key(0), key(1)]
    engine.view.requests.get("r").touch_at = 0.0
    engine.connector.get_num_new_matched_tokens(request, 0)
    assert list(engine.view.found.take().keys) == [key(0), key(1)]


def test_step_is_vllms_own_and_stays_as_it_was_scheduled() -> None:
    """Other connectors, and the scheduler itself, read it afterwards."""
    engine, _ = loading(0, 1)
    assert engine.connector.build_connector_meta(SchedulerOutput.make_empty()).load_jobs
    step = SchedulerOutput.make_empty()
    step.preempted_req_ids = {"r", "somebody's"}
    step.finished_req_ids = {"another one's"}
    before = deepcopy(step)
    engine.connector.build_connector_meta(step)
    assert step == before


@pytest.mark.parametrize(
    ("failed", "missed"),
    [
        (1, {"incomplete_chunk": 3, "load_failed": 2 * CHUNK, "never_stored": 2 * CHUNK}),
        (0, {"incomplete_chunk": 3, "load_failed": 5 * CHUNK}),
    ],
    ids=["in part", "as a whole"],
)
def test_load_that_failed_is_computed_from_there_on_for_that_reason(
    failed: int, missed: dict[str, int]
) -> None:
    engine, request = loading(0, 1, 2)
    engine.end_load(request, failed)
    request.num_computed_tokens = failed * CHUNK
    assert engine.schedule(request) == 0
    record = engine.finish(request)
    assert (record.own, record.loaded, record.missed) == (0, failed * CHUNK, missed)
    assert record.missing == key(0 if not failed else 3)


@pytest.mark.expects_failures
def test_hook_that_fails_while_it_loads_is_named_as_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, request = Engine(), PlayedRequest()
    engine.hold(0, 1)
    engine.begin(request)

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.connector.connector_scheduler, "update_state_after_alloc", fail)
    assert engine.schedule(request) == 2 * CHUNK
    assert engine.connector._loading.take_stranded() == (["r"], [])
    # vLLM hears of it as of a load that has failed as a whole.
    request.num_computed_tokens = 0
    assert engine.schedule(request) == 0
    record = engine.finish(request)
    assert record.missed == {"incomplete_chunk": 3, "other": 2 * CHUNK, "never_stored": 3 * CHUNK}


def test_request_that_is_preempted_keeps_its_first_account() -> None:
    engine, request = Engine(), PlayedRequest()
    engine.begin(request)
    assert engine.schedule(request, own=CHUNK) == 0
    engine.hold(1, 2, 3, 4)
    request.num_computed_tokens = 0
    assert engine.schedule(request, own=CHUNK) == 4 * CHUNK
    record = engine.finish(request)
    assert (record.own, record.loaded) == (CHUNK, 0)
    assert record.missed == {"incomplete_chunk": 3, "never_stored": 4 * CHUNK}


@pytest.mark.parametrize("salt", [None, "mine"])
def test_request_with_media_neither_loads_nor_stores_unless_they_go_by_content(
    monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    monkeypatch.setattr(media, "_is_watching", True)
    engine = Engine()
    engine.hold(0, 1, 2, 3, 4)
    for name, loads in (("cat", 0), ("0123456789abcdef" * 4, 5 * CHUNK)):
        request = PlayedRequest(mm_features=[SimpleNamespace(mm_hash=name)], cache_salt=salt)
        engine.begin(request)
        assert engine.schedule(request) == loads
        if not loads:
            assert not engine.view.prepare_store("r", [key(9)])
            missed = engine.finish(request).missed
            assert missed == {"incomplete_chunk": 3, "media_unknown": 5 * CHUNK}
            request.is_over = True


@pytest.mark.parametrize("is_barred", [False, True])
@pytest.mark.parametrize(
    ("earlier", "later"), [({}, {"raykv_load": False}), ({"raykv_load": False}, {})]
)
def test_request_with_the_id_of_an_earlier_one_has_nothing_of_its_options_and_bars(
    earlier: dict[str, Any], later: dict[str, Any], is_barred: bool
) -> None:
    """vLLM leaves ids as clients give them, if its users want that. A client who has its answer may
    ask again before a step tells the connector that the earlier request has ended.
    """
    engine = Engine()
    engine.hold(0, 1, 2)
    manager = engine.connector._manager
    assert manager is not None
    request = PlayedRequest()
    for number, params in enumerate((earlier, later)):
        request = PlayedRequest(kv_transfer_params=params)
        engine.begin(request)
        loads = engine.schedule(request)
        assert loads == (0 if params else 3 * CHUNK), number
        if loads:
            engine.end_load(request)
        if is_barred:
            manager.barred.add("r")
        if params is earlier:
            engine.finish(request)
            request.is_over = True
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"r"}
    engine.connector.build_connector_meta(output)
    assert engine.view.requests.get("r").is_known
    assert ("r" in manager.barred) == is_barred
    known = engine.connector._tables.find("r")
    assert known is not None
    assert known.request is request
