"""That an answer has begun, passed on from who reads it to who chose the replica.

An ingress and its request router are in one process, on event loops of their own, and share the
request itself. Ray tells a router only when an answer has ended, which is seconds after the prompt
has been computed.
"""

from __future__ import annotations

from collections.abc import Callable

from raykv.serve.http.exchange import HttpRequest


class AnswerStarts:
    """Who waits for the first piece of an answer. Any thread may call anything.

    Invariant: a request is here from `watch` to `began` or `forget`.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request: HttpRequest, call: Callable[[], None]) -> None:
        """Call this once when the answer begins, on the thread that reads it: it must be brief.

        The request must live until `forget`.
        """
        self._watched[id(request)] = call

    def began(self, request: HttpRequest) -> None:
        """The first piece of its body is here."""
        call = self._watched.pop(id(request), None)
        if call is not None:
            call()

    def forget(self, request: HttpRequest) -> None:
        """It has ended, however that may be."""
        self._watched.pop(id(request), None)


STARTS = AnswerStarts()
"""Of this process."""
