"""What reads the cache tells the truth of models with several KV groups."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest

from raykv import inspect
from raykv.base.errors import ClusterError
from raykv.base.ids import Key, MissReason, group_of
from raykv.inspect import ChunkKV
from raykv.lab.bench.prompts import prompt
from raykv.prompts.block_hashes import PLAIN
from raykv.prompts.prompt_keys import PromptTokens
from raykv.protocol.descriptions import ChunkGroup, parse_groups
from raykv.protocol.events import BlockRemoved, BlockStored
from raykv.protocol.reader import PromptLookup
from raykv.serve.router.directory import AskedDirectory
from tests.e2e.zoo.conftest import StartZoo
from tests.fixtures.waiting import wait_until
from tests.fixtures.zoo import kinds
from tests.fixtures.zoo_engine import ZooEngine

pytestmark = pytest.mark.e2e

KINDS = (
    "llama",
    "mistral",
    "gemma3",
    "gemma3-groups",
    "gpt-oss",
    "llama4",
    "deepseek",
    "qwen3-next",
)

PARTS_STORED = ("gemma3", "gemma3-groups", "gpt-oss", "qwen3-next")
"""Those of which little is stored between a prompt's beginning and its end, but for the chunks of
full attention."""

DOCUMENT = 576
"""Tokens: a whole number of chunks of every kind."""

KV_TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=kinds(KINDS))
def engine(request: pytest.FixtureRequest, start_zoo: StartZoo) -> ZooEngine:
    settings = {"pool_bytes": "24MiB", "describe_chunks": True}
    started = start_zoo(request.param, raykv=settings)
    # A NodeActor's first store takes seconds, and a state is offered once.
    started.ask(prompt(5, 100))
    started.settle()
    return started


def groups_of(engine: ZooEngine) -> list[ChunkGroup]:
    (space,) = engine.cluster.status().spaces
    return parse_groups(space.traits["chunks"])


def question(document: int, number: int, length: int = 90) -> list[int]:
    return [*prompt(document, DOCUMENT), *prompt(100 + number, length)]


def look_up(engine: ZooEngine, tokens: list[int]) -> PromptLookup:
    found: PromptLookup = engine.cluster.lookup(tokens=tokens)
    return found


def slot_bytes(engine: ZooEngine) -> int:
    return next(engine.cluster.chunks(limit=1)).num_bytes


def generate(engine: ZooEngine, tokens: list[int]) -> dict[str, Any]:
    """The answer to a prompt, with the request's id."""
    (answer,) = engine.process.call("generate", prompts=[tokens])
    found: dict[str, Any] = answer
    engine.settle()
    return found


@pytest.mark.support("lookup")
def test_lookup_says_what_the_engine_then_loads(engine: ZooEngine) -> None:
    chunk = groups_of(engine)[0].tokens
    several = [prompt(seed, 4 * chunk) for seed in (2, 3)]
    engine.ask(question(1, 0), *several)
    engine.settle()
    for tokens in (
        question(1, 0),
        question(1, 1),
        question(1, 2),
        several[0],
        [*several[0], 7],
        several[1][: 3 * chunk + 1],
        several[1][: 3 * chunk],
        prompt(4, 300),
    ):
        told = look_up(engine, tokens)
        loaded = generate(engine, tokens)["cached"]
        # The last token is computed in any case; of full attention alone it is loaded as well.
        assert told.cached_tokens - (told.cached_tokens == len(tokens)) <= loaded
        assert loaded <= told.cached_tokens, len(tokens)


@pytest.mark.support("lookup")
def test_keys_of_a_lookup_are_the_chunks_that_are_loaded(engine: ZooEngine) -> None:
    tokens = question(1, 0)
    loadable = tokens[: look_up(engine, tokens).cached_tokens + 1]
    told = look_up(engine, loadable)
    assert told.cached_tokens == len(loadable) - 1
    (node,) = engine.cluster.status().nodes
    before = node.chunks_loaded
    assert generate(engine, loadable)["cached"] == told.cached_tokens
    (node,) = engine.cluster.status().nodes
    loaded = node.chunks_loaded - before
    # Of local chunks vLLM wants to find all, and loads those since the last border of one.
    assert loaded == len(told.keys) or (engine.name == "llama4" and loaded < len(told.keys))


