"""vLLM's scheduler: its steps, and the requests that have one under way."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

from raykv.base.guard import guarded, nothing
from raykv.vllm.internals.engine import around, wrap


def watch_scheduler(kind: type) -> None:
    """From now on connectors of this kind hear of the end of each step before vLLM looks at its
    result, and of what it has made of it; requests that they load for are admitted and taken back.
    A second call changes nothing.

    A reset that takes running requests back takes back those too that wait with blocks, in engines
    with a connector of this kind.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def ours(scheduler: Any) -> list[Any]:
        return [each for each in connectors_of(scheduler) if isinstance(each, kind)]

    @around
    def ending(
        update: Any, scheduler: Any, scheduled: Any, result: Any, *more: Any, **named: Any
    ) -> Any:
        connectors = ours(scheduler)
        for connector in connectors:
            connector.end_step(scheduler, scheduled, result)
        outputs = update(scheduler, scheduled, result, *more, **named)
        for connector in connectors:
            connector.tell_sources(outputs)
        return outputs

    @around
    def taking_back(
        reset: Any, scheduler: Any, reset_running_requests: bool = False, *more: Any, **named: Any
    ) -> Any:
        if reset_running_requests and ours(scheduler):
            take_back_loaded(scheduler)
        return reset(scheduler, reset_running_requests, *more, **named)

    wrap(Scheduler, "_handle_blocked_waiting_request", _admitting_failed_loads)
    wrap(Scheduler, "_inflight_prefill_reserved_blocks", _keeping_room_for_windows)
    wrap(Scheduler, "reset_prefix_cache", taking_back)
    wrap(Scheduler, "update_from_output", ending)


@around
def _admitting_failed_loads(is_ready: Any, scheduler: Any, request: Any) -> bool:
    """A request whose load brought nothing waits like one that has never loaded.

    vLLM frees its blocks, but goes on to keep room for it among the prefills under way, beside
    which it must then fit a second time. And it leaves it in front of requests that hold blocks,
    where it may wait for theirs. Either way nothing is scheduled any more.
    """
    was_loading = request.status.name == "WAITING_FOR_REMOTE_KVS"
    found: bool = is_ready(scheduler, request)
    if not (found and was_loading) or request.num_computed_tokens:
        return found
    return not waits_anew(scheduler, request)


@guarded(lambda *_: False)
def waits_anew(scheduler: Any, request: Any) -> bool:
    """Have vLLM keep no room for a request that has no blocks; it is passed over in this step, and
    then stands among those that hold none.
    """
    scheduler._inflight_prefills.discard(request)
    return True


@guarded(nothing)
def take_back_loaded(scheduler: Any) -> None:
    """Have requests computed from their beginning that have blocks and do not run, once nobody
    loads into these any more.

    vLLM takes back those that run, and gives the reset up if others have blocks: then a pause
    stays unfinished. As after a load of which nothing came, they wait like new ones.
    """
    from vllm.v1.request import RequestStatus

    for request in list(scheduler.kv_holding_waiting):
        name, status = request.request_id, request.status
        if status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if name not in scheduler.finished_recving_kv_req_ids:
                continue
            scheduler.failed_recving_kv_req_ids.add(name)
            request.num_computed_tokens = 0
            scheduler._handle_blocked_waiting_request(request)
        elif status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            request.num_computed_tokens = 0
            scheduler.kv_cache_manager.free(request)
        else:
            continue
        scheduler._inflight_prefills.discard(request)
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler.waiting.prepend_request(request)


@around
def _keeping_room_for_windows(reserved: Any, scheduler: Any) -> int:
    """vLLM admits a load only beside all blocks that others under way still need.

    It counts blocks that windows have left behind as held, of who is under way and of who is to be
    admitted: loads then hold blocks and wait for each other's, for ever.
    """
    found: int = reserved(scheduler)
    return found + uncounted_blocks(scheduler)


@guarded(lambda *_: 0)
def uncounted_blocks(scheduler: Any) -> int:
    """Blocks of windows that prefills under way still need, and who is admitted beside them; no
    more than vLLM's own limits.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    limits = [
        (each, each.max_admission_blocks_per_request)
        for each in coordinator.single_type_managers
        if each.max_admission_blocks_per_request is not None
    ]
    under_way, count = scheduler._inflight_prefills, 0
    for windowed, limit in limits if under_way else ():
        count += limit
        for request in under_way:
            held = windowed.req_to_blocks.get(request.request_id, ())
            whole = -(-request.num_tokens // windowed.block_size)
            left_behind = sum(block.is_null for block in held)
            counted = max(min(whole, limit) - len(held), 0)
            needed = min(whole - left_behind, limit) - (len(held) - left_behind)
            count += max(needed - counted, 0)
    return count


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
