"""Commands that look at chunks: chunk ls, show, lookup."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import raykv
from raykv.base import tenants
from raykv.base.errors import SettingError
from raykv.base.ids import short_namespace
from raykv.cli.base import (
    Address,
    AsJson,
    ExitCode,
    OnlyNamespace,
    ago,
    answer,
    answer_if_any,
    console,
    counted,
    say,
    table_of,
)
from raykv.memory.room import human_bytes
from raykv.prompts.block_hashes import PromptTraits
from raykv.protocol import descriptions, reader

if TYPE_CHECKING:
    from rich.table import Table

    from raykv.client.cluster import Cluster
    from raykv.protocol.reader import Chunk, PromptLookup
    from raykv.protocol.status import NamespaceStatus

SHOWN_DIGITS = 24
"""How many digits of a key to show: enough to distinguish the chunks of any cluster."""

Order = StrEnum("Order", {name.upper(): name for name in reader.ORDERS})  # type: ignore[misc]
Tier = StrEnum("Tier", {name.upper(): name for name in reader.TIERS})  # type: ignore[misc]


def ls(  # noqa: PLR0913 - a command's options
    *,
    namespace: OnlyNamespace = "",
    node: Annotated[
        str | None, typer.Option(help="Only on this node; its first digits suffice.")
    ] = None,
    group: Annotated[int | None, typer.Option(help="Only this KV group.", min=0)] = None,
    limit: Annotated[int, typer.Option(help="List at most this many chunks.", min=1)] = 50,
    sort: Annotated[
        Order | None, typer.Option(help="Sort by this, the largest first.", show_choices=True)
    ] = None,
    tier: Annotated[
        Tier | None, typer.Option(help="Only in pools (ram), or on disks (disk).")
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """List chunks: where they are, how old, when last used, how often.

    Of a chunk on a disk neither its age nor its reads are known.

    Exit code 1 if there are no such chunks.

    Example: raykv chunk ls --namespace 5f0c --sort hits --limit 20
    """
    with raykv.connect(address) as cluster:
        found = list(
            cluster.chunks(
                namespace=namespace,
                node=node,
                group=group,
                order=sort or "",
                limit=limit,
                tier=tier or "",
            )
        )

    def show(found: Sequence[Chunk]) -> None:
        console().print(_chunk_table(found))
        if len(found) == limit:
            say(f"only the first {limit} chunks are listed; raise --limit for more", "dim")

    answer_if_any(found, show, "no chunks", as_json=as_json)


def _chunk_table(chunks: Sequence[Chunk]) -> Table:
    has_tenants = any(chunk.tenant not in ("", tenants.OTHERS) for chunk in chunks)

    def in_pool(chunk: Chunk, known: str) -> str:
        return "" if chunk.tier == reader.DISK else known

    return table_of(
        chunks,
        {
            "key": lambda chunk: chunk.key.hex()[:SHOWN_DIGITS],
            "group": lambda chunk: str(chunk.group),
            "namespace": lambda chunk: short_namespace(chunk.namespace),
            "node": lambda chunk: chunk.node_id[:12],
            "tenant": (lambda chunk: chunk.tenant) if has_tenants else None,
            "tier": lambda chunk: chunk.tier,
            "size": lambda chunk: human_bytes(chunk.num_bytes),
            "age": lambda chunk: in_pool(chunk, ago(chunk.age_s)),
            "unused for": lambda chunk: in_pool(chunk, ago(chunk.idle_s)),
            "hits": lambda chunk: in_pool(chunk, f"{chunk.hits:,}"),
            "copies": lambda chunk: "more" if chunk.is_replicated else "1",
        },
    )


def show(
    key: Annotated[str, typer.Argument(help="The hexadecimal digits of a key, or the first few.")],
    *,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Show a chunk: what it is, and each node that has it, in its pool or on its disk.

    Exit code 1 if no node has it.

    Example: raykv chunk show 9d01c7a4
    """
    from raykv.client.listing import whole_bytes

    whole_bytes(key)
    with raykv.connect(address) as cluster:
        found = cluster.chunk(key)
        spaces = {each.namespace: each for each in cluster.status().spaces} if found else {}
    nothing = f"no node has a chunk whose key begins with {key}"
    answer_if_any(found, partial(_print_chunk, spaces), nothing, as_json=as_json)


