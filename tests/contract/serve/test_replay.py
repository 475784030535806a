"""vLLM's own front end of an engine that goes on with an answer; the engine itself is played."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from copy import copy
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from raykv.vllm.internals import replay
from raykv.vllm.internals.replay import continue_answers
from raykv.vllm.transcript import CURRENT, Delta, Transcript, why_not
from tests.fixtures.tiny_tokenizer import write_tiny_tokenizer

PROMPT = "Once upon a time"
ANSWER = "there was a käse, 象, and\nthe END of it"
CACHED = 5, 3
"""Tokens of the prompt that vLLM had, and that it has kept."""


class Core:
    """In the place of the process with the engine: makes the rest of `answer`, so many tokens a
    step; `stop`: its last token ends it, of itself (None) or as the request says.
    """

    def __init__(self, answer: Sequence[int], by: int, stop: int | None = 0) -> None:
        self.answer = answer
        self.by = by
        self.stop = stop
        self.asked: list[Any] = []
        self.processor: Any = None

    async def add_request_async(self, request: Any) -> None:
        self.asked.append(copy(request))
        made = len(request.prompt_token_ids) - len(PROMPT.encode())
        left = list(self.answer[made : made + request.sampling_params.max_tokens])
        # watched: each test reads the answer to its end
        self.task = asyncio.create_task(self._make(request.request_id, left))

    async def _make(self, request_id: str, left: list[int]) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.metrics.stats import PrefillStats

        stats = PrefillStats()
        stats.num_cached_tokens, stats.num_cache_creation_tokens = CACHED
        while left and self.processor.has_request(request_id):
            some, left = left[: self.by], left[self.by :]
            ended = FinishReason.LENGTH if self.stop == 0 else FinishReason.STOP
            made = EngineCoreOutput(
                request_id,
                some,
                finish_reason=None if left else ended,
                stop_reason=None if left or self.stop == 0 else self.stop,
                prefill_stats=stats,
            )
            self.processor.process_outputs([made])
            await asyncio.sleep(0)


class Engine:
    """As much of `AsyncLLM` as makes an answer: its `generate`, `_add_request` and processor."""

    log_requests = False

    def __init__(self, tokenizer: Any, core: Core, **config: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import OutputProcessor

        self.errored = False
        model = SimpleNamespace(logits_processors=config.pop("logits_processors", None))
        settings = {"watermark_config": None, "model_config": model, **config}
        self.vllm_config = SimpleNamespace(**settings)
        self.output_processor = core.processor = OutputProcessor(tokenizer, log_stats=False)
        self.engine_core = core
        self.generate = MethodType(AsyncLLM.generate, self)
        self._add_request = MethodType(AsyncLLM._add_request, self)
        self._tokenizer = tokenizer
        continue_answers(self)

    embeddings: Any = None

    def check_admission(self, **_request: Any) -> None:
        """There is always room."""

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.output_processor.abort_requests([request_id], internal=internal)

    async def add_request(self, request_id: str, prompt: str, params: Any, **_more: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        tokens = self._tokenizer.encode(prompt)
        request = EngineCoreRequest(
            request_id,
            tokens,
            None,
            params,
            None,
            0.0,
            None,
            None,
            None,
            prompt_embeds=self.embeddings,
            external_req_id="x",
        )
        queue = RequestOutputCollector(params.output_kind, request_id)
        await self._add_request(request, prompt, None, 0, queue)
        return queue


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path_factory.mktemp("tokens")))


async def outputs_of(
    engine: Any, transcript: Transcript | None = None, **params: Any
) -> list[tuple[str, list[int], tuple[Any, Any], Any]]:
    """What the front end reads: text, tokens, why it ends, cached tokens of the prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    asked = {"max_tokens": 200, "output_kind": RequestOutputKind.DELTA, "temperature": 0, **params}
    CURRENT.set(transcript)
    outputs: AsyncGenerator[Any, None] = engine.generate(PROMPT, SamplingParams(**asked), "r")
    seen = []
    async for output in outputs:
        (made,) = output.outputs
        ids = list(made.token_ids)
        ended = made.finish_reason, made.stop_reason
        cached = output.num_cached_tokens, output.num_cache_creation_tokens
        seen.append((made.text, ids, ended, cached))
        assert output.prompt_token_ids == engine._tokenizer.encode(PROMPT)
    return seen


