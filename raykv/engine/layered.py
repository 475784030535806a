"""Loads within a step, of which its end says whether they came: RayKV's, by layer, and those of
other connectors.

Requests that vLLM goes on with at once, while RayKV loads:

           begin                   end_step                 evicted
  request ───────► under way ──────────────► some came not ────────► gone, and its request is
                                    │ all came                       preempted by the owner
                                    └──────────────────────────────► gone

vLLM puts the blocks of such a request into its prefix cache when it allocates them, those that are
loaded and those that this step, and steps that are scheduled before it has ended, compute from
them.

1. Until the step of a load has ended, nobody else is given one of its request's blocks, and none of
   them is stored.
2. If a block did not come, it and all behind it leave vLLM's prefix cache before anybody asks for
   them; until they have, rule 1 goes on.
3. A request of which a block did not come stores nothing any more: it may have ended, so that what
   was computed from it is never computed anew.

Steps in which other connectors load:

  step with loads ───► under way ───► all came: its requests store
                                 └──► some came not: requests with these blocks are lost

vLLM computes with these blocks, and shares them, before anybody knows whether they hold anything.

4. A request that got its blocks while such steps were under way stores nothing until they have
   ended.
5. A request with a block that did not come is lost, and so is one that begins with blocks of a lost
   one: vLLM may compute with them before they are computed anew. A lost request stores nothing any
   more.
6. What lies in blocks of lost requests leaves vLLM's prefix cache: from the first one on that did
   not come, with the step's end, and all later ones with the request's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_STEPS = 64
"""Under way at a time; vLLM has as many as there are stages of its pipeline, and one more."""


class Steps(Generic[T]):
    """What is known of each step of the engine that has gone out and not ended."""

    def __init__(self) -> None:
        # By identity of what was scheduled, the oldest first.
        self._under_way: dict[int, tuple[object, T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, scheduled: object, known: T) -> T | None:
        """A step goes out. What was known of the oldest one, if nobody has told of its end."""
        oldest = None
        if len(self) >= MOST_STEPS:
            _, oldest = self._under_way.pop(next(iter(self._under_way)))
        self._under_way[id(scheduled)] = scheduled, known
        return oldest

    def end(self, scheduled: object, unknown: T) -> T:
        """What is known of a step that has ended; `unknown` if nothing is."""
        return self._under_way.pop(id(scheduled), (None, unknown))[1]


@dataclass(frozen=True)
class LayeredLoad:
    """A request's blocks from the first one that is loaded on, and their hashes.

    There may be fewer blocks than hashes: no step has reached the others.
    """

    request_id: str
    hashes: frozenset[bytes]
    blocks: tuple[int, ...]


def spoiled_blocks(blocks: Sequence[int], invalid: Set[int]) -> list[int]:
    """Of a request's blocks the first one that did not come, and all behind it."""
    return list(dropwhile(lambda block: block not in invalid, blocks))


class LayeredLoads:
    """RayKV's own; see the module's docstring. Steps are numbered, since vLLM may schedule one
    before the one in front of it has ended.
    """

    def __init__(self) -> None:
        # By step and request. The last step is the one that is being scheduled.
        self._steps: dict[int, dict[str, LayeredLoad]] = {}
        self._step = 0
        # Of which some came not, until it has left vLLM's prefix cache; and which blocks that are.
        self._lost: list[LayeredLoad] = []
        self.to_evict: set[int] = set()
        # The requests that must not store any more.
        self.spoiled: set[str] = set()

    def begin(self, load: LayeredLoad) -> None:
        """A request was given its blocks; its load starts with the step that is being scheduled."""
        self._steps.setdefault(self._step, {})[load.request_id] = load

    def grow(self, request_id: str, blocks: Sequence[int]) -> None:
        """The step that is being scheduled gives more blocks to a request of an earlier one."""
        for step, loads in self._steps.items():
            if step != self._step and (load := loads.get(request_id)) is not None:
                loads[request_id] = replace(load, blocks=(*load.blocks, *blocks))

    def close_step(self) -> int:
        """The step that was being scheduled goes out; its number."""
        self._step += 1
        return self._step - 1

    def must_wait(self, hashes: Sequence[bytes]) -> bool:
        """Whether a request that found these blocks in vLLM's cache should be looked up later."""
        return any(not load.hashes.isdisjoint(hashes) for load in (*self._loads(), *self._lost))

    @property
    def is_busy(self) -> bool:
        """Whether any request may have to wait."""
        return bool(self._steps or self._lost)

    @property
    def held(self) -> Set[str]:
        """The requests of which nothing is stored for now: what they have can't be trusted yet."""
        return {load.request_id for load in (*self._loads(), *self._lost)}

    @property
    def beginning(self) -> dict[str, LayeredLoad]:
        """The loads that start with the step that is being scheduled, by request."""
        return self._steps.get(self._step, {})

    def end_step(self, step: int, invalid: Set[int]) -> set[int]:
        """A step has ended, and with it its loads, without the `invalid` blocks. What must leave
        the prefix cache.

        To be followed by `evicted`.
        """
        for load in self._steps.pop(step, {}).values():
            lost = spoiled_blocks(load.blocks, invalid)
            if lost:
                self.spoiled.add(load.request_id)
                self._lost.append(load)
                self.to_evict.update(lost)
        return self.to_evict | invalid

    def lose_step(self, step: int) -> None:
        """How a step ended is not known: nothing that it loaded counts as come, and it must leave
        the prefix cache.
        """
        loads = self._steps.get(step, {}).values()
        self.end_step(step, {block for load in loads for block in load.blocks})

    def lost(self) -> dict[str, tuple[int, ...]]:
        """Requests of which some block did not come, and all their blocks, until `evicted`."""
        return {load.request_id: load.blocks for load in self._lost}

    def evicted(self) -> None:
        """Note that it has left the prefix cache: waiting requests may be asked about again."""
        self._lost.clear()
        self.to_evict.clear()

    def _loads(self) -> Iterator[LayeredLoad]:
        for loads in self._steps.values():
            yield from loads.values()


