"""What vLLM's hooks make of a request's account, and what comes out in vLLM's metrics."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from raykv.base import guard
from raykv.base.ids import Key, Lookup, MissReason
from raykv.base.settings import Settings
from raykv.engine.requests import RequestOptions
from raykv.protocol.engine import MissRecord
from raykv.vllm.spec import use_our_spec
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest

MISSING = Key(b"missing" + bytes(4))


@pytest.fixture
def engine() -> Engine:
    """Attached, alone, with the request "r"."""
    made = Engine()
    made.view.start_request("r", RequestOptions())
    return made


def begin(engine: Engine, request: Any, own: int = 0, loaded: int = 0) -> None:
    """A request that vLLM has so many tokens of, and loads so many."""
    engine.reporter.began(request)
    engine.reporter.looks(request, own, None)
    engine.reporter.admitted(request, loaded)


def ended(engine: Engine, request: Any, keys: Sequence[bytes] = ()) -> MissRecord:
    engine.reporter.ended(request, keys, CHUNK)
    (record,) = engine.view.accounts.take_records()
    return record


def test_miss_of_earlier_lookups_does_not_count(engine: Engine) -> None:
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK)
    engine.reporter.began(request)
    engine.reporter.looks(request, 0, None)
    assert engine.view.lookup("r", MISSING, 0.0) is Lookup.MISS
    engine.reporter.looks(request, 0, None)
    engine.reporter.admitted(request, 0)
    assert ended(engine, request).missed == {"other": 2 * CHUNK}


@pytest.mark.parametrize("most", [None, 0])
def test_request_that_wants_to_compute_has_opted_out(engine: Engine, most: int | None) -> None:
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK, skip_reading_prefix_cache=most is None)
    engine.reporter.began(request)
    engine.reporter.looks(request, 0, most)
    engine.reporter.admitted(request, 0)
    assert ended(engine, request).missed == {"opted_out": 2 * CHUNK}


def test_nothing_is_said_of_requests_that_were_never_seen(
    engine: Engine,
) -> None:
    known, request = PlayedRequest(num_prompt_tokens=2 * CHUNK + 3), PlayedRequest("stranger")
    engine.reporter.began(known)
    engine.reporter.looks(known, CHUNK, None)
    engine.reporter.looks(request, 0, None)
    engine.reporter.admitted(request, CHUNK)
    engine.reporter.came_from(request, {CacheHitSource.P2P: CHUNK})
    engine.reporter.failed("stranger", MissReason.LOAD_FAILED)
    engine.reporter.ended(request)
    assert engine.view.accounts.take_records() == []
    assert engine.reporter.take_stats() is None
    engine.reporter.admitted(known, 0)
    assert ended(engine, known).missed == {"other": CHUNK, "incomplete_chunk": 3}


BROKEN: dict[str, tuple[Any, ...]] = {
    "began": (object(),),
    "looks": (object(), 0, None),
    "admitted": (object(), 0),
    "came_from": (object(), {}),
    "ended": (object(),),
}
"""Hooks that get vLLM's request, and their arguments with one that has nothing of it."""


@pytest.mark.expects_failures
@pytest.mark.parametrize("hook", BROKEN)
def test_broken_request_is_counted_as_a_failure_and_changes_nothing_of_another(
    engine: Engine, hook: str
) -> None:
    before = guard.failures.copy()
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK + 3)
    engine.reporter.began(request)
    engine.reporter.looks(request, CHUNK, None)
    assert getattr(engine.reporter, hook)(*BROKEN[hook]) is None
    assert guard.failures - before == {f"MissReporter.{hook}": 1}
    engine.reporter.admitted(request, 0)
    assert ended(engine, request).missed == {"other": CHUNK, "incomplete_chunk": 3}


def test_request_with_misses_is_one_line_of_the_debug_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="raykv")
    for name, size in (("r", 2 * CHUNK), ("empty", 0)):
        request = PlayedRequest(name, size)
        engine.reporter.began(request)
        engine.reporter.ended(request)
    (line,) = caplog.messages
    assert line.startswith("request r: of 32 prompt tokens 0 were in vLLM's own cache, 0 loaded,")
    assert line.endswith(" and computed: 32 aborted")


def metrics(registry: CollectorRegistry) -> OffloadPromMetrics:
    """Those of the API server's process, with its labels, in a registry of their own."""
    extra: dict[str, Any] = {"pool_bytes": "1MiB"}
    use_our_spec(extra)
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
    )
    types: Any = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    return OffloadPromMetrics(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})


