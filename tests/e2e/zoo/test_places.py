"""Each kind of KV where it comes from elsewhere: another engine, another life, node or disk."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.client.cluster import Cluster
from raykv.cluster import join
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from raykv.node.pool.index import FRESH_S
from raykv.node.pool.shelf import RESERVED_PART
from tests.e2e.zoo.conftest import StartZoo
from tests.fixtures.waiting import wait_until
from tests.fixtures.zoo import kinds
from tests.fixtures.zoo_engine import BLOCK

pytestmark = pytest.mark.e2e

DOCUMENT = 640

KINDS = ("llama", "mistral", "gemma3-groups", "gpt-oss", "llama4", "deepseek", "qwen3-next")
"""One of each way to keep KV; the others differ in the model behind it."""

FEW_BLOCKS = {
    "llama": 64,
    "mistral": 24,
    "gemma3-groups": 140,
    "gpt-oss": 48,
    "llama4": 72,
    "deepseek": 64,
    "qwen3-next": 32,
}
"""Of vLLM's KV cache: enough for one request, too few for those that it begins."""

FIRST_PROMPT = {"llama4": 50}
"""Tokens. vLLM reserves chunked attention's blocks for a whole prompt and gives back all but the
last chunk: an engine runs out of them where prompts are shorter than one."""

NEVER_COMPUTES = {"always_fetch": True, "request_deadline_s": 30.0}
"""However fast a model computes, what others have is fetched."""


