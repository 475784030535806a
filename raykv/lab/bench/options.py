"""The options of `raykv bench` that belong to some benchmarks only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raykv.base.errors import SettingError

if TYPE_CHECKING:
    from raykv.lab.bench.report import ClientOptions

CLIENT_OPTIONS = (
    "--workload, --system, --model, --requests, --rate, --divide, --kv-blocks, --multi-turn, "
    "--lmcache-python and --logs"
)

Trace = Annotated[
    list[str] | None,
    typer.Option(
        help="For `policy`, `windows`, `client` and `routing --simulate`: a file of requests, JSON "
        "lines with hash_ids of whole prompts, or with session_id and of what each turn adds. "
        "Repeatable for `policy`."
    ),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate", help="For `routing`: compare routers on a simulated cluster instead."
    ),
]
Replicas = Annotated[
    list[int] | None,
    typer.Option(help="Number of simulated replicas; repeatable (needs --simulate). Default: 16."),
]
Load = Annotated[
    list[float] | None,
    typer.Option(help="With --simulate: in per cent; repeatable. Default: 50, 70, 80 and 95."),
]
DelayMs = Annotated[
    list[float] | None,
    typer.Option(help="With --simulate: of the directory; repeatable. Default: 5."),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        help="For `client`: timed_trace, prefix_repetition, random or multi_turn; repeatable. "
        "Default: all whose files are given.",
    ),
]
Systems = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        help="For `client`: plain, native, lmcache or raykv; for `gpu`: raykv, native, plain or "
        "layerwise; repeatable. Default: all.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="For `client`: as for `raykv serve`. Default: smollm2.")
]
NumRequests = Annotated[
    int | None, typer.Option("--requests", help="For `client`. Default: 40.", min=1)
]
Rate = Annotated[
    float | None, typer.Option(help="For `client`: requests a second. Default: 0.5.", min=0.001)
]
Divisor = Annotated[
    int | None,
    typer.Option(
        "--divide", help="For `client`: of all lengths, for a small model. Default: 32.", min=1
    ),
]
KvBlocks = Annotated[
    int | None,
    typer.Option(
        "--kv-blocks",
        help="For `client`: of 128 tokens, in each server's KV memory. Default: 48.",
        min=1,
    ),
]
MultiTurn = Annotated[
    Path | None,
    typer.Option(
        help="For `client`: the folder benchmarks/multi_turn of vLLM's sources.", exists=True
    ),
]
LMCachePython = Annotated[
    str | None,
    typer.Option(
        "--lmcache-python",
        help="For `client`: the Python of an environment with vLLM, RayKV and LMCache. Default: "
        "this one.",
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(
        help="For `client` and `gpu`: keep what servers, clients and engines write in this folder."
    ),
]


def check_client(names: list[str] | None, client: ClientOptions) -> None:
    """Refuse options that no benchmark of these names has."""
    from raykv.lab.bench.report import ClientOptions

    allowed = ClientOptions()
    if names and "gpu" in names:
        allowed = ClientOptions(systems=client.systems, logs=client.logs)
    if client != allowed and "client" not in (names or ["client"]):
        raise SettingError(
            f"{CLIENT_OPTIONS} are for `raykv bench client`; `gpu` has --system and --logs too"
        )
