"""What vLLM's hooks make of a request's account, and what comes out in vLLM's metrics."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
from raykv.engine.view import EngineView
from raykv.protocol.engine import MissRecord
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.misses import MissReporter
from raykv.vllm.spec import use_our_spec
from tests.fixtures.place import CopyingPlace, engine_hello

CHUNK = 16
MISSING = Key(b"missing" + bytes(4))


@dataclass
class PlayedRequest:
    """What the reporter reads of vLLM's `Request`."""

    request_id: str = "r"
    num_prompt_tokens: int = 5 * CHUNK + 3
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    all_token_ids: Sequence[int] = tuple(range(5 * CHUNK + 3))
    trace_headers: dict[str, str] | None = None


@pytest.fixture
def view() -> EngineView:
    """Attached, alone, with the request "r"."""
    made = EngineView(Settings(request_deadline_s=5.0))
    made.accounts.tokens_per_chunk = CHUNK
    CopyingPlace().join(made, engine_hello())
    made.start_request("r", RequestOptions())
    return made


@pytest.fixture
def reporter(view: EngineView) -> MissReporter:
    return RayOffloadingManager(view).misses


def miss(view: EngineView) -> None:
    assert view.lookup("r", MISSING, 0.0) is Lookup.MISS


def missed(view: EngineView) -> dict[str, int]:
    """Of the only request that has ended."""
    (record,) = view.accounts.take_records()
    return record.missed


def test_prompt_that_is_loaded_in_part_is_accounted_for(
    reporter: MissReporter, view: EngineView
) -> None:
    request = PlayedRequest()
    reporter.began(request)
    reporter.looks(request, CHUNK, None)
    miss(view)
    reporter.admitted(request, 2 * CHUNK)
    request.num_computed_tokens = 3 * CHUNK
    reporter.admitted(request, 0)
    reporter.ended(request)
    (record,) = view.accounts.take_records()
    assert (record.own, record.loaded, record.missing) == (CHUNK, 2 * CHUNK, MISSING)
    assert record.missed == {"never_stored": 2 * CHUNK, "incomplete_chunk": 3}


def test_miss_of_earlier_lookups_does_not_count(reporter: MissReporter, view: EngineView) -> None:
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK)
    reporter.began(request)
    reporter.looks(request, 0, None)
    miss(view)
    reporter.looks(request, 0, None)
    reporter.admitted(request, 0)
    reporter.ended(request)
    assert missed(view) == {"other": 2 * CHUNK}


@pytest.mark.parametrize("most", [None, 0])
def test_request_that_wants_to_compute_has_opted_out(
    reporter: MissReporter, view: EngineView, most: int | None
) -> None:
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK, skip_reading_prefix_cache=most is None)
    reporter.began(request)
    reporter.looks(request, 0, most)
    reporter.admitted(request, 0)
    reporter.ended(request)
    assert missed(view) == {"opted_out": 2 * CHUNK}


def test_failed_load_has_its_reason(reporter: MissReporter, view: EngineView) -> None:
    request = PlayedRequest(num_prompt_tokens=4 * CHUNK)
    reporter.began(request)
    reporter.looks(request, 0, None)
    reporter.admitted(request, 4 * CHUNK)
    reporter.failed("r", MissReason.LOAD_FAILED)
    reporter.failed("stranger", MissReason.LOAD_FAILED)
    request.num_computed_tokens = CHUNK
    reporter.admitted(request, 0)
    reporter.ended(request)
    assert missed(view) == {"load_failed": 3 * CHUNK}


def test_nothing_is_said_of_requests_that_were_never_seen(
    reporter: MissReporter, view: EngineView
) -> None:
    known, request = PlayedRequest(num_prompt_tokens=2 * CHUNK + 3), PlayedRequest("stranger")
    reporter.began(known)
    reporter.looks(known, CHUNK, None)
    reporter.looks(request, 0, None)
    reporter.admitted(request, CHUNK)
    reporter.came_from(request, {CacheHitSource.P2P: CHUNK})
    reporter.failed("stranger", MissReason.LOAD_FAILED)
    reporter.ended(request)
    assert view.accounts.take_records() == []
    assert reporter.take_stats() is None
    reporter.admitted(known, 0)
    reporter.ended(known)
    assert missed(view) == {"other": CHUNK, "incomplete_chunk": 3}


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
    reporter: MissReporter, view: EngineView, hook: str
) -> None:
    before = guard.failures.copy()
    request = PlayedRequest(num_prompt_tokens=2 * CHUNK + 3)
    reporter.began(request)
    reporter.looks(request, CHUNK, None)
    assert getattr(reporter, hook)(*BROKEN[hook]) is None
    assert guard.failures - before == {f"MissReporter.{hook}": 1}
    reporter.admitted(request, 0)
    reporter.ended(request)
    assert missed(view) == {"other": CHUNK, "incomplete_chunk": 3}


