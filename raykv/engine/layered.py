"""Loads of requests that vLLM goes on with at once, while their KV is still coming.

           begin                   end_step                 evicted
  request ───────► under way ──────────────► some came not ────────► gone
                                    │ all came
                                    └──────────────────────────────► gone

vLLM puts the blocks of such a request into its prefix cache when it allocates them, those that are
loaded and those that the same step computes from them.

1. Until the step has ended, nobody else is given one of these blocks, and none of them is stored.
2. If a block did not come, it and all behind it leave vLLM's prefix cache before anybody asks for
   them; until they have, rule 1 goes on.
3. A request of which a block did not come stores nothing any more: it may have ended, so that what
   was computed from it is never computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import dropwhile


@dataclass(frozen=True)
class LayeredLoad:
    """A request's blocks from the first one that is loaded on, and their hashes.

    There may be fewer blocks than hashes: this step has not reached the others.
    """

    request_id: str
    hashes: frozenset[bytes]
    blocks: tuple[int, ...]


class LayeredLoads:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}
        # Blocks that must leave vLLM's prefix cache, of loads whose step has ended.
        self._to_evict: set[int] = set()
        self._spoiled: set[str] = set()

    def begin(self, load: LayeredLoad) -> None:
        """A request was given its blocks; its load starts with this step."""
        self._loads[load.request_id] = load

    def must_wait(self, hashes: Sequence[bytes]) -> bool:
        """Whether a request that found these blocks in vLLM's cache should be looked up later."""
        return any(not load.hashes.isdisjoint(hashes) for load in self._loads.values())

    @property
    def is_busy(self) -> bool:
        """Whether any request may have to wait."""
        return bool(self._loads)

    def is_under_way(self, request_id: str) -> bool:
        """Whether what the request has in its blocks can't be trusted yet."""
        return request_id in self._loads

    def is_spoiled(self, request_id: str) -> bool:
        """Whether the request must not store any more."""
        return request_id in self._spoiled

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request's load that is under way."""
        load = self._loads.get(request_id)
        return () if load is None else load.blocks

    def blocks_under_way(self) -> set[int]:
        """The blocks of all loads."""
        return {block for load in self._loads.values() for block in load.blocks}

    def end_step(self, invalid: Set[int]) -> set[int]:
        """All loads have ended, without the `invalid` blocks. What must leave the prefix cache.

        To be followed by `evicted`.
        """
        for load in self._loads.values():
            lost = list(dropwhile(lambda block: block not in invalid, load.blocks))
            if lost:
                self._spoiled.add(load.request_id)
                self._to_evict.update(lost)
        return self._to_evict | invalid

    def evicted(self) -> None:
        """Note that it has left the prefix cache: waiting requests may be asked about again."""
        self._loads.clear()
        self._to_evict.clear()

    def forget(self, request_id: str) -> None:
        """The request has ended, and nothing more of it is offered to be stored."""
        self._spoiled.discard(request_id)
