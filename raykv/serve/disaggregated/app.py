"""Prefill engines and decode engines of the same model, as one application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import Application
from ray.serve.metrics import Counter

from raykv.serve.app import engine_deployment, ingress_in_front
from raykv.serve.arguments import IngressArguments, parse
from raykv.serve.disaggregated.arguments import DisaggregatedArguments, DisaggregatedModelArguments
from raykv.serve.disaggregated.proxy import DisaggregatedBackend
from raykv.serve.disaggregated.requests import Course
from raykv.serve.http.ingress import ServedModel, replicas_of

REQUESTS_METRIC = "raykv_disaggregated_requests"
"""Requests by model, and by what became of their prompt."""


def build_disaggregated_app(args: Mapping[str, Any]) -> Application:
    arguments = parse(DisaggregatedArguments, args)
    models = [
        (
            model.model_dump(),
            engine_deployment(model.prefill_engines),
            engine_deployment(model.decode_engines),
        )
        for model in arguments.models
    ]
    return ingress_in_front(disaggregated_model, models, arguments.ingress)


def disaggregated_model(
    given: IngressArguments, arguments: Mapping[str, Any], prefill: Any, decode: Any
) -> ServedModel:
    """A model with prefill and decode engines.

    `arguments` are a `DisaggregatedModelArguments`.
    """
    model = parse(DisaggregatedModelArguments, arguments)
    names = model.decode_engines.served_names
    requests = Counter(
        REQUESTS_METRIC,
        description="Requests, by where their prompt was computed",
        tag_keys=("model", "course"),
    )

    def count(course: Course) -> None:
        requests.inc(1, {"model": names[0], "course": course.value})

    backend = DisaggregatedBackend(
        names[0], replicas_of(prefill, given), replicas_of(decode, given), model.handover, count
    )
    return ServedModel(names, backend)
