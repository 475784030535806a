"""The command `plan`: sizes for a model before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from raykv.base.errors import SettingError
from raykv.cli.base import AsJson, ExitCode, app, console, print_json, say, table
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from raykv.client.capacity import Plan


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Its folder, or its name.")],
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of RayKV, like pool_bytes=32GiB; repeatable."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="An argument of vLLM's engine, like tensor_parallel_size=2; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how large a model's KV cache is, what pools hold of it, and whether settings fit.

    RAYKV_ variables count as settings. It starts nothing and needs no cluster. Exit code 1 if
    the settings don't fit.

    Example: raykv plan Qwen/Qwen3-8B --set pool_bytes=64GiB --engine block_size=16
    """
    from raykv.client.plan import plan as make_plan

    found = make_plan(model, _pairs("--set", settings or []), _pairs("--engine", engine or []))
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(ExitCode.NOT_WELL if found.problems else ExitCode.OK)


def _pairs(option: str, given: Sequence[str]) -> dict[str, str | int | bool]:
    """Split each NAME=VALUE; anything else is a SettingError."""
    found: dict[str, str | int | bool] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SettingError(f"{option} {each!r}: give NAME=VALUE")
        if value.lower() in ("true", "false"):
            found[name.replace("-", "_")] = value.lower() == "true"
        else:
            found[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    return found


def _print(found: Plan) -> None:
    shape = found.shape
    kind = "latent attention, " if shape.is_latent else ""
    say(
        f"{shape.model}: {shape.layers} layers, {kind}{shape.dtype}, prompts of up to "
        f"{shape.max_model_len:,} tokens, {shape.num_ranks} ranks"
    )
    say(f"a token     {human_bytes(found.bytes_per_token)}")
    say(f"a chunk     {found.tokens_per_chunk} tokens, {human_bytes(found.slot_bytes)}")
    say(
        f"lease_slots {found.lease_slots}: {human_bytes(found.lease_slots * found.slot_bytes)} "
        f"per engine and KV group at most; {found.sensible_lease_slots} would do"
    )
    pools = table("pool_bytes", "chunks", "tokens", f"prompts of {shape.max_model_len:,}")
    for size in sorted([found.pool, *found.pools], key=lambda size: size.pool_bytes):
        mark = " (this one)" if size is found.pool else ""
        pools.add_row(
            f"{human_bytes(size.pool_bytes)}{mark}",
            f"{size.chunks:,}",
            f"{size.tokens:,}",
            f"{size.longest_prompts:,}",
        )
    console().print(pools)
    for problem in found.problems:
        say(f"wrong: {problem}", "red")
    for hint in found.hints:
        say(f"hint: {hint}", "yellow")
