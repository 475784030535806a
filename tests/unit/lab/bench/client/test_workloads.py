"""What clients are started with."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from raykv.lab.bench.client.workloads import (
    ACTIVE,
    MultiTurn,
    Sizes,
    Target,
    TimedTrace,
    prefix_repetition,
    random,
)

SIZES = Sizes(num_requests=72, rate=2.0, divisor=32, kv_blocks=48)
TARGET = Target(8123, "folder/model")
ROWS = [
    {
        "timestamp": 1000 * number,
        "input_length": 1024,
        "output_length": 64,
        "hash_ids": [0, number + 1],
    }
    for number in range(100)
]


def options_of(command: list[str]) -> dict[str, str]:
    """Values by flag."""
    return dict(pairwise(command))


def test_bench_serve_is_asked_for_all_that_is_read(tmp_path: Path) -> None:
    command = random(SIZES).command(TARGET, tmp_path, tmp_path / "results", 5)
    options = options_of(command)
    assert command[1:6] == ["-P", "-m", "raykv.vllm.command", "bench", "serve"]
    assert options["--port"] == "8123"
    assert options["--tokenizer"] == "folder/model"
    assert options["--temperature"] == "0"
    assert options["--seed"] == "5"
    assert options["--request-rate"] == "2"
    assert options["--metric-percentiles"] == "99"
    assert "itl" in options["--percentile-metrics"]
    assert "--save-detailed" in command
    assert (options["--random-input-len"], options["--random-output-len"]) == ("448", "16")


def test_prefixes_do_not_fit_into_the_kv_memory_and_come_again() -> None:
    options = options_of(prefix_repetition(SIZES).command(TARGET, Path(), Path(), 0))
    num_prefixes = int(options["--prefix-repetition-num-prefixes"])
    assert num_prefixes * int(options["--prefix-repetition-prefix-len"]) >= 1.5 * 48 * 128
    assert int(options["--num-prompts"]) == 3 * num_prefixes
    few = prefix_repetition(Sizes(1, 1.0, 32, 48)).command(TARGET, Path(), Path(), 0)
    assert int(options_of(few)["--num-prompts"]) == 2 * num_prefixes


def test_trace_is_written_as_the_client_reads_it(tmp_path: Path) -> None:
    load = TimedTrace(SIZES, ROWS)
    most_found = load.prepare(tmp_path, seed=1)
    options = options_of(load.command(TARGET, tmp_path, tmp_path, 1))
    lines = Path(options["--dataset-path"]).read_text().splitlines()
    assert len(lines) == int(options["--num-prompts"]) == 72
    row: dict[str, Any] = json.loads(lines[0])
    assert (row["input_length"], row["output_length"], row["timestamp"]) == (32, 2, 0.0)
    assert options["--timed-trace-chunk-hash-size"] == "16"
    assert options["--timed-trace-sec-multiplier"] == "1"
    assert "--request-rate" not in options
    assert most_found == 0  # 16 tokens are known, and a block has 128


def test_multi_turn_benchmark_makes_conversations_of_our_words(tmp_path: Path) -> None:
    load = MultiTurn(SIZES, tmp_path / "script.py")
    load.prepare(tmp_path, seed=1)
    options = options_of(load.command(TARGET, tmp_path, tmp_path / "results", 1))
    made = json.loads(Path(options["--input-file"]).read_text())
    assert made["num_conversations"] * made["prompt_input"]["num_turns"]["value"] // 2 >= 72
    words = Path(made["text_files"][0]).read_text()
    assert len(words.split()) > 10_000
    load.prepare(tmp_path, seed=2)
    assert Path(made["text_files"][0]).read_text() != words
    assert options["--url"] == "http://127.0.0.1:8123"


def test_few_turns_are_conversations_for_all_processes_and_as_many_to_follow(
    tmp_path: Path,
) -> None:
    load = MultiTurn(replace(SIZES, num_requests=5), tmp_path / "script.py")
    assert load.generation(tmp_path / "words.txt")["num_conversations"] == 2 * ACTIVE
