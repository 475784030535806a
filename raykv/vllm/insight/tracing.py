"""Spans of requests for OpenTelemetry, in engines whose vLLM traces (`--otlp-traces-endpoint`).

vLLM has set up OpenTelemetry in EngineCore's process by then: its exporter sends spans from a
thread of its own, and drops them when it can't follow. Imported in such engines alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raykv.base.guard import guarded, nothing
from raykv.engine.insight.spans import RequestSpan

_NS = 1_000_000_000


class SpanExporter:
    """Gives spans to vLLM's exporter, on the engine's thread: some 60 µs each."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """`provider` makes spans; None: the one that vLLM has set up, or will."""
        self._tracer = trace.get_tracer("raykv", tracer_provider=provider)
        self._headers = TraceContextTextMapPropagator()

    @guarded(nothing)
    def tell(self, headers: Mapping[str, str], span: RequestSpan) -> None:
        """A span is over; one without a client's context is the root of a trace of its own."""
        # The clock of spans is the wall clock, which may be set meanwhile.
        shift = time.time() - time.monotonic()
        made = self._tracer.start_span(
            span.name,
            context=self._headers.extract(headers, Context()),
            start_time=int((span.began_at + shift) * _NS),
            attributes=span.attributes,
        )
        made.end(int((span.ended_at + shift) * _NS))
