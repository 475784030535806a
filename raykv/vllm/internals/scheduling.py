"""vLLM's scheduler: its steps, and the requests that have one under way."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

from raykv.vllm.internals.engine import Wrapper, wrap


def wrap_step_ends(wrapper: Wrapper) -> bool:
    """`update(scheduler, scheduled, result)`, which makes of a step the outputs for each front
    end.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return wrap(Scheduler, "update_from_output", wrapper)


def connectors_of(scheduler: Any) -> list[Any]:
    """Of vLLM's scheduler, which may have several in one."""
    first = getattr(scheduler, "connector", None)
    return [first, *getattr(first, "_connectors", ())]


def new_blocks(scheduled: Any) -> Iterator[tuple[str, tuple[list[int], ...]]]:
    """Blocks that a step gives to requests that have some already, by KV group."""
    some = scheduled.scheduled_cached_reqs
    for request_id, blocks in zip(some.req_ids, some.new_block_ids, strict=True):
        if blocks and request_id not in some.resumed_req_ids:
            yield request_id, blocks


class Begun(NamedTuple):
    """A request that begins with a step, or begins anew: how much of it vLLM takes for computed,
    and its blocks of all KV groups.
    """

    num_computed: int
    blocks: list[int]


def begun(scheduled: Any) -> dict[str, Begun]:
    """All requests that begin with a step, or begin anew."""
    some = scheduled.scheduled_cached_reqs
    rows = [
        (each.req_id, each.num_computed_tokens, each.block_ids)
        for each in scheduled.scheduled_new_reqs
    ]
    columns = zip(some.req_ids, some.num_computed_tokens, some.new_block_ids, strict=True)
    rows += [row for row in columns if row[0] in some.resumed_req_ids]
    return {name: Begun(count, [*chain(*(blocks or ()))]) for name, count, blocks in rows}


def invalid_blocks_of(result: Any) -> set[int]:
    """Blocks that a step should have loaded, and has not."""
    output = result.kv_connector_output
    return set() if output is None else set(output.invalid_block_ids or ())


def forget_invalid_blocks(result: Any, blocks: set[int]) -> None:
    """vLLM has nothing more to do for these."""
    output = result.kv_connector_output
    output.invalid_block_ids = set(output.invalid_block_ids) - blocks


def blocks_of_running(scheduler: Any) -> Iterator[tuple[str, list[int]]]:
    """The blocks of each running request, of all its KV groups."""
    for request in scheduler.running:
        groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        yield request.request_id, [block for group in groups for block in group]


def take_back(scheduler: Any, request_ids: Collection[str]) -> None:
    """Have requests computed from their beginning, as after a reset of vLLM's cache. What steps say
    of them that are under way, or end now, counts for nothing.

    vLLM's own recovery goes on in the middle of a request. Its second model runner does not hear of
    that, and a step that was scheduled ahead would have its token taken.
    """
    now, running = time.monotonic(), scheduler.running
    told, known = scheduler.prev_step_scheduled_req_ids, scheduler.requests
    for request in filter(None, map(known.get, request_ids)):
        # Of those that were preempted with the step under way.
        if request.num_stale_output_tokens:
            request.drop_stale_output = True
    # The last one first: each goes to the head of those that wait.
    for request in reversed(running[:]):
        if request.request_id in request_ids:
            # The first model runner is told its tokens again.
            told.discard(request.request_id)
            running.remove(request)
            scheduler._preempt_request(request, now, drop_stale_output=True)
