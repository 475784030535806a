"""The commands `demo`, `bench` and `chaos`, which the command `raykv` has as its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raykv.base.errors import SettingError


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
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster. Default: RAY_ADDRESS, else this user's one on this host."
        ),
    ] = None,
) -> None:
    """Ask a real model about long documents, with and without RayKV, and compare.

    Starts a local Ray if there is none. Exit code 1 if an answer differs.

    Example: raykv demo --tiny --nodes 2
    """
    from raykv.lab.demo import run_demo
    from raykv.lab.warden import ending_what_it_starts

    with ending_what_it_starts() as warden:
        code = run_demo(
            tiny=tiny,
            json_path=json_path,
            rounds=rounds or (2 if tiny else 3),
            nodes=nodes,
            ray_address=address,
            pool_bytes=pool_bytes,
            console=None,
            note_actors=warden.note_actors,
        )
    raise typer.Exit(code)


def bench(  # noqa: PLR0913 - a command's options
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help='Benchmarks to run; default: those that need nothing. "claims": the '
            "published numbers again, with exit code 1 if one does not hold."
        ),
    ] = None,
    *,
    list_only: Annotated[
        bool, typer.Option("--list", help="List the benchmarks, one per line.")
    ] = False,
    json_path: Annotated[
        str | None,
        typer.Option("--json", help='Also write the results to this file; "-" prints only them.'),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats of each measurement.", min=1)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes: shows that it runs, not how fast.")
    ] = False,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="For `policy` and `client`: a file of requests, JSON lines with `hash_ids` of "
            "whole prompts; for `policy`, which takes several, also with `session_id` and those "
            "of each turn."
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="For `client` and `gpu`: raykv, native or plain, for `gpu` layerwise too; "
            "repeatable. Default: all."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For `client`: as for `raykv serve`. Default: smollm2.")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="For `client` and `gpu`: keep the output of servers and engines here."),
    ] = None,
) -> None:
    """Measure RayKV beside what you would use instead, and beside what the machine can do.

    Example: raykv bench copy fetch --json results.json
    """
    from raykv.lab.bench.claims import run_claims
    from raykv.lab.bench.command import BENCHMARKS, chosen, list_benchmarks, run_benchmarks
    from raykv.lab.bench.report import Options
    from raykv.lab.warden import ending_what_it_starts

    if list_only:
        list_benchmarks(BENCHMARKS)
        return
    if (system or logs) and not {"client", "gpu"} & set(names or ()):
        raise SettingError("--system and --logs are for `raykv bench client` and `gpu`")
    if model and "client" not in (names or ()):
        raise SettingError("--model is for `raykv bench client`")
    options = Options(repeats, quick, tuple(trace or ()), tuple(system or ()), model, logs)
    with ending_what_it_starts():
        if names == ["claims"]:
            raise typer.Exit(run_claims(options, json_path))
        run_benchmarks(chosen(names or []), options, json_path)


def chaos(  # noqa: PLR0913 - a command's options
    *,
    minutes: Annotated[float, typer.Option(help="Minutes of load and faults.", min=0.1)] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the faults and of the load.")] = 0,
    nodes: Annotated[int, typer.Option(help="Ray nodes on this host, with one engine each.")] = 2,
    hosts: Annotated[
        int | None,
        typer.Option(
            help="Number of hosts, instead of nodes: namespaces of Linux, which need root. "
            "They are cut off, slowed, frozen and lose power, too."
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
