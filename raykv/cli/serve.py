"""Commands that run it: serve, version."""

from __future__ import annotations

from typing import Annotated

import typer

import raykv
from raykv.cli.base import Address, AsJson, app, done


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `vllm serve`, or smollm2.")],
    pool_bytes: Annotated[
        str | None, typer.Option("--pool-bytes", help='Size of the pool, like "8GiB".')
    ] = None,
    ray_address: Address = None,
) -> None:
    """Start vLLM's OpenAI server with RayKV; all further options go to `vllm serve`.

    smollm2 is a small real model that needs no GPU, hub or token; requests call it so, too.

    Example: raykv serve Qwen/Qwen3-8B --pool-bytes 32GiB --port 8001
    """
    from raykv.serve import serve as run_server

    code = run_server(model, context.args, ray_address=ray_address, pool_bytes=pool_bytes)
    raise typer.Exit(code)


@app.command()
def version(*, as_json: AsJson = False) -> None:
    """Print RayKV's version.

    Example: raykv version --json
    """
    done({"raykv": raykv.__version__}, raykv.__version__, as_json=as_json)
