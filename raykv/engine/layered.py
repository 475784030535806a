"""Loads of requests that vLLM goes on with at once, while their KV is still coming.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import dropwhile


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
    """See the module's docstring. Steps are numbered, since vLLM may schedule one before the one in
    front of it has ended.
    """

    def __init__(self) -> None:
        # By step and request. The last step is the one that is being scheduled.
        self._steps: dict[int, dict[str, LayeredLoad]] = {}
        self._step = 0
        # Of which some came not, until it has left vLLM's prefix cache; and which blocks that are.
        self._lost: list[LayeredLoad] = []
        self._to_evict: set[int] = set()
        self._spoiled: set[str] = set()

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

    def is_under_way(self, request_id: str) -> bool:
        """Whether what the request has in its blocks can't be trusted yet."""
        return any(load.request_id == request_id for load in (*self._loads(), *self._lost))

    def is_spoiled(self, request_id: str) -> bool:
        """Whether the request must not store any more."""
        return request_id in self._spoiled

    @property
    def spoiled(self) -> Set[str]:
        """All of these."""
        return self._spoiled

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
                self._spoiled.add(load.request_id)
                self._lost.append(load)
                self._to_evict.update(lost)
        return self._to_evict | invalid

    def lose_step(self, step: int) -> None:
        """How a step ended is not known: nothing that it loaded counts as come. What must leave the
        prefix cache does with the next one that ends.
        """
        loads = self._steps.get(step, {}).values()
        self.end_step(step, {block for load in loads for block in load.blocks})

    def lost(self) -> dict[str, tuple[int, ...]]:
        """Requests of which some block did not come, and all their blocks, until `evicted`."""
        return {load.request_id: load.blocks for load in self._lost}

    def evicted(self) -> None:
        """Note that it has left the prefix cache: waiting requests may be asked about again."""
        self._lost.clear()
        self._to_evict.clear()

    def forget(self, request_id: str) -> None:
        """The request has ended, and nothing more of it is offered to be stored."""
        self._spoiled.discard(request_id)

    def _loads(self) -> Iterator[LayeredLoad]:
        for loads in self._steps.values():
            yield from loads.values()
