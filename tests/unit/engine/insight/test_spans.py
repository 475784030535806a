"""What a request has waited for, in spans that are told when they are over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raykv.base.ids import MAX_REQUEST_ID
from raykv.engine.insight.spans import FETCH, LOAD, LOOKUP, RequestSpan, RequestSpans

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Told:
    """What was told, and of whom."""

    def __init__(self) -> None:
        self.spans: list[RequestSpan] = []

    def __call__(self, headers: Mapping[str, str], span: RequestSpan) -> None:
        assert headers == HEADERS
        assert span.attributes["gen_ai.request.id"] == "r"
        self.spans.append(span)

    def times(self) -> list[tuple[str, float, float]]:
        return [(span.name, span.began_at, span.ended_at) for span in self.spans]

    def of(self, name: str) -> dict[str, str | int]:
        """Attributes of the only span of a name."""
        (span,) = [span for span in self.spans if span.name == name]
        return {key: value for key, value in span.attributes.items() if key.startswith("raykv.")}


class ToldSpans(RequestSpans):
    """What they have told."""

    def __init__(self) -> None:
        self.told = Told()
        super().__init__(self.told)


@pytest.fixture
def spans() -> ToldSpans:
    """With the request "r", which began at 1 and was asked about at 2."""
    made = ToldSpans()
    made.begin("r", HEADERS, 1.0)
    made.look("r", 32, 2.0)
    return made


def test_id_that_a_client_has_chosen_is_printable_and_short_in_spans() -> None:
    spans: list[RequestSpan] = []
    made = RequestSpans(lambda _headers, span: spans.append(span))
    made.begin("\x1b" + "x" * 100_000, HEADERS, 1.0)
    made.end("\x1b" + "x" * 100_000, 2.0)
    (span,) = spans
    shown = str(span.attributes["gen_ai.request.id"])
    assert shown.startswith(r"\x1bx")
    assert len(shown) == MAX_REQUEST_ID


def test_request_that_finds_nothing_has_a_lookup(spans: ToldSpans) -> None:
    spans.look("r", 64, 3.0)
    spans.admit("r", 0, "evicted", None, 4.0)
    spans.end("r", 9.0)
    assert spans.told.times() == [(LOOKUP, 1.0, 4.0)]
    assert spans.told.of(LOOKUP) == {
        "raykv.own_cache_tokens": 64,
        "raykv.load_tokens": 0,
        "raykv.miss_reason": "evicted",
    }
    assert not len(spans)


def test_request_that_fetches_and_loads_has_all_three_one_after_the_other(spans: ToldSpans) -> None:
    spans.admit("r", 96, "", 3.0, 5.0)
    spans.came_from("r", 64, 32)
    assert spans.told.times() == [(LOOKUP, 1.0, 3.0), (FETCH, 3.0, 5.0)]
    spans.loaded("r", 6.0)
    assert spans.told.times()[2:] == [(LOAD, 5.0, 6.0)]
    # vLLM gives it its turn.
    spans.admit("r", 0, "", None, 7.0)
    spans.end("r", 9.0)
    assert len(spans.told.spans) == 3
    assert spans.told.of(LOOKUP) == {"raykv.own_cache_tokens": 32, "raykv.load_tokens": 96}
    sources = {"raykv.other_node_tokens": 64, "raykv.disk_tokens": 32}
    assert spans.told.of(FETCH) == sources
    assert spans.told.of(LOAD) == {"raykv.load_tokens": 96, **sources}


def test_fetch_that_brings_nothing_ends_with_the_lookup(spans: ToldSpans) -> None:
    spans.admit("r", 0, "fetch_failed", 3.0, 5.0)
    assert spans.told.times() == [(LOOKUP, 1.0, 3.0), (FETCH, 3.0, 5.0)]
    assert spans.told.of(FETCH) == {"raykv.other_node_tokens": 0}


def test_load_that_fails_says_why_and_a_lookup_follows(spans: ToldSpans) -> None:
    spans.admit("r", 96, "", None, 5.0)
    spans.came_from("r", 0, 0)
    spans.fail("r", "load_failed")
    spans.loaded("r", 6.0)
    spans.look("r", 32, 7.0)
    spans.admit("r", 0, "load_failed", None, 8.0)
    assert spans.told.times() == [(LOOKUP, 1.0, 5.0), (LOAD, 5.0, 6.0), (LOOKUP, 7.0, 8.0)]
    assert spans.told.of(LOAD)["raykv.failure"] == "load_failed"


@pytest.mark.parametrize("is_loading", [False, True])
def test_request_that_is_aborted_tells_what_it_waited_for(
    spans: ToldSpans, is_loading: bool
) -> None:
    if is_loading:
        spans.admit("r", 96, "", 3.0, 5.0)
    spans.end("r", 6.0)
    expected = [(LOOKUP, 1.0, 3.0), (FETCH, 3.0, 5.0), (LOAD, 5.0, 6.0)]
    assert spans.told.times() == (expected if is_loading else [(LOOKUP, 1.0, 6.0)])
    assert not len(spans)


def test_request_that_is_unknown_is_told_nothing_of() -> None:
    spans = ToldSpans()
    spans.look("r", 0, 1.0)
    spans.admit("r", 1, "", None, 2.0)
    spans.came_from("r", 1, 0)
    spans.fail("r", "load_failed")
    spans.loaded("r", 3.0)
    spans.end("r", 4.0)
    assert not spans.told.spans
