"""Commands that run engines, and write what runs them: serve, files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import raykv
from raykv.base.errors import SettingError
from raykv.cli.base import Address, AsJson, counted, print_json, say

PATTERNS = ("grafana/*.json", "prometheus/*.yml", "serve/*.yaml")
"""Of the files of `deploy/` that `raykv files` writes."""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for `vllm serve`, or smollm2.")],
    pool_bytes: Annotated[
        str | None, typer.Option("--pool-bytes", help='Size of the pool, like "8GiB".')
    ] = None,
    address: Address = None,
) -> None:
    """Start vLLM's OpenAI server with RayKV; all further options go to `vllm serve`.

    smollm2 is a small real model that needs no GPU, hub or token; requests call it so, too.

    Example: raykv serve Qwen/Qwen3-8B --pool-bytes 32GiB --port 8001
    """
    from raykv.serve.command import serve as run_server

    code = run_server(model, context.args, ray_address=address, pool_bytes=pool_bytes)
    raise typer.Exit(code)


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
    say(f"wrote {counted(len(written), 'file')} under {folder}{same}")
    for name in written:
        say(f"  {name}")


def _own_files() -> dict[str, bytes]:
    """By their place; a wheel has them in the package, a clone beside it."""
    package = Path(raykv.__file__).parent
    for root in (package / "files", package.parent / "deploy"):
        found = sorted(path for pattern in PATTERNS for path in root.glob(pattern))
        if found:
            return {str(path.relative_to(root)): path.read_bytes() for path in found}
    raise SettingError(f"the files are not next to {package}: install RayKV from its wheel")
