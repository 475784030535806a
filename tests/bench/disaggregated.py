"""`disaggregated`: separate prefill and decode engines, compared with one engine that does both.

Two applications of Ray Serve, one after the other, on the same two cores: a prefill engine and a
decode engine on two Ray nodes of this host with a core each; and one engine with both cores. Also
measured is the decode engine when it computes the prompts itself: one core for everything, which
shows what the transfer between the engines costs. Two streams of tokens run, alone, and then while
two long prompts arrive one after the other. SmolLM2-135M in float32.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

from raykv.base.errors import ClusterError
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from raykv.lab.hosts.local_nodes import local_node
from tests.bench.serving import BLOCK, Bed
from tests.fixtures.ports import free_port

APART, SAME_CORE, ONE = "apart", "decode engine alone, one core", "one engine, both cores"

PREFILL_NODE = "raykv_prefill"
"""The resource of the prefill engine's node."""

NUM_STREAMS = 2
STREAM_TOKENS = 192
"""Of a stream that nothing disturbs."""

NUM_DISTURBING = 2
"""Long prompts that arrive while streams run; the streams end with the last one."""

PREFILL_DEADLINE_S = 300.0
"""The default is for engines on GPUs. Here a prompt of 4,096 tokens takes 30 s on a quiet core, and
a decode engine that computes it after all would be measured in place of the prefill engine."""

LENGTHS = (1024, 4096)

COLD = {"kv_transfer_params": {"raykv_load": False, "raykv_store": False}}
"""The engine that gets the request computes its prompt."""

MOST_TTFT = 1.2
MOST_STALL = 0.5

_TTFT, _QUIET, _MEAN, _STALL = (
    "time to first token",
    "time per output token, nothing else runs",
    "time per output token, long prompts arrive",
    "longest pause between tokens, long prompts arrive",
)

ANSWER_S = 400.0


