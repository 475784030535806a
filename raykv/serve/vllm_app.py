"""vLLM's engine and HTTP application in this process. All of vLLM's names that `serve` needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import ASGIApp

from raykv.base.errors import SettingError
from raykv.vllm.internals.engine import serve_flags
from raykv.vllm.internals.names import known_vllm
from raykv.vllm.internals.replay import continue_answers


async def start(flags: Sequence[str], stack: AsyncExitStack) -> tuple[Any, ASGIApp]:
    """Start an engine with the flags of `vllm serve`, model first.

    The engine ends with `stack`. Its metrics go to vLLM's `/metrics` and to Ray's, as `ray_vllm_*`.
    Source: vLLM 0.32, `entrypoints/launchers/api_server/entry.py`.

    Returns:
        The engine's client, and an ASGI application with all of vLLM's routes.

    Raises:
        SettingError: vLLM refuses the flags.
        VersionError: RayKV does not know this vLLM.
    """
    with known_vllm():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import PrometheusStatLogger
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    args = parse_flags(flags)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    serve_flags().propagate_flash_late_interaction(args, engine_args)
    usage = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=usage)
    # In this order: the second one would take the connector's metrics from an earlier one.
    loggers = [RayPrometheusStatLogger, PrometheusStatLogger]
    engine = AsyncLLM.from_vllm_config(
        config,
        usage_context=usage,
        stat_loggers=[] if engine_args.disable_log_stats else loggers,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )
    stack.callback(engine.shutdown, timeout=config.shutdown_timeout)
    continue_answers(engine)
    await engine.reset_mm_cache()
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return engine, app


def key_digests(flags: Sequence[str]) -> list[bytes]:
    """Digests (SHA-256) of the API keys that vLLM takes with such flags; none: it needs no key.

    Source: vLLM 0.32, `entrypoints/serve/middleware/register.py`.
    """
    keys = parse_flags(flags).api_key or [os.environ.get("VLLM_API_KEY", "")]
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]


@known_vllm()
def parse_flags(flags: Sequence[str]) -> Any:
    """vLLM's own parse of its flags.

    Raises:
        SettingError: the parser refuses them; what vLLM finds wrong later are its own errors.
        VersionError: RayKV does not know this vLLM.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """Raises where vLLM's command would print and end the process."""

        def error(self, message: str) -> Any:
            raise SettingError(f"engine_args: vLLM refuses them: {message}")

    vllm = serve_flags()
    parser = vllm.make_arg_parser(Parser(prog="vllm serve"))
    args = parser.parse_args(list(flags))
    if args.model_tag is not None:
        args.model = args.model_tag
    vllm.validate_parsed_serve_args(args)
    return args
