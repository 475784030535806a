"""Ray's own LLM applications with RayKV. All of `ray.serve.llm` and `ray.llm` that RayKV needs.

Ray's `build_openai_app` starts vLLM in its replicas. Before that a replica asks for a *backend* of
the KV connector, by the connector's name: `RayKVBackend` gives the engine its cluster and node.
Importing this module needs Ray's LLM package, and takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ray
from pydantic import ValidationError
from ray.serve import Application

from raykv.base.errors import SettingError, VersionError
from raykv.base.extras import with_extra
from raykv.serve import app, arguments, command, models
from raykv.serve.http.exchange import NESTED, is_nested_too_deeply
from raykv.serve.transfer import fill_in, with_raykv
from raykv.vllm import params, plugin
from raykv.vllm.internals.arguments import refuse_by_name

try:
    from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
    from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException
    from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
        BaseConnectorBackend,
        clamp_request_to_single_token,
    )
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.serve import llm as ray_llm
except ImportError as error:
    raise VersionError(
        f"Ray {ray.__version__}'s LLM package can't be used ({error}): {with_extra('llm')}, which "
        "brings the version that RayKV was built for; or use raykv.serve.build_app, which does not "
        "need it."
    ) from error

logger = logging.getLogger(__name__)

_BACKEND = "raykv.serve.llm:RayKVBackend"

_MOVED = {
    "vllm.entrypoints.chat_utils": "vllm.renderers.chat_utils",
    "vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args",
}
"""Where vLLM has moved what Ray imports: since 0.29, and in 0.33."""


class MovedModules(MetaPathFinder, Loader):
    """Finds vLLM's modules in their new places, when a program imports them from the old ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder.find_spec`; asked last, so a module that is there comes first."""
        del path, target
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module, which stays apart from the one that it shows."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        """Show everything that is in the new place."""
        moved = importlib.import_module(_MOVED[module.__name__])
        vars(module).update({k: v for k, v in vars(moved).items() if not k.startswith("__")})


class LoadsRayKV:
    """A value whose pickle imports this module, in whatever process reads it."""


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.append(MovedModules())


class RayKVBackend(BaseConnectorBackend):  # type: ignore[misc]
    """Gives the engine of each replica its place, and shapes requests for prefill and decode.

    They find each other's chunks by their keys: no request has an address.
    """

    def setup(self) -> None:
        """Fill in what an engine can't find out as surely as its replica; on its main thread."""
        os.environ[plugin.REPLICA_VARIABLE] = str(os.getpid())
        context = ray.get_runtime_context()
        fill_in(self.kv_transfer_config, context.gcs_address, context.get_node_id())

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """See `BaseConnectorBackend.prepare_prefill_request`: one token, all chunks stored."""
        del peer
        prefill = request.model_copy(deep=True)
        if prefill.kv_transfer_params is not None:
            prefill.kv_transfer_params = params.without_prefilled(prefill.kv_transfer_params)
        clamp_request_to_single_token(prefill)
        return prefill

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """See `BaseConnectorBackend.prepare_decode_request`: it waits for announced chunks."""
        del peer, prefill_response
        decode = request.model_copy(deep=True)
        decode.kv_transfer_params = {**(request.kv_transfer_params or {}), params.PREFILLED: True}
        return decode


class LimitedIngress(OpenAiIngress):  # type: ignore[misc]
    """Ray's ingress; answers 400 to JSON that could end an engine or that no replica could get."""


def _limited(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(self: Any, body: Any, request: Any) -> Any:
        if is_nested_too_deeply(await request.body()):
            raise OpenAIHTTPException(400, NESTED, "BadRequestError")
        return await method(self, body, request)

    return answer


for _name in ("chat", "completions", "detokenize", "embeddings", "score", "tokenize"):
    setattr(LimitedIngress, _name, _limited(getattr(OpenAiIngress, _name)))


def build_openai_app(args: Mapping[str, Any]) -> Application:
    given, settings = _apart(args)
    if settings is None:
        return ray_llm.build_openai_app(given)
    try:
        serving = ray_llm.LLMServingArgs.model_validate(given)
    except ValidationError as error:
        raise SettingError(f"arguments of ray.serve.llm: {arguments.complaints(error)}") from error
    configs = [_with_raykv(config, settings) for config in serving.llm_configs]
    register()
    return ray_llm.build_openai_app({**given, "llm_configs": configs})


def build_pd_openai_app(args: Mapping[str, Any]) -> Application:
    given, settings = _apart(args)
    if settings is None:
        return ray_llm.build_pd_openai_app(given)
    for name in ("prefill_config", "decode_config"):
        given[name] = _with_raykv(_config(name, given.get(name)), settings)
    register()
    try:
        return ray_llm.build_pd_openai_app(given)
    except ValidationError as error:
        raise SettingError(f"arguments of ray.serve.llm: {arguments.complaints(error)}") from error


def _apart(args: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Ray's arguments, and RayKV's settings."""
    given = dict(args)
    settings = given.pop("raykv", {})
    if not isinstance(settings, Mapping | None):
        raise SettingError(f"raykv must be a mapping of settings, not {settings!r}")
    if settings is not None and not RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING:
        given.setdefault("ingress_cls_config", {"ingress_cls": LimitedIngress})
    return given, settings


def _config(name: str, given: Any) -> Any:
    """An `LLMConfig`, from itself, its arguments, or the file that they are in."""
    if isinstance(given, ray_llm.LLMConfig):
        return given
    if given is None:
        raise SettingError(f"{name} is missing: the LLMConfig of those engines")
    try:
        if isinstance(given, str):
            return ray_llm.LLMConfig.from_file(given)
        return ray_llm.LLMConfig.model_validate(given)
    except ValidationError as error:
        raise SettingError(f"{name}: {arguments.complaints(error)}") from error
    except OSError as error:
        raise SettingError(f"{name}: {error}") from error


def register() -> None:
    """Make the backend known in the whole cluster; at once, or as soon as Ray is connected.

    Ray's registry refuses a name twice, and remembers those of a cluster that was left. A replica
    that looks for the name in between goes on without a backend: its engine finds its node itself.
    """
    if KVConnectorBackendFactory.is_registered(command.CONNECTOR):
        KVConnectorBackendFactory.unregister_backend(command.CONNECTOR)
    KVConnectorBackendFactory.register_backend(command.CONNECTOR, _BACKEND)


def _with_raykv(config: Any, settings: Mapping[str, Any]) -> Any:
    """A copy of an `LLMConfig` whose engine uses RayKV."""
    whose = f"model {config.model_id!r}"
    transfer = with_raykv(config.engine_kwargs.get("kv_transfer_config"), settings, whose)
    try:
        refuse_by_name(config.engine_kwargs)
    except SettingError as error:
        raise SettingError(f"{whose}: {error}") from error
    copied = config.model_copy(deep=True)
    loading = copied.model_loading_config
    source = loading.model_source or loading.model_id
    if source == models.SMALL_MODEL:
        # Of this host: a trial has no other.
        loading.model_source = str(models.smollm2(progress=logger.info))
    elif isinstance(source, str):
        app.refuse_missing(source, whose)
    details = {"enable_prompt_tokens_details": True}
    copied.update_engine_kwargs(
        **{**details, **config.engine_kwargs, "kv_transfer_config": transfer}
    )
    try:
        # Of a copy: the replicas make their own.
        copied.model_copy(deep=True).get_engine_config()
    except (TypeError, ValueError) as error:
        raise SettingError(f"{whose}: engine_kwargs: {error}") from error
    copied.experimental_configs["raykv"] = LoadsRayKV()
    return copied
