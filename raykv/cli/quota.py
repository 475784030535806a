"""Tenants, and their shares of pools and disks: quota set, rm, ls."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import raykv
from raykv.base import errors, tenants
from raykv.cli.base import Address, AsJson, answer, console, done, done_each, table_of
from raykv.memory.room import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from raykv.protocol import operator, status


def set_quota(
    name: Annotated[
        str, typer.Argument(help='The tenant; "others" are all without a quota, together.')
    ],
    *,
    guaranteed: Annotated[
        float,
        typer.Option(help="Part of each pool and disk that others can't take from it, 0 to 0.75."),
    ] = 0.0,
    most: Annotated[
        float, typer.Option(help="Part of each pool and disk that it can take, 0 to 1.")
    ] = 1.0,
    salt_file: Annotated[
        str,
        typer.Option(
            help='File with the cache_salt of its requests, "-" for standard input. The salt does '
            "not leave this process."
        ),
    ] = "",
    tenant: Annotated[
        str, typer.Option(help="Its label, as `raykv quota ls` shows it, if that is not NAME.")
    ] = "",
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Give a tenant a share of every pool and disk, in place of the one that it had.

    What a tenant does not use of its share is lent, and comes back.

    Example: raykv quota set acme --guaranteed 0.3 --most 0.6 --salt-file acme-salt
    """
    from raykv.client.quotas import quota_of

    salt = _salt(salt_file)
    label = quota_of(name, guaranteed, most, salt, tenant).tenant
    with raykv.connect(address) as cluster:
        cluster.quotas.set(name, guaranteed=guaranteed, most=most, salt=salt, tenant=tenant)
        with contextlib.suppress(errors.ClusterError):
            # It is set, whoever answers after that.
            if warning := nobodys(label, cluster.status().engines):
                typer.echo(f"warning: {warning}", err=True)
    sentence = f"{name}: {guaranteed:.0%} of each pool guaranteed, at most {most:.0%}"
    facts = {"name": name, "guaranteed": guaranteed, "most": most}
    done(facts, sentence, as_json=as_json)


def nobodys(label: str, engines: Sequence[status.EngineStatus]) -> str:
    """Why no request can be of the tenant with that label; empty if one can, or there is none."""
    told = [each.counters for each in engines if each.counters]
    is_possible = not label or label.startswith(tenants.SALTED) or not told
    if is_possible or any(counters.get("tenants_by_server") for counters in told):
        return ""
    return (
        f"no request can be of the tenant {label!r}: all engines tell tenants by their "
        "cache_salt. Name it with --salt-file, or give engines tenant_source=server, and have "
        "your server set raykv_tenant in kv_transfer_params"
    )


def _salt(path: str) -> str:
    """The salt in a file, without the end of its line.

    Raises:
        SettingError: there is none.
    """
    if not path:
        return ""
    try:
        text = typer.get_text_stream("stdin").read() if path == "-" else Path(path).read_text()
    except (OSError, ValueError) as error:
        raise errors.SettingError(f"--salt-file {path} can't be read: {error}") from error
    if not text.rstrip("\r\n"):
        raise errors.SettingError(f"--salt-file {path} has no salt")
    return text.rstrip("\r\n")


def rm(
    names: Annotated[list[str], typer.Argument(help="As `raykv quota ls` shows them.")],
    *,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """End quotas: their tenants are among the others again.

    Example: raykv quota rm acme
    """
    with raykv.connect(address) as cluster:
        done_each(names, cluster.quotas.remove, "removed", as_json=as_json)


def ls(*, as_json: AsJson = False, address: Address = None) -> None:
    """Show tenants with a quota, and others that have chunks in pools.

    Example: raykv quota ls --json
    """
    with raykv.connect(address) as cluster:
        known = cluster.quotas.tenants()
    answer(known, lambda known: console().print(tenant_table(known)), as_json=as_json)


def tenant_table(known: list[operator.TenantStatus]) -> Table:
    """Tenants for people."""
    return table_of(
        known,
        {
            "tenant": lambda tenant: tenant.name,
            "label": lambda tenant: tenant.tenant,
            "in pools": lambda tenant: human_bytes(tenant.pool_bytes),
            "on disks": lambda tenant: human_bytes(tenant.disk_bytes) if tenant.disk_bytes else "-",
            "guaranteed": lambda tenant: f"{tenant.guaranteed:.0%}" if tenant.has_quota else "-",
            "at most": lambda tenant: f"{tenant.most:.0%}" if tenant.has_quota else "-",
        },
    )
