"""Prefill engines and decode engines of the same model, as one application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application
from ray.serve.metrics import Counter

from raykv.serve.app import engine_deployment, ingress_deployment
from raykv.serve.arguments import IngressArguments, parse
from raykv.serve.disaggregated.arguments import (
    DisaggregatedArguments,
    DisaggregatedModelArguments,
    HandoverArguments,
)
from raykv.serve.disaggregated.proxy import DisaggregatedBackend
from raykv.serve.disaggregated.requests import Course
from raykv.serve.http.exchange import AsgiApp
from raykv.serve.http.ingress import ReplicaBackend, ServedModel, ingress_of, replicas_of

REQUESTS_METRIC = "raykv_disaggregated_requests"
"""Requests by model, and by what became of their prompt."""


def build_disaggregated_app(args: Mapping[str, Any]) -> Application:
    arguments = parse(DisaggregatedArguments, args)
    return ingress_deployment(DisaggregatedIngressReplica, arguments.ingress).bind(
        [engine_deployment(model.prefill_engines) for model in arguments.models],
        [engine_deployment(model.decode_engines) for model in arguments.models],
        [model.model_dump() for model in arguments.models],
        arguments.ingress.model_dump(),
    )


class DisaggregatedIngressReplica:
    """The ingress in a Serve deployment, in front of prefill and decode engines of each model."""

    def __init__(
        self,
        prefill: Sequence[Any],
        decode: Sequence[Any],
        models: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> None:
        given = parse(IngressArguments, arguments)
        self._requests = Counter(
            REQUESTS_METRIC,
            description="Requests, by where their prompt was computed",
            tag_keys=("model", "course"),
        )
        served = [
            self._served(
                parse(DisaggregatedModelArguments, model), *(replicas_of(h, given) for h in handles)
            )
            for model, *handles in zip(models, prefill, decode, strict=True)
        ]
        self._ingress = ingress_of(served, given)

    def _served(
        self,
        model: DisaggregatedModelArguments,
        prefill: ReplicaBackend,
        decode: ReplicaBackend,
    ) -> ServedModel:
        names = model.decode_engines.served_names
        rules: HandoverArguments = model.handover

        def count(course: Course) -> None:
            self._requests.inc(1, {"model": names[0], "course": course.value})

        backend = DisaggregatedBackend(
            names[0],
            prefill,
            decode,
            rules.handover,
            rules.prefill_deadline_s,
            count,
        )
        return ServedModel(names, backend)

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """The application; Serve asks for it once."""
        return self._ingress
