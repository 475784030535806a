"""Shares and rates out of two statuses."""

from __future__ import annotations

import pytest

from raykv.cli.status import MovedBytes, TokenSources, percent, progress, token_sources
from tests.fixtures.played_cluster import status
from tests.fixtures.statuses import engine, node


def test_sources_are_sums_over_engines() -> None:
    engines = [
        engine("a", prompt_tokens=100, own_cache_tokens=20, loaded_tokens=30),
        engine("b", prompt_tokens=60),
    ]
    sources = token_sources(engines)
    assert sources == TokenSources(160, 20, 30)
    assert sources.computed == 110
    assert percent(sources, 40) == "25 %"
    assert percent(TokenSources(), 0) == "-"


def test_progress_is_what_has_grown_between_two_looks() -> None:
    before = status(
        nodes=[node(100)], engines=[engine(prompt_tokens=10, loaded_tokens=5, chunks_stored=1)]
    )
    after = status(
        nodes=[node(160)], engines=[engine(prompt_tokens=50, loaded_tokens=25, chunks_stored=5)]
    )
    passed = progress(before, after, 2.0)
    assert passed.tokens == TokenSources(40, 0, 20)
    assert passed.transfers == {"n": MovedBytes(60, 120)}
    assert passed.per_s(passed.tokens.prompt) == pytest.approx(20)
    assert (passed.chunks_stored, passed.chunks_loaded) == (4, 0)


def test_what_began_anew_counts_nothing_that_was_before() -> None:
    before = status(nodes=[node(100)], engines=[engine(prompt_tokens=10)])
    # A new life of the NodeActor, an engine that is new, and one whose counters began anew.
    after = status(
        nodes=[node(30, life=2)], engines=[engine("new", prompt_tokens=7), engine(prompt_tokens=4)]
    )
    passed = progress(before, after, 1.0)
    assert passed.transfers == {"n": MovedBytes()}
    assert passed.tokens.prompt == 4
    assert progress(before, before, 0.0).per_s(5) == 0.0
