"""A client of an ASGI application, and applications to be clients of; no server in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from raykv.serve.http.exchange import AsgiApp, Message


@dataclass
class Client:
    """Sends one request, and keeps what comes back.

    Attributes:
        status: of the answer, None before its head.
        pieces: of its body.
        is_whole: its last piece has come.
    """

    method: str = "POST"
    path: str = "/v1/completions"
    root_path: str = ""
    body: list[bytes] = field(default_factory=lambda: [b"{}"])
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    status: int | None = None
    answered: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, app: AsgiApp) -> None:
        """The request and its answer. Raises what the application raises."""
        scope: Message = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "root_path": self.root_path,
            "query_string": b"",
            "headers": self.headers,
        }
        await app(scope, self._receive, self._send)

    def leave(self) -> None:
        """The connection is closed from this end."""
        self._left.set()

    async def heard(self, pieces: int) -> None:
        """Return when so many pieces of the body have come."""
        while len(self.pieces) < pieces:
            self._heard.clear()
            await self._heard.wait()

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    async def _receive(self) -> Message:
        if self.body:
            part = self.body.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.body)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        assert not self.is_whole, message
        if message["type"] == "http.response.start":
            assert self.status is None, message
            self.status = message["status"]
            self.answered = dict(message["headers"])
        else:
            assert self.status is not None, message
            self.pieces.append(message["body"])
            self.is_whole = not message["more_body"]
        self._heard.set()


def app_of(
    steps: Callable[[Callable[[], Awaitable[Message]], Callable[..., Awaitable[None]]], Any],
) -> AsgiApp:
    """An application that runs `steps(receive, send)`."""

    async def app(scope: Message, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await steps(receive, send)

    return app


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(piece: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}
