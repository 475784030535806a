"""Prefill and decode engines on two Ray nodes, as one application: real HTTP, equal tokens."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Result
from raykv.lab.hosts.local_nodes import add_local_node
from raykv.serve import build_disaggregated_app
from raykv.serve.disaggregated.proxy import COURSE_HEADER
from tests.bench.disaggregated import APART, ModelServer, PromptLoad, deployment
from tests.fixtures.ports import free_port
from tests.fixtures.tiny_tokenizer import write_tiny_tokenizer
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 32
MIN_PROMPT_TOKENS = 4 * BLOCK
TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 6
PREFILL_NODE = {"raykv_prefill": 1.0}
HEAD_NODE = {"node:__internal_head__": 0.001}
COLD = {"raykv_load": False, "raykv_store": False}


@dataclass(frozen=True)
class Answer:
    """Of an HTTP request."""

    status: int
    course: str | None
    body: Any

    @property
    def tokens(self) -> list[int]:
        """Of a completion that was asked for its token ids."""
        return list(self.body["choices"][0]["token_ids"])

    @property
    def cached(self) -> int:
        """Prompt tokens that the answering engine did not compute."""
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Application:
    """A running one."""

    port: int

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        with closing(self.connection()) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": "tiny", **body}), headers)
            answer = connection.getresponse()
            course = answer.getheader(COURSE_HEADER.decode())
            return Answer(answer.status, course, json.loads(answer.read()))

    def complete(self, tokens: list[int], **extra: Any) -> Answer:
        """Greedy tokens of a prompt."""
        body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = self.post("/v1/completions", {**body, "ignore_eos": True, **extra})
        assert answer.status == 200, answer
        return answer

    def cold(self, tokens: list[int]) -> list[int]:
        """What one engine says that computes all of it: the salt makes a prompt of its own."""
        salt = f"cold {time.monotonic()}"
        answer = self.complete(tokens, cache_salt=salt, kv_transfer_params=COLD)
        assert (answer.course, answer.cached) == ("unsuitable", 0)
        return answer.tokens

    def running(self) -> float:
        """Requests that the decode engine works at."""
        with closing(self.connection()) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
        )


@pytest.fixture(scope="module")
def application(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    """One prefill engine on a node of its own, one decode engine on the head node."""
    from ray import serve

    from raykv.lab.demo.tiny_llama import tiny_llama

    cluster.down()
    node = add_local_node(cluster.address, resources=PREFILL_NODE)
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab_size=512)
    write_tiny_tokenizer(model)
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build_disaggregated_app(arguments(model)), name="raykv")
        yield Application(port)
    finally:
        serve.shutdown()
        node.stop()
        cluster.down()


def arguments(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "name": "tiny",
        "engine_args": {
            "served_model_name": "tiny",
            "max_model_len": 1024,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prompt_tokens_details": True,
        },
        "raykv": {
            "pool_bytes": "128MiB",
            "request_deadline_s": 30.0,
            "step_deadline_s": 20.0,
        },
        "prefill": {"deployment": deployment({"raykv_prefill": 0.01}, cores="1")},
        "decode": {"deployment": deployment(HEAD_NODE, cores="0")},
        "handover": {"min_prompt_tokens": MIN_PROMPT_TOKENS, "bytes_per_token": 1.0},
    }


@pytest.mark.parametrize("length", [BLOCK * 8 - 1, BLOCK * 8, BLOCK * 8 + 1, BLOCK * 20 + 5])
def test_decode_engine_computes_the_last_incomplete_chunk_only(
    application: Application, length: int
) -> None:
    tokens = prompt(500 + length, length)
    answer = application.complete(tokens)
    assert (answer.course, answer.cached) == ("prefilled", length // BLOCK * BLOCK)
    assert answer.tokens == application.cold(tokens)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_prompts_of_agents_are_prefilled_too(application: Application, path: str) -> None:
    said = [{"role": "user", "content": f"{path}. {TEXT}"}]
    names = ("messages", "max_tokens") if path == "/v1/messages" else ("input", "max_output_tokens")
    answer = application.post(path, dict(zip(names, (said, 8), strict=True)))
    assert (answer.status, answer.course) == (200, "prefilled"), answer


@pytest.mark.extended
@pytest.mark.usefixtures("application")
def test_engines_are_on_nodes_of_their_own(cluster: Cluster) -> None:
    assert len({engine.node_id for engine in cluster.status().engines}) == 2


@pytest.mark.extended
def test_chat_is_streamed_from_the_decode_engine(application: Application) -> None:
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "max_completion_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    streamed = {"stream": True, "stream_options": {"include_usage": True}, **body}
    with closing(application.connection()) as connection:
        raw = json.dumps({"model": "tiny", **streamed})
        connection.request(
            "POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.getheader(COURSE_HEADER.decode()) == "prefilled"
        lines = answer.read().decode().strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    usage = pieces[-1]["usage"]
    assert usage["completion_tokens"] == 6
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == usage["prompt_tokens"] // BLOCK * BLOCK
    said = "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces if p["choices"])
    cold = application.post(
        "/v1/chat/completions", {**body, "cache_salt": "cold", "kv_transfer_params": COLD}
    )
    assert said == cold.body["choices"][0]["message"]["content"]


@pytest.mark.extended
def test_short_prompt_is_left_to_the_decode_engine(application: Application) -> None:
    assert application.complete(prompt(2, MIN_PROMPT_TOKENS - 1)).course == "short"
    assert application.complete(prompt(3, MIN_PROMPT_TOKENS)).course == "prefilled"


@pytest.mark.extended
def test_refusal_is_about_the_clients_own_request(application: Application) -> None:
    body = {"prompt": prompt(4, 200), "max_tokens": -1, "temperature": 0}
    answer = application.post("/v1/completions", body)
    assert (answer.status, answer.course) == (400, "prefilled")
    body = {"prompt": prompt(4, 200), "max_tokens": 4, "temperature": -1}
    answer = application.post("/v1/completions", body)
    assert (answer.status, answer.course) == (400, "refused")
    assert "temperature" in answer.body["error"]["message"]


@pytest.mark.extended
def test_client_that_leaves_ends_its_request(application: Application) -> None:
    with closing(application.connection()) as connection:
        body = {
            "model": "tiny",
            "prompt": prompt(5, 200),
            "max_tokens": 700,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        assert connection.getresponse().read(100)
        assert application.running() == 1
    wait_until(lambda: application.running() == 0, 5.0, "the engine has nothing to do")


@pytest.mark.extended
def test_benchmark_measures_both_kinds_of_engines(application: Application) -> None:
    result = Result("disaggregated")
    load = PromptLoad((MIN_PROMPT_TOKENS, 2 * MIN_PROMPT_TOKENS), stream_tokens=6, most_tokens=64)
    load.measure(result, APART, ModelServer(application.port, "tiny"))
    assert len(result.rows) == 5
    assert all(value > 0 for row in result.rows for value in row.values)


@pytest.mark.extended
def test_killed_prefill_engine_costs_a_computation_and_no_request(
    application: Application,
) -> None:
    """The last test: nobody waits for the next prefill engine."""
    prompts = [prompt(600 + number, BLOCK * 8) for number in range(3)]
    references = [application.cold(tokens) for tokens in prompts]
    os.kill(prefill_engine(), signal.SIGKILL)
    began = time.monotonic()
    answers = [application.complete(tokens) for tokens in prompts]
    assert time.monotonic() - began < 15.0
    assert [answer.tokens for answer in answers] == references
    assert {answer.course for answer in answers} <= {"lost", "refused", "skipped"}
    assert answers[-1].course == "skipped"


def prefill_engine() -> int:
    """The process of the prefill replica's EngineCore."""
    (replica,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("ServeReplica:raykv:tiny-prefill" in part for part in process.info["cmdline"] or [])
    ]
    (engine,) = [each for each in replica.children() if "EngineCore" in " ".join(each.cmdline())]
    return int(engine.pid)