@pytest.mark.support("routing")
def test_router_is_told_what_the_engine_would_load(engine: ZooEngine) -> None:
    (node,) = engine.cluster.status().nodes

    async def routed(tokens: list[int]) -> int:
        directory = AskedDirectory(str(engine.folder))
        directory.learn([node.node_id])
        while directory.hasher is None:
            await asyncio.sleep(0.02)
        # Time is what this machine may lack.
        for _ in range(20):
            found = await directory.find([directory.hasher.keys(PromptTokens(tokens, PLAIN), 1024)])
            if found is not None:
                return found[0].on_nodes.get(node.node_id, 0)
        raise AssertionError("the directory does not answer")

    for tokens in (question(1, 0), question(1, 3), prompt(2, 4 * 96), prompt(4, 90)):
        assert asyncio.run(routed(tokens)) == look_up(engine, tokens).cached_tokens


@pytest.mark.support("listing")
def test_listing_has_the_chunks_of_each_group(engine: ZooEngine) -> None:
    counts = engine.chunks()
    for group in groups_of(engine):
        listed = list(engine.cluster.chunks(group=group.group))
        assert len(listed) == counts[group.group] > 0
        assert {each.group for each in listed} == {group.group}
        (one,) = engine.cluster.chunk(listed[0].key)
        assert (one.key, one.node_id) == (listed[0].key, listed[0].node_id)
    (space,) = engine.cluster.status().spaces
    assert space.chunks == counts.total()
    assert space.num_bytes == counts.total() * slot_bytes(engine)


@pytest.mark.support("inspect")
def test_frames_and_sizes_are_those_of_the_pool(engine: ZooEngine) -> None:
    counts = engine.chunks()
    frame = inspect.chunks(engine.cluster)
    assert Counter(frame["group"].tolist()) == counts
    (node,) = engine.cluster.status().nodes
    assert frame["bytes"].sum() == node.used_bytes
    whole = [each.group for each in groups_of(engine) if each.window is None]
    if whole:
        expected = round(node.used_bytes / counts[whole[0]])
        assert inspect.bytes_per_chunk(engine.cluster) == expected


