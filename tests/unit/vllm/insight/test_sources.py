"""Answers say where the tokens of their prompts came from, in every form that vLLM gives them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefillStats

from raykv.base.ids import MissReason
from raykv.engine.requests import RequestOptions
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.insight import sources
from raykv.vllm.insight.sources import SOURCES_FIELD, CountedTokens
from raykv.vllm.internals import scheduling
from raykv.vllm.misses import SOURCES_PARAM, MissReporter
from tests.fixtures.vllm import CHUNK, NUM_PROMPT, Engine, PlayedRequest

OF_ALL = {"computed": 19, "own_cache": 16, "same_node": 16, "other_node": 16, "disk": 16}


@pytest.fixture
def reporter() -> MissReporter:
    """Of an engine that is attached, alone, with the request "r"."""
    engine = Engine()
    engine.view.start_request("r", RequestOptions())
    return engine.reporter


def first(num_external: int = 0, **more: Any) -> EngineCoreOutput:
    """The request's first output, of whose prompt so many tokens came from connectors."""
    stats = PrefillStats()
    stats.set(NUM_PROMPT, 0, num_external)
    return EngineCoreOutput("r", [5], prefill_stats=stats, **more)


def step(*outputs: EngineCoreOutput) -> dict[int, EngineCoreOutputs]:
    """As it arrives in the front end."""
    return {0: EngineCoreOutputs(outputs=list(outputs))}


def told(reporter: MissReporter, output: EngineCoreOutput) -> Mapping[str, int] | None:
    """What a step's first output says."""
    reporter.tell(step(output))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(output.kv_transfer_params))
    return None if sent is None else sent.get(SOURCES_PARAM)


def admit(reporter: MissReporter, own: int = 0, loaded: int = 0) -> PlayedRequest:
    request = PlayedRequest()
    reporter.began(request)
    reporter.looks(request, own, None)
    reporter.admitted(request, loaded)
    return request


def admit_from_everywhere(reporter: MissReporter) -> PlayedRequest:
    """A chunk of the prompt is in vLLM's cache, and one in each other place."""
    request = admit(reporter, CHUNK, 3 * CHUNK)
    reporter.came_from(request, {CacheHitSource.P2P: CHUNK, CacheHitSource.DISK: CHUNK})
    return request


def finish_load(reporter: MissReporter, request: PlayedRequest, came: int) -> None:
    request.num_computed_tokens = CHUNK + came
    reporter.admitted(request, 0)


# In EngineCore


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_first_output_says_where_the_prompts_tokens_came_from(
    reporter: MissReporter, is_waited_for: bool
) -> None:
    request = admit_from_everywhere(reporter)
    if is_waited_for:
        finish_load(reporter, request, 3 * CHUNK)
    assert told(reporter, first(3 * CHUNK)) == OF_ALL
    assert sum(OF_ALL.values()) == NUM_PROMPT


def test_prompt_of_nothing_known_is_computed(reporter: MissReporter) -> None:
    admit(reporter)
    assert told(reporter, first()) == {**dict.fromkeys(OF_ALL, 0), "computed": NUM_PROMPT}


def test_tokens_that_did_not_come_are_computed(reporter: MissReporter) -> None:
    request = admit_from_everywhere(reporter)
    reporter.failed("r", MissReason.LOAD_FAILED)
    finish_load(reporter, request, CHUNK)
    said = told(reporter, first(3 * CHUNK))
    assert said is not None
    assert (said["computed"], sum(said.values())) == (NUM_PROMPT - 2 * CHUNK, NUM_PROMPT)


def test_first_output_that_is_the_last_one_says_it_too(reporter: MissReporter) -> None:
    request = admit_from_everywhere(reporter)
    finish_load(reporter, request, 3 * CHUNK)
    reporter.ended(request)
    last = first(
        3 * CHUNK, finish_reason=FinishReason.LENGTH, kv_transfer_params={"of": "another connector"}
    )
    assert told(reporter, last) == OF_ALL
    assert last.kv_transfer_params is not None
    assert last.kv_transfer_params["of"] == "another connector"


def test_later_output_says_nothing_more(reporter: MissReporter) -> None:
    request = admit_from_everywhere(reporter)
    finish_load(reporter, request, 3 * CHUNK)
    assert told(reporter, first(3 * CHUNK)) == OF_ALL
    assert not reporter.has_untold
    # It was pre-empted, and is admitted again.
    reporter.admitted(request, 0)
    assert not reporter.has_untold


def test_nothing_is_said_of_a_prompt_that_another_connector_has_loaded(
    reporter: MissReporter,
) -> None:
    admit(reporter)
    assert told(reporter, first(num_external=CHUNK)) is None


