"""HTTP between an ingress and a replica: a request as one object, an answer as a stream of pieces.

The replica drives an ASGI application with it, in its own process.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from raykv.base import deadlines
from raykv.vllm.transcript import CURRENT, Delta, Transcript

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("ray.serve")

# How long a client is asked to wait if no replica could take its request.
REPLICA_RETRY_AFTER_S = 5

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
"""vLLM's routes that answer a prompt: the last two are Anthropic's and OpenAI's, for agents."""

Headers = list[tuple[bytes, bytes]]

MAX_NESTING = 100
"""Of a body's objects and lists. An engine that is given parameters of 500 dies of it, as vLLM
pickles them from process to process; the schema of a tool has some ten or twenty."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "service_unavailable_error",
}

NESTED = f"the body's JSON is nested deeper than {MAX_NESTING}"

_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_QUOTE = ord('"')
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_PART_BYTES = 1 << 20

_MAX_PIECES = 64
"""An answer's pieces that wait to be sent; then the application waits."""


@dataclass(frozen=True)
class HttpRequest:
    """A request with its whole body.

    `known`: deltas of the answer that another replica has made. Only an ingress sets it; a client
    cannot.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    known: Sequence[Delta] = ()


STARTS: dict[int, Callable[[], None]] = {}
"""What to call once, by the id of a request, when the first piece of its answer's body is here.

An ingress and its request router are in one process, on event loops of their own, and share the
request itself. The router enters what is brief, and takes it out when the request has ended; the
ingress calls it. Ray tells a router only when an answer has ended, which is seconds after the
prompt has been computed."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer; comes before its body."""

    status: int
    headers: Headers


@dataclass(frozen=True)
class MadePiece:
    """Some of an answer's body, and what the engine has made since the piece before.

    `why_not`: why no other replica can continue the answer, if none can.
    """

    body: bytes
    deltas: Sequence[Delta]
    why_not: str


Piece = Head | bytes | MadePiece
"""One with an empty body is a sign of life, and may come before the head."""

Pieces = AsyncGenerator[Piece, None]
"""An answer: a head, then the body's pieces; signs of life between them and before. Closing it
takes the request back."""


_PLAIN, _MADE = b"\0", b"\1"


def packed(piece: Piece) -> Head | bytes:
    """For Ray, which sends bytes much faster than anything else."""
    if isinstance(piece, Head):
        return piece
    if isinstance(piece, bytes):
        return _PLAIN + piece
    told = msgspec.msgpack.encode((piece.deltas, piece.why_not))
    return b"".join((_MADE, len(told).to_bytes(4), told, piece.body))


def unpacked(sent: Head | bytes) -> Piece:
    """What `packed` has packed."""
    if isinstance(sent, Head):
        return sent
    if sent.startswith(_PLAIN):
        return sent[1:]
    end = 5 + int.from_bytes(sent[1:5])
    deltas, why_not = msgspec.msgpack.decode(sent[5:end], type=tuple[tuple[Delta, ...], str])
    return MadePiece(sent[end:], deltas, why_not)


def body_of(piece: Piece) -> bytes:
    """What is in it of the answer's body."""
    if isinstance(piece, MadePiece):
        return piece.body
    return piece if isinstance(piece, bytes) else b""


