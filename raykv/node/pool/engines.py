"""The engines at a node: which have introduced themselves and are still there.

             hello                    bye, silent for `SILENT_S`
  (unknown) ───────► here ─────────────────────────────────────────► (unknown)
                     │ ▲ hello of another namespace, or the same again
                     └─┘

Invariants:
1. There are at most `MOST_ENGINES` of them.
2. Each chunk that an engine may store fits into a slab.
3. There is a space for each namespace that an engine is in, and for no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Key, Namespace, Stamp
from raykv.prompts.prefixes import companions
from raykv.protocol import descriptions, measures, node
from raykv.protocol.engine import NOTHING_ORDERED, EngineHello, PlaceFacts, Tell

SILENT_S = 30.0
"""An engine that has been silent for this long is gone."""

MOST_SPACES = 8
"""Namespaces of one engine whose slot sizes are remembered: late stores are of earlier ones."""

LEAST_REUSE = 0.03
"""Loads for each store below which it does not pay: a store costs up to 3 % of computing."""

MIN_SAMPLE = 2048
"""Chunks stored before anything is decided."""

PROBE_SAMPLE = 256
"""Chunks stored before it is decided again, while few are."""

PROBE_LOADS = 64
"""Or loaded: what is asked for again and again is stored once."""

SOME = 16
"""Then one request in this many stores, to notice when reuse begins."""


@dataclass
class ReuseGauge:
    """Whether storing pays in a namespace: one request in `store_share` should store.

            a sample with too few loads
      ALL ─────────────────────────────► SOME (one request in sixteen stores)
       ▲                                   │ a sample with enough loads
       └───────────────────────────────────┘

    A store costs an engine a small part of the time that computing the chunk took; a load saves
    nearly all of it. So few loads are enough.

    A sample ends when as many chunks were stored as there is room for, and never before
    `MIN_SAMPLE`: until then a chunk had no time to be wanted again. The sums of the last sample
    count half in the next one, so that one odd sample does not switch anything for long.

    `capacity`: the chunks that fill the pool. `groups`: KV groups of the namespace, as far as
    they are known.
    """

    capacity: int = 0
    groups: Sequence[descriptions.ChunkGroup] = ()
    stored: float = 0.0
    loaded: float = 0.0
    store_share: int = 1
    # Those that are left over from earlier samples.
    _old_stored: float = 0.0
    _old_loaded: float = 0.0

    def told(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Counters of an engine have risen, once there are any. A load is worth the chunks of all
        the tokens that it saves: of a window it reads the last few.
        """
        if not before or not after:
            return
        name = "loaded_tokens" if self.groups else "chunks_loaded"
        per_count = sum(1 / each.tokens for each in self.groups) or 1.0
        self.count(0, round((after.get(name, 0) - before.get(name, 0)) * per_count))

    def count(self, stored: int, loaded: int) -> None:
        """Count chunks stored here, or what loads here and reads by others were worth in chunks."""
        self.stored += max(0, stored)
        self.loaded += max(0, loaded)
        is_storing_few = self.store_share > 1
        sample = PROBE_SAMPLE if is_storing_few else max(MIN_SAMPLE, self.capacity)
        has_begun_again = is_storing_few and self.loaded - self._old_loaded >= PROBE_LOADS
        if self.stored - self._old_stored < sample and not has_begun_again:
            return
        self.store_share = 1 if self.loaded >= LEAST_REUSE * self.stored else SOME
        self.stored /= 2
        self.loaded /= 2
        self._old_stored, self._old_loaded = self.stored, self.loaded


