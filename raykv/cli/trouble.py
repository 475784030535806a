"""Commands for when something is wrong: doctor, why-miss."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from raykv.cli.base import Address, AsJson, app, connected, print_json


@app.command()
def doctor(*, as_json: AsJson = False, ray_address: Address = None) -> None:
    """Check the cluster: what is wrong, and how to mend it.

    Exit code 0 when all is well (warnings are allowed), 1 when something is wrong, 2 when no
    cluster can be reached.

    Example: raykv doctor && echo all well
    """
    from raykv.cli.doctor_text import exit_code, print_findings

    with connected(ray_address) as cluster:
        findings = cluster.doctor()
    if as_json:
        print_json(findings)
    else:
        print_findings(findings)
    raise typer.Exit(exit_code(findings))


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
    from raykv.cli.why_miss import print_explanations, to_json

    with connected(ray_address) as cluster:
        found = cluster.why_miss(request_id)
    if as_json:
        typer.echo(to_json(found))
        return
    print_explanations(found, Console())
