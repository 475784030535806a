"""Commands that move chunks: prefetch, move, export, import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import raykv
from raykv.base import deadlines
from raykv.base.parsing import parse_size
from raykv.cli.base import (
    Address,
    AsJson,
    ExitCode,
    Namespace,
    Timeout,
    bars,
    counted,
    done,
    print_json,
    say,
)
from raykv.cli.chunks import Keys, all_keys, read_keys
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from raykv.protocol.operator import TransferResult

To = Annotated[str, typer.Option("--to", help="The node's Ray id, or the beginning of it.")]


def prefetch(
    keys: Keys,
    *,
    to: To,
    namespace: Namespace = "",
    timeout: Timeout = deadlines.TRANSFER_S,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Bring chunks to a node's RAM before a request needs them, from other pools or from disks.

    Exit code 1 if some of them are not there at the end.

    Example: raykv prefetch text:@system-prompt.txt --to 3f9a
    """
    given = read_keys(keys)
    with raykv.connect(address) as cluster, counting("prefetch", as_json=as_json) as watch:
        wanted = all_keys(cluster, given, namespace)
        found = cluster.prefetch(wanted, to, namespace=namespace, deadline_s=timeout, watch=watch)
    report(found, as_json=as_json)


def move(
    keys: Keys,
    *,
    to: To,
    namespace: Namespace = "",
    timeout: Timeout = deadlines.TRANSFER_S,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Bring chunks to a node's RAM, then give up those that other nodes have in theirs.

    Exit code 1 if some of them are not there at the end; those stay where they are.

    Example: raykv move @session.keys --to 3f9a
    """
    given = read_keys(keys)
    with raykv.connect(address) as cluster, counting("move", as_json=as_json) as watch:
        wanted = all_keys(cluster, given, namespace)
        found = cluster.move(wanted, to, namespace=namespace, deadline_s=timeout, watch=watch)
    report(found, as_json=as_json)


@contextmanager
def counting(what: str, *, as_json: bool) -> Iterator[Callable[[TransferResult], None]]:
    """A bar on a terminal, in chunks."""
    with bars(as_json=as_json) as show:
        show({what: (0, 0)})

        def watch(so_far: TransferResult) -> None:
            looked_at = so_far.came + so_far.there + so_far.nowhere + so_far.no_room
            show({what: (looked_at + sum(so_far.refusals.values()), so_far.asked)})

        yield watch


def report(found: TransferResult, *, as_json: bool, which: str = "") -> None:
    """What became of a transfer; ends the command, with exit code 1 if not all chunks are there.

    `which` says, behind a comma, which chunks came if there was no room for all.
    """
    if as_json:
        print_json({**msgspec.to_builtins(found), "failed": found.failed})
    else:
        _print_transfer(found, which)
    raise typer.Exit(found.failed > 0)


def _print_transfer(found: TransferResult, which: str) -> None:
    """The sums in a line, then a line for each reason why chunks did not come."""
    speed = f"{human_bytes(found.num_bytes)} in {found.seconds:.1f} s"
    parts = [
        f"{found.came:,} of {found.asked:,} chunks came ({speed})",
        f"{found.there:,} were there already",
        f"{found.failed:,} did not come",
    ]
    if found.dropped:
        parts.append(f"{found.dropped:,} copies were given up elsewhere")
    if found.kept:
        parts.append(f"{found.kept:,} copies stay, because they are pinned there")
    say(", ".join(parts))
    if found.nowhere:
        say(f"{found.nowhere:,} are stored nowhere", "red")
    for reason, count in sorted(found.refusals.items()):
        say(f"{count:,} failed: {reason}", "red")
    if found.no_room:
        say(f"there was no room for {found.no_room:,}: the pool can evict no more{which}", "red")


def export_chunks(
    path: Annotated[Path, typer.Argument(help="A new folder, or one new .safetensors file.")],
    keys: Annotated[
        list[str] | None, typer.Argument(help="As for `raykv pin add`. Default: all chunks.")
    ] = None,
    *,
    pin_id: Annotated[str, typer.Option("--pin", help="The chunks of this pin.")] = "",
    hottest: Annotated[
        str, typer.Option(help='At most this many bytes, the most used chunks first: "8GiB".')
    ] = "",
    namespace: Namespace = "",
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Write chunks to safetensors files that another cluster can import.

    Exit code 1 if some of them were no longer in any pool or on any disk.

    Example: raykv export ./system-prompt.safetensors text:@system-prompt.txt
    """
    from raykv.client.ship import refuse_used

    refuse_used(path)
    given = read_keys(keys or ())
    most_bytes = parse_size("--hottest", hottest) if hottest else None
    with raykv.connect(address) as cluster, bars(as_json=as_json) as show:
        show({"export": (0, 0)})
        found = cluster.export_chunks(
            path,
            keys=all_keys(cluster, given, namespace) if keys else None,
            pin_id=pin_id,
            namespace=namespace,
            most_bytes=most_bytes,
            watch=lambda num_read, asked: show({"export": (num_read, asked)}),
        )
    sentence = (
        f"{found.chunks:,} of {found.asked:,} chunks ({human_bytes(found.num_bytes)}) are in "
        f"{counted(found.files, 'file')}: {found.path}"
    )
    done(found, sentence, as_json=as_json)
    is_all = hottest or found.chunks >= found.asked
    raise typer.Exit(ExitCode.OK if is_all else ExitCode.NOT_WELL)


def import_chunks(
    path: Annotated[Path, typer.Argument(help="The folder or file that `raykv export` wrote.")],
    *,
    to: Annotated[
        str, typer.Option("--to", help="A node's Ray id. Default: the node with the most room.")
    ] = "",
    timeout: Timeout = deadlines.BULK_S,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Bring exported chunks into a node's pool; if it has no room for all, the first ones.

    RayKV refuses chunks that no engine here can use. Exit code 1 if some of them did not come.

    Example: raykv import ./system-prompt.safetensors
    """
    from raykv.client.ship import files_at

    files_at(path)
    with raykv.connect(address) as cluster, counting("import", as_json=as_json) as watch:
        found = cluster.import_chunks(path, to, deadline_s=timeout, watch=watch)
    report(found, as_json=as_json, which=", so only the first chunks of the files came")