@dataclass(slots=True, eq=False)
class LocalEngine:
    """An EngineCore that has introduced itself.

    `sizes`: of slots, by namespace and KV group, the latest namespace last. `heard`: the number of
    the latest naming that it has taken. `weights`: how often these have changed. `answered`: the
    facts that the last answer had.
    """

    hello: EngineHello
    heard_at: float
    seq: int = -1
    sizes: dict[Namespace, Mapping[int, int]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    breakers: measures.BreakerReport = field(default_factory=measures.BreakerReport)
    heard: Stamp = NOTHING_ORDERED
    weights: int = 0
    answered: PlaceFacts | None = None

    @property
    def namespace(self) -> Namespace:
        """That it is in now."""
        return Namespace(self.hello.namespace)

    def introduce(self, hello: EngineHello) -> None:
        """It says who it is, perhaps again."""
        self.hello, self.answered = hello, None
        namespace = Namespace(hello.namespace)
        self.sizes.pop(namespace, None)
        self.sizes[namespace] = hello.slot_bytes
        while len(self.sizes) > MOST_SPACES:
            del self.sizes[next(iter(self.sizes))]

    def take(self, tell: Tell) -> None:
        """What it says of itself."""
        self.counters = tell.counters or self.counters
        if len(tell.breakers.rows) <= measures.MAX_BREAKERS:
            self.breakers = tell.breakers
        self.heard, self.weights = tell.heard, tell.weights


def groups_of(hello: EngineHello) -> list[descriptions.ChunkGroup]:
    """The KV groups of an engine, as it has said; none if it has not, or nonsense."""
    try:
        return descriptions.parse_groups(hello.traits.get("chunks", ""))
    except ValueError:
        return []


class LocalEngines:
    """See the module's docstring."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry
        self._engines: dict[int, LocalEngine] = {}
        self.spaces: dict[Namespace, ReuseGauge] = {}

    def hello(self, hello: EngineHello, now: float) -> str:
        """An engine introduces itself; returns why it is refused, empty if it is not."""
        objection = self._objection(hello)
        if objection:
            return objection
        engine = self._engines.get(hello.life)
        if engine is None:
            engine = self._engines[hello.life] = LocalEngine(hello, now)
        engine.heard_at = now
        engine.introduce(hello)
        space = self.spaces.setdefault(engine.namespace, ReuseGauge())
        sizes = hello.slot_bytes.values()
        space.capacity = self._geometry.pool_bytes * len(sizes) // sum(sizes)
        space.groups = groups_of(hello)
        self._forget_spaces()
        return ""

    def _objection(self, hello: EngineHello) -> str:
        if not hello.slot_bytes:
            return "an engine without KV groups"
        for group, size in hello.slot_bytes.items():
            if size <= 0 or size % SLOT_ALIGNMENT:
                return f"a chunk of KV group {group} takes {size} bytes: no slot has that size"
            if not self._geometry.slots_per_slab(size):
                return (
                    f"a chunk of KV group {group} takes {size} bytes, more than a slab of "
                    f"the pool ({self._geometry.slab_bytes} bytes); set a larger pool_bytes, or a "
                    "smaller blocks_per_chunk"
                )
        if hello.life not in self._engines and len(self._engines) >= node.MOST_ENGINES:
            return f"{node.MOST_ENGINES} engines are at this node already, the most that it takes"
        return ""

    def companions(self, namespace: Namespace, keys: Iterable[Key]) -> list[Key]:
        """What is worth nothing once chunks of a namespace are gone, as far as its KV groups are
        known.
        """
        space = self.spaces.get(namespace)
        return [] if space is None else companions(space.groups, keys)

    def get(self, life: int) -> LocalEngine | None:
        """The engine of that life, if it is here."""
        return self._engines.get(life)

    def hear(self, life: int, now: float) -> LocalEngine | None:
        """Note that an engine was heard; returns None if it is not here."""
        engine = self._engines.get(life)
        if engine is not None:
            engine.heard_at = now
        return engine

    def bye(self, life: int) -> None:
        """An engine is gone."""
        if self._engines.pop(life, None) is not None:
            self._forget_spaces()

    def silent(self, now: float) -> list[int]:
        """Lives of engines that were not heard of for too long."""
        return [life for life, engine in self._engines.items() if now - engine.heard_at >= SILENT_S]

    def _forget_spaces(self) -> None:
        used = {engine.namespace for engine in self}
        for namespace in self.spaces.keys() - used:
            del self.spaces[namespace]

    def reported(self) -> list[node.ReportedEngine]:
        """All that are here, for the directory."""
        return [
            node.ReportedEngine(each.hello, each.counters, each.breakers, each.heard, each.weights)
            for each in self
        ]

    def said(self) -> Iterator[tuple[int, str, Stamp, int]]:
        """For each engine its life, its namespace, and what it has said of its weights' names."""
        return ((e.hello.life, e.hello.namespace, e.heard, e.weights) for e in self)

    def __iter__(self) -> Iterator[LocalEngine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self) <= node.MOST_ENGINES, len(self)
        assert self.spaces.keys() == {engine.namespace for engine in self}
        for engine in self:
            assert engine.namespace in engine.sizes, engine
            for size in engine.hello.slot_bytes.values():
                assert self._geometry.slots_per_slab(size), engine