@pytest.fixture(params=kinds(KINDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address)
    yield node
    node.stop()


def question(number: int) -> list[int]:
    return [*prompt(7, DOCUMENT), *prompt(100 + number, 70 + 17 * number)]


def knows_the_other(cluster: Cluster) -> None:
    """An engine asks nobody before its node has heard of the other one."""

    def has_spoken() -> bool:
        engines = cluster.status().engines
        return len(engines) == 2 and all(each.counters.get("prompt_tokens") for each in engines)

    wait_until(has_spoken, 20.0, "both engines know that they are two")


@pytest.mark.support("another engine")
def test_engine_loads_what_another_one_of_its_node_has_stored(
    name: str, start_zoo: StartZoo
) -> None:
    first = start_zoo(name)
    first.ask(question(0))
    (expected,) = first.ask(question(0))
    first.settle()
    other = start_zoo(name, anew=False)
    wait_until(lambda: bool(other.ask(question(0))[0]["cached"]), 20.0, "it knows what is there")
    other.process.reset()
    (found,) = other.ask(question(0))
    other.check_same(found, expected)
    assert found["cached"] >= DOCUMENT - 96


@pytest.mark.support("restart")
def test_engine_that_is_started_again_finds_the_document(name: str, start_zoo: StartZoo) -> None:
    first = start_zoo(name)
    (expected,) = first.ask(question(1))
    first.ask(question(0))
    first.settle()
    first.process.stop()
    again = start_zoo(name, anew=False)
    wait_until(lambda: bool(again.ask(question(0))[0]["cached"]), 20.0, "it knows what is there")
    again.process.reset()
    (found,) = again.ask(question(1))
    again.check_same(found, expected)
    assert found["cached"] >= DOCUMENT - 96


@pytest.mark.support("small pool")
def test_pool_that_is_too_small_serves_what_it_holds(
    name: str, cluster: Cluster, start_zoo: StartZoo
) -> None:
    """Documents that are asked for in turn; the pool has room for some of them."""
    probe = start_zoo(name)
    for number in range(3):
        probe.ask(prompt(500 + number, 300))
    probe.settle()
    taken = probe.cluster.status().nodes[0].used_bytes // 3
    engine = start_zoo(name, raykv={"pool_bytes": 6 * taken})
    documents = [prompt(500 + number, 300) for number in range(12)]
    expected = {}
    for number, document in enumerate(documents):
        if number == 6:
            # The pool is full, and what was found just now does not go.
            engine.settle()
            time.sleep(FRESH_S)
        engine.ask(document)
        expected[number] = engine.ask(document)[0]
    engine.settle()
    source, loaded = random.Random(3), 0
    for _ in range(40):
        number = min(source.randrange(12) for _ in range(3))
        (found,) = engine.ask(documents[number])
        reference = expected.setdefault(number, found)
        engine.check_same(found, reference)
        if not engine.model.is_steady and found["cached"] not in (0, reference["cached"]):
            # What is stored now was computed behind another prefix, and is not what was before.
            del expected[number]
        loaded += bool(found["cached"])
        engine.settle()
    (node,) = cluster.status().nodes
    assert node.bytes_stored > 2 * node.pool_bytes, "nothing was evicted"
    assert loaded >= 12, "hardly anything was loaded"


@pytest.mark.support("pre-emption")
def test_preemption_costs_no_answer(name: str, start_zoo: StartZoo) -> None:
    """Requests whose KV does not fit: vLLM takes blocks away while stores and loads run."""
    engine = start_zoo(name, num_gpu_blocks_override=FEW_BLOCKS[name], max_model_len=512)
    first = FIRST_PROMPT.get(name, 250)
    tokens = [prompt(600 + number, first + first * 4 // 25 * (number % 5)) for number in range(16)]
    expected = []
    for each in tokens:
        engine.ask(each)
        expected += engine.ask(each)
        engine.process.reset()
    requests = [{"prompt": each, "max_tokens": 40} for each in tokens]
    preemptions = 0.0
    for _ in range(2):
        answer = engine.process.call("serve", requests=requests)
        preemptions += answer["preemptions"]
        for found, before in zip(answer["outputs"], expected, strict=True):
            assert found["reason"] == "length"
            if engine.model.is_exact:
                assert found["tokens"][:8] == before["tokens"]
        engine.process.reset()
    assert preemptions, "nothing was pre-empted"


@pytest.mark.support("chunks of blocks")
def test_chunks_of_four_blocks_are_loaded(name: str, start_zoo: StartZoo) -> None:
    engine = start_zoo(name, raykv={"blocks_per_chunk": 4})
    engine.ask(question(0))
    if not engine.model.is_steady:
        engine.settle()
    (expected,) = engine.ask(question(0))
    engine.settle()
    (found,) = engine.ask(question(0))
    engine.check_same(found, expected)
    block = 96 if name == "qwen3-next" else 16 if name == "deepseek" else BLOCK
    assert found["cached"] >= (len(question(0)) - 1) // (4 * block) * 4 * block
    engine.settle()
    assert engine.ask(question(1))[0]["cached"] >= DOCUMENT // (4 * block) * 4 * block * 0.5


@pytest.mark.parametrize("name", kinds(KINDS))
@pytest.mark.support("fetch")
def test_document_is_fetched_from_another_node(
    name: str, cluster: Cluster, second: LocalNode, start_zoo: StartZoo
) -> None:
    nodes = (join.resolve_node_id(""), second.node_id)
    settings = [{"node_id": node, **NEVER_COMPUTES} for node in nodes]
    engine = start_zoo(name, raykv=settings[0])
    other = start_zoo(name, anew=False, raykv=settings[1], cores="1")
    for number, each in enumerate((engine, other)):
        each.ask(prompt(90 + number, 4 * BLOCK))
    knows_the_other(cluster)
    engine.ask(question(0))
    expected = engine.ask(question(0))[0]
    engine.settle()
    (found,) = other.ask(question(0))
    other.check_same(found, expected)
    assert found["cached"] >= DOCUMENT - 96
    # Of another question's windows the other node has some, and perhaps states.
    (found,) = other.ask(question(1))
    assert found["cached"] >= engine.model.found * DOCUMENT


@pytest.mark.support("disk")
def test_document_comes_back_from_a_disk(
    name: str, cluster: Cluster, start_zoo: StartZoo, tmp_path: Path
) -> None:
    probe = start_zoo(name)
    probe.ask(question(0))
    probe.settle()
    taken = cluster.status().nodes[0].used_bytes
    settings = {
        "pool_bytes": 4 * taken,
        "disk_path": str(tmp_path),
        "disk_bytes": "512MiB",
        "disk_free_bytes": "1MiB",
        **NEVER_COMPUTES,
    }
    engine = start_zoo(name, raykv=settings)
    engine.ask(prompt(5, 100))

    def is_ahead() -> bool:
        (node,) = cluster.status().nodes
        is_full = 4 * node.used_bytes > 3 * node.pool_bytes
        gone = node.chunks_stored - node.chunks
        next_ones = node.chunks * node.pool_bytes // node.used_bytes // RESERVED_PART
        return not is_full or node.disk.chunks_written >= gone + next_ones

    wait_until(lambda: not cluster.status().nodes[0].disk.problem, 20.0, "the disk is open")
    engine.ask(question(0))
    expected = engine.ask(question(0))[0]
    # What was found just now does not go when its turn has come.
    time.sleep(FRESH_S)
    for number in range(8):
        engine.ask(prompt(800 + number, len(question(0))))
        engine.settle()
        wait_until(is_ahead, 20.0, "what has gone is on the disk, and what goes next")
    engine.settle()
    before = cluster.status().nodes[0].disk.chunks_read
    (found,) = engine.ask(question(0))
    engine.check_same(found, expected)
    assert found["cached"] >= DOCUMENT - 96
    read = lambda: cluster.status().nodes[0].disk.chunks_read > before  # noqa: E731
    wait_until(read, 10.0, "it was read")
