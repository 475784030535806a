"""Requests that begin with more than RayKV loads: from vLLM's own cache, or from other connectors
beside it in vLLM's `MultiConnector`. What those load within a step, see `raykv.engine.siblings`.

vLLM doesn't tell a connector what another one loads. But each is asked what it finds behind the
tokens of vLLM's own cache: a request that begins with the step behind more tokens than that, and
that RayKV doesn't load, loads the others from another connector. A load that vLLM waits for is over
when its request begins, and then nobody is asked.

Only engines of one KV group can be told of blocks that did not come: vLLM raises with others.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import chain
from typing import Any

from raykv.engine.siblings import Lost, SiblingLoads
from raykv.vllm.internals.offloading import SchedulerTables
from raykv.vllm.internals.scheduling import begun, invalid_blocks_of, new_blocks
from raykv.vllm.manager import RayOffloadingManager
from raykv.vllm.weights import WeightChanges

MOST_STEPS = 64
"""Under way at a time; see `raykv.engine.cost.MOST_STEPS`."""


class SiblingScheduling:
    """See the module's docstring. On EngineCore's scheduler thread.

    Args:
        tables: of vLLM's offloading scheduler.
        manager: bars requests for good.
    """

    def __init__(self, tables: SchedulerTables, manager: RayOffloadingManager) -> None:
        self._tables = tables
        self._manager = manager
        self._can_fail = len(tables.groups) == 1
        self._loads = SiblingLoads()
        # How many tokens vLLM's own cache has of requests that were asked about for this step.
        self._asked: dict[str, int] = {}
        # Steps that have gone out while others loaded, by identity: what was scheduled, and number.
        self._steps: dict[int, tuple[Any, int]] = {}

    def ask(self, request_id: str, num_computed_tokens: int) -> None:
        """RayKV is asked what it finds behind so many tokens."""
        self._asked[request_id] = num_computed_tokens

    def load_own(self, request_id: str) -> None:
        """RayKV loads what was found."""
        self._asked.pop(request_id, None)

    @property
    def held(self) -> Set[str]:
        """The requests of which nothing is stored for now."""
        return self._loads.held

    def begin(
        self,
        scheduled: Any,
        evict: Callable[[Set[int]], None],
        weights: WeightChanges | None = None,
    ) -> None:
        """Take note of a step before its stores are made up.

        vLLM asks about whole blocks only: a request may go on behind more of its own cache, of
        which `weights` hear.
        """
        asked, self._asked = self._asked, {}
        if not (asked or self._loads.is_busy):
            return
        given = begun(scheduled)
        begins = {name: given[name].num_computed for name in asked if name in given}
        for name, count in begins.items():
            if weights is not None:
                weights.begin(name, count)
        number, lost = self._loads.begin(
            {name: each.blocks for name, each in given.items()},
            {name: [*chain(*blocks)] for name, blocks in new_blocks(scheduled)},
            scheduled.finished_req_ids or (),
            has_loads=self._can_fail and any(count > asked[name] for name, count in begins.items()),
        )
        self._lose(lost, evict)
        if self._loads.held:
            if len(self._steps) >= MOST_STEPS:
                # Nobody tells of their ends.
                self._steps.clear()
            self._steps[id(scheduled)] = scheduled, number

    def end_step(self, scheduled: Any, result: Any, evict: Callable[[Set[int]], None]) -> None:
        """A step has ended, and vLLM has not looked at its result yet."""
        _, number = self._steps.pop(id(scheduled), (None, 0))
        if number:
            known = self._tables.requests.keys()
            self._lose(self._loads.end(number, invalid_blocks_of(result), known), evict)

    def _lose(self, lost: Lost, evict: Callable[[Set[int]], None]) -> None:
        self._manager.barred |= lost.requests & self._tables.requests.keys()
        if lost.blocks:
            evict(lost.blocks)
