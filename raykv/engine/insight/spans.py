"""A request's way through the cache as spans of time: its lookup, its fetch, its load.

    begin ──► lookup ──────────► fetch, if it waits ──► admit ──► load ──► loaded
                ▲                for other nodes        │ nothing to load
                └── look: nothing came of it ───────────┴──► (over)

Spans are exported when they end, so tracing never delays a request. All of a request's spans carry
its trace headers, as its client sent them.

Invariant: what is remembered is of requests that have begun and not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raykv.base.ids import shown_id

LOOKUP, FETCH, LOAD = "raykv.lookup", "raykv.fetch", "raykv.load"


@dataclass(frozen=True)
class RequestSpan:
    """Something that a request has waited for, from and until in seconds of a monotonic clock."""

    name: str
    began_at: float
    ended_at: float
    attributes: Mapping[str, str | int]


Tell = Callable[[Mapping[str, str], RequestSpan], None]
"""Gets a request's trace headers with each span."""


@dataclass(slots=True)
class _Course:
    """What is known of a request until its spans are over; None: it is not at that point."""

    request_id: str
    headers: Mapping[str, str]
    looks_since: float | None
    fetches: tuple[float, float] | None = None
    loads_since: float | None = None
    attributes: dict[str, str | int] = field(default_factory=dict)
    num_own: int = 0


class RequestSpans:
    """See the module's docstring. The times are of the same clock as those of lookups."""

    def __init__(self, tell: Tell | None = None) -> None:
        """`tell` exports the spans; if it is None, nothing is remembered."""
        self._tell = tell
        self._courses: dict[str, _Course] = {}

    def __len__(self) -> int:
        return len(self._courses)

    def begin(self, request_id: str, headers: Mapping[str, str], now: float) -> None:
        """A request is new, and its chunks are looked up."""
        if self._tell is not None:
            self._courses[request_id] = _Course(request_id, headers, now)

    def look(self, request_id: str, num_own: int, now: float) -> None:
        """vLLM asks what can be loaded behind `num_own` tokens; perhaps again, after a failure."""
        course = self._courses.get(request_id)
        if course is None:
            return
        course.num_own = num_own
        if course.looks_since is None:
            self._end_load(course, now)
            course.looks_since = now

    def admit(
        self, request_id: str, num_loaded: int, miss: str, fetches_since: float | None, now: float
    ) -> None:
        """It has its blocks, and loads `num_loaded` tokens into them.

        Args:
            request_id: its id.
            num_loaded: tokens.
            miss: why what is behind them is not loaded; empty: there is no reason.
            fetches_since: when a fetch began for it, if one did.
            now: as everywhere.
        """
        course = self._courses.get(request_id)
        if course is None or course.looks_since is None:
            return
        found: dict[str, str | int] = {
            "raykv.own_cache_tokens": course.num_own,
            "raykv.load_tokens": num_loaded,
        }
        until = now if fetches_since is None else max(course.looks_since, fetches_since)
        reason = {"raykv.miss_reason": miss} if miss else {}
        self._say(course, LOOKUP, (course.looks_since, until), {**found, **reason})
        course.looks_since = None
        course.fetches = None if fetches_since is None else (until, now)
        if num_loaded:
            course.loads_since = now
            course.attributes = {"raykv.load_tokens": num_loaded}
        else:
            self._end_fetch(course, {"raykv.other_node_tokens": 0})

    def came_from(self, request_id: str, num_other_node: int, num_disk: int) -> None:
        """Where the tokens were that it loads."""
        course = self._courses.get(request_id)
        if course is not None:
            sources = {"raykv.other_node_tokens": num_other_node, "raykv.disk_tokens": num_disk}
            self._end_fetch(course, sources)
            course.attributes |= sources

    def fail(self, request_id: str, reason: str) -> None:
        """Some of what it loads will not come."""
        course = self._courses.get(request_id)
        if course is not None and course.loads_since is not None:
            course.attributes["raykv.failure"] = reason

    def loaded(self, request_id: str, now: float) -> None:
        """Its load job has ended."""
        course = self._courses.get(request_id)
        if course is not None:
            self._end_load(course, now)

    def end(self, request_id: str, now: float) -> None:
        """It has ended, whatever it was waiting for."""
        course = self._courses.pop(request_id, None)
        if course is None:
            return
        if course.looks_since is not None:
            self._say(
                course,
                LOOKUP,
                (course.looks_since, now),
                {"raykv.own_cache_tokens": course.num_own, "raykv.miss_reason": "aborted"},
            )
        self._end_load(course, now)

    def _end_fetch(self, course: _Course, attributes: Mapping[str, str | int]) -> None:
        times, course.fetches = course.fetches, None
        if times is not None:
            self._say(course, FETCH, times, attributes)

    def _end_load(self, course: _Course, now: float) -> None:
        self._end_fetch(course, {})
        since, course.loads_since = course.loads_since, None
        if since is not None:
            self._say(course, LOAD, (since, now), course.attributes)

    def _say(
        self,
        course: _Course,
        name: str,
        times: tuple[float, float],
        attributes: Mapping[str, str | int],
    ) -> None:
        assert self._tell is not None, course
        named = {"gen_ai.request.id": shown_id(course.request_id), **attributes}
        self._tell(course.headers, RequestSpan(name, *times, named))