def test_request_that_ends_without_a_token_leaves_nothing(reporter: MissReporter) -> None:
    request = admit_from_everywhere(reporter)
    reporter.ended(request)
    assert reporter.has_untold
    reporter.tell(step())
    assert not reporter.has_untold


def test_step_of_vllms_scheduler_is_told_of_while_there_is_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, made = Engine(), step(first(3 * CHUNK))
    engine.view.start_request("r", RequestOptions())
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: made)
    scheduling.watch_scheduler(RayKVConnector)
    scheduler: Any = SimpleNamespace(connector=engine.connector)

    def update() -> Any:
        scheduled: Any = object()
        result: Any = None
        return Scheduler.update_from_output(scheduler, scheduled, result)

    assert update() is made
    assert made[0].outputs[0].kv_transfer_params is None
    reporter = engine.reporter
    finish_load(reporter, admit_from_everywhere(reporter), 3 * CHUNK)
    assert update() is made
    assert made[0].outputs[0].kv_transfer_params == {SOURCES_PARAM: OF_ALL}


# In the front end


@pytest.fixture
def front_end() -> OutputProcessor:
    """vLLM's, with the request "r" whose answer comes at its end or in pieces."""
    sources._watch_answers()
    return OutputProcessor(None, log_stats=False)


def ask(front_end: OutputProcessor, kind: RequestOutputKind) -> None:
    params = SamplingParams(max_tokens=2, output_kind=kind, detokenize=False)
    names = msgspec.structs.fields(EngineCoreRequest)
    given: dict[str, Any] = dict.fromkeys((field.name for field in names if field.required), None)
    given |= {"request_id": "r", "external_req_id": "r", "prompt_token_ids": [1] * NUM_PROMPT}
    given |= {"sampling_params": params, "arrival_time": 0.0}
    front_end.add_request(EngineCoreRequest(**given), None)


def answers(front_end: OutputProcessor, *outputs: EngineCoreOutput) -> list[Any]:
    return [
        answer
        for output in outputs
        for answer in front_end.process_outputs([output]).request_outputs
    ]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_every_form_of_an_answer_has_it_in_its_usage(
    front_end: OutputProcessor, kind: RequestOutputKind
) -> None:
    ask(front_end, kind)
    made = answers(
        front_end,
        first(48, kv_transfer_params={SOURCES_PARAM: OF_ALL}),
        EngineCoreOutput("r", [6], finish_reason=FinishReason.LENGTH),
    )
    assert len(made) == (2 if kind is RequestOutputKind.DELTA else 1)
    for answer in made:
        assert answer.kv_transfer_params is None
        assert answer.num_cached_tokens == 48
        details = PromptTokenUsageInfo(cached_tokens=answer.num_cached_tokens)
        usage = UsageInfo(
            prompt_tokens=NUM_PROMPT, total_tokens=NUM_PROMPT, prompt_tokens_details=details
        )
        shown = msgspec.json.decode(usage.model_dump_json(exclude_unset=True, exclude_none=True))
        assert shown["prompt_tokens_details"] == {"cached_tokens": 48, SOURCES_FIELD: OF_ALL}


def test_what_was_answered_before_is_in_the_sources_and_not_in_the_prompts_count(
    front_end: OutputProcessor,
) -> None:
    ask(front_end, RequestOutputKind.DELTA)
    longer = {**OF_ALL, "same_node": 2 * NUM_PROMPT}
    output = first(kv_transfer_params={SOURCES_PARAM: longer})
    # Of the engine's prompt, which had the known tokens, too.
    output.prefill_stats.num_cached_tokens = 2 * NUM_PROMPT
    (answer,) = answers(front_end, output)
    assert answer.num_cached_tokens == NUM_PROMPT
    assert answer.num_cached_tokens.sources == longer


def test_params_of_other_connectors_stay_in_the_answer(front_end: OutputProcessor) -> None:
    ask(front_end, RequestOutputKind.DELTA)
    params = {SOURCES_PARAM: OF_ALL, "of": "another connector"}
    (answer,) = answers(front_end, first(kv_transfer_params=params))
    assert answer.kv_transfer_params == {"of": "another connector"}


def test_answer_of_which_nothing_was_said_is_as_vllm_makes_it(front_end: OutputProcessor) -> None:
    ask(front_end, RequestOutputKind.DELTA)
    (answer,) = answers(front_end, first(48))
    assert type(answer.num_cached_tokens) is int
    details = PromptTokenUsageInfo(cached_tokens=answer.num_cached_tokens)
    assert details.model_dump(exclude_unset=True) == {"cached_tokens": 48}


def test_count_with_its_sources_goes_from_process_to_process() -> None:
    count = pickle.loads(pickle.dumps(CountedTokens(48, OF_ALL)))
    assert (count, count.sources) == (48, OF_ALL)
    assert msgspec.json.decode(msgspec.json.encode(int(count))) == 48