def _print_chunk(spaces: Mapping[str, NamespaceStatus], copies: list[Chunk]) -> None:
    first = copies[0]
    space = spaces.get(first.namespace)
    say(f"key         {first.key.hex()}")
    say(f"block hash  {first.block_hash.hex()}")
    say(f"KV group    {group_text(first.group, {} if space is None else space.traits)}")
    for chunk in copies:
        where = "on its disk"
        if chunk.tier != reader.DISK:
            where = (
                f"in its pool, came {ago(chunk.age_s)} ago, unused for {ago(chunk.idle_s)}, "
                f"{counted(chunk.hits, 'hit')}"
            )
        say(
            f"node {chunk.node_id}: {human_bytes(chunk.num_bytes)} {where}, namespace "
            f"{chunk.namespace} ({chunk.model or 'model unknown'})"
            + (f", of tenant {chunk.tenant}" if chunk.tenant not in ("", tenants.OTHERS) else "")
        )


def group_text(group: int, traits: Mapping[str, str]) -> str:
    """A KV group and what it is, as far as the engines of its namespace have told."""
    told = traits.get("chunks", "")
    for each in descriptions.parse_groups(told) if told else []:
        if each.group == group:
            needed = "all" if each.window is None else f"the last {each.window:,}"
            if str(group) in traits.get("state_groups", "").split():
                needed = "the last, a recurrent state"
            return f"{group}, chunks of {each.tokens:,} tokens: a prefix needs {needed}"
    return str(group)


class Form(StrEnum):
    """How a prompt is given."""

    TEXT = "text"
    TOKENS = "tokens"
    CHAT = "chat"


