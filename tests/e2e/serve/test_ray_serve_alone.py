"""One engine in Ray Serve without a prefix cache of its own: what is found again is RayKV's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from tests.fixtures.ray_serve import CACHED, TEXT, Served, cached, serving, stored
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.versions]


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    def change(args: dict[str, Any]) -> None:
        model = args["models"][0]
        args["models"] = [model]
        model["deployment"]["num_replicas"] = 1
        model["engine_args"]["enable_prefix_caching"] = False

    with serving(cluster, tmp_path_factory.mktemp("models"), change) as running:
        yield running


def test_prompt_is_loaded_by_the_next_request_and_streamed_with_the_same_tokens(
    served: Served,
) -> None:
    first = stored(served, "general", TEXT)
    assert cached(first) == 0
    second = served.complete("general", TEXT)
    assert cached(second) >= CACHED
    streamed = [
        choice.text
        for event in served.complete("general", TEXT, stream=True)
        for choice in event.choices
    ]
    assert first.choices[0].text == second.choices[0].text == "".join(streamed)
    # The page of all replicas is up to a second old.
    wait_until(
        lambda: served.total("vllm:external_prefix_cache_hits_total") == 2 * cached(second),
        20.0,
        "the metrics have both loads",
    )