@dataclass
class HeldRequest:
    """`until` is the last step whose end it waits for."""

    until: int
    blocks: list[int] = field(default_factory=list)


@dataclass
class Lost:
    """Requests that store nothing any more, and blocks that must leave vLLM's prefix cache."""

    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


class SiblingLoads:
    """Other connectors'; see the module's docstring. Steps end in the order in which they were
    scheduled.
    """

    def __init__(self) -> None:
        # Steps with loads, the oldest first, and how many steps there were.
        self._under_way: list[int] = []
        self._num_steps = 0
        self._held: dict[str, HeldRequest] = {}
        # Of lost requests that have not ended, the blocks that may hold rubbish.
        self._lost: dict[str, set[int]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether steps must be told of."""
        return bool(self._held or self._lost)

    @property
    def held(self) -> Set[str]:
        """The requests that store nothing for now."""
        return self._held.keys()

    def begin(
        self,
        given: Mapping[str, Sequence[int]],
        grown: Mapping[str, Sequence[int]],
        ended: Iterable[str] = (),
        *,
        has_loads: bool,
    ) -> tuple[int, Lost]:
        """Take note of a step that was scheduled; returns its number, and what is lost with it.

        Args:
            given: the blocks of requests that begin with it, or begin anew.
            grown: the further blocks of others.
            ended: requests that have ended before it.
            has_loads: whether another connector loads within it.
        """
        self._num_steps += 1
        if has_loads:
            self._under_way.append(self._num_steps)
        if self._under_way:
            for name, blocks in given.items():
                self._held[name] = HeldRequest(self._under_way[-1], [*blocks])
        for name, blocks in grown.items():
            if name in self._held:
                self._held[name].blocks += blocks
            if name in self._lost:
                self._lost[name].update(blocks)
        heirs = self._heirs(given)
        gone = [self._lost.pop(name) for name in ended if name in self._lost]
        return self._num_steps, Lost(heirs, set().union(*gone))

    def _heirs(self, given: Mapping[str, Sequence[int]]) -> set[str]:
        """Requests that begin with blocks of lost ones; one may have them of another one."""
        found: set[str] = set()
        while self._lost:
            suspect = set().union(*self._lost.values())
            more = {
                name: {*blocks}
                for name, blocks in given.items()
                if name not in found and not suspect.isdisjoint(blocks)
            }
            if not more:
                break
            found |= more.keys()
            for name, blocks in more.items():
                self._lost.setdefault(name, set()).update(blocks)
        return found

    def end(self, step: int, invalid: Set[int], known: Set[str]) -> Lost:
        """Take note of a step that has ended without the `invalid` blocks; what that costs.

        `known` are the requests of whose end `begin` will be told.
        """
        lost = Lost()
        for name, held in self._held.items():
            if spoiled := spoiled_blocks(held.blocks, invalid):
                lost.requests.add(name)
                lost.blocks.update(spoiled)
                if name in known:
                    self._lost.setdefault(name, set()).update(spoiled)
        self._under_way = [each for each in self._under_way if each > step]
        for name in [name for name, held in self._held.items() if held.until <= step]:
            del self._held[name]
        return lost