@dataclass(frozen=True)
class Completion:
    """When a request was sent, and when each token came; seconds of one clock.

    `course`: what became of the prompt, where a proxy says so.
    """

    began: float
    tokens: tuple[float, ...]
    course: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.began

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between tokens."""
        return tuple(b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False))


@dataclass(frozen=True)
class ModelServer:
    """A server at a port of this host, and the name of its model."""

    port: int
    model: str

    def complete(
        self,
        tokens: list[int],
        max_tokens: int,
        is_enough: Callable[[], bool] = lambda: False,
        **extra: Any,
    ) -> Completion:
        """Stream that many tokens, or until it is enough: then the request is aborted.

        Raises:
            ClusterError: the server refuses the request.
        """
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **extra,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            began = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ClusterError(f"status {answer.status}: {answer.read()[:500]!r}")
            times = []
            for at in _times(answer):
                times.append(at)
                if is_enough():
                    break
        return Completion(began, tuple(times), answer.getheader("x-raykv-prefill"))


def _times(answer: http.client.HTTPResponse) -> Iterator[float]:
    """When each piece of a stream of server-sent events with a token came."""
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
            yield time.monotonic()


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("disaggregated")
    lengths = (2 * BLOCK,) if options.quick else LENGTHS
    context = max(lengths) + 2 * BLOCK
    load = PromptLoad(
        lengths, STREAM_TOKENS // 8 if options.quick else STREAM_TOKENS, context - BLOCK
    )
    pool_bytes = (256 << 20) if options.quick else (1 << 30)
    repeats = options.repeats_or(3)
    with Bed(quick=options.quick, max_tokens=context, pool_bytes=pool_bytes) as bed:
        with _apart(bed, quick=options.quick) as server:
            for _ in range(repeats):
                load.measure(result, APART, server)
                load.measure(result, SAME_CORE, server, **COLD)
        with _together(bed, quick=options.quick) as server:
            for _ in range(repeats):
                load.measure(result, ONE, server)
    for length in lengths:
        case = f"{_TTFT}, {length} tokens"
        budget = f"{case}: at most 1.2 x what the decode engine's core alone takes"
        result.at_most(MOST_TTFT, result.ratio(case, APART, SAME_CORE), budget)
    stall = result.ratio(_STALL, APART, ONE)
    result.at_most(
        MOST_STALL, stall, "longest pause of running decodes at most half of one engine's"
    )
    result.notes.append(
        "Both Ray nodes, the client and Ray itself share the two cores with the engines."
    )
    return result


class PromptLoad:
    """Prompts for all repeats; no two are alike.

    A stream that nothing disturbs has `stream_tokens`, one that is disturbed `most_tokens` at most.
    """

    def __init__(self, lengths: tuple[int, ...], stream_tokens: int, most_tokens: int) -> None:
        self._lengths = lengths
        self._stream_tokens = stream_tokens
        self._most_tokens = most_tokens
        self._next = 20_000

    def _fresh(self, length: int) -> list[int]:
        self._next += 1
        return prompt(self._next, length)

    def measure(self, result: Result, subject: str, server: ModelServer, **extra: Any) -> None:
        """One repeat of everything."""
        self._check(subject, server.complete(self._fresh(max(self._lengths)), 2, **extra))
        for length in self._lengths:
            done = server.complete(self._fresh(length), 1, **extra)
            self._check(subject, done)
            result.add(f"{_TTFT}, {length} tokens", subject, "s", done.ttft_s)
        quiet = self._gaps(subject, server, None, **extra)
        busy = self._gaps(subject, server, self._lengths[-1], **extra)
        for case, value in ((_QUIET, mean(quiet)), (_MEAN, mean(busy)), (_STALL, max(busy))):
            result.add(case, subject, "ms", value * 1e3)

    @staticmethod
    def _check(subject: str, done: Completion) -> None:
        expected = {APART: "prefilled", SAME_CORE: "unsuitable"}.get(subject)
        if done.course != expected:
            raise ClusterError(f"{subject}: the prompt's course was {done.course}")

    def _gaps(
        self, subject: str, server: ModelServer, length: int | None, **extra: Any
    ) -> list[float]:
        """Times between the tokens of the streams, while prompts of that length arrive."""
        ended = threading.Event()

        def stream() -> Completion:
            tokens = self._stream_tokens if length is None else self._most_tokens
            return server.complete(self._fresh(BLOCK // 4), tokens, ended.is_set, **extra)

        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            streams = [threads.submit(stream) for _ in range(NUM_STREAMS)]
            try:
                if length is not None:
                    for _ in range(NUM_DISTURBING):
                        done = server.complete(self._fresh(length), 1, **extra)
                        self._check(subject, done)
                    ended.set()
                return [gap for each in streams for gap in each.result().gaps_s]
            finally:
                ended.set()


@contextmanager
def _apart(bed: Bed, *, quick: bool) -> Iterator[ModelServer]:
    """A prefill engine on a node of its own, a decode engine on the head node."""
    from raykv.serve import build_disaggregated_app

    with local_node(bed.cluster.address, resources={PREFILL_NODE: 1.0}):
        model = {
            **_model(bed, quick=quick),
            "prefill": {"deployment": deployment({PREFILL_NODE: 0.01}, cores="1")},
            "decode": {"deployment": deployment({"node:__internal_head__": 0.001}, cores="0")},
            "handover": {
                "min_prompt_tokens": 2 * BLOCK,
                "prefill_deadline_s": PREFILL_DEADLINE_S,
            },
        }
        with _served(build_disaggregated_app(model)) as port:
            bed.wait_for_pools()
            yield ModelServer(port, "model")


@contextmanager
def _together(bed: Bed, *, quick: bool) -> Iterator[ModelServer]:
    """One engine with both cores."""
    from raykv.serve import build_app

    placed = deployment({"node:__internal_head__": 0.001}, cores="0-1")
    with _served(build_app({**_model(bed, quick=quick), "deployment": placed})) as port:
        bed.wait_for_pools()
        yield ModelServer(port, "model")


def _model(bed: Bed, *, quick: bool) -> dict[str, Any]:
    return {
        "model": str(bed.model),
        "name": "model",
        "engine_args": {
            "served_model_name": "model",
            "max_model_len": bed.max_tokens,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 512 << 20,
            "skip_tokenizer_init": quick,
        },
        "raykv": {"pool_bytes": str(bed.pool_bytes), "request_deadline_s": 50.0},
    }


def deployment(resources: dict[str, float], cores: str) -> dict[str, Any]:
    """One replica, where those resources are, with all its processes bound to those cores.

    Not its computing threads alone: vLLM's processes wait for each other without sleeping, and
    would take the other engine's core while a stream of tokens runs.
    """
    # Ray's workers give way to everything else on a machine otherwise.
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "RAY_worker_niceness": "0",
    }
    python = f"taskset --cpu-list {cores} {sys.executable}"
    runtime_env = {"env_vars": environment, "py_executable": python}
    options = {"num_cpus": 0.1, "resources": resources, "runtime_env": runtime_env}
    return {"num_replicas": 1, "ray_actor_options": options}


@contextmanager
def _served(app: Any) -> Iterator[int]:
    """The port of the running application."""
    from ray import serve

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app, name="raykv")
        yield port
    finally:
        serve.shutdown()
