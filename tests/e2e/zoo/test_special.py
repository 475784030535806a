"""What is special about an engine: types of its KV, adapters, tokens that are guessed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from tests.e2e.zoo.conftest import StartZoo
from tests.fixtures.lora import write_adapter
from tests.fixtures.waiting import wait_until_stored
from tests.fixtures.zoo import (
    PICTURE,
    build,
    build_draft,
    build_foreseeing,
    build_scaled,
    build_seeing,
    rewrite,
    say_few_words,
)
from tests.fixtures.zoo_engine import BLOCK, ZooEngine

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

DOCUMENT = prompt(7, 640)


def question(number: int) -> list[int]:
    return [*DOCUMENT, *prompt(100 + number, 70)]


def check_document(engine: ZooEngine) -> None:
    """Its first question is loaded whole, and the second one finds the document."""
    assert engine.check_load(question(0)) >= len(question(0)) // BLOCK * BLOCK - BLOCK
    (expected,) = engine.ask(question(1), params={"raykv_load": False, "raykv_store": False})
    engine.process.reset()
    (found,) = engine.ask(question(1))
    engine.check_same(found, expected)
    assert found["cached"] >= len(DOCUMENT)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "how", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}], ids=["bfloat16", "fp8"]
)
def test_kv_of_another_type_is_loaded(name: str, how: dict[str, Any], start_zoo: StartZoo) -> None:
    check_document(start_zoo(name, **how))


def test_adapters_of_a_model_with_windows_find_their_own_kv(
    start_zoo: StartZoo, tmp_path: Path
) -> None:
    engine = start_zoo("gemma3", enable_lora=True, max_lora_rank=8, max_loras=2)
    paths = {
        number: write_adapter(tmp_path / str(number), engine.folder, number) for number in (1, 2)
    }

    def ask(number: int) -> tuple[list[int], int]:
        adapter = {
            "lora_name": f"adapter {number}",
            "lora_int_id": number,
            "lora_path": str(paths[number]),
        }
        (found,) = engine.process.call(
            "generate", prompts=[question(0)], adapter=adapter if number else None
        )
        engine.settle()
        return found["tokens"], found["cached"]

    paths[0] = tmp_path
    computed = {number: ask(number) for number in (0, 1, 2)}
    assert [cached for _, cached in computed.values()] == [0, 0, 0]
    said = {number: tokens for number, (tokens, _) in computed.items()}
    assert said[1] != said[2] != said[0] != said[1]
    for number in (1, 2, 0):
        tokens, cached = ask(number)
        assert tokens == said[number]
        assert cached >= len(question(0)) // BLOCK * BLOCK - BLOCK


def test_scales_of_kv_are_those_of_its_weights(start_zoo: StartZoo, tmp_path: Path) -> None:
    folders = [build_scaled(tmp_path / str(scale), scale) for scale in (0.5, 8.0)]
    fp8 = {"kv_cache_dtype": "fp8"}
    computes = {"raykv_load": False, "raykv_store": False}
    engine = start_zoo("llama", folder=folders[0], **fp8)
    check_document(engine)
    engine.process.reset()
    (said,) = engine.ask(question(0), params=computes)
    engine.process.stop()
    other = start_zoo("llama", folder=folders[1], anew=False, **fp8)
    # Its keys are other numbers, of equal weights.
    assert other.ask(question(0))[0]["cached"] == 0
    other.process.reset()
    (found,) = other.ask(question(0), params=computes)
    assert said["cached"] == found["cached"] == 0
    assert found["logprobs"] != said["logprobs"]
    assert len(other.cluster.status().namespaces) == 2


def check_guesses(engine: ZooEngine) -> None:
    """An answer that is asked for again behind itself, and whose KV has guesses in it: right ones
    and wrong ones.
    """
    turn = prompt(300, 200)
    (answer,) = engine.ask(turn, max_tokens=150)
    engine.settle()
    counted = engine.process.call("counters")
    drafted, accepted = (
        counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted, counted
    longer = [*turn, *answer["tokens"], *prompt(301, 40)]
    (expected,) = engine.ask(longer, params={"raykv_load": False, "raykv_store": False})
    engine.process.reset()
    (found,) = engine.ask(longer)
    engine.check_same(found, expected)
    # With a draft that reads hidden states the last chunk is computed again.
    assert found["cached"] >= (len(turn) + 149) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_that_are_guessed_from_the_prompt_leave_right_kv(
    name: str, start_zoo: StartZoo, tmp_path: Path
) -> None:
    """Models that repeat themselves now and then. Beside recurrent states vLLM's CPU build can't
    guess: a kernel of Triton's is missing.
    """
    guesses = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    folder = build(name, tmp_path / name)
    if name == "llama":
        rewrite(folder, say_few_words)
    engine = start_zoo(name, folder=folder, speculative_config=guesses)
    check_document(engine)
    check_guesses(engine)


def test_kv_of_a_draft_is_that_of_its_weights(start_zoo: StartZoo, tmp_path: Path) -> None:
    folder = rewrite(build("llama", tmp_path / "llama"), say_few_words)
    drafts = [build_draft(tmp_path / str(seed), folder, seed) for seed in (1, 2)]

    def start(draft: Path, *, anew: bool) -> ZooEngine:
        eagle = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
        return start_zoo("llama", folder=folder, anew=anew, speculative_config=eagle)

    engine = start(drafts[0], anew=True)
    check_document(engine)
    check_guesses(engine)
    engine.process.stop()
    other = start(drafts[1], anew=False)
    assert other.ask(question(0))[0]["cached"] == 0
    assert len(engine.cluster.status().namespaces) == 2


def test_kv_of_layers_that_guess_is_that_of_their_weights(
    start_zoo: StartZoo, tmp_path: Path
) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    folders = [build_foreseeing(tmp_path / str(seed), seed) for seed in (1, 2)]
    engine = start_zoo("llama", folder=folders[0], speculative_config=mtp)
    check_document(engine)
    check_guesses(engine)
    engine.process.stop()
    other = start_zoo("llama", folder=folders[1], anew=False, speculative_config=mtp)
    assert other.ask(question(0))[0]["cached"] == 0
    assert len(engine.cluster.status().namespaces) == 2


def test_prompt_is_found_with_the_picture_that_it_came_with_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.down()
    settings = {"ray_address": cluster.address, "pool_bytes": "256MiB"}
    model = build_seeing(tmp_path / "model")
    engine = EngineProcess(
        model, tmp_path / "log", settings, skip_tokenizer_init=False, max_model_len=1024
    )
    tokens = [20 + number % 480 for number in prompt(1, 100)]
    seeing = [*tokens[:40], PICTURE, *tokens[40:]]

    def ask(picture: list[int]) -> tuple[list[int], int]:
        (found,) = engine.call("generate", prompts=[seeing], picture=picture)
        wait_until_stored(cluster)
        engine.reset()
        return found["tokens"], found["cached"]

    red, blue = [255, 0, 0], [0, 0, 255]
    try:
        said, cached = ask(red)
        assert cached == 0
        other, cached = ask(blue)
        # What comes before the picture is the same.
        assert cached == BLOCK
        assert other != said
        # 16 tokens stand for a picture.
        for picture, tokens in ((red, said), (blue, other)):
            assert ask(picture) == (tokens, (100 + 16) // BLOCK * BLOCK)
    finally:
        engine.stop()
