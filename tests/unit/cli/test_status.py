"""Shares and rates out of two statuses."""

from __future__ import annotations

import pytest

from raykv.cli.status import MovedBytes, TokenSources, progress, token_sources
from raykv.protocol.status import ClusterStatus, EngineStatus, NodeStatus
from tests.fixtures.statuses import engine, node


def status(nodes: list[NodeStatus], engines: list[EngineStatus]) -> ClusterStatus:
    return ClusterStatus("address", 1, "1.0", False, nodes=nodes, engines=engines)


def test_sources_are_sums_over_engines() -> None:
    engines = [
        engine("a", prompt_tokens=100, own_cache_tokens=20, loaded_tokens=30),
        engine("b", prompt_tokens=60),
    ]
    sources = token_sources(engines)
    assert sources == TokenSources(160, 20, 30)
    assert sources.computed == 110
    assert sources.share(40) == pytest.approx(0.25)
    assert TokenSources().share(0) is None


def test_progress_is_what_has_grown_between_two_looks() -> None:
    before = status([node(100)], [engine(prompt_tokens=10, loaded_tokens=5, chunks_stored=1)])
    after = status([node(160)], [engine(prompt_tokens=50, loaded_tokens=25, chunks_stored=5)])
    passed = progress(before, after, 2.0)
    assert passed.tokens == TokenSources(40, 0, 20)
    assert passed.transfers == {"n": MovedBytes(60, 120)}
    assert passed.per_s(passed.tokens.prompt) == pytest.approx(20)
    assert (passed.chunks_stored, passed.chunks_loaded) == (4, 0)


def test_what_began_anew_counts_nothing_that_was_before() -> None:
    before = status([node(100)], [engine(prompt_tokens=10)])
    # A new life of the NodeActor, an engine that is new, and one whose counters began anew.
    after = status([node(30, life=2)], [engine("new", prompt_tokens=7), engine(prompt_tokens=4)])
    passed = progress(before, after, 1.0)
    assert passed.transfers == {"n": MovedBytes()}
    assert passed.tokens.prompt == 4
    assert progress(before, before, 0.0).per_s(5) == 0.0