def parsed(body: bytes) -> Any:
    """The JSON of a body.

    Raises:
        ValueError: it is not JSON, or is nested more deeply than Python reads.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def is_nested_too_deeply(body: bytes) -> bool:
    """Whether JSON goes beyond `MAX_NESTING`; for text that is not JSON, any answer."""
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return False
    if b"\0" in body:
        # Not UTF-8, which Python's parser nevertheless reads.
        body = body.decode(json.detect_encoding(body), "replace").encode()
    # What is escaped in a string goes first: then every other quote begins one.
    left = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    depth = is_inside = 0
    for start in range(0, len(left), _PART_BYTES):
        part = np.frombuffer(left[start : start + _PART_BYTES], np.uint8)
        inside = (is_inside + np.cumsum(part == _QUOTE)) % 2
        depths = depth + np.cumsum(np.where(inside, 0, _STEPS[part]))
        if depths.max() > MAX_NESTING:
            return True
        depth, is_inside = int(depths[-1]), int(inside[-1])
    return False


class NestingLimit:
    """ASGI middleware in front of vLLM's application: JSON beyond `MAX_NESTING` is a 400."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not _is_json(scope["headers"]):
            await self._app(scope, receive, send)
            return
        # vLLM's routes of JSON read the whole body too, before they do anything.
        messages = [await receive()]
        while messages[-1].get("more_body", False):
            messages.append(await receive())
        if is_nested_too_deeply(b"".join(each.get("body", b"") for each in messages)):
            await refusal(400, NESTED)(scope, receive, send)
            return
        read = iter(messages)

        async def again() -> Message:
            message = next(read, None)
            return await receive() if message is None else message

        await self._app(scope, again, send)


def _is_json(headers: Headers) -> bool:
    """vLLM's routes parse objects from no other type of content, such as files."""
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)


def refusal(status: int, reason: str) -> Response:
    """An error as OpenAI's API has them; 503 says when to come back."""
    from starlette.responses import JSONResponse

    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    error = {"message": reason, "type": kind, "param": None, "code": status}
    later = {"retry-after": str(REPLICA_RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse({"error": error}, status, later)


async def whole(pieces: Pieces) -> tuple[Head, bytes]:
    """Wait for the end of an answer: its head, 502 if it has none, and its body."""
    head, body = Head(502, []), b""
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, Head):
                head = piece
            else:
                body += body_of(piece)
    return head, body


async def drive(app: ASGIApp, request: HttpRequest) -> Pieces:
    """Answer `request` with `app`: a head, then the body's pieces.

    While there is none, a sign of life comes each second. Closing the iterator cancels the
    application. What the application raises comes out at the end of the pieces, unless
    its answer was whole by then: Starlette answers 500 and raises as well.
    """
    exchange = _Exchange(request)
    # watched: awaited for the end of each answer
    task = asyncio.create_task(exchange.run(app))
    try:
        while True:
            try:
                async with asyncio.timeout(deadlines.HEARTBEAT_S):
                    piece = await exchange.pieces.get()
            except TimeoutError:
                if not exchange.pieces.empty():
                    # One came just now: what is told with it is older.
                    continue
                piece = exchange.told(b"")
            if piece is None:
                break
            yield piece
        await task
    finally:
        exchange.end()
        task.cancel()
        await asyncio.wait({task}, timeout=deadlines.LEAVE_S)


class _Exchange:
    """What an ASGI application receives of a request, and sends."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._is_read = False
        self._is_whole = False
        self._is_over = asyncio.Event()
        self._transcript = Transcript(request.known)
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue(_MAX_PIECES)
        """Ends with None."""

    async def run(self, app: ASGIApp) -> None:
        """Run the application to its end."""
        CURRENT.set(self._transcript)
        try:
            await app(_scope(self._request), self._receive, self._send)
        except Exception:
            if not self._is_whole:
                raise
            logger.exception("after the answer to %s %s", self._request.method, self._request.path)
        finally:
            await self.pieces.put(None)

    def told(self, body: bytes) -> bytes | MadePiece:
        """With what is new in the transcript."""
        deltas, why_not = self._transcript.taken(), self._transcript.why_not
        return MadePiece(body, deltas, why_not) if deltas or why_not else body

    def end(self) -> None:
        """Take no more pieces: the reader has gone."""
        self._is_over.set()
        while not self.pieces.empty():
            self.pieces.get_nowait()

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._is_over.wait()  # bounded: until the client leaves; `drive` cancels it
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_over.is_set():
            return
        if message["type"] == "http.response.start":
            await self.pieces.put(Head(message["status"], list(message.get("headers", []))))
        elif message["type"] == "http.response.body":
            if message.get("body"):
                await self.pieces.put(self.told(bytes(message["body"])))
            if not message.get("more_body", False):
                self._is_whole = True


def _scope(request: HttpRequest) -> Scope:
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
