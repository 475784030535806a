"""The commands `export` and `import`: chunks out of a cluster into files, and back; and `files`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import raykv
from raykv.base.errors import SettingError
from raykv.base.parsing import parse_size
from raykv.cli.base import Address, AsJson, ExitCode, app, done, print_json, say
from raykv.cli.operate import Timeout, all_keys, counting, read_keys, report
from raykv.memory.room import human_bytes

PATTERNS = ("grafana/*.json", "prometheus/*.yml", "serve/*.yaml")
"""Of the files of `deploy/` that `raykv files` writes."""

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
    sentence = (
        f"{found.chunks:,} of {found.asked:,} chunks ({human_bytes(found.num_bytes)}) are in "
        f"{found.files:,} files: {found.path}"
    )
    done(found, sentence, as_json=as_json)
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
    report(found, as_json=as_json, which=", so only the first chunks of the files came")


@app.command()
def files(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    *,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are there and differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write what runs and watches RayKV: files for Ray Serve, alert rules, Grafana's dashboard.

    It needs no cluster. If a file is there and differs, nothing is written without --overwrite.

    Example: raykv files ./raykv-files && serve run ./raykv-files/serve/cpu-trial.yaml
    """
    ours = _own_files()
    try:
        theirs = {name: (folder / name).read_bytes() for name in ours if (folder / name).exists()}
        changed = [name for name, text in theirs.items() if text != ours[name]]
        if changed and not overwrite:
            raise SettingError(
                f"{folder} has {', '.join(changed)} already, and different: name another folder, "
                "or add --overwrite"
            )
        written = [name for name in ours if name in changed or name not in theirs]
        for name in written:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(ours[name])
    except OSError as error:
        raise SettingError(
            f"{error.filename or folder} can't be written ({error.strerror}): name another folder"
        ) from error
    unchanged = [name for name in ours if name not in written]
    if as_json:
        print_json({"folder": str(folder), "written": written, "unchanged": unchanged})
        return
    same = f"; {len(unchanged)} were there" if unchanged else ""
    say(f"wrote {len(written)} files under {folder}{same}")
    for name in written:
        say(f"  {name}")


def _own_files() -> dict[str, bytes]:
    """By their place; a wheel has them in the package, a clone beside it."""
    package = Path(raykv.__file__).parent
    for root in (package / "files", package.parent / "deploy"):
        found = sorted(path for pattern in PATTERNS for path in root.glob(pattern))
        if found:
            return {str(path.relative_to(root)): path.read_bytes() for path in found}
    raise SettingError(f"there are no files beside {package}: install RayKV from its wheel")
