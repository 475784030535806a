"""The commands `export` and `import`: chunks out of a cluster into files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

import raykv
from raykv.base.parsing import parse_size
from raykv.cli.base import Address, AsJson, ExitCode, app, print_json, say
from raykv.cli.operate import Timeout, all_keys, counting, read_keys
from raykv.memory.room import human_bytes

Namespace = Annotated[str, typer.Option(help="Namespace of the chunks; its first digits suffice.")]


@app.command("export")
def export_chunks(
    path: Annotated[Path, typer.Argument(help="A new folder, or one new .safetensors file.")],
    keys: Annotated[
        list[str] | None, typer.Argument(help="As for `raykv pin`. Default: all chunks.")
    ] = None,
    *,
    pin_id: Annotated[str, typer.Option("--pin", help="The chunks of this pin.")] = "",
    hottest: Annotated[
        str, typer.Option(help='At most this many bytes, the most used chunks first: "8GiB".')
    ] = "",
    namespace: Namespace = "",
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Write chunks to safetensors files that another cluster can import.

    Exit code 1 if some of them were no longer in any pool or on any disk.

    Example: raykv export ./system-prompt.safetensors text:@system-prompt.txt
    """
    from raykv.client.ship import refuse_used

    refuse_used(path)
    given = read_keys(keys or ())
    most_bytes = parse_size("--hottest", hottest) if hottest else None
    with raykv.connect(ray_address) as cluster:
        found = cluster.export_chunks(
            path,
            keys=all_keys(cluster, given, namespace) if keys else None,
            pin_id=pin_id,
            namespace=namespace,
            most_bytes=most_bytes,
        )
    if as_json:
        print_json(found)
    else:
        say(
            f"{found.chunks:,} of {found.asked:,} chunks ({human_bytes(found.num_bytes)}) are in "
            f"{found.files:,} files: {found.path}"
        )
    is_all = hottest or found.chunks >= found.asked
    raise typer.Exit(ExitCode.OK if is_all else ExitCode.NOT_WELL)


@app.command("import")
def import_chunks(
    path: Annotated[Path, typer.Argument(help="The folder or file that `raykv export` wrote.")],
    *,
    to: Annotated[
        str, typer.Option("--to", help="A node's Ray id. Default: the node with the most room.")
    ] = "",
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    ray_address: Address = None,
) -> None:
    """Bring exported chunks into a node's pool; if it has no room for all, the first ones.

    RayKV refuses chunks that no engine here can use. Exit code 1 if some of them did not come.

    Example: raykv import ./system-prompt.safetensors
    """
    from raykv.client.ship import files_at

    files_at(path)
    with raykv.connect(ray_address) as cluster, counting("import") as watch:
        found = cluster.import_chunks(path, to, deadline_s=timeout, watch=watch)
    if as_json:
        print_json({**msgspec.to_builtins(found), "failed": found.failed})
    else:
        say(
            f"{found.came:,} of {found.asked:,} chunks came ({human_bytes(found.num_bytes)} in "
            f"{found.seconds:.1f} s), {found.there:,} were there, {found.failed:,} did not come"
        )
        for reason, count in sorted(found.refusals.items()):
            say(f"{count:,}: {reason}", "red")
        if found.no_room:
            say(
                f"there was no room for {found.no_room:,}: the pool can give up no more, so "
                "only the first chunks of the files came",
                "red",
            )
    raise typer.Exit(ExitCode.NOT_WELL if found.failed else ExitCode.OK)
