"""Commands about settings: plan, which says what they mean for a model, and settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

import raykv
from raykv.base.errors import ClusterError, SettingError
from raykv.base.settings import load_settings, variables_of
from raykv.cli.base import (
    Address,
    AsJson,
    ExitCode,
    ago,
    answer,
    bars,
    console,
    counted,
    pairs,
    print_json,
    say,
    table,
    table_of,
)
from raykv.memory.room import human_bytes

_GIB = 1 << 30
_SHORT_S = 600.0
"""Seconds of requests that say little about an hour."""

if TYPE_CHECKING:
    from rich.table import Table

    from raykv.client.capacity import GroupShape, Plan
    from raykv.protocol.status import MoreRoom


def plan(
    model: Annotated[str | None, typer.Argument(help="As for `raykv serve`.")] = None,
    *,
    live: Annotated[
        bool,
        typer.Option("--live", help="Say what more room would save in the running cluster."),
    ] = False,
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
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Length of a prompt, to say what is stored of it; repeatable.", min=1),
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Say how large a model's KV cache is, what pools hold of it, and whether settings fit.

    RAYKV_ variables count as settings. It starts nothing and needs no cluster. Exit code 1 if
    the settings don't fit. With --live and no model it asks the running cluster what larger pools
    would have saved in the last hour.

    Example: raykv plan Qwen/Qwen3-8B --set pool_bytes=64GiB --engine block_size=16
    """
    if live == (model is not None):
        raise SettingError("give either a model, or --live for the running cluster")
    if model is None:
        _live(address, as_json=as_json)
        return
    from raykv.serve.plan import PROMPTS
    from raykv.serve.plan import plan as make_plan

    given = pairs("--set", settings or []), pairs("--engine", engine or [])
    with bars(as_json=as_json) as show:
        show({"asking vLLM how it would plan the KV cache": (0, 0)})
        found = make_plan(model, *given, tokens or PROMPTS)
    answer(found, _print, as_json=as_json)
    raise typer.Exit(ExitCode.NOT_WELL if found.problems else ExitCode.OK)


class Setting(NamedTuple):
    """A setting in force, and where its value comes from."""

    name: str
    value: object
    source: str


