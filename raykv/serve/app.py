"""Applications of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from raykv.serve.arguments import AppArguments, ModelArguments, parse
from raykv.serve.ingress import IngressReplica
from raykv.serve.replica import EngineReplica
from raykv.serve.route_settings import kv_router_kwargs

_POLICIES = {
    "round_robin": "raykv.serve.routing:RoundRobinRouter",
    "prefix": "raykv.serve.prefix_router:PrefixRouter",
    "kv": "raykv.serve.kv_router:KVRouter",
}
"""Names of request routers; any other is an import path."""

REPLICA_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 256,
    # A replica ends by itself when its engine dies; this finds one that hangs.
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_timeout_s": 30.0,
}
"""Of a model's deployment, where the arguments do not say otherwise."""

INGRESS_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 4096,
    "ray_actor_options": {"num_cpus": 0},
}


def build_app(args: Mapping[str, Any]) -> Application:
    """See `raykv.serve.build_app`."""
    arguments = parse(AppArguments, args)
    ingress = arguments.ingress
    handles = [engine_deployment(model) for model in arguments.models]
    deployment = serve.deployment(serve.ingress()(IngressReplica)).options(
        **{"name": "ingress", **INGRESS_OPTIONS, **ingress.deployment}
    )
    names = [model.served_names for model in arguments.models]
    return deployment.bind(handles, names, ingress.max_body_bytes, ingress.attempts)


def engine_deployment(
    model: ModelArguments, settings: Mapping[str, str] | None = None
) -> Application:
    """Replicas of one model, to bind to an ingress.

    `settings` are RayKV's that the application decides.
    """
    options = {**REPLICA_OPTIONS, "name": model.deployment_name, **model.deployment}
    router = router_config(model)
    if router is not None:
        options["request_router_config"] = router
    return (
        serve.deployment(EngineReplica)
        .options(**options)
        .bind(model.model_dump(), dict(settings or {}))
    )


def router_config(model: ModelArguments) -> Any:
    """Serve's configuration of a model's request router; None is Serve's own choice."""
    router = model.router
    if router.policy == "power_of_two":
        return None
    from ray.serve.config import RequestRouterConfig

    path = _POLICIES.get(router.policy, router.policy)
    kwargs = kv_router_kwargs(model) if router.policy == "kv" else router.kwargs
    return RequestRouterConfig(request_router_class=path, request_router_kwargs=kwargs)
