"""A replica: vLLM's engine and its own FastAPI application, in a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import ray

from raykv import vllm_command
from raykv.actors.processes import end_children
from raykv.deadlines import ENGINE_LOOK_S
from raykv.serve.arguments import ModelArguments, parse, plan_of
from raykv.serve.http import AsgiApp, Head, HttpRequest, drive

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """Serves requests of one model. A dead engine ends the replica at once; Serve makes another."""

    async def __init__(  # type: ignore[misc]
        self, model: Mapping[str, Any], settings: Mapping[str, str]
    ) -> None:
        self._model = parse(ModelArguments, model)
        self._engine: Any = None
        self._stack = AsyncExitStack()
        self._app: AsgiApp = await self._start(settings)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def handle_http(self, request: HttpRequest) -> AsyncIterator[Head | bytes]:
        """Answer a request: a head, then the body's pieces."""
        async for piece in drive(self._app, request):
            if isinstance(piece, Head) and piece.status >= 500 and self._engine.errored:
                # The caller is to see that the replica has gone, and to try another one.
                await self._watch
            yield piece

    async def check_health(self) -> None:
        """Raises if the engine is dead."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        # Serve awaits it when the replica is to end.
        self._watch.cancel()
        await self._stack.aclose()

    async def _start(self, settings: Mapping[str, str]) -> AsgiApp:
        """The engine, and vLLM's application around it."""
        context = ray.get_runtime_context()
        plan = plan_of(
            self._model, ray_address=context.gcs_address, node_id=context.get_node_id(), **settings
        )
        os.environ.update(plan.environment(os.environ, is_cpu_build=vllm_command.is_cpu_build()))
        argv = plan.vllm_args(context.gcs_address)
        if self._model.raykv is None:
            argv = ["serve", plan.model, *plan.flags]
        from raykv.serve.vllm_app import start

        self._engine, app = await start(argv[1:], self._stack)
        return app

    async def _end_with_engine(self) -> None:
        """The process ends with its engine: nothing else takes a replica out of rotation at once.

        Serve's health checks take three periods, and meanwhile a dead replica answers fastest.
        """
        while not self._engine.errored:
            await asyncio.sleep(ENGINE_LOOK_S)
        logger.error("the engine of this replica has died: the replica ends, Serve starts another")
        end_children()
        os._exit(1)
