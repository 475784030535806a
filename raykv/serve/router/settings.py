"""What the `kwargs` of the policy "kv" may say, and what its router is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from raykv.base.errors import SettingError
from raykv.serve.arguments import ModelArguments, complaints
from raykv.serve.router.rank import Weights


class RouteSettings(Weights):
    """Settings of a router; costs are in tokens to compute, see `raykv.serve.router.rank`."""

    recent_s: float = Field(default=300.0, ge=0, le=3600)
    """How long the router believes that a replica has, or computes, what was sent to it: until its
    node's pool may have given it up."""
    namespace: str = ""
    """The beginning of the replicas' namespace, should there be several of the model on a node."""


def parse_route_settings(kwargs: Mapping[str, Any]) -> RouteSettings:
    """Read a router's settings; a SettingError names what is wrong."""
    try:
        return RouteSettings.model_validate(dict(kwargs))
    except ValidationError as error:
        raise SettingError(f"kwargs of the router: {complaints(error)}") from error


def kv_router_kwargs(model: ModelArguments) -> dict[str, Any]:
    """What the router of a model is given.

    Raises:
        SettingError: its settings are wrong, or the model is served without RayKV.
    """
    if model.raykv is None:
        raise SettingError(
            f"the router of {model.deployment_name} asks RayKV's directory, but the model is "
            "served without RayKV (raykv: null): remove that, or choose the policy power_of_two"
        )
    settings = parse_route_settings(model.router.kwargs)
    return {"model": model.model_dump(mode="json"), **settings.model_dump()}
