"""Spans as OpenTelemetry has them, and an engine without any."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raykv.base import guard
from raykv.engine.insight.spans import LOAD, LOOKUP, RequestSpan, RequestSpans
from raykv.vllm import connector
from raykv.vllm.insight.tracing import SpanExporter
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest
from tests.house import tree_of
from tests.test_import_directions import imports_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def exporter(exported: InMemorySpanExporter) -> SpanExporter:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return SpanExporter(provider)


def only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


def test_span_is_in_the_trace_of_the_client(
    exporter: SpanExporter, exported: InMemorySpanExporter
) -> None:
    now = time.monotonic()
    exporter.tell(HEADERS, RequestSpan(LOAD, now - 3.0, now - 1.0, {"raykv.load_tokens": 96}))
    span = only(exported)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes == {"raykv.load_tokens": 96}
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(2e9, abs=1e6)
    assert time.time() - span.end_time / 1e9 == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}])
def test_span_without_a_client_s_context_begins_a_trace(
    exporter: SpanExporter, exported: InMemorySpanExporter, headers: dict[str, str]
) -> None:
    exporter.tell(headers, RequestSpan(LOOKUP, 1.0, 2.0, {}))
    assert only(exported).parent is None


def test_exporter_that_fails_fails_nobody_else(exported: InMemorySpanExporter) -> None:
    class Broken(SpanExporter):
        def __init__(self) -> None:
            self._tracer = None  # type: ignore[assignment]

    guard.failures.clear()
    Broken().tell(HEADERS, RequestSpan(LOOKUP, 1.0, 2.0, {}))
    assert guard.failures.pop("SpanExporter.tell")
    assert not exported.get_finished_spans()


def test_engine_that_is_traced_tells_of_a_load() -> None:
    told: list[tuple[str, dict[str, str | int]]] = []
    engine = Engine()
    engine.reporter.spans = RequestSpans(
        lambda headers, span: told.append((headers["traceparent"], dict(span.attributes)))
    )
    engine.hold(0, 1, 2)
    request = PlayedRequest()
    request.trace_headers = HEADERS
    engine.begin(request)
    assert engine.schedule(request) == 3 * CHUNK
    engine.end_load(request)
    engine.schedule(request)
    engine.finish(request)
    assert [parent for parent, _ in told] == [HEADERS["traceparent"]] * 2
    assert [attributes["raykv.load_tokens"] for _, attributes in told] == [3 * CHUNK] * 2
    assert {attributes["gen_ai.request.id"] for _, attributes in told} == {request.request_id}


def test_connector_imports_tracing_for_engines_alone_that_trace() -> None:
    tree = tree_of(Path(connector.__file__))
    found = imports_of(tree, connector.__name__, is_package=False)
    tracing = [each for each in found if each.target.startswith(SpanExporter.__module__)]
    assert [each.at_start for each in tracing] == [False]