@pytest.mark.support("inspect")
def test_kv_of_chunks_is_read_group_by_group(engine: ZooEngine) -> None:
    tokens = prompt(6, 2 * DOCUMENT // 6)
    generate(engine, tokens)
    told = look_up(engine, tokens)
    for group in groups_of(engine):
        keys = [each.key for each in told.chunks if each.nodes and each.group == group.group]
        is_state = engine.name == "qwen3-next" and group.window is not None
        if is_state or engine.name == "deepseek":
            with pytest.raises(ClusterError, match="can't be read as K and V"):
                read_all(engine, keys, told, tokens)
        elif keys:
            read_all(engine, keys, told, tokens)


def read_all(engine: ZooEngine, keys: list[bytes], told: PromptLookup, tokens: list[int]) -> None:
    is_described = any(each.window is None for each in groups_of(engine))
    if is_described:
        # That comes with an exchange after the one that says what was stored.
        wait_until(
            lambda: inspect.kv(engine.cluster, keys).tokens is not None, 20.0, "it is described"
        )
    found = inspect.kv(engine.cluster, keys)
    first = next(each.first_token for each in told.chunks if each.key == keys[0])
    expected = tokens[first : first + found.num_tokens]
    assert found.tokens == (expected if is_described else None)
    if engine.name == "gemma3":
        assert_as_transformers_computes(engine, found, tokens, first)


def assert_as_transformers_computes(
    engine: ZooEngine, found: ChunkKV, tokens: list[int], first: int
) -> None:
    """K and V of a Gemma; transformers keeps the last window of most layers alone."""
    import torch
    from transformers import Gemma3ForCausalLM

    truth = Gemma3ForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = truth(torch.tensor([tokens]), use_cache=True).past_key_values
    for name, ours in found.layers.items():
        (number,) = re.findall(r"\d+", name)
        keys = theirs.layers[int(number)].keys[0].transpose(0, 1)
        values = theirs.layers[int(number)].values[0].transpose(0, 1)
        count = min(len(keys), len(tokens) - first)
        end = first + found.num_tokens - len(tokens)
        assert end == 0, "up to the end of the prompt"
        torch.testing.assert_close(ours.k[-count:], keys[-count:], rtol=0, atol=KV_TOLERANCE)
        torch.testing.assert_close(ours.v[-count:], values[-count:], rtol=0, atol=KV_TOLERANCE)


@pytest.mark.support("events")
def test_events_tell_what_came_and_went_of_each_group(engine: ZooEngine) -> None:
    held: set[bytes] = set()
    for event in engine.cluster.events(since=0, follow=False):
        if isinstance(event, BlockStored):
            held.add(event.key)
        elif isinstance(event, BlockRemoved):
            held.discard(event.key)
    counts = engine.chunks()
    assert Counter(group_of(Key(key)) for key in held) == counts
    snapshot = engine.cluster.snapshot()
    assert Counter(group_of(Key(key)) for _, _, key in snapshot.chunks) == counts


@pytest.mark.support("events")
def test_chunks_of_full_attention_are_described_with_their_tokens(engine: ZooEngine) -> None:
    tokens = question(1, 0)
    generate(engine, tokens)
    told = look_up(engine, tokens)
    keys = [each.key for each in told.chunks]
    whole = {each.group for each in groups_of(engine) if each.window is None}
    count = sum(each.group in whole for each in told.chunks)
    wait_until(lambda: len(engine.cluster.tokens_of(keys)) >= count, 10.0, "the engine tells them")
    described = engine.cluster.tokens_of(keys)
    for each in told.chunks:
        if each.group in whole:
            assert list(described[each.key].token_ids) == tokens[each.first_token : each.end_token]
        else:
            assert each.key not in described


@pytest.mark.support("explain")
def test_known_prefix_without_its_window_is_missed_for_that_reason(engine: ZooEngine) -> None:
    generate(engine, question(8, 0, length=1200))
    tokens = question(8, 1)
    told = look_up(engine, tokens)
    assert (told.cached_tokens < DOCUMENT) == (engine.name in (*PARTS_STORED, "mistral"))
    missed = generate(engine, tokens)
    assert missed["cached"] == told.cached_tokens
    wait_until(lambda: bool(explained(engine, missed)), 10.0, "the record has come")
    why = explained(engine, missed)
    chunk = groups_of(engine)[0].tokens
    window, rest = DOCUMENT - missed["cached"], len(tokens) // chunk * chunk - DOCUMENT
    if engine.name == "mistral":
        # With windows alone nobody knows what the prefix was.
        window, rest = 0, window + rest
    assert why.get(MissReason.WINDOW_MISSING, 0) == window
    assert why.get(MissReason.NEVER_STORED, 0) == rest
    # It was stored with the request that missed it.
    assert generate(engine, question(8, 2))["cached"] >= DOCUMENT


def explained(engine: ZooEngine, answer: dict[str, Any]) -> dict[str, int]:
    """Why tokens of the prompt that was answered were computed."""
    try:
        (known, *_) = engine.cluster.why_miss(answer["id"])
    except ClusterError:
        return {}
    return known.record.missed


@pytest.mark.support("pin")
def test_pinned_prompt_outlives_others_with_all_that_it_needs(engine: ZooEngine) -> None:
    pinned, other = question(20, 0), question(21, 0)
    # What was used goes later than what was not.
    for tokens in (pinned, other):
        generate(engine, tokens)
    told = look_up(engine, pinned)
    keys = look_up(engine, pinned[: told.cached_tokens + 1]).keys
    pin = engine.cluster.pin(keys, pin_id="kept")
    assert (pin.chunks, pin.held_chunks) == (len(keys), len(keys))
    assert pin.kept_bytes == len(keys) * slot_bytes(engine)
    (node,) = engine.cluster.status().nodes
    assert (node.pinned_chunks, node.pinned_bytes) == (len(keys), pin.kept_bytes)
    number = 0
    while look_up(engine, other).cached_tokens:
        engine.ask(*(prompt(2000 + 8 * number + at, 600) for at in range(8)))
        number += 1
        assert number < 20, "the other one is not evicted"
    engine.settle()
    assert look_up(engine, pinned).cached_tokens == told.cached_tokens
    assert generate(engine, pinned)["cached"] == told.cached_tokens
    engine.cluster.unpin("kept")
