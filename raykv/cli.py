"""The command `raykv`: a thin face of the client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import raykv
from raykv.cli_wire import app as publish_app
from raykv.errors import RayKVError

if TYPE_CHECKING:
    from raykv.status_types import ClusterStatus

app = typer.Typer(
    help="RayKV: vLLM's KV cache in the RAM of a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="The Ray cluster. Default: RAY_ADDRESS, else the one that runs on this host.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]


app.add_typer(publish_app, name="publish")


def main() -> None:
    """Run the command line; errors that RayKV expects are one sentence and exit code 2."""
    try:
        app()
    except RayKVError as error:
        _fail(str(error))


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True).print(f"raykv: {sentence}", style="red", highlight=False, soft_wrap=True)
    sys.exit(2)


@app.command()
def version() -> None:
    """Print RayKV's version."""
    typer.echo(raykv.__version__)


@app.command()
def demo(
    *,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A seeded random model; under a minute.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file too.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of questions. Default: 3, tiny 2.", min=2)
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            help="2: another Ray node on this host loads what the first has.", min=1, max=2
        ),
    ] = 1,
    pool_bytes: Annotated[
        str | None, typer.Option("--pool-bytes", help='Size of a pool, like "2GiB".')
    ] = None,
    ray_address: Address = None,
) -> None:
    """Ask a real model about long documents, with and without RayKV, and compare.

    Starts a local Ray if there is none. Exit code 1 if an answer differs.
    """
    from raykv.demo import run_demo

    code = run_demo(
        tiny=tiny,
        json_path=json_path,
        rounds=rounds or (2 if tiny else 3),
        nodes=nodes,
        ray_address=ray_address,
        pool_bytes=pool_bytes,
        console=None,
    )
    raise typer.Exit(code)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks to run. Default: all.")
    ] = None,
    *,
    list_only: Annotated[
        bool, typer.Option("--list", help="Say in a line each what there is, and end.")
    ] = False,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", help='Write the results to this file too; "-": only them, to standard output.'
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats of each measurement.", min=1)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: whether it runs, not how fast.")
    ] = False,
    trace: Annotated[
        str | None, typer.Option(help="For `policy`: requests as JSON lines with hash_ids.")
    ] = None,
) -> None:
    """Measure RayKV beside what you would use instead, and beside what the machine can do.

    Example: raykv bench lookup copy --json results.json
    """
    from raykv.bench.command import list_benchmarks, run_benchmarks
    from raykv.bench.report import Options

    if list_only:
        list_benchmarks()
        return
    options = Options(repeats=repeats, quick=quick, trace=trace)
    run_benchmarks(names or [], options, json_path)


@app.command()
def chaos(
    *,
    minutes: Annotated[float, typer.Option(help="Of load and faults.", min=0.1)] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the faults and of the load.")] = 0,
    nodes: Annotated[int, typer.Option(help="Ray nodes on this host, an engine on each.")] = 2,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Only such faults, like node-actor-killed; repeatable."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file too.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep what the engines print in this folder.")
    ] = None,
    lose_head: Annotated[
        bool | None,
        typer.Option(
            "--lose-head/--keep-head",
            help="At the end Ray's GCS dies for good, and the engines go on. Default: from 3 "
            "minutes on.",
        ),
    ] = None,
) -> None:
    """Kill and freeze parts of a cluster of its own under load, and check every answer.

    Exit code 1 if a request failed, a token was wrong, or offloading did not come back.

    Example: raykv chaos --minutes 2 --seed 7 --fault node-actor-killed --fault gcs-frozen
    """
    from rich.console import Console

    from raykv.chaos.run import ChaosOptions, kinds_named, run_chaos

    loses_head = minutes >= 3 if lose_head is None else lose_head
    options = ChaosOptions(60 * minutes, seed, nodes, kinds_named(kinds or ()), logs, loses_head)
    raise typer.Exit(run_chaos(options, Console(), json_path))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `vllm serve`.")],
    pool_bytes: Annotated[
        str | None, typer.Option("--pool-bytes", help='Size of the pool, like "8GiB".')
    ] = None,
    ray_address: Address = None,
) -> None:
    """Start vLLM's OpenAI server with RayKV; all further options go to `vllm serve`.

    Example: raykv serve Qwen/Qwen3-8B --pool-bytes 32GiB --port 8001
    """
    from raykv.serve import serve as run_server

    code = run_server(model, context.args, ray_address=ray_address, pool_bytes=pool_bytes)
    raise typer.Exit(code)


