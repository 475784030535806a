"""What takes HTTP requests in front of the replicas: reads a request, chooses a model, passes on.

Ray Serve's own proxy gives a request to a replica before it has read it; a router that looks into
the prompt needs the body first. The ingress is cheap; it may have replicas of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from raykv.serve.http import AsgiApp, Head, HttpRequest, Message

logger = logging.getLogger("ray.serve")

REPLICA_GONE = (ActorDiedError, ActorUnavailableError, RayActorError)
"""What a call raises whose replica has died or cannot be reached."""


class Backend(Protocol):
    """Answers requests of one model."""

    def answer(self, request: HttpRequest) -> AsyncIterator[Head | bytes]:
        """A head, then the body's pieces; raises one of `REPLICA_GONE` if its replica dies."""
        ...


@dataclass(frozen=True)
class ReplicaBackend:
    """A Serve deployment of `EngineReplica`; Serve's request router chooses the replica."""

    handle: Any

    async def answer(self, request: HttpRequest) -> AsyncIterator[Head | bytes]:
        """See `Backend.answer`."""
        pieces = self.handle.handle_http.remote(request)
        try:
            async for piece in pieces:
                yield piece
        except (asyncio.CancelledError, GeneratorExit):
            pieces.cancel()
            raise


@dataclass(frozen=True)
class ServedModel:
    """What requests call a model, and who answers them."""

    names: Sequence[str]
    backend: Backend


class Ingress:
    """An ASGI application."""

    def __init__(
        self, models: Sequence[ServedModel], max_body_bytes: int = 64 << 20, attempts: int = 3
    ) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._max_body_bytes = max_body_bytes
        self._attempts = attempts

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "no such route"})

    async def _http(self, scope: Message, receive: Any, send: Any) -> None:
        try:
            body = await _body(receive, self._max_body_bytes)
        except ValueError as error:
            await _refuse(send, 413, str(error))
            return
        if body is None:
            return
        request = HttpRequest(
            scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), body
        )
        answering = asyncio.create_task(self._answer(request, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                # The client has gone: so does its request.
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, request: HttpRequest, send: Any) -> None:
        if request.path == "/v1/models" and len(self._models) > 1:
            await self._list_models(request, send)
            return
        model = self._model_of(request)
        if model is None:
            known = ", ".join(sorted(self._by_name))
            await _refuse(send, 404, f"no such model here: there are {known}")
            return
        await self._pass_on(model.backend, request, send)

    def _model_of(self, request: HttpRequest) -> ServedModel | None:
        """Whom the request is for; None: nobody has the model that it names."""
        if len(self._models) == 1:
            return self._models[0]
        try:
            body = json.loads(request.body) if request.body else {}
        except ValueError:
            body = {}
        name = body.get("model") if isinstance(body, Mapping) else None
        if name is None:
            # vLLM says best what is wrong with it.
            return self._models[0]
        return self._by_name.get(name) if isinstance(name, str) else None

    async def _pass_on(self, backend: Backend, request: HttpRequest, send: Any) -> None:
        for attempt in range(1, self._attempts + 1):
            has_begun = False
            try:
                async for piece in backend.answer(request):
                    if isinstance(piece, Head):
                        has_begun = True
                        await send(_start(piece))
                    else:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except REPLICA_GONE as error:
                if has_begun:
                    raise
                logger.warning("a replica has gone, attempt %d: %s", attempt, type(error).__name__)
            else:
                return
        await _refuse(send, 503, f"{self._attempts} replicas died one after another: try later")

    async def _list_models(self, request: HttpRequest, send: Any) -> None:
        """All models in one list."""
        answers = await asyncio.gather(
            *(_whole(model.backend.answer(request)) for model in self._models)
        )
        listed: list[Any] = []
        for head, body in answers:
            if head.status != 200:
                await _send_whole(send, head.status, body)
                return
            listed += json.loads(body)["data"]
        await _send_whole(send, 200, json.dumps({"object": "list", "data": listed}).encode())


async def _whole(pieces: AsyncIterator[Head | bytes]) -> tuple[Head, bytes]:
    head, body = Head(502, []), b""
    async for piece in pieces:
        if isinstance(piece, Head):
            head = piece
        else:
            body += piece
    return head, body


async def _body(receive: Any, most: int) -> bytes | None:
    """The whole body; None: the client has left.

    Raises:
        ValueError: it is longer than `most` bytes.
    """
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(bytes(message.get("body", b"")))
        total += len(parts[-1])
        if total > most:
            raise ValueError(f"the request has more than {most} bytes, the most that is taken here")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _start(head: Head) -> Message:
    # The length is known to whoever sends the pieces on.
    return {"type": "http.response.start", "status": head.status, "headers": head.headers}


async def _refuse(send: Any, status: int, reason: str) -> None:
    """An error as OpenAI's API has them."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": status}
    await _send_whole(send, status, json.dumps({"error": error}).encode())


async def _send_whole(send: Any, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class IngressReplica:
    """The ingress in a Serve deployment, in front of deployments of `EngineReplica`."""

    def __init__(
        self, handles: Sequence[Any], names: Sequence[Sequence[str]], max_body: int, attempts: int
    ) -> None:
        models = [
            ServedModel(called, ReplicaBackend(handle.options(stream=True)))
            for handle, called in zip(handles, names, strict=True)
        ]
        self._ingress = Ingress(models, max_body, attempts)

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """The application; Serve asks for it once."""
        return self._ingress
