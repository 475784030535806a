"""Each kind of KV, in one engine: loads give what vLLM's own cache gives, and they do happen."""

from __future__ import annotations

import os
import signal

import pytest

from raykv.lab.bench.prompts import prompt
from raykv.protocol.descriptions import ChunkGroup, groups_text
from raykv.serve.plan import plan
from tests.e2e.zoo.conftest import StartZoo
from tests.fixtures.processes import freeze
from tests.fixtures.waiting import wait_until
from tests.fixtures.zoo import WINDOW, ZOO, kinds
from tests.fixtures.zoo_engine import BLOCK, ZooEngine

pytestmark = pytest.mark.e2e

QUICK = ("gemma3", "qwen3-next")
"""The two that differ most from a plain model; the others are played by `make test-extended`."""

DOCUMENT = 640

PLANNED = 1890
"""Tokens of a prompt behind which an answer ends in the same chunk, whatever that's size."""


@pytest.fixture(scope="module", params=kinds(ZOO, QUICK))
def engine(request: pytest.FixtureRequest, start_zoo: StartZoo) -> ZooEngine:
    return start_zoo(request.param, raykv={"step_deadline_s": 2.0})


def question(number: int, document: int = 7) -> list[int]:
    return [*prompt(document, DOCUMENT), *prompt(100 + number, 70 + 17 * number)]


def chunk_tokens(engine: ZooEngine) -> int:
    """Tokens of a chunk: linear attention makes vLLM's blocks larger."""
    return {"qwen3-next": 96, "qwen3.5": 96, "deepseek": 16}.get(engine.name, BLOCK)


def test_answer_depends_on_early_tokens(engine: ZooEngine) -> None:
    """Else no wrong KV could show: not in tokens perhaps, but in their probabilities."""
    opted_out = {"raykv_load": False, "raykv_store": False}
    tokens = question(0)
    # As far back as a model of four windows sees.
    early = DOCUMENT - 2 * WINDOW if engine.name == "mistral" else 0
    changed = [*tokens[:early], *prompt(8, 2 * BLOCK), *tokens[early + 2 * BLOCK :]]
    first, other = engine.ask(tokens, changed, params=opted_out)
    engine.process.reset()
    gaps = [abs(a - b) for a, b in zip(first["logprobs"], other["logprobs"], strict=True)]
    assert first["tokens"] != other["tokens"] or max(gaps) > 0.01


@pytest.mark.support("load")
@pytest.mark.parametrize(
    "beside", [0, *(pytest.param(beside, marks=pytest.mark.extended) for beside in (-1, 1))]
)
def test_load_gives_what_vllms_own_hit_gives(engine: ZooEngine, beside: int) -> None:
    """Around borders of chunks, and of windows."""
    chunk = chunk_tokens(engine)
    for length in (2 * WINDOW + beside, 4 * chunk + beside):
        cached = engine.check_load(prompt(1000 * chunk + length, length))
        # Of a whole prompt the last token is computed, and behind a window or a state the last
        # chunk with it.
        assert cached >= (length - 1) // chunk * chunk


@pytest.mark.support("document + question")
def test_second_question_about_a_document_finds_it(engine: ZooEngine) -> None:
    cold = [engine.ask(question(number))[0] for number in range(3)]
    engine.process.reset(connector=True)
    engine.ask(prompt(5, 100))
    engine.settle()
    found = []
    for number in range(3):
        found.append(engine.ask(question(number))[0])
        engine.settle()
    for answer, expected in zip(found, cold, strict=True):
        engine.check_same(answer, expected)
    chunk = chunk_tokens(engine)
    assert found[0]["cached"] == 0
    assert found[1]["cached"] >= engine.model.found * DOCUMENT
    assert found[2]["cached"] >= DOCUMENT // chunk * chunk


@pytest.mark.support("conversation")
def test_next_turn_finds_the_one_before(engine: ZooEngine) -> None:
    turn = prompt(300, 200)
    (answer,) = engine.ask(turn)
    engine.settle()
    longer = [*turn, *answer["tokens"], *prompt(301, 40)]
    (found,) = engine.ask(longer)
    chunk = chunk_tokens(engine)
    assert found["cached"] >= (len(turn) - 1) // chunk * chunk
    expected = engine.ask(longer, params={"raykv_load": False})[0]
    engine.check_same(found, expected)
    engine.process.reset()


def test_many_prompts_at_once_are_loaded(engine: ZooEngine) -> None:
    tokens = [prompt(400 + number, 200 + 61 * number) for number in range(6)]
    engine.ask(*tokens)
    expected = engine.ask(*tokens)
    engine.settle()
    found = engine.ask(*tokens)
    for answer, before in zip(found, expected, strict=True):
        if engine.model.is_steady:
            engine.check_same(answer, before)
        assert answer["cached"] >= 192
    engine.process.reset()


def test_plan_says_what_the_engine_has_and_stores(engine: ZooEngine) -> None:
    planned = plan(str(engine.folder), {}, engine.config, [PLANNED])
    groups = [
        ChunkGroup(number, each.tokens_per_chunk, each.window_chunks)
        for number, each in enumerate(planned.shape.groups)
    ]
    (attached,) = engine.cluster.status().engines
    assert groups_text(groups) == attached.traits["chunks"]
    # A NodeActor's first store takes seconds, and a state is offered once.
    engine.ask(prompt(5, 100))
    engine.settle()
    before = engine.chunks()
    engine.ask(prompt(500, PLANNED))
    engine.settle()
    stored = engine.chunks()
    assert [stored[each.group] - before[each.group] for each in groups] == planned.prompts[0].chunks
    assert {each.num_bytes for each in engine.cluster.chunks()} == {planned.shape.slot_bytes}


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.extended)])
def test_node_actor_that_fails_costs_no_answer(engine: ZooEngine, how: str) -> None:
    tokens = question(0, document=50 + len(how))
    expected = engine.ask(tokens)[0]
    engine.settle()
    (node,) = engine.cluster.status().nodes
    if how == "kill":
        os.kill(node.pid, signal.SIGKILL)
    else:
        freeze(node.pid)
    engine.check_same(engine.ask(tokens)[0], expected)

    def is_back() -> bool:
        engine.process.reset()
        engine.ask(tokens)
        engine.process.reset()
        return bool(engine.ask(tokens)[0]["cached"])

    wait_until(is_back, 60.0, "the prompt is loaded again")
    engine.process.reset()
