"""What an operator says of the ingress holds for prefill and decode engines too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from raykv.base.errors import SettingError
from raykv.serve import build_disaggregated_app
from raykv.serve.arguments import IngressArguments, parse
from raykv.serve.disaggregated.app import disaggregated_model
from raykv.serve.disaggregated.arguments import DisaggregatedModelArguments
from raykv.serve.http.ingress import IngressReplica
from tests.fixtures.asgi import Client
from tests.fixtures.serve_handle import Handle, Pieces

SHORT = json.dumps({"model": "m", "prompt": "who?"}).encode()


def ask(client: Client, **ingress: Any) -> Client:
    """Of an application whose replicas take nothing."""
    given = parse(IngressArguments, ingress).model_dump()
    model = parse(DisaggregatedModelArguments, {"model": "m"}).model_dump()
    engines = [(model, Handle(Pieces()), Handle(Pieces()))]
    replica = IngressReplica(disaggregated_model, engines, given)

    async def main() -> None:
        app = await replica.__serve_build_asgi_app__()
        await asyncio.wait_for(client.ask(app), 10)

    asyncio.run(main())
    return client


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [("replica_wait_s", 0.05, 503), ("max_body_bytes", 10, 413), ("max_held_bytes", 10, 503)],
)
def test_arguments_of_the_ingress_have_an_effect(name: str, value: float, status: int) -> None:
    assert ask(Client(body=[SHORT]), **{name: value}).status == status


def test_wrong_option_of_the_ingress_is_named() -> None:
    ingress = {"deployment": {"num_replicsa": 2}}
    with pytest.raises(SettingError, match=r"ingress\.deployment: .*num_replicsa"):
        build_disaggregated_app({"model": "m", "ingress": ingress})
