"""What the clients are started with for each load, and what is made of the files that they write.

All lengths are those of a large model divided by one number, which suits them to a small one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Protocol

from raykv.lab.bench.client.figures import Figures, of_bench_serve, of_multi_turn
from raykv.lab.bench.client.trace import TracePart, scaled, whole_conversations
from raykv.lab.bench.conversations import WORDS
from raykv.lab.bench.serving import BLOCK
from raykv.vllm import command as vllm_command

TIMED_TRACE, PREFIX_REPETITION, RANDOM, MULTI_TURN = (
    "timed_trace",
    "prefix_repetition",
    "random",
    "multi_turn",
)
WORKLOADS = (TIMED_TRACE, PREFIX_REPETITION, RANDOM, MULTI_TURN)

SERVED = "model"
"""What servers call their model."""

CONTEXT, PREFIX, SUFFIX, OUTPUT = 131_072, 12_288, 2048, 512
"""Tokens before they are divided: of the longest request, of a prefix that comes again, of what
follows it, and of an answer."""

REPEATED_SHARE = 1.5
"""Tokens of all prefixes that come again, by those that the KV memory holds."""

CLIENTS, ACTIVE, TURNS = 3, 8, 5
"""Of the multi-turn load: processes, conversations that go on at once, questions in each."""

CONVERSATION, QUESTION = 16_384, (1920, 2560)
"""Tokens before they are divided: with which a conversation begins, and of each question."""

TEXT_WORDS = 40_000

SCRIPT = "benchmark_serving_multi_turn.py"


@dataclass(frozen=True)
class Sizes:
    """How much is asked: requests, how many a second, what lengths are divided by, and the blocks
    of KV memory that the servers have.
    """

    num_requests: int
    rate: float
    divisor: int
    kv_blocks: int

    @property
    def max_tokens(self) -> int:
        """Of the longest request."""
        return CONTEXT // self.divisor

    @property
    def kv_tokens(self) -> int:
        """That the servers' KV memory holds."""
        return self.kv_blocks * BLOCK


@dataclass(frozen=True)
class Target:
    """A server's port, and the folder or name with the model's tokenizer."""

    port: int
    model: str


class ClientLoad(Protocol):
    """A load: `prepare` writes its files for one repeat, `command` is a client that writes its
    results into `results`, where its log is too; `figures` reads those.
    """

    name: str
    is_reused: bool
    seconds: float
    """That it takes at the rate that is asked for, roughly."""

    def prepare(self, folder: Path, seed: int) -> int | None:
        """Returns the tokens that a cache which forgets nothing would find, where that is known."""

    def command(self, target: Target, folder: Path, results: Path, seed: int) -> list[str]: ...

    def figures(self, results: Path) -> Figures: ...


class BenchServe:
    """A data set of `vllm bench serve`. `flags` are those of the data set."""

    def __init__(
        self, name: str, sizes: Sizes, num_requests: int, flags: Sequence[str], *, is_reused: bool
    ) -> None:
        self.name = name
        self.is_reused = is_reused
        self.seconds = num_requests / sizes.rate
        self._num_requests = num_requests
        self._flags = ("--request-rate", f"{sizes.rate:g}", "--ignore-eos", *flags)

    def prepare(self, folder: Path, seed: int) -> int | None:
        del folder, seed
        return None

    def command(self, target: Target, folder: Path, results: Path, seed: int) -> list[str]:
        del folder
        return bench_serve(
            self.name,
            target,
            results,
            seed,
            ("--num-prompts", f"{self._num_requests}", *self._flags),
        )

    def figures(self, results: Path) -> Figures:
        return bench_serve_figures(self.name, results)


class TimedTrace:
    """Conversations of a trace, with its arrival times."""

    name = TIMED_TRACE
    is_reused = True

    def __init__(self, sizes: Sizes, rows: Sequence[dict[str, Any]]) -> None:
        self.seconds = sizes.num_requests / sizes.rate
        self._sizes = sizes
        self._rows = rows

    def part(self, seed: int) -> TracePart:
        """What is played."""
        sizes = self._sizes
        rows = whole_conversations(self._rows, sizes.num_requests, CONTEXT, seed)
        return scaled(rows, sizes.divisor, sizes.rate)

    def prepare(self, folder: Path, seed: int) -> int | None:
        part = self.part(seed)
        lines = [json.dumps(row) for row in part.rows]
        self._file(folder).write_text("\n".join(lines) + "\n")
        return part.tokens_known(BLOCK)

    def command(self, target: Target, folder: Path, results: Path, seed: int) -> list[str]:
        file = self._file(folder)
        part = self.part(seed)
        flags = (
            *("--dataset-path", str(file), "--num-prompts", f"{len(part.rows)}"),
            *("--timed-trace-chunk-hash-size", f"{part.chunk_tokens}"),
            *("--timed-trace-sec-multiplier", "1"),
        )
        return bench_serve(self.name, target, results, seed, flags)

    def figures(self, results: Path) -> Figures:
        return bench_serve_figures(self.name, results)

    def _file(self, folder: Path) -> Path:
        return folder / "trace.jsonl"


