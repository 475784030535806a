"""Networks of NodeActors in this process, and workers that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import raykv.node.fetch
from tests.fixtures.node import links
from tests.fixtures.node.links import Line, Worker
from tests.fixtures.node.nixl import IS_INSTALLED, NixlNetwork
from tests.fixtures.node.peers import PAGE, Network, Node

NETWORKS = [Network, NixlNetwork] if IS_INSTALLED else [Network]


@pytest.fixture(autouse=True)
def _threads_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look about once in this time whether they are to end; what they wait for wakes them."""
    monkeypatch.setattr("raykv.base.deadlines.WAKE_S", 0.05)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    made: Network = request.param()
    yield made
    made.close()


@pytest.fixture
def here(network: Network) -> Node:
    """The destination. Its life is not that of the sources."""
    return network.node("here", life=9)


@pytest.fixture
def source(network: Network) -> Node:
    return network.node("source")


@pytest.fixture
def other(network: Network) -> Node:
    """Another source."""
    return network.node("other", life=8)


@pytest.fixture
def one_chunk_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.node.fetch, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(raykv.node.fetch, "MOST_PIECE_BYTES", PAGE)


@pytest.fixture
def make_node() -> Iterator[links.MakeNode]:
    """Takes what `links.Node` does."""
    made: list[links.Node] = []

    def make(*arguments: Any) -> links.Node:
        made.append(links.Node(*arguments))
        return made[-1]

    yield make
    for running in made:
        running.close()


@pytest.fixture
def node(make_node: links.MakeNode) -> links.Node:
    return make_node(4096)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.end()


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    made: list[Line] = []
    yield made
    for line in made:
        line.end_in_time()
        line.kv.close()
