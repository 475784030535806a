"""An answer on its way to a client over ASGI: passed on piece by piece, refused, or broken off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from raykv.serve.http.exchange import Head, Headers

# How long a client is asked to wait if no replica could take its request.
REPLICA_RETRY_AFTER_S = 5


_JSON: Headers = [(b"content-type", b"application/json")]
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "service_unavailable_error",
}


class BrokenAnswerError(Exception):
    """An answer has begun and cannot be finished: cut the connection, so that it shows."""


class HttpAnswer:
    """The answer to one request. Do not use it after it is complete."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._head: Head | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client may have seen part of it: then no other replica can answer."""
        return self._head is not None

    async def pass_on(self, piece: Head | bytes) -> None:
        """Send a piece, the head first."""
        if isinstance(piece, Head):
            assert self._head is None, "a second head"
            self._head = piece
            await self._send(
                {
                    "type": "http.response.start",
                    "status": piece.status,
                    "headers": piece.headers,
                }
            )
        else:
            assert self._head is not None, "a body without a head"
            await self._body(piece, more=True)

    async def end(self) -> None:
        """Nothing follows."""
        assert self._head is not None, "an answer without a head"
        await self._body(b"", more=False)

    async def whole(
        self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """All of it at once; JSON where `headers` don't say otherwise."""
        length = (b"content-length", str(len(body)).encode())
        await self.pass_on(Head(status, [*(headers or _JSON), length]))
        await self._body(body, more=False)

    async def refuse(self, status: int, reason: str) -> None:
        """An error as OpenAI's API has them; 503 says when to come back."""
        later = [(b"retry-after", str(REPLICA_RETRY_AFTER_S).encode())] if status == 503 else []
        await self.whole(status, _error(status, reason), [*_JSON, *later])

    async def break_off(self, reason: str) -> None:
        """Tell the client that the rest will not come.

        Raises:
            BrokenAnswerError: it can't be said in an answer of this kind.
        """
        assert self._head is not None, "nothing to break off"
        if not _is_event_stream(self._head):
            raise BrokenAnswerError(reason)
        await self._body(b"data: " + _error(503, reason) + b"\n\n", more=True)
        await self.end()

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _is_event_stream(head: Head) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )


def _error(status: int, reason: str) -> bytes:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    error = {"message": reason, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()
