"""RayKV in vLLM's `kv_transfer_config`, alone or as one of several connectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.serve.command import CONNECTOR, CONNECTORS

SEVERAL = "MultiConnector"
"""vLLM's connector that passes everything on to others."""

_EXTRA = "kv_connector_extra_config"
_POLICY = "kv_load_failure_policy"
_RECOMPUTE = "recompute"


def with_raykv(given: Any, settings: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """`given` (None: nothing was configured) with RayKV in it; what it says beats `settings`.

    The result shares nothing with the arguments, and every connector in it that is RayKV's has an
    `kv_connector_extra_config`, so that a replica can fill it in.

    Args:
        given: a model's own `kv_transfer_config`.
        settings: RayKV's settings for all models.
        whose: the model, for messages.

    Raises:
        SettingError: it asks for other connectors only, for failing requests, or for a setting that
            is unknown or impossible.
    """
    if not isinstance(given, Mapping | None):
        raise SettingError(f"{whose}: kv_transfer_config must be a mapping, not {given!r}")
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", **(given or {})}
    if transfer.setdefault(_POLICY, _RECOMPUTE) != _RECOMPUTE:
        raise SettingError(
            f"{whose}: {_POLICY} is {transfer[_POLICY]!r}, but what RayKV can't load is computed: "
            f"leave it out, or say {_RECOMPUTE!r}"
        )
    connector = transfer["kv_connector"]
    if connector in CONNECTORS:
        return {**transfer, _EXTRA: _settings(transfer, settings, whose)}
    if connector != SEVERAL:
        raise SettingError(
            f"{whose}: kv_connector is {connector!r}: name {CONNECTOR} beside it, in the "
            f"`connectors` of a {SEVERAL}; or leave it out"
        )
    extra = _mapping(transfer.get(_EXTRA), f"{whose}: {_EXTRA}")
    children = [_child(each, settings, whose) for each in extra.get("connectors") or ()]
    if not any(child.get("kv_connector") in CONNECTORS for child in children):
        raise SettingError(
            f"{whose}: none of the `connectors` of {SEVERAL} is {CONNECTOR}: add "
            f'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}'
        )
    return {**transfer, _EXTRA: {**extra, "connectors": children}}


def fill_in(transfer: dict[str, Any], ray_address: str, node_id: str) -> None:
    """Put in what only a replica knows, in place; what is there stays.

    An engine that is configured to join another cluster has to find its node there itself.
    """
    transfer[_POLICY] = _RECOMPUTE
    extra = transfer.setdefault(_EXTRA, {})
    if extra.setdefault("ray_address", ray_address) == ray_address:
        extra.setdefault("node_id", node_id)


def _child(given: Any, settings: Mapping[str, Any], whose: str) -> dict[str, Any]:
    child = _mapping(given, f"{whose}: one of the `connectors`")
    if child.get("kv_connector") not in CONNECTORS:
        return child
    return {"kv_role": "kv_both", **child, _EXTRA: _settings(child, settings, whose)}


def _settings(
    transfer: Mapping[str, Any], settings: Mapping[str, Any], whose: str
) -> dict[str, Any]:
    extra = {**settings, **_mapping(transfer.get(_EXTRA), f"{whose}: {_EXTRA}")}
    try:
        load_settings(extra)
    except SettingError as error:
        raise SettingError(f"{whose}: {error}") from error
    return extra


def _mapping(given: Any, what: str) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise SettingError(f"{what} must be a mapping, not {given!r}")
    return dict(given or {})
