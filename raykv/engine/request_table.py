"""The requests that an engine's view knows, from their first sight to their end."""

from __future__ import annotations

from collections.abc import ValuesView
from dataclasses import dataclass, field

from raykv.engine.requests import PREFILLED_REPEATS, Miss, RequestOptions, RequestState


@dataclass
class RequestTable:
    """`plain` has the ids of those of which every chunk that is READY may be loaded."""

    plain: set[str] = field(default_factory=set)
    _requests: dict[str, RequestState] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def start(self, request_id: str, options: RequestOptions) -> None:
        """A request is new."""
        repeats = PREFILLED_REPEATS if options.prefilled else 0
        self._requests[request_id] = RequestState(options, repeats_left=repeats)
        if options.load:
            self.plain.add(request_id)

    def finish(self, request_id: str) -> RequestState | None:
        """Forget a request; None if it is unknown."""
        self.plain.discard(request_id)
        return self._requests.pop(request_id, None)

    def bar(self, request_id: str) -> RequestState | None:
        """Not every chunk may be loaded from now on; None if the request is unknown."""
        self.plain.discard(request_id)
        return self._requests.get(request_id)

    def find(self, request_id: str) -> RequestState | None:
        """None if it is unknown."""
        return self._requests.get(request_id)

    def get(self, request_id: str) -> RequestState:
        """Of an unknown one, a state that nobody keeps."""
        found = self._requests.get(request_id)
        return RequestState(RequestOptions(), is_known=False) if found is None else found

    def take_miss(self, request_id: str) -> Miss | None:
        """What its latest lookup that was a MISS did not find, since the last call."""
        request = self.get(request_id)
        miss, request.miss = request.miss, None
        return miss

    def values(self) -> ValuesView[RequestState]:
        """All of them."""
        return self._requests.values()