@app.command()
def status(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Show nodes, pools, namespaces and engines."""
    import msgspec

    with _connected(ray_address) as cluster:
        known = cluster.status()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(known)).decode())
        return
    _print_status(known)


def _connected(ray_address: str | None) -> raykv.Cluster:
    return raykv.connect(ray_address)


@app.command("why-miss")
def why_miss(
    request_id: Annotated[
        str, typer.Argument(help="As in the API's answer, or the beginning of it.")
    ],
    *,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Say where the prompt tokens of a request came from, and why some were not loaded.

    Example: raykv why-miss chatcmpl-9f2c
    """
    from raykv.why_miss import print_explanations, to_json

    with _connected(ray_address) as cluster:
        found = cluster.why_miss(request_id)
    if as_json:
        typer.echo(to_json(found))
        return
    print_explanations(found, Console())


def _print_status(known: object) -> None:
    from raykv.core.room import human_bytes
    from raykv.status_types import ClusterStatus

    assert isinstance(known, ClusterStatus), known
    console = Console()
    state = "PAUSED" if known.paused else "running"
    console.print(f"RayKV {known.raykv_version} at {known.address}: {state}", highlight=False)
    nodes = _table(
        "node",
        "host",
        "pool",
        "prefaulted",
        "used",
        "chunks",
        "stored",
        "loaded",
        "fetched",
        "sent",
    )
    for node in known.nodes:
        share = 100 * node.prefaulted_bytes / max(1, node.pool_bytes)
        nodes.add_row(
            node.node_id[:12],
            node.hostname,
            human_bytes(node.pool_bytes),
            f"{share:.0f} %",
            human_bytes(node.used_bytes),
            str(node.chunks),
            human_bytes(node.bytes_stored),
            human_bytes(node.bytes_loaded),
            human_bytes(node.bytes_fetched),
            human_bytes(node.bytes_sent),
        )
    console.print(nodes)
    engines = _table(
        "engine",
        "node",
        "namespace",
        "model",
        "ranks",
        "leased",
        "hits",
        "failed",
        "fetch",
        "prefill",
        "versions",
    )
    for engine in known.engines:
        engines.add_row(
            engine.engine_id[:12],
            engine.node_id[:12],
            engine.namespace[:12],
            engine.model,
            str(engine.num_ranks),
            str(engine.leased_slots),
            str(engine.counters.get("hits", 0)),
            str(engine.counters.get("loads_failed", 0)),
            _rate(engine.counters.get("fetch_bytes_per_s", 0), "B/s"),
            _rate(engine.counters.get("prefill_tokens_per_s", 0), "tokens/s"),
            engine.versions,
        )
    console.print(engines)
    _print_troubles(console, known)
    for namespace, chunks in sorted(known.namespaces.items()):
        console.print(f"namespace {namespace}: {chunks} chunks", highlight=False)


def _print_troubles(console: Console, known: ClusterStatus) -> None:
    for node in known.nodes:
        if node.quarantined:
            what = f"{node.quarantined} damaged chunks or files were set aside"
            console.print(f"node {node.node_id[:12]}: {what}", style="red")
    for node_id, refusal in sorted(known.refused.items()):
        console.print(f"node {node_id[:12]} gives no pool: {refusal}", style="red")
    _print_breakers(console, known)


def _print_breakers(console: Console, known: ClusterStatus) -> None:
    """Who does not answer whom, and how often that has happened."""
    from raykv.core.breaker import sentences

    for owner, breakers in [
        *((f"node {node.node_id[:12]}", node.breakers) for node in known.nodes),
        *((f"engine {engine.engine_id[:12]}", engine.breakers) for engine in known.engines),
    ]:
        for sentence in sentences(breakers):
            console.print(f"breaker of {owner}: {sentence}", style="red", markup=False)
        if breakers.opened:
            console.print(
                f"breakers of {owner}: opened {breakers.opened} times, {breakers.failed} calls "
                f"failed, {breakers.refused} not made",
                highlight=False,
            )


def _rate(measured: int, unit: str) -> str:
    """A rate for people; nothing while it is unknown."""
    from raykv.core.room import human_bytes

    if not measured:
        return "-"
    return f"{human_bytes(measured)}/s" if unit == "B/s" else f"{measured:,} {unit}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@app.command()
def doctor(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Check the cluster: what is wrong, and how to mend it.

    Exit code 0 when all is well (warnings are allowed), 1 when something is wrong, 2 when no
    cluster can be reached.
    """
    import msgspec

    from raykv.doctor import exit_code, print_findings

    with _connected(ray_address) as cluster:
        findings = cluster.doctor()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        print_findings(findings)
    raise typer.Exit(exit_code(findings))


@app.command()
def pause(ray_address: Address = None) -> None:
    """Switch the cache off without a restart: engines compute everything themselves."""
    with _connected(ray_address) as cluster:
        cluster.pause()
    typer.echo("paused: engines stop loading and storing within about a second")


@app.command()
def resume(ray_address: Address = None) -> None:
    """Switch the cache on again; what it holds is still there."""
    with _connected(ray_address) as cluster:
        cluster.resume()
    typer.echo("resumed")


@app.command()
def clear(
    namespace: Annotated[
        str | None, typer.Argument(help="As `raykv status` shows it. Default: all.")
    ] = None,
    ray_address: Address = None,
) -> None:
    """Empty the cache, of one model's namespace or of all."""
    with _connected(ray_address) as cluster:
        cluster.clear(namespace)
    typer.echo("cleared")


@app.command()
def down(
    *,
    with_ray: Annotated[
        bool, typer.Option("--with-ray", help="Stop the local Ray cluster as well.")
    ] = False,
    ray_address: Address = None,
) -> None:
    """End RayKV's actors and free their pools."""
    from raykv.actors.cluster import stop_started

    with _connected(ray_address) as cluster:
        count = cluster.down()
        address = cluster.address
    typer.echo(f"ended {count} actors")
    if with_ray:
        stop_started(address)
        typer.echo(f"stopped the Ray cluster at {address}")