def settings(
    *,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of RayKV, like pool_bytes=32GiB; repeatable."),
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Show each setting as a process here has it, and where it comes from.

    That is --set, else a RAYKV_ variable, else the default. pool_bytes, disk_path and disk_bytes
    are those of this host's NodeActor, if it runs; its other settings are those of whoever started
    it.

    Example: raykv settings --set pool_bytes=32GiB
    """
    chosen = pairs("--set", given or [])
    # Unknown names and invalid values are refused before a cluster is looked for.
    known = load_settings(chosen)
    node, settled = _settled(address)
    sources = {**variables_of(os.environ), **dict.fromkeys(chosen, "--set")}
    found = []
    for name in (each.name for each in fields(known)):
        value, source = getattr(known, name), sources.get(name, "default")
        if name in settled:
            is_other = source != "default" and value != settled[name]
            value, source = settled[name], f"{node}, not {source}" if is_other else node
        found.append(Setting(name, value, source))
    answer([each._asdict() for each in found], lambda _: _print_settings(found), as_json=as_json)


def _settled(address: str | None) -> tuple[str, dict[str, object]]:
    """Ask this host's NodeActor what it has settled; returns its node too, or nothing."""
    from raykv.cluster.join import find_cluster, resolve_node_id

    try:
        if find_cluster(address) is None:
            return "", {}
        with raykv.connect(address) as cluster:
            here = resolve_node_id("")
            nodes = [node for node in cluster.status().nodes if node.node_id == here]
    except ClusterError as error:
        if address is not None:
            raise
        typer.echo(f"raykv: not asked for what this host's node has settled: {error}", err=True)
        return "", {}
    settled: dict[str, object] = {}
    for node in nodes:
        settled = {"pool_bytes": node.pool_bytes, "disk_path": node.disk.path}
        if node.disk.path:
            settled["disk_bytes"] = node.disk.most_bytes
    return f"node {here[:12]}", settled


def _print_settings(found: Sequence[Setting]) -> None:
    def value(each: Setting) -> str:
        if isinstance(each.value, int) and each.name.endswith("_bytes"):
            return human_bytes(each.value)
        if isinstance(each.value, bool):
            return str(each.value).lower()
        return "-" if each.value in (None, "") else str(each.value)

    columns = {"setting": lambda each: each.name, "value": value, "from": lambda each: each.source}
    console().print(table_of(found, columns))


def _live(address: str | None, *, as_json: bool) -> None:
    with raykv.connect(address) as cluster:
        found = cluster.more_room()
    if as_json:
        rates = [found.per_hour(tokens) for tokens in found.saved_tokens]
        print_json({**msgspec.structs.asdict(found), "saved_tokens_per_hour": rates})
    else:
        _print_live(found)


def _print_live(found: MoreRoom) -> None:
    each = found.pool_bytes // max(1, found.nodes)
    say(
        f"{counted(found.nodes, 'pool')} of {human_bytes(each)} on average; requests "
        f"that have ended in the last {ago(found.window_s)} had {found.prompt_tokens:,} prompt "
        f"tokens, of which {found.computed_tokens:,} were computed"
    )
    rows = table("more in each pool", "computed tokens saved per hour", "of those computed")
    for size, tokens in zip(found.more_bytes, found.saved_tokens, strict=True):
        is_least = found.reach_bytes is not None and size > found.reach_bytes
        rows.add_row(
            human_bytes(size),
            f"{'at least ' * is_least}{found.per_hour(tokens):,}",
            f"{tokens / max(1, found.computed_tokens):.1%}",
        )
    console().print(rows)
    one = found.saved_tokens[found.more_bytes.index(_GIB)]
    say(f"one more GiB in each pool would save {found.per_hour(one):,} computed tokens per hour")
    if found.window_s < _SHORT_S:
        say("hint: that is little to go by: ask again when the cluster has worked longer", "yellow")


def _print(found: Plan) -> None:
    shape = found.shape
    say(
        f"{shape.model}: {counted(shape.layers, 'layer')}, {shape.dtype}, prompts of up to "
        f"{shape.max_model_len:,} tokens, {counted(shape.num_ranks, 'rank')}"
    )
    console().print(_groups(shape.groups))
    say(f"a chunk     {human_bytes(shape.slot_bytes)}, of any KV group")
    if shape.num_nodes > 1:
        say(
            f"on a node   {human_bytes(shape.node_bytes)} of it at most, with ranks on "
            f"{shape.num_nodes} nodes: pool_bytes counts on each"
        )
    if found.bytes_per_token:
        say(f"a token     {human_bytes(found.bytes_per_token)} of layers that need all of a prefix")
    if found.window_bytes:
        say(f"a window    {human_bytes(found.window_bytes)} of windows and states, with a prefix")
    console().print(_prompts(found))
    console().print(_pools(found))
    for problem in found.problems:
        say(f"wrong: {problem}", "red")
    for hint in found.hints:
        say(f"hint: {hint}", "yellow")


def _groups(groups: Sequence[GroupShape]) -> Table:
    """A row for KV groups that are alike and follow each other."""
    rows = table("KV group", "kind", "layers", "a chunk", "of it KV", "a prefix needs")
    for _, alike in groupby(enumerate(groups), key=lambda pair: pair[1]):
        numbers, (group, *_) = zip(*alike, strict=True)
        window = "" if group.window_tokens is None else f" of {group.window_tokens:,} tokens"
        needs = "all" if group.window_chunks is None else f"the last {group.window_chunks:,}"
        rows.add_row(
            f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}",
            f"{group.kind}{window}",
            f"{group.layers}" if len(numbers) == 1 else f"{group.layers} each",
            f"{group.tokens_per_chunk:,} tokens",
            human_bytes(group.chunk_bytes),
            needs,
        )
    return rows


def _prompts(found: Plan) -> Table:
    """What is stored of prompts; without windows and states that is what vLLM stores too."""
    heads = ["chunks", "stored", "a token"]
    if found.window_bytes:
        heads = ["whole", "windows, states", "stored", "a token", "vLLM alone (window_share=0)"]
    rows = table("of a prompt of", *heads)
    for size in found.prompts:
        pairs = list(zip(found.shape.groups, size.chunks, strict=True))
        whole = sum(count for group, count in pairs if group.window_chunks is None)
        cells = [
            f"{whole:,} chunks",
            human_bytes(size.num_bytes),
            human_bytes(size.bytes_per_token),
        ]
        if found.window_bytes:
            cells.insert(1, f"{sum(size.chunks) - whole:,} chunks")
            cells.append(f"{human_bytes(size.default_bytes)}, {size.default_share:.0%}")
        rows.add_row(f"{size.tokens:,} tokens", *cells)
    return rows


def _pools(found: Plan) -> Table:
    lengths = [f"prompts of {size.tokens:,}" for size in found.prompts]
    rows = table("pool_bytes", "chunks", "tokens", *lengths)
    others = [size for size in found.pools if size.pool_bytes != found.pool.pool_bytes]
    for size in sorted([found.pool, *others], key=lambda size: size.pool_bytes):
        mark = " (this one)" if size is found.pool else ""
        rows.add_row(
            f"{human_bytes(size.pool_bytes)}{mark}",
            f"{size.chunks:,}",
            f"{size.tokens:,}",
            *(f"{count:,}" for count in size.prompts),
        )
    return rows
