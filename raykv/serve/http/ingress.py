"""What takes HTTP requests in front of the replicas: reads a request, chooses a model, passes on.

Ray Serve's own proxy gives a request to a replica before it has read it; a router that looks into
the prompt needs the body first. The ingress is cheap; it may have replicas of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from raykv.base.deadlines import REPLICA_WAIT_S
from raykv.serve.arguments import IngressArguments, parse
from raykv.serve.http import exchange, starts
from raykv.serve.http.answer import HttpAnswer
from raykv.serve.http.metrics import CONTENT_TYPE, RefusedError, ReplicaMetrics, SharedMetrics

logger = logging.getLogger("ray.serve")

# For a client to send its request, at most 64 MiB: 10 Mbit/s.
BODY_S = 60.0

# Before a request whose replica has died is given to another one: the router learns of it first.
REPLICA_RETRY_PAUSE_S = 0.05

# For all replicas to write down their metrics. Prometheus gives up after 10 s.
REPLICA_METRICS_S = 5.0


REPLICA_GONE = (ActorDiedError, ActorUnavailableError, RayActorError)
"""What a call raises whose replica has died or cannot be reached."""

TOO_MANY = (BackPressureError, DeploymentUnavailableError)
"""What a call raises that Serve does not even queue."""


class NoReplicaError(Exception):
    """No replica has taken a request in time."""


class Backend(Protocol):
    """Answers requests of one model."""

    def answer(self, request: exchange.HttpRequest) -> exchange.Pieces:
        """Raises one of `REPLICA_GONE`, if its replica dies, or of `TOO_MANY`, or
        `NoReplicaError`.
        """
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
    wait_s: float = REPLICA_WAIT_S

    async def answer(self, request: exchange.HttpRequest) -> exchange.Pieces:
        pieces = self.handle.handle_http.remote(request)
        try:
            await self._taken(pieces)
            has_begun = False
            async for piece in pieces:
                if not has_begun and isinstance(piece, bytes):
                    has_begun = True
                    starts.STARTS.began(request)
                yield piece
        except BaseException:
            # The client has left, or no replica took it in time: no replica should work on it.
            pieces.cancel()
            raise

    async def metrics(self) -> Sequence[ReplicaMetrics]:
        asked = self.handle.options(stream=False).broadcast("metrics")
        results = await asked.results_async(timeout_s=REPLICA_METRICS_S, return_exceptions=True)
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


@dataclass(frozen=True)
class ServedModel:
    """What requests call a model, and what answers them."""

    names: Sequence[str]
    backend: Backend


class Ingress:
    """An ASGI application.

    `max_held_bytes` bounds the bodies of all requests that are here at the same time.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        max_body_bytes: int = 64 << 20,
        attempts: int = 3,
        max_held_bytes: int = 1 << 30,
    ) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._max_body_bytes = max_body_bytes
        self._attempts = attempts
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._metrics = SharedMetrics(lambda: collected([each.backend for each in models]))

    async def __call__(self, scope: exchange.Message, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "no such route"})

    async def _http(self, scope: exchange.Message, receive: Any, send: Any) -> None:
        body = bytearray()
        try:
            refusal = await self._read(body, receive)
            if refusal is not None:
                await HttpAnswer(send).refuse(refusal.status, refusal.reason)
                return
            request = exchange.HttpRequest(
                scope["method"],
                _path(scope),
                scope["query_string"],
                list(scope["headers"]),
                bytes(body),
            )
            await self._until_left(self._answer(request, HttpAnswer(send)), receive)
        except _ClientLeftError:
            return
        finally:
            self._held_bytes -= len(body)

    async def _read(self, body: bytearray, receive: Any) -> _Refusal | None:
        """Fill `body`, counting it as held; or why the request is not taken."""
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeftError
                    part = message.get("body", b"")
                    body += part
                    self._held_bytes += len(part)
                    if len(body) > self._max_body_bytes:
                        most = self._max_body_bytes
                        return _Refusal(413, f"the request has more than {most} bytes")
                    if self._held_bytes > self._max_held_bytes:
                        return _Refusal(503, "too many long requests at the same time: try later")
                    if not message.get("more_body", False):
                        return None
        except TimeoutError:
            return _Refusal(408, f"the request did not come within {BODY_S:g} s")

    async def _until_left(self, answering: Any, receive: Any) -> None:
        """Run `answering` until it is done or the client has left."""
        task = asyncio.create_task(answering)
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

    async def _answer(self, request: exchange.HttpRequest, answer: HttpAnswer) -> None:
        if exchange.is_nested_too_deeply(request.body):
            await answer.refuse(400, exchange.NESTED)
            return
        if request.path == "/metrics":
            await self._tell_metrics(request, answer)
            return
        if request.path == "/v1/models" and len(self._models) > 1:
            await self._list_models(request, answer)
            return
        model = self._model_of(request)
        if model is None:
            known = ", ".join(sorted(self._by_name))
            await answer.refuse(404, f"there is no such model here; there are {known}")
            return
        await self._pass_on(model.backend, request, answer)

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

    async def _pass_on(
        self, backend: Backend, request: exchange.HttpRequest, answer: HttpAnswer
    ) -> None:
        for attempt in range(1, self._attempts + 1):
            try:
                async with aclosing(backend.answer(request)) as pieces:
                    async for piece in pieces:
                        await answer.pass_on(piece)
                await answer.end()
            except REPLICA_GONE as error:
                logger.warning("a replica has gone, attempt %d: %s", attempt, type(error).__name__)
                if answer.has_begun:
                    await answer.break_off("the replica that was answering has died: ask again")
                    return
                await asyncio.sleep(REPLICA_RETRY_PAUSE_S)
            except (NoReplicaError, *TOO_MANY) as error:
                await answer.refuse(503, str(error))
                return
            except Exception:
                if answer.has_begun:
                    raise
                logger.exception("%s %s", request.method, request.path)
                await answer.refuse(500, "the replica failed on this request; its log says why")
                return
            else:
                return
        await answer.refuse(503, f"{self._attempts} replicas died one after another: try later")

    async def _tell_metrics(self, request: exchange.HttpRequest, answer: HttpAnswer) -> None:
        """Tell the metrics of all replicas whose keys the client has."""
        try:
            text = await self._metrics.page(dict(request.headers).get(b"authorization", b""))
        except RefusedError as refused:
            await answer.refuse(refused.status, str(refused))
            return
        await answer.whole(200, text, [(b"content-type", CONTENT_TYPE)])

    async def _list_models(self, request: exchange.HttpRequest, answer: HttpAnswer) -> None:
        """All models in one list, without those that have no replica."""
        found = await asyncio.gather(
            *(exchange.whole(model.backend.answer(request)) for model in self._models),
            return_exceptions=True,
        )
        listed: list[Any] = []
        for each in found:
            if isinstance(each, exchange.WholeAnswer) and each.head.status == 200:
                listed += json.loads(each.body)["data"]
        failed = [each for each in found if not isinstance(each, exchange.WholeAnswer)]
        if failed and not listed:
            await answer.refuse(503, "no model has a replica yet: try later")
            return
        if not failed and not listed:
            # Refused by all, for want of an API key for instance: what the first one says.
            first = next(each for each in found if isinstance(each, exchange.WholeAnswer))
            await answer.whole(first.head.status, first.body)
            return
        await answer.whole(200, json.dumps({"object": "list", "data": listed}).encode())