def lookup(
    prompt: Annotated[
        str, typer.Argument(help='The prompt; "@FILE" reads a file; "-" reads standard input.')
    ],
    *,
    form: Annotated[
        Form,
        typer.Option(
            help="text, as for /v1/completions; tokens, as 1,2,3 or a JSON list; or chat: JSON "
            "with messages, as for /v1/chat/completions."
        ),
    ] = Form.TEXT,
    model: Annotated[
        str | None, typer.Option(help="The name that its engines use, or the last part of it.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Needed if the model has several; its first digits suffice.")
    ] = None,
    traits: Annotated[
        list[str] | None,
        typer.Option(
            "--trait",
            help="cache_salt=TEXT or lora=NAME=PATH, as in the request; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Say which chunks of a prompt are cached, in RAM or on disks, and how much each node could
    load.

    Exit code 1 if no part of it is cached.

    Example: raykv chunk lookup @document.txt --model SmolLM2-135M
    """
    given = read_prompt(prompt, form)
    of_request = _traits(traits or [])
    with raykv.connect(address) as cluster:
        found = cluster.lookup(**given, model=model, namespace=namespace, traits=of_request)
    answer(found, _print_lookup, as_json=as_json)
    raise typer.Exit(ExitCode.OK if found.cached_tokens else ExitCode.NOT_WELL)


def read_prompt(prompt: str, form: Form) -> dict[str, Any]:
    """The prompt as an argument of `Cluster.lookup`.

    Raises:
        SettingError: the prompt can't be read.
    """
    try:
        text = prompt
        if prompt == "-":
            text = typer.get_text_stream("stdin").read()
        elif prompt.startswith("@"):
            text = Path(prompt[1:]).read_text()
        match form:
            case Form.TEXT:
                return {"text": text}
            case Form.TOKENS:
                return {"tokens": _token_ids(text)}
            case Form.CHAT:
                read = json.loads(text)
                messages = read["messages"] if isinstance(read, dict) else read
                return {"messages": [dict(message) for message in messages]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"the prompt can't be read as {form}: {type(error).__name__}: {error}"
        ) from error


def _traits(given: Sequence[str]) -> PromptTraits:
    """Read what a prompt has besides its tokens; an unknown trait is a SettingError."""
    salt = name = path = ""
    for trait in given:
        kind, _, value = trait.partition("=")
        if kind == "cache_salt":
            salt = value
        elif kind == "lora" and "=" in value:
            name, _, path = value.partition("=")
        else:
            raise SettingError(f"--trait {trait!r}: give cache_salt=TEXT or lora=NAME=PATH")
    return PromptTraits(salt, name, path)


def _token_ids(text: str) -> list[int]:
    parts = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    return [int(part) for part in parts]


def _print_lookup(found: PromptLookup) -> None:
    say(f"namespace {found.namespace} ({found.model})")
    in_ram = found.cached_tokens - found.disk_tokens
    tiers = f": {in_ram:,} from RAM, {found.disk_tokens:,} from disk" if found.disk_tokens else ""
    say(f"{found.cached_tokens:,} of {found.prompt_tokens:,} tokens can be loaded{tiers}")
    if not found.nodes:
        return
    nodes = table_of(
        found.nodes,
        {
            "node": lambda node: node.node_id[:12],
            "tokens from the beginning": lambda node: f"{node.tokens:,}",
            "chunks": lambda node: f"{node.chunks:,}",
            "with its disk": lambda node: f"{node.tokens_with_disk:,}",
            "chunks on disk": lambda node: f"{node.disk_chunks:,}",
        },
    )
    console().print(nodes)
    told = [each for each in found.chunks if each.is_needed or each.nodes or each.disks]
    chunks = table_of(
        told,
        {
            "tokens": lambda chunk: f"{chunk.first_token:,} to {chunk.end_token - 1:,}",
            "group": lambda chunk: str(chunk.group),
            "key": lambda chunk: chunk.key.hex()[:SHOWN_DIGITS],
            "nodes": lambda chunk: ", ".join(node[:12] for node in chunk.nodes) or "-",
            "disks": lambda chunk: ", ".join(node[:12] for node in chunk.disks) or "-",
        },
    )
    console().print(chunks)
    if len(told) < len(found.chunks):
        left_out = len(found.chunks) - len(told)
        say(f"{left_out:,} chunks of windows and states are nowhere, and not needed", "dim")


# Keys that are given to other commands

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...",
        help="Keys of chunks in hexadecimal, a prefix's first chunks first; @FILE reads them from "
        "a file, split by white space; - from standard input. Or a prompt, as for `raykv chunk "
        "lookup`: text:PROMPT, text:@FILE, tokens:1,2,3 or chat:@FILE.",
    ),
]


def read_keys(arguments: Sequence[str]) -> list[bytes | dict[str, Any]]:
    """The keys that were given, and prompts as arguments of `Cluster.lookup`.

    Raises:
        SettingError: a key is invalid; or a file, or a prompt, can't be read.
    """
    from raykv.client.pins import raw_keys

    given: list[bytes | dict[str, Any]] = []
    for argument in arguments:
        form, colon, prompt = argument.partition(":")
        if argument == "-":
            given += raw_keys(sys.stdin.read().split())
        elif argument.startswith("@"):
            try:
                given += raw_keys(Path(argument[1:]).read_text().split())
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(f"the keys in {argument[1:]} can't be read: {error}") from error
        elif colon and form in set(Form):
            given.append(read_prompt(prompt, Form(form)))
        else:
            given += raw_keys([argument])
    return given


def all_keys(
    cluster: Cluster, given: Sequence[bytes | dict[str, Any]], namespace: str
) -> list[bytes | str]:
    """The keys among what was given, and the keys of the prompts.

    Raises:
        ClusterError: as for `Cluster.lookup`.
    """
    keys: list[bytes | str] = []
    for each in given:
        if isinstance(each, bytes):
            keys.append(each)
        else:
            keys += cluster.lookup(**each, namespace=namespace or None).keys
    return keys
