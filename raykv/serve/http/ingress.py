"""What takes HTTP requests in front of the replicas: reads a request, chooses a model, passes on.

Ray Serve's own proxy gives a request to a replica before it has read it; a router that looks into
the prompt needs the body first. The ingress is cheap; it may have replicas of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from raykv.base import deadlines
from raykv.base.guard import nothing
from raykv.serve.arguments import IngressArguments, parse
from raykv.serve.http import exchange
from raykv.serve.http.answer import ContinuedAnswer, NotContinuedError
from raykv.serve.http.metrics import CONTENT_TYPE, ReplicaMetrics, SharedMetrics

logger = logging.getLogger("ray.serve")

# For a client to send its request, at most 64 MiB: 10 Mbit/s.
BODY_S = 60.0

# A replica sends something each second: ten times that, on a busy machine.
REPLICA_SILENCE_S = 10.0

TOO_MANY = (BackPressureError, DeploymentUnavailableError)
"""What a call raises that Serve does not even queue."""


FAR_TOKENS = 256
"""So many tokens of an answer are more than what a request that kills its replica gets."""


class NoReplicaError(Exception):
    """No replica has taken a request in time, or too many have died with it."""


class SilentReplicaError(Exception):
    """A replica gives no sign of life."""


GONE = (RayActorError, ObjectLostError, SilentReplicaError)
"""Errors after which another replica may make the answer."""

REFUSED = (NoReplicaError, NotContinuedError, *TOO_MANY)
"""Errors that end an answer; the client is given the reason."""


class Backend(Protocol):
    """Answers requests of one model."""

    def answer(self, request: exchange.HttpRequest) -> exchange.Pieces:
        """Raises one of `GONE`, if its replica dies, or of `TOO_MANY`, or `NoReplicaError`."""
        ...

    async def metrics(self) -> Sequence[ReplicaMetrics]:
        """The metrics of every replica that has not just died.

        Raises:
            TimeoutError: one does not answer.
        """
        ...


@dataclass(frozen=True)
class ReplicaBackend:
    """A Serve deployment of `EngineReplica`; Serve's request router chooses the replica.

    `wait_s`: how long a request may wait for a replica to take it. How long the answer takes then
    is up to the request.
    """

    handle: Any
    wait_s: float = deadlines.REPLICA_WAIT_S

    async def answer(self, request: exchange.HttpRequest) -> exchange.Pieces:
        pieces = self.handle.handle_http.remote(request)
        try:
            await self._taken(pieces)
            while (piece := await _next_of(pieces)) is not None:
                if exchange.body_of(piece):
                    exchange.STARTS.pop(id(request), nothing)()
                yield piece
        except BaseException:
            # The client has left, or no replica took it in time: no replica should work on it.
            pieces.cancel()
            raise

    async def metrics(self) -> Sequence[ReplicaMetrics]:
        asked = self.handle.options(stream=False).broadcast("metrics")
        results = await asked.results_async(timeout_s=deadlines.ANSWER_S, return_exceptions=True)
        return [result for result in results if isinstance(result, ReplicaMetrics)]

    async def _taken(self, pieces: Any) -> None:
        try:
            # Returns as soon as a replica has it; the pieces stay where they are.
            await asyncio.wait_for(pieces._to_object_ref_gen(), self.wait_s)
        except TimeoutError:
            raise NoReplicaError(
                f"no replica took the request within {self.wait_s:g} s: all are busy, or still "
                "starting; try later"
            ) from None


async def _next_of(pieces: Any) -> exchange.Piece | None:
    """The next piece of a replica; None behind the last one.

    Raises:
        SilentReplicaError: it has sent nothing for too long, not even that it lives.
    """
    try:
        async with asyncio.timeout(REPLICA_SILENCE_S):
            piece = await anext(pieces, None)
            return None if piece is None else exchange.unpacked(piece)
    except TimeoutError:
        raise SilentReplicaError(f"nothing for {REPLICA_SILENCE_S:g} s") from None


@dataclass(frozen=True)
class ServedModel:
    """What requests call a model, and what answers them."""

    names: Sequence[str]
    backend: Backend


class BrokenAnswerError(Exception):
    """An answer has begun and cannot be finished: cut the connection, so that it shows."""


@dataclass(frozen=True)
class PassedAnswer:
    """An ASGI application: the answer of a replica, passed on piece by piece."""

    head: exchange.Head
    pieces: exchange.Pieces
    """The body's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification.

        Raises:
            BrokenAnswerError: no replica goes on, which an answer of this kind can't say.
        """
        start = {"status": self.head.status, "headers": self.head.headers}
        async with aclosing(self.pieces) as pieces:
            await send({"type": "http.response.start", **start})
            try:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except REFUSED as error:
                if not self._is_event_stream():
                    raise BrokenAnswerError(str(error)) from error
                last = b"data: " + bytes(exchange.refusal(503, str(error)).body) + b"\n\n"
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_event_stream(self) -> bool:
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.head.headers
        )


class Ingress:
    """An ASGI application."""

    def __init__(self, models: Sequence[ServedModel], limits: IngressArguments) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._limits = limits
        self._held_bytes = 0
        self._metrics = SharedMetrics(lambda: collected([each.backend for each in models]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            # That it lives, and that it has no websockets.
            await Router()(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        held: bytes | bytearray = body
        try:
            await self._read(body, Request(scope, receive))
            request = exchange.HttpRequest(
                scope["method"],
                _path(scope),
                scope["query_string"],
                list(scope["headers"]),
                bytes(body),
            )
            # From here on one copy is held, not two.
            held = request.body
            del body

            async def answer() -> None:
                response = await self._answer(request)
                await response(scope, receive, send)

            await self._until_left(answer(), receive)
        except ClientDisconnect:
            return
        except HTTPException as error:
            await exchange.refusal(error.status_code, error.detail)(scope, receive, send)
        finally:
            self._held_bytes -= len(held)

    async def _read(self, body: bytearray, request: Request) -> None:
        """Fill `body`, counting it as held.

        Raises:
            ClientDisconnect: the client has left.
            HTTPException: the request is not taken.
        """
        limits = self._limits
        try:
            async with asyncio.timeout(BODY_S), aclosing(request.stream()) as parts:
                async for part in parts:
                    body += part
                    self._held_bytes += len(part)
                    if len(body) > limits.max_body_bytes:
                        most = limits.max_body_bytes
                        raise HTTPException(413, f"the request has more than {most} bytes")
                    if self._held_bytes > limits.max_held_bytes:
                        why = "too many long requests at the same time: try later"
                        raise HTTPException(503, why)
        except TimeoutError:
            raise HTTPException(408, f"the request did not come within {BODY_S:g} s") from None

    async def _until_left(self, answering: Any, receive: Receive) -> None:
        """Run `answering` until it is done or the client has left."""
        # watched: awaited by the request that it is for
        task = asyncio.create_task(answering)
        # watched: awaited by the request that it is for
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = task.done()
            leaving.cancel()
            task.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)
        if is_done:
            await task

    async def _answer(self, request: exchange.HttpRequest) -> ASGIApp:
        """What answers the request.

        Raises:
            HTTPException: nothing does.
        """
        if exchange.is_nested_too_deeply(request.body):
            raise HTTPException(400, exchange.NESTED)
        if request.path == "/metrics":
            key = dict(request.headers).get(b"authorization", b"")
            return Response(await self._metrics.page(key), media_type=CONTENT_TYPE)
        if request.path == "/v1/models" and len(self._models) > 1:
            return await self._list_models(request)
        model = self._model_of(request)
        if model is None:
            known = ", ".join(sorted(self._by_name))
            raise HTTPException(404, f"there is no such model here; there are {known}")
        return await self._begun(model.backend, request)

    def _model_of(self, request: exchange.HttpRequest) -> ServedModel | None:
        """The model that the request names; None: no backend has it."""
        if len(self._models) == 1:
            return self._models[0]
        try:
            body = exchange.parsed(request.body) if request.body else {}
        except ValueError:
            body = {}
        name = body.get("model") if isinstance(body, Mapping) else None
        if name is None:
            # vLLM explains best what is wrong with it.
            return self._models[0]
        return self._by_name.get(name) if isinstance(name, str) else None

    async def _begun(self, backend: Backend, request: exchange.HttpRequest) -> PassedAnswer:
        """The answer of a replica that lived to begin it.

        Raises:
            HTTPException: none has.
        """
        pieces = self._continued(backend, request)
        try:
            head = await anext(pieces)
            assert isinstance(head, exchange.Head), "a body without a head"
        except REFUSED as error:
            raise HTTPException(503, str(error)) from error
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            why = "the replica failed on this request; its log says why"
            raise HTTPException(500, why) from error
        return PassedAnswer(head, pieces)

    async def _continued(self, backend: Backend, request: exchange.HttpRequest) -> exchange.Pieces:
        """One answer, by as many replicas as it takes.

        Raises:
            NotContinuedError: its replica has died, and no other can go on.
            NoReplicaError: as many replicas have died with it as may, or none takes it.
        """
        answer = ContinuedAnswer(request)
        asked, num_died, num_tokens = request, 0, 0
        give_up_at = time.monotonic() + self._limits.replica_wait_s
        while True:
            is_taken = False
            try:
                async with aclosing(backend.answer(asked)) as pieces:
                    async for piece in pieces:
                        is_taken = True
                        for passed in answer.heard(piece):
                            yield passed
                for passed in answer.ended():
                    yield passed
                return
            except GONE as error:
                reason = type(error).__name__
            if is_taken:
                # Who got far with it has not died of it.
                num_died = 1 if answer.num_tokens - num_tokens >= FAR_TOKENS else num_died + 1
                num_tokens = answer.num_tokens
                give_up_at = time.monotonic() + self._limits.replica_wait_s
            if num_died >= self._limits.attempts:
                raise NoReplicaError(f"{num_died} replicas died with this request: try later")
            if time.monotonic() > give_up_at:
                raise NoReplicaError("replicas died before they took this request: try later")
            asked = answer.again()
            if is_taken:
                logger.warning(
                    "a replica has gone (%s): another one continues its answer behind %d tokens",
                    reason,
                    answer.num_tokens,
                )
            await asyncio.sleep(deadlines.LOOK_S)

    async def _list_models(self, request: exchange.HttpRequest) -> Response:
        """All models in one list, without those that have no replica."""
        found = await asyncio.gather(
            *(exchange.whole(model.backend.answer(request)) for model in self._models),
            return_exceptions=True,
        )
        answers = [each for each in found if not isinstance(each, BaseException)]
        lists = [json.loads(body) for head, body in answers if head.status == 200]
        listed = [model for each in lists for model in each["data"]]
        if listed:
            return JSONResponse({"object": "list", "data": listed})
        if len(answers) < len(found):
            raise HTTPException(503, "no model has a replica yet: try later")
        # Refused by all, for want of an API key for instance: what the first one says.
        head, body = answers[0]
        return Response(body, head.status, media_type="application/json")


async def collected(backends: Sequence[Backend]) -> Sequence[ReplicaMetrics]:
    """The metrics of all replicas of those backends that answer."""
    found = await asyncio.gather(*(each.metrics() for each in backends), return_exceptions=True)
    return [page for pages in found if not isinstance(pages, BaseException) for page in pages]


def _path(scope: Scope) -> str:
    """The path as vLLM knows it: an application may be mounted below a `route_prefix`."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class IngressReplica:
    """The ingress in a Serve deployment, in front of deployments of `EngineReplica`.

    Args:
        served: makes a model of the ingress, from its limits and from what was bound of the model.
        models: what was bound of each model, handles among it.
        arguments: an `IngressArguments`.
    """

    def __init__(
        self,
        served: Callable[..., ServedModel],
        models: Sequence[Sequence[Any]],
        arguments: Mapping[str, Any],
    ) -> None:
        given = parse(IngressArguments, arguments)
        self._ingress = Ingress([served(given, *bound) for bound in models], given)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Serve asks for it once."""
        return self._ingress


def served_model(given: IngressArguments, names: Sequence[str], handle: Any) -> ServedModel:
    """A model with replicas of one kind."""
    return ServedModel(names, replicas_of(handle, given))


def replicas_of(handle: Any, given: IngressArguments) -> ReplicaBackend:
    """The replicas behind a handle."""
    return ReplicaBackend(handle.options(stream=True), given.replica_wait_s)
