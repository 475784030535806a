"""Arguments of `build_disaggregated_app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from raykv.serve import arguments
from raykv.serve.disaggregated.requests import Handover

PREFILL_SETTINGS: Mapping[str, Any] = {"stop_unused_stores": False, "client_hints": "pin"}
"""A prefill engine stores for others, however little it loads itself, and pins what it has stored.
Its requests come from the proxy, which passes on no wishes of clients."""

_BYTES_DEPEND_ON = frozenset(
    {
        "attention_backend",
        "block_size",
        "code_revision",
        "decode_context_parallel_size",
        "dtype",
        "hf_overrides",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "limit_mm_per_prompt",
        "load_format",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "model",
        "model_impl",
        "pipeline_parallel_size",
        "prefix_caching_hash_algo",
        "quantization",
        "quantization_config",
        "revision",
        "served_model_name",
        "speculative_config",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)
_SETTINGS_BYTES_DEPEND_ON = frozenset({"blocks_per_chunk", "weights_version"})


class EnginesArguments(arguments.Strict):
    """What only the prefill engines, or only the decode engines, have."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    raykv: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    """Options of the Serve deployment; `ray_actor_options` say on which nodes it runs."""
    router: arguments.RouterArguments = Field(default_factory=arguments.RouterArguments)


class DisaggregatedModelArguments(arguments.Strict):
    """A model, its prefill engines and its decode engines."""

    model: str
    name: arguments.Name | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    raykv: dict[str, Any] = Field(default_factory=dict)
    """Settings of RayKV for all of its engines."""
    prefill: EnginesArguments = Field(default_factory=EnginesArguments)
    decode: EnginesArguments = Field(default_factory=EnginesArguments)
    handover: Handover = Field(default_factory=Handover)

    @property
    def prefill_engines(self) -> arguments.ModelArguments:
        """The prefill engines as a model of its own."""
        return self._engines("prefill", self.prefill, PREFILL_SETTINGS)

    @property
    def decode_engines(self) -> arguments.ModelArguments:
        """The decode engines as a model of its own."""
        return self._engines("decode", self.decode, {})

    def _engines(
        self, kind: str, own: EnginesArguments, settings: Mapping[str, Any]
    ) -> arguments.ModelArguments:
        base = arguments.ModelArguments(model=self.model, name=self.name).deployment_name
        return arguments.ModelArguments(
            model=self.model,
            name=f"{base}-{kind}",
            engine_args={**self.engine_args, **own.engine_args},
            raykv={**self.raykv, **settings, **own.raykv},
            deployment=own.deployment,
            router=own.router,
        )

    @model_validator(mode="after")
    def _share_bytes(self) -> DisaggregatedModelArguments:
        for kind, own in (("prefill", self.prefill), ("decode", self.decode)):
            wrong = sorted(_BYTES_DEPEND_ON & own.engine_args.keys())
            wrong += sorted(_SETTINGS_BYTES_DEPEND_ON & own.raykv.keys())
            if wrong:
                raise ValueError(
                    f"{kind} engines can't have their own {', '.join(wrong)}: KV that differs in "
                    "it can't be shared; set it once for all engines of the model"
                )
        # Errors in either are reported now, not when the first replica starts.
        assert self.prefill_engines.deployment_name != self.decode_engines.deployment_name
        return self


class DisaggregatedArguments(arguments.ApplicationArguments):
    """For `build_disaggregated_app`: `models`, or one model's arguments beside `ingress`."""

    models: list[DisaggregatedModelArguments] = Field(min_length=1)

    @property
    def _named(self) -> list[arguments.ModelArguments]:
        return [model.decode_engines for model in self.models]
