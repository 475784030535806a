"""Commands that try RayKV and measure it: demo, bench, chaos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raykv.cli.base import Address, bars
from raykv.lab.bench.report import Options


def demo(
    *,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Use a small random model: under a minute.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of questions. Default: 3, or 2 with --tiny.", min=2)
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            help="With 2, another Ray node on this host loads what the first has.", min=1, max=2
        ),
    ] = 1,
    pool_bytes: Annotated[
        str | None, typer.Option("--pool-bytes", help='Size of a pool, like "2GiB".')
    ] = None,
    address: Address = None,
) -> None:
    """Ask a real model about long documents, with and without RayKV, and compare.

    Starts a local Ray if there is none. Exit code 1 if an answer differs.

    Example: raykv demo --tiny --nodes 2
    """
    from raykv.lab.demo.run import run_demo
    from raykv.lab.warden import ending_what_it_starts

    with ending_what_it_starts() as warden:
        code = run_demo(
            tiny=tiny,
            json_path=json_path,
            rounds=rounds or (2 if tiny else 3),
            nodes=nodes,
            ray_address=address,
            pool_bytes=pool_bytes,
            note_actors=warden.note_actors,
        )
    raise typer.Exit(code)


# bench

Json = Annotated[
    str | None,
    typer.Option("--json", help='Also write the results to this file; "-" prints only them.'),
]
Repeats = Annotated[int | None, typer.Option(help="Repeats of each measurement.", min=1)]
Quick = Annotated[
    bool, typer.Option("--quick", help="Use small sizes: shows that it runs, not how fast.")
]
Logs = Annotated[
    Path | None, typer.Option(help="Keep the output of servers and engines in this folder.")
]


def _measure(name: str, options: Options, json_path: str | None) -> None:
    from raykv.lab.bench.command import chosen, run_benchmarks
    from raykv.lab.warden import ending_what_it_starts

    with ending_what_it_starts():
        run_benchmarks(chosen([name]), options, json_path, partial(_bar, json_path))


@contextmanager
def _bar(json_path: str | None, name: str) -> Iterator[None]:
    """Say that a benchmark goes on."""
    with bars(as_json=json_path == "-") as show:
        show({f"bench {name}": (0, 0)})
        yield


def copy(*, json_path: Json = None, repeats: Repeats = None, quick: Quick = False) -> None:
    """Copy between a KV cache in RAM and the pool, compared with memcpy: GB/s.

    Example: raykv bench copy --json results.json
    """
    _measure("copy", Options(repeats, quick), json_path)


def fetch(*, json_path: Json = None, repeats: Repeats = None, quick: Quick = False) -> None:
    """Fetch from node to node, compared with a bare Ray pull: GB/s.

    Example: raykv bench fetch --json results.json
    """
    _measure("fetch", Options(repeats, quick), json_path)


def disk(*, json_path: Json = None, repeats: Repeats = None, quick: Quick = False) -> None:
    """Write to the disk tier and read from it, compared with plain files: MiB/s.

    Example: raykv bench disk --json results.json
    """
    _measure("disk", Options(repeats, quick), json_path)


def routing(*, json_path: Json = None, repeats: Repeats = None, quick: Quick = False) -> None:
    """Measure what it costs a router to place a request.

    Example: raykv bench routing
    """
    _measure("routing", Options(repeats, quick), json_path)


def policy(
    *,
    trace: Annotated[
        list[str],
        typer.Option(
            help="A file of requests, JSON lines with `hash_ids` of whole prompts, or with "
            "`session_id` and those of each turn; repeatable."
        ),
    ],
    json_path: Json = None,
    quick: Quick = False,
) -> None:
    """Compare hit rates of the pool's order of eviction, LRU and the optimum.

    Example: raykv bench policy --trace conversations.jsonl
    """
    _measure("policy", Options(quick=quick, traces=tuple(trace)), json_path)


def client(
    *,
    trace: Annotated[
        str | None,
        typer.Option(help="A file of requests, JSON lines with `hash_ids` of whole prompts."),
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(help="raykv, native or plain; repeatable. Default: all.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As for `raykv serve`. Default: smollm2.")
    ] = None,
    logs: Logs = None,
    json_path: Json = None,
    repeats: Repeats = None,
    quick: Quick = False,
) -> None:
    """Run vLLM's own client against vLLM with and without RayKV.

    Example: raykv bench client --system plain --system raykv
    """
    traces = () if trace is None else (trace,)
    options = Options(repeats, quick, traces, tuple(system or ()), model, logs)
    _measure("client", options, json_path)


def gpu(
    *,
    system: Annotated[
        list[str] | None,
        typer.Option(help="raykv, native, plain or layerwise; repeatable. Default: all."),
    ] = None,
    logs: Logs = None,
    json_path: Json = None,
    repeats: Repeats = None,
    quick: Quick = False,
) -> None:
    """Measure RayKV on a GPU, compared with vLLM alone and its native offloading.

    Example: raykv bench gpu --json results.json --logs logs
    """
    _measure("gpu", Options(repeats, quick, (), tuple(system or ()), None, logs), json_path)


def claims(*, json_path: Json = None, repeats: Repeats = None) -> None:
    """Measure some of the published numbers again.

    Exit code 1 if one does not hold.

    Example: raykv bench claims
    """
    from raykv.lab.bench.claims import run_claims
    from raykv.lab.warden import ending_what_it_starts

    with ending_what_it_starts():
        code = run_claims(Options(repeats), json_path, under_way=partial(_bar, json_path))
    raise typer.Exit(code)


def moved(context: typer.Context) -> None:
    """Say where a benchmark is that has left the command."""
    from raykv.lab.bench.command import chosen

    chosen([str(context.info_name)])


# chaos


def chaos(  # noqa: PLR0913 - a command's options
    *,
    minutes: Annotated[float, typer.Option(help="Minutes of load and faults.", min=0.1)] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the faults and of the load.")] = 0,
    nodes: Annotated[
        int, typer.Option(help="Ray nodes on this host, with one engine each.", min=2, max=3)
    ] = 2,
    hosts: Annotated[
        int | None,
        typer.Option(
            help="Number of hosts, instead of nodes: namespaces of Linux, which need root. "
            "They are cut off, slowed, frozen and lose power, too.",
            min=2,
            max=3,
        ),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Only this kind of fault, like gcs-frozen; repeatable."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the engines' output in this folder.")
    ] = None,
    lose_head: Annotated[
        bool | None,
        typer.Option(
            "--lose-head/--keep-head",
            help="At the end Ray's GCS dies for good, and the engines go on. Default: in runs "
            "of 3 minutes or more.",
        ),
    ] = None,
) -> None:
    """Start a cluster, kill and freeze parts of it under load, and check every answer.

    Exit code 1 if a request failed, a token was wrong, or offloading did not recover.

    Example: raykv chaos --minutes 2 --seed 7 --fault node-actor-killed --fault gcs-frozen
    """
    from rich.console import Console

    from raykv.lab.chaos.run import ChaosOptions, kinds_named, run_chaos
    from raykv.lab.warden import ending_what_it_starts

    loses_head = minutes >= 3 if lose_head is None else lose_head
    options = ChaosOptions(
        60 * minutes,
        seed,
        hosts or nodes,
        kinds_named(kinds or ()),
        logs,
        loses_head,
        on_hosts=hosts is not None,
    )
    with ending_what_it_starts():
        code = run_chaos(options, Console(), json_path)
    raise typer.Exit(code)
