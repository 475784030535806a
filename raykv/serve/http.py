"""HTTP between an ingress and a replica: a request as one object, an answer as a stream of pieces.

The replica drives an ASGI application with it, in its own process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Headers = list[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

_MAX_PIECES = 64
"""An answer's pieces that wait to be sent; then the application waits."""


@dataclass(frozen=True)
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


@dataclass(frozen=True)
class Head:
    """The first piece of an answer."""

    status: int
    headers: Headers


async def drive(app: AsgiApp, request: HttpRequest) -> AsyncIterator[Head | bytes]:
    """Answer `request` with `app`: a head, then the body's pieces.

    Closing the iterator cancels the application.
    """
    pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue(_MAX_PIECES)
    inbox: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await pieces.put(Head(message["status"], list(message.get("headers", []))))
        elif message["type"] == "http.response.body" and message.get("body"):
            await pieces.put(bytes(message["body"]))

    async def run() -> None:
        try:
            await app(_scope(request), receive, send)
        finally:
            await pieces.put(None)

    task = asyncio.create_task(run())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        gone.set()
        task.cancel()
        while not pieces.empty():
            pieces.get_nowait()
        await asyncio.gather(task, return_exceptions=True)


def _scope(request: HttpRequest) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
