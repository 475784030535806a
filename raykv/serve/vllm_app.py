"""vLLM's engine and HTTP application in this process. All of vLLM's names that `serve` needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from raykv.serve.http import AsgiApp


async def start(flags: Sequence[str], stack: AsyncExitStack) -> tuple[Any, AsgiApp]:
    """Start an engine with the flags of `vllm serve`, model first.

    The engine ends with `stack`. Source: vLLM 0.32, `entrypoints/launchers/api_server/entry.py`.

    Returns:
        The engine's client, and an ASGI application with all of vLLM's routes.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    args = parse_flags(flags)
    engine = await stack.enter_async_context(build_async_engine_client(args))
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return engine, app


def parse_flags(flags: Sequence[str]) -> Any:
    """vLLM's own parse of its flags.

    Raises:
        SettingError: vLLM refuses them.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args = parser.parse_args(list(flags))
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args
