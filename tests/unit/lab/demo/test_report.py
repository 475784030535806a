"""The demo's pure half: what asks to make, and what to say about what came back."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from raykv.base.errors import SettingError
from raykv.lab.demo.prompts import (
    Prompt,
    documents,
    other_node_steps,
    plain_text,
    random_prompts,
    schedule,
)
from raykv.lab.demo.report import DemoAsk, DemoReport, DemoTokens, Phase, show, ttft_s
from raykv.lab.demo.run import run_demo
from raykv.lab.demo.tiny_llama import tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

_SERVED = {
    Phase.RECOMPUTE: DemoTokens(computed=2048, prefix_cache=0, raykv=0),
    Phase.PREFIX_HIT: DemoTokens(computed=128, prefix_cache=1920, raykv=0),
    Phase.RAYKV: DemoTokens(computed=1, prefix_cache=0, raykv=2047),
    Phase.NEW_QUESTION: DemoTokens(computed=128, prefix_cache=0, raykv=1920),
    Phase.REMOTE: DemoTokens(computed=1, prefix_cache=0, raykv=2047),
}


def make_ask(phase: Phase, seconds: float, **changes: object) -> DemoAsk:
    ask = DemoAsk(
        document="manual",
        question="why?",
        phase=phase,
        round=1,
        prompt_tokens=2048,
        sources=_SERVED[phase],
        ttft_s=seconds,
        token_ids=(5, 6, 7),
        answer="because",
        bytes_fetched=5 << 20 if phase is Phase.REMOTE else 0,
    )
    return replace(ask, **changes)  # type: ignore[arg-type]


def make_report(*asks: DemoAsk) -> DemoReport:
    return DemoReport(
        model="m",
        caveat="A small model errs.",
        rounds=3,
        asks=asks,
        bytes_stored=3 << 20,
        bytes_loaded=6 << 20,
        pool_bytes=1 << 30,
    )


def good_asks() -> list[DemoAsk]:
    return [
        make_ask(Phase.RECOMPUTE, 4.0),
        make_ask(Phase.PREFIX_HIT, 0.3),
        make_ask(Phase.RAYKV, 0.1, round=2),
        make_ask(Phase.RAYKV, 0.3, round=3),
    ]


def asks_on_two_nodes() -> list[DemoAsk]:
    return [
        *good_asks(),
        make_ask(Phase.REMOTE, 0.5, round=4),
        make_ask(Phase.REMOTE, 0.7, round=4, document="other"),
    ]


def rendered(report: DemoReport, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(show(report))
    return capture.get()


def test_ttft_is_the_median_of_its_phase() -> None:
    asks = [make_ask(Phase.RAYKV, seconds) for seconds in (0.1, 0.9, 0.2)]
    assert ttft_s([*asks, make_ask(Phase.RECOMPUTE, 5.0)], Phase.RAYKV) == 0.2


@pytest.mark.parametrize("phase", list(Phase))
def test_ttft_leaves_out_asks_that_another_source_served(phase: Phase) -> None:
    elsewhere = _SERVED[Phase.PREFIX_HIT if phase is not Phase.PREFIX_HIT else Phase.RAYKV]
    report = make_report(make_ask(phase, 0.1), make_ask(phase, 9.0, sources=elsewhere))
    assert ttft_s(report.asks, phase) == 0.1
    assert report.num_unintended == 1


def test_ttft_leaves_out_asks_on_the_other_node_that_fetched_nothing() -> None:
    """Loaded from its own node, then: that is another measurement."""
    asks = [make_ask(Phase.REMOTE, 0.5), make_ask(Phase.REMOTE, 0.1, bytes_fetched=0)]
    assert ttft_s(asks, Phase.REMOTE) == 0.5


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(("token_ids", "exit_code"), [((5, 6, 7), 0), ((5, 6, 8), 1)])
def test_exit_code_is_one_when_a_single_token_of_a_round_or_node_differs(
    at: int, token_ids: tuple[int, ...], exit_code: int
) -> None:
    asks = asks_on_two_nodes()
    asks[at] = replace(asks[at], token_ids=token_ids)
    report = make_report(*asks)
    assert (report.exit_code, report.tokens_equal) == (exit_code, not exit_code)


@pytest.mark.parametrize("other", [{"document": "other"}, {"question": "who?"}])
def test_prompts_are_compared_with_themselves_only(other: Any) -> None:
    asks = [replace(ask, token_ids=(9,), **other) for ask in good_asks()]
    report = make_report(*good_asks(), *asks)
    assert report.exit_code == 0
    assert len(report.questions()) == 2


def test_json_has_the_promised_keys_and_survives_a_round_trip() -> None:
    data = json.loads(json.dumps(make_report(*good_asks()).as_json()))
    assert data["ttft_recompute_s"] == 4.0
    assert data["ttft_prefix_hit_s"] == 0.3
    assert data["ttft_raykv_s"] == pytest.approx(0.2)
    assert data["ttft_new_question_s"] is None
    assert data["ttft_remote_s"] is None
    assert data["bytes_fetched"] == 0
    assert data["tokens_equal"] is True
    assert data["bytes_stored"] == 3 << 20
    assert data["bytes_loaded"] == 6 << 20
    assert data["hit_tokens"] == 2 * 2047
    assert data["num_unintended"] == 0
    assert [ask["phase"] for ask in data["asks"]] == [
        "recompute",
        "prefix_hit",
        "raykv",
        "raykv",
    ]


def test_json_has_asks_time_and_bytes_of_the_other_node() -> None:
    data = json.loads(json.dumps(make_report(*asks_on_two_nodes()).as_json()))
    assert data["ttft_remote_s"] == pytest.approx(0.6)
    assert data["bytes_fetched"] == 10 << 20
    asks = [ask for ask in data["asks"] if ask["phase"] == "remote"]
    assert [ask["bytes_fetched"] for ask in asks] == [5 << 20] * 2
    assert data["num_unintended"] == 0


def test_show_has_a_row_and_a_count_for_the_other_node() -> None:
    text = rendered(make_report(*asks_on_two_nodes()), width=80)
    row = next(line for line in text.splitlines() if line.startswith("RayKV, other node"))
    assert row.split()[3:] == ["2", "4,096", "2", "0", "4,094", "0.600", "6.7x"]
    assert "loaded 6 MiB, fetched 10 MiB from node to node and served" in " ".join(text.split())
    assert "…" not in text


def test_show_says_nothing_of_another_node_when_there_was_none() -> None:
    text = rendered(make_report(*good_asks()))
    assert "other node" not in text
    assert "RayKV stored 3 MiB, loaded 6 MiB and served 4,094 prompt tokens." in text


def test_show_names_speed_up_answer_and_verdict() -> None:
    text = rendered(make_report(*good_asks()))
    assert "20.0x" in text
    assert "because" in text
    assert "Every answer was the same" in text
    assert "not served from where" not in text


@pytest.mark.parametrize("last_tokens", [(5, 6, 7), (1,)])
def test_show_claims_equal_answers_not_right_ones(last_tokens: tuple[int, ...]) -> None:
    asks = good_asks()
    asks[-1] = replace(asks[-1], token_ids=last_tokens)
    text = " ".join(rendered(make_report(*asks)).split())
    assert "A small model errs. What counts here is not whether an answer is right" in text


def test_show_fits_eighty_columns_without_cutting_a_number() -> None:
    asks = [replace(ask, ttft_s=12.345, document="Transformers README") for ask in good_asks()]
    text = rendered(make_report(*asks), width=80)
    assert text.count("12.345") == 3
    assert "Transformers README" in text
    assert "…" not in text


def test_show_lists_every_round_of_an_answer_that_differed() -> None:
    asks = good_asks()
    asks[-1] = replace(asks[-1], token_ids=(1,), answer="[nonsense]")
    text = rendered(make_report(*asks))
    assert "AN ANSWER DIFFERED" in text
    assert "RayKV, round 3: [nonsense]" in text


def test_show_claims_no_speed_up_when_raykv_served_nothing() -> None:
    computed = _SERVED[Phase.RECOMPUTE]
    asks = [replace(ask, sources=computed) for ask in good_asks()]
    text = rendered(make_report(*asks))
    row = next(line for line in text.splitlines() if line.startswith("RayKV "))
    assert row.split()[-2:] == ["-", "-"]
    assert "3 of 4 asks were not served from where" in text


def test_sources_since_subtracts_each_counter() -> None:
    later, earlier = DemoTokens(10, 20, 30), DemoTokens(1, 2, 3)
    assert later.since(earlier) == DemoTokens(9, 18, 27)


def test_schedule_computes_in_round_one_and_loads_in_later_rounds() -> None:
    first, second, other = Prompt("d", "1", (1,)), Prompt("d", "2", (1,)), Prompt("e", "1", (2,))
    steps = [(s.phase, s.round, s.prompt) for s in schedule([first, second, other], rounds=2)]
    assert steps == [
        (Phase.RECOMPUTE, 1, first),
        (Phase.PREFIX_HIT, 1, first),
        (Phase.NEW_QUESTION, 1, second),
        (Phase.RECOMPUTE, 1, second),
        (Phase.PREFIX_HIT, 1, second),
        (Phase.RECOMPUTE, 1, other),
        (Phase.PREFIX_HIT, 1, other),
        (Phase.RAYKV, 2, first),
        (Phase.RAYKV, 2, second),
        (Phase.RAYKV, 2, other),
    ]


def test_other_node_is_asked_one_question_about_each_document() -> None:
    first, second, other = Prompt("d", "1", (1,)), Prompt("d", "2", (1,)), Prompt("e", "1", (2,))
    steps = other_node_steps([first, second, other], round_=4)
    assert [(step.phase, step.round, step.prompt) for step in steps] == [
        (Phase.REMOTE, 4, first),
        (Phase.REMOTE, 4, other),
    ]


def test_random_prompts_share_the_document_and_repeat_with_the_seed() -> None:
    prompts = random_prompts(512, seed=1)
    assert prompts == random_prompts(512, seed=1)
    assert prompts != random_prompts(512, seed=2)
    first, second = prompts[0].token_ids, prompts[1].token_ids
    assert first[:1500] == second[:1500]
    assert first[1500:] != second[1500:]


def test_random_prompts_leave_the_global_generator_alone() -> None:
    state = random.getstate()
    random_prompts(512, seed=0)
    assert random.getstate() == state


def test_plain_text_keeps_words_and_drops_markup() -> None:
    markdown = (
        '<p align="center">\n<b>Fast</b></p>\n<!-- a\nb -->\n'
        "[![badge](https://x/y.svg)](https://x)\n\n\n\nSee [the guide](https://x/g), 1 < 2 > 0."
    )
    assert plain_text(markdown) == "Fast\n\nSee the guide, 1 < 2 > 0."


def test_documents_of_this_installation_are_long() -> None:
    pytest.importorskip("fastapi")
    found = documents()
    assert 1 <= len(found) <= 3
    assert all(len(text) >= 7000 for _, text in found)


def test_run_demo_refuses_a_json_path_without_a_folder_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="there is no folder"):
        run_demo(
            tiny=True,
            json_path=tmp_path / "missing" / "out.json",
            rounds=2,
            nodes=1,
            ray_address=None,
            pool_bytes=None,
            note_actors=lambda _: None,
        )


def test_tiny_llama_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    weights = [
        (tiny_llama(tmp_path / name, layers=1, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