def final_only() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return {"output_kind": RequestOutputKind.FINAL_ONLY}


CASES: list[dict[str, Any]] = [
    {},
    {"stop": ["END"]},
    {"stop": ["\nthe"], "include_stop_str_in_output": True},
    {"max_tokens": 20, "min_tokens": 12},
    {"stream_interval": 3},
    {"repetition_penalty": 1.2},
]


@pytest.mark.parametrize("stop", [0, None, 9])
@pytest.mark.parametrize("by", [1, 3])
@pytest.mark.parametrize("params", CASES, ids=str)
async def test_front_end_reads_the_same_wherever_the_engine_was_left(
    tokenizer: Any, params: dict[str, Any], by: int, stop: int | None
) -> None:
    """After each delta: in a word, in a letter of several tokens, in a stop string, at the end."""
    answer = tokenizer.encode(ANSWER)
    transcript = Transcript()
    whole = await outputs_of(Engine(tokenizer, Core(answer, by, stop)), transcript, **params)
    deltas = transcript.taken()
    assert [list(delta.token_ids) for delta in deltas] == [tokens for _, tokens, _, _ in whole]
    for num_known in range(1, len(deltas) + 1):
        core, known = Core(answer, by, stop), deltas[:num_known]
        again = Transcript(known)
        seen = await outputs_of(Engine(tokenizer, core), again, **params)
        assert [each[:3] for each in seen] == [each[:3] for each in whole]
        num_tokens = sum(len(delta.token_ids) for delta in known)
        assert again.taken() == deltas[num_known:]
        if num_known == len(deltas):
            assert core.asked == [], "nothing is left to make"
            continue
        assert {cached for *_, cached in seen} == {CACHED}
        (asked,) = core.asked
        assert asked.prompt_token_ids == tokenizer.encode(PROMPT) + answer[:num_tokens]
        most, least = params.get("max_tokens", 200), params.get("min_tokens", 0)
        assert asked.sampling_params.max_tokens == most - num_tokens
        assert asked.sampling_params.min_tokens == max(0, least - num_tokens)


@pytest.mark.parametrize("params", [{}, {"stop": ["END"]}], ids=str)
async def test_answer_that_is_read_at_once_is_told_in_between(
    tokenizer: Any, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "TOGETHER", 4)
    answer, transcript = tokenizer.encode(ANSWER), Transcript()
    params = {**params, **final_only()}
    (plain,) = await outputs_of(Engine(tokenizer, Core(answer, 2)), None, **params)
    (whole,) = await outputs_of(Engine(tokenizer, Core(answer, 2)), transcript, **params)
    assert whole == plain
    deltas = transcript.taken()
    assert len(deltas) > 5
    (seen,) = await outputs_of(Engine(tokenizer, Core(answer, 2)), Transcript(deltas[:4]), **params)
    assert seen[:3] == whole[:3]


