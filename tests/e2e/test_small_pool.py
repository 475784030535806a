"""A pool and a KV cache that are both too small: eviction and pre-emption all along."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from raykv.base.geometry import aligned
from raykv.base.tenants import salt_label
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.chaos.parts import frozen
from raykv.node.pool.index import FRESH_S
from tests.fixtures.truth import directory_of, inventories
from tests.fixtures.waiting import fresh_prompt, stage, wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
CHUNK_BYTES = aligned(4 * 2 * 2 * 64 * 4 * BLOCK)
"""Four layers, keys and values, two heads of 64 floats of 4 bytes, 32 tokens."""

POOL_CHUNKS = 64
GPU_BLOCKS = 96
STEP_CHUNKS = 24
"""More than a quarter of the pool."""


@dataclass(frozen=True)
class Engines:
    """One with RayKV, and vLLM alone."""

    raykv: EngineProcess
    plain: EngineProcess


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": POOL_CHUNKS * CHUNK_BYTES,
        "client_hints": "pin",
    }
    folder = tmp_path_factory.mktemp("engines")
    started = Engines(
        *started_together(
            lambda: EngineProcess(
                tiny_model,
                folder / "raykv",
                settings,
                num_gpu_blocks_override=GPU_BLOCKS,
                max_model_len=1024,
                max_num_batched_tokens=STEP_CHUNKS * BLOCK,
            ),
            lambda: EngineProcess(tiny_model, folder / "plain", None),
        )
    )
    yield started
    started.raykv.stop()
    started.plain.stop()


@pytest.fixture(scope="module")
def engine(engines: Engines) -> EngineProcess:
    return engines.raykv


@pytest.fixture(scope="module")
def reference(engines: Engines) -> dict[int, list[int]]:
    """Tokens of vLLM alone, of its own prefix hit, by the seed of the prompt."""
    tokens = {seed: reference_tokens(engines.plain, seed) for seed in range(16)}
    engines.plain.stop()
    return tokens


def the_prompt(seed: int) -> list[int]:
    return prompt(seed, 250 + 40 * (seed % 5))


def reference_tokens(process: EngineProcess, seed: int) -> list[int]:
    process.tokens([the_prompt(seed)], max_tokens=24)
    return process.tokens([the_prompt(seed)], max_tokens=24)[0]


def flood(engine: EngineProcess) -> None:
    """A prompt of two chunks that nobody has asked before."""
    engine.tokens([fresh_prompt(2 * BLOCK)], max_tokens=1)


def flood_until(condition: Callable[[], bool], engine: EngineProcess, what: str) -> None:
    """As many as it takes."""

    def has_come() -> bool:
        flood(engine)
        return condition()

    wait_until(has_come, 60.0, what)


def chunks_of(cluster: Cluster, tokens: list[int]) -> int:
    """The chunks of a prompt that the pool has, from its beginning on."""
    return cluster.lookup(tokens=tokens).cached_tokens // BLOCK


@pytest.mark.support("small pool", models=["llama"])
@pytest.mark.versions
@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.extended)])
def test_eviction_during_loads_gives_no_wrong_token(
    engine: EngineProcess, cluster: Cluster, reference: dict[int, list[int]], rounds: int
) -> None:
    """16 prompts of 8 to 14 chunks through a pool of 64, several at a time, in random order."""
    source = random.Random(7)
    for _ in range(rounds):
        seeds = source.sample(range(16), 4)
        found = engine.tokens([the_prompt(seed) for seed in seeds], max_tokens=24)
        assert found == [reference[seed] for seed in seeds]
        engine.reset()
    (node,) = cluster.status().nodes
    assert node.chunks <= POOL_CHUNKS
    assert node.bytes_stored > 2 * POOL_CHUNKS * CHUNK_BYTES, "nothing was evicted"
    assert node.bytes_loaded > 0, "nothing was loaded"


def test_live_plan_says_what_more_room_would_have_saved(
    engine: EngineProcess, cluster: Cluster
) -> None:
    """The prompts in turn: each has been evicted when it comes again, and all have some 22 MiB."""
    before = cluster.more_room()
    for seed in [*range(16)] * 2:
        engine.tokens([the_prompt(seed)], max_tokens=1)
        engine.reset()
    num_tokens = 2 * sum(len(the_prompt(seed)) for seed in range(16))

    def have_come() -> bool:
        # Of earlier tests too. What became of a request is told when the engine works.
        engine.tokens([[1, 2, 3]], max_tokens=1)
        return cluster.more_room().prompt_tokens - before.prompt_tokens >= num_tokens

    wait_until(have_come, 20.0, "all records have come")
    found = cluster.more_room()
    computed = found.computed_tokens - before.computed_tokens
    saved = found.saved_tokens[0] - before.saved_tokens[0]
    # The first time some prompts were there still, or had been there in another test.
    assert computed / 3 < saved < computed
    assert found.saved_tokens == sorted(found.saved_tokens)
    assert (found.nodes, found.reach_bytes) == (1, None)
    text = CliRunner().invoke(app, ["plan", "--live", "--address", cluster.address]).output
    assert "one more GiB in each pool would save" in text


def test_prompt_as_long_as_a_step_is_stored_whole_in_a_full_pool(
    engine: EngineProcess, cluster: Cluster
) -> None:
    """Not the first one, if all others have been short since the pool was filled; and without what
    was loaded before, which stays longer than what nobody has asked for again.
    """
    cluster.clear()
    engine.reset()
    stored = cluster.status().nodes[0].chunks_stored

    def is_full() -> bool:
        return cluster.status().nodes[0].chunks_stored >= stored + POOL_CHUNKS

    flood_until(is_full, engine, "short prompts fill the pool")
    first, tokens = (prompt(seed, STEP_CHUNKS * BLOCK) for seed in (890, 891))
    engine.tokens([first], max_tokens=2)
    # The second step begins the store.
    engine.tokens([tokens], max_tokens=2)
    wait_until(lambda: chunks_of(cluster, tokens) == STEP_CHUNKS, 10.0, "all of it is stored")
    engine.reset()
    assert engine.cached([tokens], max_tokens=1) == [STEP_CHUNKS * BLOCK]


@pytest.mark.support("pin", models=["llama"])
def test_prompt_that_its_request_has_pinned_outlives_eviction(
    engine: EngineProcess, cluster: Cluster
) -> None:
    """Requests may pin 8 chunks here, as many as the prompt has."""
    pinned, plain = prompt(900, 8 * BLOCK), prompt(901, 8 * BLOCK)
    params = {"raykv_pin_s": 600, "raykv_priority": 5, "raykv_pin": "nonsense"}
    engine.call("generate", prompts=[pinned], max_tokens=1, params=params)
    have_stored(engine, cluster, plain)
    wait_until(lambda: cluster.pins().client_chunks == 8, 10.0, "the pins are told")
    flood_until(lambda: chunks_of(cluster, plain) < 8, engine, "the other prompt goes")
    engine.reset()
    assert engine.cached([pinned], max_tokens=1) == [8 * BLOCK]
    (only,) = cluster.status().nodes
    assert only.pinned_chunks == 8
    # There is no key `raykv_pin`.
    assert cluster.status().engines[0].counters["hints_ignored"] == 1


def have_stored(engine: EngineProcess, cluster: Cluster, tokens: list[int]) -> None:
    """Have a prompt in the pool; after a clear nothing is stored until the node has heard of it."""

    def are_there() -> bool:
        engine.reset()
        engine.tokens([tokens], max_tokens=2)
        return chunks_of(cluster, tokens) == len(tokens) // BLOCK

    wait_until(are_there, 30.0, "the prompt is stored")


def knows(cluster: Cluster, session: str, chunks: int) -> bool:
    """Whether the node has heard of so many chunks of a session."""
    return {each.session: each.chunks for each in cluster.sessions()}.get(session) == chunks


def say(engine: EngineProcess, tokens: list[int], **params: Any) -> list[int]:
    """A request that says something of its session; its answer."""
    named = {f"raykv_{name}": value for name, value in params.items()}
    (output,) = engine.call("generate", prompts=[tokens], params=named)
    return list(output["tokens"])


@pytest.mark.support("sessions", models=["llama"])
@pytest.mark.versions
def test_session_that_is_over_is_evicted_before_older_prompts_and_what_it_shares_stays(
    engine: EngineProcess, cluster: Cluster
) -> None:
    cluster.clear()
    engine.reset()
    shared = prompt(910, 4 * BLOCK)
    plain, done, other = (
        prompt(911, 8 * BLOCK),
        [*shared, *prompt(912, 24 * BLOCK)],
        [*shared, *prompt(913, 2 * BLOCK)],
    )
    have_stored(engine, cluster, plain)
    say(engine, other, session="other")
    answer = say(engine, done, session="done")
    assert say(engine, done, session="done", session_over=True) == answer
    wait_until(lambda: knows(cluster, "done", 28), 10.0, "its chunks are told")
    # That a request has ended is told with the next step of the engine.
    flood(engine)
    wait_until(lambda: stage(cluster, "done") == "over", 10.0, "its end is told")
    assert cluster.session("done").status().private_chunks == 24
    assert (chunks_of(cluster, plain), chunks_of(cluster, done)) == (8, 28)
    # What was just found does not go.
    time.sleep(FRESH_S)
    flood_until(lambda: chunks_of(cluster, done) < 28, engine, "what is over goes")
    left = chunks_of(cluster, done)
    assert 4 <= left < 28
    assert chunks_of(cluster, plain) == 8, "the older prompt is still there"
    assert chunks_of(cluster, other) == 6
    engine.reset()
    before = cluster.requests().last
    (output,) = engine.call("generate", prompts=[done])
    assert (output["cached"], output["tokens"]) == (left * BLOCK, answer)

    def hints() -> list[str]:
        found = cluster.requests(before).found
        return [each.hint for each in found if each.record.prompt == len(done)]

    wait_until(lambda: bool(hints()), 10.0, "the request is told")
    assert hints() == ["released: its session 'done' was over"]


@pytest.mark.support("sessions", models=["llama"])
def test_session_that_pauses_outlives_a_flood_and_goes_when_its_time_is_over(
    engine: EngineProcess, cluster: Cluster
) -> None:
    cluster.clear()
    engine.reset()
    paused, plain = prompt(930, 6 * BLOCK), prompt(931, 6 * BLOCK)
    have_stored(engine, cluster, paused)
    answer = say(engine, paused, session="agent", pause_s=600)
    have_stored(engine, cluster, plain)
    wait_until(lambda: stage(cluster, "agent") == "paused", 10.0, "the pause is told")
    flood_until(lambda: not chunks_of(cluster, plain), engine, "the other prompt goes")
    assert chunks_of(cluster, paused) == 6
    engine.reset()
    (output,) = engine.call("generate", prompts=[paused])
    assert (output["cached"], output["tokens"]) == (6 * BLOCK, answer)
    have_stored(engine, cluster, plain)
    assert cluster.session("agent").pause(0.2).stage == "paused"
    wait_until(lambda: stage(cluster, "agent") == "given up", 10.0, "its time is over")
    flood_until(lambda: not chunks_of(cluster, paused), engine, "what paused goes")
    assert chunks_of(cluster, plain) == 6


@pytest.mark.versions
def test_kv_hints_of_vllm_name_the_session(engine: EngineProcess, cluster: Cluster) -> None:
    payload = {"raykv_session": "hinted", "raykv_session_over": True}
    action = {
        "action_id": "1", "action_type": "raykv.hints", "action_version": "1", "payload": payload
    }  # fmt: skip
    hints = {"protocol_version": "0.1", "message_id": "1", "actions": [action]}
    requests = [{"prompt": prompt(960, 2 * BLOCK), "max_tokens": 1}]
    engine.call("serve", requests=requests, kv_hints=hints)
    flood(engine)
    wait_until(lambda: knows(cluster, "hinted", 2), 10.0, "its chunks are told")
    assert stage(cluster, "hinted") == "over"
    engine.reset()


@pytest.mark.support("pre-emption", models=["llama"])
@pytest.mark.versions
def test_preemption_gives_no_wrong_token(
    engine: EngineProcess, reference: dict[int, list[int]]
) -> None:
    """Ten requests whose KV is 1.5 times the cache: vLLM takes blocks away while stores run."""
    before = engine.call("counters").get("vllm:num_preemptions", 0.0)
    seeds = list(range(10))
    for _ in range(2):
        found = engine.tokens([the_prompt(seed) for seed in seeds], max_tokens=24)
        assert found == [reference[seed] for seed in seeds]
    assert engine.call("counters")["vllm:num_preemptions"] > before, "nothing was pre-empted"
    engine.reset()


NOISY = "the salt of the noisy one"
TURNS = 3


@dataclass(frozen=True)
class Tenant:
    """One that has asked for two prompts once, and what it was answered."""

    salt: str
    prompts: list[list[int]]
    answers: list[list[int]]


def tenant_with_chunks(engine: EngineProcess, cluster: Cluster, number: int) -> Tenant:
    """A new one, all of whose 16 chunks are stored: in a small pool not all are that come."""
    asked: list[Tenant] = []

    def whole() -> list[Tenant]:
        held = {each.tenant: each.pool_bytes for each in cluster.quotas.tenants()}
        return [each for each in asked if held.get(salt_label(each.salt)) == 16 * CHUNK_BYTES]

    def is_stored() -> bool:
        seed = 100 * number + len(asked)
        hers = [prompt(10_000 + 2 * seed + half, 8 * BLOCK + 1) for half in range(2)]
        salt = f"the salt of {seed}"
        asked.append(Tenant(salt, hers, engine.tokens(hers, max_tokens=8, salt=salt)))
        engine.reset()
        return bool(whole())

    wait_until(is_stored, 60.0, "a new tenant's chunks are stored")
    return whole()[-1]


def found_after_flood(engine: EngineProcess, tenant: Tenant, number: int) -> int:
    """How many tokens a tenant finds when another one has filled the pool twice."""
    for seed in range(16):
        engine.tokens([prompt(3000 + 16 * number + seed, 8 * BLOCK)], max_tokens=1, salt=NOISY)
    engine.reset()
    found = engine.cached(tenant.prompts, max_tokens=1, salt=tenant.salt)
    engine.reset()
    assert engine.tokens(tenant.prompts, max_tokens=8, salt=tenant.salt) == tenant.answers
    return sum(found)


@pytest.mark.versions
@pytest.mark.extended
def test_tenant_that_floods_costs_another_hardly_any_hits(
    engine: EngineProcess, cluster: Cluster
) -> None:
    """The quiet one has 16 chunks, and is guaranteed 25 of the pool."""
    found = 0
    for turn in range(TURNS):
        quiet = tenant_with_chunks(engine, cluster, turn)
        cluster.quotas.set("quiet", guaranteed=0.4, salt=quiet.salt)
        found += found_after_flood(engine, quiet, turn)
    assert found >= 0.95 * TURNS * 2 * 8 * BLOCK
    assert "the salt of" not in str(cluster.status())
    cluster.quotas.remove("quiet")
    without = 0
    for turn in range(TURNS, 2 * TURNS):
        quiet = tenant_with_chunks(engine, cluster, turn)
        without += found_after_flood(engine, quiet, turn)
    assert without < 0.5 * TURNS * 2 * 8 * BLOCK


AWAY_S = 75.0
"""Longer than anything that the scheduler actor has said counts."""


@pytest.mark.extended
def test_full_pool_goes_on_while_the_scheduler_actor_is_frozen(
    engine: EngineProcess, cluster: Cluster
) -> None:
    def is_found(tokens: list[int]) -> bool:
        engine.reset()
        return engine.cached([tokens], max_tokens=1) == [2 * BLOCK]

    actor = ask.find_scheduler_actor()
    assert actor is not None
    pid = int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10.0))
    stored = cluster.status().nodes[0].chunks_stored
    flood_until(
        lambda: cluster.status().nodes[0].chunks_stored >= stored + POOL_CHUNKS,
        engine,
        "the pool is full",
    )
    with frozen(pid):
        until = time.monotonic() + AWAY_S
        while time.monotonic() < until:
            tokens = fresh_prompt(2 * BLOCK + 1)
            engine.tokens([tokens], max_tokens=2)
            wait_until(partial(is_found, tokens), 10.0, "a new prompt is stored and found")
    wait_until(
        lambda: bool(inventories(cluster)) and directory_of(cluster) == inventories(cluster),
        5.0,
        "the directory knows what the node has",
    )
