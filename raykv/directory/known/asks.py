"""Questions of engines: which nodes have keys, and what is known of the missing ones.

An answer is no promise: a node may have given a chunk up since it reported.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from typing import cast

from raykv.base.departures import Departures
from raykv.base.ids import EngineId, Key, Namespace, NodeId, family_of
from raykv.directory.known.coming import Coming
from raykv.directory.known.holdings import IN_RAM, Held, HeldAt, Holdings, MovedChunks, grouped
from raykv.directory.known.members import EngineLife, Members
from raykv.protocol.columns import Numbers, Source, SourceKind, SourceRows
from raykv.protocol.engine import MOST_SOURCES, Ask, AskAnswer

MOST_DEPARTED = 262_144
"""Chunks for which the reason is remembered why the last copy went: some 35 MB."""

MOST_SPACES = 16
"""With more namespaces others are not looked through for a key."""

MOST_MISSING = 64
"""Keys of a question that are looked for in other namespaces."""


class Asks:
    """See the module's docstring."""

    def __init__(self, members: Members, holdings: Holdings, coming: Coming) -> None:
        self._members = members
        self._holdings = holdings
        self._coming = coming
        # Reasons as numbers, which the collector of garbage does not walk.
        self._departed: Departures[int] = Departures(MOST_DEPARTED)

    def went(self, moved: MovedChunks) -> None:
        """The last copies of chunks are gone."""
        self._departed.note(_short(moved.namespace, moved.keys), int(moved.reason))

    def answer(self, ask: Ask, life: int, now: float) -> AskAnswer:
        """Answer an engine, and remember what it announces."""
        namespace = Namespace(ask.namespace)
        engine = EngineLife(EngineId(ask.engine_id), ask.life)
        places = frozenset(map(NodeId, ask.places))
        self._announce(engine, places, namespace, cast("list[Key]", list(ask.coming)), now)
        keys = cast("list[Key]", list(ask.keys))
        found = self._holdings.ask(namespace, keys)
        missing = [] if all(found) else [at for at, held in enumerate(found) if not held]
        departed = map(self._departed.get, _short(namespace, [keys[at] for at in missing]))
        gone = {
            at: reason for at, reason in zip(missing, departed, strict=True) if reason is not None
        }
        return AskAnswer(
            life,
            self._sources(found, places),
            Numbers.of(self._coming.of_others(namespace, keys, engine, now)),
            Numbers.of(gone),
            bytes(gone.values()),
            Numbers.of(self._elsewhere(namespace, keys, missing)),
        )

    def _announce(
        self,
        engine: EngineLife,
        places: frozenset[NodeId],
        namespace: Namespace,
        keys: Sequence[Key],
        now: float,
    ) -> None:
        """An engine stores chunks; what one of its places has by now is not coming any more."""
        found = self._holdings.ask(namespace, keys)
        if any(found):
            keys = [
                key
                for key, held in zip(keys, found, strict=True)
                if not any(each.node_id in places and each.where in IN_RAM for each in held)
            ]
        self._coming.announce(engine, places, namespace, keys, now)

    # Sources

    def _sources(self, found: Sequence[Held], places: Container[NodeId]) -> SourceRows:
        """Of each key, the best source first. Keys in the same places have the same object, and are
        looked at together.
        """
        sources: dict[Source, int] = {}
        keys: list[int] = []
        numbers: list[int] = []
        for positions in grouped(range(len(found)), list(map(id, found))).values():
            for kind, *_, node_id in self._ranked(found[positions[0]], places):
                keys += positions
                source = Source(node_id, kind)
                numbers += [sources.setdefault(source, len(sources))] * len(positions)
        return SourceRows(list(sources), Numbers.of(keys), Numbers.of(numbers))

    def _ranked(
        self, held: Iterable[HeldAt], places: Container[NodeId]
    ) -> list[tuple[SourceKind, bool, int, NodeId]]:
        ranks = [self._rank(each) for each in held if each.node_id not in places]
        return nsmallest(MOST_SOURCES, ranks) if len(ranks) > 1 else ranks

    def _rank(self, held: HeldAt) -> tuple[SourceKind, bool, int, NodeId]:
        """The lowest one is the best source."""
        report = self._members[held.node_id].report
        busy = report.stats.queued_jobs + report.stats.reading
        kind = SourceKind.POOL if held.where in IN_RAM else SourceKind.DISK
        return kind, report.is_leaving, busy, held.node_id

    # What is nowhere

    def _elsewhere(
        self, namespace: Namespace, keys: Sequence[Key], missing: Iterable[int]
    ) -> list[int]:
        """Which of the first missing keys another namespace has."""
        family = family_of(namespace)
        others = [each for each in self._holdings.namespaces if family_of(each) != family]
        numbers = list(islice(missing, MOST_MISSING))
        if not numbers or len(others) >= MOST_SPACES:
            return []
        wanted = [keys[at] for at in numbers]
        found = [self._holdings.ask(each, wanted) for each in others]
        return [
            at for at, held in zip(numbers, zip(*found, strict=True), strict=False) if any(held)
        ]


def _short(namespace: Namespace, keys: Iterable[Key]) -> Iterator[int]:
    """Names in few bytes; two of one short name are unlikely, and harm no one."""
    return map(hash(namespace).__xor__, map(hash, keys))