async def test_client_that_leaves_while_the_engine_goes_on_takes_its_request_along(
    tokenizer: Any,
) -> None:
    core = Core([], 1)
    engine = Engine(tokenizer, core)
    task = asyncio.create_task(outputs_of(engine, Transcript([Delta((8, 9))])))
    while not core.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.output_processor.has_request("r")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": 0.7, "n": 2}, "because of n"),
        ({"temperature": 0.7, "seed": 3, "logprobs": 1}, "because of logprobs, seed"),
        ({"presence_penalty": 0.5}, "because of presence_penalty"),
        ({"frequency_penalty": 0.5}, "because of frequency_penalty"),
        ({"prompt_logprobs": 1}, "because of prompt_logprobs"),
        ({"bad_words": ["x y"]}, "because of bad_words"),
        ({"extra_args": {"of": "another sampler"}}, "because of extra_args"),
        ({"seed": 3}, ""),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, ""),
        ({"stop": ["x"], "max_tokens": 5, "ignore_eos": True, "logit_bias": {3: 1.0}}, ""),
    ],
    ids=str,
)
async def test_what_one_engine_has_to_make_alone_is_said_at_the_start(
    params: dict[str, Any], said: str
) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    params = {"temperature": 0, **params}
    assert why_not(SamplingParams(**params)).endswith(said)
    assert bool(why_not(SamplingParams(**params))) is bool(said)
    guided = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x+"), **params)
    assert "structured_outputs" in why_not(guided)


async def test_what_has_to_be_made_by_one_engine_is_made_but_not_gone_on_with(
    tokenizer: Any,
) -> None:
    from vllm.exceptions import VLLMValidationError

    answer, transcript = tokenizer.encode(ANSWER), Transcript()
    core = Core(answer, 1)
    seen = await outputs_of(Engine(tokenizer, core), transcript, presence_penalty=0.5)
    assert "".join(text for text, *_ in seen) == ANSWER
    assert (transcript.taken(), "presence_penalty" in transcript.why_not) == ((), True)
    core = Core(answer, 1)
    with pytest.raises(VLLMValidationError, match=r"go on here: .*presence_penalty"):
        await outputs_of(Engine(tokenizer, core), Transcript([Delta((8,))]), presence_penalty=0.5)
    assert core.asked == []


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_prompt_of_embeddings_is_told_at_the_start_and_refused_behind_known_tokens(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, has_tokens: bool
) -> None:
    """Some chats have both: tokens, and embeddings in the place of some."""
    import torch
    from vllm.exceptions import VLLMValidationError

    core = Core(tokenizer.encode(ANSWER), 1)
    engine = Engine(tokenizer, core)
    if has_tokens:
        engine.embeddings = torch.zeros(len(tokenizer.encode(PROMPT)), 4)
    else:
        monkeypatch.setattr(tokenizer, "encode", lambda _prompt: None)
    transcript = Transcript()
    asked = asyncio.create_task(outputs_of(engine, transcript))
    await asyncio.wait([asked])
    assert transcript.why_not == "its prompt has embeddings"
    with pytest.raises(VLLMValidationError, match="embeddings"):
        await outputs_of(engine, Transcript([Delta((8,))]))


