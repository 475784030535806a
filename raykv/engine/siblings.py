"""Loads of other connectors within a step, of which the step's result says whether they came.

  step with loads ───► under way ───► all came: its requests store
                                 └──► some came not: requests with these blocks are lost

vLLM computes with these blocks, and shares them, before anybody knows whether they hold anything.

1. A request that got its blocks while such steps were under way stores nothing until they have
   ended.
2. A request with a block that did not come is lost, and so is one that begins with blocks of a lost
   one: vLLM may compute with them before they are computed anew. A lost request stores nothing any
   more.
3. What lies in blocks of lost requests leaves vLLM's prefix cache: from the first one on that did
   not come, with the step's end, and all later ones with the request's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from raykv.engine.layered import spoiled_blocks


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
    """See the module's docstring. Steps end in the order in which they were scheduled."""

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
