"""vLLM's whole front end and engine in this process: what another replica begins, this one ends."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.serve.http.answer import ContinuedAnswer
from raykv.serve.http.exchange import CHAT, COMPLETIONS, Head, HttpRequest, MadePiece, drive, whole
from raykv.vllm.transcript import Delta
from tests.fixtures.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM leaves its engine's sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore:[Uu]nclosed:ResourceWarning"),
]

TOKENS = 40
GREEDY = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "All happy families"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class FrontEnd:
    """vLLM's, and the engine behind it, which can be told what it makes."""

    app: Any
    engine: Any

    def posted(self, path: str, asked: dict[str, Any]) -> HttpRequest:
        headers = [(b"content-type", b"application/json")]
        return HttpRequest("POST", path, b"", headers, json.dumps({**GREEDY, **asked}).encode())

    async def pieces(self, request: HttpRequest) -> list[Any]:
        return [piece async for piece in drive(self.app, request)]

    @contextmanager
    def making(self, text: str) -> Iterator[None]:
        """The engine makes this text behind the prompt that it is asked first; a token a step."""
        tokens = self.engine.renderer.get_tokenizer().encode(f"{text}</s>")
        core = self.engine.engine_core
        was = core.add_request_async
        num_prompt: list[int] = []

        async def add(request: Any) -> None:
            # The first one knows nothing of the answer.
            num_prompt.append(len(request.prompt_token_ids))
            left = tokens[num_prompt[-1] - num_prompt[0] :]
            # watched: each test reads the answer to its end
            self.task = asyncio.create_task(self._make(request.request_id, left))

        core.add_request_async = add
        try:
            yield
        finally:
            core.add_request_async = was

    async def _make(self, request_id: str, left: list[int]) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        while left:
            reason = FinishReason.STOP if len(left) == 1 else None
            made = EngineCoreOutput(request_id, left[:1], finish_reason=reason)
            self.engine.output_processor.process_outputs([made])
            left = left[1:]
            await asyncio.sleep(0.002)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front_end(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontEnd]:
    from transformers import AutoTokenizer

    from raykv.serve.vllm_app import start

    model = tiny_llama(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB_SIZE + 8)
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_tokenizer(model))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(model)
    flags = [str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    flags += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(32 << 20)]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    flags += ["--reasoning-parser", "deepseek_r1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        async with AsyncExitStack() as stack:
            engine, app = await start(flags, stack)
            yield FrontEnd(app, engine)
    del engine, app
    gc.collect()


CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "All happy families", **STREAM}),
    (COMPLETIONS, {"prompt": "All happy families", "echo": True, **STREAM}),
    (COMPLETIONS, {"prompt": "All happy families"}),
    (CHAT, {"messages": MESSAGES, **STREAM}),
    (CHAT, {"messages": MESSAGES}),
]


@pytest.mark.parametrize(("path", "asked"), CASES)
async def test_answer_is_the_same_wherever_its_replica_has_died(
    front_end: FrontEnd, path: str, asked: dict[str, Any]
) -> None:
    await check_same(front_end, path, asked, every=7)


@pytest.mark.parametrize("kind", [STREAM, {}], ids=["stream", "whole"])
async def test_parsers_read_on_where_they_were(front_end: FrontEnd, kind: dict[str, Any]) -> None:
    """In what the model thinks, in its end, in a call of a tool, in its arguments."""
    asked = {"messages": MESSAGES, "tools": TOOLS, **kind}
    with front_end.making("<think>why</think>[look(at='x', by=1)]"):
        told = await check_same(front_end, CHAT, asked, every=1)
    text = json.dumps(told)
    assert '"name": "look"' in text
    assert '"tool_calls"' in text
    assert "reasoning" in text


async def check_same(
    front_end: FrontEnd, path: str, asked: dict[str, Any], every: int
) -> list[Any]:
    """An answer is what it is without a fault, wherever it is cut; returns what it says."""
    request = front_end.posted(path, asked)
    made = await front_end.pieces(request)
    expected = text_of(passed_on(ContinuedAnswer(request), made))
    deltas = [delta for piece in made if isinstance(piece, MadePiece) for delta in piece.deltas]
    if "stream" in asked:
        cuts = [made[:died_after] for died_after in range(1, len(made), every)]
    else:
        # Told with signs of life, before there is a head.
        cuts = [[MadePiece(b"", deltas[:known], "")] for known in range(1, len(deltas))]
    assert cuts
    for cut in cuts:
        answer = ContinuedAnswer(request)
        seen = passed_on(answer, cut, is_whole=False)
        seen += passed_on(answer, await front_end.pieces(answer.again()))
        assert text_of(seen) == expected, (asked, cut)
    return expected


def passed_on(answer: ContinuedAnswer, pieces: list[Any], is_whole: bool = True) -> list[Any]:
    passed = [each for piece in pieces for each in answer.heard(piece)]
    return [*passed, *answer.ended()] if is_whole else passed


def text_of(pieces: list[Any]) -> list[Any]:
    """The status, then what each event says; the id and the time are those of the first."""
    head, *bodies = pieces
    assert isinstance(head, Head)
    told: list[Any] = []
    ids = set()
    for event in b"".join(bodies).split(b"\n\n"):
        text = event.removeprefix(b"data: ")
        if not text.startswith(b"{"):
            told.append(text.decode())
            continue
        body = json.loads(text)
        ids.add((body.pop("id"), body.pop("created")))
        told.append(without_chance(body))
    assert len(ids) == 1
    return [head.status, *told]


def without_chance(said: Any) -> Any:
    """Without ids of calls, which vLLM draws, and where the prompt's tokens came from."""
    if isinstance(said, list):
        return [without_chance(each) for each in said]
    if not isinstance(said, dict):
        return said
    left = {"id", "prompt_tokens_details"}
    return {name: without_chance(value) for name, value in said.items() if name not in left}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": ["All happy", "families"]}, "more than one answer"),
        ({"prompt": "x", "n": 2, "temperature": 0.7}, "because of n"),
    ],
)
async def test_what_is_several_answers_says_that_it_can_not_go_on(
    front_end: FrontEnd, asked: dict[str, Any], said: str
) -> None:
    request = front_end.posted(COMPLETIONS, {**asked, **STREAM})
    told = [each for each in await front_end.pieces(request) if isinstance(each, MadePiece)]
    assert said in told[-1].why_not


async def test_replica_that_can_not_go_on_refuses(front_end: FrontEnd) -> None:
    request = front_end.posted(CHAT, {"messages": MESSAGES, "presence_penalty": 0.5})
    head, said = await whole(drive(front_end.app, replace(request, known=[Delta((8, 9))])))
    assert head.status == 400
    assert b"because of presence_penalty" in said