@pytest.mark.parametrize(
    ("state", "least_s", "num_asked"),
    [("paused", 0.0, 1), ("lives", 0.0, replay._ALIVE), ("ends", 0.6, 1), ("hangs", 0.3, 1)],
)
async def test_answer_that_an_engine_gives_up_as_it_ends_is_no_answer_before_its_process_could_end(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, state: str, least_s: float, num_asked: int
) -> None:
    """SIGTERM: vLLM's engine aborts its requests, answers no more, then ends."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.001)
    monkeypatch.setattr("raykv.base.deadlines.PROMPT_S", 0.3)
    monkeypatch.setattr("raykv.base.deadlines.JOIN_S", 0.1 if state == "hangs" else 20.0)
    monkeypatch.setattr("raykv.base.deadlines.LEAVE_S", 0.3)

    class Aborting(Core):
        async def add_request_async(self, request: Any) -> None:
            aborted = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self.processor.process_outputs([aborted])

    class Ending(Engine):
        num_asked = 0

        async def is_paused(self) -> bool:
            self.num_asked += 1
            self.errored = state == "ends"
            if state in ("ends", "hangs"):
                await asyncio.Event().wait()
            return state == "paused"

    transcript = Transcript()
    engine = Ending(tokenizer, Aborting([], 1))
    begun = time.monotonic()
    ((_, _, ended, _),) = await outputs_of(engine, transcript)
    assert time.monotonic() - begun >= least_s
    assert engine.num_asked == num_asked
    assert ended == ("abort", None)
    assert transcript.taken() == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"watermark_config": object()}, "marks its answers"),
        ({"logits_processors": ["some.Processor"]}, "logits processors of its own"),
        ({"plugins": ["some plugin"]}, "logits processors of its own"),
    ],
)
async def test_what_a_server_does_to_all_answers_may_keep_them_from_being_continued(
    tokenizer: Any, config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = config.pop("plugins", [])
    monkeypatch.setattr(replay, "entry_points", lambda **_group: plugins)
    transcript = Transcript()
    await outputs_of(Engine(tokenizer, Core(tokenizer.encode("x"), 1), **config), transcript)
    assert said in transcript.why_not


async def test_no_span_is_made_of_what_another_engine_has_made(tokenizer: Any) -> None:
    transcript = Transcript()
    answer = tokenizer.encode(ANSWER)
    await outputs_of(Engine(tokenizer, Core(answer, 3)), transcript)
    engine = Engine(tokenizer, Core([], 1))
    engine.output_processor.tracing_enabled = True
    seen = await outputs_of(engine, Transcript(transcript.taken()))
    assert "".join(text for text, *_ in seen) == ANSWER
    assert engine.output_processor.tracing_enabled


async def test_known_tokens_are_read_with_pauses_for_other_requests(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves in one of them leaves nothing in the front end."""
    monkeypatch.setattr(replay, "TOGETHER", 1)
    core = Core([], 1)
    engine = Engine(tokenizer, core)
    known = [Delta((8,))] * 50
    task = asyncio.create_task(outputs_of(engine, Transcript(known)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.output_processor.has_request("r")
    assert core.asked == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.output_processor.has_request("r")


async def test_engine_that_has_died_is_not_read_as_an_error_before_its_process_could_end(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    monkeypatch.setattr("raykv.base.deadlines.LEAVE_S", 0.2)

    class Dying(Core):
        async def add_request_async(self, request: Any) -> None:
            engine.errored = True
            self.processor.propagate_error(EngineDeadError())

    engine = Engine(tokenizer, Dying([], 1))
    begun = time.monotonic()
    with pytest.raises(EngineDeadError):
        await outputs_of(engine, Transcript())
    assert time.monotonic() - begun >= 0.2


async def test_every_other_parameter_of_vllms_has_been_judged() -> None:
    """A new one is refused until somebody has seen that it means the same behind known tokens."""
    from vllm.sampling_params import SamplingParams

    judged = {
        "_bad_words_token_ids",
        "bad_words",
        "flat_logprobs",
        "frequency_penalty",
        "logprob_token_ids",
        "logprobs",
        "n",
        "presence_penalty",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "routed_experts_prompt_start",
        "seed",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
        "watermarking",
    }
    fields = SamplingParams.__struct_fields__
    assert {name for name in fields if refuses(name)} == judged


def refuses(name: str) -> bool:
    """Whether an answer with an unusual value of that parameter is one engine's."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.5)
    ours = {"kv_transfer_params": {"raykv_session": "s"}}
    values: dict[str, Any] = {"extra_args": ours, "temperature": 0.7}
    setattr(params, name, values.get(name, "unusual"))
    return bool(why_not(params))


async def test_second_answer_of_an_engine_for_one_request_is_not_gone_on_with(
    tokenizer: Any,
) -> None:
    transcript = Transcript()
    engine = Engine(tokenizer, Core(tokenizer.encode(ANSWER), 1))
    await outputs_of(engine, transcript)
    assert not transcript.why_not
    await outputs_of(engine, transcript)
    assert "more than one answer" in transcript.why_not


def test_engine_of_an_unknown_kind_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        generate = "its own"

    other = Other()
    continue_answers(other)
    assert other.generate == "its own"
    assert "_add_request" in caplog.text
