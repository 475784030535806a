"""Chunks of four blocks; a second engine finds what the first one stored; strangers do not.

What the engines say of those chunks is what subscribers of events get.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.protocol.events import PublisherSettings
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import wait_until, wait_until_stored

pytestmark = pytest.mark.e2e

BLOCK = 32
CHUNK = 4 * BLOCK

PROMPTS = [prompt(40 + i, length) for i, length in enumerate([383, 384, 385, 500, 1000])]


@pytest.fixture(scope="module")
def fresh_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster.down()
    POOL_FILE["path"] = str(tmp_path_factory.mktemp("pool") / "pool")
    yield cluster
    cluster.down()


POOL_FILE: dict[str, str] = {}
"""The pool of this module's engines is a file, so that it outlives its NodeActor."""


def start(
    cluster: Cluster,
    model: Path,
    log: Path,
    blocks_per_chunk: int,
    events: dict[str, Any] | None = None,
    **settings: Any,
) -> EngineProcess:
    extra = {
        "ray_address": cluster.address,
        "pool_bytes": "128MiB",
        "pool_path": POOL_FILE["path"],
        "blocks_per_chunk": blocks_per_chunk,
        **settings,
    }
    config: dict[str, Any] = {} if events is None else {"kv_events_config": events}
    return EngineProcess(model, log, extra, **config)


