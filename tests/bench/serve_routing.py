"""`serve_routing`: conversations over two replicas on two Ray nodes of this host, by router.

An application of Ray Serve for each router, with RayKV and without: its engines' own KV caches hold
a few conversations only. Several clients go on at once; whose turn is next is random, the same for
all. Counted are the prompts' tokens that were not cached, as vLLM says it in its answers, and the
time to the first token. Before that, other conversations are had, so that nobody's start counts:
the first prompt of an engine took up to 10 s. Both nodes share this host's cores, so that the times
say little more than that nothing waits: the tokens are what a router is about.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import ray

from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.lab.demo.tiny_llama import tiny_llama
from tests.bench.completions import ModelServer
from tests.bench.conversations import (
    Answered,
    Conversation,
    ConversationLoad,
    Sums,
    conversations,
    pick,
    sums,
)
from tests.bench.serving import Bed
from tests.fixtures.ports import free_port
from tests.fixtures.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

ROUTERS = ("round_robin", "prefix", "kv")
WITH, WITHOUT = "with RayKV", "without"

FALLBACK = "power_of_two"
"""What "kv" is without RayKV: there is no directory to ask."""

REAL = ConversationLoad(conversations=8, turns=4, system_words=120, turn_words=90, answer_tokens=16)
TINY = ConversationLoad(conversations=6, turns=3, system_words=30, turn_words=30, answer_tokens=4)
CLIENTS = 2
WARM_TURNS = 1
WARM_SEED = 1000
"""Of conversations that are not counted; they have nothing in common with those that are."""
APP = "routing"

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_worker_niceness": "0",
}
"""Of each engine: two that both compute with all cores keep each other waiting for seconds."""

READY_S = 120.0
LOOK_S = 0.2

KV_TOKENS = 2048
"""Of an engine's own KV cache: fewer than the conversations have, more than the longest one."""

BLOCK = 32

SPARE_BLOCKS = 2
"""One that vLLM keeps for itself, and what it rounds down."""

METRIC = "ray_raykv_routed_requests"
SCRAPE_S = 5.0
_OUTCOME = re.compile(r'outcome="([^"]*)"')


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("serve_routing")
    # Kept by Ray where no GPU is asked for.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    load = TINY if options.quick else REAL
    found: dict[str, list[Sums]] = {}
    with _nodes(options) as bed:
        for number in range(options.repeats_or(1)):
            for router, has_raykv in subjects():
                name = f"{router}, {WITH if has_raykv else WITHOUT}"
                found.setdefault(name, []).append(
                    measure(bed, router, load, number, has_raykv=has_raykv)
                )
    result.rows = rows(load, found)
    computed = result.row(_case(load), f"kv, {WITH}: computed")
    for other in (f"round_robin, {WITH}", f"prefix, {WITH}", f"prefix, {WITHOUT}"):
        ratio = computed.ratio_to(result.row(_case(load), f"{other}: computed"))
        result.verdicts.append(Verdict(f"computes no more than {other}", ratio, 1.0))
    return result


def subjects() -> list[tuple[str, bool]]:
    """Routers, and whether RayKV is there."""
    without = (*(name for name in ROUTERS if name != "kv"), FALLBACK)
    return [*((name, True) for name in ROUTERS), *((name, False) for name in without)]


def rows(load: ConversationLoad, found: dict[str, list[Sums]]) -> list[Row]:
    """Three for each subject."""
    made = []
    for name, some in found.items():
        columns: dict[str, tuple[str, list[float]]] = {
            "computed": ("tokens", [float(each.computed) for each in some]),
            "mean time to first token": ("s", [each.mean_ttft_s for each in some]),
            "p99": ("s", [each.p99_ttft_s for each in some]),
        }
        for what, (unit, values) in columns.items():
            made.append(Row(_case(load), f"{name}: {what}", unit, tuple(values)))
    return made


def _case(load: ConversationLoad) -> str:
    return f"{load.conversations} conversations of {load.turns} turns"


