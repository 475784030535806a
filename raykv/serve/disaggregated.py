"""Prefill engines and decode engines of the same model, as one application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.metrics import Counter

from raykv.serve.app import INGRESS_OPTIONS, engine_deployment
from raykv.serve.arguments import parse
from raykv.serve.disaggregated_arguments import (
    DisaggregatedArguments,
    DisaggregatedModelArguments,
    HandoverArguments,
)
from raykv.serve.disaggregated_proxy import DisaggregatedBackend
from raykv.serve.disaggregated_requests import Course
from raykv.serve.http import AsgiApp
from raykv.serve.ingress import Ingress, ReplicaBackend, ServedModel

REQUESTS_METRIC = "raykv_disaggregated_requests"
"""Requests by model, and by what became of their prompt."""


def build_disaggregated_app(args: Mapping[str, Any]) -> Application:
    """See `raykv.serve.build_disaggregated_app`."""
    arguments = parse(DisaggregatedArguments, args)
    ingress = arguments.ingress
    deployment = serve.deployment(serve.ingress()(DisaggregatedIngressReplica)).options(
        **{"name": "ingress", **INGRESS_OPTIONS, **ingress.deployment}
    )
    return deployment.bind(
        [engine_deployment(model.prefill_engines) for model in arguments.models],
        [engine_deployment(model.decode_engines) for model in arguments.models],
        [model.model_dump() for model in arguments.models],
        ingress.max_body_bytes,
        ingress.attempts,
    )


class DisaggregatedIngressReplica:
    """The ingress in a Serve deployment, in front of prefill and decode engines of each model."""

    def __init__(
        self,
        prefill: Sequence[Any],
        decode: Sequence[Any],
        models: Sequence[Mapping[str, Any]],
        max_body: int,
        attempts: int,
    ) -> None:
        self._requests = Counter(
            REQUESTS_METRIC,
            description="Requests, by where their prompt was computed",
            tag_keys=("model", "course"),
        )
        served = [
            self._served(parse(DisaggregatedModelArguments, model), *handles)
            for model, *handles in zip(models, prefill, decode, strict=True)
        ]
        self._ingress = Ingress(served, max_body, attempts)

    def _served(self, model: DisaggregatedModelArguments, prefill: Any, decode: Any) -> ServedModel:
        names = model.decode_engines.served_names
        rules: HandoverArguments = model.handover

        def count(course: Course) -> None:
            self._requests.inc(1, {"model": names[0], "course": course.value})

        backend = DisaggregatedBackend(
            names[0],
            ReplicaBackend(prefill.options(stream=True)),
            ReplicaBackend(decode.options(stream=True)),
            rules.handover,
            rules.prefill_deadline_s,
            count,
        )
        return ServedModel(names, backend)

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """The application; Serve asks for it once."""
        return self._ingress
