"""vLLM with RayKV over HTTP: `raykv serve` on one machine, applications for Ray Serve.

The builders are what `import_path` of a Serve configuration names; `deploy/serve` has examples.
Importing this package loads neither Ray nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raykv.serve.command import serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application

__all__ = [
    "build_app",
    "build_disaggregated_app",
    "build_openai_app",
    "build_pd_openai_app",
    "serve",
]


def build_app(args: Mapping[str, Any]) -> Application:
    """One or several models, each with replicas of vLLM, OpenAI-compatible over HTTP.

    Args:
        args: see `raykv.serve.arguments.AppArguments`.

    Raises:
        SettingError: an argument is unknown, malformed, or contradicts another one.
    """
    from raykv.serve.app import build_app as build

    return build(args)


def build_disaggregated_app(args: Mapping[str, Any]) -> Application:
    """Prefill engines compute long prompts, decode engines answer; OpenAI-compatible over HTTP.

    Each kind may have any number of replicas, on nodes of its own. They share KV through RayKV;
    when no prefill engine answers, the decode engines compute.

    Args:
        args: see `raykv.serve.disaggregated.arguments.DisaggregatedArguments`.

    Raises:
        SettingError: an argument is unknown, malformed, or contradicts another one.
    """
    from raykv.serve.disaggregated.app import build_disaggregated_app as build

    return build(args)


def build_openai_app(args: Mapping[str, Any]) -> Application:
    """What `ray.serve.llm.build_openai_app` builds, with RayKV in every model's engine.

    Args:
        args: as Ray's builder takes them (`llm_configs`, `ingress_cls_config`,
            `ingress_deployment_config`), and `raykv`: settings for all models, `null` to serve
            without RayKV. Settings of one model go into `kv_connector_extra_config` of the
            `kv_transfer_config` in its `engine_kwargs`.

    Raises:
        SettingError: an argument or a setting is unknown or impossible, or a model asks for another
            connector.
        VersionError: Ray's LLM package is missing, or is not the one that RayKV knows.
    """
    from raykv.serve.llm import build_openai_app as build

    return build(args)


def build_pd_openai_app(args: Mapping[str, Any]) -> Application:
    """What `ray.serve.llm.build_pd_openai_app` builds, with KV handed over through RayKV.

    As Ray has it, a request fails when its prefill engine does; `build_disaggregated_app` has the
    decode engine compute then.

    Args:
        args: as Ray's builder takes them (`prefill_config`, `decode_config`, `ingress_cls_config`,
            `ingress_deployment_config`), and `raykv`, as in `build_openai_app`.

    Raises:
        SettingError: an argument or a setting is unknown or impossible, or a model asks for another
            connector.
        VersionError: Ray's LLM package is missing, or is not the one that RayKV knows.
    """
    from raykv.serve.llm import build_pd_openai_app as build

    return build(args)
