"""Applications of Ray Serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from raykv.base.errors import SettingError
from raykv.cluster.ask import ask_ray
from raykv.serve.arguments import (
    AppArguments,
    IngressArguments,
    ModelArguments,
    complaints,
    parse,
    plan_of,
)
from raykv.serve.http.ingress import IngressReplica, ServedModel, served_model
from raykv.serve.replica import EngineReplica
from raykv.serve.router.settings import kv_router_kwargs
from raykv.vllm import command as vllm_command

logger = logging.getLogger("ray.serve")

_POLICIES = {
    "round_robin": "raykv.serve.router.round_robin:RoundRobinRouter",
    "prefix": "raykv.serve.router.prefix_router:PrefixRouter",
    "kv": "raykv.serve.router.kv_router:KVRouter",
}
"""Names of request routers; any other is an import path."""

_NICENESS = "RAY_worker_niceness"
"""Ray's name for it; 15 otherwise."""

REPLICA_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 256,
    # In each ingress replica, before Serve refuses; beyond what the replicas have.
    "max_queued_requests": 2048,
    # A replica ends by itself when its engine dies; this finds one that hangs.
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_timeout_s": 30.0,
}
"""Options of a model's deployment, unless its arguments say otherwise."""

INGRESS_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 4096,
    "max_queued_requests": 4096,
    "ray_actor_options": {"num_cpus": 0},
}


def build_app(args: Mapping[str, Any]) -> Application:
    arguments = parse(AppArguments, args)
    models = [(model.served_names, engine_deployment(model)) for model in arguments.models]
    return ingress_in_front(served_model, models, arguments.ingress)


def ingress_in_front(
    served: Callable[..., ServedModel], models: Sequence[Sequence[Any]], ingress: IngressArguments
) -> Application:
    """What takes an application's requests; see `IngressReplica`."""
    options = {"name": "ingress", **INGRESS_OPTIONS, **ingress.deployment}
    deployment = _with_options(serve.ingress()(IngressReplica), options, "ingress.deployment")
    return deployment.bind(served, models, ingress.model_dump())


def engine_deployment(model: ModelArguments) -> Application:
    """Replicas of one model, to bind to an ingress.

    Raises:
        SettingError: Each replica would refuse the model's arguments, or Serve does.
    """
    refuse_missing(model.model, f"arguments of the application: model of {model.deployment_name}")
    _check_engine_args(model)
    options = {**REPLICA_OPTIONS, "name": model.deployment_name, **model.deployment}
    router = router_config(model)
    if router is not None:
        options["request_router_config"] = router
    deployment = _with_options(EngineReplica, options, f"deployment of {model.deployment_name}")
    return deployment.bind(model.model_dump())


def refuse_missing(model: str, place: str) -> None:
    """Refuse a folder that is not on this node, if the Ray cluster has no other.

    Raises:
        SettingError: There is no such folder.
        ClusterError: Ray does not answer.
    """
    if not model.startswith(("/", "./", "../", "~")) or Path(model).exists():
        return
    if ray.is_initialized() and sum(node["Alive"] for node in ask_ray(ray.nodes)) == 1:
        raise SettingError(f"{place}: there is no folder {model}")


def _check_engine_args(model: ModelArguments) -> None:
    """Refuse what vLLM's parser refuses, where this process has vLLM and its parser can be made.

    Takes as long as importing vLLM, the first time.
    """
    if not vllm_command.is_installed():
        return
    from raykv.serve.vllm_app import parse_flags

    plan = plan_of(model, ray_address=None)
    place = f"engine_args of {model.deployment_name}"
    try:
        parse_flags([plan.model, *plan.flags])
    except (SettingError, TypeError, ValueError) as error:
        raise _refused(place, str(error).removeprefix("engine_args: ")) from error
    except Exception:
        # vLLM's build for GPUs may need one to make its parser: the replicas have it.
        logger.debug("%s are checked by the replicas", place, exc_info=True)


def _with_options(replica: type, options: Mapping[str, Any], place: str) -> serve.Deployment:
    """A Serve deployment of `replica`.

    Raises:
        SettingError: Serve does not know one of the options, or its value is invalid.
    """
    options = {**options, "ray_actor_options": _hurried(options.get("ray_actor_options"))}
    autoscaling = options.get("autoscaling_config")
    if isinstance(autoscaling, Mapping):
        # Serve itself ignores keys that it does not know there.
        unknown = sorted(set(autoscaling) - set(AutoscalingConfig.model_fields))
        if unknown:
            raise _refused(place, f"autoscaling_config has no {', '.join(map(repr, unknown))}")
    try:
        return serve.deployment(replica).options(**options)
    except ValidationError as error:
        raise _refused(place, complaints(error)) from error
    except (TypeError, ValueError) as error:
        raise _refused(place, str(error)) from error


def _hurried(actor_options: Any) -> Any:
    """Options of an actor whose priority Ray does not lower, unless they say otherwise.

    Engines are its children, and would give way to all else on the node.
    """
    given = {} if actor_options is None else actor_options
    runtime_env = given.get("runtime_env") or {} if isinstance(given, Mapping) else None
    if not isinstance(runtime_env, Mapping):
        return actor_options
    variables = {_NICENESS: "0", **(runtime_env.get("env_vars") or {})}
    return {**given, "runtime_env": {**runtime_env, "env_vars": variables}}


def _refused(place: str, reason: str) -> SettingError:
    return SettingError(f"arguments of the application: {place}: {' '.join(reason.split())}")


def router_config(model: ModelArguments) -> Any:
    """Serve's configuration of a model's request router; None is Serve's own choice.

    Raises:
        SettingError: there is no such router.
    """
    router = model.router
    if router.policy == "power_of_two":
        return None
    from ray.serve.config import RequestRouterConfig

    path = _POLICIES.get(router.policy, router.policy)
    kwargs = kv_router_kwargs(model) if router.policy == "kv" else router.kwargs
    try:
        return RequestRouterConfig(request_router_class=path, request_router_kwargs=kwargs)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise _refused("router.policy", f"no request router {path!r}: {error}") from error