@dataclass(frozen=True)
class _Refusal:
    status: int
    reason: str


class _ClientLeftError(Exception):
    """The client no longer waits for an answer."""


async def collected(backends: Sequence[Backend]) -> Sequence[ReplicaMetrics]:
    """The metrics of all replicas of those backends that answer."""
    found = await asyncio.gather(*(each.metrics() for each in backends), return_exceptions=True)
    return [page for pages in found if not isinstance(pages, BaseException) for page in pages]


def _path(scope: exchange.Message) -> str:
    """The path as vLLM knows it: an application may be mounted below a `route_prefix`."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


class IngressReplica:
    """The ingress in a Serve deployment, in front of deployments of `EngineReplica`.

    `arguments` are an `IngressArguments`.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        names: Sequence[Sequence[str]],
        arguments: Mapping[str, Any],
    ) -> None:
        given = parse(IngressArguments, arguments)
        self._ingress = ingress_of(
            [
                ServedModel(called, replicas_of(handle, given))
                for handle, called in zip(handles, names, strict=True)
            ],
            given,
        )

    async def __serve_build_asgi_app__(self) -> exchange.AsgiApp:
        """The application; Serve asks for it once."""
        return self._ingress


def ingress_of(models: Sequence[ServedModel], given: IngressArguments) -> Ingress:
    """An ingress with the limits that an operator has given."""
    return Ingress(models, given.max_body_bytes, given.attempts, given.max_held_bytes)


def replicas_of(handle: Any, given: IngressArguments) -> ReplicaBackend:
    """The replicas behind a handle."""
    return ReplicaBackend(handle.options(stream=True), given.replica_wait_s)
