"""A replica: vLLM's engine and its own FastAPI application, in a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import prometheus_client
import ray
from ray import serve
from starlette.types import ASGIApp

from raykv.base import deadlines
from raykv.cluster.processes import end_children
from raykv.serve.arguments import ModelArguments, parse, plan_of
from raykv.serve.http.exchange import Head, HttpRequest, body_of, drive, packed
from raykv.serve.http.metrics import ReplicaMetrics
from raykv.serve.models import find_model
from raykv.vllm import command as vllm_command
from raykv.vllm.plugin import REPLICA_VARIABLE

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """Serves requests of one model. A dead engine ends the replica at once; Serve makes another."""

    # What `__del__` needs of a replica that could not be made.
    _watch: asyncio.Task[None] | None = None
    _stack: AsyncExitStack | None = None
    # Digests of the API keys that vLLM takes.
    _keys: Sequence[bytes] = ()

    async def __init__(self, model: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._model = parse(ModelArguments, model)
        self._engine: Any = None
        self._stack = AsyncExitStack()
        self._app: ASGIApp = await self._start(self._stack)
        # watched: awaited by the next request once the engine is dead
        self._watch = asyncio.create_task(self._end_with_engine())

    async def handle_http(self, request: HttpRequest) -> AsyncGenerator[Head | bytes, None]:
        """Answer a request, by pieces that are packed.

        At once a sign of life: the request has come. The head comes with the first of the body:
        until then the caller can try another replica.
        """
        yield packed(b"")
        head: Head | None = None
        async with aclosing(drive(self._app, request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                    continue
                if head is not None and body_of(piece):
                    await self._still_there()
                    yield head
                    head = None
                yield packed(piece)
        if head is not None:
            await self._still_there()
            yield head

    async def metrics(self) -> ReplicaMetrics:
        """What the `/metrics` of a server of vLLM's would answer."""
        context = serve.get_replica_context()
        text = await asyncio.to_thread(prometheus_client.generate_latest)
        return ReplicaMetrics(context.deployment, context.replica_tag, text.decode(), self._keys)

    async def check_health(self) -> None:
        """Raises if the engine is dead."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        # Serve awaits it when the replica is to end, be it half made.
        if self._watch is not None:
            self._watch.cancel()
        if self._stack is not None:
            await self._stack.aclose()
        end_children()

    async def _start(self, stack: AsyncExitStack) -> ASGIApp:
        """The engine, and vLLM's application around it."""
        model = await asyncio.to_thread(_with_path, self._model)
        context = ray.get_runtime_context()
        plan = plan_of(model, ray_address=context.gcs_address, node_id=context.get_node_id())
        os.environ.update(plan.environment(os.environ, is_cpu_build=vllm_command.is_cpu_build()))
        os.environ[REPLICA_VARIABLE] = str(os.getpid())
        _, *flags = plan.vllm_args(context.gcs_address)
        if model.raykv is None:
            flags = [plan.model, *plan.flags]
        from raykv.serve.vllm_app import key_digests, start

        self._keys = key_digests(flags)
        self._engine, app = await start(flags, stack)
        return app

    async def _still_there(self) -> None:
        """Return if the engine lives. Else the process ends here, and the caller sees it gone."""
        if self._engine.errored and self._watch is not None:
            await self._watch

    async def _end_with_engine(self) -> None:
        """The process ends with its engine: nothing else takes a replica out of rotation at once.

        Serve's health checks take three periods, and meanwhile a dead replica answers fastest.
        """
        while not self._engine.errored:
            await asyncio.sleep(deadlines.LOOK_S)
        logger.error("the engine of this replica has died: the replica ends, Serve starts another")
        end_children()
        os._exit(1)


def _with_path(model: ModelArguments) -> ModelArguments:
    """The model by its path on this node; the small one is made first if it is not there.

    Raises:
        SettingError: there is no such model.
    """
    found = find_model(model.model, logger.info)
    if not found.names:
        return model
    ours = {"served_model_name": list(found.names), "enforce_eager": True}
    engine_args = {**ours, **model.engine_args}
    return model.model_copy(update={"model": found.path, "engine_args": engine_args})
