"""`raykv serve`: vLLM's own OpenAI server over HTTP, with RayKV behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from raykv import inspect
from raykv.base.errors import ClusterError
from raykv.client.cluster import Cluster
from raykv.protocol.engine import MissRecord
from raykv.serve.router.directory import AskedDirectory
from raykv.serve.router.vllm_renderer import VLLMRenderer
from tests.fixtures.dashboard import metrics_of_all_panels
from tests.fixtures.metric_lint import complaints
from tests.fixtures.scrapes import by_label, names_in, scrape
from tests.fixtures.server import START_DEADLINE_S, Server, served
from tests.fixtures.truth_of_kv import assert_as_transformers_computes
from tests.fixtures.waiting import stage, wait_until
from tests.house import CHILDREN, ROOT

pytestmark = pytest.mark.e2e

TEXT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 6


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cluster.down()
    folder = tmp_path_factory.mktemp("server")
    hints = '{"kv_connector_extra_config": {"client_hints": "session"}}'
    with served(folder, cluster.address, "--kv-transfer-config", hints) as running:
        yield running


@pytest.mark.versions
def test_completion_is_loaded_after_reset_of_vllm_cache(server: Server) -> None:
    first = server.complete(TEXT)
    wait_until(
        lambda: server.counter("vllm:kv_offload_store_bytes_total") > 0, 20.0, "chunks are stored"
    )
    server.post("/reset_prefix_cache")
    before = server.counter("vllm:external_prefix_cache_hits_total")
    assert server.complete(TEXT) == first
    assert server.counter("vllm:external_prefix_cache_hits_total") - before >= 448
    assert server.counter("vllm:kv_offload_load_bytes_total") > 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "kv_transfer_params": ' + b'{"a": ' * 500 + b"1" + b"}" * 501,
    ],
    ids=["prompt", "parameters"],
)
def test_body_that_is_nested_too_deeply_is_the_clients_mistake(server: Server, body: bytes) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert "nested deeper than 100" in refused.value.read().decode()
    refused.value.close()


@pytest.mark.parametrize("depth", [20, 98])
def test_nested_parameters_of_a_request_have_no_effect(server: Server, depth: int) -> None:
    nested: Any = True
    for _ in range(depth):
        nested = {"raykv_store": nested}
    assert server.complete("Once more.", kv_transfer_params=nested)


def test_client_opts_out_of_storing(server: Server) -> None:
    other = "It was the best of times, it was the worst of times. " * 8
    first = server.complete(other, kv_transfer_params={"raykv_store": False})
    server.post("/reset_prefix_cache")
    before = server.counter("vllm:external_prefix_cache_hits_total")
    assert server.complete(other) == first
    assert server.counter("vllm:external_prefix_cache_hits_total") == before


def test_client_names_its_session_and_says_that_it_is_over(
    server: Server, cluster: Cluster
) -> None:
    text = "Mother died today. Or maybe yesterday, I don't know. I had a telegram. " * 4
    server.complete(text, kv_transfer_params={"raykv_session": "web", "raykv_pause_s": 60})
    wait_until(lambda: stage(cluster, "web") == "paused", 20.0, "the pause is told")
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        "kv_transfer_params": {"raykv_session": "web", "raykv_session_over": True},
    }
    server.post("/v1/chat/completions", chat)
    wait_until(lambda: stage(cluster, "web") == "over", 20.0, "the end is told")
    known = cluster.session("web").status()
    assert known.requests == 2
    assert known.chunks >= 2 * (len(text) // 32)


def test_answers_id_leads_to_its_misses_and_metrics_have_their_sum(
    server: Server, cluster: Cluster
) -> None:
    before = server.counter("raykv_missed_tokens_total")
    text = "Call me Ishmael. Some years ago - never mind how long precisely. " * 8
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body)
    found: list[MissRecord] = []

    def is_told() -> bool:
        try:
            found[:] = [each.record for each in cluster.why_miss(answer["id"])]
        except ClusterError:
            return False
        return True

    wait_until(is_told, 20.0, "the request's record comes")
    (record,) = found
    assert record.prompt == answer["usage"]["prompt_tokens"]
    missed = sum(record.missed.values())
    assert "never_stored" in record.missed
    wait_until(
        lambda: server.counter("raykv_missed_tokens_total") - before == missed,
        20.0,
        "the metrics have it",
    )
    assert server.counter("raykv_prompt_tokens_total") >= record.prompt


@pytest.mark.versions
def test_metrics_of_vllm_and_of_the_actors_tell_the_same(server: Server, cluster: Cluster) -> None:
    text = "Stately, plump Buck Mulligan came from the stairhead, bearing a bowl of lather. " * 6
    cluster.quotas.set("quiet", guaranteed=0.1)
    first = server.complete(text)
    stored = server.counter("vllm:kv_offload_store_bytes_total")
    wait_until(
        lambda: server.counter("vllm:kv_offload_store_bytes_total") >= stored > 0, 20.0, "stores"
    )
    server.post("/reset_prefix_cache")
    assert server.complete(text) == first
    status = cluster.status()
    target = status.nodes[0].metrics

    def is_told() -> bool:
        own = by_label(server.get("/metrics"), "raykv_prompt_tokens_total")
        told = by_label(scrape(target), "raykv_cluster_prompt_tokens_total")
        return own == told and own["same_node"] >= 448

    wait_until(is_told, 20.0, "the NodeActor has the engine's tokens")
    served = server.get("/metrics")
    node, directory = scrape(target), scrape(status.metrics)
    cluster.quotas.remove("quiet")
    assert complaints(node) == complaints(directory) == []
    # Loads from the own node's RAM, and nothing else, are what vLLM calls external hits.
    cached = by_label(served, "vllm:prompt_tokens_cached_by_source_total")
    hits = server.counter("vllm:external_prefix_cache_hits_total")
    assert {**cached, "device": 0.0} == {"host": hits, "device": 0.0}
    assert server.counter("vllm:external_prefix_cache_queries_total") >= hits
    prompts = by_label(served, "vllm:prompt_tokens_by_source_total")
    assert prompts["external_kv_transfer"] == hits
    for direction in ("load", "store"):
        copied = by_label(node, "raykv_copied_bytes_total", "direction")[direction]
        assert copied == server.counter(f"vllm:kv_offload_{direction}_bytes_total") > 0
        assert_vllm_older_metrics_tell_the_same(served, direction)
        for histogram in ("raykv_copy_seconds_count", "raykv_queue_seconds_count"):
            assert by_label(node, histogram, "direction")[direction] > 0
    (ratio,) = by_label(node, "raykv_reachable_hit_ratio", "namespace").values()
    assert 0 < ratio < 1
    assert metrics_of_all_panels() <= names_in(served) | names_in(node) | names_in(directory)


def assert_vllm_older_metrics_tell_the_same(served: str, direction: str) -> None:
    """What dashboards made for vLLM's own offloading show, against what takes its place."""
    transfer_type = {"load": "CPU_to_GPU", "store": "GPU_to_CPU"}[direction]
    for older, newer in (
        ("total_bytes_total", "bytes_total"),
        ("total_time_total", "time_total"),
        ("size_count", "size_count"),
        ("size_sum", "size_sum"),
    ):
        told = by_label(served, f"vllm:kv_offload_{older}", "transfer_type")[transfer_type]
        (expected,) = by_label(served, f"vllm:kv_offload_{direction}_{newer}", "engine").values()
        assert told == expected > 0, (direction, older)