class MultiTurn:
    """vLLM's multi-turn benchmark, out of the folder `benchmarks/multi_turn` of its sources."""

    name = MULTI_TURN
    is_reused = True

    def __init__(self, sizes: Sizes, script: Path) -> None:
        # Its processes end as soon as no conversation is left to begin.
        self._conversations = max(2 * ACTIVE, ceil(sizes.num_requests / TURNS))
        self.seconds = self._conversations * TURNS / sizes.rate
        self._script = script
        self._divisor = sizes.divisor

    def prepare(self, folder: Path, seed: int) -> int | None:
        random = Random(seed)
        text = folder / "words.txt"
        text.write_text(" ".join(random.choice(WORDS) for _ in range(TEXT_WORDS)))
        (folder / "conversations.json").write_text(json.dumps(self.generation(text)))
        return None

    def generation(self, text: Path) -> dict[str, Any]:
        """What the benchmark makes conversations of."""
        low, high = (tokens // self._divisor for tokens in QUESTION)
        first = CONVERSATION // self._divisor
        return {
            "filetype": "generate_conversations",
            "num_conversations": self._conversations,
            "text_files": [str(text)],
            "print_stats": False,
            "prompt_input": {
                "num_turns": {"distribution": "constant", "value": 2 * TURNS},
                "common_prefix_num_tokens": {"distribution": "constant", "value": 0},
                "prefix_num_tokens": {
                    "distribution": "uniform",
                    "min": first // 2,
                    "max": first + first // 2,
                },
                "num_tokens": {"distribution": "uniform", "min": low, "max": high},
            },
            "prompt_output": {
                "num_tokens": {"distribution": "constant", "value": OUTPUT // self._divisor}
            },
        }

    def command(self, target: Target, folder: Path, results: Path, seed: int) -> list[str]:
        return [
            *(sys.executable, str(self._script)),
            *("--input-file", str(folder / "conversations.json")),
            *("--model", target.model, "--served-model-name", SERVED),
            *("--url", f"http://127.0.0.1:{target.port}", "--seed", f"{seed}"),
            *("--num-clients", f"{CLIENTS}", "--max-active-conversations", f"{ACTIVE}"),
            "--no-early-stop",
            *("--stats-json-output", str(results / "stats.json")),
            *("--output-file", str(results / "conversations.json")),
        ]

    def figures(self, results: Path) -> Figures:
        stats = json.loads((results / "stats.json").read_text())
        conversations = json.loads((results / "conversations.json").read_text())
        return of_multi_turn(stats, conversations, log_of(self.name, results).read_text())


def prefix_repetition(sizes: Sizes) -> BenchServe:
    """Prefixes that together do not fit into the KV memory, each at least twice."""
    prefix = PREFIX // sizes.divisor
    num_prefixes = ceil(REPEATED_SHARE * sizes.kv_tokens / prefix)
    each = max(2, sizes.num_requests // num_prefixes)
    flags = (
        *("--prefix-repetition-prefix-len", f"{prefix}"),
        *("--prefix-repetition-suffix-len", f"{SUFFIX // sizes.divisor}"),
        *("--prefix-repetition-num-prefixes", f"{num_prefixes}"),
        *("--prefix-repetition-output-len", f"{OUTPUT // sizes.divisor}"),
    )
    return BenchServe(PREFIX_REPETITION, sizes, each * num_prefixes, flags, is_reused=True)


def random(sizes: Sizes) -> BenchServe:
    """Prompts as long as those with prefixes that come again."""
    flags = (
        *("--random-input-len", f"{(PREFIX + SUFFIX) // sizes.divisor}"),
        *("--random-output-len", f"{OUTPUT // sizes.divisor}"),
    )
    return BenchServe(RANDOM, sizes, sizes.num_requests, flags, is_reused=False)


def bench_serve(
    dataset: str, target: Target, results: Path, seed: int, flags: Sequence[str]
) -> list[str]:
    """A command that writes the file `DATASET.json`."""
    return [
        *(sys.executable, "-P", "-m", vllm_command.__name__, "bench", "serve"),
        *("--backend", "vllm", "--host", "127.0.0.1", "--port", f"{target.port}"),
        *("--model", SERVED, "--tokenizer", target.model),
        *("--dataset-name", dataset, "--seed", f"{seed}", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"),
        *("--save-result", "--save-detailed", "--result-dir", str(results)),
        *("--result-filename", f"{dataset}.json", "--disable-tqdm"),
        *flags,
    ]


def bench_serve_figures(dataset: str, results: Path) -> Figures:
    """From the file `DATASET.json`."""
    return of_bench_serve(json.loads((results / f"{dataset}.json").read_text()))


def log_of(name: str, results: Path) -> Path:
    """Where the client of a load writes what it says."""
    return results / f"{name}.client.log"