def test_counters_reach_vllms_metrics_beside_its_own(
    engine: Engine,
) -> None:
    registry = CollectorRegistry()
    shown = metrics(registry)
    for number in range(2):
        request = PlayedRequest(f"r{number}", 2 * CHUNK)
        begin(engine, request, own=CHUNK)
        engine.reporter.ended(request)
    stats = engine.reporter.take_stats()
    assert stats is not None
    assert engine.reporter.take_stats() is None
    stats.increase_counter("vllm:kv_offload_load_bytes", 11)
    # As from EngineCore to the API server.
    shown.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())))
    expected = {
        ("raykv_prompt_tokens_total", "source", "own_cache"): 2 * CHUNK,
        ("raykv_prompt_tokens_total", "source", "same_node"): None,
        ("raykv_prompt_tokens_total", "source", "computed"): 2 * CHUNK,
        ("raykv_missed_tokens_total", "reason", "other"): None,
        ("raykv_missed_tokens_total", "reason", "incomplete_chunk"): 2 * CHUNK,
        ("vllm:kv_offload_load_bytes_total", "engine", "0"): 11,
    }
    labels = {"model_name": "tiny", "engine": "0"}
    assert {
        (name, label, value): registry.get_sample_value(name, {**labels, label: value})
        for name, label, value in expected
    } == expected


@pytest.mark.parametrize(("came", "fetched"), [(4 * CHUNK, 3 * CHUNK), (CHUNK, CHUNK), (0, 0)])
def test_loaded_tokens_are_told_apart_by_the_node_that_had_them(
    engine: Engine, came: int, fetched: int
) -> None:
    request = PlayedRequest(num_prompt_tokens=4 * CHUNK)
    begin(engine, request, loaded=4 * CHUNK)
    engine.reporter.came_from(request, {CacheHitSource.HOST: CHUNK, CacheHitSource.P2P: 3 * CHUNK})
    if came < 4 * CHUNK:
        engine.reporter.failed("r", MissReason.LOAD_FAILED)
    request.num_computed_tokens = came
    engine.reporter.admitted(request, 0)
    engine.reporter.ended(request)
    assert engine.view.counter_values()["fetched_tokens"] == fetched
    stats = engine.reporter.take_stats()
    assert stats is not None
    told = stats.to_dict()["data"]["raykv_prompt_tokens"]
    counts = {
        "other_node": fetched,
        "same_node": came - fetched,
        "computed": 4 * CHUNK - came,
    }
    assert {labels[0]: count for labels, count in told.items()} == {
        source: count for source, count in counts.items() if count
    }


def compute(engine: Engine, tokens: Sequence[int]) -> MissRecord:
    """A request whose prompt is computed; its chunks are named by their tokens."""
    request = PlayedRequest(all_token_ids=tokens)
    begin(engine, request)
    keys = [bytes(tokens[:end]) for end in range(CHUNK, len(tokens), CHUNK)]
    return ended(engine, request, keys)


@pytest.mark.parametrize("shows_tokens", [False, True])
def test_record_says_where_a_prompt_leaves_the_one_before_it(shows_tokens: bool) -> None:
    engine = Engine(settings=Settings(why_miss_text=shows_tokens))
    first = PlayedRequest().all_token_ids
    assert compute(engine, first).parting is None
    dated = (*first[:20], 77, *first[21:])
    parting = compute(engine, dated).parting
    assert parting is not None
    assert (parting.at, parting.nearest) == (20, bytes(first[: 2 * CHUNK]))
    assert bool(parting.before) == bool(parting.own) == bool(parting.other) == shows_tokens
    assert compute(engine, dated).parting is None


def test_prompt_of_a_request_that_was_aborted_was_not_there(
    engine: Engine,
) -> None:
    request = PlayedRequest()
    engine.reporter.began(request)
    ended(engine, request, [bytes(request.all_token_ids[:CHUNK])])
    assert compute(engine, (77, *request.all_token_ids[1:])).parting is None


def test_prompt_that_is_no_tokens_leaves_none(engine: Engine) -> None:
    request = PlayedRequest(prompt_embeds=object())
    begin(engine, request)
    assert ended(engine, request, [b"one"]).parting is None


def test_tokens_of_vllms_own_request_are_read(engine: Engine) -> None:
    """Of prompt and answer, whatever vLLM keeps them in."""
    partings = []
    for number in (200, 201):
        tokens = [*range(CHUNK), number, *range(CHUNK, 4 * CHUNK)]
        request = Request("r", tokens, SamplingParams(max_tokens=4), None)
        request.append_output_token_ids([1, 2, 3])
        begin(engine, request)
        keys = [bytes(tokens[:end]) for end in range(CHUNK, len(tokens), CHUNK)]
        partings.append(ended(engine, request, keys).parting)
    assert [parting and parting.at for parting in partings] == [None, CHUNK]