def asked(server: Server, cluster: Cluster, text: str) -> Any:
    """The row of a prompt that has been completed, and whose chunks are in the cache."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body)
    rows: list[Any] = []

    def is_cached() -> bool:
        known = inspect.requests(cluster)
        rows[:] = [row for _, row in known.iterrows() if answer["id"] in row["request_id"]]
        held = {key[:16] for key in inspect.chunks(cluster)["key"]}
        return bool(rows) and held.issuperset(rows[0]["chunks"])

    wait_until(is_cached, 20.0, "the request's chunks are told and stored")
    return rows[0]


def test_kv_of_cached_prompt_is_what_transformers_computes(
    server: Server, cluster: Cluster
) -> None:
    import torch

    text = "Happy the man whose wish and care a few paternal acres bound. " * 4
    row = asked(server, cluster, text)
    chunks = row["chunks"][: row["prompt_tokens"] // row["chunk_tokens"]]
    assert len(chunks) > 6
    found = inspect.kv(cluster, chunks)
    assert found.num_tokens == len(chunks) * 32
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": text})["tokens"]
    assert_as_transformers_computes(found, server.model, tokens)
    second = inspect.kv(cluster, found.keys[1])
    name = next(iter(found.layers))
    assert torch.equal(second.layers[name].k, found.layers[name].k[32:64])


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


COUNTED = {
    "/v1/completions": ["prompt_tokens"],
    "/v1/chat/completions": ["prompt_tokens"],
    "/v1/responses": ["input_tokens"],
    # Anthropic counts what was cached apart.
    "/v1/messages": ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"],
}
FUNCTION = {"type": "function"}
USABLE = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
USED = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Tula"}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Snow. " * 9}],
    },
]
CALLED = [
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Tula"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Snow. " * 9},
]


def test_router_names_a_requests_chunks_as_the_engine_does(
    server: Server, cluster: Cluster
) -> None:
    """vLLM's renderer without an engine, and our hashes, beside what a real server has stored."""
    renderer = VLLMRenderer(
        [str(server.model), "--served-model-name", "tiny", "--max-model-len", "2048"]
    )
    messages = [
        {"role": "system", "content": "Answer in one word. " * 8},
        {"role": "user", "content": [{"type": "text", "text": "Where is Yasnaya Polyana? " * 4}]},
    ]
    said = [{"role": "user", "content": "And Pokrovskoye, whose is that? " * 6}]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "Happy families. " * 12}),
        ("/v1/completions", {"prompt": [7 + n % 200 for n in range(150)]}),
        ("/v1/completions", {"prompt": ["All alike. " * 9, "Each in its own way. " * 9]}),
        ("/v1/completions", {"prompt": "Levin. " * 40, "truncate_prompt_tokens": 100}),
        ("/v1/chat/completions", {"messages": messages, "cache_salt": "a tenant"}),
        ("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False}),
        (
            "/v1/chat/completions",
            {"messages": messages[1:], "tools": [TOOL], "tool_choice": "none"},
        ),
        ("/v1/messages", {"system": "Be brief. " * 9, "messages": said}),
        (
            "/v1/messages",
            {
                "messages": [*said, *USED],
                "tools": [USABLE],
                "tool_choice": {"type": "none"},
                "cache_salt": "b",
            },
        ),
        ("/v1/responses", {"input": "Whose is the estate? " * 9, "instructions": "Say it. " * 9}),
        ("/v1/responses", {"input": [*said, *CALLED], "tools": [{**TOOL["function"], **FUNCTION}]}),
    ]
    placed = []
    for path, body in requests:
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        whole = {"model": "tiny", most: 1, **body}
        prompts = renderer(path, json.dumps(whole).encode())
        assert prompts is not None, body
        usage = server.post(path, whole)["usage"]
        counted = sum(usage.get(name) or 0 for name in COUNTED[path])
        assert sum(len(prompt.tokens) for prompt in prompts) == counted, body
        placed += prompts

    async def found() -> list[tuple[int, int]]:
        """Of each prompt: tokens of full chunks, and those that are in the cache."""
        directory = AskedDirectory(str(server.model))
        directory.learn([node.node_id for node in cluster.status().nodes])
        async with asyncio.timeout(START_DEADLINE_S):
            while directory.hasher is None:
                await asyncio.sleep(0.05)
            while True:
                keys = [directory.hasher.keys(prompt, 1024) for prompt in placed]
                answer = await directory.find(keys)
                pairs = [
                    (len(prompt.tokens) // 32 * 32, each.anywhere)
                    for prompt, each in zip(placed, answer or (), strict=bool(answer))
                ]
                if pairs and all(full == cached for full, cached in pairs):
                    return pairs
                await asyncio.sleep(0.05)

    pairs = asyncio.run(asyncio.wait_for(found(), 20.0))
    assert len(pairs) == len(requests) + 1
    assert all(full >= 64 for full, _ in pairs)
    picture = [{"type": "image_url", "image_url": {"url": "http://localhost:1/x.png"}}]
    seen = [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": picture}]}),
        ("/v1/chat/completions", {"messages": messages, "chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", {"messages": messages, "model": "another"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": seen}]}),
        ("/v1/responses", {"input": "go on", "previous_response_id": "resp_1"}),
    ]
    for path, body in refused:
        assert renderer(path, json.dumps({"model": "tiny", **body}).encode()) is None, body
    renderer.close()


@pytest.mark.extended
@pytest.mark.timeout(360)
def test_notebooks_run_from_their_first_cell_to_their_last(
    server: Server, cluster: Cluster
) -> None:
    notebooks = sorted((ROOT / "notebooks").glob("0[1-4]-*.ipynb"))
    environment = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.port}/v1",
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": cluster.address,
    }
    command = [sys.executable, str(CHILDREN / "notebook.py"), *map(str, notebooks)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    images = [int(line.split()[-2]) for line in done.stdout.splitlines()]
    assert len(images) == len(notebooks) == 4
    assert min(images) >= 2, done.stdout


@pytest.mark.versions
def test_interrupt_ends_server_and_leaves_cluster(server: Server, cluster: Cluster) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert cluster.status().nodes, "RayKV's actors outlive the engine"
