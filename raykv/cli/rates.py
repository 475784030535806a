"""Shares and rates out of the counters of a status, and of an earlier one.

Counters restart with their engine or NodeActor: one that has gone down counts from zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

from raykv.protocol.status import ClusterStatus, EngineStatus, NodeStatus


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Prompt tokens, and how many of them came out of vLLM's own cache and out of RayKV."""

    prompt: int = 0
    own: int = 0
    loaded: int = 0

    @property
    def computed(self) -> int:
        """The others."""
        return max(0, self.prompt - self.own - self.loaded)

    def share(self, tokens: int) -> float | None:
        """`tokens` of all, from 0 to 1; None if there are no tokens."""
        return tokens / self.prompt if self.prompt else None


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that moved: stored and loaded on the node, fetched from others and sent to them."""

    stored: int = 0
    loaded: int = 0
    fetched: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened between two looks: tokens, and bytes by node, and the seconds in between."""

    seconds: float
    tokens: TokenSources
    transfers: Mapping[str, MovedBytes]
    chunks_stored: int = 0
    chunks_loaded: int = 0

    def per_s(self, count: int) -> float:
        """`count` of them as a rate."""
        return count / self.seconds if self.seconds > 0 else 0.0


def token_sources(engines: Iterable[EngineStatus]) -> TokenSources:
    """Sums since the engines' starts."""
    return _sources(_sums(engine.counters for engine in engines))


def transfers_of(node: NodeStatus) -> MovedBytes:
    """What a node has moved since its NodeActor's start."""
    return MovedBytes(node.bytes_stored, node.bytes_loaded, node.bytes_fetched, node.bytes_sent)


def progress(before: ClusterStatus, after: ClusterStatus, seconds: float) -> Progress:
    """What happened between two statuses."""
    old_engines = {engine.engine_id: engine.counters for engine in before.engines}
    grown = _sums(
        {
            name: _growth(old_engines.get(engine.engine_id, {}).get(name, 0), count)
            for name, count in engine.counters.items()
        }
        for engine in after.engines
        if engine.engine_id in old_engines
    )
    old_nodes = {(node.node_id, node.life): transfers_of(node) for node in before.nodes}
    moved = {}
    for node in after.nodes:
        new = transfers_of(node)
        old = old_nodes.get((node.node_id, node.life), new)
        moved[node.node_id] = MovedBytes(*map(_growth, astuple(old), astuple(new)))
    return Progress(
        seconds,
        _sources(grown),
        moved,
        chunks_stored=grown["chunks_stored"],
        chunks_loaded=grown["chunks_loaded"],
    )


def _growth(old: int, new: int) -> int:
    return new - old if new >= old else new


def _sums(many: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for counters in many:
        found.update(counters)
    return found


def _sources(counters: Counter[str]) -> TokenSources:
    return TokenSources(
        counters["prompt_tokens"], counters["own_cache_tokens"], counters["loaded_tokens"]
    )