def test_request_with_misses_is_one_line_of_the_debug_log(
    reporter: MissReporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="raykv")
    for name, size in (("r", 2 * CHUNK), ("empty", 0)):
        request = PlayedRequest(name, size)
        reporter.began(request)
        reporter.ended(request)
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
    reporter: MissReporter, view: EngineView
) -> None:
    registry = CollectorRegistry()
    shown = metrics(registry)
    for number in range(2):
        request = PlayedRequest(f"r{number}", 2 * CHUNK)
        reporter.began(request)
        reporter.looks(request, CHUNK, None)
        reporter.admitted(request, 0)
        reporter.ended(request)
    stats = reporter.take_stats()
    assert stats is not None
    assert reporter.take_stats() is None
    stats.increase_counter("vllm:kv_offload_load_bytes", 11)
    # As from EngineCore to the API server.
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    shown.observe(wire)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})

    assert value("raykv_prompt_tokens_total", source="own_cache") == 2 * CHUNK
    assert value("raykv_prompt_tokens_total", source="same_node") is None
    assert value("raykv_prompt_tokens_total", source="computed") == 2 * CHUNK
    assert value("raykv_missed_tokens_total", reason="other") is None
    assert value("raykv_missed_tokens_total", reason="incomplete_chunk") == 2 * CHUNK
    assert value("vllm:kv_offload_load_bytes_total") == 11


@pytest.mark.parametrize(("came", "fetched"), [(4 * CHUNK, 3 * CHUNK), (CHUNK, CHUNK), (0, 0)])
def test_loaded_tokens_are_told_apart_by_the_node_that_had_them(
    reporter: MissReporter, view: EngineView, came: int, fetched: int
) -> None:
    request = PlayedRequest(num_prompt_tokens=4 * CHUNK)
    reporter.began(request)
    reporter.looks(request, 0, None)
    reporter.admitted(request, 4 * CHUNK)
    sources = {CacheHitSource.HOST: CHUNK, CacheHitSource.P2P: 3 * CHUNK}
    reporter.came_from(request, sources)
    if came < 4 * CHUNK:
        reporter.failed("r", MissReason.LOAD_FAILED)
    request.num_computed_tokens = came
    reporter.admitted(request, 0)
    reporter.ended(request)
    assert view.counter_values()["fetched_tokens"] == fetched
    stats = reporter.take_stats()
    assert stats is not None
    told = stats.to_dict()["data"]["raykv_prompt_tokens"]
    expected = {
        "other_node": fetched,
        "same_node": came - fetched,
        "computed": 4 * CHUNK - came,
    }
    assert {labels[0]: count for labels, count in told.items()} == {
        source: count for source, count in expected.items() if count
    }


def compute(reporter: MissReporter, view: EngineView, tokens: Sequence[int]) -> MissRecord:
    """A request whose prompt is computed; its chunks are named by their tokens."""
    request = PlayedRequest(all_token_ids=tokens)
    reporter.began(request)
    reporter.looks(request, 0, None)
    reporter.admitted(request, 0)
    keys = [bytes(tokens[:end]) for end in range(CHUNK, len(tokens), CHUNK)]
    reporter.ended(request, keys, CHUNK)
    (record,) = view.accounts.take_records()
    return record


@pytest.mark.parametrize("shows_tokens", [False, True])
def test_record_says_where_a_prompt_leaves_the_one_before_it(
    view: EngineView, shows_tokens: bool
) -> None:
    reporter = RayOffloadingManager(view, Settings(why_miss_text=shows_tokens)).misses
    first = PlayedRequest().all_token_ids
    assert compute(reporter, view, first).parting is None
    dated = (*first[:20], 77, *first[21:])
    parting = compute(reporter, view, dated).parting
    assert parting is not None
    assert (parting.at, parting.nearest) == (20, bytes(first[: 2 * CHUNK]))
    assert bool(parting.before) == bool(parting.own) == bool(parting.other) == shows_tokens
    assert compute(reporter, view, dated).parting is None


def test_prompt_of_a_request_that_was_aborted_was_not_there(
    reporter: MissReporter, view: EngineView
) -> None:
    request = PlayedRequest()
    reporter.began(request)
    reporter.ended(request, [bytes(request.all_token_ids[:CHUNK])], CHUNK)
    view.accounts.take_records()
    assert compute(reporter, view, (77, *request.all_token_ids[1:])).parting is None


def test_prompt_that_is_no_tokens_leaves_none(reporter: MissReporter, view: EngineView) -> None:
    request = PlayedRequest(prompt_embeds=object(), all_token_ids=())
    reporter.began(request)
    reporter.looks(request, 0, None)
    reporter.admitted(request, 0)
    reporter.ended(request, [b"one"], CHUNK)
    (record,) = view.accounts.take_records()
    assert record.parting is None


def test_tokens_of_vllms_own_request_are_read(reporter: MissReporter, view: EngineView) -> None:
    """Of prompt and answer, whatever vLLM keeps them in."""

    def ended(number: int) -> MissRecord:
        tokens = [*range(CHUNK), number, *range(CHUNK, 4 * CHUNK)]
        request = Request("r", tokens, SamplingParams(max_tokens=4), None)
        request.append_output_token_ids([1, 2, 3])
        reporter.began(request)
        reporter.looks(request, 0, None)
        reporter.admitted(request, 0)
        keys = [bytes(tokens[:end]) for end in range(CHUNK, len(tokens), CHUNK)]
        reporter.ended(request, keys, CHUNK)
        (record,) = view.accounts.take_records()
        return record

    assert ended(200).parting is None
    parting = ended(201).parting
    assert parting is not None
    assert parting.at == CHUNK