@contextmanager
def _nodes(options: Options) -> Iterator[Bed]:
    """Two Ray nodes, and a model that talks."""
    with Bed(quick=options.quick, max_tokens=KV_TOKENS, pool_bytes=256 << 20) as bed:
        if options.quick:
            bed.model = talking_tiny_model(bed.folder / "talking")
        node = bed.second_node()
        assert node, bed
        yield bed


def talking_tiny_model(folder: Path) -> Path:
    """A tiny random model with a tokenizer: one token for a byte."""
    model = tiny_llama(folder, vocab_size=VOCAB_SIZE, max_position=2 * KV_TOKENS)
    return write_tiny_tokenizer(model)


def measure(bed: Bed, router: str, load: ConversationLoad, seed: int, *, has_raykv: bool) -> Sums:
    """One application, from its start to its end."""
    from ray import serve

    from raykv.serve import build_app

    app = build_app(
        {
            "model": str(bed.model),
            "name": "model",
            "engine_args": {
                "served_model_name": "model",
                "max_model_len": KV_TOKENS,
                "dtype": "float32",
                "enforce_eager": True,
                "block_size": BLOCK,
                "kv_cache_memory_bytes": _kv_bytes(bed.model),
                "enable_prompt_tokens_details": True,
            },
            "raykv": {"pool_bytes": str(bed.pool_bytes)} if has_raykv else None,
            "deployment": {
                "num_replicas": 2,
                "max_replicas_per_node": 1,
                "ray_actor_options": {
                    "num_cpus": 1,
                    "runtime_env": {"env_vars": ONE_THREAD},
                },
            },
            "router": {"policy": router},
        }
    )
    port = free_port()
    serve.start(http_options={"port": port})
    try:
        serve.run(app, name=APP, route_prefix="/")
        server = ModelServer(port, "model")
        if router == "kv":
            _wait_until_placing(server)
        _talk(server, replace(load, turns=WARM_TURNS), seed + WARM_SEED)
        return sums(_talk(server, load, seed))
    finally:
        serve.shutdown()
        bed.cluster.down()


def _kv_bytes(model: Path) -> int:
    """Bytes of an engine's KV cache that takes a prompt of `KV_TOKENS`, in float32."""
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width * 4
    return int(per_token * (KV_TOKENS + SPARE_BLOCKS * BLOCK))


def _wait_until_placing(server: ModelServer) -> None:
    """Wait until the router has its tokenizer and knows its namespace: short requests show it."""
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at and not outcomes()["placed"]:
        server.chat([{"role": "user", "content": "ready?"}], 1)
        time.sleep(LOOK_S)


def _talk(server: ModelServer, load: ConversationLoad, seed: int) -> list[Answered]:
    """All conversations, by a few clients."""
    waiting: list[Conversation] = conversations(load, seed)
    random, lock = Random(seed), threading.Lock()
    answered: list[Answered] = []

    def client() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mine = waiting.pop(pick(waiting, random))
                messages = mine.ask()
            done = server.chat(messages, load.answer_tokens)
            mine.answered(done.text)
            with lock:
                answered.append(Answered(done.ttft_s, done.prompt_tokens, done.cached))
                if not mine.is_over:
                    waiting.append(mine)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answered) == load.conversations * load.turns, "a client has failed"
    return answered


def outcomes() -> Counter[str]:
    """Requests by outcome, over all nodes of this process's cluster."""
    found: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"]:
            address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with urllib.request.urlopen(address, timeout=SCRAPE_S) as answer:
                found += counted(answer.read().decode())
    return found


def counted(exposition: str) -> Counter[str]:
    """Requests by outcome in one scrape."""
    found: Counter[str] = Counter()
    for line in exposition.splitlines():
        outcome = _OUTCOME.search(line)
        if line.startswith(METRIC) and outcome is not None:
            found[outcome[1]] += int(float(line.rsplit(" ", 1)[1]))
    return found