@pytest.fixture(scope="module")
def ours() -> PublisherSettings:
    """Where RayKV's own publisher is."""
    return PublisherSettings(f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def vllms() -> dict[str, Any]:
    """Settings of vLLM's own publisher."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }


@pytest.fixture(scope="module")
def first_run(
    fresh_cluster: Cluster,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ours: PublisherSettings,
) -> list[list[int]]:
    """An engine computes and stores the prompts, then ends; gives vLLM's own tokens."""
    log = tmp_path_factory.mktemp("first") / "log"
    engine = start(fresh_cluster, tiny_model, log, 4, events_endpoint=ours.endpoint)
    engine.tokens(PROMPTS)
    reference = engine.tokens(PROMPTS)

    def are_described() -> bool:
        keys = {key for _, _, key in fresh_cluster.snapshot().chunks}
        return keys <= fresh_cluster.tokens_of(sorted(keys)).keys()

    wait_until_stored(fresh_cluster)
    # What an engine has not told when it ends, nobody knows.
    wait_until(are_described, 20.0, "the chunks' tokens are told")
    engine.stop()
    return reference


@pytest.fixture(scope="module")
def second_engine(
    first_run: list[list[int]],
    fresh_cluster: Cluster,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    vllms: dict[str, Any],
) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("second") / "log"
    engine = start(fresh_cluster, tiny_model, log, 4, vllms, self_describing_kv_events=True)
    yield engine
    engine.stop()


def test_second_engine_loads_what_first_one_stored(
    second_engine: EngineProcess, first_run: list[list[int]]
) -> None:
    outputs = second_engine.call("generate", prompts=PROMPTS)
    assert [output["tokens"] for output in outputs] == first_run
    expected = [len(tokens) // CHUNK * CHUNK for tokens in PROMPTS]
    assert [output["cached"] for output in outputs] == expected
    second_engine.reset()


def replayed(replay_endpoint: str) -> list[dict[str, Any]]:
    """All events that a publisher remembers."""
    events: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as questions:
        questions.setsockopt(zmq.LINGER, 0)
        questions.connect(replay_endpoint.replace("*", "127.0.0.1"))
        questions.send_multipart([b"", bytes(8)])
        while True:
            assert questions.poll(10_000), "no answer from the replay socket"
            payload = questions.recv_multipart()[-1]
            if not payload:
                return events
            events += msgspec.msgpack.decode(payload)[1]


def chunk_blocks(tokens: list[int]) -> list[tuple[list[int], int | None, list[int]]]:
    """The chunks of a prompt as vLLM hashes them: block hashes, the hash before, and tokens."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    hashes = [int.from_bytes(each[-8:], "big") for each in request.block_hashes]
    return [
        (hashes[i : i + 4], hashes[i - 1] if i else None, tokens[i * BLOCK : (i + 4) * BLOCK])
        for i in range(0, len(hashes) // 4 * 4, 4)
    ]


def stored_blocks(events: list[dict[str, Any]]) -> list[tuple[list[int], int | None, list[int]]]:
    return [
        (event["block_hashes"], event["parent_block_hash"], event["token_ids"])
        for event in events
        if event["type"] == "BlockStored" and event["medium"] == "CPU"
    ]


def test_published_chunks_are_those_of_the_prompts(
    first_run: list[list[int]], fresh_cluster: Cluster, ours: PublisherSettings
) -> None:
    """With vLLM's hashes of their blocks, the prompts' tokens, and each after the one before it."""
    expected = [chunk for tokens in PROMPTS for chunk in chunk_blocks(tokens)]
    held = len(fresh_cluster.snapshot().chunks)

    def is_told() -> bool:
        status = fresh_cluster.publisher()
        return status is not None and status.held == held

    wait_until(is_told, 20.0, "all chunks are published for the engine's setting")
    fresh_cluster.stop_publishing()
    fresh_cluster.publish(ours)
    wait_until(is_told, 20.0, "all chunks are published again, with a replay")
    told = stored_blocks(replayed(ours.replay_endpoint))
    assert all(chunk in told for chunk in expected)
    known = {block for hashes, _, _ in told for block in hashes}
    assert all(parent in known for _, parent, _ in told if parent is not None)
    keys = [key for _, _, key in fresh_cluster.snapshot().chunks]
    rows = fresh_cluster.tokens_of(keys)
    assert rows.keys() == set(keys)
    assert {tuple(row.token_ids) for row in rows.values()} >= {
        tuple(tokens) for _, _, tokens in expected
    }


def test_vllms_own_events_tell_of_chunks_that_were_found(
    second_engine: EngineProcess, vllms: dict[str, Any]
) -> None:
    second_engine.tokens(PROMPTS)
    second_engine.reset()
    expected = [chunk for tokens in PROMPTS for chunk in chunk_blocks(tokens)]

    def are_told() -> bool:
        told = stored_blocks(replayed(vllms["replay_endpoint"]))
        return all(chunk in told for chunk in expected)

    wait_until(are_told, 20.0, "vLLM's subscribers know of the chunks")


def test_load_begins_inside_of_chunk_after_local_prefix_hit(
    second_engine: EngineProcess, first_run: list[list[int]]
) -> None:
    """vLLM's own cache has six blocks of a prompt, RayKV has chunks of four."""
    long = PROMPTS[4]
    second_engine.tokens([long[: 6 * BLOCK]], params={"raykv_load": False, "raykv_store": False})
    outputs = second_engine.call("generate", prompts=[long])
    assert outputs[0]["tokens"] == first_run[4]
    assert outputs[0]["cached"] == len(long) // CHUNK * CHUNK
    second_engine.reset()


def test_pool_file_outlives_its_node_actor(
    second_engine: EngineProcess, first_run: list[list[int]], fresh_cluster: Cluster
) -> None:
    (before,) = fresh_cluster.status().nodes
    os.kill(before.pid, signal.SIGKILL)

    def loads() -> bool:
        """Nothing is stored here, so what is loaded was in the file."""
        outputs = second_engine.call("generate", prompts=PROMPTS, params={"raykv_store": False})
        second_engine.reset()
        assert [output["tokens"] for output in outputs] == first_run
        return all(output["cached"] >= 2 * CHUNK for output in outputs)

    wait_until(loads, 60.0, "the chunks of the pool file are loaded again")
    (after,) = fresh_cluster.status().nodes
    assert after.life > before.life
    assert after.bytes_stored == 0


def test_ended_engine_is_gone(second_engine: EngineProcess, fresh_cluster: Cluster) -> None:
    status = fresh_cluster.status()
    assert len(status.engines) == 1
    assert status.nodes[0].num_workers == 1


@pytest.mark.parametrize(
    ("blocks_per_chunk", "settings"),
    [(1, {}), pytest.param(4, {"weights_version": "2"}, marks=pytest.mark.extended)],
    ids=["other-chunk-size", "other-weights-version"],
)
def test_engine_of_other_namespace_finds_nothing(
    first_run: list[list[int]],
    second_engine: EngineProcess,
    fresh_cluster: Cluster,
    tiny_model: Path,
    tmp_path: Path,
    blocks_per_chunk: int,
    settings: dict[str, Any],
) -> None:
    engine = start(fresh_cluster, tiny_model, tmp_path / "log", blocks_per_chunk, **settings)
    try:
        outputs = engine.call("generate", prompts=PROMPTS)
        assert [output["cached"] for output in outputs] == [0] * len(PROMPTS)
        assert [output["tokens"] for output in outputs] == first_run
        engine.reset()
        # It shares the pool all the same, in a namespace of its own.
        wait_until(
            lambda: engine.cached(PROMPTS[:1]) != [0] or engine.call("reset") is False,
            20.0,
            "the pool takes chunks of the other namespace",
        )
        assert len(fresh_cluster.status().namespaces) >= 2
    finally:
        engine.stop()
